"""The requests of ranks and the answers of rank 0, by which ranks agree on calls. Both travel as JSON.

JSON is used and not pickle, because unpickling runs code that the sender chooses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

# The kinds of calls whose result depends on every rank. A rank that has joined cannot take part in them.
NEEDS_EVERY_RANK = (
    *("allgather", "alltoall", "broadcast", "reducescatter", "barrier"),
    *("sparse_allreduce", "together", "broadcast_object", "allgather_object"),
)


class ReadyCall(NamedTuple):
    """A call that a rank is ready to make.

    Attributes:
        kind: the collective, or one of "sparse_allreduce", "join", "step", "together", "reducer", "broadcast_object",
            "allgather_object" and "leave". Rank 0 also answers "joined".
        name: the name under which ranks match the call.
        arrays: dtype and shape of each array of the call.
        op: the reduction, such as "avg"; "" if the call reduces nothing.
        root: the rank whose array is broadcast; -1 if there is none.
        scales: the factors before and after the reduction.
        device: the kind of device of the arrays, such as "cpu".
        splits: for an alltoall, how many rows each rank gets; empty for equal parts. For a sparse allreduce, the number
            of sparse dimensions.
        stalls_seen: how many answers about stalled names the rank had got when it asked.
    """

    kind: str
    name: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()
    op: str = ""
    root: int = -1
    scales: tuple[float, float] = (1.0, 1.0)
    device: str = "cpu"
    splits: tuple[int, ...] = ()
    stalls_seen: int = 0

    @property
    def key(self) -> str:
        """The text by which ranks match: calls of different kinds may have the same name."""
        return f"{self.kind}.{self.name}"

    def described(self) -> str:
        """Return the words for the call in errors, such as ``float32[2, 3], op avg, on cpu``."""
        facts = [f"{dtype}{list(shape)}" for dtype, shape in self.arrays]
        facts += [f"op {self.op}"] if self.op else []
        facts += [f"root {self.root}"] if self.root >= 0 else []
        facts += [f"factors {self.scales[0]:g} and {self.scales[1]:g}"] if self.scales != (1.0, 1.0) else []
        facts += [f"on {self.device}"] if self.arrays else []
        return ", ".join(facts)


class Answer(NamedTuple):
    """The answer of rank 0: all ranks make this call now, or it fails on all of them.

    Attributes:
        request: the call of a rank that asked for it; enough for a rank that has joined to take part.
        rows: for an allgather, by array the rows of each rank. For an alltoall, by rank the rows that it sends to each.
        last: for "join", the rank that joined last; for an error, the rank that it is about.
        error: the name of an error class of `errors`; "" if there is no error.
        message: the message of the error.
    """

    request: ReadyCall
    rows: tuple[tuple[int, ...], ...] = ()
    last: int = -1
    error: str = ""
    message: str = ""


def encode(records: Sequence[ReadyCall] | Sequence[Answer]) -> bytes:
    """Return records as bytes."""
    return json.dumps(records, separators=(",", ":")).encode()


def decode_requests(data: bytes) -> list[ReadyCall]:
    """Return the requests in a message."""
    return [_request(fields) for fields in json.loads(data)]


def decode_answers(data: bytes) -> list[Answer]:
    """Return the answers in a message."""
    return [
        Answer(_request(request), _tuples(rows), last, error, message)
        for request, rows, last, error, message in json.loads(data)
    ]


def _request(fields: Sequence[Any]) -> ReadyCall:
    kind, name, arrays, op, root, scales, device, splits, stalls_seen = fields
    shapes = tuple((dtype, tuple(shape)) for dtype, shape in arrays)
    return ReadyCall(kind, name, shapes, op, root, tuple(scales), device, tuple(splits), stalls_seen)


def _tuples(rows: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, rows))
