#!/usr/bin/env python3
"""Test what works with TensorFlow. Arguments are those of pytest.

TensorFlow is installed in an environment of its own, ``.tensorflow``, because its packages want other versions of numpy
and protobuf than the tools of the tests. The environment sees the packages of the current one: the editable Unisono
with its compiled core, and the tools of the tests.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from unisono.bench.peers import make_environment

FOLDER = Path(".tensorflow")
LIBRARIES = ("tensorflow-cpu==2.21.0",)
TESTS = (
    "tests/frameworks/test_tensorflow.py",
    "tests/frameworks/test_keras.py",
    "tests/frameworks/test_transparent_keras.py",
    "tests/frameworks/test_mlcomm.py",
    "tests/frameworks/test_data_parallel.py",
    "tests/collectives/test_array_adapters.py",
)


def main() -> None:
    """Install TensorFlow, if it is not there yet, and run the tests; exit as pytest does."""
    make_environment(FOLDER, LIBRARIES, sees=sysconfig.get_path("purelib"))
    python = str(FOLDER.absolute() / "bin" / "python")
    words = ["-k", "tensorflow or keras", *TESTS] if not sys.argv[1:] else sys.argv[1:]
    sys.exit(subprocess.run([python, "-m", "pytest", *words], check=False).returncode)


if __name__ == "__main__":
    main()
