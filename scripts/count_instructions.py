"""Count the instructions of hot paths and compare them with the record: count_instructions.py PROGRAM [--update].

Instructions are counted under valgrind, so that the count depends only on the code and not on the load of the machine.
The cost of a call is the difference between a long and a short run, divided by the difference of their calls. Counts
are recorded for each compiler and Python. They may grow by 5 %, and the count of calls from Python by 10 %. The exit
code is 1 if one has grown more.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RECORD = Path(__file__).parent.parent / "tests" / "native" / "hot_paths.json"
MOST_GROWTH = 0.05
MOST_GROWTH_FROM_PYTHON = 0.1
FEW, MANY = 100, 600
# The number of instructions that Python takes to start varies by up to 30 million.
MANY_FROM_PYTHON = 1_000_000
# A call from Python that is in the call cache, counted with the instructions of the interpreter.
PYTHON_LOOP = """
import sys, numpy as np, unisono as un
def repeat(world, times):
    x = np.ones(2, np.float32)
    for _ in range(times):
        world.allreduce(x, op="max", out=x)
repeat(un.init(), int(sys.argv[1]))
"""


def count(command: list[str]) -> int:
    """Return the number of instructions of `command`."""
    valgrind = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null", *command]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    run = subprocess.run(valgrind, check=True, capture_output=True, text=True, env=environment)
    match = re.search(r"I\s+refs:\s+([\d,]+)", run.stderr)
    if match is None:
        raise RuntimeError(f"valgrind did not say how many instructions it counted: {run.stderr}")
    return int(match[1].replace(",", ""))


def count_call(command: list[str]) -> int:
    """Return the number of instructions of each call of `command CALLS`."""
    many = MANY_FROM_PYTHON if command[0] == sys.executable else MANY
    # A first run without counting, because in a fresh clone it compiles the Python modules.
    subprocess.run([*command, str(FEW)], check=True, capture_output=True)
    return round((count([*command, str(many)]) - count([*command, str(FEW)])) / (many - FEW))


def say(line: str) -> None:
    """Write a line for the user."""
    sys.stdout.write(line + "\n")


def toolchain() -> str:
    """Return the name under which counts are recorded."""
    version = subprocess.run([os.environ.get("CXX", "c++"), "--version"], check=True, capture_output=True, text=True)
    parts = (version.stdout.splitlines()[0], " ".join(platform.libc_ver()), f"Python {platform.python_version()}")
    return "; ".join((*parts, platform.machine()))


def main() -> int:
    """Count, compare and record as the command line says; return the exit code."""
    program, *options = sys.argv[1:]
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    recorded = record.get(toolchain())
    if recorded is None and options != ["--update"]:
        say(f"skipped: nothing is recorded for {toolchain()} (make counts UPDATE=1 records it)")
        return 0
    names = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    commands = {name: [program, name] for name in names} | {"python_call": [sys.executable, "-c", PYTHON_LOOP]}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        counts = dict(zip(commands, pool.map(count_call, commands.values()), strict=True))
    if options == ["--update"]:
        record[toolchain()] = counts
        RECORD.write_text(json.dumps(record, indent=2) + "\n")
        recorded = counts
    allowed = dict.fromkeys(names, MOST_GROWTH) | {"python_call": MOST_GROWTH_FROM_PYTHON}
    grown = [name for name in counts if counts[name] > recorded.get(name, 0) * (1 + allowed[name])]
    for name, instructions in counts.items():
        note = "  GROWN (make counts UPDATE=1 accepts it)" if name in grown else ""
        say(f"{name:30} {instructions:>9,} instructions, recorded {recorded.get(name, 0):>9,}{note}")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
