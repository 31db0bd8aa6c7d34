"""The places that mpirun and srun give to processes, as their environment variables say them.

mpirun of Open MPI, and the Hydra launcher of MPICH and Intel MPI, only differ in names. srun starts the tasks of a
*step* of a job; a batch script and an interactive shell of the job see variables of it as well, but are no tasks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from unisono.errors import UsageError


class Variables(NamedTuple):
    """The variables in which a launcher of MPI gives a process its place, and what people call the launcher."""

    launcher: str
    rank: str
    size: str


OPEN_MPI = Variables("mpirun of Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
HYDRA = Variables("mpiexec of MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE")

SRUN = "srun"
STEP_RANK, STEP_SIZE = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
_JOB, _STEP, _RESTART = "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"
_NODES = "SLURM_STEP_NODELIST"
STEP_VARIABLES = (_JOB, _STEP, STEP_RANK, STEP_SIZE, _NODES)

# Below the ports that systems hand out by themselves.
_FIRST_PORT, _PORTS = 15_000, 15_000


class Step(NamedTuple):
    """What srun says of the step that this process is a task of.

    Attributes:
        name: tells it from all other steps, also of the same job before it was started again.
        nodes: the names of its nodes, in the order of the tasks.
    """

    name: str
    nodes: list[str]

    @property
    def store(self) -> str:
        """The URL of the store that rank 0 serves, on the first node."""
        port = _FIRST_PORT + int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big") % _PORTS
        return f"tcp://{'127.0.0.1' if len(self.nodes) == 1 else self.nodes[0]}:{port}"


def is_of_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as a task, and not what srun started for Hydra or in a shell.

    Hydra has srun start one process on each node, which starts the ranks; those have its variables and srun's. With a
    rank on each node both say the same. srun itself sets those of Hydra where it is told to serve MPI.
    """
    if _STEP not in environ or STEP_SIZE not in environ:
        return False
    return environ.get(HYDRA.size, environ[STEP_SIZE]) == environ[STEP_SIZE]


def step(environ: Mapping[str, str]) -> Step:
    """Return what `environ`, which has all of `STEP_VARIABLES`, says of the step.

    Raises:
        UsageError: a variable has a value that it cannot have.
    """
    name = f"slurm {environ[_JOB]}.{environ[_STEP]} {environ.get(_RESTART, '0')}"
    return Step(name, node_names(environ[_NODES]))


def node_names(text: str) -> list[str]:
    """Return the names in a list of nodes as Slurm writes it.

    Raises:
        UsageError: it is none.

    >>> node_names("login,node[01-03,7],r[1-2]n[0-1]")
    ['login', 'node01', 'node02', 'node03', 'node7', 'r1n0', 'r1n1', 'r2n0', 'r2n1']
    """
    names = [name for part in _split(text) for name in _expanded(part, text)]
    if not all(names):
        raise _no_nodes(text)
    return names


def _split(text: str) -> Iterator[str]:
    """Yield the parts of a list, at the commas that stand outside of brackets."""
    depth = start = 0
    for place, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _no_nodes(text)
        if character == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    if depth:
        raise _no_nodes(text)
    yield text[start:]


def _expanded(part: str, whole: str) -> Iterator[str]:
    """Yield the names that a part stands for; in each of its brackets there are numbers and ranges of numbers."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, after = rest.partition("]")
    endings = list(_expanded(after, whole))
    for item in inside.split(","):
        first, dash, last = item.partition("-")
        last = last if dash else first
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last) < int(first) + 65_536):
            raise _no_nodes(whole)
        for number in range(int(first), int(last) + 1):
            yield from (f"{before}{number:0{len(first)}}{ending}" for ending in endings)


def _no_nodes(text: str) -> UsageError:
    return UsageError(f"{_NODES}={text!r} cannot be used: it must be names of nodes, as node[01-03,7]")
