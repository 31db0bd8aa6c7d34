#!/usr/bin/env python3
"""Test the launchers of Ray and Dask on real local clusters. Arguments are those of pytest.

Both are installed in an environment of their own, ``.engines``, which sees the packages of the current one: the
editable Unisono with its compiled core, and the tools of the tests.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from unisono.bench.peers import make_environment

FOLDER = Path(".engines")
LIBRARIES = ("ray==2.60.0", "distributed==2026.8.0", "dask[array]==2026.8.0")
TESTS = ("tests/launchers/test_ray.py", "tests/launchers/test_dask.py")


def main() -> None:
    """Install Ray and Dask, if they are not there yet, and run the tests; exit as pytest does."""
    make_environment(FOLDER, LIBRARIES, sees=sysconfig.get_path("purelib"))
    python = str(FOLDER.absolute() / "bin" / "python")
    sys.exit(subprocess.run([python, "-m", "pytest", *(sys.argv[1:] or TESTS)], check=False).returncode)


if __name__ == "__main__":
    main()
