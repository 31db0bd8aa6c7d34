"""The root cause of a failed job: which failed rank made the other ranks fail.

These are pure functions of how the ranks ended and of their last errors. When one rank fails, the others fail a moment
later because it is missing, and they often end before it. Their errors say that a peer has been lost. The root cause is
a rank that was killed, or whose error says something else. If the program uses torch.distributed, the errors are of
torch, and each line of a traceback begins with ``[rank1]: ``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.errors import AbortedError, PeerLostError, RendezvousError
from unisono.foundation.printable import printable
from unisono.launchers.process import Exit

CONSEQUENCES = (PeerLostError, AbortedError, RendezvousError)
_CONSEQUENCE_NAMES = frozenset(f"{error.__module__}.{error.__qualname__}" for error in CONSEQUENCES)

# The first words of errors of torch that are consequences of another rank's error: by our backend, and by Gloo.
_CONSEQUENCES_OF_TORCH = re.compile(
    rf"unisono: .*?\b({'|'.join(error.__name__ for error in CONSEQUENCES)}): |.*Connection (closed|reset) by peer \["
)

# The first lines of an uncaught exception on stderr. A syntax error in the script itself has no "Traceback" line.
_TRACEBACK_STARTS = (b"Traceback (most recent call last):", b"  + Exception Group Traceback", b'  File "')
_PREFIX_OF_TORCH = re.compile(rb"^\[rank\d+\]: ")
_EXCEPTION_LINE = re.compile(rb"^(?:  \| )?([A-Za-z_][\w.]*)(?::\s*(.*))?$")


@dataclass(frozen=True, slots=True)
class LastError:
    """The exception at the end of a traceback on stderr.

    Attributes:
        kind: its class, as it is printed.
        message: the first line of its message.
    """

    kind: str
    message: str = ""

    def __str__(self) -> str:
        """Return ``ValueError: the first line of the message``."""
        name = self.kind.rpartition(".")[2]
        return f"{name}: {self.message}" if self.message else name


def starts_traceback(line: bytes) -> bool:
    """Return whether a line of stderr is the first of a traceback."""
    return _plain(line).startswith(_TRACEBACK_STARTS)


def last_error(lines: Sequence[bytes]) -> LastError | None:
    """Return the exception of the last traceback in `lines` of stderr, or None if there is none."""
    plain = [_plain(line) for line in lines]
    starts = [at for at, line in enumerate(plain) if line.startswith(_TRACEBACK_STARTS[:2])]
    for line in plain[starts[-1] + 1 :] if starts else plain:
        match = _EXCEPTION_LINE.match(line.rstrip())
        if match:
            kind, message = (printable(part.decode(errors="replace")) for part in (match[1], match[2] or b""))
            return LastError(kind, message)
    return None


def root_cause(exits: Sequence[Exit], errors: Mapping[int, LastError]) -> Exit | None:
    """Return the failed rank that made the others fail, or None if none failed.

    Args:
        exits: how the ranks ended, in the order of their ends.
        errors: by rank, the exception that ended it. A rank that wrote no traceback has none.
    """
    failed = [ended for ended in exits if ended.code != 0]
    causes = [ended for ended in failed if not ended.stopped and not _is_consequence(errors.get(ended.rank))]
    not_stopped = [ended for ended in failed if not ended.stopped]
    return next(iter(causes or not_stopped or failed), None)


def _is_consequence(error: LastError | None) -> bool:
    return error is not None and (
        error.kind in _CONSEQUENCE_NAMES or _CONSEQUENCES_OF_TORCH.match(error.message) is not None
    )


def _plain(line: bytes) -> bytes:
    return _PREFIX_OF_TORCH.sub(b"", line)
