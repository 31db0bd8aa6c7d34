"""Reads rank, size and nodes from the environment variables of mpirun, mpiexec, jsrun and srun.

The launchers of MPI differ only in the names of the variables. srun starts the tasks of a *step* of a job. A batch
script and an interactive shell of the job also see variables of the step, but are not tasks.

Used by: `environment`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from unisono.errors import UsageError


class Variables(NamedTuple):
    """The name of a launcher of MPI, and the variables in which it passes rank and size to a process."""

    launcher: str
    rank: str
    size: str


OPEN_MPI = Variables("mpirun of Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
MVAPICH = Variables("mpirun_rsh of MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")
# jsrun of machines with LSF. Spectrum MPI sets the variables of Open MPI, too.
JSRUN = Variables("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE")
# mpiexec of HPE's PALS, on machines by Cray. It sets Hydra's variables, too.
PALS = Variables("mpiexec of PALS", "PALS_RANKID", "PMI_SIZE")
HYDRA = Variables("mpiexec of MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE")

SRUN = "srun"
STEP_RANK, STEP_SIZE = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
_JOB, _STEP, _RESTART = "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"
_NODES = "SLURM_STEP_NODELIST"
STEP_VARIABLES = (_JOB, _STEP, STEP_RANK, STEP_SIZE, _NODES)

# Slurm has at most 65,536 nodes, and its names at most two brackets on the machines of today.
_MOST_NODES, _MOST_BRACKETS, _MOST_DIGITS = 65_536, 8, 18

# The range lies below the ephemeral ports of systems.
_FIRST_PORT, _PORTS = 15_000, 15_000


class LauncherStep(NamedTuple):
    """The step of which this process is a task.

    Attributes:
        name: a text that no other step has. It also differs after a restart of the job.
        nodes: the names of the nodes of the step, in the order of the tasks.
    """

    name: str
    nodes: list[str]

    @property
    def store(self) -> str:
        """The URL of the store that rank 0 serves, on the first node."""
        name = self.name.encode(errors="surrogateescape")
        port = _FIRST_PORT + int.from_bytes(hashlib.sha256(name).digest()[:4], "big") % _PORTS
        return f"tcp://{'127.0.0.1' if len(self.nodes) == 1 else self.nodes[0]}:{port}"


def is_of_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as a task itself, and not for Hydra or in a shell.

    Hydra makes srun start one process on each node, and that process starts the ranks. So such ranks have the variables
    of both. With one rank on each node, both sets agree, and either may be used. srun sets Hydra's variables itself if
    it serves MPI.
    """
    if _STEP not in environ or STEP_SIZE not in environ:
        return False
    return environ.get(HYDRA.size, environ[STEP_SIZE]) == environ[STEP_SIZE]


def step(environ: Mapping[str, str]) -> LauncherStep:
    """Return the step that `environ`, which has all of `STEP_VARIABLES`, describes.

    Raises:
        UsageError: the list of nodes is not one.
    """
    name = f"slurm {environ[_JOB]}.{environ[_STEP]} {environ.get(_RESTART, '0')}"
    return LauncherStep(name, node_names(environ[_NODES]))


def node_names(text: str) -> list[str]:
    """Return the names in a list of nodes in Slurm's notation.

    Raises:
        UsageError: `text` does not follow the notation.

    >>> node_names("login,node[01-03,7],r[1-2]n[0-1]")
    ['login', 'node01', 'node02', 'node03', 'node7', 'r1n0', 'r1n1', 'r2n0', 'r2n1']
    """
    names = list(islice((name for part in _split(text) for name in _expanded(part, text)), _MOST_NODES + 1))
    if not all(names) or len(names) > _MOST_NODES:
        raise _no_nodes(text)
    return names


def _split(text: str) -> Iterator[str]:
    """Yield the parts of a list, split at the commas outside of brackets."""
    depth = start = 0
    for index, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _no_nodes(text)
        if character == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    if depth:
        raise _no_nodes(text)
    yield text[start:]


def _expanded(part: str, whole: str) -> Iterator[str]:
    """Yield the names that a part stands for. Each bracket holds numbers and ranges of numbers."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, after = rest.partition("]")
    if part.count("[") > _MOST_BRACKETS:
        raise _no_nodes(whole)
    endings = list(islice(_expanded(after, whole), _MOST_NODES + 1))
    for item in inside.split(","):
        first, dash, last = item.partition("-")
        last = last if dash else first
        are_numbers = all(end.isascii() and end.isdigit() and len(end) <= _MOST_DIGITS for end in (first, last))
        if not (are_numbers and int(first) <= int(last)):
            raise _no_nodes(whole)
        for number in range(int(first), int(last) + 1):
            yield from (f"{before}{number:0{len(first)}}{ending}" for ending in endings)


def _no_nodes(text: str) -> UsageError:
    return UsageError(f"{_NODES}={text!r} cannot be used: it must list names of nodes, such as node[01-03,7]")
