"""What Unisono tells people on stderr: one logger, set up in one place.

Modules speak through `get`, and people see what they say in ``logging.getLogger("unisono")``. `logging` takes
milliseconds to load, and a rank that has nothing to say spends them for nothing: it is loaded by the first message that
is to be seen. Nothing is shown before `configure`, except warnings by Python's own last resort.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from unisono import streams

if TYPE_CHECKING:
    import logging

NAME = "unisono"

# As in `logging`, where they have the same numbers.
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Log:
    """A logger by its name, of which no more is there than Unisono uses."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def debug(self, message: str, *args: object) -> None:
        """Tell what only those want to know who look for a mistake."""
        self._say("debug", message, args)

    def info(self, message: str, *args: object) -> None:
        """Tell what is going on."""
        self._say("info", message, args)

    def warning(self, message: str, *args: object) -> None:
        """Tell what somebody ought to look after."""
        self._say("warning", message, args)

    def exception(self, message: str, *args: object) -> None:
        """Tell that something failed, with the error that is being handled."""
        self._say("error", message, args, exc_info=True)

    def shows(self, level: str) -> bool:
        """Return whether messages of a level are shown to anyone, or kept."""
        if "logging" not in sys.modules:
            return _LEVELS[level] >= _settings.level
        return _settings.logger(self._name).isEnabledFor(_LEVELS[level])

    def _say(self, level: str, message: str, args: tuple[object, ...], **settings: Any) -> None:
        if self.shows(level):
            # As said by who called the method above.
            _settings.logger(self._name).log(_LEVELS[level], message, *args, stacklevel=3, **settings)


class _Stderr:
    """Whatever `sys.stderr` is at that moment, which notebooks and tests replace."""

    def write(self, text: str) -> int:
        streams.write(sys.stderr, text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: `streams.write` has handed everything on."""


class _Settings:
    """What `configure` was told last, kept until `logging` is there to be told it."""

    def __init__(self) -> None:
        self.level = _LEVELS["warning"]
        self._who: str | None = None

    def keep(self, level: int, who: str) -> None:
        self.level, self._who = level, who

    def logger(self, name: str) -> logging.Logger:
        """Return one of `logging`'s, after that was told."""
        import logging

        if self._who is not None:
            who, self._who = self._who, None
            self._tell(logging.getLogger(NAME), who)
        return logging.getLogger(name)

    def _tell(self, logger: logging.Logger, who: str) -> None:
        import logging

        own = (each for each in logger.handlers if isinstance(getattr(each, "stream", None), _Stderr))
        handler = next(own, None)
        if handler is None:
            handler = logging.StreamHandler(_Stderr())
            logger.addHandler(handler)
            logger.propagate = False
        handler.setFormatter(logging.Formatter(f"{who} %(message)s"))
        if logger.level == logging.NOTSET:  # the program may have had the time to set one
            logger.setLevel(self.level)


_settings = _Settings()


def get(name: str) -> Log:
    """Return what speaks through the logger of that name, `NAME` or one below it."""
    return Log(name)


def configure(level: str, rank: int | None = None, size: int | None = None) -> None:
    """Send messages of `level` ("error", "warning", "info" or "debug") and above to stderr.

    Each line reads ``unisono [rank/size] message``, or ``unisono message`` outside a job. Calling it again changes the
    level and the rank. Handlers that the program has put on the logger are left as they are.
    """
    _settings.keep(_LEVELS[level], NAME if rank is None else f"{NAME} [{rank}/{size}]")
    if "logging" in sys.modules:
        _settings.logger(NAME).setLevel(_settings.level)
