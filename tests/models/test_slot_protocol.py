"""The shared-memory protocol is right on weakly ordered processors, and the checker finds each mutation's fault."""

from __future__ import annotations

import pytest
from models.slot_protocol import Mutation, Script, answers_first, checker_of, ping_pongs, streams
from models.weak_memory import Checker, Fence, Load, Operation, RemoteFence, Store, Violation

LOST = "all threads sleep"
TORN = "payload"
SCENARIOS = {
    "two messages through one slot": (streams(2), 1),
    "three messages through two slots": (streams(3), 2),
    "two questions and answers": (ping_pongs(2), 1),
    "an answer before the payload is read": (answers_first(2), 1),
}


@pytest.mark.parametrize("membarrier", [True, False], ids=["membarrier", "full fences"])
@pytest.mark.parametrize(("scripts", "slots"), SCENARIOS.values(), ids=SCENARIOS.keys())
def test_no_execution_loses_a_wake_up_or_a_payload(scripts: tuple[Script, Script], slots: int, membarrier: bool):
    assert checker_of(scripts, slots, membarrier=membarrier, mutation=Mutation.NONE).run() > 100


@pytest.mark.parametrize(
    ("mutation", "scripts", "membarrier", "finding"),
    [
        (Mutation.TURN_STORED_RELAXED, streams(1), True, TORN),
        (Mutation.TURN_LOADED_RELAXED, streams(1), True, TORN),
        (Mutation.CONSUMED_STORED_RELAXED, streams(2), True, TORN),
        (Mutation.ONE_SLOT_TOO_MANY, streams(2), True, TORN),
        (Mutation.ACKNOWLEDGED_EARLY, answers_first(2), True, TORN),
        (Mutation.NO_LIGHT_FENCE, streams(1), False, LOST),
        (Mutation.NO_HEAVY_FENCE, streams(1), False, LOST),
        (Mutation.NO_HEAVY_FENCE, streams(1), True, LOST),
        (Mutation.HEAVY_FENCE_IS_LOCAL, streams(1), True, LOST),
        (Mutation.FLAG_READ_FIRST, streams(1), True, LOST),
        (Mutation.FLAG_READ_FIRST, streams(1), False, LOST),
        (Mutation.NO_SECOND_LOOK, streams(1), True, LOST),
        (Mutation.NO_RING, streams(1), True, LOST),
    ],
)
def test_checker_finds_each_mutation_of_the_slot_protocol(
    mutation: Mutation, scripts: tuple[Script, Script], membarrier: bool, finding: str
):
    with pytest.raises(Violation, match=finding):
        checker_of(scripts, 1, membarrier=membarrier, mutation=mutation).run()


def outcomes(left: list[Operation], right: list[Operation]) -> bool:
    """Return whether two threads, whose last operation is a load, can both read 0."""

    def thread(mine: str, operations: list[Operation]):
        def program():
            value = 1
            for operation in operations:
                value = yield operation
            yield Store(mine, 1 - value, release=True)

        return program

    def judge():
        first = yield Load("left", acquire=True)
        second = yield Load("right", acquire=True)
        if first and second:
            yield Load("both", expect=1)  # no thread writes it

    try:
        Checker([thread("left", left), thread("right", right), judge], {"x": (0, 1), "y": (0, 1)}).run()
    except Violation:
        return True
    return False


@pytest.mark.parametrize(
    ("left", "right", "possible"),
    [
        ([], [], True),
        ([Fence()], [], True),
        ([Fence()], [Fence()], False),
        ([Fence(), RemoteFence(1)], [], False),
    ],
    ids=["no fence", "one fence", "two fences", "one membarrier"],
)
def test_stores_are_overtaken_by_loads_unless_both_sides_are_fenced(
    left: list[Operation], right: list[Operation], possible: bool
):
    assert outcomes([Store("x", 1), *left, Load("y")], [Store("y", 1), *right, Load("x")]) is possible


def test_message_is_complete_only_with_release_and_acquire():
    def found(release: bool, acquire: bool) -> bool:
        def writer():
            yield Store("data", 1)
            yield Store("flag", 1, release)

        def reader():
            if (yield Load("flag", acquire)):
                yield Load("data", expect=1)

        try:
            Checker([writer, reader], {"flag": (0, 1)}).run()
        except Violation:
            return True
        return False

    assert not found(release=True, acquire=True)
    assert found(release=False, acquire=True)
    assert found(release=True, acquire=False)
