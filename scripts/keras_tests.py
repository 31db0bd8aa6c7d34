#!/usr/bin/env python3
"""Test what works with Keras on its backends torch and JAX. Arguments are those of pytest.

Keras is installed in an environment of its own, ``.keras``, which sees the packages of the current one: the editable
Unisono with its compiled core, torch, JAX, and the tools of the tests. `tensorflow_tests.py` tests the backend
TensorFlow, whose import takes longer than the tests here.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from unisono.bench.peers import make_environment

FOLDER = Path(".keras")
LIBRARIES = ("keras==3.15.1",)
TESTS = ("tests/frameworks/test_keras.py", "tests/frameworks/test_transparent_keras.py")


def main() -> None:
    """Install Keras, if it is not there yet, and run the tests; exit as pytest does."""
    make_environment(FOLDER, LIBRARIES, sees=sysconfig.get_path("purelib"))
    python = str(FOLDER.absolute() / "bin" / "python")
    sys.exit(subprocess.run([python, "-m", "pytest", *(sys.argv[1:] or TESTS)], check=False).returncode)


if __name__ == "__main__":
    main()
