"""Jobs whose ranks run on different hosts: in network namespaces, or wherever the command of a rank puts it."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.fabric_ranks import MpiRanks
from support.forked_ranks import Started
from support.mpi_ranks import environment_of
from support.native_ranks import Job, LastingJob

import unisono as un
from unisono.bench import wide_area
from unisono.bench.namespaces import SUBNET, address, inside, missing
from unisono.launchers.process import Command

needs_namespaces = pytest.mark.skipif(bool(missing()), reason=missing())
needs_wide_area = pytest.mark.skipif(bool(wide_area.missing()), reason=wide_area.missing())


class PrefixedJob(Job):
    """A `Job` that starts each rank by a command of its own, such as ``ip netns exec NAME``.

    `prefixes` has the words of that command for each rank. The command line of the rank follows them.
    """

    def __init__(
        self, fn: Callable[..., Any], prefixes: Sequence[Sequence[str]], directory: Path, *args: Any, **options: Any
    ) -> None:
        self._prefixes = prefixes
        super().__init__(fn, len(prefixes), directory, *args, **options)

    def start_rank(self, rank: int, command: Command, environ: Mapping[str, str]) -> Started:
        return subprocess.Popen([*self._prefixes[rank], *command.argv], env=environ, pass_fds=command.descriptors)


class HostsJob(PrefixedJob):
    """A `Job` whose ranks run on the hosts of a `network`.

    `per_host` is the number of ranks on each host, and `address_of` returns the address of a host.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        namespaces: Sequence[str],
        per_host: Sequence[int],
        directory: Path,
        *args: Any,
        address_of: Callable[[int], str] = address,
        **options: Any,
    ) -> None:
        self._address_of = address_of
        self.host_of = [host for host, ranks in enumerate(per_host) for _ in range(ranks)]
        prefixes = [inside(namespaces[host]) for host in self.host_of]
        super().__init__(fn, prefixes, directory, *args, **options)

    def _start(self, rank: int, store: str, options: un.Options, task: bytes) -> None:
        bound = dataclasses.replace(options, bind_address=self._address_of(self.host_of[rank]))
        super()._start(rank, store, bound, task)


class LastingHostsJob(LastingJob):
    """A `LastingJob` whose processes run on the hosts of a `network` with `per_host` ranks each."""

    def __init__(
        self,
        fn: Callable[..., Any],
        namespaces: Sequence[str],
        per_host: Sequence[int],
        directory: Path,
        *args: Any,
        **options: Any,
    ) -> None:
        self._namespaces = namespaces
        self._host_of = [host for host, ranks in enumerate(per_host) for _ in range(ranks)]
        super().__init__(fn, len(self._host_of), directory, *args, **options)

    def start_on(self, host: int, fn: Callable[..., Any], *args: Any) -> int:
        """Start a process on a host, as `start`."""
        self._host_of.append(host)
        return self.start(fn, *args)

    def start_rank(self, rank: int, command: Command, environ: Mapping[str, str]) -> Started:
        words = [*inside(self._namespaces[self._host_of[rank]]), *command.argv]
        return subprocess.Popen(words, env=environ, pass_fds=command.descriptors)

    def variables(self, rank: int) -> dict[str, str]:
        return {**super().variables(rank), "UNISONO_BIND_ADDRESS": address(self._host_of[rank])}

    def _start(self, rank: int, store: str | None, options: un.Options | None, task: bytes) -> None:
        bound = options and dataclasses.replace(options, bind_address=address(self._host_of[rank]))
        super()._start(rank, store, bound, task)


# Options with which a launcher of MPI starts its daemons by `agent` instead of ssh, and with which daemons and ranks
# use `eth0` alone. Slots are not oversubscribed, because Open MPI then fills several hosts unevenly.
BETWEEN_HOSTS = {
    "openmpi": (
        *("--map-by", "slot", "--bind-to", "none"),
        *("--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", "{agent}", "--prtemca", "prte_if_include", "eth0"),
        *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "eth0"),
        *("--host", "{hosts}"),
    ),
    "mpich": ("-launcher", "rsh", "-launcher-exec", "{agent}", "-iface", "eth0", "-hosts", "{hosts}"),
}
BY_TCP = {"UCX_TLS": "tcp,self", "MPIR_CVAR_NOLOCAL": "1"}


def mpi_ranks(
    library: str, namespaces: Sequence[str], per_host: Sequence[int], directory: Path, transports: str
) -> MpiRanks:
    """Start ranks on the hosts of a `network` by mpiexec. The messages of the MPI library go over TCP."""
    agent = directory / "agent"
    rows = [f'{address(host)}) exec {shlex.join(inside(name))} sh -c "$*" ;;' for host, name in enumerate(namespaces)]
    agent.write_text("\n".join(["#!/bin/sh", "host=$1; shift", 'case "$host" in', *rows, "esac", ""]))
    agent.chmod(0o700)
    hosts = ",".join(f"{address(host)}:{ranks}" for host, ranks in enumerate(per_host))
    mpiexec = str(environment_of(library) / "bin" / "mpiexec")
    options = [word.format(agent=agent, hosts=hosts) for word in BETWEEN_HOSTS[library]]
    variables = {**BY_TCP, "UNISONO_BIND_ADDRESS": SUBNET}
    return MpiRanks(sum(per_host), library, transports, [*inside(namespaces[0]), mpiexec, *options], variables)
