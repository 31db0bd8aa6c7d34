#!/usr/bin/env python3
"""Print, file by file, the sentences of docstrings, comments and pages that a reader may stumble over.

A sentence is printed if it has more than 30 words, or if it begins with a free relative ("what is ...", "whoever ...")
instead of a subject. The last line has the share of the latter. Headings are no sentences. This is something to look at
while writing; no check depends on it.

    python scripts/prose.py collectives transports/links docs/tuning.md
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

MOST_WORDS = 30
_WITHOUT_SUBJECT = re.compile(
    r"(what|whoever|whatever|whichever|those (that|who|which|of)|that which|likewise)\b", re.IGNORECASE
)
_BETWEEN_SENTENCES = re.compile(r"(?<=[.:;?!])\s+(?=[A-Z`(])")
_ITEM = re.compile(r"^(- |\d+\. )")


def paragraphs_of_page(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each paragraph and list item of a Markdown page; no code, tables or headings."""
    without_code = re.sub(
        r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), source, flags=re.DOTALL | re.MULTILINE
    )
    lines = [("" if line.startswith(("|", "<!--", "    ", "#")) else line) for line in without_code.splitlines()]
    block: list[str] = []
    for number, line in enumerate([*lines, ""], start=1):
        if block and (not line.strip() or _ITEM.match(line)):
            yield number - len(block), _ITEM.sub("", re.sub(r"\]\([^)]*\)", "]", " ".join(block)), count=1)
            block = []
        if line.strip():
            block.append(line.strip())


def paragraphs(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring paragraph and of each block of comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            line = node.body[0].lineno
            for paragraph in text.split("\n\n"):
                if ">>>" not in paragraph:
                    yield line, " ".join(paragraph.split())
    yield from _comments(source)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if block and line != last + 1:
            yield first, " ".join(block)
            block = []
        first, last = (line if not block else first), line
        block.append(token.string.lstrip("# "))
    if block:
        yield first, " ".join(block)


class Sentence(NamedTuple):
    """A sentence, with the line of its paragraph."""

    line: int
    text: str

    @property
    def words(self) -> int:
        return len(self.text.split())

    @property
    def lacks_subject(self) -> bool:
        return _WITHOUT_SUBJECT.match(self.text) is not None


def sentences_of(texts: Iterable[tuple[int, str]]) -> list[Sentence]:
    """Return the sentences of paragraphs, each of which comes with its line."""
    return [Sentence(line, text) for line, paragraph in texts for text in _BETWEEN_SENTENCES.split(paragraph)]


def main() -> None:
    """Print the hard sentences of the folders or files that the command line names, and how many there are."""
    paths = [path for name in sys.argv[1:] or ["."] for path in _files(Path(name))]
    total = hard = without_subject = 0
    for path in sorted(paths):
        read = paragraphs if path.suffix == ".py" else paragraphs_of_page
        for sentence in sentences_of(read(path.read_text(encoding="utf-8"))):
            total += 1
            without_subject += sentence.lacks_subject
            if sentence.words > MOST_WORDS or sentence.lacks_subject:
                hard += 1
                sys.stdout.write(f"{path}:{sentence.line}: {sentence.words} words: {sentence.text}\n")
    share = without_subject / max(total, 1)
    sys.stdout.write(f"{hard} sentences in {len(paths)} files; {share:.1%} of {total} begin without a subject\n")


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = [*path.rglob("*.py"), *path.rglob("*.md")]
    return [file for file in files if file.resolve() == file.absolute() and ".venv" not in file.parts]


if __name__ == "__main__":
    main()
