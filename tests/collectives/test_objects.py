"""Python objects as messages: the received objects, their memory, and objects that cannot be pickled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.deadlines import DEADLINE_S
from support.ranks import Ranks, ranks_fixture, start_ranks

import unisono as un

LARGE = 100_000
bounded = settings(max_examples=20, deadline=None, derandomize=True)
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(max_size=50)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)
# Lengths of byte arrays in an object: empty, inside the pickle, and in a message of their own.
lengths = st.lists(st.sampled_from([0, 3, (1 << 16) - 1, 1 << 16, 200_001]), max_size=3)
objects = st.tuples(plain, lengths)


ranks = ranks_fixture((1, "shm"), (3, "shm"), (3, "tcp"))


three = ranks_fixture((3, "shm"), (3, "tcp"))
matching = ranks_fixture((3, "shm"), (3, "tcp"), (2, "generic"))


def kind_and_message(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except un.UnisonoError as error:
        return type(error).__name__, error.message
    return "", ""


def made(recipe: Any) -> Any:
    """Make the object of a recipe: a plain value beside arrays, of which every second one is read-only."""
    value, sizes = recipe
    arrays = [np.arange(size).astype("uint8") for size in sizes]
    for array in arrays[::2]:
        array.flags.writeable = False
    return {"value": value, "arrays": arrays}


def is_equal(obj: Any, recipe: Any) -> bool:
    value, _ = recipe
    same_value = type(obj["value"]) is type(value) and obj["value"] == value
    results = [array.tobytes() for array in obj["arrays"]]
    return same_value and results == [array.tobytes() for array in made(recipe)["arrays"]]


def exchange(world: un.Communicator, recipes: list[Any], root: int) -> bool:
    mine = made(recipes[world.rank])
    at_root = world.rank == root
    everybodys = world.allgather_object(mine)
    gathered = world.gather_object(mine, root)
    spread = world.broadcast_object(mine if at_root else None, root)
    share = world.scatter_object([made(recipe) for recipe in recipes] if at_root else None, root)
    right = all(is_equal(obj, recipe) for obj, recipe in zip(everybodys, recipes, strict=True))
    if gathered is None:
        right &= not at_root
    else:
        right &= at_root and all(is_equal(obj, recipe) for obj, recipe in zip(gathered, recipes, strict=True))
    right &= everybodys[world.rank] is mine and (spread is mine) == at_root
    return right and is_equal(spread, recipes[root]) and is_equal(share, recipes[world.rank])


@bounded
@given(recipes=st.lists(objects, min_size=3, max_size=3), root=st.integers(0, 2))
def test_objects_arrive_equal_in_object_collectives(ranks: Ranks, recipes: list[Any], root: int) -> None:
    assert ranks.run_calls(exchange, recipes[: ranks.size], root % ranks.size) == [True] * ranks.size


def hand_around(world: un.Communicator, recipe: Any) -> bool:
    """Send objects and an array with the same tag to the next rank, from another thread."""
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def send() -> None:
        world.send_object(made(recipe), after, 5)
        world.send_object("second", after, 5)
        world.send_object("other tag", after)

    sender = threading.Thread(target=send)
    sender.start()
    first, second, other = world.recv_object(before, 5), world.recv_object(before, 5), world.recv_object(before)
    sender.join(DEADLINE_S)
    result = world.sendrecv(np.full(3, world.rank), after, np.zeros(3, int), before, 5)
    return is_equal(first, recipe) and (second, other) == ("second", "other tag") and bool((result == before).all())


@bounded
@given(recipe=objects)
def test_objects_arrive_equal_in_messages(three: Ranks, recipe: Any) -> None:
    assert three.run_calls(hand_around, recipe) == [True] * 3


def take_any(world: un.Communicator, recipe: Any) -> bool:
    """Rank 0 receives an array and two objects of each other rank, and names neither ranks nor tags of all objects."""
    others = range(1, world.size)
    if world.rank > 0:
        array = world.send(np.full(2, world.rank), 0, 100, wait=False)
        world.send_object(made(recipe), 0, world.rank)
        world.send_object(world.rank, 0, 100)
        array.wait()
        return True
    objects = [world.recv_object(rank, un.ANY_TAG) for rank in others]
    ranks = [world.recv_object(un.ANY_SOURCE, un.ANY_TAG) for _ in others]
    arrays = [world.recv(np.zeros(2, int), rank, un.ANY_TAG)[0] for rank in others]
    return all(is_equal(obj, recipe) for obj in objects) and arrays == sorted(ranks) == list(others)


def test_objects_of_any_tag_are_received_in_order_and_no_arrays(matching: Ranks) -> None:
    for recipe in (("text", []), (7, [3, 1 << 16, 0, 200_001])):
        assert matching.run_calls(take_any, recipe) == [True] * matching.size


def use_on_a_subgroup(world: un.Communicator) -> Any:
    with world.subgroup(range(world.size)[::-1]) as part:
        return part.allgather_object(world.rank), part.scatter_object(list("abc") if part.rank == 0 else None)


def test_object_calls_use_ranks_of_the_subcommunicator(three: Ranks) -> None:
    assert three.run_calls(use_on_a_subgroup) == [([2, 1, 0], "c"), ([2, 1, 0], "b"), ([2, 1, 0], "a")]


def memory_of_a_large_array(world: un.Communicator) -> Any:
    x = np.full((LARGE, 2), float(world.rank), order="F")
    x.flags.writeable = False
    before = sum(peer.sent_nbytes for peer in world.stats().values())
    parts = world.allgather_object({"x": x})
    sent = sum(peer.sent_nbytes for peer in world.stats().values()) - before
    theirs = parts[(world.rank + 1) % world.size]["x"]
    is_own = theirs.base is not None and theirs.flags.aligned and theirs.flags.f_contiguous
    return bool(is_own), parts[world.rank]["x"] is x, float(theirs[LARGE - 1, 1]), sent >= x.nbytes


def test_large_array_in_an_object_arrives_in_its_own_memory(three: Ranks) -> None:
    results = three.run_calls(memory_of_a_large_array)
    assert results == [(True, True, float((rank + 1) % 3), True) for rank in range(3)]


def carriers(world: un.Communicator, recipe: Any) -> Any:
    """Make all calls on objects; return the transports and bytes of arrays and of objects, and whether all is right."""
    if world.rank < 2:  # the other ranks take no part
        world.sendrecv(np.zeros(1), 1 - world.rank, np.zeros(1), 1 - world.rank)
        world.send_object("first", 1) if world.rank == 0 else world.recv_object(0)
    other = world.dup()
    is_right = exchange(other, [recipe] * world.size, 1) and hand_around(other, recipe)
    arrays, objects = (comm._executor.traffic().values() for comm in (other, other._for_objects()))
    sent = [sum(peer_traffic.sent_nbytes for peer_traffic in those) for those in (arrays, objects)]
    names = [{peer_traffic.transport for peer_traffic in those} for those in (arrays, objects)]
    other.close()
    return is_right, names, sent, sorted({peer.transport for peer in world.stats().values()})


@pytest.mark.parametrize("name", ["ucx", "ucx_core", "openmpi"])
def test_objects_use_authenticated_links_when_array_links_are_not(name: str) -> None:
    with start_ranks(3, name) as ranks:
        library = "mpi" if name == "openmpi" else name
        for rank, result in enumerate(ranks.run_calls(carriers, ({"a": 1}, [LARGE]))):
            is_right, names, (of_arrays, of_objects), carried = result
            assert is_right
            assert names == [{library}, {"shm"}]
            assert of_arrays < 2000 < LARGE < of_objects
            assert (library in carried) == (rank < 2)


def disagree(world: un.Communicator) -> tuple[str, str]:
    return kind_and_message(lambda: world.allreduce(np.ones(5)) if world.rank else world.broadcast_object("object"))


def test_mismatch_is_detected_when_objects_use_other_links() -> None:
    with start_ranks(2, "ucx") as ranks:
        for kind, text in ranks.run_calls(disagree):
            assert kind == "MismatchError"
            assert "allreduce(float64[5]" in text


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("no pickles of this")


class RaisesWhenUnpickled:
    """An object that can be pickled, and raises when it is unpickled."""

    def __reduce__(self) -> Any:
        return float, ("not a number",)


CALLS = {
    "broadcast_object": lambda world, obj: world.broadcast_object(obj, 1),
    "allgather_object": lambda world, obj: world.allgather_object(obj),
    "gather_object": lambda world, obj: world.gather_object(obj, 0),
    "scatter_object": lambda world, obj: world.scatter_object([1, obj, 2] if world.rank == 1 else None, 1),
}


def fail_to_pickle(world: un.Communicator, name: str) -> Any:
    error = kind_and_message(lambda: CALLS[name](world, Unpicklable() if world.rank == 1 else np.zeros(LARGE)))
    return (*error, int(world.allreduce(np.array(1))))


@pytest.mark.parametrize("name", CALLS)
def test_unpicklable_object_is_an_error_on_every_rank_and_calls_go_on(three: Ranks, name: str) -> None:
    expected = "rank 1 cannot pickle its object: RuntimeError: no pickles of this"
    assert three.run_calls(fail_to_pickle, name) == [("UsageError", expected, 3)] * 3


def fail_to_send(world: un.Communicator) -> Any:
    error = ("", "")
    if world.rank == 1:
        error = kind_and_message(lambda: world.send_object(Unpicklable(), 0))
    elif world.rank == 0:
        error = kind_and_message(lambda: world.recv_object(1))
    return (*error, int(world.allreduce(np.array(1))))


def test_receiver_of_an_unpicklable_object_gets_an_error(three: Ranks) -> None:
    expected = ("UsageError", "rank 1 cannot pickle its object: RuntimeError: no pickles of this", 3)
    assert three.run_calls(fail_to_send) == [expected, expected, ("", "", 3)]


POISON = "the object of rank 1 cannot be unpickled here: ValueError: could not convert string to float: 'not a number'"


def fail_to_unpickle(world: un.Communicator) -> Any:
    error = kind_and_message(lambda: world.gather_object(RaisesWhenUnpickled() if world.rank == 1 else 7, 2))
    return (*error, int(world.allreduce(np.array(1))))


def test_object_that_fails_to_unpickle_is_an_error_on_its_receiver(three: Ranks) -> None:
    first, second, root = three.run_calls(fail_to_unpickle)
    assert first == second == ("", "", 3)
    assert root == ("UsageError", POISON, 3)


WRONG = {
    "a root that does not exist": lambda world: world.broadcast_object(1, world.size),
    "a negative root": lambda world: world.gather_object(1, -1),
    "too few objects": lambda world: world.scatter_object([1], world.rank),
    "no objects": lambda world: world.scatter_object(None, world.rank),
    "an iterator": lambda world: world.scatter_object(iter([1, 2, 3]), world.rank),
    "a tag that is too large": lambda world: world.send_object(1, (world.rank + 1) % world.size, 1 << 30),
    "a negative tag": lambda world: world.recv_object((world.rank + 1) % world.size, -1),
    "a timeout of nothing": lambda world: world.allgather_object(1, timeout_s=0),
}


def err_then_go_on(world: un.Communicator, what: str) -> Any:
    error = kind_and_message(lambda: WRONG[what](world)) if world.rank == 2 else ("", "")
    return error[0], world.broadcast_object("fine" if world.rank == 0 else None)


@pytest.mark.parametrize("what", WRONG)
def test_wrong_object_call_is_refused_locally_and_later_calls_work(three: Ranks, what: str) -> None:
    assert three.run_calls(err_then_go_on, what) == [("", "fine"), ("", "fine"), ("UsageError", "fine")]


def forget_to_send(world: un.Communicator) -> Any:
    if world.rank == 0:
        return kind_and_message(lambda: world.recv_object(1, timeout_s=0.5))
    return kind_and_message(lambda: world.barrier(timeout_s=DEADLINE_S))


def test_missing_object_message_times_out() -> None:
    with start_ranks(2, "shm") as ranks:
        for kind, text in ranks.run_calls(forget_to_send):
            assert kind == "CollectiveTimeoutError"
            assert "for a message from rank 1" in text
