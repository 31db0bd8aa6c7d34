"""Entry points of installed packages, and the modules that are not imported when there are none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest
from support.deadlines import DEADLINE_S

GROUP = "unisono.algorithms"
ASK = (
    "from unisono.foundation.entry_points import entry_points; "
    "print(*(point.value for point in entry_points(group={!r})))"
)
METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: 1\n"


def run(program: str, *places: Path) -> str:
    """Return the output of `program` in a new process that also finds modules and packages in `places`."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    return subprocess.check_output([sys.executable, "-c", program], env=environ, text=True, timeout=DEADLINE_S).strip()


def files_of(name: str, group: str) -> dict[str, str]:
    """Return the files of a package `name` that has an entry point of `group`."""
    folder = f"{name}-1.dist-info"
    return {
        f"{folder}/METADATA": METADATA.format(name),
        f"{folder}/entry_points.txt": f"[{group}]\nmine = {name}\n",
    }


def as_folder(place: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return place


def as_archive(place: Path, files: dict[str, str]) -> Path:
    with ZipFile(place / "packages.zip", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return place / "packages.zip"


@pytest.mark.parametrize("install", [as_folder, as_archive])
def test_entry_point_of_an_installed_package_is_found(
    install: Callable[[Path, dict[str, str]], Path], tmp_path: Path
) -> None:
    place = install(tmp_path, files_of("mine", GROUP))
    assert run(ASK.format(GROUP), place) == "mine"
    assert run(ASK.format("unisono.nothing"), place) == ""


def test_entry_point_search_ignores_broken_and_missing_folders(tmp_path: Path) -> None:
    as_folder(tmp_path, files_of("mine", GROUP))
    (tmp_path / "broken-1.dist-info").write_text("a file where a folder should be")
    assert run(ASK.format(GROUP), tmp_path, tmp_path / "there_is_none") == "mine"


def test_algorithms_of_an_installed_package_are_candidates(tmp_path: Path) -> None:
    as_folder(tmp_path, files_of("their_algorithms", GROUP))
    (tmp_path / "their_algorithms.py").write_text(
        "import dataclasses, unisono\n"
        "from unisono.algorithms.builders.ring import allreduce_ring\n"
        "@unisono.algorithm('allreduce', 'theirs', sizes=[1, 2])\n"
        "def theirs(size, rank, root=0):\n"
        "    return dataclasses.replace(allreduce_ring(size, rank), algorithm='theirs')\n"
    )
    output = run("import unisono; print(unisono.init().explain('allreduce', nbytes=8))", tmp_path)
    assert "theirs" in output


def test_rank_imports_only_builders_that_it_uses() -> None:
    output = run(
        "import sys, numpy, unisono\n"
        "unisono.init().allreduce(numpy.ones(1), algorithm='recursive_doubling')\n"
        "names = ['builders.doubling', 'builders.ring', 'builders.tree', 'composition.hierarchical', 'verifier']\n"
        "print([name for name in names if f'unisono.algorithms.{name}' in sys.modules])\n"
        "print([name for name in ('importlib.metadata', 'difflib', 'email', 'logging') if name in sys.modules])\n"
    )
    assert output.splitlines() == ["['builders.doubling']", "[]"]
