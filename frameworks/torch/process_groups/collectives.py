"""The collectives of a process group, as torch.distributed calls them.

They form a class of their own, so that a process group can inherit them beside any base class of torch. torch calls
each collective by one or more names: Python by the names of its version, C++ by the newest. All names are here, as one
method with aliases.

Every method takes tensors on the host or on a GPU, contiguous or not, of any dtype that can be moved. A tensor on
another device is copied. Every method also takes the options object of its call, of which it reads `asyncOp`, `timeout`
and the fields of its collective, or these fields themselves. Without `asyncOp` the method returns None when the call
has ended, or on a GPU when the call is in the stream.

Raises `dist.DistBackendError`. Its subclass `CallError` says that the arguments are wrong, and nothing has been sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import torch.distributed.distributed_c10d as c10d
from torch.profiler import record_function

from unisono import Communicator, Op, UnisonoError, UsageError
from unisono.frameworks.sparse_sums import SparseSums
from unisono.frameworks.torch.calls.dynamo_skip import skip_dynamo
from unisono.frameworks.torch.calls.errors import torch_error
from unisono.frameworks.torch.calls.operations import operation
from unisono.frameworks.torch.calls.tensors import (
    Array,
    CallTensors,
    FlatMemory,
    GpuStage,
    address_of,
    disjoint,
    plain_memory,
)
from unisono.frameworks.torch.calls.work import Work, WorkKeeper, do_nothing
from unisono.frameworks.torch.constants import NAME

Method = TypeVar("Method", bound=Callable[..., Any])

# The timeout in options to which the program has passed none.
_UNSET = timedelta(milliseconds=-1)
_NOTHING: Mapping[str, Any] = {}
_NO_TENSORS = GpuStage()
_is_profiled = torch.autograd._profiler_enabled


def torch_call(method: Method) -> Method:
    """Decorate a method so that it raises the errors of torch and is recorded by the profiler of torch."""
    name = f"unisono:{method.__name__}"

    @wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return _recorded(name, method, self, *args, **kwargs) if _is_profiled() else method(self, *args, **kwargs)
        except UnisonoError as error:
            raise _reported(self, error) from error

    return called  # type: ignore[return-value]


def _recorded(name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with record_function(name):
        return method(*args, **kwargs)


def _reported(group: Any, error: UnisonoError) -> Exception:
    """Return torch's error for the error of a call. If the call has failed, the hooks of the group are called first."""
    if not isinstance(error, UsageError):
        group._keeper.on_failure()
    return torch_error(error)


# By method, the class of its options, and the fields of them that torch takes in place of the options, in their order.
_FORMS: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "allreduce": (c10d.AllreduceOptions, ("op", "timeout")),
    "allreduce_coalesced": (c10d.AllreduceCoalescedOptions, ()),
    "reduce": (c10d.ReduceOptions, ("root", "op", "timeout")),
    "reduce_scatter": (c10d.ReduceScatterOptions, ("op", "timeout")),
    "reduce_scatter_single": (c10d.ReduceScatterOptions, ()),
    "reduce_scatter_single_coalesced": (c10d.ReduceScatterOptions, ()),
    "broadcast": (c10d.BroadcastOptions, ("root", "timeout")),
    "allgather": (c10d.AllgatherOptions, ("timeout",)),
    "all_gather_single": (c10d.AllgatherOptions, ()),
    "all_gather_single_coalesced": (c10d.AllgatherOptions, ()),
    "allgather_coalesced": (c10d.AllgatherOptions, ()),
    "gather": (c10d.GatherOptions, ("root", "timeout")),
    "gather_single": (c10d.GatherOptions, ()),
    "scatter": (c10d.ScatterOptions, ("root", "timeout")),
    "all_to_all_single": (c10d.AllToAllOptions, ("timeout",)),
    "alltoall": (c10d.AllToAllOptions, ()),
    "barrier": (c10d.BarrierOptions, ("timeout",)),
}
_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def collective_call(method: Method) -> Method:
    """Decorate a collective as `torch_call` does, and let it take the fields of its options in place of them.

    For example, ``group.broadcast(tensor, 0)`` has the options of root 0, and ``group.barrier()`` has the default ones.
    """
    options_class, _ = _FORMS[method.__name__]
    count = method.__code__.co_argcount - 2  # of the arguments between `self` and `opts`
    name = f"unisono:{method.__name__}"

    # One function does the work of both decorators, because each function costs some percent of a short call.
    @wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if kwargs or len(args) != count + 1 or not isinstance(args[count], options_class):
                fields = {field: kwargs.pop(field) for field in ("opts", *_FIELDS) if field in kwargs}
                args = (*args[:count], _options(method.__name__, args[count:], fields))
            return _recorded(name, method, self, *args, **kwargs) if _is_profiled() else method(self, *args, **kwargs)
        except UnisonoError as error:
            raise _reported(self, error) from error

    return called  # type: ignore[return-value]


def _options(name: str, values: Sequence[Any], fields: dict[str, Any]) -> Any:
    """Return the options of a collective, of which the program has passed these values without and with names.

    Raises:
        UsageError: the collective takes no such values.
    """
    options_class, names = _FORMS[name]
    if values and (values[0] is None or hasattr(values[0], "asyncOp")):
        fields, values = {"opts": values[0], **fields}, values[1:]
    opts = fields.pop("opts", None) or options_class()
    fields = {**dict(zip(names, values, strict=False)), **fields}
    if len(values) > len(names) or not fields.keys() <= set(names):
        raise UsageError(f"{name} takes its tensors and then opts{''.join(f', or {each}' for each in names)}")
    for field, value in fields.items():
        if value is not None:
            setattr(opts, _FIELDS[field], value)
    return opts


@skip_dynamo
class Collectives:
    """Collectives over a communicator. The process group sets the attributes.

    Attributes:
        _communicator: carries the calls.
        _sparse_sums: computes the sums of sparse tensors.
        _keeper: holds the works of calls in flight.
        _rounding: by dtype, the arguments of reductions for `reproducible` and `accumulate`.
        _limit_s: the time limit of calls to which the program passes none; None for that of the communicator.
        _collectives: how many collectives this rank has called.
    """

    _communicator: Communicator
    _sparse_sums: SparseSums
    _keeper: WorkKeeper
    _rounding: Mapping[Any, Mapping[str, Any]]
    _limit_s: float | None
    _collectives: int

    # --- reductions -------------------------------------------------------------------------------------------------

    @collective_call
    def allreduce(self, tensors: Any, opts: Any) -> Any:
        """Combine a tensor of each rank, in place. Of sparse tensors only the sum is possible, as with Gloo."""
        (tensor,) = tensors = _listed(tensors)
        if (plain := plain_memory(tensor)) is not None:
            return self._allreduce_plain(plain, tensors, opts)
        if tensor.is_sparse:
            from unisono.frameworks.torch.calls import sparse

            self._collectives += 1
            work = sparse.allreduce(self._communicator, self._sparse_sums, tensor, opts, self._keeper)
            return work if opts.asyncOp else _wait(work)
        stage = GpuStage()
        x = stage.write(tensor)
        op, rounding = self._op(opts, tensor.dtype)
        return self._run(partial(self._communicator.allreduce, x, op, out=x, **rounding), opts, tensors, stage)

    def _allreduce_plain(self, plain: Array, tensors: list[Any], opts: Any) -> Work | None:
        """Combine a tensor in place in its memory, `plain`. It makes no object that the call does not need."""
        self._collectives += 1
        op, rounding = self._op(opts, tensors[0].dtype)
        limits = self._limits(opts)
        if opts.asyncOp or self._keeper.is_coalescing:
            pending = self._communicator.allreduce(plain, op, out=plain, wait=False, **limits, **rounding)
            return Work(pending, tensors, do_nothing, self._keeper)
        self._communicator.allreduce(plain, op, out=plain, **limits, **rounding)
        return None

    @collective_call
    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        """Combine the lists of all ranks, tensor by tensor, in place."""
        tensors, stage = _listed(tensors), GpuStage()
        x: Any = [stage.write(tensor) for tensor in tensors]
        op, rounding = self._op_of_all(opts, tensors)
        return self._run(partial(self._communicator.allreduce, x, op, out=x, **rounding), opts, tensors, stage)

    @collective_call
    def reduce(self, tensors: Any, opts: Any) -> Any:
        """Combine a tensor of each rank. The root's tensor gets the result, and the others stay unchanged."""
        (tensor,) = tensors = _listed(tensors)
        stage = GpuStage()
        is_root = opts.rootRank == self._communicator.rank
        x = stage.write(tensor) if is_root else stage.read(tensor)
        op, rounding = self._op(opts, tensor.dtype)
        reduce = partial(self._communicator.reduce, x, op, opts.rootRank, out=x if is_root else None, **rounding)
        return self._run(reduce, opts, tensors, stage)

    @collective_call
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Combine the lists of all ranks, tensor by tensor. Rank r gets the result at index r, of any shape."""
        (output,), (parts,) = _listed(outputs), _nested(inputs)
        self._check_list(parts)
        stage = GpuStage()
        out, x = stage.write(output), stage.read_all(parts)
        op, rounding = self._op(opts, output.dtype)
        counts = _counts(parts)
        if len(set(counts)) == 1:
            reduce = partial(self._communicator.reduce_scatter, disjoint(x, out), op, out=out, **rounding)
        else:
            reduce = partial(self._communicator.reduce_scatterv, disjoint(x, out), counts, op, out=out, **rounding)
        return self._run(reduce, opts, [output], stage)

    @collective_call
    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        """Combine the tensors of all ranks. Each rank gets an equal part of the result."""
        stage = GpuStage()
        out, x = stage.write(output), stage.read(tensor)
        op, rounding = self._op(opts, tensor.dtype)
        reduce = partial(self._communicator.reduce_scatter, disjoint(x, out), op, out=out, **rounding)
        return self._run(reduce, opts, [output], stage)

    @collective_call
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Run `reduce_scatter_single` for several tensors in one call."""
        outputs, inputs, stage = _listed(outputs), _listed(inputs), GpuStage()
        outs = [stage.write(output) for output in outputs]
        x = [disjoint(stage.read(tensor), out) for tensor, out in zip(inputs, outs, strict=True)]
        op, rounding = self._op_of_all(opts, inputs)
        reduce = partial(self._communicator.reduce_scatter, x, op, out=outs, **rounding)
        return self._run(reduce, opts, outputs, stage)

    # --- movements --------------------------------------------------------------------------------------------------

    @collective_call
    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Copy the root's tensor to the tensors of all ranks."""
        (tensor,) = tensors = _listed(tensors)
        stage = GpuStage()
        x = stage.write(tensor)
        return self._run(partial(self._communicator.broadcast, x, opts.rootRank, out=x), opts, tensors, stage)

    @collective_call
    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Copy the tensors of all ranks, whose shapes may differ, to the list of outputs of every rank."""
        (parts,), (tensor,) = _nested(outputs), _listed(inputs)
        self._check_list(parts)
        stage = GpuStage()
        out, x = stage.write_all(parts), stage.read(tensor)
        counts = _counts(parts)
        if len(set(counts)) == 1:
            gather = partial(self._communicator.allgather, self._in_its_part(x, out), out=out)
        else:
            gather = partial(self._communicator.allgatherv, disjoint(x, out), counts, out=out)
        return self._run(gather, opts, parts, stage)

    @collective_call
    def all_gather_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        """Copy the tensors of all ranks, one after the other, to the output of every rank."""
        stage = GpuStage()
        out, x = stage.write(output), stage.read(tensor)
        return self._run(
            partial(self._communicator.allgather, self._in_its_part(x, out), out=out), opts, [output], stage
        )

    @collective_call
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Run `all_gather_single` for several tensors in one call."""
        outputs, stage = _listed(outputs), GpuStage()
        outs = [stage.write(output) for output in outputs]
        pairs = zip(_listed(inputs), outs, strict=True)
        x = [self._in_its_part(stage.read(tensor), out) for tensor, out in pairs]
        return self._run(partial(self._communicator.allgather, x, out=outs), opts, outputs, stage)

    @collective_call
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Run `allgather` for several tensors in one call: ``outputs[r][i]`` gets ``inputs[i]`` of rank r."""
        self._check_list(outputs)
        stage = GpuStage()
        outs = [stage.write_all(parts) for parts in zip(*outputs, strict=True)]
        x = [disjoint(stage.read(tensor), out) for tensor, out in zip(_listed(inputs), outs, strict=True)]
        written = [tensor for parts in outputs for tensor in parts]
        return self._run(partial(self._communicator.allgather, x, out=outs), opts, written, stage)

    @collective_call
    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Copy the tensors of all ranks to the list of outputs of the root. The other ranks pass an empty list."""
        (tensor,), stage = _listed(inputs), GpuStage()
        is_root = opts.rootRank == self._communicator.rank
        parts = self._list_of_root(outputs, is_root, "output")
        x, out = stage.read(tensor), stage.write_all(parts) if is_root else None
        if out is not None:
            x = self._in_its_part(x, out)
        return self._run(partial(self._communicator.gather, x, opts.rootRank, out=out), opts, parts, stage)

    @collective_call
    def gather_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        """Copy the tensors of all ranks, one after the other, to the output of the root. Others pass any tensor."""
        stage = GpuStage()
        is_root = opts.rootRank == self._communicator.rank
        x, out = stage.read(tensor), stage.write(output) if is_root else None
        if out is not None:
            x = self._in_its_part(x, out)
        written = [output] if is_root else []
        return self._run(partial(self._communicator.gather, x, opts.rootRank, out=out), opts, written, stage)

    @collective_call
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Copy the tensor at index r of the root's list to the output of rank r. The other ranks pass an empty list."""
        (output,), stage = _listed(outputs), GpuStage()
        is_root = opts.rootRank == self._communicator.rank
        parts = self._list_of_root(inputs, is_root, "input")
        out, x = stage.write(output), stage.read_all(parts) if is_root else None
        if x is not None:
            x = disjoint(x, out)
        return self._run(partial(self._communicator.scatter, x, opts.rootRank, out=out), opts, [output], stage)

    @collective_call
    def all_to_all_single(
        self, output: Any, tensor: Any, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any
    ) -> Any:
        """Split the rows of the tensor among the ranks, equally or by `input_splits`, and exchange the parts."""
        stage = GpuStage()
        out, x = stage.write(output), stage.read(tensor)
        x = disjoint(x, out)
        if not output_splits and not input_splits:
            self._check_rows(tensor)
            return self._run(partial(self._communicator.alltoall, x, out=out), opts, [output], stage)
        sent, received = self._split(tensor, input_splits), self._split(output, output_splits)
        return self._run(partial(self._communicator.alltoallv, x, sent, received, out=out), opts, [output], stage)

    @collective_call
    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Copy ``inputs[r]`` of this rank s to ``outputs[s]`` of rank r."""
        outputs, inputs, stage = _listed(outputs), _listed(inputs), GpuStage()
        out, x = stage.write_all(outputs), stage.read_all(inputs)
        exchange = partial(self._communicator.alltoallv, disjoint(x, out), _counts(inputs), _counts(outputs), out=out)
        return self._run(exchange, opts, outputs, stage)

    @collective_call
    def barrier(self, opts: Any) -> Any:
        """Wait until all ranks have called `barrier`."""
        return self._run(self._communicator.barrier, opts, [], _NO_TENSORS)

    # The older names of torch for the same methods.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _run(self, start: Callable[..., Any], opts: Any, results: list[Any], stage: CallTensors) -> Work | None:
        """Make a call of the communicator. Return its work, or None if the call is synchronous."""
        self._collectives += 1
        if stage.has_gpu:
            check_gpu(self)
        limits = self._limits(opts)
        if opts.asyncOp or self._keeper.is_coalescing:
            return Work(start(wait=False, **limits), results, stage.finish, self._keeper)
        start(**limits)
        stage.finish()
        return None

    def _limits(self, opts: Any) -> Mapping[str, Any]:
        """Return the arguments of a call for the time limit in its options, or else of the group."""
        timeout = opts.timeout
        limit_s = self._limit_s if timeout == _UNSET else timeout.total_seconds()
        return _NOTHING if limit_s is None else {"timeout_s": limit_s}

    def _op(self, opts: Any, dtype: Any) -> tuple[str | Op, Mapping[str, Any]]:
        return operation(opts.reduceOp, dtype), self._rounding.get(dtype, _NOTHING)

    def _op_of_all(self, opts: Any, tensors: Sequence[Any]) -> tuple[str | Op, Mapping[str, Any]]:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            names = ", ".join(sorted(map(str, dtypes))) or "none"
            raise UsageError(f"the tensors of a list must be of one dtype; got {names}")
        return self._op(opts, *dtypes)

    def _in_its_part(self, x: FlatMemory, out: FlatMemory) -> FlatMemory:
        """Return `x`, or a copy if it overlaps `out` elsewhere than in the part of this rank."""
        return x if address_of(out) + self._communicator.rank * x.nbytes == address_of(x) else disjoint(x, out)

    def _list_of_root(self, lists: Any, is_root: bool, name: str) -> list[Any]:
        """Return the list of tensors that only the root passes.

        Raises:
            UsageError: another rank passes tensors, or the root does not pass one for each rank.
        """
        tensors: list[Any] = [] if not lists else list(_nested(lists)[0])
        if len(tensors) != (self._communicator.size if is_root else 0):
            raise UsageError(
                f"the {name} list has {len(tensors)} tensors: the root passes one for each rank, and the other ranks "
                "pass none"
            )
        return tensors

    def _check_list(self, tensors: Sequence[Any]) -> None:
        if len(tensors) != self._communicator.size:
            size = self._communicator.size
            raise UsageError(f"the list has {len(tensors)} tensors, and the group has {size} ranks: pass one for each")

    def _check_rows(self, tensor: Any) -> None:
        size = self._communicator.size
        if tensor.dim() == 0 or tensor.size(0) % size:
            raise UsageError(f"tensor's dim 0 does not divide equally across the group's size, {size}: pass splits")

    def _split(self, tensor: Any, splits: Sequence[int]) -> list[int]:
        """Return how many elements of a tensor go to each rank: `splits` rows each, or equal parts without `splits`."""
        size = self._communicator.size
        if not splits:
            self._check_rows(tensor)
            splits = [tensor.size(0) // size] * size
        if len(splits) != size or sum(splits) != tensor.size(0):
            raise UsageError(f"splits {list(splits)} are not {size} numbers of rows whose sum is {tensor.size(0)}")
        row_elements = tensor.numel() // tensor.size(0) if tensor.size(0) else 0
        return [rows * row_elements for rows in splits]


def check_gpu(group: Any) -> None:
    """Check that the group is to use this backend for tensors on a GPU.

    torch lets a process group written in Python replace all backends of the group, also those for other devices.

    Raises:
        UsageError: the program has asked for another backend for tensors on a GPU.
    """
    backends = c10d._world.pg_backend_config.get(group, "")
    gpu_backend = dict(pair.split(":") for pair in backends.split(",") if ":" in pair).get("cuda", NAME)
    if gpu_backend != NAME:
        raise UsageError(
            f"this group was created with the backend {backends!r}, but torch uses {NAME!r} for all devices, because "
            f"{NAME!r} is written in Python: create a group for tensors on a GPU by new_group(backend={gpu_backend!r})"
        )


def _wait(work: Work) -> None:
    work.wait()


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _nested(lists: Any) -> list[Any]:
    return [lists] if isinstance(lists[0], torch.Tensor) else lists


def _counts(tensors: Sequence[Any]) -> list[int]:
    return [tensor.numel() for tensor in tensors]
