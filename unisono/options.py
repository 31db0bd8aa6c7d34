"""Every setting of Unisono, in one frozen object; the environment is read here and nowhere else.

Settings come from `Options(...)` in the program or from ``UNISONO_*`` variables, which win over defaults and lose to
the program. `FIELDS` is the table of both: `unisono doctor` and the documentation are printed from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

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


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return text.lower()

    return parse


def parse_transports(names: str | tuple[str, ...]) -> str:
    """Return "auto", or the transports that `names` lists, with commas between; raises ValueError if it lists none.

    >>> parse_transports("SHM, tcp"), parse_transports(("tcp",))
    ('shm,tcp', 'tcp')
    """
    listed = names.split(",") if isinstance(names, str) else names
    found = [name.strip().lower() for name in listed]
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


@record
class Options:
    """Settings of a job.

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
        try:
            object.__setattr__(self, "transports", parse_transports(self.transports))
        except ValueError as error:
            raise UsageError(f"transports={self.transports!r} cannot be used: it must be {error}") from None

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
    "transports": parse_transports,
    "algorithm": _text,
    "table": _text,
    "load": _text,
    "segment_nbytes": parse_nbytes,
    "bind_address": _text,
    "heartbeat_timeout_s": _seconds,
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
