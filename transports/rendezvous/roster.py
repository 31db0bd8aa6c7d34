"""The roster: who the ranks are and where they listen, and the settings of rank 0, the same on every rank.

Each rank puts its own entry into the store; rank 0 collects all entries and publishes them as one value; everyone reads
that. So each rank but 0 asks the store once, whatever the number of ranks.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from unisono.errors import RendezvousError
from unisono.transports.listener import Addresses
from unisono.transports.rendezvous.stores import Store, StoreTimeoutError

Setting: TypeAlias = str | int | float

_ROSTER = "roster"
_TEXT_LIMIT = 256


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a job.

    Attributes:
        rank: its rank.
        addresses: where it can be reached.
        cores: the cores that it may run on, as a mask in hexadecimal.
    """

    rank: int
    addresses: Addresses
    cores: str


@dataclass(frozen=True, slots=True)
class Roster:
    """What all ranks know after `join`.

    Attributes:
        members: by rank.
        settings: what rank 0 passed to `join`; every rank adopts them, so that all choose alike.
    """

    members: tuple[Member, ...]
    settings: Mapping[str, Setting]


def join(
    store: Store, rank: int, size: int, me: Member, timeout_s: float, *, settings: Mapping[str, Setting]
) -> Roster:
    """Meet the other ranks in `store`; return the roster, equal on all ranks.

    Args:
        store: seen by all ranks, and by no other job.
        rank: this rank.
        size: the number of ranks.
        me: what the others are told of this rank.
        timeout_s: seconds to wait for the others.
        settings: adopted from rank 0; what other ranks pass is not looked at.

    Raises:
        RendezvousError: ranks did not arrive in time (the message names them), two processes claim one rank, the store
            failed, or it holds what no rank has written.
    """
    store.set(_entry(rank), _encode(_record(me)))
    if rank == 0:
        _publish(store, size, timeout_s, settings)
    return _read_roster(store, size, timeout_s)


def _publish(store: Store, size: int, timeout_s: float, settings: Mapping[str, Setting]) -> None:
    deadline = time.monotonic() + timeout_s
    records = []
    missing = []
    for rank in range(size):
        try:
            records.append(_decode(store.get(_entry(rank), max(0.0, deadline - time.monotonic()))))
        except StoreTimeoutError:
            missing.append(rank)
    if missing:
        # The others wait for the roster: this tells them as well, now and in the same words.
        error = _did_not_arrive(missing, size, timeout_s)
        store.set(_ROSTER, _encode({"error": error.message}))
        raise error
    store.set(_ROSTER, _encode({"members": records, "settings": dict(settings)}))


def _read_roster(store: Store, size: int, timeout_s: float) -> Roster:
    try:
        record = _decode(store.get(_ROSTER, timeout_s))
    except StoreTimeoutError:
        missing = [rank for rank in range(size) if not has_arrived(store, rank)]
        # If all entries are there, rank 0 has died after its own: it is the one that is needed and not there.
        raise _did_not_arrive(missing or [0], size, timeout_s) from None
    if isinstance(record, dict) and isinstance(record.get("error"), str):
        raise RendezvousError(record["error"])
    found = _fields(record, {"members": list, "settings": dict})
    members = tuple(_member(entry, rank) for rank, entry in enumerate(found["members"]))
    if len(members) != size:
        raise _malformed(f"{len(members)} members, this rank was started as one of {size}")
    if not all(isinstance(value, str | int | float) for value in found["settings"].values()):
        raise _malformed("a setting is neither text nor a number")
    return Roster(members, found["settings"])


def has_arrived(store: Store, rank: int) -> bool:
    """Return whether `rank` has put its entry into `store`."""
    try:
        store.get(_entry(rank), 0.0)
    except StoreTimeoutError:
        return False
    return True


def _entry(rank: int) -> str:
    return f"member/{rank}"


def _did_not_arrive(missing: Sequence[int], size: int, timeout_s: float) -> RendezvousError:
    shown = ", ".join(str(rank) for rank in missing[:8]) + (", …" if len(missing) > 8 else "")
    ranks = "rank" if len(missing) == 1 else "ranks"
    return RendezvousError(f"{ranks} {shown} of {size} did not arrive within {timeout_s:g} s")


def _record(me: Member) -> dict[str, Any]:
    return dataclasses.asdict(me)


def _member(record: object, rank: int) -> Member:
    found = _fields(record, {"rank": int, "addresses": dict, "cores": str})
    if found["rank"] != rank:
        raise _malformed(f"rank {found['rank']!r} stands in place {rank}")
    where = _fields(found["addresses"], {"host_id": str, "unix": str, "tcp_host": str, "tcp_port": int, "pid": int})
    if any(isinstance(value, str) and len(value) > _TEXT_LIMIT for value in where.values()):
        raise _malformed(f"an address of rank {rank} is too long")
    if not 0 < where["tcp_port"] < 1 << 16 or where["pid"] <= 0:
        raise _malformed(f"rank {rank} has no such port or process")
    return Member(rank, Addresses(**where), _mask(found["cores"], rank))


def _mask(text: str, rank: int) -> str:
    try:
        int(text, 16)
    except ValueError:
        raise _malformed(f"the cores of rank {rank} are not a mask") from None
    return text


def _fields(record: object, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return `record` if it is a mapping with exactly the fields of `kinds`, each of its type."""
    if not isinstance(record, dict) or record.keys() != kinds.keys():
        raise _malformed(f"an entry does not have the fields {', '.join(kinds)}")
    for name, kind in kinds.items():
        if type(record[name]) is not kind:
            raise _malformed(f"{name} is not of type {kind.__name__}")
    return record


def _encode(record: object) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode()


def _decode(value: bytes) -> object:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _malformed(f"a value is not JSON: {error}") from None


def _malformed(reason: str) -> RendezvousError:
    return RendezvousError(f"the roster in the store cannot be used: {reason}")
