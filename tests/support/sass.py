"""Facts about a compiled kernel, from the log of ptxas and from the disassembly of its machine code (SASS)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from support.deadlines import DEADLINE_S

INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<name>[\w.]+)\s*(?P<operands>[^;]*);", re.MULTILINE
)
REGISTER = re.compile(r"\bR(\d+)\b")


def disassembler() -> str | None:
    """Return the path of nvdisasm, from a wheel or else from CUDA; None if it is not installed."""
    wheels = sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob("*/bin/nvdisasm"))
    return str(wheels[-1]) if wheels else shutil.which("nvdisasm")


@dataclass(frozen=True)
class Resources:
    """The resources of a kernel that ptxas reports in its log."""

    registers: int
    stack_nbytes: int
    spilled_nbytes: int


def resources(log: str) -> Resources:
    def number(pattern: str) -> int:
        (match,) = re.findall(pattern, log)
        return int(match)

    return Resources(
        number(r"Used (\d+) registers"),
        number(r"(\d+) bytes stack frame"),
        number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
    )


@dataclass(frozen=True)
class Instruction:
    """One instruction of a GPU, without its predicate."""

    name: str
    operands: str

    @property
    def is_wide_load(self) -> bool:
        return self.name.startswith("LDG.") and ".128" in self.name

    @property
    def registers(self) -> set[int]:
        return {int(number) for number in REGISTER.findall(self.operands)}


def disassembled(cubin: bytes, folder: Path) -> list[Instruction]:
    """Return the instructions of a cubin, in their order."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [disassembler() or "nvdisasm", "-c", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    return [Instruction(match["name"], match["operands"]) for match in INSTRUCTION.finditer(text)]


def loads_under_way(instructions: list[Instruction]) -> int:
    """Return the largest number of 16-byte loads in flight at once.

    That is the length of the longest series of loads in which no instruction uses the result of an earlier load.
    """
    most, under_way, waited_for = 0, 0, set[int]()
    for instruction in instructions:
        if instruction.registers & waited_for:
            under_way, waited_for = 0, set()
        if instruction.is_wide_load:
            first = int(REGISTER.findall(instruction.operands)[0])
            waited_for |= set(range(first, first + 4))
            under_way += 1
        most = max(most, under_way)
    return most


def loads_behind_stores(instructions: list[Instruction]) -> int:
    """Return the largest number of 16-byte loads in flight while a 16-byte store is made.

    Only a thread that has loaded its next elements before has any.
    """
    most, under_way = 0, list[set[int]]()
    for instruction in instructions:
        if instruction.name.startswith("STG.") and ".128" in instruction.name:
            most = max(most, len(under_way))
        under_way = [loaded for loaded in under_way if not loaded & instruction.registers]
        if instruction.is_wide_load:
            first = int(REGISTER.findall(instruction.operands)[0])
            under_way.append(set(range(first, first + 4)))
    return most
