"""Runs the examples of documents and docstrings, and checks links. Sphinx checks the links between pages of docs/."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.cli.main import unisono as command_line
from unisono.collectives.bootstrap import user_algorithms
from unisono.launchers.launch import Pool
from unisono.options import FIELDS, LAUNCHER_VARIABLES, PREFIX, variable

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
MODULES = [path for path in sorted((ROOT / "unisono").rglob("*.py")) if ">>>" in path.read_text()]
MODULES += [
    path
    for folder in ("algorithms", "bench", "collectives", "frameworks", "transports", "tuning")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>>" in path.read_text()
]

BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n+)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
CONSOLE = re.compile(r"^```(?:console|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# After a prompt or at the begin of a line, behind variables and a launcher.
COMMAND = re.compile(
    r"^(?:\$ )?(?:\w+=\S+ )*(?:(?:srun|torchrun --nproc-per-node \d+ -m|mpiexec -n \d+) )?unisono (?P<command>.*)"
)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:|#)(?P<target>[^)#\s]+)")
DOCTEST_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class DocumentBlock:
    """A block of Python in a document. `reason` says why it is not run, if it is not."""

    document: Path
    line: int
    code: str
    reason: str | None

    def __str__(self) -> str:
        return f"{name_of(self.document)}:{self.line}"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks_of(document: Path) -> list[DocumentBlock]:
    text = document.read_text()
    return [
        DocumentBlock(document, text.count("\n", 0, match.start("code")) + 1, match["code"], match["reason"])
        for match in BLOCK.finditer(text)
    ]


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
PROGRAMS = [block for block in BLOCKS if ">>>" not in block.code]


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_a_program_in_a_document_runs(block: DocumentBlock, tmp_path: Path) -> None:
    compile(block.code, str(block), "exec")
    if block.reason is None:
        program = tmp_path / "program.py"
        program.write_text(block.code)
        completed = subprocess.run(
            [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False
        )
        assert completed.returncode == 0, completed.stderr


@pytest.fixture(scope="module")
def launch() -> Iterator[Callable[..., list[Any]]]:
    """Run `fn` as `un.launch` does, but on ranks that stay, because starting ranks takes longer than most examples."""
    start, pools = un.launch, dict[int, Pool]()
    with contextlib.ExitStack() as stack:

        def launch(fn: Callable[..., Any], size: int, *args: Any, **given: Any) -> list[Any]:
            if given:
                return start(fn, size, *args, **given)
            if size not in pools:
                pools[size] = stack.enter_context(Pool(size))
            return pools[size].run(on_a_new_communicator, fn, args)

        yield launch


def on_a_new_communicator(world: un.Communicator, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with world.dup() as own:
        return fn(own, *args)


@pytest.fixture
def ranks_that_stay(launch: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(un, "launch", launch)


@pytest.mark.usefixtures("ranks_that_stay")
@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if any(">>>" in block.code for block in blocks_of(path))], ids=name_of
)
def test_examples_in_a_document_print_the_shown_results(document: Path) -> None:
    # shared by the examples of a document, because a reader runs them one after the other
    names: dict[str, object] = {}
    runner = doctest.DocTestRunner(optionflags=DOCTEST_FLAGS)
    for block in blocks_of(document):
        if ">>>" in block.code:
            example = doctest.DocTestParser().get_doctest(block.code, names, str(block), str(document), block.line - 1)
            runner.run(example, clear_globs=False)
            names = example.globs
    assert runner.tries > 0
    assert runner.failures == 0


@pytest.mark.usefixtures("ranks_that_stay")
@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_examples_in_docstrings_print_the_shown_results(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    module = importlib.import_module(name if name.startswith("unisono") else f"unisono.{name}")
    result = doctest.testmod(module, optionflags=DOCTEST_FLAGS)
    assert result.attempted > 0
    assert result.failed == 0


def commands_of(document: Path) -> list[list[str]]:
    """Return the words of each command of `unisono` in the console blocks of a document."""
    lines = [line for block in CONSOLE.findall(document.read_text()) for line in block.splitlines()]
    words = [shlex.split(match["command"], comments=True) for line in lines if (match := COMMAND.match(line))]
    return [command for command in words if not {"|", ">", "…"} & set(command)]


def parse(command: click.Command, words: list[str]) -> None:
    """Parse a command line without running it."""
    if isinstance(command, click.Group) and words and not words[0].startswith("-"):
        subcommand = command.get_command(click.Context(command), words[0])
        assert subcommand is not None, f"there is no command {words[0]!r}"
        parse(subcommand, words[1:])
        return
    with contextlib.suppress(click.exceptions.Exit):  # --help and --version end the parsing
        command.make_context(command.name, words)


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if commands_of(path)], ids=name_of)
def test_commands_in_a_document_have_valid_options(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The files need not exist.
    monkeypatch.setattr(click.Path, "convert", lambda _, value, *__: Path(value))
    monkeypatch.setattr(user_algorithms, "load", lambda _: None)
    monkeypatch.setenv("UNISONO_LOAD", "")
    for words in commands_of(document):
        parse(command_line, words)


def test_every_error_has_a_remedy() -> None:
    errors = [getattr(un, name) for name in dir(un) if name.endswith("Error") and name != "UnisonoError"]
    assert len(errors) > 10
    assert [error.__name__ for error in errors if "Remedy:\n" not in str(error.__doc__)] == []


def test_settings_page_lists_every_variable_with_its_default() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    defaults = dict(re.findall(r"^\| `(UNISONO_\w+)` \|\s*`?([^|`]*?)`?\s*\|", text, re.MULTILINE))
    ours = {variable(name): str(getattr(un.Options(), name)) for name in FIELDS}
    assert {name: default for name, default in defaults.items() if name in ours} == ours
    launchers = {PREFIX + name for name in LAUNCHER_VARIABLES}
    assert set(re.findall(r"`(UNISONO_[A-Z_]+)`", text)) == {*ours, *launchers}


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path.parent == ROOT or "examples" in path.parts], ids=name_of
)
def test_links_between_documents_lead_to_files(document: Path) -> None:
    targets = [match["target"] for match in LINK.finditer(document.read_text())]
    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_doc_tests_find_every_python_block(document: Path) -> None:
    assert document.read_text().count("```python") == len(blocks_of(document))
