"""The loggers of Unisono, which import `logging` only when a message is to be shown.

Each module calls ``_log = log.get()``, or ``_log = log.get("links")`` for a subsystem. Its messages go to the logger
"unisono" or "unisono.links" of `logging`. Importing `logging` takes milliseconds, so the first message that passes the
level imports it.

If the program has set up handlers of `logging`, for example by ``logging.basicConfig``, the messages go to these, and
each record has the attributes `rank` and `size`. If it has not, a handler of Unisono writes the messages to stderr.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from unisono.foundation import streams
from unisono.foundation.printable import printable

if TYPE_CHECKING:
    import logging

NAME = "unisono"

# Parts of Unisono whose details can be shown by themselves: ``UNISONO_LOG=debug:links,tuning``.
SUBSYSTEMS = ("calls", "links", "rendezvous", "tuning")

# The levels of `logging` by their names in Unisono.
_LEVELS = {"error": 40, "warning": 30, "info": 20, "debug": 10}


def checked_setting(value: object) -> str:
    """Return the setting of the option `log` in lower case: a level, or ``debug:`` and subsystems with commas between.

    Raises:
        ValueError: it is neither. The text says what is allowed.

    >>> checked_setting("Debug:tuning, links")
    'debug:tuning,links'
    """
    text = value.lower().replace(" ", "") if isinstance(value, str) else ""
    level, colon, names = text.partition(":")
    if level in _LEVELS and (not colon or (level == "debug" and set(names.split(",")) <= set(SUBSYSTEMS))):
        return text
    raise ValueError(f"one of {', '.join(_LEVELS)}, or debug:NAME,… with names of {', '.join(SUBSYSTEMS)}")


def levels_of(setting: str) -> dict[str, int]:
    """Return the lowest level that is shown, by subsystem; "" stands for all that are not named.

    >>> levels_of("warning")
    {'': 30}
    >>> levels_of("debug:tuning")
    {'': 20, 'tuning': 10}
    """
    level, _, names = setting.partition(":")
    if not names:
        return {"": _LEVELS[level]}
    return {"": _LEVELS["info"]} | dict.fromkeys(names.split(","), _LEVELS[level])


class Log:
    """The part of the interface of `logging.Logger` that Unisono uses.

    Args:
        subsystem: a name from `SUBSYSTEMS`, or "" for messages about the job as a whole.
    """

    __slots__ = ("_subsystem",)

    def __init__(self, subsystem: str = "") -> None:
        self._subsystem = subsystem

    def debug(self, message: str, *args: object) -> None:
        """Log a detail that helps to find a bug."""
        self._say("debug", message, args)

    def info(self, message: str, *args: object) -> None:
        """Log an event that concerns the whole job. One rank logs it, so that the log of a large job stays short."""
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
            return _LEVELS[level] >= _settings.level_of(self._subsystem)
        return _settings.logger(self._subsystem).isEnabledFor(_LEVELS[level])

    def _say(self, level: str, message: str, args: tuple[object, ...], **settings: Any) -> None:
        if not self.shows(level):
            return
        try:
            logger = _settings.logger(self._subsystem)
        except OSError:  # the process has no free file descriptor, so `logging` cannot be imported
            sys.stderr.write(printable(f"{NAME} {message % args}\n"))
        else:
            # stacklevel 3: the record names the caller of `debug`, `info`, … as its place in the program.
            logger.log(_LEVELS[level], message, *args, stacklevel=3, extra=_settings.facts, **settings)


class _Stderr:
    """A stream that writes to the current `sys.stderr`, because notebooks and tests replace that."""

    def write(self, text: str) -> int:
        streams.write(sys.stderr, printable(text))
        return len(text)

    def flush(self) -> None:
        """Do nothing: `streams.write` does not buffer."""


class _Settings:
    """The arguments of the last `configure`, which are applied when `logging` is imported.

    Attributes:
        facts: the attributes of every record: `rank` and `size`; None outside a job.
    """

    def __init__(self) -> None:
        self.facts: dict[str, int | None] = {"rank": None, "size": None}
        self._levels = levels_of("warning")
        self._are_new = False
        # The levels that Unisono has set. A logger with another level got it from the program, and keeps it.
        self._set: dict[str, int] = {}
        self._loggers: dict[str, logging.Logger] = {}  # by subsystem, because `logging` takes a lock to find one
        self._handler: logging.StreamHandler[_Stderr] | None = None

    def keep(self, setting: str, rank: int | None, size: int | None) -> None:
        self._levels, self.facts, self._are_new = levels_of(setting), {"rank": rank, "size": size}, True

    def level_of(self, subsystem: str) -> int:
        return self._levels.get(subsystem, self._levels[""])

    def logger(self, subsystem: str = "") -> logging.Logger:
        """Return a logger of `logging`, with these settings applied."""
        import logging

        if self._are_new:
            self._are_new = False
            self._apply_format(logging.getLogger(NAME))
            for name in dict.fromkeys((*self._set, *self._levels)):
                self._apply_level(logging.getLogger(_full_name(name)), name)
        if subsystem not in self._loggers:
            self._loggers[subsystem] = logging.getLogger(_full_name(subsystem))
        return self._loggers[subsystem]

    def _apply_level(self, logger: logging.Logger, name: str) -> None:
        if logger.level in (0, self._set.get(name)):  # 0: nobody has set a level
            self._set[name] = self._levels.get(name, 0)
            logger.setLevel(self._set[name])

    def _apply_format(self, logger: logging.Logger) -> None:
        import logging

        if self._handler is None:
            self._handler = logging.StreamHandler(_Stderr())
            self._handler.addFilter(lambda _: not _has_other_handlers(logger, self._handler))
        if self._handler not in logger.handlers:  # `logging.config` and tests remove handlers
            logger.addHandler(self._handler)
        handler = self._handler
        prefix = NAME if self.facts["rank"] is None else f"{NAME} [{self.facts['rank']}/{self.facts['size']}]"
        if min(self._levels.values()) == logging.DEBUG:  # the order of events on several ranks is of interest
            handler.setFormatter(logging.Formatter(f"{prefix} %(asctime)s.%(msecs)03d %(message)s", "%H:%M:%S"))
        else:
            handler.setFormatter(logging.Formatter(f"{prefix} %(message)s"))


def _full_name(subsystem: str) -> str:
    return f"{NAME}.{subsystem}" if subsystem else NAME


def _has_other_handlers(logger: logging.Logger, own: logging.Handler | None) -> bool:
    """Return whether a record of `logger` reaches a handler besides `own`."""
    of_root = logger.root.handlers if logger.propagate else []
    return any(handler is not own for handler in (*logger.handlers, *of_root))


_settings = _Settings()


def get(subsystem: str = "") -> Log:
    """Return the logger of a subsystem, or by default that for messages about the job as a whole."""
    return Log(subsystem)


def configure(setting: str, rank: int | None = None, size: int | None = None) -> None:
    """Show messages by the option `log`, such as "warning" or "debug:links".

    On stderr each line reads ``unisono [rank/size] message``, or ``unisono message`` outside a job; with the time of
    day in it if debug messages are shown. A second call changes the setting and the rank. Handlers and levels that the
    program has set up stay.

    Raises:
        ValueError: see `checked_setting`.
    """
    _settings.keep(checked_setting(setting), rank, size)
    if "logging" in sys.modules:
        _settings.logger()
