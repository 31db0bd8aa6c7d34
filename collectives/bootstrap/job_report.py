"""The lines that rank 0 logs when a job begins: the facts about it that users ask for, once and for all ranks.

At the level `info`, a job logs at most 12 lines before its first call, however many ranks it has::

    unisono [0/8] algorithms are chosen by the calibration in ~/.cache/unisono/1f0c/parameters.json
    unisono [0/8] 8 ranks on 2 hosts met in 35.1 ms; started by: torchrun; job 3f6a90c2
    unisono [0/8] host alpha: ranks 0-3 may use 16 core(s) each
    unisono [0/8] host beta: ranks 4-7 may use 16 core(s) each
    unisono [0/8] transports: shm within a host; tcp (another machine) between hosts
    unisono [0/8] security: Rank 0 makes this job's key and hands it out in the store: …
    unisono [0/8] options: timeout_s=30.0
    unisono [0/8] versions: Python 3.13.1, unisono 0.1.0, numpy 2.3.4, torch 2.13.0
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence

from unisono.collectives.bootstrap.environment import Launch
from unisono.collectives.bootstrap.trust import trust_of
from unisono.options import FIELDS, Options
from unisono.transports.links.session import Session
from unisono.tuning.machine.levels import ranges

_MOST_HOSTS = 4
# Libraries whose versions matter where a program has imported them.
_LIBRARIES = ("unisono", "numpy", "torch", "jax", "tensorflow", "keras", "cupy", "mpi4py", "ucxx")


def job_report(
    launch: Launch, session: Session, hosts: Sequence[Sequence[int]], options: Options, took_ms: float
) -> Iterator[str]:
    """Yield the lines about a job whose ranks have met.

    Args:
        launch: how this process was started.
        session: the links of the job.
        hosts: the ranks of each host.
        options: the options that all ranks use.
        took_ms: how long the ranks took to meet, in milliseconds.
    """
    places = f"{len(hosts)} hosts" if len(hosts) > 1 else "one host"
    ranks = f"{launch.size} ranks" if launch.size > 1 else "one rank"
    job = session.identity.job.hex()[:8]
    yield f"{ranks} on {places} met in {took_ms:.1f} ms; started by: {launch.launcher}; job {job}"
    for of_host in hosts[:_MOST_HOSTS]:
        member = session.members[of_host[0]]
        cores = int(member.cores, 16).bit_count()
        yield f"host {member.surroundings.host}: ranks {ranges(of_host)} may use {cores} core(s) each"
    if len(hosts) > _MOST_HOSTS:
        yield f"… and {len(hosts) - _MOST_HOSTS} more hosts"
    if launch.size > 1:
        yield f"transports: {'; '.join(_links(session, hosts))}"
        yield f"security: {trust_of(launch)}"
    if changed := _changed(options):
        yield f"options: {', '.join(changed)}"
    yield f"versions: {', '.join(_versions())}"


def _links(session: Session, hosts: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield how rank 0 reaches the ranks of its host, and those of other hosts, which stand for all other pairs."""
    if len(hosts[0]) > 1:
        yield f"{session.channels.link_to(hosts[0][1])} within a host"
    if len(hosts) > 1:
        yield f"{session.channels.link_to(hosts[1][0])} between hosts"


def _changed(options: Options) -> list[str]:
    """Return the options that differ from their defaults."""
    defaults = Options()
    names = (name for name in FIELDS if getattr(options, name) != getattr(defaults, name))
    return [f"{name}={getattr(options, name)!r}" for name in names]


def _versions() -> Iterator[str]:
    yield f"Python {platform.python_version()}"
    for name in _LIBRARIES:
        if version := getattr(sys.modules.get(name), "__version__", ""):
            yield f"{name} {version}"
