"""The public names of `unisono.algorithms` for authors of algorithms."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from unisono import algorithms


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in algorithms.__all__ if getattr(algorithms, name, None) is None] == []


def test_type_checkers_see_the_public_names() -> None:
    tree = ast.parse(Path(algorithms.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "typing"]
    visible = {alias.asname for node in imports for alias in node.names if alias.asname}
    assert visible == {*algorithms.__all__}


def test_unknown_name_of_algorithms_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'sing'"):
        algorithms.sing  # noqa: B018
