"""Writing to standard streams in any state: slow, non-blocking, broken or closed, or with a limited encoding.

Another program that shares a pipe may have made it non-blocking. Python then raises `BlockingIOError`, or loses the
rest of the text. So Unisono writes to standard streams by `write_all`, which waits for room. If nobody reads any more,
it drops the data, because output must not end a job.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any, TextIO

# The errors of a write to a stream that nobody reads any more, or ever has.
_NOBODY_READS = (errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.EIO)
_LOOK_MS = 100
# A pipe that is ready takes this many bytes without blocking.
_AT_ONCE_NBYTES = select.PIPE_BUF
# The name of the error handler that replaces characters, and its replacements.
_SIGNS = "unisono.signs"
_REPLACEMENTS = {
    "µ": "u", "→": "->", "←": "<-", "×": "x", "÷": "/", "·": "*", "∘": "o", "⊕": "+", "↓": "v", "–": "-", "−": "-",
    "…": "...", "✓": "+", "≤": "<=", "≥": ">=",
}  # fmt: skip


class StreamError(OSError):
    """A standard stream of this process cannot be written, as on a full disk."""


def write_all(descriptor: int, data: bytes, keep_waiting: Callable[[], bool] = lambda: True) -> None:
    """Write all of `data` to an open file, and wait for room. Drop it if nobody reads any more.

    Args:
        descriptor: the file, blocking or not.
        data: the bytes.
        keep_waiting: is called from time to time while there is no room. If it returns False, the rest is dropped.

    Raises:
        OSError: the file cannot take the data, as on a full disk.
    """
    rest = memoryview(data)
    room = select.poll()
    room.register(descriptor, select.POLLOUT)
    while rest:
        while not room.poll(0):
            if not keep_waiting():
                return
            room.poll(_LOOK_MS)
        try:
            rest = rest[os.write(descriptor, rest[:_AT_ONCE_NBYTES]) :]
        except BlockingIOError:  # Another process has filled the pipe.
            continue
        except OSError as error:
            if error.errno in _NOBODY_READS:
                return
            raise


def write(stream: TextIO | None, text: str, keep_waiting: Callable[[], bool] = lambda: True) -> None:
    """Write `text` to a stream of the program, after the text in its buffer. It raises no error.

    Characters that the encoding lacks are replaced. If the stream is closed or cannot be written, the text is dropped.

    Args:
        stream: ``sys.stdout`` or ``sys.stderr``, which the program may have replaced or closed.
        text: the text, with its line ends.
        keep_waiting: as in `write_all`.
    """
    with contextlib.suppress(OSError, ValueError):
        descriptor = _descriptor_of(stream)
        if isinstance(stream, io.TextIOWrapper) and descriptor is not None:
            if _flushed(stream, descriptor, keep_waiting):
                write_all(descriptor, text.encode(stream.encoding, _errors_of(stream)), keep_waiting)
        elif stream is not None:  # a stream of a notebook or a test
            encoding = getattr(stream, "encoding", None) or "utf-8"
            stream.write(text.encode(encoding, _signs()).decode(encoding, "replace"))
            stream.flush()


def protect_standard_streams() -> None:
    """Replace standard output and standard error by streams that write as `write_all` does.

    A closed stream is replaced by one that drops all data, so that no file or socket gets its descriptor.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        descriptor = _descriptor_of(stream)
        if descriptor is not None:
            stream.flush()
            setattr(sys, name, _robust(stream, descriptor))
        elif stream is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)))


def _descriptor_of(stream: TextIO | None) -> int | None:
    """Return the descriptor of a stream that writes bytes to it unchanged, or None if the stream may change them."""
    buffer = getattr(stream, "buffer", None)
    if isinstance(getattr(buffer, "raw", buffer), (io.FileIO, _RobustFile)):
        with contextlib.suppress(OSError, ValueError):
            return stream.fileno() if stream else None
    return None


def _robust(stream: io.TextIOWrapper, descriptor: int) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(_RobustFile(descriptor)),
        stream.encoding,
        _errors_of(stream),
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _RobustFile(io.RawIOBase):
    """An open file that is written by `write_all`. Closing it does not close the descriptor.

    The first write that fails raises. Later writes do nothing, because Python writes again when it ends.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._has_failed = False

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        if not self._has_failed:
            try:
                write_all(self._descriptor, bytes(data))
            except OSError as error:
                self._has_failed = True
                raise StreamError(error.errno, error.strerror) from None
        return len(data)


def _flushed(stream: TextIO, descriptor: int, keep_waiting: Callable[[], bool]) -> bool:
    """Write the buffer of the stream; return False if `keep_waiting` has returned False."""
    while True:
        try:
            stream.flush()
            return True
        except BlockingIOError:
            if not keep_waiting():
                return False
            room = select.poll()
            room.register(descriptor, select.POLLOUT)
            room.poll(_LOOK_MS)


def _errors_of(stream: TextIO) -> str:
    """Return the error handler of a stream, or ours if that handler raises."""
    return _signs() if stream.errors in {None, "strict", "surrogateescape"} else str(stream.errors)


def _signs() -> str:
    """Register the error handler that replaces characters, and return its name."""
    codecs.register_error(_SIGNS, _replaced)
    return _SIGNS


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace the first character that cannot be encoded. Undecodable bytes of file names are written unchanged."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":
        return bytes([ord(character) - 0xDC00]), error.start + 1
    return _REPLACEMENTS.get(character, "?"), error.start + 1
