"""`HybridGroups`: synchronous training inside a group of ranks, asynchronous between groups, so that none waits.

Theory of operation
-------------------
The ranks of a group average their gradients over `HybridGroups.group`. From time to time they call `exchange`. The
leader of the group waits until it may contribute. Then it sends the change of each layer to the server of that layer,
receives the layer with the contributions of the other groups, and broadcasts it to its group. The servers are the ranks
themselves (`servers`), each for some of the layers, so that no rank's link carries everything. One of them also serves
the clock, which bounds how far apart groups may be (`center`). All layers are exchanged at the same time.

If any rank dies, the communicators of the job fail. Then every call and every wait of this class fails, on all ranks.

Reference: Kurth et al., "Deep learning at 15PF: supervised and semi-supervised classification for scientific data",
SC17, arXiv:1708.05256.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from operator import index as integer
from types import TracebackType
from typing import Any

from unisono import Communicator, UsageError, Work, wait_all
from unisono.foundation.autograph import unconverted
from unisono.foundation.uncopyable import uncopyable
from unisono.frameworks.arrays import FlatArray, Named, first_names, flatten, flatten_all, pairs_of
from unisono.frameworks.data_parallel.center import LAST, Center, Handler, StalenessClock
from unisono.frameworks.data_parallel.layers import Frame, change, layers_of, read, spread, write
from unisono.frameworks.data_parallel.parameters import check_names, check_writable, verify_sync
from unisono.frameworks.data_parallel.servers import FOREVER_S, Server


@unconverted
@uncopyable("make another one")
class HybridGroups:
    """A context manager for groups of ranks that train one model asynchronously.

    All ranks create it, with the same arguments and parameters. Each rank averages gradients over `group`, and makes
    steps with its own optimizer. The ranks of a group call `exchange` equally often; groups may differ in how often. At
    the end, all ranks call `finish`.

    Args:
        world: the ranks.
        parameters: arrays by name, with the same bits on all ranks, as after `broadcast_parameters`. Parameters whose
            names are equal up to the last dot form a layer.
        groups: the number of groups of about equal size, each of consecutive ranks; or the ranks of each group.
        staleness: how many contributions of other groups may come between the time when a group gets a layer and its
            own contribution. A group that is ahead waits as long as another one would exceed this bound. With 0 the
            groups run in lockstep. With (groups - 1) · k or more, the others need not wait for a group that is k times
            slower.
        servers: the ranks that serve layers; by default, all.

    Attributes:
        group: the communicator of this rank's group.
        index: the number of this rank's group.
        contributions: the number of contributions of all groups in the parameters that this group got last.

    Raises:
        UsageError: an argument has a value that it cannot have; nothing has been sent.
        MismatchError: the arguments or parameters differ between ranks.

    >>> import numpy as np, unisono as un
    >>> from unisono.data_parallel import HybridGroups
    >>> def train(world):
    ...     model = {"layer.weight": np.zeros(2, np.float32)}
    ...     with HybridGroups(world, model, groups=2, staleness=0) as hybrid:
    ...         model["layer.weight"] += hybrid.group.allreduce(np.array([world.rank, 1], np.float32), "avg")
    ...         hybrid.exchange(model)
    ...         hybrid.finish(model)
    ...     return model["layer.weight"].tolist(), hybrid.contributions
    >>> un.launch(train, 4)[3]
    ([1.5, 1.0], 4)
    """

    def __init__(
        self,
        world: Communicator,
        parameters: Named,
        *,
        groups: int | Sequence[Sequence[int]],
        staleness: int,
        servers: Sequence[int] | None = None,
    ) -> None:
        members = members_of(groups, world.size)
        serving = _serving(servers, world.size)
        if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
            raise UsageError(f"staleness must be a number of contributions, 0 or more, not {staleness!r}")
        named = dict(pairs_of(parameters))
        lent = flatten_all(named)
        check_writable(lent)
        self._layers = layers_of(lent)
        check_names(world, [f"groups={members}", f"staleness={staleness}", f"servers={serving}"])
        verify_sync(world, named)
        self._world = world
        self._all_names = list(named)
        self._names = list(lent)  # of arrays that share memory, only the first
        self.index = next(index for index, ranks in enumerate(members) if world.rank in ranks)
        self.group = world.subgroup(members[self.index])
        self._to_servers, self._to_leaders = world.dup(), world.dup()
        # Each layer has a handler, by its index, and the clock is the last handler.
        self._clock = len(self._layers)
        self._server_of = (*spread(self._layers, serving), serving[0])
        # By layer: the values that this group got last, and on its leader those that it gets next and its changes.
        self._base, self._answers, self._changes = ([Frame(layer) for layer in self._layers] for _ in range(3))
        self._ticket = Frame(None)
        for layer, frame in zip(self._layers, self._base, strict=True):
            read(layer, lent, frame.values)
        self._handlers = self._handlers_of_this_rank(members, staleness)
        leaders = [ranks[0] for ranks in members]
        self._server = Server(self._to_servers, self._to_leaders, self._handlers, self._frame_for, leaders)
        self.contributions = 0
        self._is_finished = self._is_closed = False

    def __enter__(self) -> HybridGroups:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and not self._is_finished:
            self._world.abort(f"rank {self._world.rank} has left its hybrid groups with the error {error!r}")
        self.close()

    def exchange(self, parameters: Named) -> dict[str, Any]:
        """Contribute the changes of this group, and get those of all groups. All ranks of the group call it.

        Args:
            parameters: the present parameters, with the names, shapes and dtypes of the start, and with the same bits
                on all ranks of the group. They are overwritten.

        Returns:
            The arrays by name. An array of JAX or a ``tf.Tensor`` is a new one, because it cannot be written.

        Raises:
            UsageError: these are other parameters, or `finish` has been called; nothing has been sent.
            PeerLostError, CollectiveTimeoutError, AbortedError: a call failed, in this group of ranks or in another
            one.
        """
        all_lent, lent = self._checked(parameters)
        if self.group.rank == 0:
            self._exchange(lent)
        memory = [frame.memory for frame in self._base]
        self.group.broadcast(memory, 0, out=memory)
        return self._adopt(all_lent, lent)

    def finish(self, parameters: Named) -> dict[str, Any]:
        """Contribute for the last time, wait for all groups of ranks, and return their joint result. All ranks call it.

        Afterwards every rank has the same bits. Argument, result and errors are those of `exchange`.
        """
        all_lent, lent = self._checked(parameters)
        self._is_finished = True
        if self.group.rank == 0:
            self._get_ticket(is_last=True)
            self._note_changes(lent)
            sent, _ = self._send(dict(enumerate(self._changes)))
            wait_all(sent)
        self._server.wait()
        for index, handler in self._handlers.items():
            if isinstance(handler, Center):
                self._base[index].values[...] = handler.values
                self._base[index].numbers[1] = handler.version
        with self._world.group():
            for frame, server in zip(self._base, self._server_of, strict=False):
                self._world.broadcast(frame.memory, server, out=frame.memory, timeout_s=FOREVER_S)
        return self._adopt(all_lent, lent)

    def close(self) -> None:
        """Close the communicators. Without `finish` before, all calls of other ranks raise an `AbortedError`."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._is_finished:
            self._world.abort(f"rank {self._world.rank} has closed its hybrid groups without finish()")
        for communicator in (self.group, self._to_servers, self._to_leaders):
            communicator.close()

    # --- the parts of an exchange ------------------------------------------------------------------------------------

    def _checked(self, parameters: Named) -> tuple[dict[str, FlatArray], dict[str, FlatArray]]:
        if self._is_finished or self._is_closed:
            raise UsageError("these hybrid groups have finished: create new ones")
        all_lent = {name: flatten(x, name) for name, x in pairs_of(parameters)}
        lent = first_names(all_lent)
        check_writable(lent)
        if [*all_lent] != self._all_names or [*lent] != self._names or layers_of(lent) != self._layers:
            raise UsageError("the parameters differ from those at the start: pass the same names, shapes and dtypes")
        return all_lent, lent

    def _handlers_of_this_rank(self, members: Sequence[Sequence[int]], staleness: int) -> dict[int, Handler]:
        weights = {group: len(ranks) / self._world.size for group, ranks in enumerate(members)}
        handlers: dict[int, Handler] = {}
        for index, server in enumerate(self._server_of):
            if server == self._world.rank and index == self._clock:
                handlers[index] = StalenessClock(len(members), staleness)
            elif server == self._world.rank:
                handlers[index] = Center(self._base[index].values.copy(), weights)
        return handlers

    def _frame_for(self, index: int) -> Frame:
        return Frame(None if index == self._clock else self._layers[index])

    def _exchange(self, lent: Mapping[str, FlatArray]) -> None:
        """Contribute to all layers, and get their new values."""
        self._get_ticket(is_last=False)
        self._note_changes(lent)
        self._ask(dict(enumerate(self._changes)), dict(enumerate(self._answers)))
        self._base, self._answers = self._answers, self._base

    def _get_ticket(self, *, is_last: bool) -> None:
        """Wait until the clock gives this group a ticket, and the version of the answer to its contribution."""
        request = self._frame_for(self._clock)
        request.numbers[0] = LAST if is_last else 0
        self._ask({self._clock: request}, {self._clock: self._ticket})

    def _note_changes(self, lent: Mapping[str, FlatArray]) -> None:
        for layer, base, changes in zip(self._layers, self._base, self._changes, strict=True):
            change(layer, lent, base.values, changes.values)
            changes.numbers[:] = self._ticket.numbers

    def _ask(self, frames: Mapping[int, Frame], answers: Mapping[int, Frame]) -> None:
        """Send frames to handlers, by index, and wait for the answers of all."""
        receiving = [
            self._to_leaders.recv(answer.memory, self._server_of[index], index, wait=False)
            for index, answer in answers.items()
            if self._server_of[index] != self._world.rank
        ]
        sent, own = self._send(frames)
        wait_all([*sent, *receiving])
        for index, answer in own.items():
            answers[index].memory[...] = answer.result().memory

    def _send(self, frames: Mapping[int, Frame]) -> tuple[list[Work[None]], dict[int, Future[Frame]]]:
        """Send frames to handlers; return the sends in flight, and the answers of the handlers on this rank."""
        sent, own = [], {}
        for index, frame in frames.items():
            if self._server_of[index] == self._world.rank:
                own[index] = self._server.submit(index, frame)
            else:
                sent.append(self._to_servers.send(frame.memory, self._server_of[index], index, wait=False))
        return sent, own

    def _adopt(self, all_lent: Mapping[str, FlatArray], lent: Mapping[str, FlatArray]) -> dict[str, Any]:
        for layer, frame in zip(self._layers, self._base, strict=True):
            write(layer, lent, frame.values)
        self.contributions = int(self._base[0].numbers[1])
        return {name: each.put_back() for name, each in all_lent.items()}


def members_of(groups: int | Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Return the ranks of each group, of which there are `groups` of about equal size unless it lists them.

    Raises:
        UsageError: the groups do not hold each rank once.
    """
    if isinstance(groups, int):
        if not 1 <= groups <= size:
            raise UsageError(f"groups must be from 1 to the number of ranks, {size}, not {groups}")
        ends = [size * (index + 1) // groups for index in range(groups)]
        return [list(range(begin, end)) for begin, end in zip([0, *ends], ends, strict=False)]
    try:
        members = [[integer(rank) for rank in ranks] for ranks in groups]
    except TypeError:
        raise UsageError(f"groups must be a number, or the ranks of each group, not {groups!r}") from None
    if sorted(rank for ranks in members for rank in ranks) != list(range(size)) or not all(members):
        raise UsageError(f"groups must hold each of the {size} ranks once, and no group may be empty, not {groups!r}")
    return members


def _serving(servers: Sequence[int] | None, size: int) -> list[int]:
    serving = list(range(size)) if servers is None else sorted(set(servers))
    if not serving or not set(serving) <= set(range(size)):
        raise UsageError(f"servers must be one or more ranks from 0 to {size - 1}, not {servers!r}")
    return serving
