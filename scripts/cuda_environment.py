"""Run tests with other versions of cuda-bindings: ``cuda_environment.py 12.9.1 13.0.3 [-- ARGUMENTS OF PYTEST]``.

Without arguments of pytest, the tests of the driver and the compiler run, without a GPU over the driver's double.

Each version has an environment of its own, ``.cuda/VERSION``, with NVRTC of the same major version. It sees the
packages of the current environment: the editable Unisono with its compiled core, and the tools of the tests.

A version that pip cannot install is skipped, and the last lines say so. The exit code is 1 if tests failed.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from tested_versions import test_versions

from unisono.bench.peers import make_environment

ROOT = Path(".cuda")
TESTS = (
    *("tests/transports/test_cuda_driver.py", "tests/transports/test_cuda_programs.py"),
    *("tests/transports/test_cuda_compiler.py", "tests/transports/test_cuda_signatures.py"),
    "tests/collectives/test_device_contract.py",
)
# By the major version, as the extras of the project have them.
NVRTC = {"12": "nvidia-cuda-nvrtc-cu12==12.9.*", "13": "nvidia-cuda-nvrtc==13.0.*"}


def install(version: str) -> str:
    """Create the environment of a version of cuda-bindings, if it does not exist yet. Return the path of its Python.

    Raises:
        UsageError: pip cannot install this version here.
    """
    folder = ROOT / version
    packages = (f"cuda-bindings=={version}", NVRTC[version.partition(".")[0]])
    make_environment(folder, packages, sees=sysconfig.get_path("purelib"))
    return str(folder.absolute() / "bin" / "python")


if __name__ == "__main__":
    test_versions("cuda-bindings", install, TESTS)
