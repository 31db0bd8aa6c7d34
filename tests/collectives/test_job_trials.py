"""The option `tune`: a job tries algorithms in its calls, with right results, and its table serves the next job."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from support.collective_calls import cases, check_refusals, run_case
from support.deadlines import DEADLINE_S
from support.ranks import Job

import unisono as un
from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.launchers.launch import Pool
from unisono.testing import Case
from unisono.transports import _core
from unisono.tuning.decide.table import loaded
from unisono.tuning.machine.fingerprint import fingerprint
from unisono.tuning.measure import job_tuning

# An allreduce that takes far longer than any other one, because it sends its messages many times.
_SLOW = """
from dataclasses import replace
import unisono as un
from unisono.algorithms.builders.direct import allreduce_direct

@un.algorithm("allreduce", "slow", sizes=[2, 3])
def allreduce_slow(size, rank, root=0):
    plan = allreduce_direct(size, rank, root)
    *arrive, combine = plan.lanes[0]
    return replace(plan, algorithm="slow", lanes=((*arrive * 100, combine),))
"""


def slow_table(size: int, link: str, *sizes: int) -> dict[str, Any]:
    """Return a table by which allreduces take the slow algorithm."""
    about = {"machine": fingerprint(), "collective": "allreduce", "link": link, "dtype": "plain", "memory": "host"}
    row = {**about, "ranks": size, "ranks_per_host": size, "sizes": [], "times_us": {}}
    return {
        "format": "unisono table",
        "version": 1,
        "decisions": [{**row, "ranges": [{"from": 0, "to": None, "algorithm": "slow"}]}],
    }


@pytest.fixture
def slow(tmp_path: Path) -> Callable[..., un.Options]:
    """A function that returns options of a job whose allreduces are slow, and which tunes them."""

    def options(size: int, link: str, **more: Any) -> un.Options:
        (tmp_path / "slow.py").write_text(_SLOW)
        (tmp_path / "slow.json").write_text(json.dumps(slow_table(size, link)))
        paths = {"load": str(tmp_path / "slow.py"), "table": str(tmp_path / "slow.json")}
        return un.Options(transports=link, **{**paths, "tune": str(tmp_path / "table.json"), **more})

    return options


def eager() -> None:
    """Make every second call a turn, whatever it costs."""
    job_tuning.BUDGET, job_tuning.LEAST, job_tuning.MOST = 1e9, 1, 1


def is_sure(world: un.Communicator) -> bool:
    """Return whether the trials show another algorithm to be faster than the slow one; the same on all ranks."""
    measurements = world._checker.trials._tuning.measurements({"machine": "here"})
    return any(each.variant != "slow" for each in measurements)


def calls_until_sure(world: un.Communicator, is_eager: bool = True) -> list[tuple[str, int]]:
    """Make calls until another algorithm is known to be faster; return the calls of each algorithm.

    The exchanges of turns are allreduces by `recursive_doubling`.
    """
    if is_eager:
        eager()
    x = np.arange(4.0) + world.rank
    right = np.arange(4.0) * world.size + sum(range(world.size))
    while not is_sure(world):
        for _ in range(20):
            assert (world.allreduce(x) == right).all()
            assert (world.allreduce(x, out=np.empty(4)) == right).all()
    of_size = [
        call for call in world.stats().calls if call.most_nbytes == 64 and call.algorithm != "recursive_doubling"
    ]
    return sorted((call.algorithm, call.calls) for call in of_size)


def calls_of_halves(world: un.Communicator) -> tuple[str, list[tuple[str, int]]]:
    """Make calls on the halves of the ranks, one of which has rank 0; return the cache of the half and its calls."""
    eager()
    half = world.split(world.rank % 2)
    calls = calls_until_sure(half) if world.rank % 2 == 0 else []
    for _ in range(50):
        assert half.allreduce(np.ones(1)) == 2
        assert world.allreduce(np.ones(1)) == 4  # on the same ranks, with turns of its own
    return type(half._cache).__name__, calls


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_communicators_with_rank_0_are_tried_and_others_are_not(slow: Callable[..., un.Options], link: str) -> None:
    options = slow(2, link)
    even, odd, *others = un.launch(calls_of_halves, 4, options=options, timeout_s=DEADLINE_S)
    assert others == [even, odd]
    assert (even[0], odd) == ("PacedCache", ("CallCache", []))
    assert len(even[1]) > 2
    ranks = {context.ranks for context in loaded(Path(options.tune)).decisions}
    assert 2 in ranks


def chosen(world: un.Communicator) -> list[tuple[str, str]]:
    choices = [world.explain("allreduce", nbytes, "float64").choice for nbytes in (32, 1 << 20)]
    return [(choice.algorithm, choice.tier) for choice in choices]


@pytest.mark.parametrize(("size", "link"), [(2, "tcp"), (3, "shm"), (3, "tcp")])
def test_next_job_follows_the_table_that_a_job_has_written(
    slow: Callable[..., un.Options], size: int, link: str
) -> None:
    options = slow(size, link)
    first, *others = un.launch(calls_until_sure, size, options=options, timeout_s=DEADLINE_S)
    assert others == [first] * (size - 1)
    assert "slow" in dict(first)
    assert len(first) > 2
    decisions = loaded(Path(options.tune)).decisions
    ((context, decision),) = decisions.items()
    assert (context.machine, context.ranks, context.link, decision.sizes) == (fingerprint(), size, link, (32,))
    following = slow(size, link, tune="", table=options.tune)
    for at_size, far_away in un.launch(chosen, size, options=following, timeout_s=DEADLINE_S):
        assert at_size[0] != "slow"
        assert at_size[1] == "table"
        assert far_away[1] == "model"


@pytest.mark.night
def test_trials_stay_within_the_budget_of_a_job(slow: Callable[..., un.Options]) -> None:
    first, other = un.launch(spent, 2, options=slow(2, "shm"), timeout_s=DEADLINE_S)
    assert first == other
    by_algorithm, spent_ns, communicating_ns = first
    assert len(by_algorithm) > 2
    assert by_algorithm["slow"] > 0.9 * sum(by_algorithm.values())
    assert spent_ns < communicating_ns


def spent(world: un.Communicator) -> tuple[dict[str, int], float, int]:
    """Return the calls of each algorithm, and what the turns have cost of which time."""
    calls = calls_until_sure(world, is_eager=False)
    tuning = world._checker.trials._tuning
    return dict(calls), tuning._spent_ns, tuning._communicating_ns


def varied_calls(world: un.Communicator) -> list[tuple[str, str, int]]:
    """Make calls of all kinds, some of them in other ways on other ranks; return the algorithms that ran."""
    eager()
    x, out = np.ones(8), np.empty(8)
    plan = world.plan("allreduce", x, out=out)
    for number in range(80):
        out[:] = 0
        if world.rank == 0 and number % 2:
            assert plan() is out
        else:
            world.allreduce(x, out=out)
        assert (out == world.size).all()
        with world.group():
            one, other = world.allreduce(x), world.allreduce(2 * x)
        assert (one.result() == world.size).all()
        assert (other.result() == 2 * world.size).all()
        assert (world.allreduce(x, wait=False).wait() == world.size).all()
        assert (world.allgather(np.full(2, world.rank)) == np.repeat(np.arange(world.size), 2)).all()
    return sorted((call.collective, call.algorithm, call.calls) for call in world.stats().calls)


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_results_are_right_however_ranks_make_a_call(tmp_path: Path, link: str) -> None:
    options = un.Options(transports=link, tune=str(tmp_path / "table.json"))
    first, *others = un.launch(varied_calls, 3, options=options, timeout_s=DEADLINE_S)
    assert others == [first] * 2
    assert len({algorithm for collective, algorithm, _ in first if collective == "allreduce"}) > 2


@pytest.fixture(scope="module", params=["shm", "tcp"])
def tuning_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    options = un.Options(transports=request.param, tune=str(tmp_path_factory.mktemp("tuned") / "table.json"))
    with Pool(3, options=options) as pool:
        pool.run(lambda world: eager(), timeout_s=DEADLINE_S)
        yield pool


@settings(max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(case=st.sampled_from(sorted(CONTRACTS)).flatmap(cases))
def test_results_stay_right(tuning_ranks: Pool, case: Case) -> None:
    errors = tuning_ranks.run(run_case, case, timeout_s=DEADLINE_S)
    check_refusals(case, errors, 3, "tcp")


def demanding_calls(world: un.Communicator) -> set[str]:
    """Make calls that say more than the collective; return the algorithms that ran, but that of the exchanges."""
    eager()
    x = np.ones(64)
    for _ in range(60):
        world.allreduce(x, algorithm="ring")
        world.allreduce(x, reproducible=True)
        world.allreduce(x.astype(np.float16), accumulate="float32")
        world.allgatherv(np.ones(world.rank + 1), [1, 2])
    return {f"{call.collective} {call.algorithm}" for call in world.stats().calls if call.most_nbytes > 64}


def test_calls_with_demands_are_never_tried(tmp_path: Path) -> None:
    asked = un.launch(demanding_calls, 2, timeout_s=DEADLINE_S)
    options = un.Options(tune=str(tmp_path / "table.json"))
    assert un.launch(demanding_calls, 2, options=options, timeout_s=DEADLINE_S) == asked
    assert not (tmp_path / "table.json").exists()


def caches(world: un.Communicator) -> list[type]:
    return [type(comm._cache) for comm in (world, world.dup())]


def test_without_the_option_the_call_cache_is_the_native_one(tmp_path: Path) -> None:
    assert un.launch(caches, 2, timeout_s=DEADLINE_S) == [[_core.CallCache, _core.CallCache]] * 2
    options = un.Options(tune=str(tmp_path / "table.json"))
    assert un.launch(caches, 2, options=options, timeout_s=DEADLINE_S) == [[_core.PacedCache, _core.PacedCache]] * 2


def call_for_ever(world: un.Communicator, say: Callable[[Any], None]) -> None:
    eager()
    x, is_told = np.ones(4), False
    try:
        while True:
            world.allreduce(x, out=np.empty(4))
            if not is_told and is_sure(world):
                is_told = True
                say("sure")
    except (un.UnisonoError, KeyboardInterrupt) as error:
        say(type(error).__name__)
    world.close()


def interrupted(slow: Callable[..., un.Options], folder: Path, rank: int, number: int) -> list[str]:
    """Send a signal to a rank of a job whose trials are sure; return what the other ranks say."""
    options = slow(3, "shm")
    names = {name: getattr(options, name) for name in ("load", "table", "tune", "transports")}
    with Job(call_for_ever, 3, folder, **names) as job:
        assert job.hear_all() == ["sure"] * 3
        job.signal(rank, number)
        return job.hear_all(but=rank if number == signal.SIGKILL else None)


def test_table_is_written_when_a_rank_is_killed_but_not_by_that_rank(
    slow: Callable[..., un.Options], tmp_path: Path
) -> None:
    assert interrupted(slow, tmp_path, 2, signal.SIGKILL) == ["PeerLostError"] * 2
    assert loaded(tmp_path / "table.json").decisions
    (tmp_path / "table.json").unlink()
    (tmp_path / "again").mkdir()
    assert interrupted(slow, tmp_path / "again", 0, signal.SIGKILL) == ["PeerLostError"] * 2
    assert not (tmp_path / "table.json").exists()


def test_table_is_written_after_ctrl_c(slow: Callable[..., un.Options], tmp_path: Path) -> None:
    heard = interrupted(slow, tmp_path, 0, signal.SIGINT)
    assert heard[0] == "KeyboardInterrupt"
    assert loaded(tmp_path / "table.json").decisions


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none/table.json", "there is no folder"),
        ("folder", "cannot be written"),
        ("table.jsonl", "a file .jsonl is for measurements"),
    ],
)
def test_file_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "folder").mkdir()
    options = un.Options(tune=str(tmp_path / name))
    with pytest.raises(un.UsageError, match=f"the option tune of the program: .*{reason}"):
        un.launch(lambda world: None, 2, options=options, timeout_s=DEADLINE_S)


def test_tuning_and_verified_results_exclude_each_other(tmp_path: Path) -> None:
    options = un.Options(tune=str(tmp_path / "table.json"), verify_results=True)
    with pytest.raises(un.UsageError, match="times calls, and verify_results makes them longer"):
        un.launch(lambda world: None, 2, options=options, timeout_s=DEADLINE_S)


def test_damaged_files_of_earlier_jobs_are_replaced(slow: Callable[..., un.Options], tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text('{"format": "unisono ta')
    (tmp_path / "table.jsonl").write_text('{"v": 1, "machine": "00')
    un.launch(calls_until_sure, 2, options=slow(2, "shm"), timeout_s=DEADLINE_S)
    assert loaded(tmp_path / "table.json").decisions
    assert (tmp_path / "table.jsonl").read_text().startswith('{"v": 1, "machine": "00\n{')


def fill_disk(world: un.Communicator, path: str) -> None:
    calls_until_sure(world)
    if world.rank == 0:
        os.rmdir(Path(path).parent)


def test_file_that_can_no_longer_be_written_is_a_warning(
    slow: Callable[..., un.Options], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    path = str(tmp_path / "gone" / "table.json")
    un.launch(fill_disk, 2, path, options=slow(2, "shm", tune=path), timeout_s=DEADLINE_S)
    assert "measurements cannot be kept in" in capfd.readouterr().err
