"""Which sections `.ci/run` runs, by the paths that changed since the last commit that passed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from fnmatch import filter as matching
from pathlib import Path
from types import ModuleType

import pytest
from support.deadlines import DEADLINE_S
from support.groups import GROUPS, TESTS, group_of

ROOT = Path(__file__).resolve().parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sections", ROOT / "scripts/sections.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SECTIONS = _script()


@pytest.mark.parametrize(
    ("path", "needed"),
    [
        ("collectives/calls/dispatch.py", {"device"}),
        ("algorithms/ir/plan.py", set()),
        ("transports/native/core/plan/plan.cpp", SECTIONS.NATIVE | {"device", "fabrics", "hosts"}),
        ("tests/native/hot_paths.json", SECTIONS.NATIVE),
        ("frameworks/torch/process_groups/backend.py", SECTIONS.FRAMEWORKS | {"frameworks"}),
        ("collectives/device/routes.py", {"device"}),
        ("unisono/launchers/ray.py", {"engines", "hosts"}),
        ("README.md", {"docs", "examples"}),
        ("pyproject.toml", SECTIONS.ALL_BY_DAY | {"package"}),
    ],
)
def test_a_change_needs_the_sections_and_groups_of_its_path(path: str, needed: set[str]) -> None:
    assert SECTIONS.needed_by([path]) == needed


def test_the_gate_runs_the_groups_of_the_changed_paths_too() -> None:
    usual = "gate WORKERS=4 GATE=pure,contract,jobs,clients"
    assert SECTIONS.arguments_of(["algorithms/ir/plan.py"]) == [usual]
    assert SECTIONS.arguments_of(["bench/driver.py", "docs/native.md"]) == [f"{usual},bench,examples", "docs"]


def paths_of_the_repository() -> Iterator[str]:
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name == ".ci" or not name.startswith((".", "build"))]
        yield from (os.path.relpath(os.path.join(folder, name), ROOT) for name in files)


def test_each_pattern_of_paths_has_files() -> None:
    paths = list(paths_of_the_repository())
    assert not [pattern for pattern in SECTIONS.BY_PATH if not matching(paths, pattern)]


def test_each_section_is_a_target_of_make_and_each_group_a_mark_of_tests() -> None:
    targets = set(re.findall(r"^([\w-]+|sanitize-%):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {re.sub("sanitize-.*", "sanitize-%", section) for section in SECTIONS.MAKE} <= targets
    needed = SECTIONS.NIGHT.union(*SECTIONS.BY_PATH.values())
    assert needed == (SECTIONS.MAKE.keys() - {"gate"}) | SECTIONS.GROUPS
    assert {*SECTIONS.GATE, *SECTIONS.GROUPS} == set(GROUPS.values())


def test_each_file_of_tests_has_a_group_and_each_pattern_has_files() -> None:
    files = [path for path in TESTS.rglob("test_*.py") if path.parent != TESTS]
    assert {group_of(path) for path in files} == set(GROUPS.values())
    assert not [pattern for pattern in GROUPS if not any(TESTS.glob(pattern))]


class Clone:
    """A repository with `.ci/run`, whose targets of make print their names, or fail."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in (".ci/run", "scripts/sections.py"):
            (folder / name).parent.mkdir()
            shutil.copy(ROOT / name, folder / name)
        (folder / ".gitignore").write_text("build\n")
        self.write("Makefile", "%:\n\t@echo $@ $(PYTEST)$(TRIALS)\n\t@test $@ != $(FAILS)\n.PHONY: package\n")
        self._git("init", "-q")

    def write(self, name: str, text: str) -> None:
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def commit(self) -> str:
        self._git("add", ".")
        self._git("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m")
        return self._git("rev-parse", "HEAD")

    def run(self, *, fails: str = "none", **settings: str) -> tuple[int, set[str]]:
        """Return the exit status of `.ci/run`, and the sections that ran."""
        environment = {"PATH": os.environ["PATH"], "FAILS": fails, **settings}
        done = subprocess.run(
            ["bash", ".ci/run"],
            cwd=self._folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        return done.returncode, set(re.findall(r"^=== make (\S+): \d+ s$", done.stdout, re.MULTILINE))

    def passed(self) -> str:
        return self._git("rev-parse", "--verify", "--quiet", "refs/ci/passed")

    def _git(self, *words: str) -> str:
        command = ["git", *words]
        return subprocess.run(command, cwd=self._folder, capture_output=True, text=True, check=True).stdout.strip()


SET_UP = {"everything", "debian", "mpi", "lint"}
EVERYTHING = SECTIONS.MAKE.keys() - {"gate"}


def test_all_sections_run_in_a_new_clone_and_those_of_the_changed_paths_after_it_has_passed(tmp_path: Path) -> None:
    clone = Clone(tmp_path)
    first = clone.commit()
    assert clone.run() == (0, SET_UP | EVERYTHING)
    assert clone.passed() == first

    clone.write("docs/page.md", "text\n")
    assert clone.run() == (0, SET_UP | {"gate", "docs"})
    assert clone.passed() == first, "a run over files that no commit holds says nothing about a commit"

    second = clone.commit()
    assert clone.run(fails="gate")[0] == 1
    assert clone.passed() == first
    assert clone.run() == (0, SET_UP | {"gate", "docs"})
    assert clone.passed() == second

    assert clone.run() == (0, SET_UP | {"gate"})
    assert clone.run(CI_SINCE=first) == (0, SET_UP | {"gate", "docs"})
    assert clone.run(CI_SINCE="0" * 40) == (0, SET_UP | EVERYTHING)
    assert clone.run(CI_ALL="1") == (0, SET_UP | EVERYTHING)
