"""Collectives and messages of Python objects, by pickle.

Theory of operation. An object is pickled with protocol 5. Memory in it that offers itself to be sent apart, as the data
of arrays does, and is large stays where it is (a *part*); all else goes into one stream of bytes, the *head*, at whose
end are the lengths of the parts. A *header* of two numbers goes first, so that everybody can make room: the length of
the head and the number of parts. The parts follow one by one, from the memory of the sender's object to fresh memory,
in which the received object stays. An object that cannot be pickled is told by a negative length; the head is then the
reason.

Unpickling runs what the sender chose. So heads and parts travel only over links that are authenticated. Where the
transports of the job are not (UCX, MPI, those of other packages), a communicator of the same ranks beside this one has
such links. The header, which is two numbers, still goes over this one, so that ranks which call different things get a
`MismatchError`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono.collectives.api.collectives import Collectives
from unisono.collectives.api.vector_collectives import VectorCollectives
from unisono.collectives.calls.dispatch import checked_integer
from unisono.deadlines import Deadline
from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.records import record
from unisono.transports.contracts.call import AnyArray
from unisono.transports.contracts.transport import FIRST_RESERVED_TAG

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Shorter memory costs less to copy into the head than to send apart.
_LEAST_PART_NBYTES = 64 << 10
_MOST_TAG = (1 << 30) - 1
# Tags of arrays end below this, so that objects and arrays do not meet.
_OBJECT_TAG = FIRST_RESERVED_TAG
# The tag of the parts in a gather or scatter, beyond those of `send_object`.
_PART_TAG = (1 << 32) - 1
_MOST_REASON = 1000
_BYTE, _NUMBER = DTYPES["uint8"], DTYPES["int64"]


@record
class _Parcel:
    """A pickled object, or the room for one; head and parts are arrays of bytes.

    Attributes:
        head: the stream; the reason, in UTF-8, if the object cannot be pickled.
        parts: the large pieces of memory in the object.
        is_refused: whether it cannot be pickled.
    """

    head: AnyArray
    parts: list[AnyArray]
    is_refused: bool = False

    @property
    def header(self) -> AnyArray:
        return np.array([-self.head.size if self.is_refused else self.head.size, len(self.parts)], np.int64)


class Objects(Collectives, VectorCollectives):
    """Calls on Python objects, which `pickle` must be able to take apart on one rank and put together on others.

    Large arrays in an object are sent from where they lie, and stay in the memory that they are received into. A rank
    gets its own object back as it is, not a copy. Objects are for convenience: arrays are best sent as arrays.

    Each call is more than one message or collective inside, so that threads which share a communicator must not make
    such calls at the same time.

    All of them take `timeout_s`, the seconds until the call fails, by default the option `timeout_s`; and raise, beside
    what `Collectives` says:

    - `UsageError`: an object cannot be pickled; on every rank that takes part, and later calls go on. Or the object of
      another rank cannot be unpickled here; on this rank alone, after the call has ended.
    """

    def broadcast_object(self, obj: Any = None, root: int = 0, *, timeout_s: float | None = None) -> Any:
        """Return the object of the root; the `obj` of others does not matter.

        >>> import unisono as un
        >>> un.launch(lambda world: world.broadcast_object({"seed": 7} if world.rank == 1 else None, root=1), 2)
        [{'seed': 7}, {'seed': 7}]
        """
        self._check_alone()
        root, left_s = self._rank_of(root, "root"), Deadline(self._limit_s(timeout_s)).left_s
        mine = _pack(obj) if self.rank == root else None
        header = self.broadcast(mine.header if mine else np.empty(2, np.int64), root, timeout_s=left_s())
        self._check_pickled(header[None], mine, root, left_s)
        head = mine.head if mine else np.empty(header[0], np.uint8)
        self._share(head, root, left_s)
        parts = mine.parts if mine else _room_for_parts(head, header[1])
        for part in parts:
            self._share(part, root, left_s)
        return obj if mine else self._unpack(root, head, parts)

    def allgather_object(self, obj: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Return the objects of all ranks, in their order.

        >>> import unisono as un
        >>> un.launch(lambda world: world.allgather_object("ab"[world.rank]), 2)
        [['a', 'b'], ['a', 'b']]
        """
        self._check_alone()
        left_s, mine = Deadline(self._limit_s(timeout_s)).left_s, _pack(obj)
        headers = self.allgather(mine.header[None], timeout_s=left_s())
        self._check_pickled(headers, mine, None, left_s)
        counts = headers[:, 0].tolist()
        heads = _split(self._for_objects().allgatherv(mine.head, counts, timeout_s=left_s()), counts)
        parts = [
            mine.parts if rank == self.rank else _room_for_parts(heads[rank], headers[rank, 1])
            for rank in range(self.size)
        ]
        for rank, those in enumerate(parts):
            for part in those:
                self._share(part, rank, left_s)
        return self._unpack_all(heads, parts, obj)

    def gather_object(self, obj: Any, root: int = 0, *, timeout_s: float | None = None) -> list[Any] | None:
        """Return the objects of all ranks, in their order, on the root, and None on the others.

        >>> import unisono as un
        >>> un.launch(lambda world: world.gather_object("ab"[world.rank], root=1), 2)
        [None, ['a', 'b']]
        """
        self._check_alone()
        root, left_s, mine = self._rank_of(root, "root"), Deadline(self._limit_s(timeout_s)).left_s, _pack(obj)
        headers = self.allgather(mine.header[None], timeout_s=left_s())
        self._check_pickled(headers, mine, None, left_s)
        counts = headers[:, 0].tolist()
        stream = self._for_objects().gatherv(mine.head, counts, root, timeout_s=left_s())
        if stream is None:
            self._send_parts(mine.parts, root, _PART_TAG, left_s)
            return None
        heads, parts = _split(stream, counts), []
        for rank, head in enumerate(heads):
            parts.append(mine.parts if rank == self.rank else _room_for_parts(head, headers[rank, 1]))
            if rank != self.rank:
                self._recv_parts(parts[rank], rank, _PART_TAG, left_s)
        return self._unpack_all(heads, parts, obj)

    def scatter_object(
        self, objs: Sequence[Any] | None = None, root: int = 0, *, timeout_s: float | None = None
    ) -> Any:
        """Return the object of the root's `objs` that is for this rank; the `objs` of others do not matter.

        Raises:
            UsageError: the root has not as many objects as there are ranks; nothing has been sent.

        >>> import unisono as un
        >>> un.launch(lambda world: world.scatter_object(["a", "b"] if world.rank == 0 else None), 2)
        ['a', 'b']
        """
        self._check_alone()
        root, left_s = self._rank_of(root, "root"), Deadline(self._limit_s(timeout_s)).left_s
        parcels: list[_Parcel] = []
        if self.rank == root:
            if not isinstance(objs, Sequence) or len(objs) != self.size:
                raise UsageError(f"objs must be a sequence of {self.size} objects, one for each rank")
            parcels = [_pack(obj) for obj in objs]
        headers = (
            np.array([parcel.header for parcel in parcels], np.int64) if parcels else np.empty((self.size, 2), "i8")
        )
        headers = self.broadcast(headers, root, timeout_s=left_s())
        refused = next((parcel for parcel in parcels if parcel.is_refused), None)
        self._check_pickled(headers, refused, root, left_s)
        counts = headers[:, 0].tolist()
        head: AnyArray = np.empty(counts[self.rank], np.uint8)
        stream = np.concatenate([parcel.head for parcel in parcels]) if parcels else None
        self._for_objects().scatterv(stream, counts, root, out=head, timeout_s=left_s())
        if objs is not None and self.rank == root:
            for rank, parcel in enumerate(parcels):
                if rank != root:
                    self._send_parts(parcel.parts, rank, _PART_TAG, left_s)
            return objs[root]
        parts = _room_for_parts(head, headers[self.rank, 1])
        self._recv_parts(parts, root, _PART_TAG, left_s)
        return self._unpack(root, head, parts)

    def send_object(self, obj: Any, dest: int, tag: int = 0, *, timeout_s: float | None = None) -> None:
        """Send an object to rank `dest`, which must call `recv_object` with the same tag.

        Returns when `obj` may be changed. Objects and arrays of the same tag do not meet.

        Args:
            obj: the object.
            dest: another rank.
            tag: 0 to 2^30 - 1. Objects of one tag arrive in the order in which they were sent.
            timeout_s: as above.

        >>> import unisono as un
        >>> def handed_on(world):
        ...     return world.send_object({"loss": 0.5}, 1) if world.rank == 0 else world.recv_object(0)
        >>> un.launch(handed_on, 2)
        [None, {'loss': 0.5}]
        """
        self._check_alone()
        dest, tag = self._peer_of(dest, "dest"), checked_integer(tag, "tag", 0, _MOST_TAG) | _OBJECT_TAG
        left_s, parcel = Deadline(self._limit_s(timeout_s)).left_s, _pack(obj)
        self._executor.send(parcel.header, _NUMBER, dest, tag).wait(left_s())
        self._send_parts([parcel.head, *parcel.parts], dest, tag, left_s)
        if parcel.is_refused:
            raise self._refused(self.rank, parcel.head)

    def recv_object(self, source: int, tag: int = 0, *, timeout_s: float | None = None) -> Any:
        """Return the next object that rank `source` sends with this tag; as `send_object`."""
        self._check_alone()
        source, tag = self._peer_of(source, "source"), checked_integer(tag, "tag", 0, _MOST_TAG) | _OBJECT_TAG
        left_s, header = Deadline(self._limit_s(timeout_s)).left_s, np.empty(2, np.int64)
        self._executor.recv(header, _NUMBER, source, tag).wait(left_s())
        head: AnyArray = np.empty(abs(header[0]), np.uint8)
        self._recv_parts([head], source, tag, left_s)
        if header[0] < 0:
            raise self._refused(source, head)
        parts = _room_for_parts(head, header[1])
        self._recv_parts(parts, source, tag, left_s)
        return self._unpack(source, head, parts)

    def _for_objects(self) -> Objects:
        """Return the communicator of these ranks over which objects travel."""
        raise NotImplementedError

    def _check_pickled(
        self, headers: NDArray[Any], mine: _Parcel | None, root: int | None, left_s: Callable[[], float]
    ) -> None:
        """Raise what the first rank whose header is negative, or the root, says of that; on all ranks.

        Args:
            headers: rows that are the same on all ranks; each of its own rank, or all of the root.
            mine: this rank's parcel, which has the reason if it is this rank that says it.
            root: whose headers they are, if of one rank.
            left_s: returns the seconds that are left.
        """
        refused = np.flatnonzero(headers[:, 0] < 0)
        if refused.size == 0:
            return
        speaker = int(refused[0]) if root is None else root
        reason = mine.head if mine and self.rank == speaker else np.empty(-headers[refused[0], 0], np.uint8)
        self._share(reason, speaker, left_s)
        raise self._refused(speaker, reason)

    def _refused(self, rank: int, reason: AnyArray) -> UsageError:
        speaker = self._executor.members[rank]
        return UsageError(f"rank {speaker} cannot pickle its object: {bytes(reason).decode()}", peer=speaker)

    def _share(self, array: AnyArray, root: int, left_s: Callable[[], float]) -> None:
        """Copy the root's bytes into the `array` of all others."""
        # In place, unless the root may only read them: then what comes out there is of no use.
        out = array if array.flags.writeable else None
        self._for_objects().broadcast(array, root, out=out, timeout_s=left_s())

    def _send_parts(self, parts: list[AnyArray], dest: int, tag: int, left_s: Callable[[], float]) -> None:
        executor = self._for_objects()._executor
        for part in parts:
            executor.send(part, _BYTE, dest, tag).wait(left_s())

    def _recv_parts(self, parts: list[AnyArray], source: int, tag: int, left_s: Callable[[], float]) -> None:
        executor = self._for_objects()._executor
        for part in parts:
            executor.recv(part, _BYTE, source, tag).wait(left_s())

    def _unpack_all(self, heads: list[AnyArray], parts: list[list[AnyArray]], mine: Any) -> list[Any]:
        return [
            mine if rank == self.rank else self._unpack(rank, heads[rank], parts[rank]) for rank in range(self.size)
        ]

    def _unpack(self, rank: int, head: AnyArray, parts: list[AnyArray]) -> Any:
        try:
            return pickle.loads(head.data, buffers=parts)
        except Exception as error:
            sender = self._executor.members[rank]
            raise UsageError(f"the object of rank {sender} cannot be unpickled here: {_said(error)}") from error


def _pack(obj: Any) -> _Parcel:
    parts: list[AnyArray] = []

    def stays_in_head(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes >= _LEAST_PART_NBYTES:
            parts.append(np.frombuffer(memory, np.uint8))
        return memory.nbytes < _LEAST_PART_NBYTES

    stream = io.BytesIO()
    try:
        pickle.Pickler(stream, protocol=5, buffer_callback=stays_in_head).dump(obj)
    except Exception as error:  # noqa: BLE001  (pickling runs what the object's classes say)
        return _Parcel(np.frombuffer(_said(error).encode(errors="replace"), np.uint8), [], is_refused=True)
    stream.write(np.array([part.size for part in parts], np.int64).tobytes())
    return _Parcel(np.frombuffer(stream.getbuffer(), np.uint8), parts)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MOST_REASON]


def _room_for_parts(head: AnyArray, count: int) -> list[AnyArray]:
    """Return new arrays of the lengths at the end of `head`."""
    lengths = np.frombuffer(head[head.size - 8 * count :].tobytes(), np.int64)
    return [np.empty(length, np.uint8) for length in lengths]


def _split(stream: AnyArray, counts: list[int]) -> list[AnyArray]:
    return np.split(stream, np.cumsum(counts)[:-1])
