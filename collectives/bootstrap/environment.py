"""Detects the launcher of this process and reads rank, size, store and key of the job from its environment.

Variables of several launchers may be present: the first in the order of `_launchers` counts. Without any, the job has
one rank. If ``UNISONO_STORE`` is set, ranks of every launcher meet there. Nothing in this module opens a connection.

Launchers are not asked which ranks share a host, because some were wrong. The ranks find out themselves, by
`transports.host.host_discovery`.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from functools import partial
from io import FileIO
from typing import TYPE_CHECKING, TypeAlias

from unisono.errors import RendezvousError, UsageError
from unisono.foundation.records import record
from unisono.options import variable
from unisono.transports.links.handshake import JOB_NBYTES, KEY_NBYTES
from unisono.transports.rendezvous import serving_host
from unisono.transports.rendezvous.stores import Store, StoreTimeoutError

if TYPE_CHECKING:
    from unisono.collectives.bootstrap.launcher_variables import Variables

_Applies: TypeAlias = Callable[[Mapping[str, str]], bool]

_RANK, _SIZE = variable("rank"), variable("size")
_STORE, _JOB = variable("store"), variable("job")
_KEY_FD, _KEY_FILE = variable("key_fd"), variable("key_file")
_RESTART = variable("restart")

# The variables of torch's env://. A user, a script or a Kubernetes operator sets them.
_ENV = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN_ID = "TORCHELASTIC_RUN_ID"
_TORCHRUN = (*_ENV, _TORCHRUN_ID)
# The launcher of a job with the variables `_ENV` alone.
ENV = "env://"
# The beginning of the URL of the store that torchrun's agent serves.
TORCH = "torch://"
# The store of a job whose ranks meet by MPI.
MPI_WORLD = "mpi://world"

# The `launcher` of ranks of two jobs that meet at a port; see `bridge`.
PORT = "a port"
# The launchers that serve the store themselves.
_SERVE_THE_STORE = ("unisono", "dask", "ray", PORT)

_LARGEST = 1 << 31

# Keys read from inherited descriptors, by job. A pipe can be read only once, but `init` may be called again.
_inherited_keys: dict[bytes, bytes] = {}


@record
class WaitingPlace:
    """The place where a process asks to join a running job.

    Attributes:
        store: the URL of the job's store.
        job, key: the id and the key of the job.
        rank: the number that the launcher has given the process, which is the one of a lost rank; or None.
    """

    store: str
    job: bytes
    key: bytes
    rank: int | None


@record
class Launch:
    """The facts about a job that a process has before it meets the other ranks.

    Attributes:
        rank, size: this rank and the number of ranks.
        store: URL of the store, `MPI_WORLD`, or None for a job of one rank.
        job: the id of the job: 16 bytes, equal on all ranks, not secret. Empty if it follows from the key
            (`job_of_key`).
        key: the key of the job, 32 bytes; None if the ranks must agree on one through the store (`agree_on_key`).
        launcher: "unisono", "environment" (``UNISONO_*`` set by another program), "torchrun", `ENV`, "srun", "dask",
            "ray", `PORT`, the `launcher` of one of the `Variables` in `launcher_variables`, "none", or a description of
            a program that passes its own store to `init`.
    """

    rank: int
    size: int
    store: str | None
    job: bytes
    key: bytes | None
    launcher: str

    @property
    def served_host(self) -> str | None:
        """The host on which this process must serve the store; empty for all interfaces, None if it serves none.

        Rank 0 serves the store unless its launcher does.
        """
        if self.launcher in _SERVE_THE_STORE or self.rank != 0 or not str(self.store).startswith("tcp://"):
            return None
        # The value of MASTER_ADDR may be an address of a service, and none of rank 0 itself.
        is_anywhere = self.launcher == ENV and self.key is not None
        return "" if is_anywhere else serving_host(str(self.store), has_key=self.key is not None)

    @property
    def lasting_store(self) -> str | None:
        """The URL of the store if it outlives ranks and has a key, so that processes can ask there to join; or None."""
        is_lasting = self.launcher == "unisono" or str(self.store).startswith("file://")
        return self.store if is_lasting and self.key is not None else None


_Read: TypeAlias = Callable[[Mapping[str, str]], Launch]


def detect(environ: Mapping[str, str]) -> Launch:
    """Return the `Launch` that `environ` describes.

    The first call reads a key that comes in a descriptor, and closes the descriptor. Later calls return the same key.

    Raises:
        UsageError: a variable is missing or has an invalid value; the message names it.
    """
    if _RANK in environ or _SIZE in environ:
        return _from_unisono(environ)
    for _, applies, read in _launchers():
        if applies(environ):
            return read(environ)
    return _from_incomplete(environ)


def waiting_place(environ: Mapping[str, str]) -> WaitingPlace:
    """Return the place where a process with these variables asks to join. Rank and size may be missing.

    Raises:
        UsageError: the variables name no store that outlives ranks, or no key.
    """
    is_of_unisono = _STORE in environ and not any(applies(environ) for _, applies, _ in _launchers())
    launch = _from_unisono({_RANK: "0", _SIZE: "1", **environ}) if is_of_unisono else detect(environ)
    if launch.lasting_store is None or launch.key is None:
        raise UsageError(
            f"there is no job to join: a process that joins needs the variables of the job, with {_KEY_FILE} or "
            f"{_KEY_FD} for the key and {_STORE}=file:///folder for the store, or those that `unisono run` sets"
        )
    rank = None if is_of_unisono and _RANK not in environ else launch.rank
    return WaitingPlace(launch.lasting_store, launch.job or job_of_key(launch.key), launch.key, rank)


def is_restarted(environ: Mapping[str, str]) -> bool:
    """Return whether the launcher has started this rank anew, so that it joins the job that is running."""
    return environ.get(_RESTART, "0") != "0"


def launchers(environ: Mapping[str, str]) -> list[str]:
    """Return the launchers whose variables are in `environ`; `detect` takes the first."""
    ours = ["Unisono's variables"] if _RANK in environ or _SIZE in environ else []
    return ours + [name for name, applies, _ in _launchers() if applies(environ)]


def agree_on_key(store: Store, rank: int, timeout_s: float) -> bytes:
    """Return a key that rank 0 makes and passes to the others through `store`. Every reader of the store gets the key.

    Raises:
        RendezvousError: rank 0 did not set the key in time, or the store has failed.
    """
    if rank == 0:
        store.set("key", os.urandom(KEY_NBYTES))
    try:
        key = store.get("key", timeout_s)
    except StoreTimeoutError:
        raise RendezvousError(
            f"rank 0 did not arrive within {timeout_s:g} s: check that it was started, and with the same store"
        ) from None
    if len(key) != KEY_NBYTES:
        raise RendezvousError(f"the key in the store has {len(key)} bytes, not {KEY_NBYTES}: use a new store")
    return key


def _from_unisono(environ: Mapping[str, str]) -> Launch:
    _require(environ, (_RANK, _SIZE, _STORE))
    store = environ[_STORE]
    job = _job(environ[_JOB]) if _JOB in environ else job_of_store(store)
    return Launch(
        *_rank_and_size(environ, _RANK, _SIZE),
        store=store,
        job=job,
        key=_key(environ, job),
        launcher="unisono" if _KEY_FD in environ else "environment",
    )


def _master(environ: Mapping[str, str]) -> str:
    """Return host and port of torch's variables in the form of a URL."""
    host, port = environ["MASTER_ADDR"], _number(environ, "MASTER_PORT", 1, 1 << 16)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _from_env(environ: Mapping[str, str]) -> Launch:
    _require(environ, _ENV)
    rank, size = _rank_and_size(environ, "RANK", "WORLD_SIZE")
    if size == 1:
        return Launch(0, 1, None, os.urandom(JOB_NBYTES), None, ENV)
    key = key_of_file(environ)
    if _STORE in environ:
        return Launch(rank, size, environ[_STORE], job_of_store(environ[_STORE]), key, "environment")
    master, port = _master(environ), environ["MASTER_PORT"]
    if rank == 0 and key is not None:
        master = f"localhost:{port}"  # see `Launch.served_host`
    # MASTER_ADDR stays out of the id, because it may differ: some operators set it to localhost on rank 0.
    return Launch(rank, size, f"tcp://{master}", _digest(f"{ENV} {port} {size}"), key, ENV)


def _from_torchrun(environ: Mapping[str, str]) -> Launch:
    _require(environ, _TORCHRUN)
    store = environ.get(_STORE, f"{TORCH}{_master(environ)}")
    # Without TORCHELASTIC_RESTART_COUNT, because agents that have restarted differently often have different ones.
    job = _digest(f"{store} {environ[_TORCHRUN_ID]}")
    return Launch(
        *_rank_and_size(environ, "RANK", "WORLD_SIZE"),
        store=store,
        job=job,
        key=_key(environ, job),
        launcher="torchrun",
    )


def _from_mpi(variables: Variables, environ: Mapping[str, str]) -> Launch:
    _require(environ, variables[1:])
    rank, size = _rank_and_size(environ, variables.rank, variables.size)
    store = environ.get(_STORE, MPI_WORLD)
    job = b"" if store == MPI_WORLD else _digest(store)
    if size == 1:
        return Launch(0, 1, None, os.urandom(JOB_NBYTES), None, variables.launcher)
    return Launch(rank, size, store, job, key_of_file(environ), variables.launcher)


def _from_srun(environ: Mapping[str, str]) -> Launch:
    from unisono.collectives.bootstrap.launcher_variables import SRUN, STEP_RANK, STEP_SIZE, STEP_VARIABLES, step

    _require(environ, STEP_VARIABLES)
    rank, size = _rank_and_size(environ, STEP_RANK, STEP_SIZE)
    facts = step(environ)
    job = _digest(facts.name)
    key = key_of_file(environ)
    if size == 1:
        return Launch(0, 1, None, job, None, SRUN)
    if _STORE not in environ and key is None and len(facts.nodes) > 1:
        raise UsageError(
            f"srun has placed the ranks on {len(facts.nodes)} nodes, where a store without a key would be open to "
            f"anyone: make a key, (umask 077; head -c 32 /dev/urandom > key), and set {_KEY_FILE} to its path on all "
            f"nodes, or set {_STORE}=file:///path to a folder that all nodes see"
        )
    return Launch(rank, size, environ.get(_STORE, facts.store), job, key, SRUN)


def _launchers() -> tuple[tuple[str, _Applies, _Read], ...]:
    """Return (name, test whether it started this process, reader) of each launcher except Unisono's own, in order."""
    from unisono.collectives.bootstrap.launcher_variables import (
        HYDRA,
        JSRUN,
        MVAPICH,
        OPEN_MPI,
        PALS,
        SRUN,
        is_of_step,
    )

    return (
        # Launchers of one node, such as torchrun, come first: srun or mpirun often start them, but not the ranks.
        ("torchrun", lambda environ: _TORCHRUN_ID in environ, _from_torchrun),
        (ENV, lambda environ: all(name in environ for name in _ENV), _from_env),
        *(
            (variables.launcher, partial(_has, variables.size), partial(_from_mpi, variables))
            for variables in (OPEN_MPI, MVAPICH, JSRUN)
        ),
        (SRUN, is_of_step, _from_srun),
        (PALS.launcher, partial(_has, PALS.rank), partial(_from_mpi, PALS)),
        # After srun and PALS, which may set the variables of Hydra too.
        (HYDRA.launcher, partial(_has, HYDRA.size), partial(_from_mpi, HYDRA)),
    )


def _has(name: str, environ: Mapping[str, str]) -> bool:
    return name in environ


def _from_incomplete(environ: Mapping[str, str]) -> Launch:
    """Return a job of one rank if no variables of a launcher are set.

    Raises:
        UsageError: only some of the variables of a launcher are set; the message names those that are missing.
    """
    if _STORE in environ:
        return _from_unisono(environ)
    if environ.get("WORLD_SIZE") != "1" and ("RANK" in environ or "WORLD_SIZE" in environ):
        return _from_env(environ)
    return Launch(0, 1, None, os.urandom(JOB_NBYTES), None, ENV if "WORLD_SIZE" in environ else "none")


def _require(environ: Mapping[str, str], names: tuple[str, ...]) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        present = next(name for name in names if name in environ)
        raise UsageError(
            f"{present} is set but {', '.join(missing)} is not: start the ranks with `unisono run`, torchrun, mpirun "
            f"or srun, or set {', '.join(names)} for each"
        )


def _rank_and_size(environ: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    size_value = _number(environ, size, 1, _LARGEST)
    rank_value = _number(environ, rank, 0, _LARGEST)
    if rank_value >= size_value:
        raise UsageError(f"{rank}={rank_value} cannot be used: it must be less than {size}={size_value}")
    return rank_value, size_value


def _number(environ: Mapping[str, str], name: str, least: int, end: int) -> int:
    text = environ[name]
    digits = text.lstrip("0") or text[-1:]
    if not (text.isascii() and text.isdigit() and least <= int(digits[:20]) < end):
        raise UsageError(f"{name}={text!r} cannot be used: it must be a whole number, at least {least}")
    return int(digits)


def _job(text: str) -> bytes:
    try:
        job = bytes.fromhex(text)
    except ValueError:
        job = b""
    if len(job) != JOB_NBYTES:
        raise UsageError(f"{_JOB}={text!r} cannot be used: it must be {2 * JOB_NBYTES} hexadecimal digits")
    return job


def key_of_file(environ: Mapping[str, str]) -> bytes | None:
    """Return the key in the file that ``UNISONO_KEY_FILE`` names; None if the variable is not set.

    Raises:
        UsageError: the file cannot be used.
    """
    return _key_from_file(environ[_KEY_FILE]) if _KEY_FILE in environ else None


def job_of_key(key: bytes) -> bytes:
    """Return the id of a job that has no other id. The key cannot be computed from it."""
    return hashlib.sha256(b"job of " + key).digest()[:JOB_NBYTES]


def job_of_store(url: str) -> bytes:
    """Return the id of a job that only the URL of its store identifies."""
    return _digest(url)


def _digest(text: str) -> bytes:
    # A variable may hold bytes that are no UTF-8, such as the path of a folder.
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()[:JOB_NBYTES]


def _key(environ: Mapping[str, str], job: bytes) -> bytes | None:
    if _KEY_FD in environ:
        if job not in _inherited_keys:
            _inherited_keys[job] = _key_from_descriptor(_number(environ, _KEY_FD, 0, _LARGEST))
        return _inherited_keys[job]
    return key_of_file(environ)


def _key_from_descriptor(descriptor: int) -> bytes:
    setting = f"{_KEY_FD}={descriptor}"
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            raise OSError("it is not a pipe")
        with open(descriptor, "rb", buffering=0) as pipe:  # unbuffered: ranks may share the pipe
            return _checked(_read_fully(pipe, KEY_NBYTES), setting)
    except OSError as error:
        raise UsageError(
            f"{setting} cannot be used: {error.strerror or error}; a process that a rank starts cannot be that rank too"
        ) from None


def _read_fully(pipe: FileIO, nbytes: int) -> bytes:
    received = b""
    while len(received) < nbytes and (data := pipe.read(nbytes - len(received))):
        received += data
    return received


def _key_from_file(path: str) -> bytes:
    setting = f"{_KEY_FILE}={path!r}"
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            facts = os.fstat(file.fileno())
            key = file.read(KEY_NBYTES + 1) if stat.S_ISREG(facts.st_mode) else b""
    except OSError as error:
        raise UsageError(f"{setting} cannot be used: {error.strerror or error}") from None
    if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise UsageError(
            f"{setting} cannot be used: the file must belong to you and be readable by you alone (chmod 600)"
        )
    return _checked(key, setting)


def _checked(key: bytes, setting: str) -> bytes:
    if len(key) != KEY_NBYTES:
        raise UsageError(f"{setting} cannot be used: it must hold {KEY_NBYTES} bytes")
    return key
