"""Elastic training: it goes on when ranks are lost, and with more ranks when processes join.

Theory of operation
-------------------
The program keeps all that must survive in a `State`, and calls `State.commit` from time to time, on all ranks at the
same place. `run` calls the function of the program, and calls it again after each change of the ranks:

1. A rank is lost. The calls of the others raise `HorovodInternalError`. `run` restores the state of the last commit and
   shrinks the communicator to the survivors.
2. Processes wait to join. `commit` admits them by `grow`, and raises `HostsUpdatedInterrupt` if there were any. The
   state of the commit is kept.
3. In both cases the calls of the job begin anew on the new communicator, and rank 0 copies its state to all ranks.
   Rank 0 is always an old rank, because ranks that join come behind the others.

A process that `unisono run --max-restarts` has started in place of a lost rank runs the same program: its `init` waits
until it is admitted, and its first `State.sync` gets the state of rank 0.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from unisono import Communicator
from unisono.compat.horovod import job
from unisono.compat.horovod.errors import (
    ArgumentError,
    DuplicateNameError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    NameMismatchError,
    StalledError,
)
from unisono.compat.horovod.objects import broadcast_object
from unisono.errors import UnisonoError, UsageError

Result = TypeVar("Result")

# Errors of the program, which would come again.
_OF_PROGRAM = (ArgumentError, DuplicateNameError, NameMismatchError, StalledError)


class State:
    """The base class of states that survive a change of the ranks.

    Args:
        bcast_object: returns the object of rank 0 on all ranks.
        get_rank: not used; subclasses of Horovod's states pass it.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Add functions to call after each change of the ranks, for example to adapt the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to other ranks, and call the reset callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state, and admit processes that wait to join. All ranks call it at the same place.

        Raises:
            HostsUpdatedInterrupt: processes have joined; `run` catches it.
            HorovodInternalError: a rank was lost; `run` catches it, too.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Admit processes that wait to join. All ranks call it at the same place. Raises as `commit` does."""
        if _admitted():
            raise HostsUpdatedInterrupt

    def save(self) -> None:
        """Save the state in the memory of this rank."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Replace the state by that of rank 0. All ranks call it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to other ranks."""


class ObjectState(State):
    """A state of Python objects, which are its attributes: ``ObjectState(epoch=0, batch=0)``.

    A subclass may have further parts, such as variables, which it saves, restores and copies in its own way.

    Args:
        objects: the objects by name. They must be objects that `copy.deepcopy` and pickle can copy.
    """

    def __init__(self, **objects: Any) -> None:
        super().__init__(broadcast_object, job.rank)
        self._saved = objects
        self._write()
        self._saved_parts = self._save_parts()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def save(self) -> None:
        self._saved_parts = self._save_parts()
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}

    def restore(self) -> None:
        self._restore_parts(self._saved_parts)
        self._write()

    def sync(self) -> None:
        self._sync_parts()
        self._saved_parts = self._save_parts()
        if self._saved:
            self._saved = self._bcast_object({name: getattr(self, name) for name in self._saved})
            self._write()

    def _save_parts(self) -> Any:
        """Return a copy of the parts, with which `_restore_parts` returns them to their present state."""

    def _restore_parts(self, saved: Any) -> None:
        """Return the parts to a state that was saved."""

    def _sync_parts(self) -> None:
        """Replace the parts by those of rank 0. All ranks call it."""

    def _write(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))


def run(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a function ``train(state, …)`` so that it is called again after each change of the ranks.

    The function continues from the values in `state`. Under `unisono run` it needs ``--keep-going``, or
    ``--max-restarts``.

    Raises:
        HorovodInternalError: no rank was lost, but the program made an error, such as different names on two ranks.
        RendezvousError: as in `Communicator.shrink`.
    """

    @functools.wraps(function)
    def train(state: State, *arguments: Any, **options: Any) -> Result:
        is_same = False
        while True:
            try:
                if not is_same:
                    state.sync()
                return function(state, *arguments, **options)
            except HorovodInternalError as error:
                if isinstance(error, _OF_PROGRAM):
                    raise
                survivors = _survivors(error)
                state.restore()
                job.adopt(survivors)
                is_same = False
            except HostsUpdatedInterrupt as interrupt:
                is_same = interrupt.skip_sync
            state.on_reset()

    return train


def _survivors(error: HorovodInternalError) -> Communicator:
    """Return the communicator of the ranks that are left; raise `error` if none was lost."""
    try:
        return job.running().world.shrink()
    except UsageError:
        raise error from None


def _admitted() -> bool:
    """Admit processes that wait to join, on all ranks, and return whether there were any."""
    world = job.running().world
    try:
        grown = world.grow()
    except UsageError:  # the job has no place where processes could wait
        return False
    except UnisonoError as error:  # a rank was lost
        job.raise_explained(error)
    if grown is world:
        return False
    job.adopt(grown)
    return True
