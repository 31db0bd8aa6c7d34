"""`Options`: all settings of Unisono, in one frozen object. Only this module reads ``UNISONO_*`` settings.

Each setting comes from `Options(...)` in the program, else from its ``UNISONO_*`` variable, else from its default. So
options know which settings the program has passed, and `resolved` adds the variables for the others.
`FIELDS` is the table of all settings; `unisono doctor` and the documentation are printed from it.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, NamedTuple

from unisono.errors import UsageError
from unisono.foundation import log
from unisono.foundation.deadlines import seconds
from unisono.foundation.near_names import did_you_mean
from unisono.foundation.records import record

PREFIX = "UNISONO_"
# The transport for arrays of a GPU between ranks of a host. It carries no messages.
CUDA_IPC = "cuda_ipc"
TRANSPORTS = ("shm", "tcp", "ucx", "mpi", CUDA_IPC)
# Transports that carry all messages of a job. They cannot be combined with others.
WHOLE_TRANSPORTS = ("ucx_core",)
# The group of entry points by which installed packages offer further whole transports.
TRANSPORTS_GROUP = "unisono.transports"
MOST_TCP_STREAMS = 16
MOST_RECORDED = 100_000
# The native core holds numbers in 64 bits with a sign. Python refuses to convert thousands of digits.
_MOST_INTEGER = (1 << 63) - 1
_MOST_DIGITS = 20
# The words of a variable that switches something on or off. They are no paths.
_SWITCHES = {
    "1": True, "on": True, "true": True, "yes": True, "0": False, "off": False, "false": False, "no": False,
}  # fmt: skip


def parse_transports(names: str | tuple[str, ...]) -> str:
    """Return "auto", or the transports in `names` separated by commas. Raises ValueError if a name is wrong.

    >>> parse_transports("SHM, tcp"), parse_transports(("tcp",))
    ('shm,tcp', 'tcp')
    """
    listed = names.split(",") if isinstance(names, str) else names
    is_text = isinstance(listed, (list, tuple)) and all(isinstance(name, str) for name in listed)
    transports = [name.strip().lower() for name in listed] if is_text else []
    is_list = set(transports) <= set(TRANSPORTS) and len(set(transports)) == len(transports) > 0
    if transports == [CUDA_IPC]:
        raise ValueError(f"{CUDA_IPC} and another transport, because {CUDA_IPC} carries no messages")
    if transports != ["auto"] and not is_list and not (len(transports) == 1 and _is_whole(transports[0])):
        alone = f"; or only one of {', '.join([*WHOLE_TRANSPORTS, *installed_transports()])}"
        raise ValueError(
            f"auto, or some of {', '.join(TRANSPORTS)} separated by commas, the preferred one first{alone}"
        )
    return ",".join(transports)


def _is_whole(name: str) -> bool:
    return name in WHOLE_TRANSPORTS or name in installed_transports()


def installed_transports() -> list[str]:
    """Return the names of the transports that installed packages offer."""
    from unisono.foundation.entry_points import entry_points

    return sorted(
        {point.name for point in entry_points(group=TRANSPORTS_GROUP)} - {"auto", *TRANSPORTS, *WHOLE_TRANSPORTS}
    )


def parse_nbytes(text: str) -> int:
    """Return the number of bytes in `text`. Raises ValueError if it is no positive number.

    >>> parse_nbytes("65536"), parse_nbytes("64K"), parse_nbytes("1MiB")
    (65536, 65536, 1048576)
    """
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    digits = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = digits[-1:] if digits[-1:] in ("K", "M", "G") else ""
    number = digits.removesuffix(unit)
    is_number = number.isascii() and number.isdigit() and len(number) < _MOST_DIGITS
    nbytes = int(number) * units[unit] if is_number else 0
    if not 0 < nbytes <= _MOST_INTEGER:
        raise ValueError("a positive number of bytes, such as 65536, 64K or 1M")
    return nbytes


def _switch(text: str) -> bool:
    try:
        return _SWITCHES[text.strip().lower()]
    except KeyError:
        raise ValueError("on or off") from None


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("True or False")
    return value


def _integer(least: int, most: int, meaning: str) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        try:
            number = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = -1
        if not least <= number <= most:
            raise ValueError(meaning)
        return number

    return check


def _text(value: object) -> str:
    if not (isinstance(value, str) and value.strip()):
        raise ValueError("a non-empty string")
    return value


def _one_of(*names: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        name = value.lower() if isinstance(value, str) else ""
        if name not in names:
            raise ValueError(", ".join(names[:-1]) + f" or {names[-1]}")
        return name

    return check


def _path_or_none(value: Any) -> str:
    try:
        path = os.fspath(value)
    except TypeError:
        path = None
    if not isinstance(path, str):
        raise ValueError("a path, or an empty string for none")
    if path.strip().lower() in _SWITCHES:
        raise ValueError(f"a path, or an empty string for none; a file or folder of this name is ./{path.strip()}")
    return path


@record
class Options:
    """The settings of a job.

    Time limits are positive numbers of seconds; an infinite number means no limit. `init` takes each setting that the
    program does not pass here from its variable, such as ``UNISONO_TIMEOUT_S`` for `timeout_s`, or else its default.

    Attributes:
        log: the lowest level of messages on stderr: "error", "warning", "info" or "debug"; or "debug:" and names of
            `log.SUBSYSTEMS`, such as "debug:links,tuning", for their details alone.
        timeout_s: seconds after which a collective that has not completed raises `CollectiveTimeoutError`.
        rendezvous_timeout_s: seconds for which `init` waits for all ranks.
        transports: the transports that may carry messages, in order of preference, as "shm,ucx,tcp" or as a tuple. Each
            peer gets the first one that reaches it. "auto" is shared memory on a host; between hosts it is UCX if that
            has more to offer than TCP, else TCP. "cuda_ipc" is for arrays of a GPU. It is part of "auto", and its place
            in the list does not matter. If it is not in the list or does not reach all ranks, these arrays are staged
            through the host.
        algorithm: the name of an algorithm to use in every collective that has an algorithm of this name. Or a choice
            by collective and size, as "allreduce:0-8K=recursive_doubling;8K-=ring". With "auto" the tuner chooses.
        table: the path of a decision table of `unisono tune` for the tuner; "" for none.
        tune: the path of a decision table that rank 0 writes when the job ends. Some calls of the job try other
            algorithms, at a cost of at most 2 % of the time of its calls; "" for none.
        load: Python files that register algorithms (`unisono.algorithm`) and schedules of other programs (`.xml`,
            `.json`), separated by ":". `init` loads each of them once in a process, before the rendezvous. All ranks
            must load the same files.
        segment_nbytes: the size of the segments of pipelined plans, in bytes of a block; 0 lets the tuner choose.
        bind_address: the address on which this rank listens for TCP links: an address or a host name of this machine,
            an interface ("eth1"), or a network of one of its addresses ("10.0.0.0/8", "fd00::/8").
        heartbeat_timeout_s: seconds without a heartbeat after which a rank of another host is lost. Its host is down
            then, or the network between the hosts. An outage of up to nine tenths of this time ends no job.
        tcp_streams: the number of connections between two ranks, at most 16. They share large messages, for networks
            that one connection does not fill.
        gpu_blocks: the most blocks of threads that a kernel of a call on GPU arrays uses, so that other kernels run
            beside it; 0 for as many as the GPU runs at a time. NCCL calls blocks CTAs.
        warn_after_s: seconds after which a rank logs that a call has not ended, and for which rank it waits. Each call
            that takes as long is logged once. An infinite number means never. A message whose own time limit is
            infinite is not logged, because the program awaits it at all times.
        recorded_calls: how many of its last calls each rank records, for dumps and for `unisono top`. With 0 it records
            none, which saves about 60 ns per call.
        dump: a directory. Each rank writes a dump of its last calls there when the job fails or cannot begin, and when
            the process gets SIGUSR1. "" for none.
        trace: a directory. Each rank writes a trace of its last 100,000 calls there when it leaves; "" for none.
        trace_groups: whether traces also have each group of the plan of each call. A call takes longer then.
        metrics: a directory. Each rank writes its metrics there as a text file for Prometheus, every 15 seconds; "" for
            none. It needs the package prometheus-client.
        stats: a directory. Each rank adds the counters of its communicators to a file there when they are closed; ""
            for none. `unisono run --stats` reads them.
        tcp_checksum: whether payloads over TCP carry checksums (CRC-32C). They detect errors that the checksums of the
            network miss.
        verify_results: whether the ranks compare checksums of the result of each collective whose result is the same on
            all of them: allreduce, allgather and broadcast, on arrays in host memory. If they differ, the call raises
            `CorruptionError`, which names the odd rank if there are three ranks or more.
        tls: whether TLS 1.3 encrypts TCP connections: "on", "off", or "auto" for connections over an interface that is
            neither loopback nor private. All ranks must have the same value. Unix sockets and shared memory between
            ranks of one host are not encrypted. With "on", UCX, MPI and transports of packages cannot be used.
        tls_certificate: the path of this rank's certificate, a PEM file, with those between it and the authority. If it
            is empty, the key of the job authenticates ranks.
        tls_key: the path of the private key of the certificate, a PEM file without a password.
        tls_authority: the path of the certificates that sign those of all ranks, a PEM file.
        passed: the names of the settings that the program has passed; not an argument for programs.

    Raises:
        UsageError: a setting has a value that it cannot have.
    """

    log: str = "warning"
    timeout_s: float = 300.0
    rendezvous_timeout_s: float = 60.0
    transports: str | tuple[str, ...] = "auto"
    algorithm: str = "auto"
    table: str = ""
    tune: str = ""
    load: str = ""
    segment_nbytes: int = 0
    bind_address: str = "127.0.0.1"
    heartbeat_timeout_s: float = 3.0
    tcp_streams: int = 1
    tcp_checksum: bool = False
    gpu_blocks: int = 0
    verify_results: bool = False
    tls: str = "auto"
    tls_certificate: str = ""
    tls_key: str = ""
    tls_authority: str = ""
    warn_after_s: float = 2.0
    recorded_calls: int = 1000
    dump: str = ""
    trace: str = ""
    trace_groups: bool = False
    metrics: str = ""
    stats: str = ""
    passed: frozenset[str] = dataclasses.field(default=frozenset(), repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, field in FIELDS.items():
            value = getattr(self, name)
            object.__setattr__(self, name, _accepted(name, field.check, value))
        self._check_tls()

    def _check_tls(self) -> None:
        files = {name: getattr(self, name) for name in ("tls_certificate", "tls_key", "tls_authority")}
        missing = [name for name, path in files.items() if not path]
        if missing and len(missing) < len(files):
            shown = ", ".join(f"{name} ({variable(name)})" for name in missing)
            raise UsageError(f"{shown} must be set too: a certificate needs its key and an authority")
        unencrypted = [name for name in self.preference if name not in ("auto", "shm", "tcp")]
        if self.tls == "on" and unencrypted:
            raise UsageError(
                f"tls='on' cannot be used with transports={self.transports!r}: TLS encrypts TCP, but not "
                f"{' or '.join(unencrypted)}; {variable('tls')} and {variable('transports')} set them too"
            )

    @property
    def preference(self) -> tuple[str, ...]:
        """The transports of messages in order of preference, or ("auto",)."""
        return tuple(name for name in str(self.transports).split(",") if name != CUDA_IPC)

    @property
    def allows_cuda_ipc(self) -> bool:
        """Whether arrays of a GPU may use CUDA IPC."""
        return not {"auto", CUDA_IPC}.isdisjoint(str(self.transports).split(","))

    @property
    def third_party(self) -> str | None:
        """The transport that carries all messages through the generic executor, such as one of a package; or None."""
        first = self.preference[0]
        return None if first in ("auto", *TRANSPORTS) else first

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **overrides: Any) -> Options:
        """Return the options from ``UNISONO_*`` variables, with `overrides` in place of their values.

        Variables that are no settings are ignored; see `unknown_variables`.

        Raises:
            UsageError: a variable of a setting has a value that it cannot have.
        """
        return cls(**overrides).resolved(environ)

    def resolved(self, environ: Mapping[str, str]) -> Options:
        """Return these options, with the values of ``UNISONO_*`` variables for the settings that were not passed.

        Raises:
            UsageError: a variable of such a setting has a value that it cannot have.
        """
        return self.adopting(
            {
                name: _accepted(variable(name), field.parse, environ[variable(name)])
                for name, field in FIELDS.items()
                if variable(name) in environ and name not in self.passed
            }
        )

    def adopting(self, values: Mapping[str, Any]) -> Options:
        """Return a copy of these options with other values for some fields, which do not count as passed."""
        adopted = Options(**{name: values.get(name, getattr(self, name)) for name in FIELDS})
        object.__setattr__(adopted, "passed", self.passed)
        return adopted

    def sets(self, name: str) -> bool:
        """Return whether the program, a variable or rank 0 has set the field `name`."""
        is_default = getattr(self, name) == getattr(_DEFAULTS, name)
        return not is_default or name in self.passed or variable(name) in os.environ

    def source_of(self, name: str) -> str:
        """Return the place where a user changes the field `name`: the argument of the program, or the variable.

        >>> Options(dump="").source_of("dump"), Options().source_of("dump")
        ('the option dump of the program', 'UNISONO_DUMP')
        """
        return f"the option {name} of the program" if name in self.passed else variable(name)


def _noting_passed(init: Callable[..., None]) -> Callable[..., None]:
    """Return ``Options.__init__`` with a note of the names of the arguments.

    `dataclasses.replace` passes all fields, and `passed` among them: then a field counts as passed if it has been
    passed before, or has no default value.
    """

    @wraps(init)
    def noting(self: Options, *args: Any, **kwargs: Any) -> None:
        _check_names(kwargs)
        init(self, *args, **kwargs)
        passed = {*list(FIELDS)[: len(args)], *kwargs}
        if "passed" in kwargs:
            changed = {name for name in passed & FIELDS.keys() if getattr(self, name) != getattr(_DEFAULTS, name)}
            passed = kwargs["passed"] | changed
        object.__setattr__(self, "passed", frozenset(passed))

    return noting


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name not in FIELDS and name != "passed":
            raise TypeError(f"Options has no setting {name!r}{did_you_mean(name, FIELDS)}")


class Field(NamedTuple):
    """The functions that check the values of a setting. Both raise a ValueError that describes the allowed values.

    Attributes:
        read: converts the text of an environment variable to a value for `check`.
        check: checks a value, and returns it in the form in which `Options` holds it.
    """

    read: Callable[[str], Any]
    check: Callable[[Any], Any]

    def parse(self, text: str) -> Any:
        """Return the checked value of the text of a variable."""
        return self.check(self.read(text))


def _number_or_text(number_type: Callable[[str], float]) -> Callable[[str], float | str]:
    """Return a function that converts a text to a number. Other text is returned unchanged, for `check` to refuse."""

    def read(text: str) -> float | str:
        try:
            return number_type(text)
        except ValueError:
            return text

    return read


_SECONDS = Field(_number_or_text(float), seconds)

FIELDS: dict[str, Field] = {
    "log": Field(str, log.checked_setting),
    "timeout_s": _SECONDS,
    "rendezvous_timeout_s": _SECONDS,
    "transports": Field(str, parse_transports),
    "algorithm": Field(str, _text),
    "table": Field(str, _path_or_none),
    "tune": Field(str, _path_or_none),
    "load": Field(str, _path_or_none),
    "segment_nbytes": Field(parse_nbytes, _integer(0, _MOST_INTEGER, "a number of bytes, such as 65536")),
    "bind_address": Field(str, _text),
    "heartbeat_timeout_s": _SECONDS,
    "tcp_streams": Field(_number_or_text(int), _integer(1, MOST_TCP_STREAMS, f"a number from 1 to {MOST_TCP_STREAMS}")),
    "tcp_checksum": Field(_switch, _flag),
    "gpu_blocks": Field(_number_or_text(int), _integer(0, _MOST_INTEGER, "a number of blocks, or 0 for no limit")),
    "verify_results": Field(_switch, _flag),
    "tls": Field(str, _one_of("auto", "on", "off")),
    "tls_certificate": Field(str, _path_or_none),
    "tls_key": Field(str, _path_or_none),
    "tls_authority": Field(str, _path_or_none),
    "warn_after_s": _SECONDS,
    "recorded_calls": Field(_number_or_text(int), _integer(0, MOST_RECORDED, f"a number from 0 to {MOST_RECORDED}")),
    "dump": Field(str, _path_or_none),
    "trace": Field(str, _path_or_none),
    "trace_groups": Field(_switch, _flag),
    "metrics": Field(str, _path_or_none),
    "stats": Field(str, _path_or_none),
}

# The variables that a launcher sets for each rank; `collectives.bootstrap.environment` reads them.
LAUNCHER_VARIABLES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "STORE", "JOB", "KEY_FD", "KEY_FILE", "RESTART")
# Kubernetes sets these variables in every container for a service named "unisono", "unisono-store" and so on.
_OF_KUBERNETES = (
    r"UNISONO(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


def variable(name: str) -> str:
    """Return the environment variable of the field `name`.

    >>> variable("timeout_s")
    'UNISONO_TIMEOUT_S'
    """
    return PREFIX + name.upper()


# The name of the port at which the job that has spawned this one waits; see `unisono.parent`.
PARENT = PREFIX + "PARENT"
_VARIABLES = frozenset({variable(name) for name in FIELDS} | {PREFIX + name for name in LAUNCHER_VARIABLES} | {PARENT})


def unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each ``UNISONO_*`` variable that is no setting, except the variables of Kubernetes.

    Such a variable is no error: it may be a setting of another version, in an environment that several programs share.

    >>> list(unknown_variables({"UNISONO_LOGG": "info", "UNISONO_PORT": "tcp://10.96.14.3:29400"}))
    ['UNISONO_LOGG is not a setting of this version of Unisono and is ignored; did you mean UNISONO_LOG?']
    """
    for name in environ:
        if name.startswith(PREFIX) and name not in _VARIABLES and not re.fullmatch(_OF_KUBERNETES, name):
            yield f"{name} is not a setting of this version of Unisono and is ignored{_suggestion(name)}"


def _accepted(name: str, check: Callable[[Any], Any], value: Any) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise UsageError(f"{name}={value!r} cannot be used: it must be {error}") from None


def _suggestion(name: str) -> str:
    # Without the prefix, because it would make all names similar.
    names = [other.removeprefix(PREFIX) for other in _VARIABLES]
    return did_you_mean(name.removeprefix(PREFIX), names, PREFIX) or "; `unisono doctor` lists the settings"


_DEFAULTS = Options()
Options.__init__ = _noting_passed(Options.__init__)  # type: ignore[method-assign]
