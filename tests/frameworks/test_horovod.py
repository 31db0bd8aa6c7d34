"""`unisono.compat.horovod.torch` on real ranks: what each call returns, matching by name, and each wrong use."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.launchers.launch import Pool

torch = pytest.importorskip("torch", reason="make torch installs what these tests need")
pytest.importorskip("torch._dynamo")  # optimizers import it; so the ranks, which are forked, need not

from unisono.compat.horovod import elastic, job  # noqa: E402
from unisono.compat.horovod.entries import as_internal  # noqa: E402
from unisono.compat.horovod.errors import (  # noqa: E402
    ArgumentError,
    DuplicateNameError,
    HorovodInternalError,
    NameMismatchError,
    ShutDownError,
    StalledError,
)

RANKS = 3
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "horovod_torch.py"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(RANKS, on_output=lambda *_: None) as ranks:
        yield ranks


def on_ranks(pool: Pool, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the results of ``fn(hvd, …)`` on all ranks, between `init` and `shutdown`."""
    return pool.run(initialized, fn, *arguments, timeout_s=DEADLINE_S)


def initialized(world: un.Communicator, fn: Callable[..., Any], *arguments: Any) -> Any:
    import unisono.compat.horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init(comm=world)
    try:
        return fn(hvd, *arguments)
    finally:
        hvd.shutdown()


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the class and the text of the error that a call raises."""
    try:
        result = call()
    except Exception as error:  # noqa: BLE001  (the test compares its class)
        return type(error).__name__, str(error)
    raise AssertionError(f"no error, but {result}")


# --- what calls return ------------------------------------------------------------------------------------------------


def all_places(hvd: Any) -> Any:
    sizes = hvd.size(), hvd.local_size(), hvd.cross_size()
    built = hvd.gloo_built(), hvd.mpi_built(), hvd.nccl_built(), hvd.is_homogeneous(), hvd.is_initialized()
    return (hvd.rank(), hvd.local_rank(), hvd.cross_rank()), sizes, built


def test_ranks_know_their_places(pool: Pool) -> None:
    for rank, (own, sizes, built) in enumerate(on_ranks(pool, all_places)):
        assert own == (rank, rank, 0)
        assert sizes == (RANKS, RANKS, 1)
        assert built == (True, False, 0, True, True)


def reductions(hvd: Any) -> Any:
    x = torch.arange(4.0) + hvd.rank()
    results = [hvd.allreduce(x), hvd.allreduce(x, average=False)]
    results += [hvd.allreduce(x, op=op) for op in (hvd.Min, hvd.Max, hvd.Product)]
    results += [hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)]
    results += hvd.grouped_allreduce([x, x.double()[:2]], op=hvd.Sum)
    in_place = x.clone()
    assert hvd.allreduce_(in_place) is in_place
    strided = torch.stack([x, x], 1)[:, 0]
    hvd.allreduce_(strided, op=hvd.Sum)
    whole = hvd.allreduce(torch.full((2,), hvd.rank() - 2))
    half = hvd.allreduce(torch.full((2,), 1.0 + hvd.rank(), dtype=torch.bfloat16), op=hvd.Sum)
    wire = hvd.allreduce(x, compression=hvd.Compression.fp16)
    assert wire.dtype == torch.float32
    return [array.tolist() for array in (*results, in_place, strided, whole, half, wire)]


@pytest.mark.clients
def test_reductions_return_what_horovod_defines(pool: Pool) -> None:
    mean, total = [1.0, 2.0, 3.0, 4.0], [3.0, 6.0, 9.0, 12.0]
    expected = [mean, total, [0, 1, 2, 3], [2, 3, 4, 5], [0, 6, 24, 60], [6, 12, 18, 24]]
    expected += [total, total[:2], mean, total, [-1, -1], [6, 6], mean]
    assert on_ranks(pool, reductions) == [expected] * RANKS


def moves(hvd: Any) -> Any:
    rank, size = hvd.rank(), hvd.size()
    gathered = hvd.allgather(torch.full((rank, 2), float(rank)))
    pair = hvd.grouped_allgather([torch.tensor([rank]), torch.tensor([[rank, rank]])])
    copied = hvd.broadcast(torch.tensor([rank, 7 * rank]), 2)
    own = torch.tensor([float(rank)])
    assert hvd.broadcast_(own, 1) is own
    equal = hvd.alltoall(torch.arange(size) + 10 * rank)
    rows, counts = hvd.alltoall(
        torch.arange(rank + 1) + 10 * rank, splits=[0] * rank + [rank + 1] + [0] * (size - rank - 1)
    )
    scattered = hvd.reducescatter(torch.arange(4.0) + rank, op=hvd.Sum)
    shares = hvd.grouped_reducescatter([torch.ones(3), torch.arange(6).reshape(3, 2)], op=hvd.Sum)
    mixed = [gathered, *pair, copied, own, equal, rows, counts, scattered, *shares]
    return [array.tolist() for array in mixed], counts.dtype == torch.int32


def test_rows_move_as_horovod_defines(pool: Pool) -> None:
    for rank, (moved, counts_are_int32) in enumerate(on_ranks(pool, moves)):
        assert counts_are_int32
        assert moved[:3] == [[[1, 1], [2, 2], [2, 2]], [0, 1, 2], [[0, 0], [1, 1], [2, 2]]]
        assert moved[3:6] == [[2, 14], [1], [rank, 10 + rank, 20 + rank]]
        assert moved[6:8] == [
            list(range(10 * rank, 11 * rank + 1)),
            [rank + 1 if r == rank else 0 for r in range(RANKS)],
        ]
        assert moved[8:] == [[[3, 6], [9], [12]][rank], [3], [[6 * rank, 6 * rank + 3]]]


def objects(hvd: Any) -> Any:
    return hvd.broadcast_object({"epoch": 7} if hvd.rank() == 1 else None, 1), hvd.allgather_object("ab" * hvd.rank())


def test_objects_travel(pool: Pool) -> None:
    assert on_ranks(pool, objects) == [({"epoch": 7}, ["", "ab", "abab"])] * RANKS


def backwards(hvd: Any) -> Any:
    rank = hvd.rank()

    def gradient(call: Callable[[Any], Any], *shape: int) -> Any:
        x = torch.ones(shape, requires_grad=True)
        result = call(x)
        (result * (1.0 + rank)).sum().backward()
        return x.grad.tolist()

    return [
        gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), 2),
        gradient(hvd.allreduce, 2),
        gradient(hvd.allgather, rank + 1),
        gradient(lambda x: hvd.broadcast(x, 1), 2),
        gradient(hvd.alltoall, 3),
        gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), 3),
    ]


@pytest.mark.clients
def test_gradients_flow_as_horovod_defines(pool: Pool) -> None:
    for rank, gradients in enumerate(on_ranks(pool, backwards)):
        assert gradients[:4] == [[6, 6], [2, 2], [2] * (rank + 1), [2, 2] if rank == 1 else [0, 0]]
        assert gradients[4:] == [[1, 2, 3], [3, 6, 9]]


# --- names ------------------------------------------------------------------------------------------------------------


def other_orders(hvd: Any) -> Any:
    """Start named calls in another order on each rank."""
    names = [f"layer {number}" for number in range(40)]
    names = names[hvd.rank() * 7 :] + names[: hvd.rank() * 7]
    handles = {name: hvd.allreduce_async(torch.tensor([float(name[6:])]), name=name, op=hvd.Sum) for name in names}
    handles["rows"] = hvd.allgather_async(torch.tensor([hvd.rank()]), name="layer 0")
    results = {name: hvd.synchronize(handle).tolist() for name, handle in handles.items()}
    return results, [hvd.poll(handle) for handle in handles.values()], hvd.synchronize(handles["rows"])


def test_ranks_may_start_calls_in_different_orders(pool: Pool) -> None:
    for results, polls, again in on_ranks(pool, other_orders):
        assert results == {**{f"layer {n}": [3.0 * n] for n in range(40)}, "rows": [0, 1, 2]}
        assert all(polls)
        assert again is None


def mismatches(hvd: Any) -> Any:
    odd = hvd.rank() == 1
    calls = [
        lambda: hvd.allreduce(torch.ones(3 + odd), name="shape"),
        lambda: hvd.allreduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32), name="dtype"),
        lambda: hvd.allreduce(torch.ones(3), op=hvd.Sum if odd else hvd.Min, name="op"),
        lambda: hvd.broadcast(torch.ones(3), hvd.rank(), name="root"),
        lambda: hvd.allgather(torch.ones(2, 3 + odd), name="row"),
    ]
    return [error_of(call) for call in calls], hvd.allreduce(torch.ones(1), name="shape").tolist()


def test_different_arrays_under_one_name_are_an_error_on_all_ranks_and_later_calls_work(pool: Pool) -> None:
    of_ranks = on_ranks(pool, mismatches)
    errors, later = of_ranks[0]
    assert all(result == of_ranks[0] for result in of_ranks)
    assert {kind for kind, _ in errors} == {NameMismatchError.__name__}
    assert "'allreduce.shape' is float32[4], op avg, on cpu on rank 1, and float32[3]" in errors[0][1]
    assert later == [1.0]


def one_name_twice(hvd: Any) -> Any:
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="a")
        error = error_of(lambda: hvd.allreduce_async(torch.ones(2), name="a"))
        hvd.barrier()
    else:
        error = None
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(2), name="a")
    return error, hvd.synchronize(handle).tolist()


def test_a_name_that_is_in_use_is_an_error_there(pool: Pool) -> None:
    (error, result), *others = on_ranks(pool, one_name_twice)
    assert error[0] == DuplicateNameError.__name__
    assert "'a' is in use" in error[1]
    assert [result, *(other for _, other in others)] == [[1.0, 1.0]] * RANKS


def stall(hvd: Any) -> Any:
    """Use a name on ranks 0 and 2 until it is an error, then on rank 1, and then on all."""
    calls, world = job.running().calls, job.running().world
    if hvd.rank() == 1:
        while not calls._refused:
            time.sleep(0.01)
        error = error_of(lambda: hvd.allreduce(torch.ones(2), name="lonely"))
    else:
        handle = hvd.allreduce_async(torch.ones(2), name="lonely")
        if calls._coordinator is not None:
            while len(calls._coordinator._asked["allreduce.lonely"].requests) < 2:
                time.sleep(0.01)
            calls._settings = calls._settings._replace(stall_s=0.01)
        error = error_of(lambda: hvd.synchronize(handle))
        calls._settings = calls._settings._replace(stall_s=DEADLINE_S)
    world.barrier()
    return error, hvd.allreduce(torch.ones(1), name="lonely").tolist()


def test_a_name_that_a_rank_never_uses_is_an_error_on_all_ranks(pool: Pool) -> None:
    for error, later in on_ranks(pool, stall):
        assert error[0] == StalledError.__name__
        assert "'allreduce.lonely' was called by ranks 0, 2 0.01 s ago, and not by rank 1" in error[1]
        assert later == [1.0]


def leave_early(hvd: Any) -> Any:
    if hvd.rank() == 2:
        return None
    return error_of(lambda: hvd.allreduce(torch.ones(2), name="late"))


def test_a_rank_that_has_shut_down_is_named(pool: Pool) -> None:
    *errors, _ = on_ranks(pool, leave_early)
    for kind, text in errors:
        assert kind == ShutDownError.__name__
        assert "rank 2 has shut down" in text


def lose_a_rank(world: un.Communicator, folder: str) -> None:
    import unisono.compat.horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init(comm=world)
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())

    def make_step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1)).sum().backward()
        optimizer.step()

    make_step()
    hvd.allreduce(torch.ones(1))
    if hvd.rank() == 1:
        os._exit(9)
    try:
        # rank 0 waits in a named call, and rank 2 in the gradient engine
        hvd.allreduce(torch.ones(1)) if hvd.rank() == 0 else make_step()
    except HorovodInternalError as error:
        Path(folder, f"{hvd.rank()}").write_text(f"{type(error.__cause__).__name__}: {error}")


def test_a_lost_rank_is_an_internal_error_whose_cause_names_it(tmp_path: Path) -> None:
    with pytest.raises(un.PeerLostError, match="rank 1 exited with code 9"):
        un.launch(lose_a_rank, 3, str(tmp_path), timeout_s=DEADLINE_S, on_output=lambda *_: None)
    for rank in (0, 2):
        assert (tmp_path / str(rank)).read_text().startswith("PeerLostError: PeerLostError: rank 1 died")


def test_a_rank_that_is_lost_during_a_commit_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def grow() -> None:
        raise un.PeerLostError("rank 1 died")

    running = SimpleNamespace(world=SimpleNamespace(grow=grow), calls=SimpleNamespace(explain=as_internal))
    monkeypatch.setattr(job, "_job", running)
    with pytest.raises(HorovodInternalError, match="PeerLostError: rank 1 died"):
        elastic.ObjectState(epoch=1).commit()


def gradients_that_are_kept(hvd: Any) -> list[list[float]]:
    """Return the gradients of three steps without `zero_grad`, by averages and by sums. Rank r passes r + 1."""
    every: list[list[float]] = []
    for op in (hvd.Average, hvd.Sum):
        layer = torch.nn.Linear(1, 1, bias=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 0.1), op=op)
        every.append([])
        for _ in range(3):
            layer(torch.tensor([[hvd.rank() + 1.0]])).sum().backward()
            optimizer.step()
            every[-1].append(layer.weight.grad.item())
    return every


def test_gradients_that_are_kept_count_once_in_averages_and_for_each_rank_in_sums(pool: Pool) -> None:
    for averages, sums in on_ranks(pool, gradients_that_are_kept):
        assert averages == [2.0, 4.0, 6.0]
        assert sums == [6.0, RANKS * 6.0 + 6, RANKS * 24.0 + 6]


# --- wrong arguments --------------------------------------------------------------------------------------------------


def test_calls_before_init_say_so() -> None:
    import unisono.compat.horovod.torch as hvd

    model = torch.nn.Linear(1, 1)
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.local_size, hvd.join, hvd.barrier, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match=r"use hvd\.init"):
            call()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ValueError, match=r"use hvd\.init"):
        optimizer.step()
    hvd.shutdown()


def refuse_one_of_a_batch(hvd: Any) -> Any:
    tensors = torch.ones(2, dtype=torch.bool), torch.ones(2)
    handles = [hvd.allreduce_async(x, name=f"{x.dtype}", op=hvd.Sum) for x in tensors]
    return error_of(lambda: hvd.synchronize(handles[0])), hvd.synchronize(handles[1]).tolist()


def test_a_call_that_cannot_be_made_fails_alone(pool: Pool) -> None:
    for (kind, text), other in on_ranks(pool, refuse_one_of_a_batch):
        assert kind == HorovodInternalError.__name__
        assert "op 'sum' is not defined for bool" in text
        assert other == [3.0, 3.0]


def wrong_arguments(hvd: Any) -> Any:
    x, sparse = torch.ones(4), torch.eye(2).to_sparse()
    calls = {
        "op": lambda: hvd.allreduce(x, op=77),
        "average": lambda: hvd.allreduce(x, average=True, op=hvd.Sum),
        "name": lambda: hvd.allreduce(x, name=3),
        "array": lambda: hvd.allreduce([1.0]),
        "device": lambda: hvd.allreduce(x.to("meta")),
        "sparse": lambda: hvd.allreduce(sparse),
        "root": lambda: hvd.broadcast(x, 9),
        "scalar": lambda: hvd.allgather(torch.tensor(1.0)),
        "splits": lambda: hvd.alltoall(x, splits=[1, 1, 1]),
        "rows": lambda: hvd.alltoall(x),
        "group": lambda: hvd.grouped_allreduce([]),
        "adasum": lambda: hvd.allreduce(x, op=hvd.Adasum),
        "scatter": lambda: hvd.reducescatter(x, op=hvd.Max),
        "state": lambda: hvd.broadcast_parameters(x, 0),
        "set": lambda: hvd.allreduce(x, process_set=hvd.ProcessSet([0, 1])),
    }
    return {name: error_of(call) for name, call in calls.items()}, hvd.allreduce(x, op=hvd.Sum).tolist()


def test_wrong_arguments_are_errors_before_anything_is_sent(pool: Pool) -> None:
    for errors, later in on_ranks(pool, wrong_arguments):
        assert {kind for kind, _ in errors.values()} == {ArgumentError.__name__, un.UsageError.__name__}
        assert later == [3.0] * 4


# --- process sets -----------------------------------------------------------------------------------------------------


def overlapping_sets(hvd: Any) -> Any:
    low, high = hvd.add_process_set([1, 0]), hvd.ProcessSet([1, 2])
    assert hvd.add_process_set(high) is high
    rank = hvd.rank()
    handles = {}
    for name, ranks in ("low", low), ("high", high):
        if ranks.included():
            handles[name] = hvd.allreduce_async(torch.tensor([1.0 + rank]), name="x", op=hvd.Sum, process_set=ranks)
    results = {name: hvd.synchronize(handle).item() for name, handle in handles.items()}
    if high.included():
        assert hvd.broadcast(torch.tensor([rank]), 2, process_set=high).item() == 2
    twice = error_of(lambda: hvd.add_process_set([2, 1]))
    outside = error_of(lambda: hvd.add_process_set([2, 3]))
    foreign = error_of(lambda: hvd.allreduce(torch.ones(1), process_set=low)) if rank == 2 else None
    facts = low.process_set_id, low.size(), high.rank() if high.included() else None
    hvd.barrier()
    removed = hvd.remove_process_set(low), hvd.remove_process_set(low), hvd.remove_process_set(hvd.global_process_set)
    return results, facts, twice, outside, foreign, removed, hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item()


def test_process_sets_may_overlap(pool: Pool) -> None:
    by_rank = on_ranks(pool, overlapping_sets)
    assert [losses_of_rank[0] for losses_of_rank in by_rank] == [{"low": 3.0}, {"low": 3.0, "high": 5.0}, {"high": 5.0}]
    for rank, (_, facts, twice, outside, foreign, removed, total) in enumerate(by_rank):
        assert facts == (1, 2, [None, 0, 1][rank])
        assert "already a process set" in twice[1]
        assert "from 0 to 2" in outside[1]
        assert (foreign is None) == (rank != 2)
        assert removed == (True, False, False)
        assert total == RANKS
    assert "rank 2 is not in" in by_rank[2][4][1]


# --- training ---------------------------------------------------------------------------------------------------------

SAMPLES, STEPS = 12, 4


def problem() -> Any:
    torch.manual_seed(3)
    inputs = torch.randn(SAMPLES, 5)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, inputs, inputs.sum(1, keepdim=True)


def weights_alone(steps: int = STEPS) -> Any:
    model, inputs, targets = problem()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(hvd: Any, options: dict[str, Any], passes: int = 1, clips: bool = False) -> Any:
    model, inputs, targets = problem()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1 + hvd.rank(), momentum=0.9)
    names = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(optimizer, names, backward_passes_per_step=passes, **options)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert isinstance(optimizer, torch.optim.SGD)
    part = slice(hvd.rank(), None, hvd.size())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(passes):
            (torch.nn.functional.mse_loss(model(inputs[part]), targets[part]) / passes).backward()
        if clips:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


class Halves:
    """A compressor of a user."""

    @staticmethod
    def compress(tensor: Any) -> Any:
        return tensor / 2, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor * 2


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, {}),
        ({"gradient_predivide_factor": 4.0}, {"passes": 3}),
        ({"groups": 2, "compression": Halves}, {"clips": True}),
    ],
    ids=["plain", "passes", "clipped"],
)
def test_ranks_reach_the_weights_of_one_process(pool: Pool, options: dict[str, Any], more: dict[str, Any]) -> None:
    for weights in on_ranks(pool, train, options, *({"passes": 1, "clips": False} | more).values()):
        torch.testing.assert_close(weights, weights_alone(), rtol=1e-4, atol=1e-5)


def test_gradients_in_float16_come_close(pool: Pool) -> None:
    from unisono.compat.horovod.torch import Compression

    first, *others = on_ranks(pool, train, {"compression": Compression.fp16})
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first, weights_alone(), rtol=0.05, atol=0.02)


def train_example(_: Any) -> Any:
    return example().train()


def example() -> Any:
    spec = importlib.util.spec_from_file_location("horovod_torch", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_has_the_losses_of_one_process(pool: Pool) -> None:
    torch.set_num_threads(1)
    alone = example().train_alone()
    assert alone[-1] < 0.3 * alone[0]
    for losses in on_ranks(pool, train_example):
        assert losses == pytest.approx(alone, rel=1e-3)


def train_unevenly(hvd: Any) -> Any:
    """Train with more batches on higher ranks; the others join."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    weights = []
    for _ in range(hvd.rank()):
        optimizer.zero_grad()
        (3.0 * model.weight).sum().backward()
        optimizer.step()
        weights.append(model.weight.item())
    extra = hvd.allreduce(torch.tensor([3.0]), name="extra").item() if hvd.rank() == 2 else None
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    return weights, extra, last, model.weight.item()


def test_ranks_that_have_joined_answer_with_zeros(pool: Pool) -> None:
    none, one, two = on_ranks(pool, train_unevenly)
    assert none == ([], None, 2, -2.0)
    assert one == ([-1.0], None, 2, -2.0)
    assert two == ([-1.0, -2.0], 1.0, 2, -2.0)


def train_one_that_others_know(hvd: Any) -> Any:
    """Train with an optimizer that has a scheduler, a `zero_grad` and hooks before it is distributed."""
    model, inputs, targets = problem()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 2, 0.5)
    called, plain_zero_grad = [], sgd.zero_grad
    sgd.zero_grad = lambda: (called.append("zero_grad"), plain_zero_grad())[1]  # as apex does
    sgd.register_step_pre_hook(lambda *_: called.append("step"))
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    later = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    part = slice(hvd.rank(), None, hvd.size())
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[part]), targets[part]).backward()
        optimizer.step()
        scheduler.step()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    rates = sgd.param_groups[0]["lr"], optimizer.param_groups[0]["lr"], later.get_last_lr()[0]
    optimizer.state = {}
    refusals = [error_of(call) for call in (lambda: copy.deepcopy(optimizer), lambda: pickle.dumps(optimizer))]
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return weights, rates, called, sgd.state is optimizer.state, refusals


def weights_with_a_scheduler() -> Any:
    model, inputs, targets = problem()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 2, 0.5)
    for _ in range(STEPS):
        sgd.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        sgd.step()
        scheduler.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_an_optimizer_that_has_a_scheduler_and_methods_of_its_own_can_be_distributed(pool: Pool) -> None:
    for weights, rates, called, is_shared, refusals in on_ranks(pool, train_one_that_others_know):
        torch.testing.assert_close(weights, weights_with_a_scheduler(), rtol=1e-4, atol=1e-5)
        assert rates[:2] == (0.025, 0.025)
        assert called == ["zero_grad", "step"] * STEPS
        assert is_shared
        for kind, text in refusals:
            assert kind == "UsageError"
            assert "DistributedOptimizer cannot be copied or pickled" in text


def optimizers_of_a_set_and_of_all(hvd: Any) -> Any:
    low = hvd.add_process_set([0, 1])
    weights = []
    for ranks in (low, hvd.global_process_set):
        layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(layer.weight)
        if ranks.included():
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 1.0), process_set=ranks)
            (layer.weight * hvd.rank()).sum().backward()
            optimizer.step()
        weights.append(layer.weight.item())
    hvd.barrier()
    return weights


def test_optimizers_of_a_process_set_do_not_change_the_numbers_of_others(pool: Pool) -> None:
    assert on_ranks(pool, optimizers_of_a_set_and_of_all) == [[-0.5, -1.0], [-0.5, -1.0], [0.0, -1.0]]


def limit_of_names(hvd: Any) -> Any:
    return job.running().calls._settings.stall_s, job.running().world.timeout_s


def test_a_name_is_an_error_after_the_time_limit_of_the_communicator() -> None:
    assert un.launch(initialized, 1, limit_of_names, env={"UNISONO_TIMEOUT_S": "77"}) == [(77.0, 77.0)]


def misuse_of_optimizers(hvd: Any) -> Any:
    model, inputs, _ = problem()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    pairs = list(model.named_parameters())
    wrong = {
        "no pairs": lambda: hvd.DistributedOptimizer(sgd, [parameter for _, parameter in pairs]),
        "some": lambda: hvd.DistributedOptimizer(sgd, pairs[:1]),
        "same name": lambda: hvd.DistributedOptimizer(sgd, [("x", parameter) for _, parameter in pairs]),
        "passes": lambda: hvd.DistributedOptimizer(sgd, pairs, backward_passes_per_step=0),
        "op": lambda: hvd.DistributedOptimizer(sgd, pairs, op=hvd.Max),
        "predivide": lambda: hvd.DistributedOptimizer(sgd, pairs, op=hvd.Sum, gradient_predivide_factor=2.0),
        "groups": lambda: hvd.DistributedOptimizer(sgd, pairs, groups=[[pairs[0][1]], [pairs[0][1]]]),
    }
    errors = {name: error_of(call)[0] for name, call in wrong.items()}
    unnamed = hvd.DistributedOptimizer(sgd)
    loss = model(inputs).sum()
    loss.backward(retain_graph=True)
    errors["zero_grad"], errors["backward"] = error_of(unnamed.zero_grad)[0], error_of(loss.backward)[0]
    changed = error_of(unnamed.synchronize)[1]
    unnamed.zero_grad()
    model(inputs).sum().backward()
    pairs[0][1].grad = pairs[0][1].grad.clone()
    replaced = error_of(unnamed.synchronize)[1]
    unnamed.zero_grad()
    model(inputs).sum().backward()
    unnamed.step()
    return errors, changed, replaced


def test_misuse_of_optimizers_is_an_error(pool: Pool) -> None:
    for errors, changed, replaced in on_ranks(pool, misuse_of_optimizers):
        assert errors.pop("zero_grad") == errors.pop("backward") == "AssertionError"
        assert set(errors.values()) <= {"ArgumentError", "UsageError"}
        assert len(errors) == 7
        assert "was changed while it was being averaged" in changed
        assert "was replaced while it was being averaged" in replaced


def sparse_gradients(hvd: Any) -> Any:
    tables = []
    for as_dense in (False, True):
        table = torch.nn.Embedding(4, 2, sparse=True)
        torch.nn.init.zeros_(table.weight)
        optimizer = torch.optim.SGD(table.parameters(), 1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, table.named_parameters(), sparse_as_dense=as_dense)
        table(torch.tensor([hvd.rank()])).sum().backward()
        optimizer.step()
        assert table.weight.grad.is_sparse
        tables.append(table.weight.detach())
    return tables


def test_sparse_gradients_are_averaged(pool: Pool) -> None:
    expected = torch.tensor([[-1 / 3] * 2] * 3 + [[0.0] * 2])
    for gathered, dense in on_ranks(pool, sparse_gradients):
        torch.testing.assert_close(gathered, expected)
        torch.testing.assert_close(dense, expected)


def sparse_tensors(hvd: Any) -> Any:
    """Sum sparse tensors under names that each rank uses in another order; rank 2 has no elements."""
    rank = hvd.rank()
    places = torch.tensor([[rank, rank, 3], [0, 0, 1]])[:, : 3 * (rank < 2)]  # the first place occurs twice
    matrix = torch.sparse_coo_tensor(places, torch.ones(places.shape[1]), (4, 2))
    rows = torch.sparse_coo_tensor([[rank, 3]], torch.full((2, 2), 1 + rank), (4, 2))
    calls = {"matrix": (matrix, hvd.Average), "rows": (rows, hvd.Sum)}
    waits = {
        name: hvd.sparse_allreduce_async(*[calls[name][0], name, calls[name][1]])
        for name in sorted(calls)[:: -1 if rank else 1]
    }
    results = [hvd.synchronize(waits[name]) for name in sorted(waits)]
    other = hvd.sparse_allreduce_async(torch.sparse_coo_tensor(size=(2, 4) if rank else (4, 2)), "other", hvd.Sum)
    return [each.to_dense().tolist() for each in results], results[0]._nnz(), results[1].dtype, error_of(other)


def test_sparse_tensors_are_added_up_in_any_order_of_names(pool: Pool) -> None:
    third = 1 / 3
    for (matrix, rows), places, dtype, (kind, text) in on_ranks(pool, sparse_tensors):
        torch.testing.assert_close(matrix, [[2 * third, 0.0], [2 * third, 0.0], [0.0, 0.0], [0.0, 2 * third]])
        assert (rows, places, dtype) == ([[1, 1], [2, 2], [3, 3], [6, 6]], 3, torch.int64)
        assert (kind, "use one name for one array" in text) == (NameMismatchError.__name__, True)


def sparse_gradient_of_rank_0(hvd: Any) -> Any:
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), 1.0), table.named_parameters())
    if hvd.rank() == 0:
        table(torch.tensor([0])).sum().backward()
    return error_of(optimizer.step)


def test_a_gradient_that_is_sparse_on_some_ranks_alone_is_an_error_on_all(pool: Pool) -> None:
    for _, text in on_ranks(pool, sparse_gradient_of_rank_0):
        assert "other ranks have float32[1, 1, 1]" in text


def normalise(hvd: Any) -> Any:
    torch.manual_seed(5)
    x = torch.randn(6, 2, 4)
    rows = [slice(0, 1), slice(1, 3), slice(3, 6)][hvd.rank()]
    own, layer = x[rows].clone().requires_grad_(), hvd.SyncBatchNorm(2)
    result = layer(own)
    result.square().mul(x[rows]).sum().backward()
    alone, reference = x.clone().requires_grad_(), torch.nn.BatchNorm1d(2)
    expected = reference(alone)
    expected.square().mul(x).sum().backward()
    weight = hvd.allreduce(layer.weight.grad, op=hvd.Sum)
    pairs = [(result, expected[rows]), (own.grad, alone.grad[rows]), (weight, reference.weight.grad)]
    pairs += [(layer.running_mean, reference.running_mean), (layer.running_var, reference.running_var)]
    layer.eval(), reference.eval()
    pairs.append((layer(own), reference(alone)[rows]))
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return True


def test_sync_batch_norm_is_that_of_the_whole_batch(pool: Pool) -> None:
    assert on_ranks(pool, normalise) == [True] * RANKS


def adapt(world: un.Communicator) -> Any:
    if world.rank == 2:
        return None
    with world.subgroup([0, 1]) as pair:
        return initialized(pair, adasums)


def adasums(hvd: Any) -> Any:
    rank = hvd.rank()
    orthogonal = hvd.allreduce(torch.eye(2)[rank], op=hvd.Adasum)
    equal = hvd.allreduce(torch.ones(3), op=hvd.Adasum)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.5), op=hvd.Adasum)
    model(torch.ones(1)).sum().backward()
    optimizer.step()
    return orthogonal.tolist(), equal.tolist(), model.weight.item()


def test_adasum_adds_orthogonal_gradients_and_averages_equal_ones(pool: Pool) -> None:
    assert pool.run(adapt, timeout_s=DEADLINE_S)[:2] == [([1.0, 1.0], [1.0, 1.0, 1.0], -0.5)] * 2


def survive(hvd: Any) -> Any:
    """Use the states of elastic training without a change of the ranks."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0 + hvd.rank())
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=hvd.rank(), seen=[hvd.rank()])
    calls: list[int] = []
    state.register_reset_callbacks([lambda: calls.append(hvd.size())])
    state.sync()
    synchronized = state.batch, list(state.seen), model.weight.item(), list(sampler)
    state.batch = 7
    sampler.record_batch(0, 2)
    state.commit()
    state.batch, state.seen[0] = 8, 9
    torch.nn.init.zeros_(model.weight)
    sampler.set_epoch(3)
    state.restore()
    state.on_reset()
    restored = state.batch, list(state.seen), model.weight.item(), list(sampler), sampler.epoch
    of_program = error_of(lambda: hvd.elastic.run(lambda _: hvd.allreduce(torch.ones(1 + hvd.rank()), name="x"))(state))
    return synchronized, restored, calls, of_program[0]


def test_states_return_to_the_last_commit(pool: Pool) -> None:
    for rank, (synchronized, restored, calls, of_program) in enumerate(on_ranks(pool, survive)):
        assert synchronized == (0, [0], 1.0, [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]][rank])
        assert restored == (7, [0], 1.0, [[6, 9], [7, 6], [8, 7]][rank], 0)
        assert calls == [RANKS]
        assert of_program == "NameMismatchError"


def fork_and_exit(hvd: Any) -> Any:
    child = os.fork()
    if child == 0:
        hvd.shutdown()  # as the handler at exit does
        os._exit(0 if hvd.is_initialized() is False else 1)
    return os.waitpid(child, 0)[1], hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def test_a_forked_child_does_not_end_the_job(pool: Pool) -> None:
    assert on_ranks(pool, fork_and_exit) == [(0, float(RANKS))] * RANKS


def write_timeline(hvd: Any, path: str) -> None:
    hvd.start_timeline(path)
    hvd.allreduce(torch.ones(2), name="x")
    assert error_of(lambda: hvd.start_timeline(path))[0] == "UsageError"
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(2), name="y")


def test_timeline_has_the_spans_of_a_call(pool: Pool, tmp_path: Path) -> None:
    on_ranks(pool, write_timeline, str(tmp_path / "timeline.json"))
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert [event.get("name", event["ph"]) for event in events] == ["NEGOTIATE_ALLREDUCE", "E", "ALLREDUCE", "E"]
    assert {event["tid"] for event in events} == {"allreduce.x"}
