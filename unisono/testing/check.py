"""`check_collectives`: random calls on all ranks of a communicator, with verdicts on which all ranks agree."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import NoAlgorithmError, UsageError
from unisono.foundation import log
from unisono.testing.calls import check_case
from unisono.testing.cases import METHODS, OPS, Case, random_case
from unisono.testing.differences import CheckError
from unisono.testing.shrinking import shrunk
from unisono.testing.sources import source

_log = log.get()

SEEDS = 1 << 32
# The bytes of an error text that the ranks exchange.
_TOLD = 1000


@dataclass(frozen=True)
class Summary:
    """The number of calls that were made, all of them right.

    Attributes:
        seed: the seed of the cases. The same seed on as many ranks runs the same cases again.
        cases: the number of cases of each collective.
        refused: the number of these that named an algorithm that cannot be used here, so that nothing was sent.
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
    """Make random calls of every collective on all ranks, and compare the results with those of numpy.

    The calls cover every dtype and op, also Python functions; equal and unequal shares from none to thousands of rows;
    memory orders and misaligned memory; lists of arrays; in-place and persistent calls; calls with and without waiting;
    every algorithm and the tuner's choice; messages, and calls on objects. Cases depend only on the seed, their number,
    the number of ranks, the methods and the ops. After each case, the ranks agree on the verdict by an allreduce. When
    a case is wrong, simpler ones are tried as long as they are wrong too.

    Args:
        comm: this rank's communicator, or any object with its methods; all ranks call this at the same time.
        cases: the number of cases, or the numbers of the cases to run; the same on all ranks.
        seed: the seed, from 0 to 2^32 - 1, of which rank 0's is used; by default a new one each time.
        methods: the methods to call, for communicators that lack some; the same on all ranks.
        ops: the ops to use, the same on all ranks: names of `Op`, "premul_sum", and the Python functions "composition",
            "first_nonzero" and "maximum".
        progress: called with the number of finished cases and the number of all cases.

    Raises:
        CheckError: a result is wrong, or a call raised. Every rank raises it with the same text, which has a program
            that repeats the call. If the communicator itself has failed, each rank reports its own error.
        UsageError: `seed`, `methods` or `ops` is not valid, and nothing has been sent; or a method takes none of `ops`.

    >>> import unisono as un
    >>> summary = un.launch(lambda world: un.testing.check_collectives(world, cases=50, seed=1), 2)[0]
    >>> summary.seed, sum(summary.cases.values())
    (1, 50)
    """
    numbers = range(cases) if isinstance(cases, int) else cases
    if seed is not None and not 0 <= seed < SEEDS:
        raise UsageError(f"seed must be an integer, 0 to 2^32 - 1, not {seed!r}")
    for name, chosen, possible in (("methods", methods, METHODS), ("ops", ops, OPS)):
        if not chosen or not set(chosen) <= set(possible):
            raise UsageError(f"{name} must be some of {', '.join(possible)}; got {chosen!r}")
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
    """Make one call, and agree on the verdict; return whether the call was refused."""
    verdict = judged(comm, case)
    if verdict.wrong:
        if verdict.is_agreed and comm.rank == 0:
            _log.warning("%s: %s: %s; simpler ones are tried", what, case, verdict.wrong)
        raise _smallest(comm, case, what, verdict) from verdict.cause
    return verdict.is_refused


@dataclass(frozen=True)
class CaseVerdict:
    """The verdict on a case.

    Attributes:
        wrong: the error on the lowest rank that has one; empty if there is none.
        is_agreed: whether all ranks have the same text; False if the communicator has failed.
        is_refused: whether the named algorithm cannot be used here, so that nothing was sent.
        cause: the exception on this rank.
    """

    wrong: str
    is_agreed: bool = True
    is_refused: bool = False
    cause: Exception | None = None


def judged(comm: Any, case: Case) -> CaseVerdict:
    """Make one call on all ranks, and agree on the verdict."""
    wrong, is_refused = "", False
    cause: Exception | None = None
    try:
        check_case(comm, case)
    except NoAlgorithmError as error:
        is_refused, cause = case.algorithm is not None, error
        wrong = "" if is_refused else str(error)
    except CheckError as error:
        wrong, cause = error.message, error
    except Exception as error:  # noqa: BLE001  (any exception of a backend is a finding)
        wrong, cause = f"{type(error).__name__}: {error}", error
    wrong, is_agreed = _agreed(comm, wrong)
    return CaseVerdict(wrong, is_agreed, is_refused, cause)


def _smallest(comm: Any, case: Case, what: str, verdict: CaseVerdict) -> CheckError:
    """Return the error with the simplest case that is also wrong, searched for as long as the communicator works."""
    latest = verdict

    def is_wrong(simpler: Case, _: int) -> bool:
        nonlocal latest
        # A communicator that has failed cannot run more calls.
        if not latest.is_agreed:
            return False
        tried = judged(comm, simpler)
        if tried.wrong:
            latest = tried
        return bool(tried.wrong) and tried.is_agreed

    smallest, _ = shrunk(case, comm.size, is_wrong, sizes=())
    simpler = "" if smallest == case else f"\nThe simplest case that is also wrong: {latest.wrong}"
    program = source("check_case", smallest, comm.size)
    error = CheckError(f"{what}: {verdict.wrong}{simpler}\n\n{program}")
    error.program, error.case = program, smallest
    return error


def _agreed(comm: Any, wrong: str) -> tuple[str, bool]:
    """Return the error on the lowest rank that has one, and whether all ranks agree on it."""
    mine = f"rank {comm.rank} of {comm.size}: {wrong}"
    try:
        lowest = comm.size - int(_greatest(comm, [comm.size - comm.rank if wrong else 0])[0])
        if lowest >= comm.size:
            return "", True
        text = mine.encode()[:_TOLD] if comm.rank == lowest else b""
        lowest_text = _greatest(comm, list(text.ljust(_TOLD, b"\0")))
    except Exception as error:  # noqa: BLE001  (after a failure of the communicator, ranks cannot agree)
        return mine if wrong else f"{mine}the verdict was not agreed on: {type(error).__name__}: {error}", False
    return lowest_text.astype(np.uint8).tobytes().rstrip(b"\0").decode(errors="replace"), True


def _greatest(comm: Any, values: list[int]) -> NDArray[np.int64]:
    """Return the maximum of all ranks' `values`, by the median of three copies, so that one wrong copy does no harm."""
    copies = comm.allreduce(np.tile(np.array(values, np.int64), (3, 1)), op="max")
    median: NDArray[np.int64] = np.sort(np.asarray(copies), axis=0)[1]
    return median
