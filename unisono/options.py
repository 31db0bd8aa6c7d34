"""Every setting of Unisono, in one frozen object; the environment is read here and nowhere else.

Settings come from `Options(...)` in the program or from ``UNISONO_*`` variables, which win over defaults and lose to
the program. `FIELDS` is the table of both: `unisono doctor` and the documentation are printed from it.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from unisono.deadlines import seconds
from unisono.errors import UsageError
from unisono.records import record

PREFIX = "UNISONO_"
# What carries arrays of a GPU between ranks of a host, and no messages.
CUDA_IPC = "cuda_ipc"
TRANSPORTS = ("shm", "tcp", "ucx", "mpi", CUDA_IPC)
# One that carries all messages of a job, and stands alone.
WHOLE_TRANSPORTS = ("ucx_core",)
# The group of entry points by which installed packages offer more of that kind.
TRANSPORTS_GROUP = "unisono.transports"
MOST_TCP_STREAMS = 16


def _one_of(*allowed: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        text = value.lower() if isinstance(value, str) else ""
        if text not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return text

    return check


def parse_transports(names: str | tuple[str, ...]) -> str:
    """Return "auto", or the transports that `names` lists, with commas between; raises ValueError if it lists none.

    >>> parse_transports("SHM, tcp"), parse_transports(("tcp",))
    ('shm,tcp', 'tcp')
    """
    listed = names.split(",") if isinstance(names, str) else names
    is_text = isinstance(listed, (list, tuple)) and all(isinstance(name, str) for name in listed)
    found = [name.strip().lower() for name in listed] if is_text else []
    is_list = set(found) <= set(TRANSPORTS) and len(set(found)) == len(found) > 0
    if found == [CUDA_IPC]:
        raise ValueError(f"{CUDA_IPC} and another one, as it carries no messages")
    if found != ["auto"] and not is_list and not (len(found) == 1 and _is_whole(found[0])):
        more = f"; or one alone of {', '.join(WHOLE_TRANSPORTS)}, and of installed packages: "
        more += ", ".join(installed_transports()) or "there is none"
        raise ValueError(f"auto, or some of {', '.join(TRANSPORTS)} with commas between, the preferred one first{more}")
    return ",".join(found)


def _is_whole(name: str) -> bool:
    return name in WHOLE_TRANSPORTS or name in installed_transports()


def installed_transports() -> list[str]:
    """Return the names of transports of installed packages."""
    from unisono.entry_points import entry_points

    return sorted(
        {each.name for each in entry_points(group=TRANSPORTS_GROUP)} - {"auto", *TRANSPORTS, *WHOLE_TRANSPORTS}
    )


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


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("True or False")
    return value


def _integer(least: int, most: int | None, meaning: str) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        try:
            number = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = -1
        if number < least or (most is not None and number > most):
            raise ValueError(meaning)
        return number

    return check


def _text(value: object) -> str:
    if not (isinstance(value, str) and value.strip()):
        raise ValueError("a text that is not empty")
    return value


def _path_or_none(value: Any) -> str:
    try:
        path = os.fspath(value)
    except TypeError:
        path = None
    if not isinstance(path, str):
        raise ValueError("a path, or empty for none")
    return path


@record
class Options:
    """Settings of a job.

    Limits of time are positive numbers of seconds; an infinite one stands for no limit.

    Attributes:
        log: how much to tell on stderr: "error", "warning", "info" or "debug".
        timeout_s: seconds after which a collective that has not completed raises `CollectiveTimeoutError`.
        rendezvous_timeout_s: seconds to wait for all ranks to arrive in `init`.
        transports: what may carry messages, in order of preference, as "shm,ucx,tcp", or the same as a tuple. To each
            peer the first that reaches it is used. "auto" is shared memory on a host, and between hosts UCX where it
            has more to offer than TCP, else TCP. "cuda_ipc", which is part of "auto" and may stand anywhere, is for
            arrays of a GPU; where it is not named or does not reach all ranks, they are staged through the host.
        algorithm: name of the algorithm to force for every collective that has it, of which there must be one; or by
            collective and size, as "allreduce:0-8K=recursive_doubling;8K-=ring"; "auto" lets the tuner choose.
        table: path of a decision table, which `unisono tune` makes, for the tuner to choose by; "" for none.
        load: Python files that register algorithms (`unisono.algorithm`), with ":" between; `init` runs each of them,
            once in a process, before the ranks meet. All ranks must load the same.
        segment_nbytes: bytes of a block that travel at once in pipelined plans; 0 lets the tuner choose.
        bind_address: where this rank listens for TCP links: an address or a host name of this machine, an interface
            ("eth1"), or a network that one of its addresses is in ("10.0.0.0/8", "fd00::/8").
        heartbeat_timeout_s: seconds after which a rank of another host is lost that gives no sign of life: its host is
            down, or the network between.
        tcp_streams: connections between two ranks that share the load of large messages, where one alone does not
            fill the link; at most 16.
        tcp_checksum: whether payloads over TCP carry checksums (CRC-32C), which find what the network's own miss.

    Raises:
        UsageError: a setting has a value that it cannot have.
    """

    log: str = "warning"
    timeout_s: float = 300.0
    rendezvous_timeout_s: float = 60.0
    transports: str | tuple[str, ...] = "auto"
    algorithm: str = "auto"
    table: str = ""
    load: str = ""
    segment_nbytes: int = 0
    bind_address: str = "127.0.0.1"
    heartbeat_timeout_s: float = 20.0
    tcp_streams: int = 1
    tcp_checksum: bool = False

    def __post_init__(self) -> None:
        for name, field in FIELDS.items():
            value = getattr(self, name)
            object.__setattr__(self, name, _accepted(name, field.check, value))

    @property
    def preference(self) -> tuple[str, ...]:
        """The transports of messages in order of preference; ("auto",) where that is not told."""
        return tuple(name for name in str(self.transports).split(",") if name != CUDA_IPC)

    @property
    def allows_cuda_ipc(self) -> bool:
        """Whether arrays of a GPU may go by CUDA IPC."""
        return not {"auto", CUDA_IPC}.isdisjoint(str(self.transports).split(","))

    @property
    def third_party(self) -> str | None:
        """The transport that carries all messages by the generic executor, as those of installed packages; or None."""
        first = self.preference[0]
        return None if first in ("auto", *TRANSPORTS) else first

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **overrides: Any) -> Options:
        """Return the options that ``UNISONO_*`` variables and `overrides` (which win) ask for.

        Variables that are no settings are ignored here: `strange_variables` tells of them.

        Raises:
            UsageError: a variable of a setting has a value that it cannot have.
        """
        values = {
            name: _accepted(variable(name), field.parse, environ[variable(name)])
            for name, field in FIELDS.items()
            if variable(name) in environ
        }
        return dataclasses.replace(cls(), **{**values, **overrides})

    def adopting(self, values: Mapping[str, Any]) -> Options:
        """Return these options with `values`, by field, instead of their own."""
        return dataclasses.replace(self, **values)


class Field(NamedTuple):
    """How the values of a setting are checked. Both functions raise ValueError, which says what the value must be.

    Attributes:
        read: makes a value of the text of a variable; `check` sees it next.
        check: returns the value of a program as it is kept.
    """

    read: Callable[[str], Any]
    check: Callable[[Any], Any]

    def parse(self, text: str) -> Any:
        """Return the value that the text of a variable stands for."""
        return self.check(self.read(text))


def _number_or_text(kind: Callable[[str], float]) -> Callable[[str], float | str]:
    """Return what reads a number; it hands on a text that is none, for the check to say what it must be."""

    def read(text: str) -> float | str:
        try:
            return kind(text)
        except ValueError:
            return text

    return read


_SECONDS = Field(_number_or_text(float), seconds)

FIELDS: dict[str, Field] = {
    "log": Field(str, _one_of("error", "warning", "info", "debug")),
    "timeout_s": _SECONDS,
    "rendezvous_timeout_s": _SECONDS,
    "transports": Field(str, parse_transports),
    "algorithm": Field(str, _text),
    "table": Field(str, _path_or_none),
    "load": Field(str, _path_or_none),
    "segment_nbytes": Field(parse_nbytes, _integer(0, None, "a number of bytes, as 65536")),
    "bind_address": Field(str, _text),
    "heartbeat_timeout_s": _SECONDS,
    "tcp_streams": Field(_number_or_text(int), _integer(1, MOST_TCP_STREAMS, f"a number from 1 to {MOST_TCP_STREAMS}")),
    "tcp_checksum": Field(_switch, _flag),
}

# What a launcher tells each rank; `collectives.environment` reads these.
LAUNCHER_VARIABLES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "STORE", "JOB", "KEY_FD", "KEY_FILE")
# Kubernetes sets these in every container for a service called "unisono", "unisono-store" and so on.
_OF_KUBERNETES = (
    r"UNISONO(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


def variable(name: str) -> str:
    """Return the environment variable of the field `name`.

    >>> variable("timeout_s")
    'UNISONO_TIMEOUT_S'
    """
    return PREFIX + name.upper()


_KNOWN = frozenset({variable(name) for name in FIELDS} | {PREFIX + name for name in LAUNCHER_VARIABLES})


def strange_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each ``UNISONO_*`` variable that is no setting; those of Kubernetes are passed over.

    They are no errors: they may be settings of another version, in an environment that several programs share.

    >>> list(strange_variables({"UNISONO_LOGG": "info", "UNISONO_PORT": "tcp://10.96.14.3:29400"}))
    ['UNISONO_LOGG is not a setting of this version of Unisono and is ignored; did you mean UNISONO_LOG?']
    """
    for name in environ:
        if name.startswith(PREFIX) and name not in _KNOWN and not re.fullmatch(_OF_KUBERNETES, name):
            yield f"{name} is not a setting of this version of Unisono and is ignored{_suggestion(name)}"


def _accepted(name: str, check: Callable[[Any], Any], value: Any) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise UsageError(f"{name}={value!r} cannot be used: it must be {error}") from None


def _suggestion(name: str) -> str:
    import difflib

    # Without the prefix, which would make all names alike.
    near = difflib.get_close_matches(name.removeprefix(PREFIX), [known.removeprefix(PREFIX) for known in _KNOWN], n=1)
    return f"; did you mean {PREFIX}{near[0]}?" if near else "; `unisono doctor` lists the settings"
