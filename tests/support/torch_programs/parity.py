"""Makes the same calls on a group of Gloo and on a group of Unisono, and compares the results."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

warnings.simplefilter("ignore", FutureWarning)

REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64)
# The words of Gloo's errors for dtypes and calls that an older version of it does not have.
REFUSALS_OF_GLOO = ("Invalid scalar type", "Backend gloo does not support")
Call = Callable[[Any], list[Any]]
RANK, SIZE = 0, 1


def data(*shape: int, dtype: Any = torch.float32, rank: int | None = None) -> Any:
    """Return small whole numbers that depend on the rank. Their sums are exact in any order."""
    own = RANK if rank is None else rank
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) % 5 + own
    return numbers.to(dtype)


def reductions() -> Iterator[tuple[str, Call]]:
    operations = [getattr(dist.ReduceOp, name) for name in ("SUM", "PRODUCT", "MIN", "MAX")]
    for dtype, op in itertools.product(REAL, operations):
        yield f"all_reduce {dtype} {op}", lambda group, d=dtype, o=op: in_place(data(2, 3, dtype=d), group, o)
    for dtype, name in itertools.product((torch.int32, torch.uint8, torch.bool), ("BAND", "BOR", "BXOR")):
        op = getattr(dist.ReduceOp, name)
        yield f"all_reduce {dtype} {op}", lambda group, d=dtype, o=op: in_place(data(7, dtype=d), group, o)
    yield "all_reduce bool", lambda group: in_place(data(7) > 2, group, dist.ReduceOp.MAX)
    yield "all_reduce complex", lambda group: in_place(data(3, dtype=torch.complex64), group, dist.ReduceOp.SUM)
    yield "all_reduce empty", lambda group: in_place(torch.empty(0, 3), group, dist.ReduceOp.SUM)
    yield "all_reduce scalar", lambda group: in_place(torch.tensor(float(RANK)), group, dist.ReduceOp.SUM)
    yield "all_reduce transposed", lambda group: in_place(data(4, 6).t(), group, dist.ReduceOp.SUM)
    yield "all_reduce leaf", lambda group: in_place(data(3).requires_grad_(), group, dist.ReduceOp.SUM)
    yield "all_reduce sparse", sparse
    yield "all_reduce sparse async", sparse_later
    yield "all_reduce async", later
    for root in range(SIZE):
        yield f"reduce to {root}", lambda group, r=root: at_root(r, group)
    yield "all_reduce_coalesced", coalesced
    yield "reduce_scatter", reduce_scatter
    yield "reduce_scatter_tensor", reduce_scatter_tensor


def in_place(tensor: Any, group: Any, op: Any) -> list[Any]:
    dist.all_reduce(tensor, op, group=group)
    return [tensor]


def sparse(group: Any) -> list[Any]:
    indices = torch.tensor([[0, RANK], [1, 2]])
    values = torch.tensor([1.0, 2.0 + RANK])
    tensor = torch.sparse_coo_tensor(indices, values, (SIZE, 3), check_invariants=False)
    dist.all_reduce(tensor, group=group)
    return [tensor.to_dense()]


def sparse_later(group: Any) -> list[Any]:
    rows = torch.tensor([[RANK, 1], [2, 1], [0, RANK]])
    tensors = [
        torch.sparse_coo_tensor(rows, data(2, 4, dtype=dtype), (SIZE, 3, SIZE, 4), check_invariants=False)
        for dtype in (torch.float64, torch.float32)
    ]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    dist.barrier(group)
    for work in works:
        work.wait()
    return [tensor.to_dense() for tensor in tensors]


def later(group: Any) -> list[Any]:
    tensors = [data(5), data(6)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works]
    for work in works:
        work.wait()
    doubled = futures[1].then(lambda future: future.value()[0] * 2)
    return [*tensors, futures[0].wait()[0], doubled.wait()]


def at_root(root: int, group: Any) -> list[Any]:
    tensor = data(4)
    dist.reduce(tensor, root, group=group)
    return [tensor] if root == RANK else []


def coalesced(group: Any) -> list[Any]:
    tensors = [data(3), data(2, 2)]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


def reduce_scatter(group: Any) -> list[Any]:
    out = torch.zeros(3)
    dist.reduce_scatter(out, [data(3) * (place + 1) for place in range(SIZE)], group=group)
    return [out]


def reduce_scatter_tensor(group: Any) -> list[Any]:
    out = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(out, data(2 * SIZE, 3), group=group)
    return [out]


def moves() -> Iterator[tuple[str, Call]]:
    for dtype in (*REAL, torch.bool, torch.complex64):
        yield f"broadcast {dtype}", lambda group, d=dtype: broadcast(data(2, 3, dtype=d), group)
        yield f"all_gather {dtype}", lambda group, d=dtype: all_gather(data(3, dtype=d), group)
    yield "broadcast strided", lambda group: broadcast(data(4, 3).t(), group)
    yield "all_gather strided", lambda group: all_gather(data(4, 3)[:, 1], group)
    yield "all_gather empty", lambda group: all_gather(torch.empty(0), group)
    yield "all_gather_into_tensor", all_gather_into_tensor
    yield "all_gather_coalesced", all_gather_coalesced
    yield "gather", gather
    yield "scatter", scatter
    yield "all_to_all_single", all_to_all_single
    yield "all_to_all_single with splits", with_splits
    yield "all_to_all", all_to_all
    yield "messages", messages
    yield "any source", any_source
    yield "objects", objects
    yield "barrier", lambda group: [dist.barrier(group=group)]


def broadcast(tensor: Any, group: Any) -> list[Any]:
    dist.broadcast(tensor, SIZE - 1, group=group)
    return [tensor]


def all_gather(tensor: Any, group: Any) -> list[Any]:
    outs = [torch.zeros(tensor.shape, dtype=tensor.dtype) for _ in range(SIZE)]
    dist.all_gather(outs, tensor, group=group)
    return outs


def all_gather_into_tensor(group: Any) -> list[Any]:
    out = torch.zeros(2 * SIZE, 3)
    dist.all_gather_into_tensor(out, data(2, 3), group=group)
    whole = torch.zeros(SIZE, 3)
    whole[RANK] = data(3)
    dist.all_gather_into_tensor(whole, whole[RANK : RANK + 1], group=group)
    views = list(torch.zeros(SIZE, 3))
    dist.all_gather(views, data(3), group=group)
    return [out, whole, *views]


def all_gather_coalesced(group: Any) -> list[Any]:
    outs = [[torch.zeros(2), torch.zeros(3)] for _ in range(SIZE)]
    dist.all_gather_coalesced(outs, [data(2), data(3)], group=group)
    return [tensor for of_rank in outs for tensor in of_rank]


def gather(group: Any) -> list[Any]:
    outs = [torch.zeros(3) for _ in range(SIZE)] if RANK == 1 else None
    dist.gather(data(3), outs, dst=1, group=group)
    return outs or []


def scatter(group: Any) -> list[Any]:
    out = torch.zeros(3)
    dist.scatter(out, [data(3) * place for place in range(SIZE)] if RANK == 1 else None, src=1, group=group)
    return [out]


def all_to_all_single(group: Any) -> list[Any]:
    out = torch.zeros(2 * SIZE, 2)
    dist.all_to_all_single(out, data(2 * SIZE, 2), group=group)
    return [out]


def with_splits(group: Any) -> list[Any]:
    sent = [place + RANK for place in range(SIZE)]
    received = [place + RANK for place in range(SIZE)]
    out = torch.zeros(sum(received), 2)
    dist.all_to_all_single(out, data(sum(sent), 2), received, sent, group=group)
    return [out]


def all_to_all(group: Any) -> list[Any]:
    outs = [torch.zeros(2) for _ in range(SIZE)]
    dist.all_to_all(outs, [data(2) * place for place in range(SIZE)], group=group)
    return outs


def messages(group: Any) -> list[Any]:
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    received, tensor = torch.zeros(3), torch.ones(2)
    receiving = dist.irecv(received, before, group=group, tag=3)
    dist.all_reduce(tensor, group=group)  # a collective runs while a receive is pending
    dist.isend(data(3), after, group=group, tag=3).wait()
    receiving.wait()
    outs = [torch.zeros(2), torch.zeros(2)]
    calls = [dist.P2POp(dist.isend, data(2) * k, after, group, tag=k) for k in (1, 2)]
    calls += [dist.P2POp(dist.irecv, outs[k - 1], before, group, tag=k) for k in (1, 2)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return [received, tensor, *outs]


def any_source(group: Any) -> list[Any]:
    if RANK:
        dist.send(data(2), 0, group=group, tag=9)
        return []
    results = {}
    for _ in range(SIZE - 1):
        out = torch.zeros(2)
        results[dist.recv(out, group=group, tag=9)] = out
    return [sorted(results), *(results[rank] for rank in sorted(results))]


def objects(group: Any) -> list[Any]:
    gathered: list[Any] = [None] * SIZE
    dist.all_gather_object(gathered, {"rank": RANK}, group=group)
    listed = [RANK, "text"]
    dist.broadcast_object_list(listed, 1, group=group)
    return [gathered, listed]


def short_forms() -> Iterator[tuple[str, Call]]:
    """Yield calls of the methods of a group, with fields of the options in place of the options."""
    limit, largest, last = timedelta(seconds=60), dist.ReduceOp.MAX, SIZE - 1

    def form(call: Callable[[Any, Any, list[Any], Any], Any]) -> Call:
        def called(group: Any) -> list[Any]:
            tensor, out = data(SIZE), torch.zeros(SIZE)
            parts = [torch.zeros(SIZE) for _ in range(SIZE)]
            call(group, tensor, parts, out).wait()
            return [tensor, *parts, out]

        return called

    forms: dict[str, Callable[[Any, Any, list[Any], Any], Any]] = {
        "allreduce op": lambda g, x, parts, out: g.allreduce([x], largest),
        "allreduce names": lambda g, x, parts, out: g.allreduce(x, op=largest, timeout=limit),
        "allreduce": lambda g, x, parts, out: g.allreduce([x]),
        "allreduce opts": lambda g, x, parts, out: g.allreduce([x], opts=dist.AllreduceOptions()),
        "broadcast": lambda g, x, parts, out: g.broadcast(x, last),
        "broadcast names": lambda g, x, parts, out: g.broadcast(x, root=last, timeout=limit),
        "allgather": lambda g, x, parts, out: g.allgather(parts, x, limit),
        "gather": lambda g, x, parts, out: g.gather(parts if last == RANK else [], x, last, limit),
        "scatter": lambda g, x, parts, out: g.scatter(
            out, [data(SIZE, rank=peer) for peer in range(SIZE)] if last == RANK else [], last
        ),
        "reduce_scatter": lambda g, x, parts, out: g.reduce_scatter(out, [x * (k + 1) for k in range(SIZE)], largest),
        "alltoall_base": lambda g, x, parts, out: g.alltoall_base(out, x, [], [], timeout=limit),
        "barrier": lambda g, x, parts, out: g.barrier(timeout=limit),
        "barrier place": lambda g, x, parts, out: g.barrier(limit),
    }
    for name, call in forms.items():
        yield f"short form of {name}", form(call)
    yield "short form of reduce", reduced_at_last


def reduced_at_last(group: Any) -> list[Any]:
    tensor = data(3)
    group.reduce(tensor, SIZE - 1, dist.ReduceOp.MAX).wait()
    return [tensor] if SIZE - 1 == RANK else []


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def compare(rank: int, size: int) -> None:
    """Print the calls whose results differ."""
    global RANK, SIZE
    RANK, SIZE = rank, size
    ranks = list(range(SIZE))
    gloo, unisono = dist.new_group(ranks, backend="gloo"), dist.new_group(ranks, backend="unisono")
    for name, call in [*reductions(), *moves(), *short_forms()]:
        try:
            expected = call(gloo)
        except RuntimeError as error:
            if not any(refusal in str(error) for refusal in REFUSALS_OF_GLOO):
                raise
            expected = call(unisono)
        results = call(unisono)
        if len(expected) != len(results) or not all(map(same, expected, results)):
            print(f"{name}: Gloo {expected}, Unisono {results}")
    dist.destroy_process_group(gloo)
    dist.destroy_process_group(unisono)
