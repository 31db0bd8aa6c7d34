"""A record is a frozen data class with slots in all that can be seen of it."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, astuple, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import pytest

from unisono.records import record


@record
class Visit:
    """Who came, and when."""

    guest: str
    hour: int = 12
    with_whom: tuple[str, ...] = ()
    note: str = field(default="", compare=False, repr=False)
    tags: list[str] = field(default_factory=list, compare=False)


@dataclass(frozen=True, slots=True)
class Compiled:
    """Who came, and when."""

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
def test_a_record_has_the_values_of_the_data_class_that_is_made_by_the_same_call(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    ours, theirs = Visit(*args, **kwargs), Compiled(*args, **kwargs)
    assert (astuple(ours), asdict(ours)) == (astuple(theirs), asdict(theirs))
    assert repr(ours) == repr(theirs).replace("Compiled", "Visit")
    assert hash(ours) == hash(theirs)
    assert astuple(replace(ours, hour=9)) == astuple(replace(theirs, hour=9))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), (("Ann",), {"guest": "Bob"}), (("Ann",), {"who": "Bob"}), (("Ann", 1, (), "", [], "more"), {})],
)
def test_arguments_that_do_not_fit_are_a_type_error(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for each in (Visit, Compiled):
        with pytest.raises(TypeError, match="argument"):
            each(*args, **kwargs)


def test_records_are_equal_if_the_fields_that_are_compared_are_and_so_is_the_class() -> None:
    assert Visit("Ann", note="late") == Visit("Ann", 12)
    assert Visit("Ann") != Visit("Bob")
    assert Visit("Ann") != Compiled("Ann")
    assert {Visit("Ann"), Visit("Ann", tags=["new"])} == {Visit("Ann")}


def test_what_a_function_makes_by_default_is_made_for_each_record() -> None:
    one, other = Visit("Ann"), Visit("Ann")
    one.tags.append("new")
    assert other.tags == []


def test_a_record_can_be_neither_changed_nor_given_more() -> None:
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


def test_a_record_tells_its_fields_its_parameters_and_what_it_is_matched_by() -> None:
    assert [each.name for each in fields(Visit)] == [each.name for each in fields(Compiled)]
    ours, theirs = inspect.signature(Visit), inspect.signature(Compiled)
    assert list(ours.parameters) == list(theirs.parameters)
    for name in ("guest", "hour", "note"):
        assert ours.parameters[name] == theirs.parameters[name]
    match Visit("Ann", 3):
        case Visit(guest, hour):
            assert (guest, hour) == ("Ann", 3)


def test_a_record_may_check_and_derive_what_it_is_given_and_has_methods_of_its_own() -> None:
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


def test_a_record_adds_fields_to_those_of_the_record_that_it_derives_from() -> None:
    @record
    class LongVisit(Visit):
        until: int = 24

    assert astuple(LongVisit("Ann", until=23)) == ("Ann", 12, (), "", [], 23)
    assert LongVisit("Ann") != Visit("Ann")


def test_a_record_without_slots_keeps_what_it_has_computed() -> None:
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
