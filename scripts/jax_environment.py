"""Run tests with other versions of JAX: ``jax_environment.py 0.5.0 0.9.2 [-- ARGUMENTS OF PYTEST]``.

Without arguments of pytest, all tests of JAX run.

Each version has an environment of its own, ``.jax/VERSION``. It sees the packages of the current environment: the
editable Unisono with its compiled core, and the tools of the tests. Only JAX and optax are installed. Nothing is
compiled.

A version that pip cannot install is skipped, and the last lines say so: JAX 0.11 and newer need Python 3.12. The exit
code is 1 if tests failed.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from tested_versions import test_versions

from unisono.bench.peers import make_environment

ROOT = Path(".jax")
TESTS = ("tests/frameworks/test_jax.py", "tests/frameworks/test_jax_xla.py")


def install(version: str) -> str:
    """Create the environment of a version of JAX, if it does not exist yet. Return the path of its Python.

    Raises:
        UsageError: pip cannot install this version here.
    """
    folder = ROOT / version
    make_environment(folder, (f"jax=={version}", f"jaxlib=={version}", "optax"), sees=sysconfig.get_path("purelib"))
    return str(folder.absolute() / "bin" / "python")


if __name__ == "__main__":
    test_versions("JAX", install, TESTS)
