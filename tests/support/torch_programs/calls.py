"""Compares calls with Gloo (`parity`), then makes calls that Gloo lacks or defines otherwise. Prints faults."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d
from support.torch_programs import parity
from support.torch_programs.meeting import meet
from torch.distributed.device_mesh import init_device_mesh

import unisono as un

warnings.simplefilter("ignore", FutureWarning)
RANK, SIZE = 0, 1


def expect(name: str, result: Any, expected: Any) -> None:
    if isinstance(result, torch.Tensor):
        equal = result.dtype == expected.dtype and torch.equal(result, expected)
    else:
        equal = result == expected
    if not equal:
        print(f"{name}: {result} instead of {expected}")


def reductions() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = torch.full((5,), 1.0 + RANK).to(dtype)
        dist.all_reduce(tensor)
        expect(f"sum of {dtype}", tensor.float(), torch.full((5,), SIZE * (SIZE + 1) / 2))
    tensor = torch.full((3,), float(RANK))
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    expect("average", tensor, torch.full((3,), (SIZE - 1) / 2))
    for op, expected in ((dist.ReduceOp.SUM, [True, True, False]), (dist.ReduceOp.PRODUCT, [True, False, False])):
        tensor = torch.tensor([True, RANK == 0, False])
        dist.all_reduce(tensor, op)
        expect(f"{op} of booleans", tensor, torch.tensor(expected))
    tensor = torch.ones(3)
    premul_sum = dist.ReduceOp.PREMUL_SUM if callable(dist.ReduceOp.PREMUL_SUM) else dist._make_nccl_premul_sum
    dist.all_reduce(tensor, premul_sum(float(RANK + 1)))
    expect("sum of products", tensor, torch.full((3,), SIZE * (SIZE + 1) / 2))
    whole = torch.arange(24.0).reshape(4, 6)
    dist.all_reduce(whole[:, ::2])
    scale = torch.ones(4, 6)
    scale[:, ::2] = SIZE
    expect("a strided tensor", whole, torch.arange(24.0).reshape(4, 6) * scale)
    parts = [torch.ones(place + 1) for place in range(SIZE)]
    out = torch.zeros(RANK + 1)
    dist.reduce_scatter(out, parts)
    expect("uneven reduce_scatter", out, torch.full((RANK + 1,), float(SIZE)))
    image = torch.full((2, 3, 4, 4), float(RANK)).to(memory_format=torch.channels_last)
    dist.all_reduce(image)
    expect("channels last", image, torch.full((2, 3, 4, 4), SIZE * (SIZE - 1) / 2))


def moves() -> None:
    outs = [torch.zeros(place + 1) for place in range(SIZE)]
    dist.all_gather(outs, torch.full((RANK + 1,), float(RANK)))
    for place, out in enumerate(outs):
        expect("uneven all_gather", out, torch.full((place + 1,), float(place)))
    outs = [torch.zeros(place + RANK + 1) for place in range(SIZE)]
    dist.all_to_all(outs, [torch.full((place + RANK + 1,), float(RANK)) for place in range(SIZE)])
    for place, out in enumerate(outs):
        expect("uneven all_to_all", out, torch.full((place + RANK + 1,), float(place)))
    stacked = torch.zeros(SIZE, 2, 3)
    dist.all_gather_into_tensor(stacked, torch.full((2, 3), float(RANK)))
    expect("stacked all_gather", stacked[:, 0, 0], torch.arange(float(SIZE)))
    tensor = torch.full((SIZE, 2), float(RANK))
    dist.all_to_all_single(tensor, tensor)
    expect("all_to_all_single in place", tensor[:, 0], torch.arange(float(SIZE)))
    for dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.uint16, torch.complex32):
        moved = torch.full((3,), RANK, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
        dist.broadcast(moved, 1)
        expect(f"broadcast of {dtype}", moved.view(torch.uint8), torch.ones(3 * dtype.itemsize, dtype=torch.uint8))
    mine = torch.full((2,), float(RANK)).conj() if RANK else torch.full((2,), 0.0)
    dist.broadcast(mine, 1)
    expect("broadcast", mine, torch.ones(2))


def together() -> None:
    tensors = [torch.ones(2), torch.ones(3) * 2]
    with c10d._coalescing_manager() as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    with c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.broadcast(tensor, 0)
    manager.wait()
    expect("coalesced", tensors[1], torch.full((3,), 2.0 * SIZE))
    outs, x = [torch.zeros(2), torch.zeros(1)], [torch.ones(2 * SIZE), torch.ones(SIZE)]
    with c10d._coalescing_manager():
        for out, tensor in zip(outs, x, strict=True):
            dist.reduce_scatter_tensor(out, tensor)
    expect("coalesced reduce_scatter", outs[0], torch.full((2,), float(SIZE)))


def functions() -> None:
    group = list(range(SIZE))
    total = functional.all_reduce(torch.ones(3), "sum", group).wait()
    expect("functional all_reduce", total, torch.full((3,), float(SIZE)))
    whole = functional.all_gather_tensor(torch.full((2,), float(RANK)), 0, group).wait()
    expect("functional all_gather", whole[::2], torch.arange(float(SIZE)))
    part = functional.reduce_scatter_tensor(torch.ones(SIZE * 2), "avg", 0, group).wait()
    expect("functional reduce_scatter", part, torch.ones(2))
    several = functional.all_reduce_coalesced([torch.ones(2), torch.ones(1)], "sum", group)
    expect("functional all_reduce_coalesced", several[0] + several[1], torch.full((2,), 2.0 * SIZE))
    swapped = functional.all_to_all_single(torch.full((SIZE,), float(RANK)), None, None, group).wait()
    expect("functional all_to_all", swapped, torch.arange(float(SIZE)))
    expect("functional broadcast", functional.broadcast(torch.full((1,), float(RANK)), 1, group) + 0, torch.ones(1))


def unusual_tensors() -> None:
    goes_on = functional.all_reduce(torch.ones(3), "sum", list(range(SIZE)))
    outs = list(torch.zeros(SIZE, 3))
    dist.all_gather(outs, goes_on)
    expect("the result of a functional collective", outs[1], torch.full((3,), float(SIZE)))
    with torch.inference_mode():
        strided = torch.ones(4, 6)[:, ::2]
        work = dist.all_reduce(strided, async_op=True)
    expect("inference mode, another thread", work.get_future().wait()[0], torch.full((4, 3), float(SIZE)))


def questions() -> None:
    """Call the methods by which torch queries the backend of a group, and pass options to a mesh."""
    c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))  # inductor does, where it has compiled before
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    expect("estimates", backend.supports_time_estimate, False)
    expect("memory", [backend.supports_tensor_alloc(torch.device(device)) for device in ("cpu", "cuda")], [True, False])
    tensor = backend.allocate_tensor(1 << 16, dtype=torch.bfloat16, device=torch.device("cpu"))
    tensor.fill_(1)
    dist.all_reduce(tensor)
    expect("a sum in that memory", tensor, torch.full((1 << 16,), SIZE, dtype=torch.bfloat16))
    group = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    dist.barrier()
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    expect("sequence number", group._get_sequence_number_for_group() - before, 2)
    if "backend_override" in signature(init_device_mesh).parameters:
        options = un.torch.Options(reproducible=True, timeout=timedelta(seconds=50))
        mesh = init_device_mesh(
            "cpu", (SIZE,), mesh_dim_names=("ranks",), backend_override={"ranks": ("unisono", options)}
        )
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=mesh.get_group())
        expect("a mesh with options", tensor, torch.full((2,), float(SIZE)))


def groups() -> None:
    pairs = [dist.new_group([0, other]) for other in range(1, SIZE)]
    mine = [dist.new_group([rank]) for rank in range(SIZE)][RANK]
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=mine)
    expect("a group of one", tensor, torch.ones(2))
    sums: dict[int, Any] = {}

    def many(other: int) -> None:
        tensor = torch.ones(4)
        for _ in range(50):
            dist.all_reduce(tensor, dist.ReduceOp.AVG, group=pairs[other - 1])
        sums[other] = tensor

    threads = [threading.Thread(target=many, args=(other,)) for other in range(1, SIZE) if RANK in (0, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for other, total in sums.items():
        expect(f"threads with {other}", total, torch.ones(4))
    exact = un.torch.Options(reproducible=True, accumulate="float32", algorithm="ring", transports="tcp")
    careful = dist.new_group(list(range(SIZE)), pg_options=un.torch.Options(reproducible=True, transports="tcp"))
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        tensor = torch.ones(3, dtype=dtype)
        dist.all_reduce(tensor, group=careful)
        expect(f"by options, {dtype}", tensor, torch.full((3,), SIZE, dtype=dtype))
    expect("transport", {traffic.transport for traffic in un.torch.communicator(careful).stats().values()}, {"tcp"})
    expect("accumulate", dict(exact.rounding()[torch.float16]), {"reproducible": True, "accumulate": "float32"})
    un.torch.monitored_barrier(careful)
    dist.destroy_process_group(careful)


def barriers() -> None:
    un.torch.monitored_barrier(timeout=timedelta(seconds=30))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        un.torch.monitored_barrier(dist.new_group([0]))
    expect("warned that it is not in the group", len(warned), int(RANK != 0))
    if RANK == 0:
        try:
            un.torch.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
        except RuntimeError as error:
            named = all(str(rank) in str(error) for rank in range(1, SIZE))
            expect("who did not come", named and " Timed out " in str(error), True)
        else:
            print("a barrier ended that no other rank has called")
    dist.barrier()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    expect("after a barrier that failed", tensor, torch.full((2,), float(SIZE)))


def counters() -> None:
    world = un.torch.communicator()
    before = sum(traffic.sent_nbytes for traffic in world.stats().values())
    dist.all_reduce(torch.ones(1 << 16))
    sent = sum(traffic.sent_nbytes for traffic in world.stats().values()) - before
    expect("bytes of an all_reduce", sent >= (1 << 18) * (SIZE - 1) // SIZE, True)
    before = sum(traffic.sent_nbytes for traffic in world.stats().values())
    dist.reduce_scatter_tensor(torch.zeros(1 << 16), torch.ones(SIZE << 16))
    sent = sum(traffic.sent_nbytes for traffic in world.stats().values()) - before
    expect("bytes of a reduce_scatter", sent <= (1 << 18) * (SIZE - 1) * 1.01, True)
    expect("backend", (dist.get_backend(), world.size), ("unisono", SIZE))
    with torch.profiler.profile() as profiled:
        dist.all_reduce(torch.ones(4))
    expect("profiled", any(event.key == "unisono:allreduce" for event in profiled.key_averages()), True)


def main() -> None:
    global RANK, SIZE
    RANK, SIZE = meet()
    parity.compare(RANK, SIZE)
    parts: list[Callable[[], None]] = [
        reductions,
        moves,
        together,
        functions,
        unusual_tensors,
        questions,
        groups,
        barriers,
        counters,
    ]
    for part in parts:
        part()
    dist.destroy_process_group()
    meet(file="again")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    expect("a second time", tensor, torch.full((1,), float(SIZE)))
    dist.destroy_process_group()
    print("all calls were made")


if __name__ == "__main__":
    main()
