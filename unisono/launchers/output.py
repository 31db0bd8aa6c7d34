"""The merged output of the ranks: whole lines with the rank before them, and tracebacks held back.

A rank that fails writes its traceback and ends. Which traceback matters is known only when the job has ended. So once a
traceback begins on stderr, all further lines of that rank on stderr are held back until the rank has ended. If the rank
runs on for `HOLD_S` seconds, it has only reported an exception, and the lines are written like any other output. After
a rank has failed, the others end soon, by themselves or by signals of the launcher, so their tracebacks are then held
back without a limit. That does not hold for jobs that go on after a failure.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from unisono.launchers.process import Exit
from unisono.launchers.root_cause import starts_traceback

# On a busy machine, a process that has imported torch may take seconds from its traceback to its end.
HOLD_S = 10.0
LONGEST_LINE_NBYTES = 1 << 20

# A line ends at "\n", or at "\r" because progress bars use it; "\r\n" is one end.
_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")

Write = Callable[[int, str, bytes], None]


class Lines:
    """Cuts a stream of bytes into whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, each with its line end. An empty `data` completes the last line."""
        self._rest += data
        start = 0
        lines = []
        for match in _END.finditer(self._rest):
            line, start = self._rest[start : match.end()], match.end()
            if line != b"\r":  # Progress bars also begin with "\r".
                lines.append(line)
        self._rest = self._rest[start:]
        if self._rest and (not data or len(self._rest) > LONGEST_LINE_NBYTES):
            lines.append(self._rest.rstrip(b"\r") + b"\n")
            self._rest = b""
        return lines


@dataclass(slots=True)
class _HeldLines:
    since: float
    lines: list[bytes] = field(default_factory=list)


class MergedOutput:
    """An observer of a job that writes the lines of the ranks when they come, and holds tracebacks back."""

    def __init__(self, write: Write, *, hold: bool, keep_going: bool = False) -> None:
        """Create the observer.

        Args:
            write: is called with (rank, "stdout" or "stderr", one whole line).
            hold: whether tracebacks are held back; otherwise they are written at once. `finish` returns them anyway.
            keep_going: whether the other ranks run on when one fails.
        """
        self._write = write
        self._hold = hold
        self._keep_going = keep_going
        self._lines: dict[tuple[int, str], Lines] = {}
        self._held: dict[int, _HeldLines] = {}
        self._ended: set[int] = set()
        self._is_failing = False

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """Write the lines that `data` completes, or hold them back."""
        for line in self._lines.setdefault((rank, stream), Lines()).feed(data):
            self._line(rank, stream, line)

    def ended(self, exit_: Exit) -> None:
        """Hold the lines of this rank back until the job ends; if the rank failed, also those of all others."""
        self._ended.add(exit_.rank)
        self._is_failing = self._is_failing or (exit_.code != 0 and not self._keep_going)

    def tick(self) -> None:
        """Write the lines held back of ranks that have run on for `HOLD_S` seconds."""
        if self._is_failing:
            return
        now = time.monotonic()
        stale = [rank for rank, held in self._held.items() if now - held.since > HOLD_S and rank not in self._ended]
        for rank in stale:
            lines = self._held.pop(rank).lines
            for line in lines if self._hold else ():
                self._write(rank, "stderr", line)

    def finish(self) -> Mapping[int, list[bytes]]:
        """Write the last lines after all ranks have ended; return by rank the lines that are held back."""
        for rank, stream in self._lines:
            self.output(rank, stream, b"")
        return {rank: held.lines for rank, held in self._held.items()}

    def _line(self, rank: int, stream: str, line: bytes) -> None:
        is_held = stream == "stderr" and (rank in self._held or starts_traceback(line))
        if is_held:
            self._held.setdefault(rank, _HeldLines(time.monotonic())).lines.append(line)
        if not (is_held and self._hold):
            self._write(rank, stream, line)
