"""The collectives of a process group, as torch.distributed calls them.

They are apart from the group so that they can serve any of torch's base classes. torch calls each by one or more of
several names: Python by those of its time, C++ by the newest. All are here, as one method under many names.

Every method takes tensors on the host or on a GPU (others are copied), contiguous or not, of any dtype that can be
moved, and the options of its call. Of those it looks at `asyncOp`, without which it returns None when all is done (on a
GPU: when all stands in the streams), at `timeout` and at what it needs else. It raises `dist.DistBackendError`, and
`CallError`, which is one, if the call is wrong: then nothing has been sent.
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
from unisono.frameworks.torch.constants import NAME
from unisono.frameworks.torch.dynamo_skip import untraced
from unisono.frameworks.torch.errors import translated
from unisono.frameworks.torch.operations import operation
from unisono.frameworks.torch.tensors import Stage, Taken, apart, lies_at
from unisono.frameworks.torch.work import Kept, Work

Method = TypeVar("Method", bound=Callable[..., Any])

# What torch sets where no timeout was given.
_UNSET = timedelta(milliseconds=-1)
_NOTHING: Mapping[str, Any] = {}
_STAGE = partial(Stage, takes_gpu=True)
_NO_TENSORS = _STAGE()
_is_profiled = torch.autograd._profiler_enabled


def call(method: Method) -> Method:
    """Let a method raise torch's errors, and be seen by torch's profiler."""
    name = f"unisono:{method.__name__}"

    @wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if _is_profiled():
                with record_function(name):
                    return method(self, *args, **kwargs)
            return method(self, *args, **kwargs)
        except UnisonoError as error:
            raise translated(error) from error

    return called  # type: ignore[return-value]


@untraced
class Collectives:
    """Collectives over a communicator, which the process group sets with the rest of what stands here."""

    _communicator: Communicator
    _kept: Kept
    _rounding: Mapping[Any, Mapping[str, Any]]
    _limit_s: float | None  # of calls that say nothing; None for the communicator's own
    _collectives: int  # how many this rank has called

    # --- reductions -------------------------------------------------------------------------------------------------

    @call
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Combine a tensor of each rank, in place. One that is sparse is summed up, as by Gloo."""
        opts = opts or c10d.AllreduceOptions()
        (tensor,) = tensors = _listed(tensors)
        if tensor.is_sparse:
            from unisono.frameworks.torch import sparse

            self._collectives += 1
            work = sparse.allreduce(self._communicator, tensor, opts, self._kept)
            return work if opts.asyncOp else _waited(work)
        stage = _STAGE()
        x = stage.write(tensor)
        op, rounding = self._op(opts, tensor.dtype)
        return self._run(partial(self._communicator.allreduce, x, op, out=x, **rounding), opts, tensors, stage)

    @call
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Combine each tensor of a list with those in its place on the other ranks, in place."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        tensors, stage = _listed(tensors), _STAGE()
        x: Any = [stage.write(tensor) for tensor in tensors]
        op, rounding = self._op_of_all(opts, tensors)
        return self._run(partial(self._communicator.allreduce, x, op, out=x, **rounding), opts, tensors, stage)

    @call
    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        """Combine a tensor of each rank, in place at the root; the others keep theirs."""
        opts = opts or c10d.ReduceOptions()
        (tensor,) = tensors = _listed(tensors)
        stage = _STAGE()
        is_root = opts.rootRank == self._communicator.rank
        x = stage.write(tensor) if is_root else stage.read(tensor)
        op, rounding = self._op(opts, tensor.dtype)
        reduce = partial(self._communicator.reduce, x, op, opts.rootRank, out=x if is_root else None, **rounding)
        return self._run(reduce, opts, tensors, stage)

    @call
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Combine the lists of all ranks, tensor by tensor; rank r gets that in place r, of a shape of its own."""
        opts = opts or c10d.ReduceScatterOptions()
        (output,), (parts,) = _listed(outputs), _nested(inputs)
        self._check_list(parts)
        stage = _STAGE()
        out, x = stage.write(output), stage.read_all(parts)
        op, rounding = self._op(opts, output.dtype)
        counts = _counts(parts)
        if len(set(counts)) == 1:
            reduce = partial(self._communicator.reduce_scatter, apart(x, out), op, out=out, **rounding)
        else:
            reduce = partial(self._communicator.reduce_scatterv, apart(x, out), counts, op, out=out, **rounding)
        return self._run(reduce, opts, [output], stage)

    @call
    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        """Combine the tensors of all ranks; each rank gets an equal part of the result."""
        opts = opts or c10d.ReduceScatterOptions()
        stage = _STAGE()
        out, x = stage.write(output), stage.read(tensor)
        op, rounding = self._op(opts, tensor.dtype)
        reduce = partial(self._communicator.reduce_scatter, apart(x, out), op, out=out, **rounding)
        return self._run(reduce, opts, [output], stage)

    @call
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Do what `reduce_scatter_single` does, for each of several tensors."""
        opts = opts or c10d.ReduceScatterOptions()
        outputs, inputs, stage = _listed(outputs), _listed(inputs), _STAGE()
        outs = [stage.write(output) for output in outputs]
        x = [apart(stage.read(tensor), out) for tensor, out in zip(inputs, outs, strict=True)]
        op, rounding = self._op_of_all(opts, inputs)
        reduce = partial(self._communicator.reduce_scatter, x, op, out=outs, **rounding)
        return self._run(reduce, opts, outputs, stage)

    # --- what is only moved -----------------------------------------------------------------------------------------

    @call
    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """Copy the root's tensor to those of all ranks."""
        opts = opts or c10d.BroadcastOptions()
        (tensor,) = tensors = _listed(tensors)
        stage = _STAGE()
        x = stage.write(tensor)
        return self._run(partial(self._communicator.broadcast, x, opts.rootRank, out=x), opts, tensors, stage)

    @call
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Copy the tensors of all ranks, each of a shape of its own, to the list of outputs of every rank."""
        opts = opts or c10d.AllgatherOptions()
        (parts,), (tensor,) = _nested(outputs), _listed(inputs)
        self._check_list(parts)
        stage = _STAGE()
        out, x = stage.write_all(parts), stage.read(tensor)
        counts = _counts(parts)
        if len(set(counts)) == 1:
            gather = partial(self._communicator.allgather, self._in_its_part(x, out), out=out)
        else:
            gather = partial(self._communicator.allgatherv, apart(x, out), counts, out=out)
        return self._run(gather, opts, parts, stage)

    @call
    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        """Copy the tensors of all ranks, one after the other, to the output of every rank."""
        opts = opts or c10d.AllgatherOptions()
        stage = _STAGE()
        out, x = stage.write(output), stage.read(tensor)
        return self._run(
            partial(self._communicator.allgather, self._in_its_part(x, out), out=out), opts, [output], stage
        )

    @call
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Do what `all_gather_single` does, for each of several tensors."""
        opts = opts or c10d.AllgatherOptions()
        outputs, stage = _listed(outputs), _STAGE()
        outs = [stage.write(output) for output in outputs]
        pairs = zip(_listed(inputs), outs, strict=True)
        x = [self._in_its_part(stage.read(tensor), out) for tensor, out in pairs]
        return self._run(partial(self._communicator.allgather, x, out=outs), opts, outputs, stage)

    @call
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Do what `allgather` does, for each of several tensors: ``outputs[r][i]`` gets ``inputs[i]`` of rank r."""
        opts = opts or c10d.AllgatherOptions()
        self._check_list(outputs)
        stage = _STAGE()
        outs = [stage.write_all(parts) for parts in zip(*outputs, strict=True)]
        x = [apart(stage.read(tensor), out) for tensor, out in zip(_listed(inputs), outs, strict=True)]
        written = [tensor for parts in outputs for tensor in parts]
        return self._run(partial(self._communicator.allgather, x, out=outs), opts, written, stage)

    @call
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Copy the tensors of all ranks to the list of outputs of the root; the others give an empty list."""
        opts = opts or c10d.GatherOptions()
        (tensor,), stage = _listed(inputs), _STAGE()
        is_root = opts.rootRank == self._communicator.rank
        parts = self._list_of_root(outputs, is_root, "output")
        x, out = stage.read(tensor), stage.write_all(parts) if is_root else None
        if out is not None:
            x = self._in_its_part(x, out)
        return self._run(partial(self._communicator.gather, x, opts.rootRank, out=out), opts, parts, stage)

    @call
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Copy each tensor of the root's list to the output of its rank; the others give an empty list."""
        opts = opts or c10d.ScatterOptions()
        (output,), stage = _listed(outputs), _STAGE()
        is_root = opts.rootRank == self._communicator.rank
        parts = self._list_of_root(inputs, is_root, "input")
        out, x = stage.write(output), stage.read_all(parts) if is_root else None
        if x is not None:
            x = apart(x, out)
        return self._run(partial(self._communicator.scatter, x, opts.rootRank, out=out), opts, [output], stage)

    @call
    def all_to_all_single(
        self, output: Any, tensor: Any, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> Any:
        """Copy each part of the rows of the tensor to the output of its rank: in equal parts, or in these."""
        opts = opts or c10d.AllToAllOptions()
        stage = _STAGE()
        out, x = stage.write(output), stage.read(tensor)
        x = apart(x, out)
        if not output_splits and not input_splits:
            self._check_rows(tensor)
            return self._run(partial(self._communicator.alltoall, x, out=out), opts, [output], stage)
        sent, received = self._split(tensor, input_splits), self._split(output, output_splits)
        return self._run(partial(self._communicator.alltoallv, x, sent, received, out=out), opts, [output], stage)

    @call
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Copy each tensor of the list to the output, in the place of this rank, of the rank in whose place it is."""
        opts = opts or c10d.AllToAllOptions()
        outputs, inputs, stage = _listed(outputs), _listed(inputs), _STAGE()
        out, x = stage.write_all(outputs), stage.read_all(inputs)
        exchange = partial(self._communicator.alltoallv, apart(x, out), _counts(inputs), _counts(outputs), out=out)
        return self._run(exchange, opts, outputs, stage)

    @call
    def barrier(self, opts: Any = None) -> Any:
        """Wait until all ranks have called it."""
        return self._run(self._communicator.barrier, opts or c10d.BarrierOptions(), [], _NO_TENSORS)

    # The same under the names that torch has given them before.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

    # --- what they have in common -----------------------------------------------------------------------------------

    def _run(self, start: Callable[..., Any], opts: Any, results: list[Any], stage: Stage) -> Work | None:
        """Make a call of the communicator; return its work, or None if it has ended."""
        self._collectives += 1
        if stage.has_gpu:
            check_gpu(self)
        limit_s = self._limit_s if opts.timeout == _UNSET else opts.timeout.total_seconds()
        limits = _NOTHING if limit_s is None else {"timeout_s": limit_s}
        if opts.asyncOp or self._kept.are_coalesced:
            return Work(start(wait=False, **limits), results, stage.finish, self._kept)
        start(**limits)
        stage.finish()
        return None

    def _op(self, opts: Any, dtype: Any) -> tuple[str | Op, Mapping[str, Any]]:
        return operation(opts.reduceOp, dtype), self._rounding.get(dtype, _NOTHING)

    def _op_of_all(self, opts: Any, tensors: Sequence[Any]) -> tuple[str | Op, Mapping[str, Any]]:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            names = ", ".join(sorted(map(str, dtypes))) or "none"
            raise UsageError(f"the tensors of a list must be of one dtype; got {names}")
        return self._op(opts, *dtypes)

    def _in_its_part(self, x: Taken, out: Taken) -> Taken:
        """Return `x`, or a copy if it is in the memory of `out` and not where this rank's part of that is."""
        return x if lies_at(out) + self._communicator.rank * x.nbytes == lies_at(x) else apart(x, out)

    def _list_of_root(self, lists: Any, is_root: bool, name: str) -> list[Any]:
        """Return the tensors that only the root gives.

        Raises:
            UsageError: another rank gives some, or the root gives as many as there are ranks.
        """
        found: list[Any] = [] if not lists else list(lists[0])
        if len(found) != (self._communicator.size if is_root else 0):
            raise UsageError(
                f"the {name} list has {len(found)} tensors: the root gives one for each rank, and the others give none"
            )
        return found

    def _check_list(self, tensors: Sequence[Any]) -> None:
        if len(tensors) != self._communicator.size:
            raise UsageError(f"the list has {len(tensors)} places, and the group {self._communicator.size} ranks")

    def _check_rows(self, tensor: Any) -> None:
        size = self._communicator.size
        if tensor.dim() == 0 or tensor.size(0) % size:
            raise UsageError(f"tensor's dim 0 does not divide equally across the group's size, {size}: give splits")

    def _split(self, tensor: Any, splits: Sequence[int]) -> list[int]:
        """Return how many elements of a tensor there are for each rank, by rows for each or in equal parts."""
        size = self._communicator.size
        if not splits:
            self._check_rows(tensor)
            splits = [tensor.size(0) // size] * size
        if len(splits) != size or sum(splits) != tensor.size(0):
            raise UsageError(f"splits {list(splits)} are not {size} numbers of rows whose sum is {tensor.size(0)}")
        row = tensor.numel() // tensor.size(0) if tensor.size(0) else 0
        return [rows * row for rows in splits]


def check_gpu(group: Any) -> None:
    """Check that tensors on a GPU are this backend's.

    Raises:
        UsageError: the group was made with another backend for them, whose place torch has let this one take.
    """
    named = c10d._world.pg_backend_config.get(group, "")
    other = dict(each.split(":") for each in named.split(",") if ":" in each).get("cuda", NAME)
    if other != NAME:
        raise UsageError(
            f"this group was made with the backend {named!r}, but torch lets a group that is written in Python take "
            f"the place of all of them; make one for tensors on a GPU by new_group(backend={other!r})"
        )


def _waited(work: Work) -> None:
    work.wait()


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _nested(lists: Any) -> list[Any]:
    return [lists] if isinstance(lists[0], torch.Tensor) else lists


def _counts(tensors: Sequence[Any]) -> list[int]:
    return [tensor.numel() for tensor in tensors]
