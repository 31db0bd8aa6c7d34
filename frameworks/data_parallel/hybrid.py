"""Hybrid groups: synchronous inside a group of ranks, asynchronous between groups, so that none waits for a straggler.

Theory of operation. The ranks of a group average their gradients as ever, over `HybridGroups.group`. From time to time
they call `exchange`: their leader waits for its turn, contributes by how much each layer has changed to the server of
that layer, gets the layer back with what the other groups have contributed, and broadcasts it to its group. The servers
are the ranks themselves (`servers`), each for some of the layers, so that no rank's link carries everything; how far
groups may be apart is decided by one of them, the clock (`center`). All layers are under way at once.

A rank that dies, anywhere, fails the job's communicators and with them every call and every wait here, on all ranks.

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
from unisono.autograph import unconverted
from unisono.frameworks.arrays import FlatArray, Named, first_names, flatten, flatten_all, pairs_of
from unisono.frameworks.data_parallel.center import LAST, Center, Clock, Desk
from unisono.frameworks.data_parallel.layers import Frame, change, layers_of, read, spread, write
from unisono.frameworks.data_parallel.parameters import check_names, check_writable, verify_sync
from unisono.frameworks.data_parallel.servers import FOREVER_S, Server


@unconverted
class HybridGroups:
    """Groups of ranks that train one model asynchronously. A context manager.

    All ranks make it, with the same arguments and parameters. The ranks of a group call `exchange` equally often, and
    groups as often as they get to; in the end, each calls `finish`. Each rank averages gradients over `group`, and
    steps by its own optimizer.

    Args:
        world: the ranks.
        parameters: arrays by name, the same bits on all ranks: `broadcast_parameters` makes them so. Parameters whose
            names are the same up to the last dot are a layer.
        groups: the number of groups, of ranks in a row and about as many in each; or the ranks of each.
        staleness: how many contributions of other groups may come between a group's getting a layer and its
            contribution. A group that is ahead waits as long as another would fall further behind; with 0, they go in
            step. At least (groups - 1) · k lets a group be k times slower than the others without being waited for.
        servers: the ranks that keep layers; by default, all.

    Attributes:
        group: the communicator of this rank's group.
        index: the number of the group.
        contributions: how many contributions of all groups were in what this group got last.

    Raises:
        UsageError: an argument cannot be used; nothing has been sent.
        MismatchError: the ranks have other arguments or parameters.

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
        members = _members(groups, world.size)
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
        self._all_names, self._names = list(named), list(lent)  # the latter: of arrays in one memory, the first
        self.index = next(index for index, ranks in enumerate(members) if world.rank in ranks)
        self.group = world.subgroup(members[self.index])
        self._to_servers, self._to_leaders = world.dup(), world.dup()
        # The desks are the layers, and the clock behind them.
        self._clock = len(self._layers)
        self._server_of = (*spread(self._layers, serving), serving[0])
        # What this group got last, and, on its leader, what it gets next and what it contributes.
        self._held, self._answers, self._given = ([Frame(layer) for layer in self._layers] for _ in range(3))
        self._turn = Frame(None)
        for layer, frame in zip(self._layers, self._held, strict=True):
            read(layer, lent, frame.values)
        self._desks = self._desks_of_this_rank(members, staleness)
        leaders = [ranks[0] for ranks in members]
        self._server = Server(self._to_servers, self._to_leaders, self._desks, self._frame_for, leaders)
        self.contributions = 0
        self._is_finished = self._is_closed = False

    def __enter__(self) -> HybridGroups:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and not self._is_finished:
            self._world.abort(f"rank {self._world.rank} has left its hybrid groups by {error!r}")
        self.close()

    def exchange(self, parameters: Named) -> dict[str, Any]:
        """Contribute what this group has changed, and get what all groups have. All ranks of the group call it.

        Args:
            parameters: as they are now: the names, shapes and dtypes of the beginning, and on all ranks of the group
                the same bits. They are overwritten.

        Returns:
            The arrays by name. Those that cannot be written, of JAX and a ``tf.Tensor``, are new ones.

        Raises:
            UsageError: these are other parameters, or `finish` has been called; nothing has been sent.
            PeerLostError, CollectiveTimeoutError, AbortedError: a call failed, here or in another group.
        """
        every, lent = self._checked(parameters)
        if self.group.rank == 0:
            self._exchange(lent)
        memory = [frame.memory for frame in self._held]
        self.group.broadcast(memory, 0, out=memory)
        return self._adopt(every, lent)

    def finish(self, parameters: Named) -> dict[str, Any]:
        """Contribute for the last time, wait for all groups to do so, and get what all have made. All ranks call it.

        Every rank has the same bits then. As `exchange` otherwise.
        """
        every, lent = self._checked(parameters)
        self._is_finished = True
        if self.group.rank == 0:
            self._wait_for_turn(is_last=True)
            self._note_changes(lent)
            sent, _ = self._send(dict(enumerate(self._given)))
            wait_all(sent)
        self._server.wait()
        for index, desk in self._desks.items():
            if isinstance(desk, Center):
                self._held[index].values[...] = desk.values
                self._held[index].numbers[1] = desk.version
        with self._world.group():
            for frame, server in zip(self._held, self._server_of, strict=False):
                self._world.broadcast(frame.memory, server, out=frame.memory, timeout_s=FOREVER_S)
        return self._adopt(every, lent)

    def close(self) -> None:
        """Leave the groups. Without `finish` before, the other ranks would wait: they get an `AbortedError`."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._is_finished:
            self._world.abort(f"rank {self._world.rank} has closed its hybrid groups without finish()")
        for each in (self.group, self._to_servers, self._to_leaders):
            each.close()

    # --- the parts of an exchange ------------------------------------------------------------------------------------

    def _checked(self, parameters: Named) -> tuple[dict[str, FlatArray], dict[str, FlatArray]]:
        if self._is_finished or self._is_closed:
            raise UsageError("these hybrid groups have finished: make new ones")
        every = {name: flatten(x, name) for name, x in pairs_of(parameters)}
        lent = first_names(every)
        check_writable(lent)
        if [*every] != self._all_names or [*lent] != self._names or layers_of(lent) != self._layers:
            raise UsageError("these are other parameters than in the beginning: names, shapes and dtypes must stay")
        return every, lent

    def _desks_of_this_rank(self, members: Sequence[Sequence[int]], staleness: int) -> dict[int, Desk]:
        weights = {group: len(ranks) / self._world.size for group, ranks in enumerate(members)}
        desks: dict[int, Desk] = {}
        for index, server in enumerate(self._server_of):
            if server == self._world.rank and index == self._clock:
                desks[index] = Clock(len(members), staleness)
            elif server == self._world.rank:
                desks[index] = Center(self._held[index].values.copy(), weights)
        return desks

    def _frame_for(self, index: int) -> Frame:
        return Frame(None if index == self._clock else self._layers[index])

    def _exchange(self, lent: Mapping[str, FlatArray]) -> None:
        """Contribute to all layers, and get them as they are then."""
        self._wait_for_turn(is_last=False)
        self._note_changes(lent)
        self._ask(dict(enumerate(self._given)), dict(enumerate(self._answers)))
        self._held, self._answers = self._answers, self._held

    def _wait_for_turn(self, *, is_last: bool) -> None:
        """Get a ticket and a version from the clock."""
        request = self._frame_for(self._clock)
        request.numbers[0] = LAST if is_last else 0
        self._ask({self._clock: request}, {self._clock: self._turn})

    def _note_changes(self, lent: Mapping[str, FlatArray]) -> None:
        for layer, held, given in zip(self._layers, self._held, self._given, strict=True):
            change(layer, lent, held.values, given.values)
            given.numbers[:] = self._turn.numbers

    def _ask(self, frames: Mapping[int, Frame], answers: Mapping[int, Frame]) -> None:
        """Send frames to desks, by their index, and wait for the answers of all."""
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
        """Send frames to desks; return what is being sent, and the answers of this rank's own desks."""
        sent, own = [], {}
        for index, frame in frames.items():
            if self._server_of[index] == self._world.rank:
                own[index] = self._server.give(index, frame)
            else:
                sent.append(self._to_servers.send(frame.memory, self._server_of[index], index, wait=False))
        return sent, own

    def _adopt(self, every: Mapping[str, FlatArray], lent: Mapping[str, FlatArray]) -> dict[str, Any]:
        for layer, frame in zip(self._layers, self._held, strict=True):
            write(layer, lent, frame.values)
        self.contributions = int(self._held[0].numbers[1])
        return {name: each.put_back() for name, each in every.items()}


def _members(groups: int | Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Return the ranks of each group."""
    if isinstance(groups, int):
        if not 1 <= groups <= size:
            raise UsageError(f"{size} ranks cannot be {groups} groups")
        ends = [size * (index + 1) // groups for index in range(groups)]
        return [list(range(begin, end)) for begin, end in zip([0, *ends], ends, strict=False)]
    try:
        members = [[integer(rank) for rank in ranks] for ranks in groups]
    except TypeError:
        raise UsageError(f"groups must be a number, or the ranks of each group, not {groups!r}") from None
    if sorted(rank for ranks in members for rank in ranks) != list(range(size)) or not all(members):
        raise UsageError(f"groups must have each of the {size} ranks once, and one rank or more each, not {groups!r}")
    return members


def _serving(servers: Sequence[int] | None, size: int) -> list[int]:
    found = list(range(size)) if servers is None else sorted(set(servers))
    if not found or not set(found) <= set(range(size)):
        raise UsageError(f"servers must be ranks from 0 to {size - 1}, one or more, not {servers!r}")
    return found
