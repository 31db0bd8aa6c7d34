"""Requests that no algorithm can fulfil. Every builder and the command line refuse them, and say why."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.cli.main import main
from unisono.errors import NoAlgorithmError, UsageError
from unisono.tuning.decide.choice import Question, choose

ALL = [algorithm for by_name in ALGORITHMS.values() for algorithm in by_name.values()]


def cases(algorithms: list[Algorithm]) -> list[Any]:
    return [pytest.param(algorithm, id=f"{algorithm.collective}_{algorithm.name}") for algorithm in algorithms]


EVERY_ALGORITHM = cases(ALL)
# For each parameter of builders that is a whole number, its least value.
LEAST = {"radix": 2, "window": 1, "lanes": 1, "blocks": 1}
PARAMETERS = [
    pytest.param(algorithm, name, id=f"{algorithm.collective}_{algorithm.name}_{name}")
    for algorithm in ALL
    for name, parameter in algorithm.parameters().items()
    if type(parameter.default) is int
]
OUT_OF_RANGE = [
    ((0, 0, 0), "the number of ranks is 0, but must be at least 1"),
    ((-2, 0, 0), "the number of ranks is -2, but must be at least 1"),
    ((4, 4, 0), "rank 4 is out of range: there are 4 ranks"),
    ((4, -1, 0), "rank -1 is out of range: there are 4 ranks"),
    ((4, 0, 4), "root 4 is out of range: there are 4 ranks"),
    ((4, 0, -1), "root -1 is out of range: there are 4 ranks"),
]


def show(capsys: pytest.CaptureFixture[str], algorithm: Algorithm, *arguments: str) -> tuple[int, str]:
    """Return the exit code of `unisono show`, and its only line, which is an error."""
    status = main(["show", algorithm.collective, algorithm.name, *arguments])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return status, captured.err.removeprefix("unisono: ").rstrip("\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "allreduce", "ring", "-n", "2000"],
        ["export", "broadcast", "circulant_blocks", "--param", "blocks=5000"],
        ["simulate", "allreduce", "multi_lane_ring", "--param", "lanes=5000"],
        ["simulate", "allreduce", "ring", "--segments", "1000000000"],
        ["simulate", "allreduce", "ring", "-n", "100000000"],
    ],
)
def test_commands_refuse_numbers_that_would_take_minutes_or_all_memory(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert any(text in error for text in ("at most", "more than", "is not in the range")), error


# Ranks and roots.


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_builder_refuses_rank_or_root_out_of_range(capsys: pytest.CaptureFixture[str], algorithm: Algorithm) -> None:
    for (size, rank, root), message in OUT_OF_RANGE:
        with pytest.raises(UsageError) as caught:
            algorithm.build(size, rank, root)
        assert str(caught.value) == message
        assert show(capsys, algorithm, f"-n{size}", f"--rank={rank}", f"--root={root}") == (2, message)


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_builder_refuses_unsupported_size_with_the_declared_reason(
    capsys: pytest.CaptureFixture[str], algorithm: Algorithm
) -> None:
    for size in range(1, 10):
        refusal = algorithm.supports(size)
        if refusal is None:
            assert algorithm.build(size, size - 1).size == size
            continue
        with pytest.raises(UsageError, match=refusal):
            algorithm.build(size, 0)
        message = f"{algorithm.collective} {algorithm.name!r} cannot run on {size} ranks: {refusal}"
        assert show(capsys, algorithm, f"-n{size}") == (2, message)


def test_few_algorithms_refuse_five_or_six_ranks() -> None:
    refusing = {
        (algorithm.collective, algorithm.name) for algorithm in ALL if algorithm.supports(6) or algorithm.supports(5)
    }
    assert refusing == {
        ("broadcast", "scatter_doubling"),
        ("allgather", "recursive_doubling"),
        ("allgather", "neighbour_exchange"),
        *((collective, name) for collective in ("allgather", "reduce_scatter") for name in ("swing", "bine")),
    }
    assert find("allgather", "neighbour_exchange").supports(6) is None


# Parameters.


@pytest.mark.parametrize(("algorithm", "name"), PARAMETERS)
def test_builder_refuses_radix_below_two_and_window_or_lanes_below_one(
    capsys: pytest.CaptureFixture[str], algorithm: Algorithm, name: str
) -> None:
    for value in (LEAST[name] - 1, -3):
        message = f"{name} is {value}, but must be at least {LEAST[name]}"
        with pytest.raises(UsageError) as caught:
            algorithm.build(4, 0, 0, **{name: value})
        assert str(caught.value) == message
        assert show(capsys, algorithm, "-n4", f"--param={name}={value}") == (2, message)


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_builder_refuses_unknown_parameter(capsys: pytest.CaptureFixture[str], algorithm: Algorithm) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'radixx'"):
        algorithm.build(4, 0, radixx=3)
    known = ", ".join(algorithm.parameters()) or "none"
    message = f"{algorithm.collective} {algorithm.name} has no parameter 'radixx'; it has {known}"
    message += "; did you mean 'radix'?" if "radix" in algorithm.parameters() else ""
    with pytest.raises(UsageError) as caught:
        algorithm.check_parameters(["radixx"])
    assert str(caught.value) == message
    assert show(capsys, algorithm, "-n4", "--param=radixx=3") == (2, message)
    for taken in ("size", "rank", "root"):
        with pytest.raises(UsageError, match=f"has no parameter '{taken}'"):
            algorithm.check_parameters([taken])


# Names.


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_misspelled_name_is_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str], algorithm: Algorithm) -> None:
    wrong = replace(algorithm, name=algorithm.name[:-1])
    status, message = show(capsys, wrong)
    assert status == 2
    assert message.startswith(f"{algorithm.collective} has no algorithm '{wrong.name}': it has ")
    assert message.endswith(f"; did you mean '{algorithm.name}'?")
    wrong = replace(algorithm, collective=f"{algorithm.collective}s")
    status, message = show(capsys, wrong)
    assert status == 2
    assert message.startswith(f"no algorithm carries out '{wrong.collective}': there are allreduce, ")
    assert message.endswith(f"; did you mean '{algorithm.collective}'?")


def test_name_similar_to_no_other_is_refused_without_suggestion() -> None:
    for names in (("allreduce", "zzz"), ("zzz", "ring")):
        with pytest.raises(NoAlgorithmError) as caught:
            find(*names)
        assert "did you mean" not in str(caught.value)


# Forced by name.


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_forced_algorithm_is_chosen_or_refused_but_never_replaced(algorithm: Algorithm) -> None:
    for size, link in product(range(1, 8), ("shm", "tcp")):
        for commutative in (True, False):
            asked = Question(algorithm.collective, 4096, size, link, commutative, algorithm=algorithm.name)
            unmapped = algorithm.mapped and link == "tcp"
            if algorithm.supports(size) or unmapped or (algorithm.commutative_only and not commutative):
                with pytest.raises(NoAlgorithmError, match=f"{algorithm.name} "):
                    choose(asked)
            else:
                assert choose(asked).algorithm == algorithm.name


def test_refusal_of_forced_recursive_doubling_on_six_ranks_says_why() -> None:
    asked = Question("allgather", 4096, 6, "shm", algorithm="recursive_doubling")
    with pytest.raises(
        NoAlgorithmError, match="recursive_doubling does not run on 6 ranks: it needs a number of ranks"
    ):
        choose(asked)


# Files of users.


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a Python file to load. Its folder is added to `sys.path` for this test only."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path / "mine.py"


@pytest.mark.parametrize(
    ("registration", "status", "message"),
    [
        ('"allreduse", "mine"', 2, "no algorithm carries out 'allreduse': there are allreduce, "),
        ('"allreduce", "ring"', 2, "allreduce has an algorithm 'ring' already; it has direct, "),
        ('"allreduce", "mine", sizes=[0]', 2, "sizes must be numbers of ranks such as [2, 4, 8], not [0]"),
        (
            '"allreduce", "mine", order="ranks"',
            2,
            "an order is one of none, rank, at_once, canonical, fixed, not 'ranks'; did",
        ),
        (
            '"allreduce", "mine"',
            1,
            "allreduce mine on 1 ranks: rank 0: the builder raises UsageError: root 5 is out of",
        ),
    ],
)
def test_verify_command_refuses_file_with_invalid_registration(
    capsys: pytest.CaptureFixture[str], file: Path, registration: str, status: int, message: str
) -> None:
    file.write_text(
        "import unisono as un\n"
        "from unisono.algorithms.catalogue.registry import find\n"
        f"@un.algorithm({registration})\n"
        "def mine(size, rank, root=0):\n"
        "    return find('allreduce', 'ring').build(size, rank, 5)\n"
    )
    assert main(["verify", str(file)]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"unisono: {message}")
