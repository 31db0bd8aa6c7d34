"""Communicators over the actors of a Ray cluster, and a backend of ``ray.util.collective``.

With four actors, the result of this program is a list of four times 4.0::

    with unisono.launchers.ray.communicator(actors) as ranks:
        sums = ranks.run(lambda world: float(world.allreduce(numpy.ones(1))[0]))

Theory of operation. `communicator` is called by the driver. Any actor can be a rank, because Ray lets the driver call a
function in the process of an actor (``__ray_call__``). The ticket of the job travels in the arguments of these calls.

`RayGroup` is made inside of actors, which know only a name in common. Rank 0 puts the ticket into Ray's internal
key-value store, under a key with the id of Ray's job and the name of the group. It removes the ticket when all ranks
have met or one has failed. A group that died may have left a ticket. Nobody answers at the store in it, so a rank that
reads it looks again.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from ray.experimental import internal_kv
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllGatherOptions,
    AllReduceOptions,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
)

from unisono import AbortedError, Communicator, Options, PeerLostError, RendezvousError, UsageError
from unisono.foundation.deadlines import Deadline
from unisono.launchers import meeting
from unisono.launchers.meeting import Ticket
from unisono.transports.rendezvous import host_and_port

BACKEND = "UNISONO"
_OPS = {ReduceOp.SUM: "sum", ReduceOp.PRODUCT: "prod", ReduceOp.MIN: "min", ReduceOp.MAX: "max"}
_LOOK_S = 0.05
_CONNECT_S = 2.0
_CLOSE_S = 10.0


class ActorRanks:
    """The actors that are ranks of a communicator. Make it by `communicator`; close it, or use it in a with-block.

    Attributes:
        actors: the actor of each rank.
        name: the name of the communicator in the actors, for `current`.
    """

    def __init__(self, actors: Sequence[Any], name: str) -> None:
        self.actors, self.name = list(actors), name

    def __enter__(self) -> ActorRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``function(world, ...)`` on all ranks at the same time, and return the results by rank.

        Raises:
            PeerLostError: an actor has died.
            Exception: the error of a rank. Calls of the other ranks fail then, and the communicator cannot be used
                again.
        """
        return _results(self.actors, [_call] * len(self.actors), [(self.name, function, args, kwargs)] * self.size)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.actors)

    def close(self) -> None:
        """Close the communicator in all actors that live."""
        for reference in [actor.__ray_call__.remote(_leave, self.name) for actor in self.actors]:
            # An actor may have died. One that is busy closes when it has time.
            with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                ray.get(reference, timeout=_CLOSE_S)


def communicator(actors: Sequence[Any], *, name: str | None = None, options: Options | None = None) -> ActorRanks:
    """Open a communicator over actors. The driver, or another actor, calls it.

    Args:
        actors: handles of different actors, in the order of the ranks. None of them may be busy with a call that waits
            for this one.
        name: the name of the communicator in the actors, for `current`; by default a new one.
        options: as of `un.init`, for all ranks. By default, each actor reads its ``UNISONO_*`` variables, and ranks
            listen on the address of their node.

    Raises:
        UsageError: there are no actors, or one is named twice.
        PeerLostError: an actor has died.
        RendezvousError: the actors cannot reach each other.
    """
    if not actors:
        raise UsageError("actors is empty: pass at least one actor")
    if len({actor._actor_id for actor in actors}) != len(actors):
        raise UsageError("actors names an actor twice, and an actor can be one rank only")
    ticket = Ticket.new("ray", name or f"unisono-{uuid.uuid4().hex}", len(actors))
    (url,) = _results(actors[:1], [_serve], [(ticket,)])
    opened = ticket._replace(store=url)
    ranks = ActorRanks(actors, ticket.name)
    try:
        _results(actors, [_join] * len(actors), [(opened, rank, options) for rank in range(len(actors))])
    except BaseException:
        ranks.close()
        raise
    return ranks


def current(name: str) -> Communicator:
    """Return the communicator of a name in this actor.

    Raises:
        UsageError: there is none.
    """
    return meeting.current(name)


def register() -> None:
    """Make `RayGroup` the backend "unisono" of ``ray.util.collective`` in this process. A second call does nothing.

    Ray asks for it in the driver and in each actor, before a group is created.
    """
    from ray.util.collective import backend_registry

    if not backend_registry._global_registry.is_registered(BACKEND):
        register_collective_backend(BACKEND, RayGroup)


class RayGroup(BaseGroup):  # type: ignore[misc]
    """A group of ``ray.util.collective`` over a communicator. It takes arrays of numpy and tensors of torch.

    Calls overwrite their arguments, as Ray's own groups do. `create_collective_group` and `init_collective_group` make
    groups, after `register`.

    Raises:
        RendezvousError: the other ranks did not come within the option `rendezvous_timeout_s`.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._name = f"group {group_name}"
        key = f"unisono/{ray.get_runtime_context().get_job_id()}/{group_name}"
        self._world = _met(key, self._name, world_size, rank)

    @classmethod
    def backend(cls) -> str:
        """Return the name of the backend."""
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Return True."""
        return True

    def destroy_group(self) -> None:
        """Close the communicator."""
        meeting.leave(self._name)

    def allreduce(self, tensor: Any, allreduce_options: Any = AllReduceOptions()) -> None:  # noqa: B008 (as in Ray)
        """Overwrite the tensor with the combination of all ranks' tensors."""
        (x,) = tensor
        self._world.allreduce(x, _OPS[allreduce_options.reduceOp], out=x)

    def barrier(self, barrier_options: Any = BarrierOptions()) -> None:  # noqa: B008
        """Wait for all ranks."""
        self._world.barrier()

    def reduce(self, tensor: Any, reduce_options: Any = ReduceOptions()) -> None:  # noqa: B008
        """Overwrite the tensor of the root with the combination of all ranks' tensors."""
        (x,) = tensor
        root = reduce_options.root_rank
        self._world.reduce(x, _OPS[reduce_options.reduceOp], root, out=x if self._rank == root else None)

    def broadcast(self, tensor: Any, broadcast_options: Any = BroadcastOptions()) -> None:  # noqa: B008
        """Overwrite the tensors of the other ranks with that of the root."""
        (x,) = tensor
        self._world.broadcast(x, broadcast_options.root_rank, out=x)

    def allgather(
        self,
        tensor_list: Any,
        tensor: Any,
        allgather_options: Any = AllGatherOptions(),  # noqa: B008
    ) -> None:
        """Overwrite element r of the list with the tensor of rank r."""
        (outs,), (x,) = tensor_list, tensor
        for out, part in zip(outs, self._world.allgather(_flat(x)).reshape(self._world_size, -1), strict=True):
            out[...] = part.reshape(out.shape)

    def reducescatter(
        self,
        tensor: Any,
        tensor_list: Any,
        reducescatter_options: Any = ReduceScatterOptions(),  # noqa: B008
    ) -> None:
        """Overwrite the tensor with the combination of all ranks' elements of its number in the list."""
        (out,), (parts,) = tensor, tensor_list
        rows = _stacked(parts)
        out[...] = self._world.reduce_scatter(rows, _OPS[reducescatter_options.reduceOp]).reshape(out.shape)

    def send(self, tensor: Any, send_options: SendOptions) -> None:
        """Send the tensor to another rank."""
        (x,) = tensor
        self._world.send(x, send_options.dst_rank)

    def recv(self, tensor: Any, recv_options: RecvOptions) -> None:
        """Overwrite the tensor with one of another rank."""
        (x,) = tensor
        self._world.recv(x, recv_options.src_rank)


def _flat(x: Any) -> Any:
    return x.reshape(-1)


def _stacked(parts: Sequence[Any]) -> Any:
    """Return arrays of numpy, or tensors of torch, as the rows of one."""
    first, shape = parts[0], (len(parts), *parts[0].shape)
    rows = np.empty(shape, first.dtype) if isinstance(first, np.ndarray) else first.new_empty(shape)
    for row, part in zip(rows, parts, strict=True):
        row[...] = part
    return rows


def _met(key: str, name: str, size: int, rank: int) -> Communicator:
    """Return the communicator of ranks that know only a key of Ray's store in common."""
    host = _host()
    limit_s = meeting.options_at(host).rendezvous_timeout_s
    deadline = Deadline(limit_s)
    if rank == 0:
        ticket = Ticket.new("ray", name, size)
        opened = ticket._replace(store=meeting.serve(ticket, host))
        internal_kv._internal_kv_put(key, _encoded(opened), overwrite=True)
        try:
            return meeting.join(opened, rank, host)
        finally:
            internal_kv._internal_kv_del(key)
    while True:
        found = internal_kv._internal_kv_get(key)
        if found is not None and _answers(_decoded(found).store):
            ticket = _decoded(found)
            if ticket.size != size:
                raise UsageError(f"rank 0 has made the group for {ticket.size} ranks, and rank {rank} for {size}")
            return meeting.join(ticket, rank, host)
        if deadline.has_passed():
            raise RendezvousError(f"rank 0 of the group {key!r} did not create the group within {limit_s:g} s")
        time.sleep(_LOOK_S)


def _answers(url: str) -> bool:
    """Return whether a process listens at the address of a store."""
    try:
        socket.create_connection(host_and_port(url), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _encoded(ticket: Ticket) -> bytes:
    fields = ticket._asdict() | {"job": ticket.job.hex(), "key": ticket.key.hex()}
    return json.dumps(fields).encode()


def _decoded(data: bytes) -> Ticket:
    fields = json.loads(data)
    return Ticket(**fields | {"job": bytes.fromhex(fields["job"]), "key": bytes.fromhex(fields["key"])})


def _results(actors: Sequence[Any], functions: Sequence[Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call a function in each actor, and return the results.

    Raises:
        PeerLostError: an actor has died.
        Exception: the first error, if all actors live.
    """
    references = [
        actor.__ray_call__.remote(function, *args)
        for actor, function, args in zip(actors, functions, arguments, strict=True)
    ]
    results: list[Any] = []
    losses: list[PeerLostError] = []
    errors: list[tuple[Exception, Exception]] = []  # each with Ray's error, which has the traceback of the actor
    for rank, reference in enumerate(references):
        try:
            results.append(ray.get(reference))
        except ray.exceptions.RayActorError as error:
            losses.append(PeerLostError(f"the actor of rank {rank} has died: {error}", peer=rank))
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            errors.append((cause, error))
    for loss in losses:
        raise loss
    for cause, shown in sorted(errors, key=lambda pair: isinstance(pair[0], AbortedError)):  # consequences last
        raise cause from shown if shown is not cause else None
    return results


# Ray passes the actor itself to functions that it calls in its process.
def _call(_: Any, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return meeting.call(name, function, *args, **kwargs)


def _serve(_: Any, ticket: Ticket) -> str:
    return meeting.serve(ticket, _host())


def _join(_: Any, ticket: Ticket, rank: int, options: Options | None) -> None:
    meeting.join(ticket, rank, _host(), options)


def _leave(_: Any, name: str) -> None:
    meeting.leave(name)


def _host() -> str:
    return str(ray.util.get_node_ip_address())
