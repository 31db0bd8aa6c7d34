"""Hosts on this machine: network namespaces with one interface each, connected by a bridge in another namespace.

Ranks of one namespace share memory and ranks of different ones do not, as on real hosts. A token bucket (`tc … tbf`)
can limit the rates at which each host sends and receives. Needs root, `ip` and `tc`.

All namespaces are removed at the end. The next process removes those of a killed process.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from unisono.errors import UsageError

PREFIX = "unisono-shaped-"
RUN_LIMIT_S = 600.0
_NETWORK = "10.213.77"
SUBNET = f"{_NETWORK}.0/24"
# The bucket holds a burst of the kernel. The queue holds some milliseconds of the link, as that of a switch does.
_BURST, _QUEUE = "128kb", "2mb"

_networks = itertools.count()


@functools.cache
def missing() -> str:
    """Return the text of what this machine lacks to create hosts; an empty text if it can create them."""
    tools = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if os.geteuid() != 0 or tools:
        return f"network namespaces need root, ip and tc; missing: {', '.join(tools) or 'root'}"
    trial = f"{PREFIX}{os.getpid()}-trial"
    try:
        ip("netns", "add", trial)
    except UsageError as error:
        return str(error)
    finally:
        remove([trial])
    return ""


def address(host: int) -> str:
    """Return the address of host number `host`."""
    return f"{_NETWORK}.{host + 1}"


def home(host: int) -> str:
    """Return the address at home of a host, which only its own processes can dial, after `move_home`."""
    return f"192.168.{host + 1}.5"


def move_home(hosts: Sequence[str], host: int, *, is_silent: bool) -> None:
    """Add its address at home to a host. Other hosts have no route to it; or packets to it are lost silently."""
    ip("addr", "add", f"{home(host)}/32", "dev", "lo", namespace=hosts[host])
    for other in hosts if is_silent else ():
        if other != hosts[host]:
            ip("route", "add", f"{home(host)}/32", "dev", "eth0", namespace=other)
            lost = ("lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
            ip("neigh", "add", home(host), *lost, namespace=other)


def plug(hosts: Sequence[str], host: int, state: str) -> None:
    """Set the link of a host to a state, which is "up" or "down"."""
    ip("link", "set", f"port{host}", state, namespace=hosts[0].rpartition("-")[0] + "-switch")


def inside(namespace: str) -> list[str]:
    """Return the command line up to the program to run, which makes it run in a namespace."""
    return ["ip", "netns", "exec", namespace]


def ip(*arguments: str, namespace: str | None = None) -> None:
    """Run `ip`, or `tc` if that is the first argument, in a namespace.

    Raises:
        UsageError: it failed; the message is its output.
    """
    words = list(arguments) if arguments[0] == "tc" else ["ip", *arguments]
    command = words if namespace is None else [*inside(namespace), *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise UsageError(f"{' '.join(command)}: {ended.stderr.strip()}")


def remove(namespaces: Sequence[str]) -> None:
    """Delete the namespaces with all their interfaces."""
    for name in namespaces:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def left_behind() -> list[str]:
    """Return the namespaces of processes that have ended."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    names = [line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)]
    return [name for name in names if not Path("/proc", name.removeprefix(PREFIX).partition("-")[0]).exists()]


@contextlib.contextmanager
def network(
    hosts: int, rate: str | None = None, before_removal: Callable[[], object] = lambda: None
) -> Iterator[list[str]]:
    """Create hosts and yield the names of their namespaces, whose only interface, ``eth0``, has their `address`.

    Args:
        hosts: the number of hosts.
        rate: the rate of each host's link, in the notation of tc; None for no limit.
        before_removal: called at the end in any case.

    Raises:
        UsageError: the hosts cannot be created.
    """
    remove(left_behind())
    mine = f"{PREFIX}{os.getpid()}-{next(_networks)}"
    names, switch = [f"{mine}-{k}" for k in range(hosts)], f"{mine}-switch"
    try:
        for name in (switch, *names):
            ip("netns", "add", name)
            ip("link", "set", "lo", "up", namespace=name)
        ip("link", "add", "bridge", "type", "bridge", namespace=switch)
        ip("link", "set", "bridge", "up", namespace=switch)
        for host, name in enumerate(names):
            _plug_in(switch, host, name, rate)
        yield names
    finally:
        before_removal()
        remove([*names, switch])


def run_ranks(
    namespaces: Sequence[str],
    per_host: int,
    command: Sequence[str],
    environ: Mapping[str, str] = MappingProxyType({}),
    before_killing: Callable[[], object] = lambda: None,
    *,
    bound: bool = False,
    limit_s: float = RUN_LIMIT_S,
) -> bytes:
    """Run a command as every rank of a job, host by host, and return the standard output of rank 0.

    Args:
        namespaces: the hosts, from `network`.
        per_host: the number of ranks on each host.
        command: the command of each rank; Unisono's variables tell it its rank.
        environ: more variables.
        before_killing: called when rank 0 has ended or failed, before the remaining ranks are killed.
        bound: whether each rank is bound to a core of its own, or in turn if there are more ranks than cores.
        limit_s: seconds after which all ranks are killed.

    Raises:
        subprocess.TimeoutExpired: rank 0 had not ended in time.
    """
    processes: list[subprocess.Popen[bytes]] = []
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        try:
            for rank in range(len(namespaces) * per_host):
                host = rank // per_host
                rank_variables = {"RANK": rank, "SIZE": len(namespaces) * per_host}
                settings = {"STORE": f"file://{folder}/store", "BIND_ADDRESS": address(host)}
                variables = {f"UNISONO_{name}": str(value) for name, value in {**rank_variables, **settings}.items()}
                output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                whole = {**os.environ, **environ, **variables}
                on_core = ["taskset", "--cpu-list", str(cores[rank % len(cores)])] if bound else []
                started = [*inside(namespaces[host]), *on_core, *command]
                processes.append(subprocess.Popen(started, env=whole, stdout=output))
            report, _ = processes[0].communicate(timeout=limit_s)
        finally:
            before_killing()
            for process in processes:
                process.kill()  # all at once, before one has time to report the death of another
            for process in processes:
                process.wait()
    return report


def _plug_in(switch: str, host: int, name: str, rate: str | None) -> None:
    port = f"port{host}"
    ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name, namespace=switch)
    ip("link", "set", port, "master", "bridge", "up", namespace=switch)
    ip("addr", "add", f"{address(host)}/24", "dev", "eth0", namespace=name)
    ip("link", "set", "eth0", "up", namespace=name)
    if rate is not None:
        for place, device in ((switch, port), (name, "eth0")):
            bucket = ("tbf", "rate", rate, "burst", _BURST, "limit", _QUEUE)
            ip("tc", "qdisc", "add", "dev", device, "root", *bucket, namespace=place)
