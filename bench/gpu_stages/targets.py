"""What is to be reached on a GPU, and whether the records of a run show it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

Record = dict[str, Any]

MIB = 1 << 20
GIB = 1 << 30
# Which part of the bandwidth of a copy a reduction reaches, by dtype.
FRACTIONS = {"float32": 0.95, "bfloat16": 0.95, "float16": 0.95, "float8_e4m3fn": 0.90}
LEAST_KERNEL_NBYTES = 256 * MIB
LEAST_GLOO_NBYTES = 16 * MIB
TIMES_GLOO = 10.0
TIMES_BOUND_OF_THREADS = 1.25
TIMES_BOUND_OF_PROCESSES = 2.0


class Outcome(NamedTuple):
    """A target, whether it is met (None: nothing was measured), and the worst that was found."""

    target: str
    met: bool | None
    worst: str


def outcomes(records: Sequence[Record]) -> list[Outcome]:
    """Return the outcome of each target."""
    measured = [record for record in records if "failure" not in record]
    kernels = [record for record in measured if record["kind"] == "kernel"]
    allreduces = [record for record in measured if record["kind"] == "allreduce"]
    tests = [record for record in records if record["kind"] == "test"]
    return [
        _all("tests on the GPU pass", [_verdict(test) for test in tests]),
        _all("kernels give what the definition does", [_rightness(kernel) for kernel in kernels]),
        *(_fraction(kernels, dtype) for dtype in FRACTIONS),
        _faster(kernels),
        _bound("thread-ranks", "threads", 256 * MIB, TIMES_BOUND_OF_THREADS, kernels, allreduces),
        _bound("process-ranks", "processes", GIB, TIMES_BOUND_OF_PROCESSES, kernels, allreduces),
        _gloo(allreduces),
    ]


def traffic_nbytes(ranks: int, nbytes: int) -> int:
    """Return what a two-shot allreduce moves through one memory.

    Each rank reads its share of all arrays and writes one; then it reads all shares and writes an array.
    """
    return (ranks + 1) * nbytes + 2 * ranks * nbytes


def _verdict(test: Record) -> tuple[float, bool, str]:
    failed = test["outcome"] in ("failure", "error")
    return (0.0 if failed else 1.0), not failed, f"{test['name']}: {test['said']}" if failed else "all did"


def _rightness(kernel: Record) -> tuple[float, bool, str]:
    wrong = kernel.get("wrong", "")
    return (0.0 if wrong else 1.0), not wrong, f"{_kernel(kernel)}: {wrong}" if wrong else "all did"


def _fraction(kernels: Sequence[Record], dtype: str) -> Outcome:
    least, found = FRACTIONS[dtype], []
    for ours, others in _groups(kernels):
        if ours["dtype"] == dtype and ours["nbytes"] >= LEAST_KERNEL_NBYTES and "copy" in others:
            part = ours["gbps"] / others["copy"]["gbps"]
            found.append((part, part >= least, f"{part:.3f} ({_kernel(ours)})"))
    return _all(f"{dtype} reductions reach {least:.2f} of the bandwidth of a copy", found)


def _faster(kernels: Sequence[Record]) -> Outcome:
    found = []
    for ours, others in _groups(kernels):
        for name, other in others.items():
            if name not in ("copy", "unisono") and ours["nbytes"] >= LEAST_KERNEL_NBYTES:
                times = other["ms"] / ours["ms"]
                found.append((times, times > 1, f"{times:.2f} times as fast as {name} ({_kernel(ours)})"))
    return _all("reductions are faster than torch's and CuPy's", found)


def _bound(
    who: str, placement: str, nbytes: int, most: float, kernels: Sequence[Record], allreduces: Sequence[Record]
) -> Outcome:
    copies = [kernel["gbps"] for kernel in kernels if kernel["contender"] == "copy"]
    found = []
    for record in _of(allreduces, placement, "unisono"):
        if copies and record["nbytes"] == nbytes and not record["library"].endswith("one_shot"):
            bound_us = traffic_nbytes(record["ranks"], nbytes) / max(copies) / 1e3
            times = record["median_us"] / bound_us
            found.append((-times, times <= most, f"{times:.2f} times, {record['ranks']} ranks"))
    return _all(f"{who} reduce {nbytes // MIB} MiB within {most} times the time of the bytes moved", found)


def _gloo(allreduces: Sequence[Record]) -> Outcome:
    theirs = {(r["ranks"], r["nbytes"]): r["median_us"] for r in _of(allreduces, "processes", "gloo")}
    found = []
    for record in _of(allreduces, "processes", "unisono"):
        other = theirs.get((record["ranks"], record["nbytes"]))
        if other is not None and record["nbytes"] >= LEAST_GLOO_NBYTES:
            times = other / record["median_us"]
            found.append(
                (
                    times,
                    times >= TIMES_GLOO,
                    f"{times:.1f} times, {record['ranks']} ranks, {record['nbytes'] // MIB} MiB",
                )
            )
    return _all(
        f"process-ranks are {TIMES_GLOO:.0f} times as fast as Gloo from {LEAST_GLOO_NBYTES // MIB} MiB on", found
    )


def _of(allreduces: Iterable[Record], placement: str, library: str) -> list[Record]:
    return [r for r in allreduces if r["placement"] == placement and r["library"].startswith(library)]


def _groups(kernels: Sequence[Record]) -> Iterator[tuple[Record, dict[str, Record]]]:
    """Yield our record of each case, and those of all contenders there."""
    cases: dict[tuple[Any, ...], dict[str, Record]] = {}
    for kernel in kernels:
        cases.setdefault((kernel["dtype"], kernel["k"], kernel["nbytes"]), {})[kernel["contender"]] = kernel
    for contenders in cases.values():
        if "unisono" in contenders:
            yield contenders["unisono"], contenders


def _kernel(record: Record) -> str:
    return f"{record['dtype']}, k = {record['k']}, {record['nbytes'] // MIB} MiB"


def _all(target: str, found: Sequence[tuple[float, bool, str]]) -> Outcome:
    """Return the outcome of (how good, whether good enough, what) of all cases."""
    if not found:
        return Outcome(target, None, "not measured")
    return Outcome(target, all(met for _, met, _ in found), min(found)[2])
