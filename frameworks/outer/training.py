"""`DiLoCo`, `BlockMomentum` and `LocalSGD`: each rank trains by itself, and an outer optimizer joins the ranks.

Theory of operation
-------------------
All ranks start with the same parameters, of which each keeps a copy, the *outer parameters*. A rank takes steps with
its own optimizer, the inner one. After `inner_steps` of them its *change* is its parameters minus the outer parameters.
The ranks average their changes, and every rank applies the average to the outer parameters (`rules`). It then continues
from these. So the outer parameters have the same bits on all ranks, and one average replaces `inner_steps` of them.

With several fragments, the parameters are averaged in parts, one after the other (`fragments`), so a link carries a
part at a time. With an overlap, a rank goes on computing while a fragment is on its way. When the average arrives, the
rank replaces its own parameters by the outer ones. With `mixing` below 1 it goes only a part of the way, because its
own parameters have been trained in the meantime.

On a swarm, the outer parameters of a newcomer come from the others, and the members take the place of the ranks
(`swarm_averages`).

With groups, the ranks of a group hold the same parameters, because they average gradients in every step. The first rank
of each group takes part in the average between groups, and passes it on.

References: Zinkevich et al., "Parallelized stochastic gradient descent", NIPS 2010; Chen and Huo, "Scalable training of
deep learning machines by incremental block training with intra-block parallel optimization and blockwise model-update
filtering", ICASSP 2016; Douillard et al., "DiLoCo", arXiv:2311.08105, and "Streaming DiLoCo", arXiv:2501.18512.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono import Communicator, LeftBehindError, QuorumLostError, UnisonoError, UsageError
from unisono.foundation.autograph import unconverted
from unisono.foundation.uncopyable import uncopyable
from unisono.frameworks.arrays import Array, FlatArray, Named, checksum, flatten, flatten_all, pairs_of
from unisono.frameworks.data_parallel.hybrid import members_of
from unisono.frameworks.data_parallel.layers import Layer, change, layers_of, mix, read, write
from unisono.frameworks.data_parallel.parameters import check_names, check_writable, verify_sync
from unisono.frameworks.gradients.compression import SHARED_STATE, compression_of
from unisono.frameworks.gradients.layout import Piece, columns_of
from unisono.frameworks.outer.averages import Averages
from unisono.frameworks.outer.fragments import FragmentSchedule, check_schedule, fragments_of
from unisono.frameworks.outer.rules import OuterRule, check_rule
from unisono.frameworks.outer.swarm_averages import SharedParameters, SwarmAverages, Turn

if TYPE_CHECKING:
    from unisono import Swarm

_OF_STATE = ("facts", "rank", "steps", "values", "velocities", "compression", "due")


@unconverted
@uncopyable("make another one; state_dict() returns its state")
class DiLoCo:
    """Training in which ranks take `inner_steps` steps alone, and an outer optimizer then joins their changes.

    All ranks create it, and call `step` after each step of their own optimizer. `step` changes the parameters from time
    to time. It leaves the optimizer alone. At the end, all ranks call `synchronize`.

    Args:
        world: the ranks, or a swarm, whose members take their place. Its newcomers begin by the same call, which
            returns after one average of the others. While this object is open, the program makes no calls on the swarm.
        parameters: arrays of floats by name, with the same bits on all ranks, as after `broadcast_parameters`. On a
            swarm, this call overwrites them by those that the members share, or by those of one member at the start.
            It cannot write arrays of JAX: begin with those of the attribute `parameters`.
        inner_steps: the steps between two averages of a parameter; H in the paper.
        lr, momentum, nesterov: the outer optimizer, which is that of `torch.optim.SGD`. The defaults are the paper's.
            The momentum None stands for 1 - 1/n, if n changes are averaged.
        fragments: in how many parts of about equal size the parameters are averaged one after the other. A part holds
            whole layers: parameters whose names are equal up to the last dot form a layer.
        overlap: how many steps a rank takes while a fragment is on its way; τ in the paper.
        mixing: how far the parameters of a rank go to the outer parameters when a fragment arrives. 1 replaces them,
            and so drops the steps of the overlap. The α of the paper is 1 - mixing.
        compression: as of `GradientReducer`, for the changes on the wire, with error feedback; None for float32.
            A swarm has all but "topk" and "powersgd".
        groups: the groups of ranks that average their gradients in every step: "hosts" for a group for each host, the
            number of groups, or the ranks of each group. None if each rank trains alone, as on a swarm.
        group: on a swarm, the ranks of this host, which average their gradients in every step. Rank 0 of it passes the
            swarm as `world`, and the others pass None. The host counts as one member.
        timeout_s: the time limit of each average; by default, the option `timeout_s`.
        state: what `state_dict` has returned, to continue from there. On a swarm without members that train, the state
            of the most steps counts.

    Attributes:
        group: the communicator of this rank's group, over which the program averages gradients; None on a swarm, unless
            the argument `group` is set.
        steps: the number of calls of `step`; on a member that has entered a swarm late or again, that of the others.
        parameters: the arrays by name with which training begins; none after the first step.

    Raises:
        UsageError: an argument has a value that it cannot have; nothing has been sent.
        MismatchError: the arguments or parameters differ between ranks.

    >>> import numpy as np, unisono as un
    >>> from unisono.data_parallel import DiLoCo
    >>> def train(world):
    ...     model = {"weight": np.zeros(2, np.float32)}
    ...     with DiLoCo(world, model, inner_steps=10, lr=1.0, momentum=0.0) as outer:
    ...         for _ in range(20):
    ...             model["weight"] += world.rank  # a step of any optimizer
    ...             outer.step(model)
    ...     return model["weight"].tolist()
    >>> un.launch(train, 2)
    [[10.0, 10.0], [10.0, 10.0]]
    """

    def __init__(
        self,
        world: Communicator | Swarm | None,
        parameters: Named,
        *,
        inner_steps: int,
        lr: float = 0.7,
        momentum: float | None = 0.9,
        nesterov: bool = True,
        fragments: int = 1,
        overlap: int = 0,
        mixing: float = 1.0,
        compression: str | None = None,
        groups: int | str | Sequence[Sequence[int]] | None = None,
        group: Communicator | None = None,
        timeout_s: float | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._rule = OuterRule(lr, momentum, nesterov)
        self._schedule = FragmentSchedule(inner_steps, fragments, overlap)
        self._mixing = mixing
        check_rule(self._rule)
        if isinstance(mixing, bool) or not isinstance(mixing, (int, float)) or not 0 < mixing <= 1:
            raise UsageError(f"mixing must be above 0 and at most 1, not {mixing!r}")
        if compression is not None:
            compression_of(compression)
        self._members = _groups_of(groups, world, group)
        named = dict(pairs_of(parameters))
        lent = flatten_all(named)
        check_writable(lent)
        layers = layers_of(lent)
        check_schedule(self._schedule, layers)
        self._facts = repr((self._rule, self._schedule, mixing, compression, self._members))
        self._described = {name: each.described() for name, each in lent.items()}
        self._fragments = fragments_of(layers, fragments)
        self._values = [np.empty(each.elements, each.dtype) for each in self._fragments]
        self._velocities = [np.zeros_like(each) if momentum != 0 else None for each in self._values]
        self._changes = [np.zeros_like(each) for each in self._values]
        for fragment, values in zip(self._fragments, self._values, strict=True):
            read(fragment, lent, values)
        self._world, self._weight = world, 1.0
        self.parameters = named
        self.steps = 0
        self._due: dict[int, int] = {}  # by fragment on its way, the step after which its average is used
        self._is_here: set[int] = set()  # the fragments of these that have arrived
        self._averages: Averages | SwarmAverages | None = None
        self.group: Communicator | None = None
        self._between: Communicator | None = None
        if isinstance(world, Communicator):
            self._meet(world, named, lent, compression, timeout_s)
            if state is not None:
                self.load_state_dict(state)
        else:
            self.group = None if group is None else group.dup()
            try:
                self._enter(world, lent, compression, timeout_s, state)
            except UnisonoError:
                self.close()
                raise

    def _meet(
        self,
        world: Communicator,
        named: Named,
        lent: Mapping[str, FlatArray],
        compression: str | None,
        timeout_s: float | None,
    ) -> None:
        """Check that all ranks have the same arguments and parameters, and open the communicators of groups."""
        check_names(world, [self._facts])
        verify_sync(world, named)
        index = next(index for index, ranks in enumerate(self._members) if world.rank in ranks)
        self._weight = len(self._members[index]) * len(self._members) / world.size
        self.group = world.subgroup(self._members[index])
        self._between = world.split(0 if self.group.rank == 0 else None)
        pieces = [_pieces_of(fragment, lent) for fragment in self._fragments]
        if self._between is not None:
            self._averages = Averages(self._between, self._changes, pieces, compression, timeout_s)

    def _enter(
        self,
        swarm: Swarm | None,
        lent: Mapping[str, FlatArray],
        compression: str | None,
        timeout_s: float | None,
        state: Mapping[str, Any] | None,
    ) -> None:
        """Get the outer parameters and the number of steps that the members of a swarm share."""
        shared = SharedParameters(f"{self._facts} of {self._described}", self._values, self._velocities)
        if self.group is not None:
            check_names(self.group, [shared.facts])

        def enter() -> None:
            if swarm is not None:
                averages = SwarmAverages(swarm, self._changes, shared, self._apply, compression, timeout_s)
                self._averages = averages
                if state is not None:
                    self._load(state)
                self.steps = averages.begin(self.steps)

        self._led(enter)
        self.parameters = {**self.parameters, **self._taken_over(lent)}

    def _entered_again(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Become a member of the swarm again, with the parameters and the number of steps of the others."""
        lent = {name: flatten(named[name], name) for name in self._described}
        averages = self._averages

        def enter() -> None:
            if isinstance(averages, SwarmAverages):
                self.steps = averages.enter_again()

        self._led(enter)
        return {**named, **self._taken_over(lent)}

    def _taken_over(self, lent: Mapping[str, FlatArray]) -> dict[str, Any]:
        """Let parameters be those that the members of a swarm share; return them by name."""
        if self.group is not None:
            self.steps = int(self.group.broadcast(np.array([self.steps]), 0)[0])
            for values in self._values:
                self.group.broadcast(values, 0, out=values)
        self._due.clear()
        self._is_here.clear()
        for fragment, values in zip(self._fragments, self._values, strict=True):
            write(fragment, lent, values)
        return {name: each.put_back() for name, each in lent.items()}

    def __enter__(self) -> DiLoCo:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        whole = self._world if isinstance(self._world, Communicator) else self.group
        if error is not None and whole is not None:
            whole.abort(f"rank {whole.rank} has left its {type(self).__name__} with the error {error!r}")
        self.close()

    def step(self, parameters: Named) -> dict[str, Any]:
        """Count a step of the inner optimizer, and use and start the averages that are due after it.

        A member of a swarm that has been left behind, or has lost the quorum, enters again. Then it has all parameters
        and `steps` from the others, as a newcomer has.

        Args:
            parameters: the present parameters, with the names, shapes and dtypes of the start. They are overwritten if
                an average is due.

        Returns:
            The arrays by name. An array of JAX or a ``tf.Tensor`` that has changed is a new one. In a step without an
            average, a dict is returned as it is.

        Raises:
            UsageError: these are other parameters.
            MismatchError: the ranks have made different numbers of steps, or hold other outer parameters.
            PeerLostError, CollectiveTimeoutError, AbortedError: an average failed.
            RendezvousError: this process could not enter a swarm again within `rendezvous_timeout_s`.
        """
        named = parameters if isinstance(parameters, dict) else dict(pairs_of(parameters))
        self.steps += 1
        self.parameters = {}
        due = [index for index, step in self._due.items() if step <= self.steps]
        leaving = self._schedule.leaving(self.steps)
        if not due and leaving is None:
            return named
        named = dict(named)
        try:
            for index in due:
                named.update(self._arrive(index, named, self._mixing))
            if leaving is not None:
                self._leave(leaving, named)
                if not self._schedule.overlap:
                    named.update(self._arrive(leaving, named, self._mixing))
        except (LeftBehindError, QuorumLostError):
            return self._entered_again(named)
        return named

    def synchronize(self, parameters: Named) -> dict[str, Any]:
        """Average all parameters now, so that all ranks hold the same bits. All ranks call it.

        Training may continue after it. Argument, result and errors are those of `step`.
        """
        named = dict(pairs_of(parameters))
        try:
            for index in list(self._due):
                named.update(self._arrive(index, named, self._mixing))
            for index in range(len(self._fragments)):
                self._leave(index, named, len(self._fragments) - 1 - index)
            for index in range(len(self._fragments)):
                named.update(self._arrive(index, named, 1.0))
        except (LeftBehindError, QuorumLostError):
            return self._entered_again(named)
        return named

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank as numbers and numpy arrays, without the parameters. All ranks call it.

        It waits for the averages that are on their way.
        """
        with contextlib.suppress(LeftBehindError, QuorumLostError):  # the next step enters the swarm again
            for index in list(self._due):
                self._receive(index)
        return {
            "facts": self._facts,
            "rank": self._own_name,
            "steps": self.steps,
            "values": [each.copy() for each in self._values],
            "velocities": [None if each is None else each.copy() for each in self._velocities],
            "compression": [{kind: x.copy() for kind, x in state.items()} for state in self._states],
            "due": dict(self._due),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, of which each rank passes its own, with the parameters that belong to it.

        A rank may pass the state of another rank. Its residuals of compression then begin at zero.

        Raises:
            UsageError: the state is that of other arguments or parameters, or these are members of a swarm.
        """
        if not isinstance(self._world, Communicator):
            raise UsageError("members of a swarm train already: pass the state to the constructor, as state=")
        self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        if missing := [name for name in _OF_STATE if name not in state]:
            raise UsageError(f"the state has no {', '.join(missing)}: pass one that state_dict() has returned")
        shapes = [(each.size, each.dtype) for each in self._values]
        if state["facts"] != self._facts or [(each.size, each.dtype) for each in state["values"]] != shapes:
            raise UsageError(
                f"the state belongs to other arguments or parameters: {state['facts']}, and these are {self._facts}"
            )
        for index in list(self._due):
            self._receive(index)
        self.steps = state["steps"]
        self._due = dict(state["due"])
        self._is_here = set(self._due)
        _copy_all(self._values, state["values"])
        _copy_all(self._velocities, state["velocities"])
        for own, saved in zip(self._states, state["compression"], strict=False):
            for kind, x in own.items():
                x[...] = saved[kind] if state["rank"] == self._own_name or kind in SHARED_STATE else 0

    def nbytes_sent(self) -> int:
        """Return the bytes that this rank has sent so far for averages between groups."""
        return self._averages.nbytes_sent() if self._averages is not None else 0

    def close(self) -> None:
        """Close the communicators. Averages on their way end with an error. A second call does nothing."""
        if self._averages is not None:
            self._averages.close()
        for each in (self._between, self.group):
            if each is not None:
                each.close()

    # --- the way of a fragment --------------------------------------------------------------------------------------

    @property
    def _own_name(self) -> int | str:
        if isinstance(self._world, Communicator):
            return self._world.rank
        return "a rank of its host" if self._world is None else self._world.me.name

    @property
    def _states(self) -> list[dict[str, Array]]:
        return self._averages.states if self._averages is not None else []

    def _lent(self, fragment: Layer, named: Mapping[str, Any]) -> dict[str, FlatArray]:
        """Return the parameters of a fragment as flat arrays, after checking all parameters."""
        missing = self._described.keys() - named.keys()
        if missing:
            raise UsageError(f"the parameters lack {min(missing)!r}: pass those of the start")
        lent = {name: flatten(named[name], name) for name, _, _ in fragment.parts}
        for name, each in lent.items():
            if each.described() != self._described[name]:
                raise UsageError(f"{name!r} is {each.described()}, and was {self._described[name]} at the start")
        check_writable(lent)
        return lent

    def _leave(self, index: int, named: Mapping[str, Any], following: int = 0) -> None:
        """Start the average of a fragment's change; more averages follow in the same step."""
        fragment, values, changes = self._fragments[index], self._values[index], self._changes[index]
        change(fragment, self._lent(fragment, named), values, changes)
        if self._weight != 1:
            changes *= changes.dtype.type(self._weight)
        self._due[index] = self.steps + self._schedule.overlap
        if self._averages is not None:
            number = Turn(self.steps, index, following).number(len(self._fragments))
            self._averages.start(index, number, checksum(values))

    def _receive(self, index: int) -> None:
        """Wait for the average of a fragment on its way, and apply it to the outer parameters."""
        if index not in self._is_here:
            (self._receive_of_ranks if isinstance(self._world, Communicator) else self._receive_of_swarm)(index)
            self._is_here.add(index)

    def _receive_of_ranks(self, index: int) -> None:
        """Wait for the average of a fragment, and apply it. A failure drops it."""
        try:
            if self._averages is not None:
                self._averages.wait(index)
            if self.group is not None and self.group.size > 1:
                self.group.broadcast(self._changes[index], 0, out=self._changes[index])
        except UnisonoError:
            del self._due[index]
            raise
        self._apply(index, len(self._members))

    def _receive_of_swarm(self, index: int) -> None:
        """Wait until the member of the swarm has applied the average of a fragment, and get the outer parameters."""
        averages = self._averages
        self._led(lambda: None if averages is None else averages.wait(index))
        if self.group is not None:
            self.group.broadcast(self._values[index], 0, out=self._values[index])

    def _led(self, act: Callable[[], None]) -> None:
        """Run `act`, whose work only the first rank of a host does.

        If it fails there, all ranks of the host raise the error.
        """
        failure: UnisonoError | None = None
        try:
            act()
        except UnisonoError as error:
            failure = error
        if self.group is not None and self.group.size > 1:
            told = self.group.broadcast_object(None if failure is None else (type(failure), failure.message), 0)
            if failure is None and told is not None:
                kind, text = told
                failure = kind(f"the first rank of this host could not go on in the swarm: {text}")
        if failure is not None:
            raise failure

    def _arrive(self, index: int, named: Mapping[str, Any], mixing: float) -> dict[str, Any]:
        """Move the parameters of a fragment to the outer parameters. Return the parameters of the fragment by name."""
        lent = self._lent(self._fragments[index], named)
        self._receive(index)
        self._is_here.remove(index)
        del self._due[index]
        if mixing == 1:
            write(self._fragments[index], lent, self._values[index])
        else:
            mix(self._fragments[index], lent, self._values[index], mixing)
        return {name: each.put_back() for name, each in lent.items()}

    def _apply(self, index: int, count: int) -> None:
        """Apply the average of `count` changes of a fragment to the outer parameters."""
        self._rule.among(count).apply(self._values[index], self._velocities[index], self._changes[index])


class BlockMomentum(DiLoCo):
    """Training in blocks of steps, with blockwise model-update filtering (BMUF): an average with a block momentum.

    It is `DiLoCo` with the defaults of Chen and Huo, whose Nesterov block momentum is DiLoCo's outer optimizer.

    Args:
        world, parameters, inner_steps: as in `DiLoCo`; a block has `inner_steps` steps.
        momentum: the block momentum; by default 1 - 1/n for n groups, where each rank that trains alone is a group.
            On a swarm, n is the number of members whose changes are averaged.
        lr: the block learning rate.
        nesterov: False for the classical block momentum of the paper.
        options: further arguments of `DiLoCo`.

    Raises:
        UsageError, MismatchError: as in `DiLoCo`.
    """

    def __init__(
        self,
        world: Communicator | Swarm,
        parameters: Named,
        *,
        inner_steps: int,
        momentum: float | None = None,
        lr: float = 1.0,
        nesterov: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            world, parameters, inner_steps=inner_steps, lr=lr, momentum=momentum, nesterov=nesterov, **options
        )


class LocalSGD(DiLoCo):
    """Training in which ranks take `inner_steps` steps alone, and then average their parameters.

    It is `DiLoCo` with an outer optimizer that adds the average change as it is.

    Args:
        world, parameters, inner_steps: as in `DiLoCo`.
        options: further arguments of `DiLoCo`, except those of the outer optimizer.

    Raises:
        UsageError, MismatchError: as in `DiLoCo`.
    """

    def __init__(self, world: Communicator | Swarm, parameters: Named, *, inner_steps: int, **options: Any) -> None:
        super().__init__(
            world, parameters, inner_steps=inner_steps, **{"lr": 1.0, "momentum": 0.0, "nesterov": False, **options}
        )


def _groups_of(groups: Any, world: Communicator | Swarm | None, group: Communicator | None) -> list[list[int]]:
    """Return the ranks of each group; none for a swarm."""
    if isinstance(world, Communicator) and group is not None:
        raise UsageError("group is for a swarm: pass groups, such as groups='hosts'")
    if not isinstance(world, Communicator):
        from unisono import Swarm

        if group is not None:
            if not isinstance(group, Communicator):
                raise UsageError(f"group must be a Communicator, not {type(group).__name__}")
            if (world is None) != (group.rank > 0):
                raise UsageError("rank 0 of the group passes the swarm, and the others pass None")
        if not isinstance(world, Swarm) and (world is not None or group is None):
            raise UsageError(f"world must be a Communicator or a Swarm, not {type(world).__name__}")
        if groups is not None:
            raise UsageError(
                "groups need ranks that stay, and the members of a swarm change: pass group, that of a host"
            )
        return []
    if groups is None:
        return [[rank] for rank in range(world.size)]
    if groups == "hosts":
        return [list(ranks) for ranks in world.hosts]
    if isinstance(groups, str):
        raise UsageError(f'groups must be "hosts", a number, or the ranks of each group, not {groups!r}')
    return members_of(groups, world.size)


def _pieces_of(fragment: Layer, lent: Mapping[str, FlatArray]) -> list[Piece]:
    """Return where the parameters lie in the memory of a fragment."""
    stops = list(itertools.accumulate(count for _, _, count in fragment.parts))
    return [
        Piece(stop - count, stop, columns_of(lent[name].shape))
        for stop, (name, _, count) in zip(stops, fragment.parts, strict=True)
        if count
    ]


def _copy_all(arrays: Sequence[Array | None], saved: Sequence[Array | None]) -> None:
    for array, other in zip(arrays, saved, strict=True):
        if array is not None and other is not None:
            array[...] = other
