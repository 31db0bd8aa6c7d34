"""Hybrid groups: the center of a layer by a model, and groups of real ranks, in step, apart, lost and misused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.deadlines import DEADLINE_S
from support.outcomes import error_of
from support.ranks import Job, Ranks, ranks_fixture, start_ranks

import unisono as un
from unisono.data_parallel import HybridGroups, broadcast_parameters, fingerprint, verify_sync
from unisono.frameworks.data_parallel.center import LAST, Center, StalenessClock
from unisono.frameworks.data_parallel.layers import Frame, Layer

bounded = settings(max_examples=60, deadline=None, derandomize=True)
SIZE = 4
Say = Callable[[Any], None]


ranks = ranks_fixture((SIZE, "shm"), (SIZE, "tcp"))


# --- the clock and the center --------------------------------------------------------------------------------------

LAYER = Layer("", (("w", "float64", 1),), "float64")


def frame(first: int, second: int = 0, value: float | None = None) -> Frame:
    made = Frame(None if value is None else LAYER)
    made.numbers[:] = first, second
    made.values[...] = 0 if value is None else value
    return made


@bounded
@given(groups=st.integers(1, 5), staleness=st.integers(0, 6), rounds=st.integers(1, 6), data=st.data())
def test_groups_keep_the_staleness_bound_and_never_deadlock(
    groups: int, staleness: int, rounds: int, data: Any
) -> None:
    clock = StalenessClock(groups, staleness)
    centers = [Center(np.zeros(1), dict.fromkeys(range(groups), 2.0)) for _ in range(2)]
    left = dict.fromkeys(range(groups), rounds)
    # The next action of each group: it asks the clock, or sends to a layer by its ticket.
    asks = dict.fromkeys(range(groups), 0)  # the version that it has
    sends: list[tuple[int, int, Any]] = []
    answered: dict[int, list[float]] = {}
    history: list[float] = []
    while asks or sends:
        if not sends or (asks and data.draw(st.booleans())):
            group = data.draw(st.sampled_from(sorted(asks)))
            version = asks.pop(group)
            left[group] -= 1
            assert clock.version - version <= staleness
            for sender, turn in clock.take(group, frame(LAST if not left[group] else 0)):
                assert turn.numbers[0] == len(history)
                history.append(2.0 * (sender + 1))
                sends += [(sender, layer, turn.numbers.copy()) for layer in range(2)]
        else:
            group, layer, numbers = sends.pop(data.draw(st.integers(0, len(sends) - 1)))
            for receiver, answer in centers[layer].take(group, frame(*numbers, value=float(group + 1))):
                answered.setdefault(receiver, []).append(float(answer.values[0]))
                if len(answered[receiver]) == 2:
                    # All layers are as they were after the same contributions.
                    version = int(answer.numbers[1])
                    assert answered.pop(receiver) == [sum(history[:version])] * 2
                    asks[receiver] = version
    assert clock.longest <= staleness
    assert (clock.active_groups, [center.active_groups for center in centers]) == (0, [0, 0])
    assert [(center.version, center.values[0]) for center in centers] == [(groups * rounds, sum(history))] * 2


def test_group_waits_only_when_another_would_exceed_the_staleness_bound() -> None:
    clock = StalenessClock(2, 2)
    assert [[group for group, _ in clock.take(0, frame(0))] for _ in range(3)] == [[0], [0], []]
    assert [group for group, _ in clock.take(1, frame(0))] == [0, 1]
    assert (clock.longest, clock.version) == (2, 4)


# --- groups of real ranks ------------------------------------------------------------------------------------------


def staleness_of(hybrid: HybridGroups) -> int:
    """Return the greatest staleness that there was, on the rank that keeps the clock; 0 on the others."""
    clock = hybrid._handlers.get(hybrid._clock)
    return clock.longest if isinstance(clock, StalenessClock) else 0


def parameters(rank: int) -> dict[str, Any]:
    return {
        "first.weight": np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2],
        "first.bias": np.array(1.0, np.float32),
        "empty": np.zeros((0, 2), np.float32),
        "second.weight": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "narrow": np.arange(5).astype("bfloat16"),
        "long": np.zeros(40_000, np.float32),
    }


def go_in_step(world: un.Communicator, groups: Any, servers: Any) -> tuple[list[str], int, int, str]:
    """Return what is wrong after steps in which each rank adds 12 times its number + 1, and what the ranks agree on."""
    mine, start = parameters(world.rank), parameters(world.rank)
    wrong = []
    with HybridGroups(world, mine, groups=groups, staleness=0, servers=servers) as hybrid:
        for step in range(1, 4):
            added = hybrid.group.allreduce(np.array(12.0 * (world.rank + 1)), "avg")
            for x in mine.values():
                x[...] = x + np.asarray(added).astype(x.dtype)
            (hybrid.exchange if step < 3 else hybrid.finish)(mine)
            # The mean over all ranks of 12 (rank + 1), which is exact in groups of any size.
            wrong += [name for name, x in mine.items() if (x.astype(float) != start[name] + 30.0 * step).any()]
        longest = staleness_of(hybrid)
    verify_sync(world, mine)
    return wrong, hybrid.contributions, longest, fingerprint(mine)


GROUPS = {"two": 2, "one": 1, "each alone": 4, "unequal": [[2], [3, 1, 0]]}


@pytest.mark.parametrize("servers", [None, [3]], ids=["all serve", "one serves"])
@pytest.mark.parametrize("groups", GROUPS)
def test_groups_in_step_compute_the_exact_mean_of_all_ranks(ranks: Ranks, groups: str, servers: Any) -> None:
    count = {"two": 2, "one": 1, "each alone": 4, "unequal": 2}[groups]
    every = ranks.run_calls(go_in_step, GROUPS[groups], servers)
    assert [wrong for wrong, *_ in every] == [[]] * SIZE
    assert {(contributions, longest) for _, contributions, longest, _ in every} == {(3 * count, 0)}
    assert len({digits for *_, digits in every}) == 1


def run_apart(world: un.Communicator, staleness: int, steps: list[int]) -> tuple[float, int, int, int]:
    """Groups of other numbers of steps, one of them slow; each step adds 1 on each rank."""
    mine = {"a.w": np.zeros(3), "b.w": np.zeros(1000, np.float32), "c.w": np.zeros(2)}
    last = 0
    with HybridGroups(world, mine, groups=2, staleness=staleness) as hybrid:
        for step in range(steps[hybrid.index]):
            time.sleep(0.02 * hybrid.index)
            for x in mine.values():
                np.add(x, 1, out=x)
            (hybrid.exchange if step + 1 < steps[hybrid.index] else hybrid.finish)(mine)
            assert hybrid.contributions >= last + 1
            last = hybrid.contributions
            verify_sync(hybrid.group, mine)
        longest = staleness_of(hybrid)
    verify_sync(world, mine)
    assert len({float(x.flat[0]) for x in mine.values()}) == 1
    return float(mine["a.w"][0]), hybrid.contributions, longest, int(world.allreduce(np.array(1)))


@pytest.mark.parametrize(("staleness", "steps"), [(0, [5, 5]), (1, [6, 4]), (100, [12, 3]), (2, [1, 7])])
def test_stale_groups_lose_no_contribution_and_keep_the_staleness_bound(
    ranks: Ranks, staleness: int, steps: list[int]
) -> None:
    for total, contributions, longest, afterwards in ranks.run_calls(run_apart, staleness, steps):
        assert (total, contributions, afterwards) == (sum(steps) / 2, sum(steps), SIZE)
        assert longest <= staleness


def with_torch(world: un.Communicator) -> tuple[float, list[str]]:
    torch = __import__("torch")
    torch.set_num_threads(1)
    torch.manual_seed(world.rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    broadcast_parameters(world, model.state_dict())
    before = [p.data_ptr() for p in model.parameters()]
    with HybridGroups(world, model.named_parameters(), groups=2, staleness=4) as hybrid:
        optimizer = un.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), hybrid.group)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
            (hybrid.exchange if step < 3 else hybrid.finish)(model.named_parameters())
        optimizer.close()
    assert before == [p.data_ptr() for p in model.parameters()]
    verify_sync(world, model.named_parameters())
    return float(model(torch.ones(2, 3)).square().mean()), [name for name, _ in model.named_parameters()]


def test_torch_models_train_in_hybrid_groups() -> None:
    pytest.importorskip("torch", reason="make torch installs it")
    losses = [loss for loss, _ in un.launch(with_torch, 4, timeout_s=DEADLINE_S)]
    assert len(set(losses)) == 1
    assert losses[0] < 1.0


# --- misuse --------------------------------------------------------------------------------------------------------


def misuse(world: un.Communicator) -> list[tuple[str, str]]:
    good = {"w": np.zeros(2)}
    arguments: list[dict[str, Any]] = [
        {"groups": 5},
        {"groups": 0},
        {"groups": [[0, 1], [1, 2, 3]]},
        {"groups": [[0, 1, 2, 3], []]},
        {"groups": 1.5},
        {"staleness": -1},
        {"staleness": 0.5},
        {"servers": [4]},
        {"servers": []},
    ]

    def refused(named: Any, **more: Any) -> tuple[str, str]:
        return error_of(lambda: HybridGroups(world, named, **{"groups": 2, "staleness": 1, **more}))

    wrong: list[Any] = [{"n": np.zeros(2, int)}, {}, np.zeros(2), {"w": np.zeros(2, np.complex64)}]
    errors = [refused(good, **options) for options in arguments] + [refused(row) for row in wrong]
    world.barrier()
    errors.append(refused(good, groups=1 + (world.rank == 1)))
    errors.append(refused(iter({"w": np.full(2, float(world.rank == 2))}.items())))
    with HybridGroups(world, good, groups=2, staleness=1) as hybrid:
        errors.append(error_of(lambda: hybrid.exchange({"w": np.zeros(3)})))
        errors.append(error_of(lambda: hybrid.exchange({"v": np.zeros(2)})))
        errors.append(error_of(lambda: hybrid.exchange({**good, "more": np.zeros(2)})))
        hybrid.finish(good)
        errors.append(error_of(lambda: hybrid.exchange(good)))
    hybrid.close()
    return errors


def test_hybrid_groups_refuse_misuse_and_say_what_is_wrong() -> None:
    with start_ranks(SIZE, "shm") as ranks:
        for errors in ranks.run_calls(misuse):
            *wrong, differing, bits, shape, name, more, finished = errors
            assert [kind for kind, _ in wrong] == ["UsageError"] * 13
            assert differing[0] == "MismatchError"
            assert "rank 1: 'groups=[[0, 1], [2, 3]]' where the others have 'groups=[[0, 1, 2, 3]]'" in differing[1]
            assert "'w' has other bits on rank 2" in bits[1]
            assert "the parameters differ from those at the start" in shape[1]
            assert "the parameters differ from those at the start" in name[1]
            assert "the parameters differ from those at the start" in more[1]
            assert "have finished" in finished[1]


def leave(world: un.Communicator, how: str) -> None:
    mine = {"a.w": np.zeros(3), "b.w": np.zeros(3)}
    with HybridGroups(world, mine, groups=2, staleness=0) as hybrid:
        hybrid.exchange(mine)
        if world.rank == 1 and how == "raises":
            raise KeyError("what the program does wrong")
        if world.rank == 1:
            hybrid.close()
        hybrid.exchange(mine)
        hybrid.finish(mine)


@pytest.mark.parametrize(("how", "kind"), [("raises", KeyError), ("closes", un.UnisonoError)])
def test_hybrid_group_rank_that_departs_early_is_an_error_on_all_ranks(how: str, kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        un.launch(leave, SIZE, how, timeout_s=DEADLINE_S)


# --- lost ranks ----------------------------------------------------------------------------------------------------


def exchange_for_ever(world: un.Communicator, say: Say, servers: list[int]) -> None:
    mine = {"a.w": np.zeros(3), "b.w": np.zeros(30_000)}
    hybrid = HybridGroups(world, mine, groups=2, staleness=3, servers=servers)
    hybrid.exchange(mine)
    say(os.getpid())
    began = time.monotonic()
    while time.monotonic() < began + DEADLINE_S:
        error = error_of(lambda: hybrid.exchange(mine))
        if error[0]:
            break
    say(error)
    hybrid.close()
    world.close()


# Groups are {0, 1} and {2, 3}: 0 and 2 lead.
LOST: dict[str, tuple[str, int, list[int]]] = {
    "leader and server": ("shm", 2, [0, 1, 2, 3]),
    "leader": ("shm", 2, [0]),
    "server": ("shm", 3, [3]),
    "member": ("shm", 1, [0, 2]),
    "rank 0": ("shm", 0, [2]),
    "leader and server, tcp": ("tcp", 2, [0, 1, 2, 3]),
    "server, tcp": ("tcp", 3, [3]),
}


@pytest.mark.parametrize(("transport", "lost", "servers"), LOST.values(), ids=LOST)
def test_hybrid_group_rank_that_dies_is_an_error_on_all_others(
    tmp_path: Path, transport: str, lost: int, servers: list[int]
) -> None:
    with Job(exchange_for_ever, SIZE, tmp_path, servers, transports=transport) as job:
        job.hear_all()
        job.signal(lost, signal.SIGKILL)
        for kind, text in job.hear_all(but=lost):
            assert kind in ("PeerLostError", "AbortedError"), text
            assert f"rank {lost}" in text


# --- training ------------------------------------------------------------------------------------------------------


@pytest.mark.night
def test_hybrid_groups_with_a_straggler_learn_as_well_as_ranks_in_step() -> None:
    pytest.importorskip("sklearn")
    asked = ["--epochs", "8", "--step-ms", "1", "--rounds", "1", "--json"]
    command = [sys.executable, "-m", "unisono.bench.programs.hybrid", *asked]
    row = json.loads(subprocess.check_output(command, timeout=DEADLINE_S))
    assert (row["ranks"], row["groups"], row["slow"]) == (4, 2, 3.0)
    for way in ("synchronous", "hybrid"):
        assert row[way]["images"] >= 8 * 1437
        assert row[way]["accuracy"] > 0.9
