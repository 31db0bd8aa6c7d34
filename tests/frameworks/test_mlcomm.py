"""The calls of the Cray PE ML plugin: by real ranks, in their order and out of it, and the example of five steps."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S
from support.programs import by_launcher
from support.ranks import Ranks, ranks_fixture

import unisono as un

ROOT = Path(__file__).resolve().parents[2]
SIZE = 3


ranks = ranks_fixture((SIZE, "shm"))


def told(call: Callable[[], Any]) -> str:
    """Return the text of the `UsageError` or `MismatchError` that `call` raises; empty if there is none."""
    try:
        call()
    except (un.UsageError, un.MismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- schedules -----------------------------------------------------------------------------------------------------


def run_schedule(world: un.Communicator, ksteps: int, max_steps: int) -> list[tuple[float, bool]]:
    """Return what comes out in each step, and whether it was the memory that went in, of gradients rank + 3 step."""
    import unisono.compat.mlcomm as mc

    mc.init(2, 1, 5, "tensorflow", world=world)
    mc.config_team(0, 0, ksteps, max_steps, 0, 100)
    results = []
    for step in range(max_steps):
        given = [np.full((2, 2), world.rank + 3.0 * step), None, np.array(world.rank + 3.0 * step, np.float32)]
        got = mc.gradients(given, 0)
        assert got[1] is None
        assert got[0].min() == got[0].max() == got[2]
        results.append((float(got[2]), got[0] is given[0] and got[2] is given[2]))
    mc.finalize()
    return results


# With 3 ranks, the mean of step t is 1 + 3 t.
SCHEDULES: dict[tuple[int, int], list[float]] = {
    (5, 5): [1, 4, 7, 10, 13],
    (-5, 5): [1, 4, 7, 10, 13],
    (2, 5): [1, 4, 0, 7, 10 + 13],
    (0, 4): [0, 1, 4, 7 + 10],
    (-2, 5): [0, 1, 4, 7 + 10, 13],
    (1, 1): [1],
}


@pytest.mark.parametrize(("ksteps", "max_steps"), SCHEDULES)
def test_mlcomm_returns_gradients_in_their_scheduled_step_and_loses_none(
    ranks: Ranks, ksteps: int, max_steps: int
) -> None:
    expected = [(float(step), True) for step in SCHEDULES[ksteps, max_steps]]
    for result in ranks.run_calls(run_schedule, ksteps, max_steps):
        assert result == expected


# --- the other calls -----------------------------------------------------------------------------------------------


def use_all(world: un.Communicator) -> list[Any]:
    import unisono.compat.mlcomm as mc

    mc.init_mpi(world=world)
    place = (mc.get_rank(), mc.get_nranks())
    weights = [np.full(3, world.rank, np.int32), np.full((2, 2), float(world.rank))[:, ::1]]
    differ = mc.check_buffers_match(weights, 1)
    got = mc.broadcast(weights, 2)
    assert all(a is b for a, b in zip(got, weights, strict=True))
    same = mc.check_buffers_match(weights, 1)
    loss = np.array([world.rank, 4.0])
    assert mc.average(loss) is loss
    mc.barrier()
    mc.init(1, 2, sum(np.prod(shape) for shape in [(2, 2), (5,)]))  # an integer of numpy
    mc.config_team(1, max_steps=3, ksteps=3)
    frozen = np.full(2, float(world.rank))
    frozen.flags.writeable = False
    (mean,) = mc.gradients([frozen], 1)
    later = mc.gradients([frozen, np.full(2, float(world.rank))], 1)[1]  # in no step before
    assert later.tolist() == [1.0, 1.0]
    mc.config_team(1, 0, 1, 1)
    (other,) = mc.gradients((np.ones((3, 3)),), team=1)
    mc.finalize()
    return [
        place,
        differ,
        same,
        [x.ravel().tolist() for x in weights],
        loss.tolist(),
        mean.tolist(),
        frozen.tolist(),
        other.sum(),
    ]


def test_mlcomm_calls_behave_like_those_of_the_cray_plugin(ranks: Ranks) -> None:
    for rank, (place, *result) in enumerate(ranks.run_calls(use_all)):
        assert place == (rank, SIZE)
        frozen = [float(rank)] * 2
        assert result == [1, 0, [[2] * 3, [2.0] * 4], [1.0, 4.0], [1.0, 1.0], frozen, 9.0]


def of_torch(world: un.Communicator) -> list[float]:
    import unisono.compat.mlcomm as mc

    torch = __import__("torch")
    mc.init(world=world)
    mc.config_team(0, 0, 1, 1)
    parameter = torch.nn.Parameter(torch.full((2, 3), float(world.rank)).t())
    mc.broadcast([parameter], 1)
    narrow = torch.full((4,), float(world.rank), dtype=torch.bfloat16)
    (mean,) = mc.gradients([narrow], 0)
    assert mean is narrow
    mc.finalize()
    return [float(parameter.detach().sum()), float(mean[3])]


def test_mlcomm_overwrites_torch_tensors(ranks: Ranks) -> None:
    pytest.importorskip("torch", reason="make torch installs it")
    assert ranks.run_calls(of_torch) == [[6.0, 1.0]] * SIZE


def of_tensorflow(world: un.Communicator) -> list[Any]:
    import unisono.compat.mlcomm as mc

    tf = __import__("tensorflow")
    mc.init(1, 2, 0, "tensorflow", world=world)
    mc.config_team(0, 0, 2, 2)
    mc.config_team(1, 0, 1, 1)
    variable = tf.Variable([[float(world.rank), 7.0]])
    for own, new in zip([variable], mc.broadcast([variable], 1), strict=True):
        own.assign(new)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * x)
        mean, nothing = mc.gradients([*tape.gradient(loss, [variable]), None], 0)
        assert nothing is None
        assert mean.shape == (1, 2)
        variable.assign_sub(mean)
        return mean

    means = [step(tf.constant([[1.0 + world.rank, float(turn)]])).numpy().tolist() for turn in range(2)]
    (eager,) = mc.gradients([tf.constant([float(world.rank)])], 1)
    assert tf.is_tensor(eager)
    mc.finalize()
    return [means, variable.numpy().tolist(), eager.numpy().tolist()]


def test_mlcomm_works_in_eager_and_graph_mode_of_tensorflow(ranks: Ranks) -> None:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("pip install tensorflow-cpu")
    for means, variable, eager in ranks.run_calls(of_tensorflow):
        assert means == [[[2.0, 0.0]], [[2.0, 1.0]]]
        assert (variable, eager) == ([[-3.0, 6.0]], [1.0])


# --- wrong calls ---------------------------------------------------------------------------------------------------


def call_wrongly(world: un.Communicator) -> dict[str, str]:
    import unisono.compat.mlcomm as mc

    x = [np.ones(3)]
    result = {call: told(getattr(mc, call)) for call in ("get_rank", "get_nranks", "barrier", "finalize")}
    result["broadcast"] = told(lambda: mc.broadcast(x, 0))
    result["gradients"] = told(lambda: mc.gradients(x, 0))
    result["average"] = told(lambda: mc.average(x[0]))
    result["no threads"] = told(lambda: mc.init(0, 1, 0, world=world))
    result["framework"] = told(lambda: mc.init(1, 1, 0, 7, world=world))  # type: ignore[arg-type]
    mc.init_mpi(world=world)
    result["init_mpi twice"] = told(lambda: mc.init_mpi(world=world))
    result["team before init"] = told(lambda: mc.config_team(0, 0, 1, 1))
    mc.init(1, 2, 3)
    result["init twice"] = told(lambda: mc.init(1, 2, 3))
    result["no schedule"] = told(lambda: mc.gradients(x, 1))
    for team in (2, -1, True):
        result[f"team {team}"] = told(lambda team=team: mc.config_team(team, 0, 1, 1))  # type: ignore[misc]
    for name, arguments in {"ksteps": (0, 0, 6, 5), "-ksteps": (0, 0, -6, 5), "max_steps": (0, 0, 0, 0)}.items():
        result[name] = told(lambda arguments=arguments: mc.config_team(*arguments))  # type: ignore[misc]
    result["transition_alg"] = told(lambda: mc.config_team(0, 1, 1, 1))
    mc.config_team(0, 0, 1, 1)
    result["no list"] = told(lambda: mc.gradients(x[0], 0))
    result["no array"] = told(lambda: mc.gradients(["x"], 0))
    result["elements"] = told(lambda: mc.gradients([np.ones(2), np.ones(2)], 0))
    result["integers"] = told(lambda: mc.average(np.array([1])))
    result["shapes"] = told(lambda: mc.broadcast([np.ones(2 + (world.rank == 1))], 0))
    result["gradient shapes"] = told(lambda: mc.gradients([np.ones(2 + (world.rank == 1))], 0))
    mc.config_team(0, 0, 1, 1)
    mc.gradients(x, 0)
    result["past the end"] = told(lambda: mc.gradients(x, 0))
    mc.finalize()
    result["finalize twice"] = told(mc.finalize)
    return result


WORDS = {
    "gradients": "gradients() needs the other ranks: call init() or init_mpi() first",
    "init_mpi twice": "call finalize() first",
    "team before init": "config_team() needs teams: call init(",
    "init twice": "call finalize() first",
    "no schedule": "team 1 has no schedule: call config_team(1, …) before gradients()",
    "team 2": "there is no team 2: pass a number from 0 to nteams - 1, with nteams=2",
    "ksteps": "ksteps must be from -max_steps to max_steps, 5, not 6",
    "no list": "gradients() takes a list of arrays, not one of type ndarray",
    "elements": "the gradients have 4 elements, more than max_elements=3",
    "shapes": "'tensor 0' is float64[3] on rank 1",
    "gradient shapes": "'gradient 0'",
    "past the end": "has made its 1 steps: call config_team(0, …) for more",
    "finalize twice": "finalize() needs the other ranks",
}


def test_mlcomm_errors_say_what_to_do_after_wrong_calls(ranks: Ranks) -> None:
    for result in ranks.run_calls(call_wrongly):
        assert [name for name, text in result.items() if not text] == []
        for name, words in WORDS.items():
            assert words in result[name], name


# --- programs ------------------------------------------------------------------------------------------------------

PROGRAM = """
import atexit
import numpy as np
import unisono.compat.mlcomm as mc
atexit.register(mc.finalize)
mc.init(1, 1, 10, "numpy")
mc.config_team(0, 0, 2, 6, 1, 3)
for step in range(5):  # one is left in flight
    mean = mc.gradients([np.ones(4)], 0)
print("mean", mean[0][0])
"""


def test_mlcomm_is_finalized_at_exit_of_a_program_that_ends_early(tmp_path: Path) -> None:
    completed = by_launcher(PROGRAM, tmp_path, 2)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("mean 1.0") == 2
    assert len(re.findall(r"mlcomm: step 3 of 6: \S+ ms a step, of which \S+ ms waiting", completed.stdout)) == 1


FAILING = PROGRAM.replace("for step", "if mc.get_rank() == 1: raise KeyError('mine')\nfor step")


def test_mlcomm_rank_that_raises_makes_the_others_fail(tmp_path: Path) -> None:
    completed = by_launcher(FAILING, tmp_path, 2)
    assert completed.returncode != 0
    assert "KeyError: 'mine'" in completed.stderr


@pytest.mark.night
@pytest.mark.parametrize(("size", "more"), [(1, []), (2, []), (4, ["--ksteps", "20"])])
def test_mlcomm_example_learns_on_any_number_of_ranks(size: int, more: list[str]) -> None:
    pytest.importorskip("sklearn")
    example = [str(ROOT / "examples" / "mlcomm_digits.py"), "--epochs", "6", *more]
    command = [sys.executable, "-m", "unisono", "run", "-n", str(size), *example]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=ROOT)
    assert completed.returncode == 0, completed.stderr
    told = re.search(r"(\d) ranks: loss \S+, accuracy (\S+), same parameters: True", completed.stdout)
    assert told is not None, completed.stdout
    assert int(told[1]) == size
    assert float(told[2]) > 0.9
