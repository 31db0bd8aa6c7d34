"""What the ranks write, merged line by line: labelled, never torn, and with tracebacks held back.

A rank that fails writes its traceback and ends. So what follows the beginning of a traceback on stderr is held back
until the rank has ended, when the launcher knows which rank's traceback matters. A rank that lives on has only
reported an exception: after `HOLD_S` seconds that is output like any other. Once a rank has failed, the others end
soon, by themselves or by the launcher's signals, and their tracebacks are held back for as long as that takes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from unisono.launchers.process import Exit
from unisono.launchers.root_cause import starts_traceback

# A process that has imported torch may take seconds from its traceback to its end, on a busy machine.
HOLD_S = 10.0
LONGEST_LINE_NBYTES = 1 << 20

# A line ends at "\n", or at "\r" as progress bars use it; "\r\n" is one end.
_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")

Write = Callable[[int, str, bytes], None]


class Lines:
    """Cuts a stream of bytes into whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, each with its end; b"" completes the last one."""
        self._rest += data
        start = 0
        found = []
        for match in _END.finditer(self._rest):
            line, start = self._rest[start : match.end()], match.end()
            if line != b"\r":  # Progress bars also begin with one.
                found.append(line)
        self._rest = self._rest[start:]
        if self._rest and (not data or len(self._rest) > LONGEST_LINE_NBYTES):
            found.append(self._rest.rstrip(b"\r") + b"\n")
            self._rest = b""
        return found


@dataclass(slots=True)
class _Held:
    since: float
    lines: list[bytes] = field(default_factory=list)


class MergedOutput:
    """An observer of a job that writes the ranks' lines as they come and holds tracebacks back."""

    def __init__(self, write: Write, *, hold: bool) -> None:
        """Merge into `write`, which is called with (rank, "stdout" or "stderr", one whole line).

        Args:
            write: where lines go.
            hold: whether tracebacks are held back; otherwise they are written at once, and `finish` still tells them.
        """
        self._write = write
        self._hold = hold
        self._lines: dict[tuple[int, str], Lines] = {}
        self._held: dict[int, _Held] = {}
        self._ended: set[int] = set()
        self._is_failing = False

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """Write the lines that `data` completes, or hold them back."""
        for line in self._lines.setdefault((rank, stream), Lines()).feed(data):
            self._line(rank, stream, line)

    def ended(self, exit_: Exit) -> None:
        """Keep what is held back of this rank until the end of the job; if it has failed, that of the others, too."""
        self._ended.add(exit_.rank)
        self._is_failing = self._is_failing or exit_.code != 0

    def tick(self) -> None:
        """Write what is held back of ranks that have lived on."""
        if self._is_failing:
            return
        now = time.monotonic()
        stale = [rank for rank, held in self._held.items() if now - held.since > HOLD_S and rank not in self._ended]
        for rank in stale:
            lines = self._held.pop(rank).lines
            for line in lines if self._hold else ():
                self._write(rank, "stderr", line)

    def finish(self) -> Mapping[int, list[bytes]]:
        """Write what is left, once all ranks have ended; return by rank the traceback that it ended with."""
        for rank, stream in self._lines:
            self.output(rank, stream, b"")
        return {rank: held.lines for rank, held in self._held.items()}

    def _line(self, rank: int, stream: str, line: bytes) -> None:
        belongs = stream == "stderr" and (rank in self._held or starts_traceback(line))
        if belongs:
            self._held.setdefault(rank, _Held(time.monotonic())).lines.append(line)
        if not (belongs and self._hold):
            self._write(rank, stream, line)
