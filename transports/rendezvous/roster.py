"""The roster: who the ranks are and where they listen, and the settings of rank 0, the same on every rank.

Each rank puts its own entry into the store. The entries are collected by a binomial tree of ranks, each of which puts
those that it has got into the store as one value, and rank 0 publishes all of them; everyone reads that. So a rank asks
the store at most 3 + log2(ranks) times, and half of them twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from unisono import __version__
from unisono.deadlines import Deadline
from unisono.errors import RendezvousError, UnisonoError
from unisono.records import record
from unisono.transports.host.bind_address import is_numeric
from unisono.transports.host.host_discovery import Surroundings
from unisono.transports.links.handshake import WIRE_VERSIONS
from unisono.transports.links.listener import Addresses
from unisono.transports.rendezvous.stores import Store, StoreTimeoutError

Setting: TypeAlias = str | int | float

_ROSTER = "roster"
_TEXT_LIMIT = 256
_SURROUNDINGS = {"machine": str, "host": str, "network": int, "users": int, "user": int, "alone": str}


@record
class Member:
    """One rank of a job.

    Attributes:
        rank: its rank.
        addresses: where it can be reached.
        cores: the cores that it may run on, as a mask in hexadecimal.
        surroundings: where it is, to say why another rank shares no memory with it.
    """

    rank: int
    addresses: Addresses
    cores: str
    surroundings: Surroundings


@record
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
        RendezvousError: ranks did not arrive in time, run another version of Unisono or were started as one of another
            number (the message names them), two processes claim one rank, the store failed, or it holds what no rank
            has written.
    """
    deadline = Deadline(timeout_s)
    entry = entry_of(me, size)
    store.set(_entry(rank), entry)
    try:
        entries = _gather(store, rank, size, entry, deadline)
    except StoreTimeoutError:
        entries = []
    if rank == 0:
        _publish(store, size, entries, timeout_s, settings)
    elif len(entries) > 1:
        store.set(_part(rank), _encode([each.decode() for each in entries]))
    return _read_roster(store, size, deadline, timeout_s)


def _gather(store: Store, rank: int, size: int, own: bytes, deadline: Deadline) -> list[bytes]:
    """Return the entries of the ranks of whom `rank` is the first in the binomial tree, in their order.

    Raises:
        StoreTimeoutError: one of them was not there at `deadline`.
    """
    entries = [own]
    step = 1
    while (step < size if rank == 0 else rank % (2 * step) == 0) and rank + step < size:
        child = rank + step
        is_leaf = _span(child, size) == 1
        value = store.get(_entry(child) if is_leaf else _part(child), deadline.left_s())
        entries += [value] if is_leaf else _texts(value)
        step *= 2
    return entries


def _span(rank: int, size: int) -> int:
    """Return the number of ranks of whom `rank`, which is not 0, is the first in the binomial tree."""
    return min(rank & -rank, size - rank)


def _texts(value: bytes) -> list[bytes]:
    texts = _decode(value)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _malformed("entries are not a list of texts")
    return [text.encode() for text in texts]


def _publish(
    store: Store, size: int, entries: Sequence[bytes], timeout_s: float, settings: Mapping[str, Setting]
) -> None:
    if entries:
        store.set(_ROSTER, _encode(roster_record(entries, settings)))
        return
    missing = [rank for rank in range(size) if not has_arrived(store, rank)]
    if not missing:  # one has died since, of whom others were to be heard
        silent = [rank for rank in range(1, size) if _span(rank, size) > 1 and not _is_set(store, _part(rank))]
        missing = sorted(silent, key=lambda rank: _span(rank, size))[:1] or [0]
    # The others wait for the roster: this tells them as well, now and in the same words.
    error = _did_not_arrive(missing, size, timeout_s)
    store.set(_ROSTER, _encode({"error": error.message}))
    raise error


def give_up(store: Store, rank: int, size: int, reason: str) -> None:
    """Tell the others in `store` that this rank does not come, and why; they raise that instead of waiting for it.

    What this rank has told them before stays.
    """
    error = _encode({"error": reason})
    values = {_ROSTER: error} if rank == 0 else {_entry(rank): error, _part(rank): _encode([error.decode()])}
    for key, value in values.items():
        with contextlib.suppress(UnisonoError):
            store.set(key, value)


def entry_of(me: Member, size: int) -> bytes:
    """Return what a rank, which was started as one of `size`, tells the others of itself."""
    return _encode({"terms": _terms(size), "member": dataclasses.asdict(me)})


def roster_record(entries: Sequence[bytes], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return what all ranks are to read: the roster, made of their entries, or an error for all of them."""
    records = [_decode(entry) for entry in entries]
    failed = (record["error"] for record in records if isinstance(record, dict) and "error" in record)
    if (error := next(failed, None)) is not None:
        return {"error": str(error)}
    terms = [record.get("terms") if isinstance(record, dict) else None for record in records]
    for rank, its_terms in enumerate(terms):
        if its_terms != terms[0]:
            return {"error": f"rank {rank} runs {its_terms}, and rank 0 {terms[0]}: all ranks must run the same"}
    members = [record.get("member") if isinstance(record, dict) else None for record in records]
    return {"members": members, "settings": dict(settings)}


def _terms(size: int) -> str:
    first, last = WIRE_VERSIONS
    return f"Unisono {__version__} (wire versions {first} to {last}) as one of {size} ranks"


def _read_roster(store: Store, size: int, deadline: Deadline, timeout_s: float) -> Roster:
    try:
        record = _decode(store.get(_ROSTER, deadline.left_s()))
    except StoreTimeoutError:
        missing = [rank for rank in range(size) if not has_arrived(store, rank)]
        # If all entries are there, rank 0 has died after its own: it is the one that is needed and not there.
        raise _did_not_arrive(missing or [0], size, timeout_s) from None
    return roster_of(record, size)


def roster_of(record: object, size: int) -> Roster:
    """Return the roster of so many ranks in what `roster_record` made of their entries.

    Raises:
        RendezvousError: it is an error, or nothing that ranks have made.
    """
    if isinstance(record, dict) and isinstance(record.get("error"), str):
        raise RendezvousError(record["error"])
    found = _fields(record, {"members": list, "settings": dict})
    members = tuple(_member(entry, rank) for rank, entry in enumerate(found["members"]))
    if len(members) != size:
        raise _malformed(f"{len(members)} members, this rank was started as one of {size}")
    if not all(isinstance(value, str | int | float) for value in found["settings"].values()):
        raise _malformed("a setting is neither text nor a number")
    _check_reachable(members)
    return Roster(members, found["settings"])


def _check_reachable(members: Sequence[Member]) -> None:
    """Raise the error of ranks that are on several networks, where one listens for its own alone."""
    first = members[0]
    strangers = (each for each in members if each.addresses.host_id != first.addresses.host_id)
    away = next((each for each in strangers if _network(each) != _network(first)), None)
    if away is None:
        return
    from ipaddress import ip_address

    hidden = [member for member in members if ip_address(member.addresses.tcp_host).is_loopback]
    if hidden:
        shown = f"rank {hidden[0].rank}" + (f" and {len(hidden) - 1} more" if len(hidden) > 1 else "")
        why = first.surroundings.apart_from(away.surroundings)
        raise RendezvousError(
            f"ranks 0 and {away.rank} are apart ({why}), and {shown} can be reached from its own host only (it listens "
            f"on {hidden[0].addresses.tcp_host}): set UNISONO_BIND_ADDRESS, on all, to the network between the hosts, "
            "as 10.0.0.0/8, or to an interface, as eth0"
        )


def _network(member: Member) -> tuple[str, int]:
    return member.surroundings.machine, member.surroundings.network


def has_arrived(store: Store, rank: int) -> bool:
    """Return whether `rank` has put its entry into `store`."""
    return _is_set(store, _entry(rank))


def _is_set(store: Store, key: str) -> bool:
    try:
        store.get(key, 0.0)
    except StoreTimeoutError:
        return False
    return True


def _entry(rank: int) -> str:
    return f"member/{rank}"


def _part(rank: int) -> str:
    return f"part/{rank}"


def _did_not_arrive(missing: Sequence[int], size: int, timeout_s: float) -> RendezvousError:
    shown = ", ".join(str(rank) for rank in missing[:8]) + (", …" if len(missing) > 8 else "")
    ranks = "rank" if len(missing) == 1 else "ranks"
    return RendezvousError(f"{ranks} {shown} of {size} did not arrive within {timeout_s:g} s")


def _member(record: object, rank: int) -> Member:
    found = _fields(record, {"rank": int, "addresses": dict, "cores": str, "surroundings": dict})
    if found["rank"] != rank:
        raise _malformed(f"rank {found['rank']!r} stands in place {rank}")
    where = _fields(found["addresses"], {"host_id": str, "unix": str, "tcp_host": str, "tcp_port": int, "pid": int})
    around = _fields(found["surroundings"], _SURROUNDINGS)
    if any(isinstance(value, str) and len(value) > _TEXT_LIMIT for value in (*where.values(), *around.values())):
        raise _malformed(f"an address of rank {rank} is too long")
    if not 0 < where["tcp_port"] < 1 << 16 or where["pid"] <= 0:
        raise _malformed(f"rank {rank} has no such port or process")
    if not is_numeric(where["tcp_host"]):
        raise _malformed(f"rank {rank} has no such address")
    return Member(rank, Addresses(**where), _mask(found["cores"], rank), Surroundings(**around))


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
