"""The logger of Unisono, which imports `logging` only when a message is to be shown.

Each module calls ``_log = log.get()``, and its messages go to ``logging.getLogger("unisono")``. Importing `logging`
takes milliseconds, so the first message that passes the level imports it. Before `configure` is called, only warnings
and errors are shown, by the handler of last resort of `logging`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from unisono import streams

if TYPE_CHECKING:
    import logging

NAME = "unisono"

# The levels of `logging` by their names in Unisono.
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Log:
    """The part of the interface of `logging.Logger` that Unisono uses."""

    __slots__ = ()

    def debug(self, message: str, *args: object) -> None:
        """Log a detail that helps to find a bug."""
        self._say("debug", message, args)

    def info(self, message: str, *args: object) -> None:
        """Log a normal event, such as the transports that were chosen."""
        self._say("info", message, args)

    def warning(self, message: str, *args: object) -> None:
        """Log a problem that does not stop the program and that the user should look at."""
        self._say("warning", message, args)

    def exception(self, message: str, *args: object) -> None:
        """Log a failure, with the traceback of the exception that is being handled."""
        self._say("error", message, args, exc_info=True)

    def shows(self, level: str) -> bool:
        """Return whether a message of this level is shown or reaches a handler."""
        if "logging" not in sys.modules:
            return _LEVELS[level] >= _settings.level
        return _settings.logger().isEnabledFor(_LEVELS[level])

    def _say(self, level: str, message: str, args: tuple[object, ...], **settings: Any) -> None:
        if not self.shows(level):
            return
        try:
            logger = _settings.logger()
        except OSError:  # the process has no free file descriptor, so `logging` cannot be imported
            sys.stderr.write(f"{NAME} {message % args}\n")
        else:
            # stacklevel 3: the record names the caller of `debug`, `info`, … as its place in the program.
            logger.log(_LEVELS[level], message, *args, stacklevel=3, **settings)


class _Stderr:
    """A stream that writes to the current `sys.stderr`, because notebooks and tests replace that."""

    def write(self, text: str) -> int:
        streams.write(sys.stderr, text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: `streams.write` does not buffer."""


class _Settings:
    """The arguments of the last `configure`, which are applied when `logging` is imported.

    Attributes:
        level: the lowest level that is shown.
    """

    def __init__(self) -> None:
        self.level = _LEVELS["warning"]
        self._prefix: str | None = None  # None if it has been applied

    def keep(self, level: int, prefix: str) -> None:
        self.level, self._prefix = level, prefix

    def logger(self) -> logging.Logger:
        """Return the logger of `logging`, with these settings applied."""
        import logging

        logger = logging.getLogger(NAME)
        if self._prefix is not None:
            prefix, self._prefix = self._prefix, None
            self._apply(logger, prefix)
        return logger

    def _apply(self, logger: logging.Logger, prefix: str) -> None:
        import logging

        own_handlers = (each for each in logger.handlers if isinstance(getattr(each, "stream", None), _Stderr))
        handler = next(own_handlers, None)
        if handler is None:
            handler = logging.StreamHandler(_Stderr())
            logger.addHandler(handler)
            logger.propagate = False
        handler.setFormatter(logging.Formatter(f"{prefix} %(message)s"))
        if logger.level == logging.NOTSET:  # the program may have set a level before
            logger.setLevel(self.level)


_settings = _Settings()


_log = Log()


def get() -> Log:
    """Return the logger of Unisono."""
    return _log


def configure(level: str, rank: int | None = None, size: int | None = None) -> None:
    """Send messages of `level` ("error", "warning", "info" or "debug") and above to stderr.

    Each line reads ``unisono [rank/size] message``, or ``unisono message`` outside a job. A second call changes the
    level and the rank. Handlers that the program has added to the logger stay.
    """
    _settings.keep(_LEVELS[level], NAME if rank is None else f"{NAME} [{rank}/{size}]")
    if "logging" in sys.modules:
        _settings.logger().setLevel(_settings.level)
