"""Where the ranks of `unisono run` run: on this machine, on hosts that ssh reaches, or on one of several machines."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from subprocess import DEVNULL
from typing import Protocol

from unisono.collectives.bootstrap.environment import job_of_store, key_of_file
from unisono.errors import UsageError
from unisono.foundation.records import record
from unisono.launchers.job import LocalJob, Observer, OnLoss, require_open_files
from unisono.launchers.job_store import LauncherNode, PeerNodeStore
from unisono.launchers.process import Command, Exit, JobPart, own_stdin
from unisono.launchers.ssh_job import Host, SshJob, hosts_in
from unisono.options import Options, variable
from unisono.transports.host.bind_address import address_for, is_numeric
from unisono.transports.rendezvous import host_and_port


@record
class PlacementRules:
    """The settings of a job that do not depend on where its ranks run.

    Attributes:
        bind: "core" or "numa" to bind ranks to cores; None not to bind them.
        environ: the environment for ranks of this machine.
        passed: the variables that ranks of other hosts get too.
        on_loss: see `LocalJob`.
        max_restarts: see `LocalJob`.
    """

    bind: str | None
    environ: Mapping[str, str]
    passed: Mapping[str, str]
    on_loss: OnLoss | None
    max_restarts: int


class Job(Protocol):
    """A job of `unisono run`: a `LocalJob` or an `SshJob`."""

    late: list[int]
    alone: list[int]
    whereabouts: list[str]

    def run(self, timeout_s: float | None = None) -> list[Exit]: ...
    def attend(self) -> bool: ...
    def forward(self, number: int) -> None: ...
    def pass_on(self, number: int) -> None: ...
    def report(self, tell: Callable[[str], None]) -> None: ...
    def kill(self) -> None: ...


class Placement(Protocol):
    """A place for ranks; `ranks` are those whose output comes to this launcher."""

    @property
    def ranks(self) -> range: ...
    def job(self, argv: Sequence[str], observer: Observer, rules: PlacementRules) -> Job:
        """Return the job whose ranks execute `argv`."""


@record
class Here:
    """All ranks run on this machine."""

    size: int

    @classmethod
    def of(cls, size: int) -> Here:
        """Return the placement of `size` ranks; raises `UsageError` if they need more open files than allowed."""
        require_open_files(size)
        return cls(size)

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.size)

    def job(self, argv: Sequence[str], observer: Observer, rules: PlacementRules) -> LocalJob:
        """Return the job, whose ranks execute `argv`."""
        return LocalJob(
            _commands(argv, self.ranks),
            observer,
            bind=rules.bind,
            environ=rules.environ,
            on_loss=rules.on_loss,
            max_restarts=rules.max_restarts,
        )


@record
class OnHosts:
    """The ranks run on hosts that this launcher reaches by the command `ssh`."""

    hosts: tuple[Host, ...]
    ssh: tuple[str, ...]

    @classmethod
    def of(cls, hosts: str, size: int | None, ssh: str) -> OnHosts:
        """Return the placement on `hosts`, such as "a:2,b:2".

        Raises:
            UsageError: the text is malformed, `size` is not the number of ranks in it, or there is no ssh.
        """
        parsed = tuple(hosts_in(hosts))
        total = sum(host.count for host in parsed)
        if size not in (None, total):
            raise UsageError(f"--hosts {hosts} places {total}, and -n says {size} ranks: leave -n out")
        try:
            words = tuple(shlex.split(ssh))
        except ValueError as error:
            raise UsageError(f"--ssh {ssh!r} cannot be used: {str(error).lower()}") from None
        if not words or shutil.which(words[0]) is None:
            raise UsageError(f"--hosts needs ssh, and there is no executable {ssh!r}: install the client of OpenSSH")
        return cls(parsed, words)

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(sum(host.count for host in self.hosts))

    def job(self, argv: Sequence[str], observer: Observer, rules: PlacementRules) -> SshJob:
        """Return the job, whose ranks execute `argv`."""
        return SshJob(
            self.hosts,
            argv,
            observer,
            bind=rules.bind,
            environ=rules.environ,
            passed=rules.passed,
            on_loss=rules.on_loss,
            ssh=self.ssh,
        )


@record
class OnOneOfSeveral:
    """The ranks of this machine, where a launcher runs on each of several machines."""

    share: JobPart
    number: int
    nodes: int
    store: str
    key: bytes

    @classmethod
    def of(cls, count: int, number: int | None, nodes: int, store: str | None) -> OnOneOfSeveral:
        """Return the placement of `count` ranks on machine `number` of `nodes`, each with as many ranks.

        Raises:
            UsageError: a number, the store or the key is missing or cannot be used.
        """
        if number is None:
            raise UsageError("--nnodes needs --node-rank, a different number from 0 on each machine")
        if number >= nodes:
            raise UsageError(f"--node-rank {number} cannot be used: it must be less than --nnodes {nodes}")
        if not store:
            raise UsageError(
                "--nnodes needs --store, the same on all machines: tcp://HOST:PORT with an address of the machine with "
                "--node-rank 0 and a free port there, or a redis:// or file:// URL"
            )
        if store.startswith("tcp://") and host_and_port(store)[1] == 0:
            raise UsageError(f"--store {store} cannot be used: the other machines must know the port")
        key = key_of_file(os.environ)
        if key is None:
            raise UsageError(
                "a job on several machines needs a key, so that nobody else can join it: make one, (umask 077; head -c "
                f"32 /dev/urandom > key), copy it to all machines, and set {variable('key_file')} to its path"
            )
        require_open_files(count)
        return cls(JobPart(number * count, count, nodes * count), number, nodes, store, key)

    @property
    def ranks(self) -> range:
        """The ranks of this machine."""
        return self.share.ranks

    def job(self, argv: Sequence[str], observer: Observer, rules: PlacementRules) -> LocalJob:
        """Return the job of the ranks on this machine, which execute `argv`."""
        bound = {variable("bind_address"): _address_towards(self.store)} | dict(rules.environ)
        options = Options.from_environment(bound)
        address = address_for(options.bind_address)
        node = LauncherNode(self.number, self.nodes, self.store, address, job_of_store(self.store), self.key)
        return LocalJob(
            _commands(argv, self.ranks),
            observer,
            bind=rules.bind,
            environ=bound,
            on_loss=rules.on_loss,
            share=self.share,
            store=partial(PeerNodeStore, node, self.share, options.rendezvous_timeout_s),
        )


def _commands(argv: Sequence[str], ranks: range) -> list[Command]:
    """Return the commands of ranks on this machine, of which rank 0 reads the standard input of this process."""
    return [Command(tuple(argv), stdin=DEVNULL if rank else own_stdin()) for rank in ranks]


def _address_towards(store: str) -> str:
    """Return the address of this machine from which it reaches the host of the store; loopback if there is no host.

    On Debian, a machine knows its own name as loopback. Then any other address of it is returned.
    """
    if not store.startswith("tcp://"):
        return Options().bind_address
    host, port = host_and_port(store)
    try:
        family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as prober:
            prober.connect(target)  # sends nothing: the kernel only chooses the route
            address = str(prober.getsockname()[0])
    except OSError:  # the store cannot be reached either, which will be the error
        return Options().bind_address
    return "0.0.0.0/0" if address.startswith("127.") and not is_numeric(host) and host != "localhost" else address
