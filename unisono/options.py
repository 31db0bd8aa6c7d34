"""Every setting of Unisono, in one frozen object; the environment is read here and nowhere else.

Settings come from `Options(...)` in the program or from ``UNISONO_*`` variables, which win over defaults and lose to
the program. `FIELDS` is the table of both: `unisono doctor` and the documentation are printed from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unisono.errors import UsageError

PREFIX = "UNISONO_"
MOST_TCP_STREAMS = 16


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return text.lower()

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1e9:
        raise ValueError("a positive number of seconds")
    return value


def parse_nbytes(text: str) -> int:
    """Return the number of bytes that `text` says; raises ValueError if it says none.

    >>> parse_nbytes("65536"), parse_nbytes("64K"), parse_nbytes("1MiB")
    (65536, 65536, 1048576)
    """
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    digits = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = digits[-1:] if digits[-1:] in ("K", "M", "G") else ""
    number = digits.removesuffix(unit)
    if not (number.isascii() and number.isdigit() and int(number) > 0):
        raise ValueError("a positive number of bytes, as 65536, 64K or 1M")
    return int(number) * units[unit]


def _switch(text: str) -> bool:
    try:
        return {"1": True, "on": True, "true": True, "0": False, "off": False, "false": False}[text.lower()]
    except KeyError:
        raise ValueError("on or off") from None


def _streams(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_TCP_STREAMS):
        raise ValueError(f"a number from 1 to {MOST_TCP_STREAMS}")
    return int(text)


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("not empty")
    return text


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a job.

    Attributes:
        log: how much to tell on stderr: "error", "warning", "info" or "debug".
        timeout_s: seconds after which a collective that has not completed raises `CollectiveTimeoutError`.
        rendezvous_timeout_s: seconds to wait for all ranks to arrive in `init`.
        transport: "auto" (shared memory on a host, TCP elsewhere), or "shm" or "tcp" to force one.
        algorithm: name of the algorithm to force for every collective that has it, of which there must be one; "auto"
            lets the tuner choose.
        segment_nbytes: bytes of a block that travel at once in pipelined plans; 0 lets the tuner choose.
        bind_address: the address that this rank listens on for TCP links.
        tcp_streams: connections between two ranks that share the load of large messages, where one alone does not
            fill the link; at most 16.
        tcp_checksum: whether payloads over TCP carry checksums (CRC-32C), which find what the network's own miss.
    """

    log: str = "warning"
    timeout_s: float = 300.0
    rendezvous_timeout_s: float = 60.0
    transport: str = "auto"
    algorithm: str = "auto"
    segment_nbytes: int = 0
    bind_address: str = "127.0.0.1"
    tcp_streams: int = 1
    tcp_checksum: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **overrides: Any) -> Options:
        """Return the options that ``UNISONO_*`` variables and `overrides` (which win) ask for.

        Raises:
            UsageError: a variable has a value that it cannot have, or no setting or launcher variable has its name.
        """
        values = {
            name: _parse(variable(name), parse, environ[variable(name)])
            for name, parse in FIELDS.items()
            if variable(name) in environ
        }
        for name in environ:
            if name.startswith(PREFIX) and name not in _KNOWN:
                raise UsageError(f"{name} is not a setting of Unisono{_suggestion(name)}")
        return dataclasses.replace(cls(), **{**values, **overrides})

    def adopting(self, values: Mapping[str, Any]) -> Options:
        """Return these options with `values`, by field, instead of their own."""
        return dataclasses.replace(self, **values)


FIELDS: dict[str, Callable[[str], Any]] = {
    "log": _choice("error", "warning", "info", "debug"),
    "timeout_s": _seconds,
    "rendezvous_timeout_s": _seconds,
    "transport": _choice("auto", "shm", "tcp"),
    "algorithm": _text,
    "segment_nbytes": parse_nbytes,
    "bind_address": _text,
    "tcp_streams": _streams,
    "tcp_checksum": _switch,
}

# What a launcher tells each rank; `collectives.environment` reads these.
LAUNCHER_VARIABLES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "STORE", "JOB", "KEY_FD", "KEY_FILE")


def variable(name: str) -> str:
    """Return the environment variable of the field `name`.

    >>> variable("timeout_s")
    'UNISONO_TIMEOUT_S'
    """
    return PREFIX + name.upper()


_KNOWN = frozenset({variable(name) for name in FIELDS} | {PREFIX + name for name in LAUNCHER_VARIABLES})


def _parse(name: str, parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{name}={text!r} cannot be used: it must be {error}") from None


def _suggestion(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, sorted(_KNOWN), n=1)
    return f"; did you mean {near[0]}?" if near else "; `unisono doctor` lists the settings"
