"""Kernels compile for every generation of GPUs. The tests read registers and loads from the compiler's output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.cuda_on_host import ROOT
from support.sass import Instruction, disassembled, disassembler, loads_behind_stores, loads_under_way, resources

from unisono.bench.gpu_stages.speeds import variants
from unisono.dtypes import DTYPES
from unisono.errors import InternalError, TransportUnavailableError
from unisono.operations import OPERATIONS
from unisono.transports.cuda.kernels import cache, compiler
from unisono.transports.cuda.kernels.cache import built, user_cache
from unisono.transports.cuda.kernels.catalogue import (
    COPY_EXTENTS,
    MOST_SOURCES,
    VARIANTS,
    Kernel,
    dequantise,
    quantise,
    reduction,
    scaling,
)
from unisono.transports.cuda.kernels.compiler import MACHINES, Compiled, compile_kernel, fingerprint, target_for

SMALL = reduction(DTYPES["int32"], OPERATIONS["sum"], 2)


def has_nvrtc() -> bool:
    try:
        fingerprint(SMALL, "sm_90")
    except TransportUnavailableError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed: make cuda")
needs_disassembler = pytest.mark.skipif(disassembler() is None, reason="nvdisasm is not installed: make cuda")

MANY = MOST_SOURCES + 1
MOST_REGISTERS = 128  # registers per thread; 512 threads share the 65,536 registers of a multiprocessor
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
MEASURED = ("float32", "bfloat16", "float16", "float8_e4m3fn")  # by the stages `kernels` and `variants`

# Every way of loading sources, and every kind of element and operation.
REDUCTIONS = [
    *(("float32", "sum", k) for k in (1, 2, 3, 5, 8, MANY)),
    *(("bfloat16", "sum", k) for k in (2, 4, 8, MANY)),
    *(("float8_e4m3fn", "sum", k) for k in (2, 8, MANY)),
    *(("float16", "avg", 2), ("float8_e5m2", "max", 2), ("float64", "max", 2), ("int8", "prod", 2)),
    *(
        ("int64", "avg", 2),
        ("uint8", "land", 4),
        ("bool", "lor", 2),
        ("float8_e4m3fn", "lxor", 8),
        ("uint16", "bxor", 8),
    ),
    *(("complex64", "sum", 2), ("complex64", "prod", 4), ("complex128", "minloc", 3)),
]
REST = [
    COPY_EXTENTS,
    *(scaling(DTYPES[dtype]) for dtype in ("float32", "bfloat16", "complex64")),
    *(
        make(DTYPES[dtype], DTYPES[codes])
        for make in (quantise, dequantise)
        for dtype, codes in (("float32", "int8"), ("bfloat16", "float8_e4m3fn"), ("float16", "float8_e5m2"))
    ),
]


def least_loads(dtype: str, sources: int, machine: str) -> int:
    """Return the least number of loads that a thread must have in flight.

    A pack of 8-bit elements needs many registers. So the compiler combines some sources before it has loaded all. On
    machines without instructions for 8-bit floats, it loads only two packs of them at a time.
    """
    if dtype in FLOAT8 and machine == "sm_80":
        return 2
    return 3 if DTYPES[dtype].itemsize == 1 else 8


def assert_fits(log: str) -> None:
    assert "warning" not in log
    result = resources(log)
    assert result.registers <= MOST_REGISTERS
    assert result.stack_nbytes == 0
    assert result.spilled_nbytes == 0


# Each reduction for one machine, because compiling takes seconds; the rest on request.
FOR_MACHINES = [
    pytest.param(*reduction, machine, marks=[] if (first + second) % len(MACHINES) == 0 else pytest.mark.slow)
    for first, reduction in enumerate(REDUCTIONS)
    for second, machine in enumerate(MACHINES)
]


@needs_nvrtc
@needs_disassembler
@pytest.mark.parametrize(("dtype", "op", "sources", "machine"), FOR_MACHINES)
def test_gpu_reduction_loads_all_sources_before_combining(
    dtype: str, op: str, sources: int, machine: str, tmp_path: Path
) -> None:
    compiled = compile_kernel(reduction(DTYPES[dtype], OPERATIONS[op], sources), machine)
    assert_fits(compiled.log)
    instructions = disassembled(compiled.code, tmp_path)
    assert loads_under_way(instructions) >= least_loads(dtype, sources, machine)


@needs_nvrtc
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kernel", REST, ids=lambda kernel: kernel.name)
def test_other_gpu_kernels_keep_everything_in_registers(kernel: Kernel, machine: str) -> None:
    assert_fits(compile_kernel(kernel, machine).log)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("op", OPERATIONS)
def test_every_reduction_is_compiled_without_spills(op: str, machine: str) -> None:
    for dtype in DTYPES.values():
        if dtype.kind in OPERATIONS[op].kinds:
            for sources in (2, MOST_SOURCES, MANY):
                assert_fits(compile_kernel(reduction(dtype, OPERATIONS[op], sources), machine).log)


@needs_nvrtc
@needs_disassembler
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_a_reduction_keep_enough_loads_under_way(variant: str, tmp_path: Path) -> None:
    machine = MACHINES[len(variant) % len(MACHINES)]
    compiled = compile_kernel(reduction(DTYPES["float32"], OPERATIONS["avg"], 2, variant), machine)
    assert_fits(compiled.log)
    # Of small blocks there are more.
    least = least_loads("float32", 2, machine) // (2 if variant == "small blocks" else 1)
    assert loads_under_way(disassembled(compiled.code, tmp_path)) >= least


@needs_nvrtc
@pytest.mark.night
@pytest.mark.parametrize("dtype", MEASURED)
def test_kernels_that_a_run_on_a_gpu_measures_are_compiled_without_spills(dtype: str) -> None:
    measured = [reduction(DTYPES[dtype], OPERATIONS["sum"], k) for k in range(2, MOST_SOURCES + 1)]
    measured += [
        reduction(DTYPES[dtype], OPERATIONS[op], k, variant)
        for op, names in variants.OF_OPS.items()
        for variant in names
        for k in (2, MOST_SOURCES)
    ]
    for kernel in measured:
        assert_fits(compile_kernel(kernel, "sm_90").log)


@needs_nvrtc
@needs_disassembler
@pytest.mark.parametrize(("op", "sources"), [("sum", 2), ("avg", 5), ("max", 8)])
def test_gpu_reduction_of_8_bit_floats_has_loads_under_way_while_it_combines(
    op: str, sources: int, tmp_path: Path
) -> None:
    def behind_stores(variant: str | None) -> int:
        compiled = compile_kernel(reduction(DTYPES["float8_e4m3fn"], OPERATIONS[op], sources, variant), "sm_90")
        assert_fits(compiled.log)
        return loads_behind_stores(disassembled(compiled.code, tmp_path))

    assert behind_stores(None) >= max(4, sources)
    assert behind_stores("plain") == 0


@needs_nvrtc
def test_kernel_for_newer_gpus_is_compiled_to_ptx() -> None:
    text = compile_kernel(SMALL, "compute_100").code.decode()
    assert ".target sm_100" in text
    assert f".entry {SMALL.name}(" in text


@needs_nvrtc
def test_gpu_kernel_converts_8_bit_floats_by_instructions_from_sm_90_on() -> None:
    kernel = reduction(DTYPES["float8_e4m3fn"], OPERATIONS["sum"], 2)
    assert b"e4m3x2" in compile_kernel(kernel, "compute_90").code
    assert b"e4m3x2" not in compile_kernel(kernel, "compute_80").code


@needs_nvrtc
def test_kernel_that_cannot_be_compiled_raises_an_error_that_says_why() -> None:
    with pytest.raises(InternalError, match=r"the kernel wrong cannot be compiled for sm_90: wrong.cu\(1\): error"):
        compile_kernel(Kernel("wrong", "int wrong = ;"), "sm_90")


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        *(((8, 0), "sm_80"), ((8, 9), "sm_80"), ((9, 0), "sm_90"), ((10, 0), "sm_100"), ((10, 3), "sm_100")),
        *(((11, 0), "compute_100"), ((12, 0), "compute_100")),
    ],
)
def test_target_is_machine_code_of_the_gpu_generation_or_ptx(capability: tuple[int, int], target: str) -> None:
    assert target_for(capability) == target


def test_target_for_refuses_gpus_that_are_too_old() -> None:
    with pytest.raises(TransportUnavailableError, match=r"7\.5 are too old: 8\.0 is needed"):
        target_for((7, 5))


def test_error_without_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(TransportUnavailableError, match=r"NVRTC was not found .*: pip install .*\[cuda\]"):
        compile_kernel(SMALL, "sm_90")


@needs_nvrtc
def test_kernel_is_compiled_once_and_then_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a" / "cache"
    code = built(SMALL, "sm_90", folder)
    assert code.startswith(b"\x7fELF")
    assert [path.name for path in folder.iterdir()] == [f"{SMALL.name}-sm_90-{fingerprint(SMALL, 'sm_90')[:32]}.cubin"]
    monkeypatch.setattr(cache, "compile_kernel", None)  # a call of it would raise
    assert built(SMALL, "sm_90", folder) == code


@needs_nvrtc
def test_unwritable_kernel_cache_folder_is_no_error(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    assert built(SMALL, "compute_100", occupied).startswith(b"//")
    assert occupied.read_bytes() == b""


@needs_nvrtc
def test_kernel_fingerprint_changes_with_target_and_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(SMALL, "sm_90")
    assert fingerprint(SMALL, "sm_90") == before
    assert fingerprint(SMALL, "sm_100") != before
    assert fingerprint(COPY_EXTENTS, "sm_90") != before
    for path in compiler.KERNELS.glob("*.cuh"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(compiler, "KERNELS", tmp_path)
    assert fingerprint(SMALL, "sm_90") == before
    (tmp_path / "reduce.cuh").write_text("")
    assert fingerprint(SMALL, "sm_90") != before


def test_kernel_cache_lies_in_the_cache_folder_of_the_user() -> None:
    assert user_cache({"XDG_CACHE_HOME": "/elsewhere"}) == Path("/elsewhere/unisono/cuda")
    for environ in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert user_cache(environ) == Path.home() / ".cache/unisono/cuda"


def test_user_without_a_home_has_no_kernel_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", refuse)
    assert user_cache({}) is None
    monkeypatch.setattr(cache, "compile_kernel", lambda kernel, target: Compiled(b"code", ""))
    assert built(SMALL, "sm_90", None) == b"code"


@needs_nvrtc
def test_nvrtc_is_loaded_from_packages_in_any_folder_of_sys_path(tmp_path: Path) -> None:
    # Without site, as after `pip install --target`: the folder is in PYTHONPATH, and no site folder of this Python.
    program = (
        "from unisono.transports.cuda.kernels.compiler import compile_kernel, version\n"
        "from unisono.transports.cuda.kernels.catalogue import COPY_EXTENTS\n"
        "compile_kernel(COPY_EXTENTS, 'sm_90')\n"
        "print(version())"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))}
    command = [sys.executable, "-S", "-c", program]
    completed = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert completed.stdout.strip() == str(compiler.version()), completed.stderr


def test_loads_under_way_counts_loads_until_a_result_is_used() -> None:
    def load(to: int) -> Instruction:
        return Instruction("LDG.E.128", f"R{to}, desc[UR4][R2.64]")

    add = Instruction("FADD", "R20, R7, R8")
    assert loads_under_way([load(4), load(8), load(12), add, load(4)]) == 3
    assert loads_under_way([load(4), add, load(8), load(12)]) == 2
    assert loads_under_way([Instruction("LDG.E", "R4, desc[UR4][R2.64]"), add]) == 0


def test_loads_behind_stores_counts_loads_whose_results_are_used_later() -> None:
    load, store = "LDG.E.128", Instruction("STG.E.128", "desc[UR4][R40.64], R30")
    loads = [Instruction(load, "R4, desc[UR4][R2.64]"), Instruction(load, "R8, desc[UR4][R2.64]")]
    add = Instruction("FADD", "R30, R7, R31")
    assert loads_behind_stores([*loads, store]) == 2
    assert loads_behind_stores([*loads, add, store]) == 1
    assert loads_behind_stores([store, *loads]) == 0
