"""Random calls on all ranks of a communicator, and a verdict on which all ranks agree."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono import log
from unisono.errors import NoAlgorithmError, UsageError
from unisono.testing.calls import check_case
from unisono.testing.cases import METHODS, OPS, Case, random_case
from unisono.testing.differences import CheckError
from unisono.testing.shrinking import shrunk
from unisono.testing.sources import source

_log = log.get()

SEEDS = 1 << 32
# Bytes of what is wrong, as the ranks tell each other.
_TOLD = 1000


@dataclass(frozen=True)
class Summary:
    """What was tried, and found right.

    Attributes:
        seed: what stands for the cases: the same cases are run again with it, on as many ranks.
        cases: how many there were of each collective.
        refused: how many of these named an algorithm that cannot be used here, so that nothing was sent.
    """

    seed: int
    cases: dict[str, int]
    refused: dict[str, int]


def check_collectives(
    comm: Any,
    *,
    cases: int | Sequence[int] = 1000,
    seed: int | None = None,
    methods: Sequence[str] = METHODS,
    ops: Sequence[str] = OPS,
    progress: Callable[[int, int], object] | None = None,
) -> Summary:
    """Make random calls of every collective on all ranks, and compare what comes of them with what numpy says.

    Every dtype and operation, functions of Python too, equal and unequal shares from none to thousands of rows, memory
    orders and misaligned memory, lists, in place and not, planned, with and without waiting, by each algorithm and by
    choice; messages and calls on objects as well. Cases depend on the seed, their number, the number of ranks, the
    methods and the operations alone. After each, the ranks agree on the verdict, by an allreduce. Of the first that is
    wrong, simpler ones are tried, as long as they are wrong too.

    Args:
        comm: this rank's communicator, or anything that has its methods; all ranks call this at the same time.
        cases: how many, or the numbers of those that are wanted: the same on all ranks.
        seed: rank 0's is used, and must be 0 to 2^32 - 1; by default another one each time.
        methods: those that are called, for communicators that do not have all: the same on all ranks.
        ops: the operations that are given, likewise: the names of `Op`, "premul_sum", and, of functions of Python,
            "composition", "first_nonzero" and "maximum".
        progress: called with how many cases have been run, and how many there are.

    Raises:
        CheckError: a result is wrong, or a call raised; on every rank, with the same text, in which there is a program
            that makes the call again. Where the communicator itself has failed then, each rank says what it knows.
        UsageError: `seed`, `methods` or `ops` cannot be; nothing has been sent. Or a method can be given none of `ops`.

    >>> import unisono as un
    >>> summary = un.launch(lambda world: un.testing.check_collectives(world, cases=50, seed=1), 2)[0]
    >>> summary.seed, sum(summary.cases.values())
    (1, 50)
    """
    numbers = range(cases) if isinstance(cases, int) else cases
    if seed is not None and not 0 <= seed < SEEDS:
        raise UsageError(f"seed must be an integer, 0 to 2^32 - 1, not {seed!r}")
    for name, given, all_of_them in (("methods", methods, METHODS), ("ops", ops, OPS)):
        if not given or not set(given) <= set(all_of_them):
            raise UsageError(f"{name} must be some of {', '.join(all_of_them)}; got {given!r}")
    mine = random.SystemRandom().randrange(SEEDS) if seed is None else seed
    agreed = int(_greatest(comm, [mine if comm.rank == 0 else 0])[0])
    tried: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for done, number in enumerate(numbers, 1):
        case = random_case(agreed, number, comm.size, methods, ops)
        tried[case.collective] += 1
        refused[case.collective] += _judge(comm, case, f"case {number} of seed {agreed}")
        if progress is not None:
            progress(done, len(numbers))
    return Summary(agreed, dict(sorted(tried.items())), dict(sorted(refused.items())))


def _judge(comm: Any, case: Case, what: str) -> bool:
    """Make one call and agree on the verdict; return whether it was refused."""
    verdict = judged(comm, case)
    if verdict.wrong:
        if verdict.is_agreed and comm.rank == 0:
            _log.warning("%s: %s: %s; simpler ones are tried", what, case, verdict.wrong)
        raise _smallest(comm, case, what, verdict) from verdict.cause
    return verdict.is_refused


@dataclass(frozen=True)
class Verdict:
    """What came of a case.

    Attributes:
        wrong: what is wrong, on the lowest rank on which something is; nothing if nothing is.
        is_agreed: whether all ranks have the same text; not if the communicator has failed.
        is_refused: whether the algorithm that is named cannot be used here, so that nothing was sent.
        cause: what was raised on this rank.
    """

    wrong: str
    is_agreed: bool = True
    is_refused: bool = False
    cause: Exception | None = None


def judged(comm: Any, case: Case) -> Verdict:
    """Make one call on all ranks, and agree on what came of it."""
    wrong, is_refused = "", False
    cause: Exception | None = None
    try:
        check_case(comm, case)
    except NoAlgorithmError as error:
        is_refused, cause = case.algorithm is not None, error
        wrong = "" if is_refused else str(error)
    except CheckError as error:
        wrong, cause = error.message, error
    except Exception as error:  # noqa: BLE001  (whatever a backend raises is what is wrong with it)
        wrong, cause = f"{type(error).__name__}: {error}", error
    wrong, is_agreed = _agreed(comm, wrong)
    return Verdict(wrong, is_agreed, is_refused, cause)


def _smallest(comm: Any, case: Case, what: str, verdict: Verdict) -> CheckError:
    """Return the error that tells of the simplest case that is wrong too, looked for while the communicator works."""
    found = verdict

    def is_wrong(simpler: Case, _: int) -> bool:
        nonlocal found
        # With a communicator that has failed, nothing more can be learnt.
        if not found.is_agreed:
            return False
        tried = judged(comm, simpler)
        if tried.wrong:
            found = tried
        return bool(tried.wrong) and tried.is_agreed

    smallest, _ = shrunk(case, comm.size, is_wrong, sizes=())
    simpler = "" if smallest == case else f"\nThe simplest that is wrong too: {found.wrong}"
    program = source("check_case", smallest, comm.size)
    error = CheckError(f"{what}: {verdict.wrong}{simpler}\n\n{program}")
    error.program, error.case = program, smallest
    return error


def _agreed(comm: Any, wrong: str) -> tuple[str, bool]:
    """Return what is wrong on the lowest rank on which something is, and whether all ranks have agreed on that."""
    mine = f"rank {comm.rank} of {comm.size}: {wrong}"
    try:
        lowest = comm.size - int(_greatest(comm, [comm.size - comm.rank if wrong else 0])[0])
        if lowest >= comm.size:
            return "", True
        text = mine.encode()[:_TOLD] if comm.rank == lowest else b""
        told = _greatest(comm, list(text.ljust(_TOLD, b"\0")))
    except Exception as error:  # noqa: BLE001  (a communicator that has failed can agree on nothing)
        return mine if wrong else f"{mine}the verdict was not agreed on: {type(error).__name__}: {error}", False
    return told.astype(np.uint8).tobytes().rstrip(b"\0").decode(errors="replace"), True


def _greatest(comm: Any, values: list[int]) -> NDArray[np.int64]:
    """Return the greatest of all ranks' `values`, from three copies of them: what is wrong in one is outvoted."""
    copies = comm.allreduce(np.tile(np.array(values, np.int64), (3, 1)), op="max")
    median: NDArray[np.int64] = np.sort(np.asarray(copies), axis=0)[1]
    return median
