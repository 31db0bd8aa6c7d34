"""The roster: all ranks with their addresses, cores and hosts, and the settings of rank 0. It is equal on every rank.

Each rank puts its own entry into the store. A binomial tree of ranks collects the entries: each inner rank reads the
entries below it and puts them into the store as one value. Rank 0 publishes the roster, which every rank reads. So a
rank makes at most 3 + log2(ranks) requests to the store, and half of the ranks make only two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from unisono import __version__
from unisono.errors import RendezvousError, UnisonoError
from unisono.foundation.deadlines import Deadline
from unisono.foundation.json_checks import parsed_json
from unisono.foundation.records import record
from unisono.options import Options
from unisono.transports.host.bind_address import HOW_TO_REACH, is_numeric
from unisono.transports.host.host_discovery import Surroundings
from unisono.transports.links.handshake import WIRE_VERSIONS
from unisono.transports.links.listener import Addresses
from unisono.transports.rendezvous.stores import Store, StoreTimeoutError

Setting: TypeAlias = str | int | float

_ROSTER = "roster"
_FAILURE = "failure"
_TEXT_LIMIT = 256
_SURROUNDINGS = {"machine": str, "host": str, "network": int, "users": int, "user": int, "alone": str}


@record
class RosterMember:
    """One rank of a job.

    Attributes:
        rank: its number in the job.
        addresses: the addresses of its listener.
        cores: the mask of the cores that it may run on, in hexadecimal.
        surroundings: its machine, user and namespaces, to explain why another rank shares no memory with it.
        launch_rank: its number when it was launched, which `shrink` and `grow` do not change.
        tls: its option `tls`, in words; see `tls_of`.
    """

    rank: int
    addresses: Addresses
    cores: str
    surroundings: Surroundings
    launch_rank: int
    tls: str = ""


@record
class Roster:
    """The result of `join`, equal on all ranks.

    Attributes:
        members: all ranks, in order.
        settings: the settings that rank 0 passed to `join`. Every rank adopts them, so that all make the same choices.
    """

    members: tuple[RosterMember, ...]
    settings: Mapping[str, Setting]


def join(
    store: Store, rank: int, size: int, me: RosterMember, timeout_s: float, *, settings: Mapping[str, Setting]
) -> Roster:
    """Meet the other ranks in `store`; return the roster, equal on all ranks.

    Args:
        store: a store that all ranks use, and no other job.
        rank: this rank.
        size: the number of ranks.
        me: the entry of this rank.
        timeout_s: seconds to wait for the others.
        settings: the settings of the job; those of rank 0 hold, and those of other ranks are ignored.

    Raises:
        RendezvousError: ranks did not arrive in time, run another version of Unisono, or were started with another
            `size` (the message names them). Or two processes claim one rank, the store failed, or its values are not
            those of ranks.
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
        store.set(_part(rank), _encode([text.decode(errors="replace") for text in entries]))
    return _read_roster(store, size, deadline, timeout_s)


def _gather(store: Store, rank: int, size: int, own: bytes, deadline: Deadline) -> list[bytes]:
    """Return the entries of the subtree of `rank` in the binomial tree, in the order of ranks.

    Raises:
        StoreTimeoutError: an entry was not in the store at `deadline`.
    """
    entries = [own]
    step = 1
    while (step < size if rank == 0 else rank % (2 * step) == 0) and rank + step < size:
        child = rank + step
        is_leaf = _span(child, size) == 1
        value = store.get(_entry(child) if is_leaf else _part(child), deadline.remaining_s())
        entries += [value] if is_leaf else _texts(value)
        step *= 2
    return entries


def _span(rank: int, size: int) -> int:
    """Return the number of ranks in the subtree of `rank`, which is not 0, in the binomial tree."""
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
    if not missing:  # an inner rank has set its entry and died before it passed on the entries of its subtree
        silent = [rank for rank in range(1, size) if _span(rank, size) > 1 and not _is_set(store, _part(rank))]
        missing = sorted(silent, key=lambda rank: _span(rank, size))[:1] or [0]
    # The others wait for the roster, so this gives them the same error at once.
    error = did_not_arrive(missing, size, timeout_s)
    store.set(_ROSTER, _encode({"error": error.message}))
    raise error


def give_up(store: Store, rank: int, size: int, reason: str) -> None:
    """Put into `store` that this rank does not join, and why. The others raise that instead of waiting for it.

    Values that this rank has set before stay.
    """
    error = _encode({"error": reason})
    values = {_ROSTER: error} if rank == 0 else {_entry(rank): error, _part(rank): _encode([error.decode()])}
    for key, value in values.items():
        with contextlib.suppress(UnisonoError):
            store.set(key, value)


def report_failure(store: Store, reason: str) -> None:
    """Put into `store` why a rank cannot connect to another one, unless a rank has done so before."""
    with contextlib.suppress(UnisonoError):
        store.set(_FAILURE, _encode({"error": reason}))


def failure(store: Store) -> str:
    """Return why a rank cannot connect to another one; empty as long as no rank has reported that.

    Raises:
        RendezvousError: the store has failed.
    """
    try:
        record = _decode(store.get(_FAILURE, 0.0))
    except StoreTimeoutError:
        return ""
    return str(record.get("error")) if isinstance(record, dict) else ""


def entry_of(me: RosterMember, size: int) -> bytes:
    """Return the entry of a rank that was started as one of `size` ranks."""
    return _encode({"terms": terms(size), "member": dataclasses.asdict(me)})


def roster_record(entries: Sequence[bytes], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the record that all ranks read: the roster made of their entries, or an error for all of them."""
    records = [_decode(entry) for entry in entries]
    failed = (record["error"] for record in records if isinstance(record, dict) and "error" in record)
    if (error := next(failed, None)) is not None:
        return {"error": str(error)}
    terms = [record.get("terms") if isinstance(record, dict) else None for record in records]
    for rank, other in enumerate(terms):
        if other != terms[0]:
            return {"error": f"rank {rank} runs {other}, and rank 0 {terms[0]}: all ranks must run the same"}
    members = [record.get("member") if isinstance(record, dict) else None for record in records]
    encryption = [member.get("tls") if isinstance(member, dict) else None for member in members]
    for rank, other in enumerate(encryption):
        if other != encryption[0]:
            return {"error": f"rank {rank} has {other}, and rank 0 {encryption[0]}: all ranks must have the same"}
    return {"members": members, "settings": dict(settings)}


def tls_of(options: Options) -> str:
    """Return the options of TLS that must be equal on all ranks, as text."""
    return f"tls={options.tls!r} {'with certificates' if options.tls_certificate else 'by the key of the job'}"


def terms(size: int) -> str:
    """Return the facts that must be equal on all ranks, as text: the version of Unisono and the number of ranks."""
    return f"{release()} as one of {size} ranks"


def release() -> str:
    """Return the version of Unisono, which must be equal on all ranks, as text."""
    first, last = WIRE_VERSIONS
    return f"Unisono {__version__} (wire versions {first} to {last})"


def _read_roster(store: Store, size: int, deadline: Deadline, timeout_s: float) -> Roster:
    try:
        record = _decode(store.get(_ROSTER, deadline.remaining_s()))
    except StoreTimeoutError:
        missing = [rank for rank in range(size) if not has_arrived(store, rank)]
        # If all entries are in the store, rank 0 has died after it had set its own.
        raise did_not_arrive(missing or [0], size, timeout_s) from None
    return roster_of(record, size)


def roster_of(record: object, size: int) -> Roster:
    """Return the roster of `size` ranks from the record of `roster_record`.

    Raises:
        RendezvousError: the record is an error, or is malformed.
    """
    if isinstance(record, dict) and isinstance(record.get("error"), str):
        raise RendezvousError(record["error"])
    fields = _fields(record, {"members": list, "settings": dict})
    members = tuple(_member(entry, rank) for rank, entry in enumerate(fields["members"]))
    if len(members) != size:
        raise _malformed(f"it has {len(members)} members, but this rank was started as one of {size}")
    if not all(isinstance(value, str | int | float) for value in fields["settings"].values()):
        raise _malformed("a setting is neither text nor a number")
    _check_reachable(members)
    return Roster(members, fields["settings"])


def _check_reachable(members: Sequence[RosterMember]) -> None:
    """Raise `RendezvousError` if the ranks are on several networks and one listens on loopback only."""
    first = members[0]
    others = (member for member in members if member.addresses.host_id != first.addresses.host_id)
    away = next((member for member in others if _network(member) != _network(first)), None)
    if away is None:
        return
    from ipaddress import ip_address

    hidden = [member for member in members if ip_address(member.addresses.tcp_host).is_loopback]
    if hidden:
        shown = f"rank {hidden[0].rank}" + (f" and {len(hidden) - 1} more" if len(hidden) > 1 else "")
        why = first.surroundings.apart_from(away.surroundings)
        raise RendezvousError(
            f"ranks 0 and {away.rank} are on different hosts ({why}), and {shown} can be reached from its own host "
            f"only (it listens on {hidden[0].addresses.tcp_host}): {HOW_TO_REACH}"
        )


def _network(member: RosterMember) -> tuple[str, int]:
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


def did_not_arrive(missing: Sequence[int], size: int, timeout_s: float) -> RendezvousError:
    """Return the error for ranks that did not come within `timeout_s` seconds."""
    shown = ", ".join(str(rank) for rank in missing[:8]) + (", …" if len(missing) > 8 else "")
    ranks = "rank" if len(missing) == 1 else "ranks"
    return RendezvousError(f"{ranks} {shown} of {size} did not arrive within {timeout_s:g} s")


def _member(record: object, rank: int) -> RosterMember:
    types = {"rank": int, "addresses": dict, "cores": str, "surroundings": dict, "launch_rank": int, "tls": str}
    fields = _fields(record, types)
    if fields["rank"] != rank:
        raise _malformed(f"the entry at position {rank} is of rank {fields['rank']!r}")
    addresses = _fields(
        fields["addresses"], {"host_id": str, "unix": str, "tcp_host": str, "tcp_port": int, "pid": int}
    )
    surroundings = _fields(fields["surroundings"], _SURROUNDINGS)
    texts = (value for value in (*addresses.values(), *surroundings.values()) if isinstance(value, str))
    if any(len(text) > _TEXT_LIMIT for text in texts):
        raise _malformed(f"an address of rank {rank} is too long")
    if not 0 < addresses["tcp_port"] < 1 << 16 or addresses["pid"] <= 0:
        raise _malformed(f"the port or the process id of rank {rank} is out of range")
    if not is_numeric(addresses["tcp_host"]):
        raise _malformed(f"the address of rank {rank} is not numeric")
    cores, launch_rank = _mask(fields["cores"], rank), fields["launch_rank"]
    return RosterMember(rank, Addresses(**addresses), cores, Surroundings(**surroundings), launch_rank, fields["tls"])


def _mask(text: str, rank: int) -> str:
    try:
        int(text, 16)
    except ValueError:
        raise _malformed(f"the cores of rank {rank} are not a mask") from None
    return text


def _fields(record: object, types: Mapping[str, type]) -> dict[str, Any]:
    """Return `record`, which must be a dict with exactly the fields of `types`, each of its type."""
    if not isinstance(record, dict) or record.keys() != types.keys():
        raise _malformed(f"an entry does not have the fields {', '.join(types)}")
    for name, expected in types.items():
        if type(record[name]) is not expected:
            raise _malformed(f"{name} is not of type {expected.__name__}")
    return record


def _encode(record: object) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode()


def _decode(value: bytes) -> object:
    try:
        return parsed_json(value)
    except ValueError as error:
        raise _malformed(f"a value is not JSON: {error}") from None


def _malformed(reason: str) -> RendezvousError:
    return RendezvousError(f"the roster in the store cannot be used: {reason}")
