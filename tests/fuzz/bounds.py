"""Bounds on the memory and on the time that a parser may take for one input."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

# The largest input of a fuzzer has 100 kB. The bound leaves room for what an allocator takes at once, such as an arena.
MOST_NBYTES = 256 << 20
# Of the processor, so that a loaded machine changes nothing. A parser takes milliseconds.
MOST_CPU_S = 20.0


class TooSlowError(AssertionError):
    """A parser has taken `MOST_CPU_S` seconds of the processor for an input."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Raise MemoryError in the block once it takes `MOST_NBYTES` more, and `TooSlowError` after `MOST_CPU_S` seconds.

    The kernel refuses the memory, so that a parser with a fault does not take that of the machine. The limit holds for
    the whole process. Only the main thread may use this.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGVTALRM, _refuse)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_NBYTES, before[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGVTALRM, previous)


def _refuse(*_: object) -> NoReturn:
    raise TooSlowError(f"a parser has taken {MOST_CPU_S:g} s of the processor for one input")
