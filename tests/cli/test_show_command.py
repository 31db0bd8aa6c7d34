"""``unisono show`` and its pictures: schedules of each rank, costs, and refusals in one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support import handmade_plans

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.algorithms.ir.drawing import DrawnGroup, DrawnMove, legend, lines, moves, ranges, rows, start_times
from unisono.algorithms.ir.plan import Group, Plan, Read, Send, Signal, Wait, Write, even, input_block, output_block
from unisono.cli.main import main
from unisono.foundation.installing import install_command

ALL = [algorithm for by_name in ALGORITHMS.values() for algorithm in by_name.values()]
EVERY_ALGORITHM = [pytest.param(algorithm, id=f"{algorithm.collective}_{algorithm.name}") for algorithm in ALL]


def text_of(plans: list[Plan], segments: int = 1) -> list[list[list[str]]]:
    """Return the lines of each row, by plan."""
    return [[cell for cell, _ in cells_of(plans, row)] for row in rows(plans, segments)]


def cells_of(plans: list[Plan], row: DrawnGroup) -> list[tuple[list[str], Group]]:
    """Return the lines of each plan in a row, with its group."""
    return [(lines(plan, group), group) for plan, group in zip(plans, row.groups, strict=True)]


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["show", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# The schedule as data.


def test_ring_is_drawn_by_group_and_rank() -> None:
    ring = find("allreduce", "ring")
    assert text_of([ring.build(2, rank) for rank in range(2)]) == [
        [["→1 i0", "1⊕ o1=i1↓"], ["→0 i1", "0⊕ o0=i0↓"]],
        [["→1 o1", "←1 o0"], ["→0 o0", "←0 o1"]],
    ]


def test_lanes_and_segments_are_drawn_in_canonical_order() -> None:
    plans = [handmade_plans.shift_in_two_lanes(3, rank) for rank in range(3)]
    schedule = rows(plans, segments=2)
    assert [(row.lane, row.group, row.segment) for row in schedule] == [
        *((0, 0, 0), (1, 0, 0)),
        *((0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1)),
        *((0, 1, 1), (1, 1, 1)),
    ]
    assert lines(plans[0], schedule[3].groups[0]) == ["after lane 0, 1", "o1=s1"]


def test_spans_are_named_by_their_blocks_in_memory() -> None:
    plan = handmade_plans.allgather_bruck(5, 4, permutation=(3, 0, 4, 1, 2))
    assert text_of([plan]) == [[["o2=i0"]], [["→3 o2", "←0 o3"]], [["→2 o2-3", "←1 o0,4"]], [["→0 o2", "←3 o1"]]]
    assert ranges([]) == ""


def test_reductions_are_drawn_with_operands_in_order() -> None:
    exchange, finish = text_of([find("allreduce", "direct").build(3, 1)])
    assert exchange == [["→2 i0", "←0 s0", "→0 i0", "←2 s1"]]
    assert finish == [["o0=s0∘i0∘s1↓"]]
    assert text_of([find("scan", "linear").build(2, 1)])[0] == [["0⊕ s0=i0"]]


def test_steps_on_peer_memory_and_flags_are_drawn() -> None:
    steps = (Signal(1), Wait(1), Read(1, output_block(), input_block()), Write(1, output_block(), input_block()))
    plan = Plan("broadcast", "test", 2, 0, 0, even(1), even(1), lanes=((Group(steps),),))
    assert text_of([plan]) == [[["!1", "?1", "o0=1.i0", "1.o0=i0"]]]
    assert moves([plan], rows([plan])[0]) == [DrawnMove(1, 0, False, "i0"), DrawnMove(0, 1, False, "i0")]
    one_shot = handmade_plans.allreduce_one_shot(3, 0)
    assert text_of([one_shot]) == [[["o0=0.i0∘1.i0∘2.i0↓"]]]
    assert moves([one_shot], rows([one_shot])[0]) == [DrawnMove(1, 0, True, "i0"), DrawnMove(2, 0, True, "i0")]


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_every_algorithm_can_be_drawn_with_an_arrow_for_each_message(algorithm: Algorithm) -> None:
    plans = [algorithm.build(4, rank) for rank in range(4)]
    schedule = rows(plans)
    arrows = sum(len(moves(plans, row)) for row in schedule)
    sends = sum(isinstance(step, Send) for row in schedule for group in row.groups for step in group.steps)
    assert arrows == sends or not sends
    assert all(len(cell) >= len(group.steps) for row in schedule for cell, group in cells_of(plans, row))
    assert len(legend(schedule)) > 1


def test_an_arrow_is_drawn_once_whichever_end_is_shown() -> None:
    plans = [find("reduce", "binomial").build(2, rank) for rank in range(2)]
    both, receiver, sender = plans, plans[:1], plans[1:]
    assert moves(both, rows(both)[0]) == [DrawnMove(1, 0, True, "i0")]
    assert moves(receiver, rows(receiver)[0]) == [DrawnMove(1, 0, True, "o0")]
    assert moves(sender, rows(sender)[0]) == [DrawnMove(1, 0, False, "i0")]


def test_groups_start_when_the_groups_that_they_wait_for_have_ended() -> None:
    plans = [find("allreduce", "hierarchical").build(4, rank) for rank in range(4)]
    starts = start_times(plans, rows(plans))
    of_leader = {(lane, group): time for (rank, lane, group, _), time in starts.items() if rank == 0}
    assert of_leader == {(0, 0): 0, (1, 0): 1, (1, 1): 2, (2, 0): 3, (2, 1): 4}
    # A segment of a chain waits for the segment before it and for the rank before it.
    plans = [find("broadcast", "chain").build(4, rank) for rank in range(4)]
    starts = start_times(plans, rows(plans, segments=2))
    of_last = sorted(time for (rank, *_), time in starts.items() if rank == 3)
    assert max(starts.values()) <= of_last[-1] + 1
    moved = [time for (rank, lane, group, segment), time in starts.items() if rank == 2 and segment == 1]
    assert max(moved) == 3


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_every_group_of_every_algorithm_starts(algorithm: Algorithm) -> None:
    plans = [algorithm.build(4, rank) for rank in range(4)]
    schedule = rows(plans, segments=2)
    assert len(start_times(plans, schedule)) == 4 * len(schedule)
    assert start_times(plans[:1], rows(plans[:1]))


# The command.


def test_show_prints_a_schedule_with_cost_and_reference(capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = show(capsys, "allreduce", "ring", "-n", "8")
    assert status == 0
    assert "allreduce ring on 8 ranks" in shown
    assert all(f"rank {rank}" in shown for rank in range(8))
    assert "→1 i0" in shown
    assert "lane" not in shown
    assert "cost for a vector of n: 14 rounds; the busiest rank sends 1.75·n and combines 0.875·n" in shown
    assert "reference: Chan" in shown


def test_show_prints_one_rank_if_asked_or_if_there_are_many(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, rank in ((["-n", "8", "--rank", "5"], 5), (["-n", "100"], 0), (["-n", "100", "--rank", "99"], 99)):
        _, shown, _ = show(capsys, "broadcast", "binomial", *arguments)
        heads = [head.strip() for head in shown.splitlines()[2].strip("│").split("│")]
        assert heads == ["group", f"rank {rank}"]


def test_show_uses_the_parameters_root_and_segments_of_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    _, shown, _ = show(capsys, "broadcast", "knomial", "-n", "5", "--root", "2", "--param", "radix=5")
    assert "broadcast knomial radix=5 on 5 ranks" in shown
    assert "cost for a vector of n: 1 round; the busiest rank sends 4·n" in shown
    assert "→3 i0" in shown
    _, shown, _ = show(capsys, "broadcast", "chain", "-n", "3", "--segments", "4")
    assert "segment" in shown
    _, shown, _ = show(capsys, "allgather", "ring", "-n", "2", "--param", "varying=1")
    assert "allgather ring varying=1 on 2 ranks" in shown
    _, shown, _ = show(
        capsys, "allreduce", "hierarchical", "-n", "9", "--param", "across=ring", "--param", "reduce=chain"
    )
    assert "cost for a vector of n: 8 rounds" in shown


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("allreduce ring -n 0", 2, "the number of ranks is 0, but must be at least 1"),
        ("allreduce ring --rank 8", 2, "rank 8 is out of range: there are 8 ranks"),
        ("broadcast chain --root -1", 2, "root -1 is out of range: there are 8 ranks"),
        ("allgather bruck --param radix=1", 2, "radix is 1, but must be at least 2"),
        ("allgather bruck --param radix=two", 2, "'radix=two' is not of the form radix=N, with a whole number"),
        ("allgather bruck --param window=2", 2, "allgather bruck has no parameter 'window'; it has varying, radix"),
        ("allreduce ring --param root=2", 2, "allreduce ring has no parameter 'root'; it has none"),
        ("allgather bruck --param varying=yes", 2, "'varying=yes' is not of the form varying=0 or 1"),
        ("allreduce hierarchical --param hosts=2", 2, "allreduce hierarchical takes 'hosts' from programs only"),
        ("allreduce hierarchical --param across=rign", 2, "no phase can be allreduce 'rign': it can be direct"),
        (
            *("allgather recursive_doubling -n 6", 2),
            "allgather 'recursive_doubling' cannot run on 6 ranks: "
            "it needs a number of ranks that is a power of two, not 6",
        ),
        ("allreduce rign", 2, "allreduce has no algorithm 'rign': it has direct, ring"),
        ("allredcue ring", 2, "no algorithm carries out 'allredcue': there are allreduce"),
        ("allreduce ring --segments 0", 2, "Invalid value for '--segments'"),
    ],
)
def test_show_refuses_bad_arguments_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: str, status: int, message: str
) -> None:
    got, shown, errors = show(capsys, *arguments.split())
    assert (got, shown) == (status, "")
    assert errors.startswith(f"unisono: {message}")
    assert errors.count("\n") == 1


def test_show_says_how_to_install_matplotlib_for_a_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, shown, errors = show(capsys, "allreduce", "ring", "--svg", str(tmp_path / "ring.svg"))
    assert (status, shown) == (2, "")  # before anything is shown
    assert f"it needs matplotlib: {install_command('report')}" in errors


@pytest.mark.parametrize(("kind", "begins"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_show_writes_svg_and_png_pictures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, begins: bytes
) -> None:
    picture = tmp_path / "picture"
    assert show(capsys, "broadcast", "double_binary_tree", "-n", "5", f"--{kind}", str(picture))[0] == 0
    assert picture.read_bytes().startswith(begins)
