"""The structure of the source: no import circles between files, and a map in each package."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.source_imports import imports

from unisono.options import CUDA_IPC, TRANSPORTS, WHOLE_TRANSPORTS
from unisono.transports.links.channel_kinds import CHANNELS

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("algorithms", "bench", "collectives", "frameworks", "transports", "tuning", "unisono")

Graph = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """Return the path of each module of the source, by name.

    Each file counts once, although links make it visible twice.
    """
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.resolve() == path]
    return {_module_of(path): path for path in paths}


def _module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    inside = parts if parts[0] == "unisono" else ("unisono", *parts)
    return ".".join(inside[:-1] if inside[-1] == "__init__" else inside)


def import_graph(sources: Mapping[str, str]) -> Graph:
    """Return the modules that each module imports. An import from a package counts only if it names a module."""
    packages = {name.rpartition(".")[0] for name in sources}
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        targets = {_owner(name, sources) for name in imports(source)}
        graph[module] = {target for target in targets if target and target != module and target not in packages}
    return graph


def _owner(name: str, sources: Mapping[str, str]) -> str:
    while name and name not in sources:
        name = name.rpartition(".")[0]
    return name


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of modules that import each other: the strongly connected components of several modules."""
    reachable = {module: _reachable(graph, module) for module in graph}
    groups = {
        frozenset(other for other in reached if module in reachable[other]) for module, reached in reachable.items()
    }
    return sorted(sorted(group) for group in groups if group)


def _reachable(graph: Graph, start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for target in graph[waiting.pop()] - reached:
            reached.add(target)
            waiting.append(target)
    return reached


def test_no_files_import_each_other_in_a_circle() -> None:
    sources = {module: path.read_text() for module, path in modules().items()}
    assert circles(import_graph(sources)) == []


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"u.a": "import u.b", "u.b": "", "u.c": "import u.a, u.b"}, []),
        ({"u.a": "from u import b", "u.b": "def f():\n    from u.a import g"}, [["u.a", "u.b"]]),
        (
            {"u.a": "from u.b import x", "u.b": "from u.c import x", "u.c": "if TYPE_CHECKING:\n    import u.a"},
            [["u.a", "u.b", "u.c"]],
        ),
    ],
    ids=["none", "inside a function", "for type checkers"],
)
def test_circles_finds_modules_that_import_each_other(sources: dict[str, str], expected: list[list[str]]) -> None:
    assert circles(import_graph(sources)) == expected


# The docstring of the facade is the first page of `help(unisono)`. So it describes the library and not its files.
FACADE = ROOT / "unisono" / "__init__.py"
PACKAGES = sorted(path for path in modules().values() if path.name == "__init__.py" and path != FACADE)


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.parent.relative_to(ROOT).as_posix())
def test_package_maps_its_files(path: Path) -> None:
    """The docstring of a package names each of its files and folders, so that a reader finds the right one."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    entries = {child.stem for child in path.parent.iterdir() if _is_part(child)}
    assert docstring
    assert [entry for entry in sorted(entries) if entry not in docstring] == []


def _is_part(child: Path) -> bool:
    is_module = child.suffix == ".py" and child.name not in ("__init__.py", "__main__.py")
    return not child.is_symlink() and (is_module or (child / "__init__.py").exists())


@pytest.mark.parametrize("name", [*TRANSPORTS, *WHOLE_TRANSPORTS])
def test_map_of_the_transports_has_a_row_for_each_value_of_the_option(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / "transports" / "__init__.py").read_text())) or ""
    rows = [line for line in docstring.splitlines() if f"`{name}`" in line]
    assert [line for line in rows if (ROOT / "transports" / line.split("`")[1]).is_dir()]


def test_each_transport_of_messages_in_the_option_has_a_row_in_the_table_of_channels() -> None:
    assert {*CHANNELS, CUDA_IPC} == {*TRANSPORTS}
