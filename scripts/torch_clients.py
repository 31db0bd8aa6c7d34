#!/usr/bin/env python3
"""Test the backend of torch under libraries that stand on torch. Arguments are those of pytest.

The libraries are installed in an environment of their own, ``.torch/clients``, because they bring gigabytes. It sees
the packages of the current environment: the editable Unisono with its compiled core, and the tools of the tests.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from unisono.bench.peers import make_environment

FOLDER = Path(".torch/clients")
TESTS = "tests/frameworks/test_torch_clients.py"
# Versions are exact, because each library changes how it makes process groups.
LIBRARIES = (
    "torch==2.13.0",
    "accelerate==1.15.0",
    "deepspeed==0.19.8",
    "lightning==2.6.6",
    "pytorch-ignite==0.5.5",
    "torchft==0.2.0",
    "torchmetrics==1.9.0",
    "transformers==5.23.0",
)


def main() -> None:
    """Install the libraries, if they are not there yet, and run the tests; exit as pytest does."""
    make_environment(FOLDER, LIBRARIES, sees=sysconfig.get_path("purelib"))
    command = [str(FOLDER.absolute() / "bin" / "python"), "-m", "pytest", TESTS, *sys.argv[1:]]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
