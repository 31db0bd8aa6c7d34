"""`unisono.testing` and `unisono test`: what is right passes, and what is wrong is found, on every rank alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import LocalRanks
from native_ranks import NativeRanks

import unisono as un
from unisono.cli.main import main
from unisono.collectives.calls import Place
from unisono.testing import Case, CheckError, Summary, check_case
from unisono.testing.cases import COLLECTIVES, random_case
from unisono.testing.differences import difference, ulps
from unisono.testing.memory import Guarded
from unisono.testing.oracles import MOST_TERMS, contributions, inputs, reduced, result_of

pytestmark = pytest.mark.timeout(180)

CASES = 150


def judge(world: Any, cases: int, seed: int) -> Summary:
    return un.testing.check_collectives(world, cases=cases, seed=seed if world.rank == 0 else None)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_right_communicator_passes(size: int, transport: str) -> None:
    with NativeRanks(size, transport) as ranks:
        summaries = ranks.run_calls(judge, CASES, size)
    assert summaries == [summaries[0]] * size
    assert sum(summaries[0].cases.values()) == CASES
    assert summaries[0].seed == size
    assert sum(summaries[0].refused.values()) < CASES / 2


def judge_generic(executor: Any) -> Summary:
    place = Place((tuple(range(executor.size)),), "local")
    with un.Communicator(executor, place, un.Options()) as world:
        return judge(world, 60, 3)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_generic_executor_passes(size: int) -> None:
    assert sum(LocalRanks(size, 8).run(judge_generic)[0].cases.values()) == 60


def judge_parts(world: un.Communicator) -> tuple[Summary, Summary, list[tuple[int, int]]]:
    told: list[tuple[int, int]] = []
    whole = un.testing.check_collectives(world, cases=30, seed=9, progress=lambda *done: told.append(done))
    last = un.testing.check_collectives(world, cases=range(20, 30), seed=9)
    return whole, last, told


def test_cases_are_told_by_their_number_and_progress_is_heard() -> None:
    whole, last, told = un.launch(judge_parts, 2)[0]
    assert (sum(whole.cases.values()), sum(last.cases.values())) == (30, 10)
    assert set(last.cases) <= set(whole.cases)
    assert told == [(done, 30) for done in range(1, 31)]


def seeds(world: un.Communicator) -> list[int]:
    return [un.testing.check_collectives(world, cases=1).seed for _ in range(2)]


def test_without_a_seed_rank_0_draws_another_one_each_time() -> None:
    first, second = un.launch(seeds, 2)
    assert first == second
    assert first[0] != first[1]


# --- what is wrong -------------------------------------------------------------------------------------------------


class Broken:
    """A communicator whose rank 1 spoils, by `spoil`, what comes of one collective; all that the user sees else."""

    def __init__(self, inner: un.Communicator, collective: str, spoil: Any) -> None:
        self._inner, self._collective, self._spoil = inner, collective, spoil

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name == "plan":
            return lambda collective, *args, **given: self._wrapped(collective, method(collective, *args, **given))
        return self._wrapped(name, method) if callable(method) else method

    def _wrapped(self, name: str, method: Any) -> Any:
        def call(*args: Any, **given: Any) -> Any:
            result = method(*args, **given)
            if name != self._collective or self._inner.rank != 1:
                return result
            return Late(result, self._spoil) if given.get("wait") is False else self._spoil(result)

        return call


class Late:
    """A work whose result is spoilt."""

    def __init__(self, work: Any, spoil: Any) -> None:
        self._work, self._spoil = work, spoil

    def wait(self) -> Any:
        return self._spoil(self._work.wait())


def other_element(result: Any) -> Any:
    if result is not None and result.size and result.dtype.kind in "iuf":
        result.flat[-1] += 1  # also of what the ranks tell each other of their verdicts
    return result


def other_kind(result: Any) -> Any:
    return None if result is not None else np.zeros(1)


def raises(result: Any) -> Any:
    raise RuntimeError("out of order")


SPOILT = {
    "another element": ("allreduce", other_element, "element"),
    "another element of a prefix": ("scan", other_element, "element"),
    "nothing": ("alltoall", other_kind, "the result is nothing"),
    "another error": ("broadcast", raises, "RuntimeError: out of order"),
}


def judge_broken(world: un.Communicator, collective: str, spoil: Any) -> tuple[str, str | None]:
    """Return the text of the error, as it is on this rank, and its program."""
    try:
        un.testing.check_collectives(Broken(world, collective, spoil), cases=2000, seed=5)
    except CheckError as error:
        return str(error), error.program
    return "", None


@pytest.mark.parametrize("name", SPOILT)
@pytest.mark.parametrize("size", [2, 3])
def test_what_one_rank_gets_wrong_is_found_on_all_with_the_same_text(name: str, size: int) -> None:
    collective, spoil, text = SPOILT[name]
    told = un.launch(judge_broken, size, collective, spoil)
    assert told == [told[0]] * size
    message, program = told[0]
    assert f"rank 1 of {size}: {text}" in message
    assert "of seed 5" in message
    assert program is not None
    assert message.endswith(program)
    assert f"    {collective!r},\n" in program
    assert len(program.splitlines()) <= 25


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


def test_wrong_numbers_of_ranks_are_found_on_all() -> None:
    told = un.launch(judge_renumbered, 3)
    assert told[0].startswith("case ")
    assert told == [told[0]] * 3


def judge_failed(world: un.Communicator) -> str:
    try:
        un.testing.check_collectives(Broken(world, "broadcast", lambda _: world.abort("out of patience")), cases=500)
    except CheckError as error:
        return str(error)
    return ""


def test_a_communicator_that_fails_is_an_error_on_every_rank() -> None:
    for message in un.launch(judge_failed, 2):
        assert "out of patience" in message
        assert "check_case(comm, case)" in message


def run(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    file = directory / "program.py"
    file.write_text(program)
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_the_program_of_an_error_makes_the_call_again(tmp_path: Path) -> None:
    _, program = un.launch(judge_broken, 2, "allreduce", other_element)[0]
    assert program is not None
    ended = run(program, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")

    here = str(Path(__file__).parent)
    broken = program.replace("    check_case(comm,", "    check_case(Broken(comm, 'allreduce', other_element),")
    ended = run(
        f"import sys; sys.path.append({here!r})\nfrom test_testing import Broken, other_element\n{broken}", tmp_path
    )
    assert ended.returncode != 0
    assert "CheckError: element" in ended.stderr


def test_what_cannot_be_a_seed_is_refused() -> None:
    with un.init() as world, pytest.raises(un.UsageError, match="seed"):
        un.testing.check_collectives(world, seed=-1)


# --- its parts -----------------------------------------------------------------------------------------------------


def test_cases_are_the_same_for_the_same_seed_and_reach_everything() -> None:
    drawn = [random_case(1, number, 4) for number in range(3000)]
    assert drawn == [random_case(1, number, 4) for number in range(3000)]
    assert drawn != [random_case(2, number, 4) for number in range(3000)]
    assert {case.collective for case in drawn} == set(COLLECTIVES)
    assert {case.way for case in drawn} == {"new", "out", "in place", "plan"}
    assert {case.rows < 4 for case in drawn} == {case.wait for case in drawn} == {True, False}
    assert {case.root for case in drawn} == {0, 1, 2, 3}
    assert eval(str(drawn[7])) == drawn[7]  # as a program would write it


@pytest.mark.parametrize("size", [8, 100])
@pytest.mark.parametrize("op", ["sum", "prod", "avg"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e5m2", "bfloat16", "complex64"])
def test_many_ranks_contribute_so_that_partial_results_are_exact(dtype: str, op: str, size: int) -> None:
    stack = contributions(dtype, op, size, 30 * size)
    combine = np.multiply if op == "prod" else np.add
    state = stack[0]
    for row in stack[1:]:
        state = combine(state, row).astype(dtype)
    exact = reduced("prod" if op == "prod" else "sum", stack)
    assert difference(state, exact) == ""
    takes_part = (stack != (op == "prod")).sum(axis=0)
    assert takes_part.max() <= MOST_TERMS
    assert (stack != (op == "prod")).any(axis=1).all()  # every rank matters


def test_a_rank_computes_what_all_get() -> None:
    xs = inputs(Case("gatherv", "int32", root=5, counts=(1, 0, 2)), 3)
    case = Case("gatherv", "int32", root=5, counts=(1, 0, 2))
    assert [x.tolist() for x in xs] == [[0], [], [14, 17]]
    whole = result_of(case, xs, 2)
    assert whole is not None
    assert whole.tolist() == [0, 14, 17]
    assert result_of(case, xs, 0) is None


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float16", "float32", "float64"])
def test_units_in_the_last_place_are_counted_across_zero(dtype: str) -> None:
    one = np.array([1.0, 0.0, -1.0], dtype)
    nearby = one.copy()
    nearby.view(f"u{one.itemsize}")[0] += 1
    nearby.view(f"u{one.itemsize}")[1] += 2
    assert ulps(one, one).tolist() == [0, 0, 0]
    assert ulps(one, nearby).tolist() == [1, 2, 0]
    assert ulps(np.array([0.0], dtype), np.array([-0.0], dtype)).tolist() == [1]
    assert ulps(one[1:2], -nearby[1:2]).tolist() == [2]


def test_a_difference_says_where_and_how_much_and_of_what_kind() -> None:
    wanted = np.arange(6, dtype="complex64").reshape(2, 3)
    found = wanted.copy()
    found[1, 0] += 1j
    assert difference(wanted, wanted) == ""
    assert difference(found, wanted) == "element [1, 0] of the result is (3+1j), not (3+0j); 1 of 6 elements differ"
    assert difference(found[0], wanted) == "the result is complex64[3], not complex64[2, 3]"
    near = np.nextafter(np.float32([1, 2]), np.float32(9))
    assert difference(near, np.float32([1, 2]))
    assert difference(near, np.float32([1, 2]), most_ulps=1) == ""


def test_memory_around_an_array_is_watched() -> None:
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


def test_an_input_that_is_written_is_found() -> None:
    assert un.launch(wrong_memory, 1) == ["x was written"]


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_command_tells_what_was_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "-n", "2", "--cases", "60", "--seed", "4", "--transport", "tcp"]) == 0
    table = capsys.readouterr().out
    assert "refused" in table
    assert table.endswith("seed 4, 2 rank(s), tcp\n")


def test_the_command_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "-n", "1", "--cases", "60", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ranks"], told["transport"], told["error"]) == (1, "shm", None)
    assert sum(told["cases"].values()) == 60
    assert told["seconds"] > 0


def test_the_command_fails_with_the_program_of_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.cli.test._check", check_broken)
    assert main(["test", "-n", "2", "--cases", "2000", "--seed", "5", "--json"]) == 1
    output = capsys.readouterr()
    told = json.loads(output.out)["error"]
    assert told["program"] in told["message"]
    assert told["message"] in output.err


def check_broken(world: un.Communicator, numbers: range, seed: int) -> Summary:
    return un.testing.check_collectives(Broken(world, "allreduce", other_element), cases=numbers, seed=seed)


# --- what it has found ---------------------------------------------------------------------------------------------


def reduce_nothing(world: un.Communicator) -> tuple[int, ...]:
    return world.allreduce(np.zeros((0, 1), "uint32"), "bxor", algorithm="one_shot").shape


def test_a_one_shot_allreduce_of_no_elements_has_no_scratch() -> None:
    assert un.launch(reduce_nothing, 3) == [(0, 1)] * 3
