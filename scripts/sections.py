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

ALWAYS = {"gate"}
NATIVE = {"sanitize-address,undefined", "sanitize-thread", "fuzz", "aarch64", "counts"}
FRAMEWORKS = {"torch-newest", "tensorflow", "keras", "engines"}
DOCS = {"docs", "examples"}
# `test` runs the tests of `gate` and of `examples` too.
NIGHT = {"test", "campaign", "package", "demo"}

# In patterns of paths, * stands for slashes too. A path that no pattern matches needs the gate alone.
BY_PATH = {
    # How everything is built, installed and run.
    ".ci/*": NATIVE | FRAMEWORKS | DOCS,
    "Makefile": NATIVE | FRAMEWORKS | DOCS,
    "pyproject.toml": NATIVE | FRAMEWORKS | DOCS | {"package"},
    "CMakeLists.txt": NATIVE | {"package"},
    "scripts/*": NATIVE | FRAMEWORKS,
    # The native core, and the parsers of Python.
    "transports/native/*": NATIVE,
    "tests/native/*": NATIVE,
    "tests/fuzz/*": {"fuzz"},
    # Frameworks and engines of other versions may treat these differently.
    "frameworks/*": {"torch-newest", "tensorflow", "keras"},
    "tests/frameworks/*": {"torch-newest", "tensorflow", "keras"},
    "unisono/compat/*": {"tensorflow", "keras"},
    "unisono/launchers/*": {"engines"},
    "tests/launchers/*": {"engines"},
    # Pages and the programs that they show.
    "*.md": DOCS,
    "docs/*": DOCS,
    "tests/docs/*": DOCS,
    "examples/*": {"examples"},
}

# The order in which sections begin, because the longest come first, with the settings of each.
MAKE = {
    "test": "test PYTEST=tests",  # tests that are named run without the lint, which is a section of its own
    "gate": "gate",
    "torch-newest": "torch-newest",
    "campaign": "campaign TRIALS=150",
    "examples": "examples",
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


def sections_of(paths: Iterable[str]) -> set[str]:
    """Return the sections that a change of these paths needs."""
    needed = [sections for path in paths for pattern, sections in BY_PATH.items() if fnmatchcase(path, pattern)]
    return ALWAYS.union(*needed)


def all_sections() -> set[str]:
    """Return every section, without those whose tests `test` runs too."""
    return MAKE.keys() - {"gate", "examples"}


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
    paths = changed_since(commits[0]) if commits else None
    needed = all_sections() if paths is None else sections_of(paths)
    sys.stdout.writelines(f"{arguments}\n" for section, arguments in MAKE.items() if section in needed)


if __name__ == "__main__":
    main(sys.argv[1:])
