"""`Coordinator`: the table of names that rank 0 keeps. It decides which calls are due, and in which order.

It does no I/O and knows no clock, so it can be tested without ranks. `negotiation` feeds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from unisono.compat.horovod.requests import NEEDS_EVERY_RANK, Answer, ReadyCall


@dataclass
class _PendingName:
    """A name for which some ranks have requested a call.

    Attributes:
        since_s: when the first rank asked.
        requests: the requests by rank.
        is_reported: whether a log line has named the missing ranks.
    """

    since_s: float
    requests: dict[int, ReadyCall] = field(default_factory=dict)
    is_reported: bool = False


class Coordinator:
    """The requests of all ranks of a process set that have not been answered.

    Args:
        world_ranks: for each rank of the process set, its rank in the job, by which errors name it.
    """

    def __init__(self, world_ranks: tuple[int, ...]) -> None:
        self._world_ranks = world_ranks
        self._asked: dict[str, _PendingName] = {}
        self._joined: list[int] = []
        self._stalls = 0
        # By key of a stalled name, the number of the stall and the ranks whose requests had not arrived.
        self._overdue: dict[str, tuple[int, set[int]]] = {}
        self.has_ended = False

    def add(self, rank: int, requests: Iterable[ReadyCall], now_s: float) -> list[Answer]:
        """Add requests of a rank, and return the answers that have become due, in the order of the calls.

        A rank that leaves ends everything: all names without an answer fail, and the last answer is of the kind
        "leave".
        """
        answers: list[Answer] = []
        for request in requests:
            if self.has_ended:
                break
            if request.kind == "leave":
                answers += self._end(rank)
            elif request.kind == "join":
                answers += self._join(rank)
            elif request.kind == "step":
                answers += [Answer(request)] * bool(self._joined)
            elif not self._is_outdated(rank, request):
                asked = self._asked.setdefault(request.key, _PendingName(now_s))
                asked.requests[rank] = request
                if self._is_due(asked):
                    answers.append(self._answer(request.key))
        return answers

    def waits(self) -> bool:
        """Return whether a name that ranks have requested has no answer yet."""
        return bool(self._asked)

    def slow(self, now_s: float, limit_s: float) -> list[str]:
        """Return, once for each name, a text about a name that some ranks have not used for `limit_s` seconds."""
        texts = []
        for asked in self._asked.values():
            if not asked.is_reported and now_s - asked.since_s >= limit_s:
                asked.is_reported = True
                texts.append(self._stall_text(asked, limit_s))
        return texts

    def stalled(self, now_s: float, limit_s: float) -> list[Answer]:
        """Return an error for each name that some ranks have not used for `limit_s` seconds, and forget the name."""
        late = [key for key, asked in self._asked.items() if now_s - asked.since_s >= limit_s]
        answers = []
        for key in late:
            asked = self._asked.pop(key)
            first = next(iter(asked.requests.values()))
            missing = self._missing(asked)
            self._stalls += 1
            self._overdue[key] = self._stalls, set(missing)
            answers.append(Answer(first, (), missing[0], "StalledError", self._stall_text(asked, limit_s)))
        return answers

    def _is_outdated(self, rank: int, request: ReadyCall) -> bool:
        """Return whether a rank has sent a request before it got the error about this name, which ends its call too."""
        number, ranks = self._overdue.get(request.key, (0, set()))
        if rank not in ranks:
            return False
        ranks.discard(rank)
        return request.stalls_seen < number

    def _join(self, rank: int) -> list[Answer]:
        self._joined.append(rank)
        answers = [self._answer(key) for key, asked in list(self._asked.items()) if self._is_due(asked)]
        if len(self._joined) < len(self._world_ranks):
            return [*answers, Answer(ReadyCall("joined", ""), (), rank)]
        self._joined.clear()
        return [*answers, Answer(ReadyCall("join", ""), (), rank)]

    def _end(self, rank: int) -> list[Answer]:
        self.has_ended = True
        text = f"rank {self._world_ranks[rank]} has shut down or ended"
        answers = [
            Answer(next(iter(asked.requests.values())), (), rank, "ShutDownError", f"{key!r} was not made: {text}")
            for key, asked in self._asked.items()
        ]
        self._asked.clear()
        return [*answers, Answer(ReadyCall("leave", ""), (), rank, "", text)]

    def _is_due(self, asked: _PendingName) -> bool:
        return not self._missing(asked)

    def _missing(self, asked: _PendingName) -> list[int]:
        present = asked.requests.keys() | set(self._joined)
        return [rank for rank in range(len(self._world_ranks)) if rank not in present]

    def _answer(self, key: str) -> Answer:
        requests = self._asked.pop(key).requests
        first = requests[min(requests)]
        if self._joined and first.kind in NEEDS_EVERY_RANK:
            joined = self._named(self._joined)
            text = f"{key!r} needs every rank, and {joined} called join(): only allreduce works after it"
            return Answer(first, (), self._joined[0], "NameMismatchError", text)
        if self._joined and first.op == "adasum":
            text = f"{key!r} is an Adasum, which needs every rank, and {self._named(self._joined)} called join()"
            return Answer(first, (), self._joined[0], "NameMismatchError", text)
        if difference := self._difference(key, requests):
            return difference
        return Answer(first, _rows(first.kind, requests))

    def _difference(self, key: str, requests: Mapping[int, ReadyCall]) -> Answer | None:
        """Return the error if the requests of ranks for one name do not fit together."""
        first_rank = min(requests)
        first = requests[first_rank]
        for rank, request in requests.items():
            if _comparable(request) != _comparable(first):
                here, there = (f"rank {self._world_ranks[each]}" for each in (rank, first_rank))
                text = f"{key!r} is {request.described()} on {here}, and {first.described()} on {there}"
                return Answer(first, (), rank, "NameMismatchError", f"{text}: use one name for one array on all ranks")
        return None

    def _stall_text(self, asked: _PendingName, limit_s: float) -> str:
        key = next(iter(asked.requests.values())).key
        here, missing = self._named(asked.requests), self._named(self._missing(asked))
        return (
            f"{key!r} was called by {here} {limit_s:g} s ago, and not by {missing}: all ranks must use the same names"
        )

    def _named(self, ranks: Iterable[int]) -> str:
        numbers = sorted(self._world_ranks[rank] for rank in ranks)
        return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _comparable(request: ReadyCall) -> ReadyCall:
    """Return the part of a request that must be the same on all ranks."""
    if request.kind in ("allgather", "alltoall"):  # their arrays may have different numbers of rows
        arrays = tuple((dtype, (0, *shape[1:])) for dtype, shape in request.arrays)
        return request._replace(arrays=arrays, splits=(), stalls_seen=0)
    return request._replace(stalls_seen=0)


def _rows(kind: str, requests: Mapping[int, ReadyCall]) -> tuple[tuple[int, ...], ...]:
    in_order = [requests[rank] for rank in sorted(requests)]
    if kind == "allgather":
        return tuple(
            tuple(request.arrays[index][1][0] for request in in_order) for index in range(len(in_order[0].arrays))
        )
    return tuple(request.splits for request in in_order) if kind == "alltoall" else ()
