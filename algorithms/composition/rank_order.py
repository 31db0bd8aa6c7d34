"""Plans in another order of ranks: each rank takes a position, and carries out the plan of the rank of that number.

An order is a permutation of the ranks. With the order (2, 0, 1), rank 2 does what the algorithm says of rank 0. A ring
in this order leads from rank 2 to rank 0, on to rank 1, and back to rank 2. Peers are renamed, and so are the blocks of
collectives in which each rank has a share: block i of the plan is the share of the rank at position i.

The verifier proves such plans as it proves all others. Contributions are combined in the order of positions, so a call
that needs the order of ranks must not be reordered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unisono.algorithms.catalogue.algorithm import Build
from unisono.algorithms.composition.host_levels import Hosts
from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.algorithms.ir.plan import Copy, Group, Lane, Plan, ReadReduce, Reduce, Repeat, Step, as_written
from unisono.errors import UsageError

# The collectives whose results depend on the order of ranks.
IN_RANK_ORDER = ("scan", "exscan")


def build_in_order(
    build: Build, size: int, rank: int, root: int = 0, *, order: Sequence[int] = (), **params: Any
) -> Plan:
    """Return the plan of `rank` that `build` returns if ranks take the positions of `order`.

    With an empty order, each rank takes the position of its own number.

    Raises:
        UsageError: `order` does not name each rank once, or the plan is only right in the order of ranks.
    """
    if not order:
        return build(size, rank, root, **params)
    check_order(order, size)
    position = {member: at for at, member in enumerate(order)}
    plan = build(size, position[rank], position[root], **_at_positions(params, position))
    if plan.collective in IN_RANK_ORDER:
        raise UsageError(
            f"{plan.collective} {plan.algorithm} must combine in the order of ranks, so its ranks cannot be reordered"
        )
    return _renamed(plan, rank, root, tuple(order))


def check_order(order: object, size: int) -> None:
    """Check that `order` is a permutation of the ranks; raises UsageError if not."""
    if not isinstance(order, (tuple, list)) or sorted(order, key=repr) != sorted(range(size), key=repr):
        raise UsageError(f"the order {order!r} does not name each of the ranks 0 to {size - 1} once")


def _at_positions(params: Mapping[str, Any], position: Mapping[int, int]) -> dict[str, Any]:
    """Return the parameters with positions in place of the ranks of hosts."""
    hosts = params.get("hosts")
    return {**params, **({} if hosts is None else {"hosts": _moved(hosts, position)})}


def _moved(hosts: Hosts, position: Mapping[int, int]) -> Hosts:
    """Return nested tuples of ranks with positions in place of ranks, in ascending order."""
    moved = [_moved(part, position) if isinstance(part, tuple) else position[part] for part in hosts]
    return tuple(sorted(moved))


def _renamed(plan: Plan, rank: int, root: int, order: tuple[int, ...]) -> Plan:
    if max(plan.input.parts, plan.output.parts) > 1:
        raise UsageError(f"{plan.collective} {plan.algorithm} cuts shares into parts: it takes no other order")
    contract = CONTRACTS[plan.collective]
    has_shares = Cut.SHARES in (contract.input, contract.output)
    scratch = plan.scratch
    if (
        has_shares
        and scratch.like is not None
        and scratch.copies > 1
        and plan.partition(scratch.like).blocks == plan.size
    ):
        raise UsageError(
            f"{plan.collective} {plan.algorithm} keeps several vectors of shares, so its ranks cannot be reordered"
        )
    if has_shares and scratch.block is not None:
        scratch = replace(scratch, block=order[scratch.block])
    return replace(
        plan,
        rank=rank,
        root=root,
        scratch=scratch,
        lanes=tuple(_lane(plan, lane, order) for lane in range(len(plan.lanes))),
        permutation=_permutation(plan, order) if has_shares else plan.permutation,
    )


def _permutation(plan: Plan, order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the places of the blocks of shares in memory, which the plan itself may permute already."""
    return tuple(order[place] for place in plan.permutation) if plan.permutation else order


def _lane(plan: Plan, lane: int, order: tuple[int, ...]) -> Lane:
    """Return lane number `lane` of `plan`, with the rank `order[peer]` in place of each position `peer`.

    A `Repeat` with a step whose `peer_advance` is not 0 is unrolled: in another order, the peers of its rounds are no
    longer a fixed distance apart.
    """
    items = plan.lanes[lane]
    steps = [step for _, groups in map(as_written, items) for group in groups for step in group.steps]
    written = tuple(plan.groups(lane)) if any(getattr(step, "peer_advance", 0) for step in steps) else items
    return tuple(
        _group(item, order)
        if isinstance(item, Group)
        else Repeat(item.times, tuple(_group(group, order) for group in item.groups))
        for item in written
    )


def _group(group: Group, order: tuple[int, ...]) -> Group:
    return Group(tuple(_step(step, order) for step in group.steps), group.after)


def _step(step: Step, order: tuple[int, ...]) -> Step:
    if isinstance(step, (Copy, Reduce)):
        return step
    if isinstance(step, ReadReduce):
        return replace(step, sources=tuple((order[peer], source) for peer, source in step.sources))
    return replace(step, peer=order[step.peer % len(order)])
