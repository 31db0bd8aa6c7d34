"""Communicators to other jobs: ports, names of services, and spawned processes.

Each port of `Open_port` is a `unisono.Port` of this process alone. In `Accept`, all ranks open a second port together,
and the root sends its name to the root of the other job over the first port, because the other job knows only that one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.collectives.bootstrap.bridge import Bridge, Port, connect
from unisono.compat.mpi4py.base.errors import fail, translating
from unisono.compat.mpi4py.base.world import Universe, closing_at_end, parent_bridge
from unisono.compat.mpi4py.communicators.comm import Comm, CommState, Intracomm
from unisono.compat.mpi4py.communicators.intercomm import BridgedState, Intercomm
from unisono.compat.mpi4py.communicators.session import COMM_SELF
from unisono.compat.mpi4py.values.info import INFO_NULL, Info
from unisono.errors import UnisonoError
from unisono.launchers.spawn import spawn

_NONCE_NBYTES = 16
# The numbers of processes of other jobs, above those of this one.
_numbers = itertools.count(1 << 32)
_ports: dict[str, Port] = {}
_parents: list[BridgedState] = []


def _met(state: CommState, bridge: Bridge) -> Any:
    """Return the communicator between the ranks of a state and the job that they have met."""
    others = [next(_numbers) for _ in bridge.remote]
    numbers = dict(zip((*bridge.own, *bridge.remote), (*state.members, *others), strict=True))
    universe = Universe(bridge.union, [numbers[rank] for rank in range(bridge.union.size)], is_closed_after_use=True)
    return Intercomm._of(BridgedState(state.members, others, universe))


def _as_root(state: CommState, root: int, step: Callable[[], Any]) -> Any:
    """Return the result of a step of the root on all ranks; all of them raise its error."""
    result, error = None, None
    if state.rank == root:
        try:
            result = step()
        except (UnisonoError, RuntimeError, TypeError, ValueError) as caught:
            error = caught
    result, error = state.native.broadcast_object((result, error), root)
    if error is not None:
        raise error
    return result


@translating
def Open_port(info: Any = INFO_NULL) -> str:
    """Open a port, and return its name, which is a secret: a job that knows it can connect."""
    port = Port(COMM_SELF._live.native)
    _ports[port.name] = port
    closing_at_end(port.close)
    return port.name


def _port(name: str) -> Port:
    if name not in _ports:
        raise fail("ERR_PORT", "this process has not opened the port")
    return _ports[name]


def Close_port(port_name: str) -> None:
    """Close a port of this process; jobs that have met stay connected."""
    _port(port_name).close()
    del _ports[port_name]


@translating
def _accept(self: Any, port_name: str | None, info: Any = INFO_NULL, root: int = 0) -> Any:
    """Wait until another job connects to a port of the root, and return the communicator to it."""
    state = self._live

    def introduce(name: str) -> None:
        with _port(port_name or "").accept() as leaders:
            leaders.union.send_object(name, leaders.remote[0])

    with Port(state.native) as port:
        _as_root(state, root, lambda: introduce(port.name))
        return _met(state, port.accept())


@translating
def _connect(self: Any, port_name: str | None, info: Any = INFO_NULL, root: int = 0) -> Any:
    """Connect to the job that accepts at the port that the root passes, and return the communicator to it."""
    state = self._live

    def introduced() -> Any:
        with connect(port_name or "", COMM_SELF._live.native) as leaders:
            return leaders.union.recv_object(leaders.remote[0])

    return _met(state, connect(_as_root(state, root, introduced), state.native))


@translating
def _join(fd: int) -> Any:
    """Return the communicator to the process at the other end of a socket, over which the name of a port travels."""
    own, nonce = COMM_SELF._live, os.urandom(_NONCE_NBYTES)
    with socket.socket(fileno=os.dup(fd)) as link, link.makefile("rwb") as stream:
        stream.write(nonce)
        stream.flush()
        if nonce < stream.read(_NONCE_NBYTES):
            return _met(own, connect(stream.readline().decode().strip(), own.native))
        with Port(own.native) as port:
            stream.write(port.name.encode() + b"\n")
            stream.flush()
            return _met(own, port.accept())


# Names of services: files that the user alone can read, on this host.


def _service(name: str) -> Path:
    folder = Path(tempfile.gettempdir(), f"unisono-services-{os.geteuid()}")
    folder.mkdir(0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise fail("ERR_SERVICE", f"{folder} is not a folder that you alone can use: remove it")
    return folder / hashlib.sha256(name.encode()).hexdigest()


def Publish_name(service_name: str, port_name: str, info: Any = INFO_NULL) -> None:
    """Let processes of this user on this host find a port by the name of a service."""
    try:
        descriptor = os.open(_service(service_name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise fail("ERR_SERVICE", f"the service {service_name!r} is published already") from None
    with open(descriptor, "w") as file:
        file.write(port_name)


def Lookup_name(service_name: str, info: Any = INFO_NULL) -> str:
    """Return the name of the port of a service."""
    try:
        return _service(service_name).read_text()
    except FileNotFoundError:
        raise fail("ERR_NAME", f"no service {service_name!r} is published") from None


def Unpublish_name(service_name: str, port_name: str, info: Any = INFO_NULL) -> None:
    """End the name of a service."""
    try:
        _service(service_name).unlink()
    except FileNotFoundError:
        raise fail("ERR_SERVICE", f"no service {service_name!r} is published") from None


# Spawned processes.


def _spawned(comm: Any, programs: Callable[[], list[dict[str, Any]]], root: int) -> tuple[Any, list[int]]:
    """Spawn the programs of the root; return the communicator to them, and how many processes each one has.

    Args:
        comm: the communicator whose ranks spawn them together.
        root: the rank whose programs count.
        programs: returns for each program its "words", its "count" of processes and its "folder", or None.
    """
    state = comm._live
    chosen = _as_root(state, root, programs)
    counts = [program["count"] for program in chosen]
    command = ["-m", "unisono.compat.mpi4py.spawned", json.dumps(chosen)]
    return _met(state, spawn(command, sum(counts), state.native)), counts


def _program(command: Any, args: Any, count: int, info: Any) -> dict[str, Any]:
    if count < 1:
        raise fail("ERR_SPAWN", f"cannot spawn {count} processes")
    words = [os.fsdecode(command), *([] if args is None else map(os.fsdecode, args))]
    return {"words": words, "count": int(count), "folder": info.get("wdir") if info else None}


@translating
def _spawn(
    self: Any,
    command: Any,
    args: Any = None,
    maxprocs: int = 1,
    info: Any = INFO_NULL,
    root: int = 0,
    errcodes: list[int] | None = None,
) -> Any:
    """Start processes of a program on the host of rank 0, and return the communicator to them."""
    intercomm, counts = _spawned(self, lambda: [_program(command, args, maxprocs, info)], root)
    if errcodes is not None:
        errcodes[:] = [0] * sum(counts)
    return intercomm


@translating
def _spawn_multiple(
    self: Any,
    command: Any,
    args: Any = None,
    maxprocs: Any = None,
    info: Any = INFO_NULL,
    root: int = 0,
    errcodes: list[list[int]] | None = None,
) -> Any:
    """Start processes of several programs on the host of rank 0, and return the communicator to them."""

    def programs() -> list[dict[str, Any]]:
        if isinstance(command, (str, bytes)) or isinstance(args, str):
            raise ValueError("expecting a list of commands, and a list of their arguments")
        commands = list(command)
        columns = (
            [None] * len(commands) if args is None else list(args),
            [1 if maxprocs is None else maxprocs] * len(commands) if maxprocs is None or isinstance(maxprocs, int)
            else list(maxprocs),
            [info] * len(commands) if info is None or isinstance(info, Info) else list(info),
        )  # fmt: skip
        if any(len(column) != len(commands) for column in columns):
            raise ValueError("expecting arguments, numbers of processes and hints for each command")
        return list(map(_program, commands, *columns))

    intercomm, counts = _spawned(self, programs, root)
    if errcodes is not None:
        errcodes[:] = [[0] * count for count in counts]
    return intercomm


def _get_parent() -> Any:
    """Return the communicator to the processes that spawned this one; null if there are none, or after its end."""
    bridge = parent_bridge()
    if bridge is None:
        return Intercomm()
    if not _parents:
        from unisono.compat.mpi4py.communicators.session import COMM_WORLD

        _parents.append(_met(COMM_WORLD._live, bridge)._state)
    return Intercomm() if _parents[0].is_freed else Intercomm._of(_parents[0])


_METHODS: dict[Any, dict[str, Any]] = {
    Intracomm: {"Accept": _accept, "Connect": _connect, "Spawn": _spawn, "Spawn_multiple": _spawn_multiple},
    Comm: {"Get_parent": staticmethod(_get_parent), "Join": staticmethod(_join)},
}
for _class, _methods in _METHODS.items():
    for _name, _method in _methods.items():
        setattr(_class, _name, _method)
