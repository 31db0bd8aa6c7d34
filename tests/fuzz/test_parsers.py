"""The parsers of what other processes have written refuse any input by their own errors, and soon."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fuzz import bounds
from fuzz.edits import edited
from fuzz.parsers import PARSERS, parse
from hypothesis import given, settings, strategies as st

CORPUS = sorted((Path(__file__).parent / "corpus").iterdir())


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_parser_refuses_an_input_that_once_made_it_fail(path: Path) -> None:
    parse(path.read_bytes())


@pytest.mark.parametrize("letter", PARSERS)
def test_parser_takes_a_valid_input(letter: str) -> None:
    parser = PARSERS[letter]
    parser.parse(edited(b"\1", parser.seeds))


EDIT = st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, 255)).map(bytes)


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(
    letter=st.sampled_from(list(PARSERS)),
    seed=st.integers(0, 5),
    edits=st.lists(EDIT, max_size=4),
)
def test_parser_refuses_edits_of_valid_inputs(letter: str, seed: int, edits: Sequence[bytes]) -> None:
    parse(bytes([ord(letter), seed]) + b"".join(edits))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.binary(min_size=1, max_size=200))
def test_parser_refuses_any_bytes(data: bytes) -> None:
    parse(data)


@pytest.mark.parametrize(
    "fault",
    [
        lambda data: {}[data],
        lambda data: int.from_bytes(data, "big") // 0,
        lambda data: (_ for _ in ()).throw(RecursionError),
    ],
    ids=["KeyError", "ZeroDivisionError", "RecursionError"],
)
def test_parser_that_fails_by_another_error_is_noticed(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARSERS, "n", PARSERS["n"]._replace(parse=fault))
    with pytest.raises((KeyError, ZeroDivisionError, RecursionError)):
        parse(b"n\1")


def test_parser_that_takes_memory_without_bound_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes of a flight recorder could name 20,000 communicators of 65,535 ranks."""
    ranks = lambda _: [tuple(range(65_535)) for _ in range(20_000)]  # noqa: E731
    monkeypatch.setitem(PARSERS, "n", PARSERS["n"]._replace(parse=ranks))
    with pytest.raises(MemoryError):
        parse(b"n\1")


def test_parser_that_does_not_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_CPU_S", 0.01)
    monkeypatch.setitem(PARSERS, "o", PARSERS["o"]._replace(parse=lambda _: all(True for _ in itertools.count())))
    with pytest.raises(bounds.TooSlowError):
        parse(b"o\1")
