"""Random calls on all ranks of a communicator, and a verdict on which all ranks agree."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import NoAlgorithmError, UsageError
from unisono.testing.calls import check_case
from unisono.testing.cases import Case, random_case
from unisono.testing.differences import CheckError

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
    progress: Callable[[int, int], object] | None = None,
) -> Summary:
    """Make random calls of every collective on all ranks, and compare what comes of them with what numpy says.

    Every dtype and operation, equal and unequal shares from none to thousands of rows, memory orders and misaligned
    memory, in place and not, planned, with and without waiting, by each algorithm and by choice. Cases depend on the
    seed, their number and the number of ranks alone. After each, the ranks agree on the verdict, by an allreduce.

    Args:
        comm: this rank's communicator, or anything that has its methods; all ranks call this at the same time.
        cases: how many, or the numbers of those that are wanted: the same on all ranks.
        seed: rank 0's is used, and must be 0 to 2^32 - 1; by default another one each time.
        progress: called with how many cases have been run, and how many there are.

    Raises:
        CheckError: a result is wrong, or a call raised; on every rank, with the same text, in which there is a program
            that makes the call again. Where the communicator itself has failed then, each rank says what it knows.
        UsageError: `seed` cannot be; nothing has been sent.

    >>> import unisono as un
    >>> summary = un.launch(lambda world: un.testing.check_collectives(world, cases=50, seed=1), 2)[0]
    >>> summary.seed, sum(summary.cases.values())
    (1, 50)
    """
    numbers = range(cases) if isinstance(cases, int) else cases
    if seed is not None and not 0 <= seed < SEEDS:
        raise UsageError(f"seed must be an integer, 0 to 2^32 - 1, not {seed!r}")
    mine = random.SystemRandom().randrange(SEEDS) if seed is None else seed
    agreed = int(_greatest(comm, [mine if comm.rank == 0 else 0])[0])
    tried: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for done, number in enumerate(numbers, 1):
        case = random_case(agreed, number, comm.size)
        tried[case.collective] += 1
        refused[case.collective] += _judge(comm, case, f"case {number} of seed {agreed}")
        if progress is not None:
            progress(done, len(numbers))
    return Summary(agreed, dict(sorted(tried.items())), dict(sorted(refused.items())))


def _judge(comm: Any, case: Case, what: str) -> bool:
    """Make one call and agree on the verdict; return whether it was refused."""
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
    verdict = _verdict(comm, wrong)
    if verdict:
        told = CheckError(f"{what}: {verdict}\n\n{case.program(comm.size)}")
        told.program = case.program(comm.size)
        raise told from cause
    return is_refused


def _verdict(comm: Any, wrong: str) -> str:
    """Return what is wrong on the lowest rank on which something is; nothing if nothing is."""
    mine = f"rank {comm.rank} of {comm.size}: {wrong}"
    try:
        lowest = comm.size - int(_greatest(comm, [comm.size - comm.rank if wrong else 0])[0])
        if lowest >= comm.size:
            return ""
        text = mine.encode()[:_TOLD] if comm.rank == lowest else b""
        told = _greatest(comm, list(text.ljust(_TOLD, b"\0")))
    except Exception as error:  # noqa: BLE001  (a communicator that has failed can agree on nothing)
        return mine if wrong else f"{mine}the verdict was not agreed on: {type(error).__name__}: {error}"
    return told.astype(np.uint8).tobytes().rstrip(b"\0").decode(errors="replace")


def _greatest(comm: Any, values: list[int]) -> NDArray[np.int64]:
    """Return the greatest of all ranks' `values`, from three copies of them: what is wrong in one is outvoted."""
    copies = comm.allreduce(np.tile(np.array(values, np.int64), (3, 1)), op="max")
    median: NDArray[np.int64] = np.sort(np.asarray(copies), axis=0)[1]
    return median
