"""Persistent calls: `plan` checks and plans a collective or a message once, and each use makes it again.

Used by: `Communicator`, which inherits from `PersistentCalls`. Collectives among neighbours have a `plan` of their own
in `neighbours.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from unisono.algorithms.ir.contracts import CONTRACTS, VECTOR_CALLS, Contract, Cut
from unisono.collectives.api.point_to_point import Messages, tag_of
from unisono.collectives.api.vector_collectives import VectorCollectives
from unisono.collectives.arrays.device_detection import on_device
from unisono.collectives.calls.arguments import CallArguments, OpArgument, checked_flag, checked_integer
from unisono.collectives.calls.checking import check_lasting
from unisono.collectives.calls.message_handoff import ReceiveFromNobody, SendToNobody
from unisono.collectives.calls.planning import AlgorithmRequest, algorithm_request
from unisono.collectives.calls.row_blocks import RECEIVED, ROWS, SENT, Blocks, checked_blocks
from unisono.errors import UsageError
from unisono.foundation.near_names import did_you_mean
from unisono.operations import Op
from unisono.transports.contracts.wildcards import MOST_TAG

if TYPE_CHECKING:
    from unisono.collectives.arrays.typing import ArrayOrBuffer

# The persistent messages, with the names of their arguments: the first two, an array and a rank, must not be missing.
_MESSAGES = {"send": ("x", "dest", "tag", "synchronous"), "recv": ("out", "source", "tag")}

# The names of the counts and displacements of the shares that a method reads from `x`, and that it writes to `out`.
_READ = {"scatterv": ROWS, "alltoallv": SENT}
_WRITTEN = {"allgatherv": ROWS, "gatherv": ROWS, "alltoallv": RECEIVED}

# Counts and displacements by the names of their arguments; None for those that are missing.
_Rows: TypeAlias = "Mapping[str, Sequence[int] | None]"


class PersistentCalls(VectorCollectives, Messages):
    """The method `plan` of a communicator."""

    def plan(
        self,
        collective: str,
        x: ArrayOrBuffer | Sequence[ArrayOrBuffer] | None = None,
        *,
        op: str | Op | None = None,
        root: int | None = None,
        out: ArrayOrBuffer | Sequence[ArrayOrBuffer] | None = None,
        counts: Sequence[int] | None = None,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        displacements: Sequence[int] | None = None,
        send_displacements: Sequence[int] | None = None,
        recv_displacements: Sequence[int] | None = None,
        counts_at_root: bool = False,
        algorithm: str | None = None,
        reproducible: bool = False,
        accumulate: str | None = None,
        timeout_s: float | None = None,
        **message: Any,
    ) -> Callable[..., Any]:
        """Return a persistent call: it is checked and planned once, and each use makes it again on the same arrays.

        Using it is the same as calling the method named `collective` with these arguments. Each use reads the current
        elements of `x`. It overwrites and returns `out`, or the array that `plan` made for the result. With
        ``wait=False`` it returns a `Work`, which must end before the next use. `plan` itself is not a call: ranks may
        mix persistent calls and methods, if all of them make the same calls in the same order. But on GPU arrays, all
        ranks use the same persistent call. A persistent call keeps its arrays alive, and only one thread at a time may
        use it.

        The arguments and defaults are those of the method, also displacements and `counts_at_root`. But an `x` that is
        read must be contiguous, and in C order if its rows are distributed over the ranks. Displacements need arrays in
        host memory.

        ``plan("send", x, dest=…, tag=…)`` and ``plan("recv", out=…, source=…, tag=…)`` are persistent messages. In a
        group, they are messages of the group.

        Raises:
            UsageError: there is no such collective, or the call is wrong. Using the persistent call of a closed
                communicator raises it too.
            NoAlgorithmError: there is no algorithm of this name, or it cannot carry out this call.

        >>> import numpy as np, unisono as un
        >>> def accumulate(world):
        ...     x = np.ones(3)
        ...     double = world.plan("allreduce", x, out=x)
        ...     return [double().tolist() for _ in range(3)]
        >>> un.launch(accumulate, 2)[0]
        [[2.0, 2.0, 2.0], [4.0, 4.0, 4.0], [8.0, 8.0, 8.0]]
        """
        rows = {
            "counts": counts,
            "send_counts": send_counts,
            "recv_counts": recv_counts,
            "displacements": displacements,
            "send_displacements": send_displacements,
            "recv_displacements": recv_displacements,
        }
        if collective in _MESSAGES:
            options = {
                "op": op,
                "root": root,
                "algorithm": algorithm,
                "accumulate": accumulate,
                "reproducible": reproducible or None,
                "counts_at_root": counts_at_root or None,
            }
            return self._plan_message(collective, {"x": x, "out": out, **options, **rows, **message}, timeout_s)
        if message:
            raise UsageError(f"only a message has {' and '.join(message)}: leave it out of {collective}")
        if checked_flag(counts_at_root, "counts_at_root"):
            rows["counts"] = self._counts_at_root(collective, counts, root)
        request = algorithm_request(algorithm, reproducible, accumulate)
        arguments = CallArguments(_registered_name(collective), x, out, op, root, None, request)
        return self._plan_collective(collective, arguments, rows, timeout_s)

    def _plan_collective(
        self, collective: str, arguments: CallArguments, rows: _Rows, timeout_s: float | None
    ) -> Callable[..., Any]:
        """Return the persistent call of the method `collective`.

        Args:
            collective: the method.
            arguments: those of `plan`; their counts are in `rows`.
            rows: the counts and displacements.
            timeout_s: that of `plan`.
        """
        contract = CONTRACTS[arguments.collective]
        root = _checked_root(collective, contract, arguments.root)
        counts = _counts_of(collective, rows)
        op = _checked_op(collective, contract, arguments)
        x = arguments.x if contract.input is not Cut.SHARES or contract.has_input(self.rank, root or 0) else None
        arguments = arguments._replace(x=x, op=op, root=root, counts=counts)
        read, written = self._planned_shares(collective, root, rows)
        if read is None and written is None:
            return self._persistent(arguments, x, timeout_s)
        return self._persistent_displaced(arguments, read, written, timeout_s)

    def _plan_message(self, name: str, arguments: Mapping[str, Any], timeout_s: float | None) -> Callable[..., Any]:
        """Return the persistent `send` or `recv` of these arguments, which have been checked.

        Args:
            name: the message.
            arguments: those of `plan` by their names; None for those that are missing.
            timeout_s: that of `plan`.

        Raises:
            UsageError: an argument is wrong or missing, or not one of this message.
        """
        names = _MESSAGES[name]
        array_name, peer_name, *_ = names
        passed = {key: value for key, value in arguments.items() if value is not None}
        if missing := {array_name, peer_name} - set(passed):
            raise UsageError(f"a persistent {name} needs {' and '.join(sorted(missing))}: pass it by name")
        if refused := set(passed) - set(names):
            raise UsageError(f"a persistent {name} takes no {' and no '.join(sorted(refused))}: leave it out")
        limit_s, array, peer, tag = (
            self._limit_s(timeout_s),
            passed[array_name],
            passed[peer_name],
            passed.get("tag", 0),
        )
        if name == "send":
            self._peer_of(peer, peer_name)
            checked_integer(tag, "tag", 0, MOST_TAG)
            SendToNobody(array)  # checks the array
            synchronous = checked_flag(passed.get("synchronous", False), "synchronous")
            return partial(self.send, array, peer, tag, synchronous=synchronous, timeout_s=limit_s)
        self._source_of(peer)
        tag_of(tag)
        ReceiveFromNobody(array)
        return partial(self.recv, array, peer, tag, timeout_s=limit_s)

    def _counts_at_root(self, collective: str, counts: Sequence[int] | None, root: int | None) -> Sequence[int]:
        """Return the counts of a call with ``counts_at_root=True``, as `CallArguments.counts` takes them."""
        if collective not in {"gatherv", "scatterv"}:
            raise UsageError(f"{collective} takes no counts_at_root: leave it out")
        return self._counts(counts, root or 0, counts_at_root=True)

    def _planned_shares(self, collective: str, root: int | None, rows: _Rows) -> tuple[Blocks | None, Blocks | None]:
        """Return the shares that a persistent call reads and writes; None for those that follow each other.

        Args:
            collective: the method.
            root: its root; None if it has none.
            rows: the counts and displacements by the names of the arguments.

        Raises:
            UsageError: the method takes no such displacements, or they are wrong.
        """
        read, written = _READ.get(collective), _WRITTEN.get(collective)
        taken = {names[1] for names in (read, written) if names is not None}
        refused = [name for _, name in (ROWS, SENT, RECEIVED) if rows[name] is not None and name not in taken]
        if refused:
            raise UsageError(f"{collective} takes no {' and no '.join(refused)}: leave it out")
        if root is not None and self.rank != root:
            return None, None
        return self._shares_of(read, rows), self._shares_of(written, rows)

    def _shares_of(self, names: tuple[str, str] | None, rows: _Rows) -> Blocks | None:
        if names is None:
            return None
        counts, displacements = (rows[name] for name in names)
        if counts is None or displacements is None:
            return None
        return checked_blocks(names, counts, displacements, self.size)

    def _persistent(self, arguments: CallArguments, x: Any, timeout_s: float | None) -> Callable[..., Any]:
        """Return the persistent call of these arguments, which reads the memory of the caller's `x`."""
        call = self._checker.check_one(arguments, self._check_usable)
        check_lasting(call.checked, x)
        return call.persist(self._limit_s(timeout_s))

    def _persistent_displaced(
        self, arguments: CallArguments, read: Blocks | None, written: Blocks | None, timeout_s: float | None
    ) -> Callable[..., Any]:
        """Return the persistent call of these arguments, whose shares lie at displacements."""
        from unisono.collectives.calls.displaced import DisplacedCall

        x, out = arguments.x, arguments.out
        if on_device(x) or on_device(out):
            raise UsageError("a persistent call on GPU arrays takes no displacements: call the method each time")
        moved = DisplacedCall(x, out, read, written)
        again = self._persistent(arguments._replace(x=moved.source, out=moved.target), x, timeout_s)
        return lambda wait=True: moved.make(again, wait)


def _registered_name(collective: str) -> str:
    """Return the name in the registry of the method `collective`, for example "allgather" for "allgatherv".

    Raises:
        UsageError: there is no such method.
    """
    name = VECTOR_CALLS.get(collective, collective)
    if name not in CONTRACTS:
        names = (*CONTRACTS, *VECTOR_CALLS, *_MESSAGES)
        raise UsageError(
            f"there is no collective {collective!r}: there are {', '.join(names)}{did_you_mean(collective, names)}"
        )
    return name


def _checked_root(collective: str, contract: Contract, root: int | None) -> int | None:
    """Return the root of a call, by default 0; None for a collective that has no root, and takes none."""
    if contract.has_root:
        return 0 if root is None else root
    if root is not None:
        raise UsageError(f"{collective} has no root: leave root out")
    return None


def _checked_op(collective: str, contract: Contract, arguments: CallArguments) -> OpArgument:
    """Return the op of a call, by default "sum"; None for a collective that combines nothing, and takes no op."""
    if contract.reduces:
        return "sum" if arguments.op is None else arguments.op
    if arguments.op is not None or isinstance(arguments.algorithm, AlgorithmRequest):
        raise UsageError(f"{collective} combines nothing, so it has no op, reproducible or accumulate: leave them out")
    return None


def _counts_of(collective: str, rows: _Rows) -> tuple[Sequence[int], ...] | None:
    """Return the counts of a persistent call in the order of `CallArguments.counts`.

    Raises:
        UsageError: the collective takes other counts than these.
    """
    names: tuple[str, ...] = ()
    if collective in VECTOR_CALLS:
        names = ("send_counts", "recv_counts") if collective == "alltoallv" else ("counts",)
    passed = {name: counts for name, _ in (ROWS, SENT, RECEIVED) if (counts := rows[name]) is not None}
    if set(passed) != set(names):
        raise UsageError(
            f"{collective} takes {' and '.join(names) or 'no counts'}; got {' and '.join(passed) or 'none'}"
        )
    return tuple(passed[name] for name in names) or None
