"""One call of a swarm: what a member contributes, and the result once it has it.

Theory of operation
-------------------
Call k of view v has two phases. In the first, the members of v make the collective on the communicator of v, into
memory that the program does not see. In the second, they make a tiny allreduce. A member returns from call k only after
the second phase. So if any member has returned, every member of v has the result of the first phase.

If a member is lost, the others choose view v+1 (agreement.py). Before, each says the last call of which it has the
result. If one has the result of call k, the others get it from there, and view v+1 goes on with call k+1. Nobody can
have returned otherwise, so view v+1 repeats call k, from the arrays that the program has passed. Nothing has written
them meanwhile.

Example: A, B and C sum in call 7, and C dies.

- If it dies early, A and B have no result. View 2 is (A, B), and its next call is 7: they sum their two arrays anew.
- If it dies when A has the sum of all three and B has not, view 2 goes on with call 8. Before A and B choose it, A
  sends the sum to B. Both return it, and name A, B and C as contributors.
- If A has returned, B has the sum too, because A has ended its second phase, in which B takes part only with the sum.

The second phase also carries for how long members have made calls in this view (settling.py), and the candidate for the
next view, if newcomers wait who have met all members. If all members pass the same one, they change to that view
between the two calls, and no call is repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from unisono.collectives.arrays import adapters
from unisono.errors import MismatchError, UsageError

if TYPE_CHECKING:
    from unisono.collectives.communicator import Communicator

_TOKEN_NBYTES = 7  # so that its negative is an int64 too
_MOST_SHOWN = 8


class SwarmCall:
    """A call of this member, until it returns.

    Args:
        name: the collective, for errors.
        make: makes the collective on a communicator, within a time limit in seconds, and returns the result.
        like_result: ``like_result(size)`` returns arrays of the result's shapes and dtypes in a view of `size` members.
        is_state: whether it is a call of `Swarm.state`, after which newcomers may enter.

    Attributes:
        number: the number of the call; 0 before it has one.
        result: the result, once `has_result`.
        contributors: the members whose contributions the result has.
        attempts: how often it has been made.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[Communicator, float], Any],
        like_result: Callable[[int], Any],
        *,
        is_state: bool = False,
    ) -> None:
        self.name = name
        self.is_state = is_state
        self.make = make
        self.like_result = like_result
        self.number = 0
        self.result: Any = None
        self.has_result = False
        self.contributors: tuple[Any, ...] = ()
        self.attempts = 0

    def adopt(self, comm: Communicator, holder: int, size: int, timeout_s: float) -> Any:
        """Return the result, which the rank `holder` has. All ranks of `comm` call it; the view had `size` members."""
        return comm.broadcast(self.result if self.has_result else self.like_result(size), holder, timeout_s=timeout_s)


class SecondPhase(NamedTuple):
    """The result of the second phase of a call, which is equal on all members.

    Attributes:
        is_boundary: whether all members pass the same candidate, and not the empty one.
        least_age_s: the least age that a member passes.
    """

    is_boundary: bool
    least_age_s: float


def second_phase(comm: Communicator, candidate: str, age_s: float, timeout_s: float) -> SecondPhase:
    """Make the second phase of a call with the candidate and the age of the view that this member passes."""
    token = int.from_bytes(hashlib.sha256(candidate.encode()).digest()[:_TOKEN_NBYTES], "big") if candidate else 0
    passed = np.array([token, -token, int(age_s)], np.int64)
    lowest, negative, least_age_s = comm.allreduce(passed, "min", timeout_s=timeout_s).tolist()
    return SecondPhase(bool(token) and lowest == token == -negative, float(least_age_s))


class Leaves:
    """The arrays of a value, which is an array, or a list, tuple or dict of such values.

    Args:
        value: the value.
        name: its name, for errors.

    Attributes:
        arrays: the arrays; those of a dict in the order of its keys.
        names: their names, such as ``x['a'][0]``.

    Raises:
        UsageError: there is no array in it, another object is, or a dict has keys of different types.

    >>> leaves = Leaves({"b": [np.ones(1)], "a": (np.ones(1), np.ones(1))})
    >>> leaves.names, leaves.value_of([20, 30, 10])
    (["x['a'][0]", "x['a'][1]", "x['b'][0]"], {'a': (20, 30), 'b': [10]})
    """

    def __init__(self, value: Any, name: str = "x") -> None:
        self._value, self._name = value, name
        self._has_keys = False
        self.arrays: list[Any] = []
        self.names: list[str] = []
        self._collect(value, name)
        if not self.arrays:
            raise UsageError("there is no array to pass to the other members: pass one, or a list or dict of arrays")

    @property
    def form(self) -> str:
        """The names of all arrays, if one is in a dict; else the empty text, because their number and order say all."""
        return "\n".join(self.names) if self._has_keys else ""

    def check_out(self, out: Any) -> Leaves:
        """Return the arrays of `out`, which are to receive a result like these arrays.

        Raises:
            UsageError: they cannot, because they have another form, shape or dtype, or are read-only.
        """
        targets = Leaves(out, "out")
        if len(targets.arrays) != len(self.arrays):
            raise UsageError(f"out has {len(targets.arrays)} arrays, and the result {len(self.arrays)}")
        expected = [f"out{name.removeprefix(self._name)}" for name in self.names]
        if other := [pair for pair in zip(targets.names, expected, strict=True) if pair[0] != pair[1]]:
            raise UsageError(
                f"out must have the form of {self._name}: it has {other[0][0]} in the place of {other[0][1]}"
            )
        for array, name, target, target_name in zip(
            self.arrays, self.names, targets.arrays, targets.names, strict=True
        ):
            source = adapters.view(array, name)
            written = adapters.adapter_of(target, target_name).view_to_write(target, target_name)
            if (written.shape, written.dtype) != (source.shape, source.dtype):
                raise UsageError(
                    f"{target_name} is {written.dtype}{list(written.shape)}, and {name} {source.dtype}"
                    f"{list(source.shape)}: pass an array of the same shape and dtype"
                )
            if not written.flags.writeable:
                raise UsageError(f"{target_name} is read-only, so it cannot receive the result")
        return targets

    def value_of(self, arrays: Sequence[Any]) -> Any:
        """Return a value of the same form with these arrays."""
        rest = iter(arrays)
        return self._rebuilt(self._value, lambda: next(rest))

    def _collect(self, value: Any, name: str) -> None:
        if isinstance(value, Mapping):
            self._has_keys = True
            for key in _ordered(value):
                self._collect(value[key], f"{name}[{key!r}]")
        elif type(value) in (list, tuple):
            for number, each in enumerate(value):
                self._collect(each, f"{name}[{number}]")
        else:
            adapters.adapter_of(value, name)
            self.arrays.append(value)
            self.names.append(name)

    def _rebuilt(self, value: Any, take: Callable[[], Any]) -> Any:
        if isinstance(value, Mapping):
            return {key: self._rebuilt(value[key], take) for key in _ordered(value)}
        if type(value) in (list, tuple):
            return type(value)(self._rebuilt(each, take) for each in value)
        return take()


def _ordered(value: Mapping[Any, Any]) -> list[Any]:
    try:
        return sorted(value)
    except TypeError:
        raise UsageError(
            "the keys of a dict must be of one type, because members pass its arrays in their order"
        ) from None


class Forms:
    """Checks that the members pass values of one form: without it, arrays of different keys would be combined.

    A communicator checks a form once, after the first call with it. The check comes after the call because a wrong
    argument must end the call before anything is sent. No member has used the result yet. A member that has checked
    another form before makes another call than the others, and the communicator reports the mismatch.
    """

    def __init__(self) -> None:
        self._comm: Communicator | None = None
        self._checked: set[str] = set()

    def check(self, form: str, comm: Communicator, timeout_s: float) -> None:
        """Check the form of a value with the other members; raises MismatchError, with the member that differs."""
        if self._comm is not comm:
            self._comm, self._checked = comm, set()
        if not form or form in self._checked:
            return
        own = hashlib.sha256(form.encode()).digest()[:_TOKEN_NBYTES]
        tokens = comm.allgather(np.array([int.from_bytes(own, "big")], np.int64), timeout_s=timeout_s).tolist()
        usual = max(tokens, key=lambda token: (tokens.count(token), -tokens.index(token)))
        if odd := [rank for rank, token in enumerate(tokens) if token != usual]:
            peer = comm.rank if comm.rank in odd else odd[0]
            raise MismatchError(
                f"rank {peer} passes arrays of other keys than the others; on rank {comm.rank} they are"
                f" {', '.join(form.splitlines()[:_MOST_SHOWN])}",
                peer=peer,
            )
        self._checked.add(form)


def delivered(leaves: Leaves, results: Sequence[Any], out: Any = None, targets: Leaves | None = None) -> Any:
    """Return the results in the form of the caller's arrays, in `out` if there is one, whose arrays are `targets`."""
    if targets is None:
        return leaves.value_of(results)
    for target, result in zip(targets.arrays, results, strict=True):
        adapters.adapter_of(target, "out").view_to_write(target, "out")[...] = adapters.view(result, "the result")
    return out


def repeated(array: Any, size: int) -> Any:
    """Return an array with `size` times the rows of `array`, in its kind."""
    adapter = adapters.adapter_of(array, "x")
    return adapter.wrap(np.concatenate([adapter.view(array, "x")] * size), array)
