"""Trains with sharded models and optimizers on two ranks, and on one rank with the same batches; compares losses."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support.torch_programs.meeting import meet
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import unisono as un

warnings.simplefilter("ignore")

STEPS = 3
torch.manual_seed(0)
BATCHES = [(torch.randn(8, 20), torch.randint(0, 4, (8,))) for _ in range(STEPS)]
MODEL = torch.nn.Sequential(torch.nn.Linear(20, 65), torch.nn.ReLU(), torch.nn.Linear(65, 4))


def losses_of(
    model: Any, share: Callable[[Any], Any], optimizer: Any = None, most: float = float("inf")
) -> list[float]:
    """Train, and return the loss of each step, as a mean over the ranks. `most` limits the norm of the gradients."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for x, y in BATCHES:
        loss = torch.nn.functional.cross_entropy(model(share(x)), share(y))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(float(total))
    return losses


def check(name: str, values: list[float], expected: list[float], tolerance: float = 1e-5) -> None:
    worst = max(abs(one - other) for one, other in zip(values, expected, strict=True))
    print(f"{name}: {'equal' if worst <= tolerance else f'{values}, alone {expected}'}")


def everything(batch: Any) -> Any:
    return batch


def main() -> None:
    rank, size = meet()
    alone = losses_of(copy.deepcopy(MODEL), everything)

    def share(batch: Any) -> Any:
        return batch.chunk(size)[rank]

    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ranks",))
    shard_with_fsdp2(share, mesh, alone)
    whole = FullyShardedDataParallel(copy.deepcopy(MODEL), device_id=torch.device("cpu"))
    check("FSDP1", losses_of(whole, share), alone)
    replica = DistributedDataParallel(copy.deepcopy(MODEL))
    zero = ZeroRedundancyOptimizer(replica.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    check("ZeroRedundancyOptimizer", losses_of(replica, share, zero), alone)
    even = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    expected = losses_of(copy.deepcopy(even), everything)
    parallel = parallelize_module(even, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    check("tensor parallel", losses_of(parallel, everything), expected)
    compute_with_dtensors(mesh, rank, size)
    compile_calls(size)
    dist.destroy_process_group()


def shard_with_fsdp2(share: Callable[[Any], Any], mesh: Any, alone: list[float]) -> None:
    sharded = copy.deepcopy(MODEL)
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    check("FSDP2", losses_of(sharded, share), alone)
    state = get_model_state_dict(sharded)
    place = os.path.join(os.getcwd(), "checkpoint")
    checkpoint.save(state, checkpoint_id=place)
    saved = {name: tensor.full_tensor().clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.to_local().zero_()
    checkpoint.load(state, checkpoint_id=place)
    same = all(torch.equal(tensor.full_tensor(), saved[name]) for name, tensor in state.items())
    print(f"checkpoint: {'equal' if same else 'another state'}")
    if hasattr(FSDPModule, "set_custom_all_gather"):
        check("FSDP2 in mapped memory", losses_of(in_mapped_memory(mesh), share), alone)
        whole, mapped = copy.deepcopy(MODEL), in_mapped_memory(mesh)
        sgd, other = (torch.optim.SGD(model.parameters(), lr=0.5) for model in (whole, mapped))
        clipped = losses_of(whole, everything, sgd, 0.1)
        check("FSDP2 in mapped memory, clipped", losses_of(mapped, share, other, 0.1), clipped)
    mixed = copy.deepcopy(MODEL)
    fully_shard(mixed, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    check("FSDP2 in bfloat16", losses_of(mixed, share), alone, 0.05)


def in_mapped_memory(mesh: Any) -> Any:
    model = copy.deepcopy(MODEL)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
        layer.set_custom_all_gather(un.torch.AllGather())
        layer.set_custom_reduce_scatter(un.torch.ReduceScatter())
    return model


def compute_with_dtensors(mesh: Any, rank: int, size: int) -> None:
    whole = torch.arange(30.0).reshape(5, 6)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    product = (rows @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate()])).full_tensor()
    columns = rows.redistribute(mesh, [Shard(1)])
    same = torch.equal(product, whole @ whole.t()) and torch.equal(columns.full_tensor(), whole)
    partial = DTensor.from_local(torch.full((2,), float(rank)), mesh, [dist.tensor.Partial()])
    same = same and torch.equal(partial.full_tensor(), torch.full((2,), size * (size - 1) / 2))
    print(f"DTensor: {'equal' if same else 'another result'}")


def compile_calls(size: int) -> None:
    group = list(range(size))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: Any) -> Any:
        y = functional.all_reduce(x * 2, "sum", group)
        dist.all_reduce(x)
        return x + y

    same = torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0 * size))
    compiled_model = torch.compile(DistributedDataParallel(torch.nn.BatchNorm1d(4)), backend="aot_eager")
    compiled_model(torch.ones(2, 4)).sum().backward()  # torch broadcasts its buffers between two compiled parts
    print(f"torch.compile: {'equal' if same else 'another result'}")


if __name__ == "__main__":
    main()
