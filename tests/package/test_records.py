"""A record behaves as a frozen data class with slots does."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, astuple, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import pytest

from unisono.foundation.records import record


@record
class Visit:
    """A visitor and a time."""

    guest: str
    hour: int = 12
    with_whom: tuple[str, ...] = ()
    note: str = field(default="", compare=False, repr=False)
    tags: list[str] = field(default_factory=list, compare=False)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A visitor and a time."""

    guest: str
    hour: int = 12
    with_whom: tuple[str, ...] = ()
    note: str = field(default="", compare=False, repr=False)
    tags: list[str] = field(default_factory=list, compare=False)


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("Ann",), {}),
    (("Ann", 3), {}),
    (("Ann",), {"note": "late"}),
    ((), {"hour": 3, "guest": "Ann"}),
    (("Ann", 3, ("Bob",), "late", ["new"]), {}),
]


@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_record_has_the_same_values_as_an_equal_data_class(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ours, theirs = Visit(*args, **kwargs), Compiled(*args, **kwargs)
    assert (astuple(ours), asdict(ours)) == (astuple(theirs), asdict(theirs))
    assert repr(ours) == repr(theirs).replace("Compiled", "Visit")
    assert hash(ours) == hash(theirs)
    assert astuple(replace(ours, hour=9)) == astuple(replace(theirs, hour=9))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), (("Ann",), {"guest": "Bob"}), (("Ann",), {"who": "Bob"}), (("Ann", 1, (), "", [], "more"), {})],
)
def test_record_with_wrong_arguments_is_a_type_error(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for kind in (Visit, Compiled):
        with pytest.raises(TypeError, match="argument"):
            kind(*args, **kwargs)


def test_records_are_equal_when_class_and_compared_fields_are_equal() -> None:
    assert Visit("Ann", note="late") == Visit("Ann", 12)
    assert Visit("Ann") != Visit("Bob")
    assert Visit("Ann") != Compiled("Ann")
    assert {Visit("Ann"), Visit("Ann", tags=["new"])} == {Visit("Ann")}


def test_default_factory_runs_for_each_record() -> None:
    one, other = Visit("Ann"), Visit("Ann")
    one.tags.append("new")
    assert other.tags == []


def test_record_attributes_cannot_be_changed_added_or_deleted() -> None:
    visit: Any = Visit("Ann")
    for act in (lambda: setattr(visit, "hour", 3), lambda: setattr(visit, "more", 3), lambda: delattr(visit, "hour")):
        with pytest.raises(FrozenInstanceError):
            act()
    assert visit == Visit("Ann")
    assert not hasattr(visit, "__dict__")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_has_all_fields(copied: Callable[[Visit], Visit]) -> None:
    visit = Visit("Ann", 3, ("Bob",), "late", ["new"])
    assert astuple(copied(visit)) == astuple(visit)


def test_record_supports_fields_signature_and_pattern_matching() -> None:
    assert [field.name for field in fields(Visit)] == [field.name for field in fields(Compiled)]
    ours, theirs = inspect.signature(Visit), inspect.signature(Compiled)
    assert list(ours.parameters) == list(theirs.parameters)
    for name in ("guest", "hour", "note"):
        assert ours.parameters[name] == theirs.parameters[name]
    match Visit("Ann", 3):
        case Visit(guest, hour):
            assert (guest, hour) == ("Ann", 3)


def test_record_supports_post_init_and_its_own_repr() -> None:
    @record
    class Half:
        whole: int
        half: int = field(init=False)

        def __post_init__(self) -> None:
            if self.whole % 2:
                raise ValueError(f"{self.whole} is odd")
            object.__setattr__(self, "half", self.whole // 2)

        def __repr__(self) -> str:
            return f"half of {self.whole}"

    assert (Half(6).half, repr(Half(6))) == (3, "half of 6")
    with pytest.raises(ValueError, match="7 is odd"):
        Half(7)


def test_derived_record_adds_fields_to_its_base() -> None:
    @record
    class LongVisit(Visit):
        until: int = 24

    assert astuple(LongVisit("Ann", until=23)) == ("Ann", 12, (), "", [], 23)
    assert LongVisit("Ann") != Visit("Ann")


def test_record_without_slots_supports_cached_property() -> None:
    computed = []

    @record(slots=False)
    class Square:
        side: int

        @cached_property
        def area(self) -> int:
            computed.append(self.side)
            return self.side**2

    square = Square(3)
    assert (square.area, square.area, computed) == (9, 9, [3])
