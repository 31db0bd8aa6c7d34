"""Calls the backend of torch.distributed with tensors that claim to be on a GPU. The GPU is a double."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from meeting import meet

import unisono as un
from unisono.foundation.deadlines import Deadline
from unisono.frameworks.torch.process_groups.backend import BASE
from unisono.testing.device_double import GpuDouble
from unisono.transports.cuda import devices
from unisono.transports.cuda.executors.staging import await_event


class GpuTensor(torch.Tensor):
    """A tensor in the memory of the double."""

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    device = property(lambda self: torch.device("cuda", 0))

    def new_empty(self, *shape: Any, **_: Any) -> Any:
        return on_gpu(torch.empty(*shape, dtype=self.dtype))


def on_gpu(values: Any) -> Any:
    """Return a copy of a tensor in the double's memory. The copy takes no stream, and its memory is never freed."""
    nbytes = max(1, values.numel() * values.element_size())
    memory = GPU.view(GPU.memory(nbytes).pointer, nbytes)
    flat = torch.from_numpy(memory)[: values.numel() * values.element_size()].view(values.dtype)
    flat.copy_(values.reshape(-1))
    return flat.view(values.shape).as_subclass(GpuTensor)


def values_of(tensor: Any) -> Any:
    """Wait for the current stream, and so for the ranks on which it waits; return the elements of a tensor."""
    device = GPU.device()
    event = device.new_event()
    device.record(event, current.cuda_stream)
    await_event(device, event, Deadline(60))
    device.end_event(event)
    return tensor.as_subclass(torch.Tensor).tolist()


def check_calls(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = on_gpu(torch.arange(6).to(dtype) + rank)
        dist.all_reduce(x)
        assert values_of(x) == [2 * i + 1 for i in range(6)], values_of(x)
    work = dist.all_reduce(x := on_gpu(torch.ones(5)), op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    assert values_of(x) == [1.0] * 5
    whole, share = on_gpu(torch.zeros(2 * size)), on_gpu(torch.full((2,), float(rank)))
    dist.all_gather_into_tensor(whole, share)
    assert values_of(whole) == [0.0, 0.0, 1.0, 1.0]
    dist.reduce_scatter_tensor(share, whole)
    assert values_of(share) == [2.0 * rank] * 2
    check_of_group(dist.group.WORLD, rank, size, share)
    check_future()
    check_ddp_hook(rank)
    check_reducer(rank)
    check_fsdp(rank, size)
    stats = un.torch.communicator().stats()
    assert sum(traffic.sent_nbytes for traffic in stats.on_device.by_ipc.values()) > 0


class HostFuture(torch.futures.Future):  # type: ignore[type-arg]
    """A future that takes devices without CUDA."""

    all_devices: ClassVar[list[list[Any]]] = []

    def __init__(self, *, devices: list[Any]) -> None:
        super().__init__()
        self.all_devices.append(devices)


def check_future() -> None:
    """A future knows the devices of its results. torch without CUDA has no such future, so its class is a double."""
    with mock.patch("unisono.frameworks.torch.calls.work.Future", HostFuture):
        for x in (on_gpu(torch.ones(2)), torch.ones(2)):
            dist.all_reduce(x, async_op=True).get_future().wait()
    assert HostFuture.all_devices == [[torch.device("cuda", 0)], []]


def check_ddp_hook(rank: int) -> None:
    """Gradients on a GPU are averaged there, compressed or not, and nothing is copied to the host."""
    with un.torch.communicator().dup() as world, mock.patch.object(torch.Tensor, "cpu", refuse_copy):
        for compression in (None, "bfloat16", "int8"):
            hook = un.torch.ddp_hook(world, compression)
            for value in (2.0, 4.0):
                gradients = on_gpu(torch.full((4,), rank * value))
                bucket = mock.Mock(buffer=mock.Mock(return_value=gradients), index=mock.Mock(return_value=0))
                with mock.patch("unisono.frameworks.torch.calls.work.Future", HostFuture):
                    result = hook(None, bucket).wait()
                assert values_of(result) == [value / 2] * 4, values_of(result)


def check_reducer(rank: int) -> None:
    """The gradient engine averages gradients on a GPU there, and writes them into the tensors that it got."""
    with un.torch.communicator().dup() as world, mock.patch.object(torch.Tensor, "cpu", refuse_copy):
        for compression in (None, "bfloat16", "int8"):
            with un.GradientReducer(world, compression=compression) as reducer:
                for step in range(2):
                    gradients = {name: on_gpu(torch.full(shape, rank * 2.0 + step)) for name, shape in SHAPES.items()}
                    for name, gradient in gradients.items():
                        reducer.ready(name, gradient)
                    reduced = reducer.finish()
                    assert all(reduced[name] is gradient for name, gradient in gradients.items())
                    for name, shape in SHAPES.items():
                        assert values_of(reduced[name]) == torch.full(shape, 1.0 + step).tolist()


def check_fsdp(rank: int, size: int) -> None:
    """The collectives for FSDP2 take tensors on a GPU without a copy on the host."""
    with mock.patch.object(torch.Tensor, "cpu", refuse_copy):
        whole, share = on_gpu(torch.zeros(2 * size)), on_gpu(torch.full((2,), float(rank)))
        un.torch.AllGather()(whole, share, dist.group.WORLD)
        assert values_of(whole) == [0.0, 0.0, 1.0, 1.0]
        un.torch.ReduceScatter()(share, whole, dist.group.WORLD, dist.ReduceOp.SUM)
        assert values_of(share) == [2.0 * rank] * 2


SHAPES = {"weight": (3, 5), "bias": (2,)}


def refuse_copy(tensor: Any, *_: Any, **__: Any) -> Any:
    """Stand in for `Tensor.cpu`."""
    raise AssertionError("a tensor was copied to the host")


def check_of_group(group: Any, rank: int, size: int, share: Any) -> None:
    """Make calls by methods of the group, because their functions in torch.distributed need tensors of a real GPU."""
    # The parts are rows of one tensor, so that torch copies nothing: its copies ignore the double's streams.
    parts = list(on_gpu(torch.zeros(size, 2)).unbind())
    group.allgather([parts], [share]).wait()
    assert [values_of(part) for part in parts] == [[0.0, 0.0], [2.0, 2.0]]
    options = dist.BroadcastOptions()
    options.rootRank = 1
    group.broadcast([share], options).wait()
    assert values_of(share) == [2.0, 2.0]
    if rank == 0:
        group.send([share], 1, 0).wait()
    else:
        group.recv([got := on_gpu(torch.zeros(2))], 0, 0).wait()
        assert values_of(got) == [2.0, 2.0]


def check_refusal() -> None:
    """Check that the backend refuses tensors on a GPU if the group has another backend for GPUs."""
    dist.destroy_process_group()
    meet("cpu:unisono,cuda:nccl", file="again")
    dist.all_reduce(torch.ones(2))
    try:
        dist.all_reduce(on_gpu(torch.ones(2)))
    except dist.DistBackendError as error:
        print("refused" if "new_group(backend='nccl')" in str(error) else error)


if __name__ == "__main__":
    GPU = GpuDouble()
    current = SimpleNamespace(cuda_stream=GPU.device().new_stream())
    with devices.replaced(GPU.device), mock.patch("torch.cuda.current_stream", return_value=current):
        check_calls(*meet())
        print("all calls were made")
        if BASE is object:  # otherwise torch calls another backend for them
            check_refusal()
        dist.destroy_process_group()
    GPU.close()
