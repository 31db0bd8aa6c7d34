"""Collectives and training of TensorFlow, in eager mode, in ``tf.function`` and in sessions."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import unisono
from support.outcomes import error_of
from support.ranks import Ranks, ranks_fixture, start_ranks

import unisono as un

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="make tensorflow installs it and runs these tests"
)


ranks = ranks_fixture((2, "shm"))


def both_modes(world: un.Communicator) -> list[list[Any]]:
    import tensorflow as tf

    import unisono.tensorflow as ut

    x = tf.constant([[1.0, 2.0], [3.0, 4.0]]) * (world.rank + 1)

    def calls(x: Any) -> list[Any]:
        return [
            ut.allreduce(x, comm=world),
            ut.allreduce(x, "max", comm=world),
            ut.reduce(x, root=1, comm=world),
            ut.broadcast(x, 1, comm=world),
            ut.allgather(x, comm=world),
            ut.allgather(x[0, 0], comm=world),
            ut.reduce_scatter(x, "avg", comm=world),
            ut.alltoall(x, comm=world),
            ut.allreduce(tf.cast(x, tf.bfloat16), comm=world),
        ]

    traced = tf.function(calls)
    unknown = tf.function(calls, input_signature=[tf.TensorSpec([None, 2])])
    return [
        [tf.cast(result, tf.float32).numpy().tolist() for result in results]
        for results in (calls(x), traced(x), unknown(x))
    ]


def test_collectives_are_those_of_the_communicator_in_eager_mode_and_in_graphs(ranks: Ranks) -> None:
    x = np.array([[1.0, 2.0], [3.0, 4.0]])
    for rank, result in enumerate(ranks.run_calls(both_modes)):
        eager = [
            3 * x,
            2 * x,
            3 * x if rank == 1 else 0 * x,
            2 * x,
            np.concatenate([x, 2 * x]),
            [1, 2],
            1.5 * x[rank : rank + 1],
            np.stack([x[rank], 2 * x[rank]]),
            3 * x,
        ]
        assert result == [[np.asarray(value).tolist() for value in eager]] * 3


def gradients(world: un.Communicator) -> list[float]:
    """Return how far each gradient is from the difference quotient of the sum of all ranks' results."""
    import tensorflow as tf

    import unisono.tensorflow as ut

    weights = tf.reshape(tf.range(1.0, 9.0), [4, 2]) * (world.rank + 2)
    calls = {
        "allreduce": lambda x: ut.allreduce(x, comm=world),
        "average": lambda x: ut.allreduce(x, "avg", comm=world),
        "reduce": lambda x: ut.reduce(x, root=1, comm=world),
        "broadcast": lambda x: ut.broadcast(x, 1, comm=world),
        "allgather": lambda x: ut.allgather(x, comm=world),
        "reduce_scatter": lambda x: ut.reduce_scatter(x, comm=world),
        "alltoall": lambda x: ut.alltoall(x, comm=world),
    }

    def loss(call: Any, x: Any) -> Any:
        result = call(x)
        return tf.reduce_sum(result**2 * weights[: result.shape[0]])

    def difference(call: Any, x: Any, traced: bool) -> float:
        def derived(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                mine = loss(call, x)
            return tape.gradient(mine, x)

        actual = (tf.function(derived) if traced else derived)(x).numpy()
        worst = 0.0
        for rank in range(world.size):
            for place in np.ndindex(*x.shape):
                step = np.zeros(x.shape, np.float32)
                step[place] = 0.5 * (rank == world.rank)
                change = float(loss(call, x + step) - loss(call, x - step))
                quotient = float(world.allreduce(np.array(change)))
                if rank == world.rank:
                    worst = max(worst, abs(quotient - actual[place]) / (1 + abs(quotient)))
        return worst

    x = tf.constant([[1.0, -2.0], [0.5, 3.0]]) + world.rank
    return [difference(call, x, traced) for call in calls.values() for traced in (False, True)]


def test_gradients_are_those_of_the_sum_of_all_results(ranks: Ranks) -> None:
    for result in ranks.run_calls(gradients):
        assert max(result) < 1e-3


def independent_calls(world: un.Communicator) -> list[float]:
    """Call many collectives that do not depend on each other, in another form on each rank of the same order."""
    import tensorflow as tf

    import unisono.tensorflow as ut

    @tf.function  # type: ignore[untyped-decorator]
    def many(x: Any) -> Any:
        results = []
        for number in range(20):
            work = tf.linalg.matmul(tf.ones([number * 10 + 1] * 2), tf.ones([number * 10 + 1] * 2))[0, 0] * 0
            results.append(ut.allreduce(x[: number + 1] + (work if world.rank else 0), comm=world)[0])
            ut.barrier(comm=world)
        return tf.stack(results)

    return [float(value) for value in many(tf.ones(20))]


def test_calls_of_a_graph_keep_the_order_of_the_program(ranks: Ranks) -> None:
    assert ranks.run_calls(independent_calls) == [[2.0] * 20] * 2


def trained(world: un.Communicator, parts: int) -> list[float]:
    """Train on the part of this rank of the samples, in eager mode and in a graph."""
    import tensorflow as tf

    import unisono.tensorflow as ut

    x = tf.reshape(tf.range(24.0), [8, 3]) / 24
    y = tf.reduce_sum(x, 1, keepdims=True) ** 2
    if parts > 1:
        x, y = x[world.rank :: parts], y[world.rank :: parts]
    weights = tf.Variable(tf.ones([3, 1]) * (0.5 + (world.rank if parts > 1 else 0)))
    bias = tf.Variable([0.25])
    unused = tf.Variable([1.0])
    averager = ut.Averager(world)

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weights + bias - y) ** 2)
        if parts > 1:
            own = averager if tf.executing_eagerly() else None  # the graph uses the averager that all tapes share
            tape = ut.DistributedGradientTape(tape, world, own)
        result = tape.gradient(loss, [weights, bias, unused])
        assert result[2] is None
        weights.assign_sub(0.1 * result[0])
        bias.assign_sub(0.1 * result[1])
        return loss

    if parts > 1:
        ut.broadcast_variables([weights, bias, unused], comm=world)
    for _ in range(3):
        step()
    traced = tf.function(step)
    for _ in range(3):
        traced()
    averager.close()
    return [*weights.numpy().flatten().tolist(), *bias.numpy().tolist()]


def test_tape_trains_as_one_process_on_all_samples(ranks: Ranks) -> None:
    alone = ranks.run_calls(trained, 1)[0]
    for result in ranks.run_calls(trained, 2):
        assert result == pytest.approx(alone, rel=1e-5)


def other_gradients(world: un.Communicator) -> str:
    """Rank 0 has no gradient of the second variable, and rank 1 none of the first."""
    import tensorflow as tf

    import unisono.tensorflow as ut

    gradients = [tf.ones(2), None] if world.rank == 0 else [None, tf.ones(2)]
    return error_of(lambda: ut.Averager(world).average(gradients))[1]


def test_gradients_of_other_variables_are_not_mixed(ranks: Ranks) -> None:
    for text in ranks.run_calls(other_gradients):
        assert "rank 1: got no gradient of 'gradient 0'" in text


def in_a_session(world: un.Communicator) -> tuple[list[float], list[float], list[str]]:
    import tensorflow as tf

    import unisono.tensorflow as ut

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        x = v1.get_variable("x", initializer=tf.constant([1.0, 2.0]) * (world.rank + 1))
        factor = v1.placeholder(tf.float32, ())
        loss = tf.reduce_sum(x * factor)
        optimizer = ut.DistributedOptimizer(v1.train.MomentumOptimizer(1.0, 0.5), comm=world)
        train = optimizer.minimize(loss, global_step=v1.train.get_or_create_global_step())
        at_end = v1.train.FinalOpsHook(x.value())
        hooks = [ut.BroadcastGlobalVariablesHook(1, comm=world), v1.train.StopAtStepHook(2), at_end]
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            before = session.run(x).tolist()
            while not session.should_stop():
                session.run(train, {factor: 1.0 + world.rank})
    return before, at_end.final_ops_values.tolist(), optimizer.get_slot_names()


def test_monitored_session_broadcasts_and_averages(ranks: Ranks) -> None:
    # The average of the gradients 1 and 2, applied by momentum: 1.5, then 0.5 * 1.5 + 1.5.
    assert ranks.run_calls(in_a_session) == [([2.0, 4.0], [-1.75, 0.25], ["momentum"])] * 2


def wrong_calls(world: un.Communicator) -> dict[str, str]:
    import tensorflow as tf

    import unisono.tensorflow as ut

    x = tf.ones([3, 2])
    result = {
        "rows": error_of(lambda: ut.alltoall(x, comm=world))[1],
        "scalar": error_of(lambda: ut.reduce_scatter(tf.constant(1.0), comm=world))[1],
        "comm": error_of(lambda: ut.allreduce(x, comm=3))[1],  # type: ignore[arg-type]
        "op": error_of(lambda: ut.allreduce(x, "mean", comm=world))[1],
    }

    def derivative() -> None:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = ut.allreduce(x, "max", comm=world)
        tape.gradient(y, x)

    result["derivative"] = error_of(derivative)[1]
    result["no variables"] = error_of(lambda: ut.broadcast_variables([], comm=world))[1]
    result["lag"] = error_of(lambda: ut.Averager(world, lag=1))[1]
    result["jacobian"] = error_of(lambda: ut.DistributedGradientTape(tf.GradientTape(), world).jacobian(x, x))[1]
    return result


def test_wrong_calls_are_refused_before_anything_is_sent(ranks: Ranks) -> None:
    for result in ranks.run_calls(wrong_calls):
        assert "its rows cannot be divided equally among 2 ranks" in result["rows"]
        assert "its rows cannot be divided" in result["scalar"]
        assert "comm must be a Communicator, not int" in result["comm"]
        assert "avg" in result["op"]
        assert "allreduce with op='max' has no gradient" in result["derivative"]
        assert "there are no variables to copy" in result["no variables"]
        assert "lag=1 cannot be used with this optimizer" in result["lag"]
        assert "call jacobian() of the tape itself" in result["jacobian"]


def disagreement(world: un.Communicator) -> str:
    import tensorflow as tf

    import unisono.tensorflow as ut

    @tf.function  # type: ignore[untyped-decorator]
    def traced(x: Any) -> Any:
        return ut.allreduce(x, comm=world)

    try:
        traced(tf.ones(2 + world.rank))
    except tf.errors.OpError as error:
        return str(error)
    return ""


def test_error_in_a_graph_has_the_text_of_unisono() -> None:
    with start_ranks(2, "shm") as ranks:
        for text in ranks.run_calls(disagreement):
            assert "MismatchError" in text
            assert "rank 1 called allreduce(float32[3], op=sum)" in text or "rank 0 called" in text


def test_example_reaches_the_losses_of_one_process(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "tensorflow_function.py"
    result = unisono("run", "-n", "2", str(example), folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "2 ranks: loss 21.3024 to 12.0046; one process: 12.0046" in result.stdout
