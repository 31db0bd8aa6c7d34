"""The imports of a source file, for the tests of layers and of import circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def imports(source: str) -> Iterator[str]:
    """Yield the full names that a file imports, also inside functions: ``from a import b`` is ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
