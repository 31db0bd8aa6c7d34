#!/usr/bin/env python3
"""The sections of `.ci/run` that a change needs: ``sections.py [COMMIT]`` prints the arguments of make for each.

The gate always runs. `BY_PATH` names the other sections, by the paths that differ between the commit and the files in
this folder. All sections run, with those of the night, if there is no commit or git does not know it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# The groups of tests that the gate always runs, and those that it runs if their paths changed (tests/README.md).
GATE = ("pure", "contract", "jobs", "clients")
GROUPS = {"device", "fabrics", "hosts", "frameworks", "bench", "examples"}

NATIVE = {"sanitize-address,undefined", "sanitize-thread", "fuzz", "aarch64", "counts"}
FRAMEWORKS = {"torch-newest", "tensorflow", "keras"}
# `test` runs the tests of all groups.
NIGHT = {"test", "campaign", "package", "demo"}
ALL_BY_DAY = GROUPS | NATIVE | FRAMEWORKS | {"engines", "docs"}

# In patterns of paths, * stands for slashes too. A path that no pattern matches needs the gate alone.
BY_PATH = {
    # How everything is built, installed and run.
    ".ci/*": ALL_BY_DAY,
    "Makefile": ALL_BY_DAY,
    "pyproject.toml": ALL_BY_DAY | {"package"},
    "CMakeLists.txt": NATIVE | {"package"},
    "scripts/*": NATIVE | FRAMEWORKS | {"engines"},
    "tests/support/*": GROUPS,
    "tests/conftest.py": GROUPS,
    # The native core, and the parsers of Python.
    "transports/native/*": NATIVE | {"device", "fabrics", "hosts"},
    "tests/native/*": NATIVE,
    "tests/fuzz/*": {"fuzz"},
    # Hosts in network namespaces.
    "transports/tcp/*": {"hosts"},
    "transports/links/*": {"hosts"},
    "transports/host/*": {"hosts"},
    "transports/rendezvous/*": {"hosts"},
    "unisono/swarm/*": {"hosts"},
    "tests/*/test_*hosts.py": {"hosts"},
    "tests/*/test_cut_network.py": {"hosts"},
    # Arrays of a GPU, UCX and MPI.
    "collectives/*": {"device"},
    "transports/cuda/*": {"device"},
    "transports/nccl/*": {"device"},
    "frameworks/gradients/*": {"device"},
    "unisono/testing/*": {"device"},
    "*device*": {"device"},
    "*gpu*": {"device"},
    "tests/*/test_*cuda*": {"device"},
    "tests/*/test_nccl.py": {"device"},
    "tests/*/test_registered_arrays.py": {"device"},
    "transports/tagged/*": {"fabrics"},
    "transports/ucx/*": {"fabrics"},
    "transports/mpi/*": {"fabrics"},
    "tests/*/test_ucx.py": {"fabrics"},
    "tests/*/test_mpi_*": {"fabrics"},
    # Frameworks, also in other versions; engines and benchmarks.
    "frameworks/*": FRAMEWORKS | {"frameworks"},
    "tests/frameworks/*": FRAMEWORKS | {"frameworks"},
    "unisono/compat/*": {"tensorflow", "keras", "frameworks"},
    "unisono/launchers/*": {"engines", "hosts"},
    "tests/launchers/*": {"engines"},
    "bench/*": {"bench"},
    "tuning/*": {"bench"},
    "tests/bench/*": {"bench"},
    "tests/*/test_campaign.py": {"bench"},
    # Pages, and the programs and modules whose examples they show.
    "*.md": {"docs", "examples"},
    "docs/*": {"docs", "examples"},
    "examples/*": {"examples"},
    "tests/docs/*": {"examples"},
}

# The sections in the order in which they begin, because the longest come first, with their arguments of make.
MAKE = {
    "test": "test PYTEST=tests",  # tests that are named run without the lint, which is a section of its own
    "gate": "gate WORKERS=4 GATE={groups}",  # many of its tests wait for ranks
    "torch-newest": "torch-newest",
    "campaign": "campaign TRIALS=150",
    "sanitize-address,undefined": "sanitize-address,undefined",
    "sanitize-thread": "sanitize-thread",
    "package": "package",
    "engines": "engines",
    "tensorflow": "tensorflow",
    "keras": "keras",
    "fuzz": "fuzz",
    "aarch64": "aarch64",
    "docs": "docs",
    "counts": "counts",
    "demo": "demo",
}


def needed_by(paths: Iterable[str]) -> set[str]:
    """Return the sections, and the groups of tests for the gate, that a change of these paths needs beside the gate."""
    needed = [names for path in paths for pattern, names in BY_PATH.items() if fnmatchcase(path, pattern)]
    return set().union(*needed)


def arguments_of(paths: Iterable[str] | None) -> list[str]:
    """Return the arguments of make for each section that a change needs, or for all if the paths are None."""
    needed = MAKE.keys() - {"gate"} if paths is None else needed_by(paths) | {"gate"}
    groups = ",".join((*GATE, *sorted(GROUPS & needed)))
    return [arguments.format(groups=groups) for section, arguments in MAKE.items() if section in needed]


def changed_since(commit: str) -> list[str] | None:
    """Return the paths that differ from a commit, with untracked ones, or None if git does not know the commit."""
    commands = (
        ("diff", "--name-only", "--no-renames", "-z", f"{commit}^{{commit}}", "--"),
        ("ls-files", "--others", "--exclude-standard", "-z"),
    )
    done = [
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False) for words in commands
    ]
    if any(process.returncode for process in done):
        return None
    return [path for process in done for path in process.stdout.split("\0") if path]


def main(commits: list[str]) -> None:
    """Print the arguments of make for each section, a section a line."""
    sys.stdout.writelines(
        f"{arguments}\n" for arguments in arguments_of(changed_since(commits[0]) if commits else None)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
