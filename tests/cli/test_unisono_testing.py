"""`unisono.testing` and `unisono test`: right communicators pass, and every rank finds the fault of a wrong one."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.faulty_backends import Broken, other_element
from support.programs import by_launcher
from support.ranks import LocalRanks, start_ranks

import unisono as un
from unisono.cli.main import main
from unisono.testing import Case, CheckError, Summary, check_case
from unisono.testing.cases import BY_FUNCTION, METHODS, random_case
from unisono.testing.differences import difference, ulps
from unisono.testing.functions import FUNCTIONS
from unisono.testing.memory import Guarded
from unisono.testing.oracles import MOST_TERMS, contributions, inputs, reduced, result_of
from unisono.testing.shrinking import MOST_TRIES, shrunk
from unisono.testing.sources import SourceBackend, source

CASES = 150


def judge(world: Any, cases: int, seed: int) -> Summary:
    return un.testing.check_collectives(world, cases=cases, seed=seed if world.rank == 0 else None)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_check_collectives_passes_a_correct_communicator(size: int, transport: str) -> None:
    with start_ranks(size, transport) as ranks:
        summaries = ranks.run_calls(judge, CASES, size)
    assert summaries == [summaries[0]] * size
    assert sum(summaries[0].cases.values()) == CASES
    assert summaries[0].seed == size
    assert sum(summaries[0].refused.values()) < CASES / 2


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_check_collectives_passes_the_generic_executor(size: int) -> None:
    assert sum(LocalRanks(size, 8).run_calls(judge, 60, 3)[0].cases.values()) == 60


def judge_parts(world: un.Communicator) -> tuple[Summary, Summary, list[tuple[int, int]]]:
    steps: list[tuple[int, int]] = []
    whole = un.testing.check_collectives(world, cases=30, seed=9, progress=lambda *done: steps.append(done))
    last = un.testing.check_collectives(world, cases=range(20, 30), seed=9)
    return whole, last, steps


def test_check_collectives_reports_progress_and_runs_cases_by_number() -> None:
    whole, last, steps = un.launch(judge_parts, 2)[0]
    assert (sum(whole.cases.values()), sum(last.cases.values())) == (30, 10)
    assert set(last.cases) <= set(whole.cases)
    assert steps == [(done, 30) for done in range(1, 31)]


def seeds(world: un.Communicator) -> list[int]:
    return [un.testing.check_collectives(world, cases=1).seed for _ in range(2)]


def test_rank_0_draws_a_new_seed_each_time_when_none_is_passed() -> None:
    first, second = un.launch(seeds, 2)
    assert first == second
    assert first[0] != first[1]


# --- wrong communicators -------------------------------------------------------------------------------------------


def other_kind(result: Any) -> Any:
    return None if result is not None else np.zeros(1)


def raises(result: Any) -> Any:
    raise RuntimeError("out of order")


SPOILT = {
    "another element": ("allreduce", other_element, "element", Case("allreduce")),
    "another element of a prefix": ("scan", other_element, "element", Case("scan")),
    "nothing": ("alltoall", other_kind, "the result of this rank is None", Case("alltoall", rows=0)),
    "another error": ("broadcast", raises, "RuntimeError: out of order", Case("broadcast", rows=0)),
}


def judge_broken(world: un.Communicator, collective: str, spoil: Any) -> tuple[str, str | None, Case | None]:
    """Return the text of the error on this rank, its program and its case."""
    try:
        un.testing.check_collectives(Broken(world, collective, spoil), cases=2000, seed=5)
    except CheckError as error:
        return str(error), error.program, error.case
    return "", None, None


@pytest.mark.parametrize("name", SPOILT)
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_report_the_error_of_one_rank_in_the_same_words(name: str, size: int) -> None:
    collective, spoil, text, simplest = SPOILT[name]
    results = un.launch(judge_broken, size, collective, spoil, on_output=lambda *_: None)
    assert results == [results[0]] * size
    message, program, case = results[0]
    assert f"rank 1 of {size}: {text}" in message
    assert "of seed 5" in message
    assert program is not None
    assert message.endswith(program)
    assert case == simplest
    assert str(case.collective) in program


def judge_some(world: un.Communicator) -> Summary:
    broken = Broken(world, "allreduce", lambda result: result)
    broken.send_object = None  # a communicator that lacks a method
    return un.testing.check_collectives(broken, cases=40, seed=1, methods=["send", "scan"])


def test_check_collectives_calls_only_the_named_methods() -> None:
    assert set(un.launch(judge_some, 2)[0].cases) == {"send", "scan"}
    with un.init() as world, pytest.raises(un.UsageError, match="methods must be some of allreduce"):
        un.testing.check_collectives(world, methods=["all"])


class Swapped:
    """A communicator that passes the contributions of higher ranks first to Python functions."""

    def __init__(self, inner: un.Communicator) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def allreduce(self, x: Any, op: Any = "sum", **given: Any) -> Any:
        if isinstance(op, un.Op) and op.function is not None:
            fn = op.function
            op = un.Op.from_function(lambda a, b: fn(b, a), op.commutative)
        return self._inner.allreduce(x, op, **given)


def judge_swapped(world: un.Communicator) -> tuple[dict[str, int], str | None]:
    """Return the verdict on commutative functions, and the program of the fault of another function."""
    right = un.testing.check_collectives(Swapped(world), cases=40, seed=2, methods=["allreduce"], ops=["maximum"])
    try:
        un.testing.check_collectives(Swapped(world), cases=200, seed=2, methods=["allreduce"], ops=["composition"])
    except CheckError as error:
        return right.cases, error.program
    return right.cases, None


def test_check_collectives_detects_swapped_operands_of_a_function(tmp_path: Path) -> None:
    right, program = un.launch(judge_swapped, 3, on_output=lambda *_: None)[0]
    assert right == {"allreduce": 40}
    assert program is not None
    assert "op='composition'" in program
    assert by_launcher(program, tmp_path, ranks=3).returncode == 0  # the program runs on the right communicator


def test_check_collectives_uses_only_the_named_ops() -> None:
    with un.init() as world:
        with pytest.raises(un.UsageError, match="ops must be some of sum"):
            un.testing.check_collectives(world, ops=["mean"])
        with pytest.raises(un.UsageError, match="scan takes none of the ops avg"):
            un.testing.check_collectives(world, methods=["scan"], ops=["avg"])
        assert un.testing.check_collectives(world, cases=20, methods=["scan"], ops=["avg", "sum"]).cases == {"scan": 20}


@pytest.mark.parametrize(("dtype", "op"), BY_FUNCTION)
def test_expected_result_of_a_function_is_its_sequential_reduction(dtype: str, op: str) -> None:
    stack = contributions(dtype, op, 5, 60)
    fn = FUNCTIONS[op].op.function
    assert fn is not None
    state = stack[0]
    for row in stack[1:]:
        state = fn(state, row)
    assert difference(state, reduced(op, stack)) == ""
    swapped = fn(stack[0], stack[1]).tobytes() == fn(stack[1], stack[0]).tobytes()
    assert swapped == (FUNCTIONS[op].op.commutative or dtype == "bool")


class Renumbered:
    """A communicator whose ranks 0 and 1 have each other's number."""

    def __init__(self, inner: un.Communicator) -> None:
        self._inner = inner
        self.rank = inner.rank ^ 1 if inner.rank < 2 else inner.rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def judge_renumbered(world: un.Communicator) -> str:
    try:
        un.testing.check_collectives(Renumbered(world), cases=500, seed=5)
    except CheckError as error:
        return str(error)
    return ""


def test_all_ranks_report_swapped_rank_numbers() -> None:
    results = un.launch(judge_renumbered, 3)
    assert results[0].startswith("case ")
    assert results == [results[0]] * 3


def judge_failed(world: un.Communicator) -> str:
    try:
        un.testing.check_collectives(Broken(world, "broadcast", lambda _: world.abort("out of patience")), cases=500)
    except CheckError as error:
        return str(error)
    return ""


def test_all_ranks_report_a_communicator_that_fails() -> None:
    for message in un.launch(judge_failed, 2):
        assert "out of patience" in message
        assert "check_case(comm, case)" in message


def test_program_of_a_check_error_reproduces_the_call(tmp_path: Path) -> None:
    case = Case("allreduce", op="premul_sum", rows=3, arrays=2, wait=False)
    completed = by_launcher(source("check_case", case, 2), tmp_path)
    assert (completed.returncode, completed.stderr) == (0, "")

    completed = by_launcher(
        source("check_case", case, 2, backend=SourceBackend("support.faulty_backends", "wrong_allreduce")), tmp_path
    )
    assert completed.returncode != 0
    assert "CheckError: element [3] of the result" in completed.stderr


def test_check_collectives_refuses_a_negative_seed() -> None:
    with un.init() as world, pytest.raises(un.UsageError, match="seed"):
        un.testing.check_collectives(world, seed=-1)


# --- parts of the judge --------------------------------------------------------------------------------------------


def test_random_cases_are_reproducible_and_cover_every_method() -> None:
    drawn = [random_case(1, number, 4) for number in range(3000)]
    assert drawn == [random_case(1, number, 4) for number in range(3000)]
    assert drawn != [random_case(2, number, 4) for number in range(3000)]
    assert {case.collective for case in drawn} == set(METHODS)
    assert {case.way for case in drawn} == {"new", "out", "in place", "plan"}
    assert {case.rows < 4 for case in drawn} == {case.wait for case in drawn} == {True, False}
    assert {case.root for case in drawn} == {0, 1, 2, 3}
    assert eval(str(drawn[7])) == drawn[7]  # the text is a Python expression for the case


@pytest.mark.parametrize("size", [8, 100])
@pytest.mark.parametrize("op", ["sum", "prod", "avg", "premul_sum"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e5m2", "bfloat16", "complex64"])
def test_contributions_of_many_ranks_have_exact_partial_results(dtype: str, op: str, size: int) -> None:
    stack = contributions(dtype, op, size, 30 * size)
    combine = np.multiply if op == "prod" else np.add
    state = stack[0]
    for row in stack[1:]:
        state = combine(state, row).astype(dtype)
    exact = reduced("prod" if op == "prod" else "sum", stack)
    assert difference(state, exact) == ""
    takes_part = (stack != (op == "prod")).sum(axis=0)
    assert takes_part.max() <= MOST_TERMS
    assert (stack != (op == "prod")).any(axis=1).all()  # each rank's contribution changes the result


def test_expected_result_is_computed_from_the_inputs_of_all_ranks() -> None:
    xs = inputs(Case("gatherv", "int32", root=5, counts=(1, 0, 2)), 3)
    case = Case("gatherv", "int32", root=5, counts=(1, 0, 2))
    assert [x.tolist() for x in xs] == [[0], [], [14, 17]]
    whole = result_of(case, xs, 2)
    assert whole is not None
    assert whole.tolist() == [0, 14, 17]
    assert result_of(case, xs, 0) is None


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float16", "float32", "float64"])
def test_ulps_are_counted_across_zero(dtype: str) -> None:
    one = np.array([1.0, 0.0, -1.0], dtype)
    nearby = one.copy()
    nearby.view(f"u{one.itemsize}")[0] += 1
    nearby.view(f"u{one.itemsize}")[1] += 2
    assert ulps(one, one).tolist() == [0, 0, 0]
    assert ulps(one, nearby).tolist() == [1, 2, 0]
    assert ulps(np.array([0.0], dtype), np.array([-0.0], dtype)).tolist() == [1]
    assert ulps(one[1:2], -nearby[1:2]).tolist() == [2]


def test_difference_names_element_values_dtype_and_shape() -> None:
    expected = np.arange(6, dtype="complex64").reshape(2, 3)
    result = expected.copy()
    result[1, 0] += 1j
    assert difference(expected, expected) == ""
    assert difference(result, expected) == "element [1, 0] of the result is (3+1j), not (3+0j); 1 of 6 elements differ"
    assert difference(result[0], expected) == "the result is complex64[3], not complex64[2, 3]"
    near = np.nextafter(np.float32([1, 2]), np.float32(9))
    assert difference(near, np.float32([1, 2]))
    assert difference(near, np.float32([1, 2]), most_ulps=1) == ""


def test_guarded_array_detects_writes_outside_it() -> None:
    guard = Guarded((3, 2), "int16", 5, "F")
    assert guard.array.ctypes.data % 64 == 5
    assert guard.array.flags.f_contiguous
    guard.array[...] = 1
    assert guard.is_intact()
    np.lib.stride_tricks.as_strided(guard.array, (4, 2))[3, 1] = 1
    assert not guard.is_intact()


def wrong_memory(world: un.Communicator) -> str:
    class Careless(Broken):
        def allreduce(self, x: Any, *args: Any, **given: Any) -> Any:
            result = world.allreduce(x, *args, **given)
            x.flat[0] += 1
            return result

    try:
        check_case(Careless(world, "", None), Case("allreduce"))
    except CheckError as error:
        return error.message
    return ""


def test_check_case_detects_a_written_input() -> None:
    assert un.launch(wrong_memory, 1) == ["x was written"]


# --- the command ---------------------------------------------------------------------------------------------------


def test_unisono_test_prints_a_table_of_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "-n", "2", "--cases", "60", "--seed", "4", "--transports", "tcp"]) == 0
    table = capsys.readouterr().out
    assert "refused" in table
    assert table.endswith("seed 4, 2 rank(s), tcp\n")


def test_unisono_test_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "-n", "1", "--cases", "60", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ranks"], report["transports"], report["error"]) == (1, "shm", None)
    assert sum(report["cases"].values()) == 60
    assert report["seconds"] > 0


# With this seed, the first case that hangs comes early. Each hanging case takes the whole time limit of a call.
FAULTS = {
    "wrong_scan": (5, 60, Case("scan", rows=3), "rank 1 of 3: element", "CheckError: element [2]"),
    "hanging_alltoall": (7, 3, Case("alltoall"), "[1] hangs in Case('alltoall'", "in sleep"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_unisono_test_fails_with_the_simplest_failing_program(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, fault: str
) -> None:
    seed, timeout_s, simplest, text, error = FAULTS[fault]
    arguments = [
        "--seed",
        str(seed),
        "--backend",
        f"support.faulty_backends:{fault}",
        "--timeout",
        str(timeout_s),
        "--json",
    ]
    assert main(["test", "-n", "3", *arguments]) == 1
    output = capsys.readouterr()
    reported = json.loads(output.out)["error"]
    assert reported["message"] in output.err
    assert reported["message"].endswith(reported["program"])
    assert text in reported["message"]
    backend = SourceBackend("support.faulty_backends", fault)
    assert reported["program"] == source("check_case", simplest, 2, backend=backend, timeout_s=timeout_s)
    completed = by_launcher(reported["program"], tmp_path)
    assert completed.returncode != 0
    assert error in completed.stderr


@pytest.mark.parametrize("name", ["support.faulty_backends", ":function", "module:", "module:two words"])
def test_unisono_test_refuses_a_backend_that_names_no_function(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["test", "--backend", name]) == 2
    assert "MODULE:FUNCTION" in capsys.readouterr().err


def test_unisono_test_reports_ranks_that_cannot_be_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "-n", "10000000"]) == 2
    assert "open files" in capsys.readouterr().err


# --- the simplest failing case -------------------------------------------------------------------------------------


def wrong_where(**least: Any) -> Callable[[Case, int], bool]:
    """Return a judge that finds a fault in cases with at least these numbers, or with exactly these values."""

    def is_wrong(case: Case, size: int) -> bool:
        fields = {**dataclasses.asdict(case), "size": size}
        return all(
            fields[name] >= value if isinstance(value, int) and not isinstance(value, bool) else fields[name] == value
            for name, value in least.items()
        )

    return is_wrong


CONDITIONS: list[tuple[dict[str, Any], Case, int]] = [
    ({}, Case("allreduce", rows=0), 1),
    ({"rows": 3, "size": 2}, Case("allreduce", rows=3), 2),
    ({"op": "minloc"}, Case("allreduce", op="minloc", dtype="complex64", rows=0), 1),
    ({"dtype": "complex128"}, Case("allreduce", dtype="complex128", rows=0), 1),
    ({"wait": False, "way": "plan", "size": 5}, Case("allreduce", rows=0, way="plan", wait=False), 5),
    ({"offset": 1, "arrays": 2}, Case("allreduce", rows=0, offset=63, arrays=3), 1),
]


@pytest.mark.parametrize(("condition", "simplest", "ranks"), CONDITIONS, ids=str)
def test_failing_case_shrinks_to_the_simplest_failing_case(
    condition: dict[str, Any], simplest: Case, ranks: int
) -> None:
    case = Case(
        *("allreduce", "complex128", "minloc"),
        rows=5000,
        rest=(2, 2),
        way="plan",
        layout="F",
        offset=63,
        wait=False,
        algorithm="ring",
        seed=99,
        arrays=3,
    )
    assert shrunk(case, 5, wrong_where(**condition), range(1, 5)) == (simplest, ranks)


def test_counts_shrink_one_by_one_and_random_failures_stop_shrinking() -> None:
    case = Case("allgatherv", "int8", counts=(7, 900, 3, 5))
    simplest, ranks = shrunk(case, 4, lambda case, _: case.counts[1] > 17, [1, 2, 3])
    assert (simplest.counts, simplest.dtype, ranks) == ((0, 18, 0, 0), "float32", 1)
    tries = itertools.count()
    shrunk(Case("allreduce", rows=10**6), 4, lambda *_: next(tries) % 2 == 1, [1, 2, 3])
    assert next(tries) <= MOST_TRIES + 1


# --- faults that it has found --------------------------------------------------------------------------------------


def reduce_nothing(world: un.Communicator) -> tuple[int, ...]:
    return world.allreduce(np.zeros((0, 1), "uint32"), "bxor", algorithm="one_shot").shape


def test_one_shot_allreduce_accepts_arrays_without_elements() -> None:
    assert un.launch(reduce_nothing, 3) == [(0, 1)] * 3
