"""`Changes`: the ranks and the report that all changes to a program share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from unisono import Communicator, UsageError


class Changes:
    """The changes of one program.

    Args:
        world: the ranks that run the program.
        script: the file of the program, as absolute path.
        write: writes a line of the report; by default, rank 0 writes it to standard error.

    Attributes:
        has_shares: whether a loader gives each rank a share of its samples.
        has_training: whether an optimizer or a model was changed.
        is_in_fit: whether `fit` of Keras runs, whose callbacks write files on rank 0 alone.
    """

    def __init__(self, world: Communicator, script: str, write: Callable[[str], None] | None = None) -> None:
        self.world = world
        self.has_shares = self.has_training = self.is_in_fit = False
        self._script = script
        self._write = write or self._to_standard_error
        self._written: set[str] = set()

    def note(self, text: str) -> None:
        """Report a change, once for each place in the program."""
        line = f"{self._place()}{text}"
        if line not in self._written:
            self._written.add(line)
            self._write(line)

    def refused(self, why: str) -> UsageError:
        """Return the error for a program that cannot be changed safely."""
        return UsageError(f"{self._place()}--data-parallel cannot train this program: {why}", rank=self.world.rank)

    def on_rank_0(self, write: Callable[[], None]) -> None:
        """Call `write` on rank 0, while the other ranks wait.

        Raises:
            Exception: the error of `write`, on rank 0.
            OSError: `write` failed on rank 0; on the other ranks.
        """
        failure: Exception | None = None
        if self.world.rank == 0:
            try:
                write()
            except Exception as error:  # noqa: BLE001 (raised below, when the other ranks know of it)
                failure = error
        text = self.world.broadcast_object(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        if text is not None:
            raise OSError(f"rank 0 could not write: {text}")

    def replace(self, owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a function of a module or a class by the result of `wrapper`, which gets the original."""
        setattr(owner, name, wrapper(getattr(owner, name)))

    def _to_standard_error(self, line: str) -> None:
        if self.world.rank == 0:
            sys.stderr.write(f"unisono: {line}\n")
            sys.stderr.flush()

    def _place(self) -> str:
        """Return the line of the program that is being executed, such as ``train.py:12: ``."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename == self._script:
                return f"{Path(self._script).name}:{frame.f_lineno}: "
            frame = frame.f_back
        return ""
