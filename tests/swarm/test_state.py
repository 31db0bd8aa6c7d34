"""Tests that newcomers get the state of the members, and that a member whose state has drifted is mended or ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.swarms import SwarmProcesses

import unisono as un
from unisono.swarm.state import CHUNK_NBYTES, Offer
from unisono.swarm.trees import arrays_in, described, restored

TRAINING = """
w, m, revision = np.zeros(3_000_000), np.zeros(5, np.float32), 0
if name == "old":
    w[:], revision = 7.0, 100  # from a checkpoint
with un.Swarm(places, min_size=int(os.environ.get("FOUNDERS", 1)), **settings) as swarm:
    all_leave = False
    while not all_leave:
        shared = swarm.state({"w": w, "inner": [m]}, revision, check_every=3)
        assert shared.value["w"] is w
        revision = shared.revision
        assert (w == 7.0 + (revision - 100)).all() and (m == revision - 100).all(), (revision, w[0], m)
        gradient = swarm.allreduce(np.full(3, 1.0))
        leaves = float(has_mark(folder, f"{name} leaves"))
        # A process enters only before the first call of a step. The members leave after the same call, because two of
        # them would be too few for those that need three.
        again = swarm.allreduce(np.array([gradient[0], leaves]), "max")
        all_leave = again[1] == 1
        w += again[0]
        m += 1
        revision += 1
        names = sorted(member.name for member in swarm.last_call.contributors)
        mark(f"{name} with {','.join(names)}")
"""


def test_newcomers_get_the_newest_state_from_the_members(tmp_path: Path) -> None:
    with SwarmProcesses(tmp_path) as swarm:
        for name in ("old", "b", "c"):
            swarm.start(name, TRAINING, {"FOUNDERS": "3"})
        swarm.await_marks("old with b,c,old")
        swarm.start("d", TRAINING)
        swarm.await_marks("d with b,c,d,old", "b with b,c,d,old")
        swarm.processes["old"].kill()
        swarm.await_marks("d with b,c,d")
        for name in "bcd":
            swarm.mark(f"{name} leaves")
        for name in "bcd":
            swarm.output(name)


DRIFTING = """
w = np.arange(10.0)
with un.Swarm(places, min_size=2, **settings) as swarm:
    while swarm.size < 3:
        time.sleep(0.01)
    for step in range(6):
        if name == "c" and step == 2:
            w[3] = -1.0
        try:
            swarm.state({"w": w}, step, check_every=1, on_drift=os.environ["ON_DRIFT"])
        except un.CorruptionError as error:
            print("ends:", error)
            break
        assert w.tolist() == list(range(10)), w
    print("done")
"""


@pytest.mark.parametrize("on_drift", ["mend", "end"])
def test_a_member_whose_state_has_drifted_is_named_and_mended_or_ends(tmp_path: Path, on_drift: str) -> None:
    with SwarmProcesses(tmp_path) as swarm:
        for name in "abc":
            swarm.start(name, DRIFTING, {"ON_DRIFT": on_drift})
        outputs = {name: swarm.output(name) for name in "abc"}
        assert all("the state of c differs from that of the other members" in output for output in outputs.values())
        assert ("ends:" in outputs["c"]) == (on_drift == "end")


@pytest.mark.parametrize(
    "state",
    [
        np.arange(12.0).reshape(3, 4)[:, ::2],
        {"a": [np.zeros(0), np.array(5)], "b": (np.ones(3, np.int8), None, "text", 1.5), 3: True},
        [np.ones(CHUNK_NBYTES // 8 + 1), np.ones(CHUNK_NBYTES // 8 - 1), np.ones(3)],
    ],
)
def test_a_state_is_restored_from_its_description_and_chunks(state: Any) -> None:
    description, arrays = described(state)
    offer = Offer(state, 1, 1)
    manifest = offer.manifest()
    data = b"".join(offer.chunk(index) for index in range(len(manifest.chunks)))
    assert data == b"".join(array.tobytes() for array in arrays)
    again, copies = described(restored(state, description, arrays))
    assert again == description
    assert all(np.array_equal(one, other) for one, other in zip(arrays, copies, strict=True))
    assert [shape for _, shape in arrays_in(manifest.description)] == [array.shape for array in arrays]


@pytest.mark.parametrize("state", [{(1, 2): np.ones(1)}, object(), float("nan"), np.array(["text"])])
def test_a_state_that_cannot_be_passed_on_is_refused(state: Any) -> None:
    with pytest.raises((un.UsageError, TypeError)):
        described(state)


@pytest.mark.parametrize(
    "description",
    [
        [],
        {"array": 1, "dtype": "float64", "shape": [1]},
        {"array": 0, "dtype": "object", "shape": [1]},
        {"array": 0, "dtype": "float64", "shape": [-1]},
        {"items": [["a", 1]]},
        {"value": []},
    ],
)
def test_a_description_from_another_process_that_is_none_is_refused(description: Any) -> None:
    with pytest.raises(ValueError, match=r"description|it "):
        arrays_in(description)


# "a" changes all kinds of state in a step, and "b" enters afterwards with states of its own.
KINDS = """
import jax, torch
from typing import NamedTuple

class Moments(NamedTuple):  # as those of optax
    count: jax.Array
    mean: dict

class Pair:
    def __init__(self, x, y):
        self.x, self.y = x, y

jax.tree_util.register_pytree_node(Pair, lambda of: ((of.x, of.y), None), lambda _, values: Pair(*values))
torch.manual_seed(ord(name))
module = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
x = float(ord(name))
zeros = jax.numpy.zeros(3, jax.numpy.bfloat16)
state = {
    "module": module,
    "optimizer": optimizer,
    "jax": (Moments(jax.numpy.asarray(1), {"w": zeros + x}), Moments(zeros, {}), None, Pair(zeros, zeros + x)),
    "numpy": {"w": np.full(3, x), 5: [np.array(x), "text of " + name]},
}
with un.Swarm(places, **settings) as swarm:
    if name == "a":
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    shared = swarm.state(state, 7 if name == "a" else 0)
    mark(f"{name} has it")
    if name == "a":
        while swarm.size < 2:
            time.sleep(0.01)
    swarm.barrier()
    optimizer.zero_grad()
    module(torch.full((1, 3), 2.0)).sum().backward()
    optimizer.step()  # with the moments of "a"
    moments, nothing, none, pair = shared.value["jax"]
    assert (type(moments), type(nothing), type(pair), none) == (Moments, Moments, Pair, None)
    assert shared.value["numpy"]["w"] is state["numpy"]["w"]
    leaves, form = jax.tree_util.tree_flatten(shared.value["jax"])
    print(shared.revision, module.weight.tolist(), [(x.dtype, x.tolist()) for x in leaves], form, shared.value["numpy"])
"""


def test_a_newcomer_gets_modules_and_optimizers_of_torch_trees_of_jax_and_dicts_of_numpy(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="make torch installs it")
    pytest.importorskip("jax", reason="make jax installs it")
    with SwarmProcesses(tmp_path) as swarm:
        for name in "ab":
            swarm.start(name, KINDS, {"JAX_PLATFORMS": "cpu"})
            swarm.await_marks(f"{name} has it")
        assert swarm.output("a") == swarm.output("b")


@pytest.mark.parametrize(
    ("own", "other", "text"),
    [
        ([np.zeros(2)], [np.zeros(3)], r"state\[0\] is float64\[2\] on this member, and float64\[3\] on the others"),
        ({"w": np.zeros(2, np.int8)}, {"w": np.zeros(2)}, r"state\['w'\] is int8\[2\] on this member"),
    ],
)
def test_a_state_of_other_shapes_or_dtypes_is_refused(own: Any, other: Any, text: str) -> None:
    with pytest.raises(un.MismatchError, match=text):
        restored(own, *described(other))


def test_a_module_of_other_layers_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="make torch installs it")
    one, other = torch.nn.Linear(3, 2), torch.nn.Sequential(torch.nn.Linear(3, 2))
    with pytest.raises(un.MismatchError, match="state does not take the state of the other members"):
        restored(one, *described(other))


def test_a_call_of_state_with_wrong_arguments_is_refused(tmp_path: Path) -> None:
    key = os.urandom(32)
    with (
        un.MeetingPlace("tcp://127.0.0.1:0", key) as place,
        un.Swarm(place.url, key=key, heartbeat_timeout_s=0.5) as swarm,
    ):
        with pytest.raises(un.UsageError, match="revision must be a whole number"):
            swarm.state({}, -1)
        with pytest.raises(un.UsageError, match="on_drift must be"):
            swarm.state({}, 0, on_drift="ignore")
        shared = swarm.state({"w": np.ones(2)}, 3, check_every=1)
        assert shared.revision == 3
        assert swarm.next_call == 2
