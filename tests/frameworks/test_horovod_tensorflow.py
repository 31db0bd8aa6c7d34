"""`unisono.compat.horovod.tensorflow` on real ranks: eager mode, ``tf.function`` and sessions, and each wrong use."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S
from support.ranks import Ranks, ranks_fixture

import unisono as un
from unisono.compat.horovod import job

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="make tensorflow installs it and runs these tests"
)
STEPS = 4


ranks = ranks_fixture((2, "shm"))


def initialized(world: un.Communicator, fn: Callable[..., Any], *arguments: Any) -> Any:
    import unisono.compat.horovod.tensorflow as hvd

    hvd.init(comm=world)
    try:
        return fn(hvd, *arguments)
    finally:
        hvd.shutdown()


def on_ranks(ranks: Ranks, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the results of ``fn(hvd, …)`` on all ranks, between `init` and `shutdown`."""
    return ranks.run_calls(initialized, fn, *arguments)


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the class and the text of the error that a call raises."""
    try:
        result = call()
    except Exception as error:  # noqa: BLE001  (the test compares its class)
        return type(error).__name__, str(error)
    raise AssertionError(f"no error, but {result}")


# --- what calls return ------------------------------------------------------------------------------------------------


def both_modes(hvd: Any) -> Any:
    import tensorflow as tf

    rank = hvd.rank()
    x = tf.constant([1.0, 2.0]) + rank

    def calls(x: Any, rows: Any) -> list[Any]:
        received, counts = hvd.alltoall(tf.range(3) + 10 * rank, splits=[1, 2])
        slices = hvd.allreduce(tf.IndexedSlices(x[None], tf.constant([rank]), tf.constant([2, 2])))
        return [
            hvd.allreduce(x),
            hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0, name="scaled"),
            hvd.allreduce(x, op=hvd.Max),
            hvd.allreduce(x, compression=hvd.Compression.fp16),
            hvd.allreduce(tf.constant([rank - 2])),
            hvd.allreduce(tf.cast(x, tf.bfloat16), op=hvd.Sum),
            *hvd.grouped_allreduce([x, tf.cast(x, tf.float64)[0]], op=hvd.Sum),
            hvd.allgather(rows),
            *hvd.grouped_allgather([tf.constant([rank]), tf.constant([[rank, rank]])]),
            hvd.broadcast(x, 1),
            received,
            counts,
            hvd.alltoall(tf.range(2) + 10 * rank),
            hvd.reducescatter(tf.range(3) + rank, op=hvd.Sum),
            *hvd.grouped_reducescatter([tf.ones(2), tf.range(4)], op=hvd.Sum),
            tf.convert_to_tensor(slices),
            tf.stack([hvd.size_op(), hvd.rank_op(), hvd.local_rank_op(), hvd.process_set_included_op()]),
        ]

    rows = tf.fill([rank, 2], float(rank))
    unknown = tf.function(calls, input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None, 2])])
    actual = calls(x, rows), tf.function(calls)(x, rows), unknown(x, rows)
    objects = hvd.broadcast_object({"epoch": rank}, 1), hvd.allgather_object("ab" * rank)
    return [[tf.cast(result, tf.float32).numpy().tolist() for result in results] for results in actual], objects


def test_calls_return_what_horovod_defines_in_eager_mode_and_in_graphs(ranks: Ranks) -> None:
    for rank, (result, objects) in enumerate(on_ranks(ranks, both_modes)):
        expected = [[1.5, 2.5], [6, 10], [2, 3], [1.5, 2.5], [-1], [3, 5], [3, 5], 3, [[1, 1]]]
        expected += [[0, 1], [[0, 0], [1, 1]], [2, 3]]
        expected += [[[0, 10], [1, 2, 11, 12]][rank], [rank + 1] * 2, [rank, 10 + rank]]
        expected += [[[1, 3], [5]][rank], [2], [4 * rank, 4 * rank + 2], [[0.5, 1], [1, 1.5]], [2, rank, rank, 1]]
        assert result == [expected] * 3
        assert objects == ({"epoch": 1}, ["", "ab"])


def derivatives(hvd: Any) -> Any:
    import tensorflow as tf

    rank = hvd.rank()

    def derivative(call: Callable[[Any], Any], rows: int) -> Any:
        x = tf.ones([rows])
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(call(x) * (1.0 + rank))
        return tape.gradient(loss, x)

    calls: list[tuple[Callable[[Any], Any], int]] = [
        (lambda x: hvd.allreduce(x, op=hvd.Sum), 2),
        (hvd.allreduce, 2),
        (hvd.allgather, rank + 1),
        (lambda x: hvd.broadcast(x, 1), 1),
        (lambda x: hvd.alltoall(x, splits=[1, 1])[0], 2),
        (lambda x: hvd.reducescatter(x, op=hvd.Sum), 2),
    ]
    return [
        [(tf.function(derivative) if traced else derivative)(call, rows).numpy().tolist() for call, rows in calls]
        for traced in (False, True)
    ]


def test_gradients_flow_as_horovod_defines(ranks: Ranks) -> None:
    for rank, result in enumerate(on_ranks(ranks, derivatives)):
        expected = [[3.0, 3.0], [1.5, 1.5], [1.5] * (rank + 1), [1.5 * rank], [1.0, 2.0], [2.0, 4.0]]
        assert result == [expected] * 2


def other_orders(hvd: Any) -> Any:
    """Start two calls at once, in another order on each rank, and use a name of the two twice."""
    import tensorflow as tf

    results: dict[str, float] = {}

    def call(name: str, value: float) -> None:
        results[name] = float(hvd.allreduce(tf.constant(value), name=name))

    names = ["a", "b"] if hvd.rank() == 0 else ["b", "a"]
    first = threading.Thread(target=call, args=(names[0], 1.0))
    first.start()
    while f"allreduce.{names[0]}" not in job.running().calls._in_use and first.is_alive():
        pass
    twice = error_of(lambda: hvd.allreduce(tf.constant(1.0), name=names[0]))
    call(names[1], 2.0)
    first.join(DEADLINE_S)
    return results, twice


def test_ranks_may_call_in_different_orders_and_a_name_in_use_is_an_error(ranks: Ranks) -> None:
    actual = on_ranks(ranks, other_orders)
    for results, (kind, text) in actual:
        assert results == {"a": 1.5, "b": 1.5}
        assert kind == "DuplicateNameError"
        assert "is in use" in text


def wrong_calls(hvd: Any) -> Any:
    import tensorflow as tf

    x = tf.ones([3, 2])
    mine = hvd.ProcessSet([hvd.rank()])

    @tf.function  # type: ignore[untyped-decorator]
    def traced(x: Any) -> Any:
        return hvd.allreduce(x, name="traced")

    result = {
        "shape": error_of(lambda: hvd.allreduce(tf.ones(2 + hvd.rank()), name="x")),
        "shape in a graph": error_of(lambda: traced(tf.ones(2 + hvd.rank()))),
        "root": error_of(lambda: hvd.broadcast(x, 2)),
        "op": error_of(lambda: hvd.allreduce(x, op=9)),
        "op of slices": error_of(lambda: hvd.allreduce(tf.IndexedSlices(x, [0, 1, 2]), op=hvd.Max)),
        "both ops": error_of(lambda: hvd.allreduce(x, average=True, op=hvd.Sum)),
        "text": error_of(lambda: hvd.allreduce(tf.constant("a"))),
        "scalar": error_of(lambda: hvd.allgather(tf.constant(1.0))),
        "rows": error_of(lambda: hvd.alltoall(x)),
        "splits": error_of(lambda: hvd.alltoall(x, splits=[1, 1])),
        "name": error_of(lambda: hvd.allreduce(x, name=3)),
        "set": error_of(lambda: hvd.allreduce(x, process_set=mine)),
        "groups": error_of(lambda: hvd.DistributedGradientTape(tf.GradientTape(), groups=0)),
        "predivide": error_of(
            lambda: hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0)
        ),
        "optimizer": error_of(lambda: hvd.DistributedOptimizer("adam")),
        "session": error_of(lambda: hvd.elastic.TensorFlowState([tf.Variable(1.0)], session=1)),
        "global variables": error_of(lambda: hvd.broadcast_global_variables(0)),
    }
    return result, float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="x"))


def test_wrong_calls_are_errors_and_later_calls_work(ranks: Ranks) -> None:
    for result, later in on_ranks(ranks, wrong_calls):
        assert result["shape"][0] == "NameMismatchError"
        assert "float32[3]" in result["shape"][1]
        assert result["shape in a graph"][0] == "UnknownError"
        assert "NameMismatchError: 'allreduce.traced' is" in result["shape in a graph"][1]
        assert "root_rank must be one of the ranks [0, 1], not 2" in result["root"][1]
        assert "op must be hvd.Average" in result["op"][1]
        assert "not through max" in result["op of slices"][1]
        assert "not both" in result["both ops"][1]
        assert "takes tensors of numbers" in result["text"][1]
        assert "not a scalar" in result["scalar"][1]
        assert "3 rows cannot be cut into 2 equal parts" in result["rows"][1]
        assert "splits must be 2 numbers of rows whose sum is 3" in result["splits"][1]
        assert "name must be a string" in result["name"][1]
        assert "is not registered" in result["set"][1]
        assert "groups must be a positive number" in result["groups"][1]
        assert "is for op=Average" in result["predivide"][1]
        assert "must be an optimizer of Keras" in result["optimizer"][1]
        assert "eager mode" in result["session"][1]
        assert result["global variables"][0] == "RuntimeError"
        assert later == 2.0


def before_init(_: un.Communicator) -> Any:
    import tensorflow as tf

    import unisono.compat.horovod.tensorflow as hvd

    x = tf.ones(1)
    calls = (hvd.rank, lambda: hvd.allreduce(x), lambda: tf.function(hvd.allreduce)(x))
    return [error_of(call)[1] for call in calls], "torch" in sys.modules


def test_calls_before_init_say_so_and_torch_is_not_imported(ranks: Ranks) -> None:
    for texts, imports_torch in ranks.run_calls(before_init):
        assert all("use hvd.init()" in text for text in texts)
        assert not imports_torch


# --- training ---------------------------------------------------------------------------------------------------------


def samples() -> tuple[Any, Any]:
    random = np.random.default_rng(5)
    return random.standard_normal((8, 3)).astype("float32"), random.standard_normal((8, 1)).astype("float32")


def trained(hvd: Any, alone: bool, options: dict[str, Any]) -> Any:
    """Train by eager steps, each with a tape of its own, and then by a function; return the weights."""
    import tensorflow as tf

    start, count = (0, 1) if alone else (hvd.rank(), hvd.size())
    x, y = (part[start::count] for part in samples())
    table = tf.Variable(tf.ones([4, 3]) * (start + 1.0))
    weights = tf.Variable([[1.0], [2.0], [3.0]])
    unused = tf.Variable([1.0])
    variables = [table, weights, unused]
    ids = np.arange(8)[start::count] % 4
    if not alone:
        hvd.broadcast_variables(variables, root_rank=0)
    if "compression" in options:
        options = {**options, "compression": getattr(hvd.Compression, options["compression"])}

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(((tf.gather(table, ids) * x) @ weights - y) ** 2)
        if not alone:
            tape = hvd.DistributedGradientTape(tape, **options)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                variable.scatter_sub(tf.IndexedSlices(0.05 * gradient.values, gradient.indices))
            elif gradient is not None:
                variable.assign_sub(0.05 * gradient)

    for _ in range(STEPS):
        step()
    traced = tf.function(step)
    for _ in range(STEPS):
        traced()
    return [*table.numpy().flatten().tolist(), *weights.numpy().flatten().tolist()]


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-5),
        ({"sparse_as_dense": True, "gradient_predivide_factor": 4.0, "groups": 2}, 1e-5),
        ({"compression": "fp16", "sparse_as_dense": True}, 1e-2),
    ],
)
def test_tape_trains_as_one_process_on_all_samples(ranks: Ranks, options: dict[str, Any], tolerance: float) -> None:
    alone = on_ranks(ranks, trained, True, {})[0]
    for result in on_ranks(ranks, trained, False, options):
        assert result == pytest.approx(alone, rel=tolerance)


def special_tapes(hvd: Any) -> Any:
    """Return gradients with a local variable, on a process set of one rank, and by Adasum."""
    import tensorflow as tf

    rank = hvd.rank()
    shared, own = tf.Variable([1.0, 1.0]), tf.Variable([1.0])

    def gradients(**options: Any) -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            loss = tf.reduce_sum(shared * tf.one_hot(rank, 2)) + tf.reduce_sum(own) * (rank + 1.0)
        return tape, loss

    tape, loss = gradients()
    tape.register_local_source(own)
    local = [gradient.numpy().tolist() for gradient in tape.gradient(loss, [shared, own])]
    first = hvd.add_process_set([0])
    tape, loss = gradients(process_set=first)
    alone = tape.gradient(loss, [shared, own])[1].numpy().tolist()
    refused = error_of(lambda: hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum, process_set=first))[1]
    hvd.remove_process_set(first)
    tape, loss = gradients(op=hvd.Adasum)
    return local, alone, refused, tape.gradient(loss, {"x": shared})["x"].numpy().tolist()


def test_tapes_leave_local_variables_and_other_ranks_alone(ranks: Ranks) -> None:
    for rank, (local, alone, refused, adasum) in enumerate(on_ranks(ranks, special_tapes)):
        assert local == [[0.5, 0.5], [(rank + 1) / 2]]
        assert alone == [rank + 1.0]
        assert "op=Adasum is for all ranks" in refused
        assert adasum == [1.0, 1.0]


def step_of_keras(hvd: Any) -> Any:
    import keras
    import tensorflow as tf

    import unisono.compat.horovod.tensorflow.keras as of_keras
    import unisono.tensorflow as ut

    weights = []
    world = job.running().world
    of_horovod = hvd.DistributedOptimizer, of_keras.DistributedOptimizer
    for distribute in (*of_horovod, lambda sgd: ut.DistributedOptimizer(sgd, world)):
        weight = tf.Variable([5.0])
        optimizer = distribute(keras.optimizers.SGD(1.0))
        optimizer.apply([tf.constant([1.0 + hvd.rank()])], [weight])
        weights.append(float(weight[0]))
    return weights


def test_optimizers_of_keras_apply_averages(ranks: Ranks) -> None:
    assert on_ranks(ranks, step_of_keras) == [[3.5] * 3] * 2


def train_unevenly(hvd: Any) -> Any:
    """Make as many steps as the rank, and join."""
    import tensorflow as tf

    weight = tf.Variable(0.0)

    @tf.function  # type: ignore[untyped-decorator]
    def gradient() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = 3.0 * weight
        return tape.gradient(loss, weight)

    values = [float(gradient())]
    values += [float(gradient()) for _ in range(hvd.rank())]
    return values, hvd.join()


def test_ranks_that_have_joined_answer_with_zeros(ranks: Ranks) -> None:
    assert on_ranks(ranks, train_unevenly) == [([3.0], 1), ([3.0, 1.5], 1)]


def in_a_session(hvd: Any) -> Any:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        x = v1.get_variable("x", initializer=tf.constant([1.0, 2.0]) * (hvd.rank() + 1))
        factor = v1.placeholder(tf.float32, ())
        optimizer = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(1.0, 0.5))
        train = optimizer.minimize(tf.reduce_sum(x * factor), global_step=v1.train.get_or_create_global_step())
        total = hvd.allreduce(x, op=hvd.Sum)
        at_end = v1.train.FinalOpsHook(total)
        hooks = [hvd.BroadcastGlobalVariablesHook(1), v1.train.StopAtStepHook(2), at_end]
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            while not session.should_stop():
                session.run(train, {factor: 1.0 + hvd.rank()})
        passes = error_of(lambda: hvd.DistributedOptimizer(v1.train.AdamOptimizer(), backward_passes_per_step=2))
    return at_end.final_ops_values.tolist(), passes[0]


def test_monitored_session_broadcasts_and_averages(ranks: Ranks) -> None:
    # The average of the gradients 1 and 2, applied by momentum: 1.5, then 0.5 * 1.5 + 1.5.
    assert on_ranks(ranks, in_a_session) == [([-3.5, 0.5], "ArgumentError")] * 2


def survive(hvd: Any) -> Any:
    """Use a state of elastic training without a change of the ranks, and an error in a graph."""
    import tensorflow as tf

    weight = tf.Variable(1.0 + hvd.rank())
    state = hvd.elastic.TensorFlowState([weight], batch=hvd.rank())
    state.sync()
    synchronized = float(weight), state.batch
    state.batch = 7
    state.commit()
    weight.assign(9.0)
    state.batch = 8
    state.restore()
    traced = tf.function(lambda x: hvd.allreduce(x, name="x"))
    of_program = error_of(lambda: hvd.elastic.run(lambda _: traced(tf.ones(1 + hvd.rank())))(state))
    return synchronized, (float(weight), state.batch), of_program[0]


def test_states_return_to_the_last_commit(ranks: Ranks) -> None:
    assert on_ranks(ranks, survive) == [((1.0, 0), (1.0, 7), "NameMismatchError")] * 2


def normalise(hvd: Any) -> Any:
    import tensorflow as tf

    x, _ = samples()
    layer = hvd.SyncBatchNormalization()
    result = layer(tf.constant(x[hvd.rank() :: 2]), training=True).numpy()
    return result, layer.moving_mean.numpy()


def test_sync_batch_normalization_is_that_of_the_whole_batch(ranks: Ranks) -> None:
    x, _ = samples()
    expected = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3)
    for rank, (result, moving_mean) in enumerate(on_ranks(ranks, normalise)):
        np.testing.assert_allclose(result, expected[rank::2], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(moving_mean, 0.01 * x.mean(0), rtol=1e-3)
