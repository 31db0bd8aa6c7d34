"""The messages by which groups of ranks open and end epochs: post, start, complete and wait (MPI-4.1, 12.5.2).

A target posts: it sends a token to each origin, which may then access its part. An origin starts: it waits for the
tokens of its targets. It completes: its operations are done, and it sends a token to each target. A target waits for
these. A rank that is in its own group sends itself nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unisono.dtypes import DTYPES
from unisono.foundation.deadlines import Deadline
from unisono.transports.contracts.executor import Executor, Operation

_BYTE = DTYPES["uint8"]
# The tags of requests and answers are below.
_POST_TAG, _COMPLETE_TAG = 16, 17


class Exposure:
    """The tokens of one window. Arguments are ranks of its communicator."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._completions: list[Operation] = []

    def post(self, origins: Sequence[int], limit_s: float) -> None:
        """Tell the origins that they may access this rank's part."""
        self._completions = [self._token_from(rank, _COMPLETE_TAG) for rank in self._others(origins)]
        self._send(origins, _POST_TAG, limit_s)

    def await_posts(self, targets: Sequence[int], limit_s: float) -> None:
        """Wait until all targets have posted."""
        deadline = Deadline(limit_s)
        for token in [self._token_from(rank, _POST_TAG) for rank in self._others(targets)]:
            token.wait(deadline.remaining_s())

    def complete(self, targets: Sequence[int], limit_s: float) -> None:
        """Tell the targets that this rank's operations on them are done, and wait until they have received it.

        So a target that then calls the origin's next barrier does not miss it in `have_completed`.
        """
        self._send(targets, _COMPLETE_TAG, limit_s, synchronous=True)

    def await_completions(self, limit_s: float) -> None:
        """Wait until all origins of the last `post` have completed."""
        deadline = Deadline(limit_s)
        for token in self._completions:
            token.wait(deadline.remaining_s())
        self._completions = []

    def have_completed(self) -> bool:
        """Return whether all origins of the last `post` have completed; raises the error of a failed job."""
        return all(token.poll() for token in self._completions)

    def _others(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank != self._executor.rank]

    def _token_from(self, rank: int, tag: int) -> Operation:
        return self._executor.recv(np.empty(1, np.uint8), _BYTE, rank, tag)

    def _send(self, ranks: Sequence[int], tag: int, limit_s: float, *, synchronous: bool = False) -> None:
        deadline = Deadline(limit_s)
        token = np.zeros(1, np.uint8)
        others = self._others(ranks)
        for sending in [self._executor.send(token, _BYTE, rank, tag, synchronous=synchronous) for rank in others]:
            sending.wait(deadline.remaining_s())
