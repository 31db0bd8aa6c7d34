"""The targets on a GPU, and whether the records of a run meet them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

Record = dict[str, Any]

MIB = 1 << 20
GIB = 1 << 30
# By dtype, the part of a copy's bandwidth that a reduction must reach.
FRACTIONS = {"float32": 0.95, "bfloat16": 0.95, "float16": 0.95, "float8_e4m3fn": 0.90}
LEAST_KERNEL_NBYTES = 256 * MIB
LEAST_GLOO_NBYTES = 16 * MIB
TIMES_GLOO = 10.0
# Two arrays are added at the speed of the memory by every library, so ours can only be as fast.
TIMES_OTHERS = 0.98
# A variant of a kernel is kept if no other one is faster by more than what measurements differ.
TIMES_VARIANTS = 0.98
TIMES_CHAINS, FEWEST_OF_CHAIN = 1.3, 4
TIMES_BOUND_OF_THREADS = 1.25
TIMES_BOUND_OF_PROCESSES = 2.0


class JudgedTarget(NamedTuple):
    """A target, whether it is met (None if nothing was measured), and the worst case."""

    target: str
    met: bool | None
    worst: str


def outcomes(records: Sequence[Record]) -> list[JudgedTarget]:
    """Return the outcome of each target."""
    measured = [record for record in records if "failure" not in record]
    kernels = [record for record in measured if record["kind"] == "kernel"]
    variants = [record for record in measured if record["kind"] == "variant"]
    allreduces = [record for record in measured if record["kind"] == "allreduce"]
    tests = [record for record in records if record["kind"] == "test" and record["outcome"] != "skipped"]
    return [
        _all("tests on the GPU pass", [_verdict(test) for test in tests]),
        _all("kernels give the results of the definition", [_rightness(kernel) for kernel in (*kernels, *variants)]),
        *(_fraction(kernels, dtype) for dtype in FRACTIONS),
        _all("compute-sanitizer finds nothing", [_sanity(record) for record in measured if _is_sanity(record)]),
        _faster(
            f"reductions are at least {TIMES_OTHERS} times as fast as torch's and CuPy's",
            ("torch.sum", "CuPy", "torch adds"),
            2,
            TIMES_OTHERS,
            kernels,
        ),
        _faster(
            f"reductions of {FEWEST_OF_CHAIN} arrays and more are {TIMES_CHAINS} times as fast as chained additions",
            ("torch adds",),
            FEWEST_OF_CHAIN,
            TIMES_CHAINS,
            kernels,
        ),
        _all(f"kept variants are at least {TIMES_VARIANTS} times as fast as all others", list(_kept(variants))),
        _bound("thread-ranks", "threads", 256 * MIB, TIMES_BOUND_OF_THREADS, kernels, allreduces),
        _bound("process-ranks", "processes", GIB, TIMES_BOUND_OF_PROCESSES, kernels, allreduces),
        _gloo(allreduces),
        _all("training over Unisono has Gloo's losses", [_training(r) for r in measured if r["kind"] == "training"]),
    ]


def traffic_nbytes(ranks: int, nbytes: int) -> int:
    """Return the bytes that a two-shot allreduce moves through one memory.

    Each rank reads its share of all arrays and writes one share. Then it reads all shares and writes an array.
    """
    return (ranks + 1) * nbytes + 2 * ranks * nbytes


def _verdict(test: Record) -> tuple[float, bool, str]:
    failed = test["outcome"] in ("failure", "error")
    return (0.0 if failed else 1.0), not failed, f"{test['name']}: {test['said']}" if failed else "all did"


def _training(record: Record) -> tuple[float, bool, str]:
    said = f"off by {record['off']:.1e}" if "off" in record else "right" if record["right"] else "wrong"
    return (1.0 if record["right"] else 0.0) - record.get("off", 0.0), record["right"], f"{record['way']}: {said}"


def _rightness(kernel: Record) -> tuple[float, bool, str]:
    wrong = kernel.get("wrong", "")
    return (0.0 if wrong else 1.0), not wrong, f"{_kernel(kernel)}: {wrong}" if wrong else "all did"


def _fraction(kernels: Sequence[Record], dtype: str) -> JudgedTarget:
    least, cases = FRACTIONS[dtype], []
    for ours, others in _groups(kernels):
        if ours["dtype"] == dtype and ours["nbytes"] >= LEAST_KERNEL_NBYTES and "copy" in others:
            part = ours["gbps"] / others["copy"]["gbps"]
            cases.append((part, part >= least, f"{part:.3f} ({_kernel(ours)})"))
    return _all(f"{dtype} reductions reach {least:.2f} of the bandwidth of a copy", cases)


def _is_sanity(record: Record) -> bool:
    """Return whether a record has the findings of a tool, or the reason why the tool could not run."""
    return record["kind"] == "sanitizer" and (record["tool"] != "none" or bool(record["found"]))


def _sanity(record: Record) -> tuple[float, bool, str]:
    problem = record["found"]
    return (0.0 if problem else 1.0), not problem, f"{record['tool']}: {problem}" if problem else "nothing was found"


def _faster(target: str, names: Sequence[str], fewest: int, least: float, kernels: Sequence[Record]) -> JudgedTarget:
    cases = []
    for ours, others in _groups(kernels):
        if ours["nbytes"] >= LEAST_KERNEL_NBYTES and ours["k"] >= fewest:
            for name in set(names) & others.keys():
                times = others[name]["ms"] / ours["ms"]
                cases.append((times, times >= least, f"{times:.2f} times as fast as {name} ({_kernel(ours)})"))
    return _all(target, cases)


def _kept(variants: Sequence[Record]) -> Iterator[tuple[float, bool, str]]:
    """Yield the comparison of each kept variant with the fastest one of its case."""
    cases: dict[tuple[Any, ...], list[Record]] = {}
    for record in variants:
        if record["nbytes"] >= LEAST_KERNEL_NBYTES:
            cases.setdefault((record["dtype"], record["op"], record["k"], record["nbytes"]), []).append(record)
    for records in cases.values():
        fastest = max(records, key=lambda record: float(record["gbps"]))
        for kept in (record for record in records if record["kept"]):
            times = kept["gbps"] / fastest["gbps"]
            said = f"{times:.2f} times as fast as {fastest['variant']} in {fastest['waves']} waves"
            yield times, times >= TIMES_VARIANTS, f"{said} ({kept['op']}, {_kernel(kept)})"


def _bound(
    who: str, placement: str, nbytes: int, most: float, kernels: Sequence[Record], allreduces: Sequence[Record]
) -> JudgedTarget:
    copies = [kernel["gbps"] for kernel in kernels if kernel["contender"] == "copy"]
    cases = []
    for record in _of(allreduces, placement, "unisono"):
        if copies and record["nbytes"] == nbytes and not record["library"].endswith("one_shot"):
            bound_us = traffic_nbytes(record["ranks"], nbytes) / max(copies) / 1e3
            times = record.get("device_us", record["median_us"]) / bound_us
            cases.append((-times, times <= most, f"{times:.2f} times, {record['ranks']} ranks"))
    return _all(f"{who} reduce {nbytes // MIB} MiB within {most} times the time of the bytes moved", cases)


def _gloo(allreduces: Sequence[Record]) -> JudgedTarget:
    theirs = {(r["ranks"], r["nbytes"]): r["median_us"] for r in _of(allreduces, "processes", "gloo")}
    cases = []
    for record in _of(allreduces, "processes", "unisono"):
        other = theirs.get((record["ranks"], record["nbytes"]))
        if other is not None and record["nbytes"] >= LEAST_GLOO_NBYTES:
            times = other / record["median_us"]
            cases.append(
                (
                    times,
                    times >= TIMES_GLOO,
                    f"{times:.1f} times, {record['ranks']} ranks, {record['nbytes'] // MIB} MiB",
                )
            )
    return _all(
        f"process-ranks are {TIMES_GLOO:.0f} times as fast as Gloo from {LEAST_GLOO_NBYTES // MIB} MiB on", cases
    )


def _of(allreduces: Iterable[Record], placement: str, library: str) -> list[Record]:
    return [r for r in allreduces if r["placement"] == placement and r["library"].startswith(library)]


def _groups(kernels: Sequence[Record]) -> Iterator[tuple[Record, dict[str, Record]]]:
    """Yield, for each case, our record and the records of all contenders by name, ours included."""
    cases: dict[tuple[Any, ...], dict[str, Record]] = {}
    for kernel in kernels:
        cases.setdefault((kernel["dtype"], kernel["k"], kernel["nbytes"]), {})[kernel["contender"]] = kernel
    for contenders in cases.values():
        if "unisono" in contenders:
            yield contenders["unisono"], contenders


def _kernel(record: Record) -> str:
    return f"{record['dtype']}, k = {record['k']}, {record['nbytes'] // MIB} MiB"


def _all(target: str, cases: Sequence[tuple[float, bool, str]]) -> JudgedTarget:
    """Return the outcome of all cases, each given as (how good, whether good enough, description)."""
    if not cases:
        return JudgedTarget(target, None, "not measured")
    return JudgedTarget(target, all(met for _, met, _ in cases), min(cases)[2])
