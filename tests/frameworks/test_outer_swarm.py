"""Tests that members of a swarm train with outer optimizers while some are lost and others enter."""

from __future__ import annotations

import json
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.outcomes import error_of
from support.swarms import SwarmProcesses

import unisono as un
from unisono.data_parallel import BlockMomentum, DiLoCo, LocalSGD
from unisono.frameworks.outer.swarm_averages import Turn

# Each member adds a number of its own in each step. "b.stop" lets all members end after the same step.
TRAINING = """
import json
from unisono.data_parallel import DiLoCo, LocalSGD, fingerprint

rate = {"a": 12.0, "b": 24.0, "c": 60.0, "d": 84.0}[name]
arguments = json.loads(os.environ["ARGUMENTS"])
await_mark(*{"b": ["a with a True"], "c": ["a with a,b True"]}.get(name, []))
with un.Swarm(places, **settings) as swarm:
    model = {"a.w": np.full(3, float(ord(name)), np.float32), "b.w": np.zeros(2), "b.stop": np.zeros(1)}
    kind = {"DiLoCo": DiLoCo, "LocalSGD": LocalSGD}[os.environ["KIND"]]
    with kind(swarm, model, inner_steps=4, **arguments) as outer:
        before, moved = model["a.w"].copy(), []
        while outer.steps % 4 != arguments["overlap"] or outer._values[1][-1] == 0:
            model["a.w"] += rate
            model["b.w"] -= rate
            if has_mark(folder, "stop"):
                model["b.stop"] += 1.0
            outer.step(model)
            if outer.steps % 4 == 2:  # the fragment of "a.w" has left
                moved.append(float(model["a.w"][0] - before[0]))
                before = model["a.w"].copy()
                mark(f"{name} with {','.join(sorted(member.name for member in swarm.members))} {len(moved) > 4}")
            time.sleep(0.005)
        model = outer.synchronize(model)
        values = outer.state_dict()["values"]
        print("bits", outer.steps, fingerprint(model), fingerprint({str(i): x for i, x in enumerate(values)}))
        print("moved", moved)
        mark(f"{name} ends")
        await_mark("a ends", "c ends", "d ends")
"""
MOVES = {  # of "a.w" from one average to the next
    *(24.0, 48.0),  # two steps of a, and four; four of a and two of b, which enters after a fragment of others
    *(72.0, 88.0, 128.0),  # four steps of a and b, of these and two of c, and of all three
    *(144.0, 152.0, 208.0),  # four steps of a and c, of these and two of d, and of all three
}


def trained_with_a_loss_and_a_newcomer(folder: Path, kind: str, arguments: dict[str, Any]) -> dict[str, str]:
    """Return what the members a, c and d write, of which d enters after b has been killed."""
    with SwarmProcesses(folder) as swarm:
        environ = {"KIND": kind, "ARGUMENTS": json.dumps({"fragments": 2, "overlap": 0, **arguments})}
        for name in "abc":
            swarm.start(name, TRAINING, environ)
        swarm.await_marks("a with a,b,c True", "c with a,b,c True")
        swarm.processes["b"].kill()
        swarm.await_marks("a with a,c True", "c with a,c True")
        swarm.start("d", TRAINING, environ)
        swarm.await_marks("a with a,c,d True", "d with a,c,d True")
        swarm.mark("stop")
        return {name: swarm.output(name) for name in "acd"}


def test_averages_of_a_swarm_have_the_changes_of_all_members_while_they_come_and_go(tmp_path: Path) -> None:
    outputs = trained_with_a_loss_and_a_newcomer(tmp_path, "LocalSGD", {})
    assert len({re.findall("^bits .*$", output, re.MULTILINE)[0] for output in outputs.values()}) == 1, outputs
    for name, output in outputs.items():
        (text,) = re.findall(r"^moved (.*)$", output, re.MULTILINE)
        moved = json.loads(text)
        assert moved == sorted(moved), output
        assert set(moved) <= MOVES, output
        assert {208.0} | ({128.0, 144.0} if name == "a" else set()) <= set(moved), output


def test_members_of_a_swarm_end_with_the_same_bits_when_they_stream_narrow_changes(tmp_path: Path) -> None:
    arguments = {"overlap": 1, "mixing": 0.5, "compression": "int4", "momentum": None}
    outputs = trained_with_a_loss_and_a_newcomer(tmp_path, "DiLoCo", arguments)
    assert len({re.findall("^bits .*$", output, re.MULTILINE)[0] for output in outputs.values()}) == 1, outputs


# Members add steps of their own, of which a compressed form loses a part. "c" dies after it has sent its fifth change.
COMPRESSED = """
from unisono.data_parallel import LocalSGD, fingerprint
from unisono.swarm import attempts

rate = {"a": 1.0, "b": 2.0, "c": 4.0}[name] * np.linspace(0.0, 1.0, 600)
quantum = {"int8": 4.0 / 127, "int4": 4.0 / 7}
with un.Swarm(places, min_size=3 if name == "c" else 2, **settings) as swarm:
    while swarm.size < 3:
        time.sleep(0.01)
    for compression in ("int4", "int8"):
        model, right, counts = {"w": np.zeros(600, np.float32)}, np.zeros(600), []
        gather = swarm.allgather
        def counted(*args, **options):
            if name == "c" and len(counts) == 4:
                attempts.second_phase = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            result = gather(*args, **options)
            counts.append(len(swarm.last_call.contributors))
            return result
        with LocalSGD(swarm, model, inner_steps=1, compression=compression) as outer:
            swarm.allgather = counted
            for _ in range(40):
                model["w"] += rate.astype(np.float32)
                outer.step(model)
            swarm.allgather = gather
            averages = {3: (1.0 + 2.0 + 4.0) / 3, 2: (1.0 + 2.0) / 2}
            for count in counts:
                right += averages[count] * np.linspace(0.0, 1.0, 600)
            # A member loses at most half a quantum, and the others lose what "c" had kept.
            error = np.abs(model["w"] - right).max() / quantum[compression]
            print(compression, fingerprint(model), counts.count(3), error)
            assert error < 1.5, error
"""


def test_members_keep_what_compression_loses_while_another_dies_in_the_middle_of_an_average(tmp_path: Path) -> None:
    with SwarmProcesses(tmp_path) as swarm:
        for name in "abc":
            swarm.start(name, COMPRESSED)
        outputs = {name: swarm.printed(name, -signal.SIGKILL if name == "c" else 0) for name in "abc"}
    assert outputs["a"] == outputs["b"]
    lines = [line.split() for line in outputs["a"].splitlines()]
    assert [line[0] for line in lines] == ["int4", "int8"], lines
    assert int(lines[0][2]) in (4, 5), lines  # the others may have had the sum with the last change of "c"


DIFFERING = """
from unisono.data_parallel import LocalSGD

model = {"w": np.zeros(3)}
if name == "c":
    await_mark("a trains", "b trains")
    with un.Swarm(places, min_size=2, **settings) as swarm:
        try:
            LocalSGD(swarm, model, inner_steps=5)
        except un.MismatchError as error:
            print("arguments:", error)
with un.Swarm(places, min_size=2, **settings) as swarm, LocalSGD(swarm, model, inner_steps=2) as outer:
    try:
        while outer.steps % 2 or outer._values[0][0] == 0.0:
            outer.steps += 2 * (name == "c")  # which is an error of the program
            if has_mark(folder, "c differs") and len(swarm.members) == 2:
                model["w"] += 1.0
            outer.step(model)
            mark(f"{name} trains")
            time.sleep(0.005)
    except un.MismatchError as error:
        print("steps:", error)
        mark("c differs")
    mark(f"{name} ends")
    await_mark("a ends", "b ends")
    sys.stdout.flush()
    os._exit(0)  # because a member alone cannot leave in order
"""


def test_a_member_that_differs_raises_an_error_and_the_others_go_on(tmp_path: Path) -> None:
    with SwarmProcesses(tmp_path) as swarm:
        for name in "abc":
            swarm.start(name, DIFFERING)
        outputs = {name: swarm.output(name) for name in "abc"}
    assert "arguments: the other members train with other arguments or parameters" in outputs["c"]
    assert "steps: this member has made another number of steps than the others" in outputs["c"]
    assert "steps:" not in outputs["a"] + outputs["b"]


def test_training_of_one_member_continues_from_a_saved_state_and_misuse_is_refused(tmp_path: Path) -> None:
    key = os.urandom(32)
    good = {"a.w": np.zeros(2, np.float32), "b.w": np.zeros(2)}
    with (
        un.MeetingPlace("tcp://127.0.0.1:0", key) as place,
        un.Swarm(place.url, key=key, heartbeat_timeout_s=0.5) as swarm,
    ):
        for kind, error, arguments in (
            (LocalSGD, "groups need ranks that stay", {"groups": 1}),
            (DiLoCo, "compression='topk' cannot be used on a swarm: pass one of float16", {"compression": "topk"}),
            (BlockMomentum, "inner_steps must be an integer", {"inner_steps": 0}),
        ):
            name, text = error_of(partial(kind, swarm, good, **{"inner_steps": 2, **arguments}))
            assert (name, error in text) == ("UsageError", True), text
        assert "not str" in error_of(lambda: DiLoCo("swarm", good, inner_steps=2))[1]
        assert swarm.last_call is None  # no call has been made
        with LocalSGD(swarm, good, inner_steps=2) as outer:
            for _ in range(3):
                good["a.w"] += 1
                good = outer.step(good)
            assert "as state=" in error_of(lambda: outer.load_state_dict(outer.state_dict()))[1]
            assert "does not count" in error_of(outer.nbytes_sent)[1]
            state = outer.state_dict()
        again = {name: np.ones_like(x) for name, x in good.items()}
        with LocalSGD(swarm, again, inner_steps=2, state=state) as outer:
            assert (outer.steps, again["a.w"].tolist(), again["b.w"].tolist()) == (3, [2.0, 2.0], [0.0, 0.0])
            again["a.w"] += 5
            outer.step(again)
            assert outer.synchronize(again)["a.w"].tolist() == [7.0, 7.0]
        assert "has ended" in error_of(lambda: outer.synchronize(again))[1]


def test_models_of_torch_train_on_a_swarm() -> None:
    torch = pytest.importorskip("torch", reason="make torch installs it")
    key = os.urandom(32)
    with (
        un.MeetingPlace("tcp://127.0.0.1:0", key) as place,
        un.Swarm(place.url, key=key, heartbeat_timeout_s=0.5) as swarm,
    ):
        model = torch.nn.Linear(2, 1)
        before = model.weight.detach().clone()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = un.torch.LocalSGD(model, inner, swarm, inner_steps=2, compression="float16")
        assert torch.equal(model.weight, before)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert torch.equal(model.weight, before - 2)
        optimizer.close()


JAX = """
import jax.numpy as jnp
from unisono.data_parallel import fingerprint

parameters = {"a": [jnp.full(3, float(ord(name))), jnp.zeros(2)], "b": {"w": jnp.zeros((2, 2))}}
with un.Swarm(places, **settings) as swarm:
    with un.jax.LocalSGD(swarm, parameters, inner_steps=2, compression="int8") as outer:
        begun = float(outer.parameters["a"][0][0])
        parameters = outer.parameters
        while outer.outer.steps % 2 or float(parameters["b"]["w"][0, 0]) < 3.0:
            is_last = has_mark(folder, "b trains") and len(swarm.members) == 2
            parameters["b"]["w"] += 4.0 * is_last
            parameters["a"][0] += 1.0
            parameters = outer.step(parameters)
            assert outer.parameters is None
            mark(f"{name} trains")
            time.sleep(0.01)
        parameters = outer.synchronize(parameters)
        values = {"0": parameters["a"][0], "1": parameters["b"]["w"]}
        print(begun > ord("a"), type(parameters["a"][0]).__name__, fingerprint(values))
        mark(f"{name} ends")
        await_mark("a ends", "b ends")
"""


def test_a_newcomer_begins_with_the_arrays_of_jax_that_the_others_share(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="make jax installs it")
    with SwarmProcesses(tmp_path) as swarm:
        swarm.start("a", JAX, {"JAX_PLATFORMS": "cpu"})
        swarm.await_marks("a trains")
        swarm.start("b", JAX, {"JAX_PLATFORMS": "cpu"})
        outputs = {name: swarm.printed(name).split() for name in "ab"}
    assert outputs["a"][0] == "False", outputs
    assert outputs["b"][0] == "True", outputs
    assert outputs["a"][1:] == outputs["b"][1:], outputs
    assert outputs["a"][1] == "ArrayImpl", outputs


# "c" is stopped until the others have left it behind. Later, they are killed, and "d" makes a quorum with "c".
# On the face "hosts", "c" and "d" are hosts of two ranks.
AGAIN = """
from unisono.data_parallel import DiLoCo, fingerprint

face = os.environ["FACE"]
kind = un.jax.DiLoCo if face == "jax" else DiLoCo

def train(group=None):
    is_member = group is None or group.rank == 0
    key = (folder / "key").read_bytes()
    swarm = un.Swarm(places, key=key, quorum_timeout_s=1.0, **settings) if is_member else None
    model = {"a.w": np.zeros(3, np.float32), "b.stop": np.zeros(1, np.float32)}
    if face == "jax":
        import jax.numpy
        model = {path: jax.numpy.asarray(x) for path, x in model.items()}
    arguments = dict(inner_steps=4, fragments=2, overlap=1, mixing=0.5, compression="int8")
    with kind(swarm, model, group=group, **arguments) as wrapper:
        outer, model = getattr(wrapper, "outer", wrapper), wrapper.parameters
        if is_member:
            (folder / f"process of {name}").write_text(str(os.getpid()))
        ids, most = set(), 0
        while outer.steps % 4 != 1 or outer._values[1][-1] == 0:
            most = max(most, outer.steps)
            assert most - outer.steps < 4, (most, outer.steps)
            rates = np.array([1.0, has_mark(folder, "stop")], np.float32)
            rates = rates if group is None else outer.group.broadcast(rates, 0)
            model = {path: x + rate for rate, (path, x) in zip(rates, model.items(), strict=True)}
            model = wrapper.step(model)
            outer.state_dict()  # which waits for the averages on their way, and raises nothing
            if is_member:
                ids.add(swarm.me.id)
                members = ",".join(sorted(member.name for member in swarm.members))
                for count in range(1, len(ids) + 1):  # a busy machine may leave a member behind once more
                    mark(f"{name} with {members} {count}")
            time.sleep(0.005)
        model = wrapper.synchronize(model)
        if is_member:
            mark(f"{name} ends")
            await_mark("c ends", "d ends")
            swarm.close()
    return len(ids), outer.steps, fingerprint(model)

if face == "hosts" and name in "cd":
    (entries, *values), (_, *same) = un.launch(train, 2, timeout_s=100)
    assert values == same, (values, same)
else:
    entries, *values = train()
print(entries, *values)
"""


@pytest.mark.parametrize("face", ["numpy", "hosts", "jax"])
def test_members_that_are_left_behind_or_lose_the_quorum_train_on_with_the_others_as_soon_as_they_can(
    tmp_path: Path, face: str
) -> None:
    if face == "jax":
        pytest.importorskip("jax", reason="make jax installs it")
    environ = {"FACE": face, "JAX_PLATFORMS": "cpu"}
    with SwarmProcesses(tmp_path) as swarm:
        for name in "abc":
            swarm.start(name, AGAIN, environ)
        swarm.await_marks("a with a,b,c 1", "c with a,b,c 1")
        entries = swarm.left_behind("c", "ab")
        swarm.await_marks(f"c with a,b,c {entries + 1}")
        for name in "ab":
            swarm.processes[name].kill()
        swarm.start("d", AGAIN, environ)
        swarm.await_marks(f"c with c,d {entries + 2}", "d with c,d 1")
        swarm.mark("stop")
        (again, *rest), (once, *same) = (swarm.printed(name).split() for name in "cd")
    assert int(again) >= entries + 2
    assert int(once) >= 1
    assert rest == same
    assert int(rest[0]) > 8


# Each host has two ranks, which add what their group averages. "b" is killed after three averages of both hosts.
HOSTS = """
from unisono.data_parallel import LocalSGD

rate = {"a": 1.0, "b": 3.0}[name]

def train(world):
    key = (folder / "key").read_bytes()
    swarm = un.Swarm(places, key=key, min_size=1, **settings) if world.rank == 0 else None
    model = {"a.w": np.full(2, float(world.rank)), "b.w": np.zeros(2)}
    with LocalSGD(swarm, model, inner_steps=2, fragments=2, group=world) as outer:
        moved, before = [], model["a.w"][0]
        while name == "b" or 4.0 not in moved or moved[-1] != 2.0:
            gradient = outer.group.allreduce(np.full(2, rate * (1 + 2 * world.rank) / 2), op="avg")
            model["a.w"] += gradient
            model["b.w"] += gradient
            outer.step(model)
            if outer.steps % 2 == 1:
                moved.append(float(model["a.w"][0] - before))
                before = model["a.w"][0]
            time.sleep(0.01)
            if name == "b" and moved.count(4.0) == 3 and world.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        model = outer.synchronize(model)
    if swarm is not None:
        swarm.close()
    return moved, model["a.w"].tolist(), model["b.w"].tolist()

(one, *values), (other, *same) = un.launch(train, 2, timeout_s=100)
assert one == other and values == same, (one, other, values, same)
print(one)
"""


def test_hosts_of_several_ranks_train_on_a_swarm_by_one_member_each(tmp_path: Path) -> None:
    with SwarmProcesses(tmp_path) as swarm:
        for name in "ab":
            swarm.start(name, HOSTS)
        moved = json.loads(swarm.printed("a"))
    assert 4.0 in moved, moved  # two steps of 1, averaged with two of 3
    assert moved[-1] == 2.0, moved  # those of "a" alone


@pytest.mark.parametrize("fragments", [1, 5])
def test_turns_have_numbers_of_their_own(fragments: int) -> None:
    turns = [Turn(*indices) for indices in np.ndindex(4, fragments, fragments)]
    assert [Turn.of(turn.number(fragments), fragments) for turn in turns] == turns
