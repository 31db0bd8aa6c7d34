"""The state that all members share, such as parameters and moments: newcomers get it, and members compare it.

Theory of operation
-------------------
`Swarm.state` is a call that all members make at the beginning of each step. A member passes its state, which does not
change before its next call has ended. In this call members pass the revision of their state, and sometimes a digest.

*Newcomers* enter between a call of `state` and the next call. So all members have the same state then. A newcomer asks
each of them for its *manifest*: the description of the state, and a hash of each chunk of 4 MiB. It takes the manifest
that most members have. Then it gets the chunks from all of these members at the same time. A thread for each member
takes the next chunk from one queue, so a member that is reached faster serves more of them. The others compute
meanwhile. They wait only if they come to their next call before the newcomer does.

*Drift.* In every `check_every`-th call, the members compare digests. If they differ, the state of most members is
right. The members with another state are named, and get the right state as newcomers do, or raise an error. Without a
majority, the state of the first member counts.

Example: A, B and C are at call 40, their 20th step, and D enters after it. D gets 3 manifests, which are equal, and 100
chunks: 45 from A, which is near, 30 from B, and 25 from C. Then it makes call 41 with the others.
"""

from __future__ import annotations

import hashlib
import json
import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.errors import CorruptionError, PeerLostError, UnisonoError, UsageError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.foundation.json_checks import checked, parsed_json
from unisono.swarm.links import MOST_PAYLOAD, NOTHING, Caller, RefusedError
from unisono.swarm.trees import arrays_in, described, restored
from unisono.swarm.views import Member

_log = log.get("rendezvous")

CHUNK_NBYTES = 1 << 22
_HASH_NBYTES = 16
_WAIT_S = 5.0
_CHUNK_S = 60.0
# A newcomer accepts a state of at most _GROWTH times the bytes of its own and _SLACK_NBYTES more, because a new
# optimizer has no moments yet.
_GROWTH, _SLACK_NBYTES = 8, 1 << 30
_PAIRS = 2  # the threads for each member that serves
_DIGEST_DIGITS = 15  # of 4 bits each, so that a digest is an int64


class _Flat:
    """A state as one sequence of bytes."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._parts = [array.reshape(-1).view(np.uint8) for array in arrays if array.nbytes]
        self._ends = np.cumsum([0, *(part.size for part in self._parts)])

    @property
    def nbytes(self) -> int:
        return int(self._ends[-1])

    def chunk(self, index: int) -> bytes:
        """Return the bytes of a chunk."""
        begin = index * CHUNK_NBYTES
        end = min(begin + CHUNK_NBYTES, self.nbytes)
        first = int(np.searchsorted(self._ends, begin, "right")) - 1
        pieces = []
        for part, offset in zip(self._parts[first:], self._ends[first:], strict=False):
            if offset >= end:
                break
            pieces.append(part[max(begin - offset, 0) : end - offset].tobytes())
        return b"".join(pieces)


class Manifest(NamedTuple):
    """The numbers and hashes that a member needs to fetch a state from others, and to check it.

    Attributes:
        revision: the number that the program has given the state.
        description: the structure of the state, as `trees.described` returns it.
        nbytes: the number of bytes of all arrays.
        chunks: the hash of each chunk, in order.
    """

    revision: int
    description: Any
    nbytes: int
    chunks: tuple[str, ...]

    @property
    def digest(self) -> str:
        """A hash of the description, the size and all chunks, and so of the whole state, as text."""
        return _hash(json.dumps([self.description, self.nbytes, self.chunks]).encode())

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Return the manifest in a reply; raises ValueError if the reply has no valid one."""
        fields = checked(parsed_json(data), {"revision": int, "description": dict, "nbytes": int, "chunks": [str]})
        manifest = cls(fields["revision"], fields["description"], fields["nbytes"], tuple(fields["chunks"]))
        nbytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in arrays_in(manifest.description))
        if manifest.nbytes != nbytes or len(manifest.chunks) != -(-nbytes // CHUNK_NBYTES):
            raise ValueError("a manifest does not fit its arrays")
        return manifest


class Offer:
    """The state of this member at one call, which others may get until its next call has ended."""

    def __init__(self, state: Any, revision: int, call: int) -> None:
        self.call = call
        self.revision = revision
        self._description, arrays = described(state)
        self._flat = _Flat(arrays)
        self._lock = threading.Lock()
        self._manifest: Manifest | None = None

    def manifest(self) -> Manifest:
        """Return the manifest. The first call hashes the state."""
        with self._lock:
            if self._manifest is None:
                count = -(-self._flat.nbytes // CHUNK_NBYTES)
                hashes = tuple(_hash(self._flat.chunk(index)) for index in range(count))
                self._manifest = Manifest(self.revision, self._description, self._flat.nbytes, hashes)
            return self._manifest

    def number(self) -> int:
        """Return the digest as a number. It is not 0, which stands for a state that is not compared."""
        return 1 + int(self.manifest().digest[:_DIGEST_DIGITS], 16)

    def chunk(self, index: int) -> bytes:
        """Return the bytes of a chunk; raises ValueError if there is none of this number."""
        if not 0 <= index * CHUNK_NBYTES < self._flat.nbytes:
            raise ValueError("there is no such chunk")
        return self._flat.chunk(index)


class StateExchange:
    """Serves the state of this member to other members, and gets their state.

    Args:
        caller: makes the requests.
        has_result: returns the number of the last call of which this member has the result.
    """

    def __init__(self, caller: Caller, has_result: Callable[[], int]) -> None:
        self._caller = caller
        self._has_result = has_result
        self._changed = threading.Condition()
        self._offers: tuple[Offer, ...] = ()  # of two calls at most: one that the next call has not ended, and its own

    def offer(self, offer: Offer | None) -> None:
        """Serve this state from now on, and that of the call before; None serves no state."""
        with self._changed:
            before = tuple(each for each in self._offers if offer is not None and each.call != offer.call)
            self._offers = () if offer is None else (*before[-1:], offer)
            self._changed.notify_all()

    def answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the reply to a request for the manifest or for a chunk; raises ValueError if there is none."""
        call = checked(request, {"call": int, "chunk": int})["call"]
        with self._changed:
            self._changed.wait_for(lambda: any(each.call >= call for each in self._offers), _WAIT_S)
            offers = self._offers
        offer = next((each for each in offers if each.call == call), None)
        if not offers or offers[-1].call < call:
            return {"is_ready": False, "never": not offers}, NOTHING
        if offer is None or self._has_result() > call:
            raise ValueError("this member has another state by now")
        if request["chunk"] >= 0:
            return {"is_ready": True}, offer.chunk(request["chunk"])
        data = json.dumps(offer.manifest()._asdict()).encode()
        if len(data) > MOST_PAYLOAD:
            raise ValueError("the state has too many arrays or chunks to be passed on")
        return {"is_ready": True}, data

    def fetch(self, state: Any, call: int, members: Sequence[Member], deadline: Deadline) -> tuple[Any, int] | None:
        """Get the state that `members` have at a call, and write it into `state`; return it and its revision.

        Return None if no member has one.

        Raises:
            PeerLostError: a member could not pass on all of it.
            UsageError: `state` has another form, so that it cannot be written.
        """
        by_member = self._manifests(call, members, deadline)
        if not by_member:
            return None
        counts = Counter(manifest.digest for _, manifest in by_member)
        digest = max(counts, key=lambda each: counts[each])
        serving = [member for member, manifest in by_member if manifest.digest == digest]
        manifest = next(manifest for _, manifest in by_member if manifest.digest == digest)
        most_nbytes = _SLACK_NBYTES + _GROWTH * sum(array.nbytes for array in described(state)[1])
        if manifest.nbytes > most_nbytes:
            raise UsageError(
                f"the state of the other members has {manifest.nbytes} bytes, and this member accepts {most_nbytes}: "
                "pass a state of the same form"
            )
        data = self._chunks(manifest, call, serving, deadline)
        arrays, offset = [], 0
        for dtype, shape in arrays_in(manifest.description):
            count = math.prod(shape)
            part = data[offset : offset + count * dtype.itemsize]
            arrays.append(np.frombuffer(part, np.uint8).view(dtype).reshape(shape))
            offset += count * dtype.itemsize
        return restored(state, manifest.description, arrays), manifest.revision

    def _manifests(self, call: int, members: Sequence[Member], deadline: Deadline) -> list[tuple[Member, Manifest]]:
        manifests: list[tuple[Member, Manifest]] = []
        lock = threading.Lock()

        def get(member: Member) -> None:
            try:
                while not deadline.has_passed():
                    request = {"do": "state", "call": call, "chunk": -1}
                    limit_s = min(deadline.remaining_s(), _WAIT_S + _CHUNK_S)
                    reply, data = self._caller.ask(member, request, limit_s)
                    if reply.get("is_ready") is True:
                        with lock:
                            manifests.append((member, Manifest.parse(data)))
                        return
                    if reply.get("never"):
                        return
            except (OSError, RefusedError, UnisonoError, ValueError) as error:
                _log.debug("%s does not pass its state on: %s", member.name, error)

        _side_by_side([(get, (member,)) for member in members])
        return manifests

    def _chunks(self, manifest: Manifest, call: int, members: Sequence[Member], deadline: Deadline) -> memoryview:
        data = memoryview(bytearray(manifest.nbytes))
        missing: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(len(manifest.chunks)):
            missing.put(index)
        served: Counter[str] = Counter()
        rest = set(range(len(manifest.chunks)))
        lock = threading.Lock()

        def get(member: Member) -> None:
            while not deadline.has_passed():
                try:
                    index = missing.get_nowait()
                except queue.Empty:
                    return
                try:
                    request = {"do": "state", "call": call, "chunk": index}
                    limit_s = min(deadline.remaining_s(), _CHUNK_S)
                    _, chunk = self._caller.ask(member, request, limit_s)
                    if _hash(chunk) != manifest.chunks[index]:
                        raise ValueError("a chunk has another hash than in the manifest")
                except (OSError, RefusedError, UnisonoError, ValueError) as error:
                    missing.put(index)
                    _log.debug("%s does not pass its state on: %s", member.name, error)
                    return
                data[index * CHUNK_NBYTES : index * CHUNK_NBYTES + len(chunk)] = chunk
                with lock:
                    served[member.name] += 1
                    rest.discard(index)

        while rest:
            before = len(rest)
            _side_by_side([(get, (member,)) for member in members for _ in range(_PAIRS)])
            if len(rest) == before:
                raise PeerLostError(
                    f"{len(rest)} of {len(manifest.chunks)} chunks of the state could not be read from any member"
                )
        _log.info("got %d bytes of state, in chunks: %s", manifest.nbytes, dict(served))
        return data


class StateSummary(NamedTuple):
    """The row of a member in a call of `state`: its revision, a digest or 0, and whether it has called it before."""

    revision: int
    digest: int
    has_state: int


def ranks_with_state(rows: Sequence[StateSummary]) -> list[int]:
    """Return the ranks whose state is right: that of most members that had one, or else that of the highest revision.

    >>> ranks_with_state([StateSummary(5, 11, 1), StateSummary(5, 12, 1), StateSummary(5, 11, 1)])
    [0, 2]
    >>> ranks_with_state([StateSummary(0, 0, 0), StateSummary(7, 0, 0)])
    [1]
    """
    counts = Counter(row for row in rows if row.has_state)
    if not counts:
        newest = max(row.revision for row in rows)
        return [next(rank for rank, row in enumerate(rows) if row.revision == newest)]
    right = max(counts, key=lambda row: (counts[row], -rows.index(row)))
    return [rank for rank, row in enumerate(rows) if row == right]


def check_drift(names: Sequence[str], ranks: Sequence[int], me: int, *, must_end: bool) -> None:
    """Name the members whose state differs from that of `ranks`; if this one must end, raise an error.

    Raises:
        CorruptionError: the state of this member differs, and `must_end`.
    """
    odd = [rank for rank in range(len(names)) if rank not in ranks]
    if not odd:
        return
    text = f"the state of {', '.join(names[rank] for rank in odd)} differs from that of the other members"
    _log.warning("%s", text)
    if must_end and me in odd:
        raise CorruptionError(text, peer=me)


def checked_revision(revision: object) -> int:
    """Return `revision` as an int; raises UsageError unless it is a whole number from 0 to 2^62 - 1."""
    if isinstance(revision, bool) or not isinstance(revision, (int, np.integer)) or not 0 <= int(revision) < 1 << 62:
        raise UsageError(f"revision must be a whole number, 0 or more, that grows with each step; got {revision!r}")
    return int(revision)


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_HASH_NBYTES).hexdigest()


def _side_by_side(tasks: Sequence[tuple[Any, tuple[Any, ...]]]) -> None:
    threads = [threading.Thread(target=task, args=arguments, daemon=True) for task, arguments in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
