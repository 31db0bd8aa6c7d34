"""Collectives and messages of Python objects, which travel as pickles.

Used by: `Communicator`, which inherits from `Objects`.

Theory of operation
-------------------
The sender pickles an object with protocol 5, which can leave large pieces of memory out of the pickle. Pieces of at
least 64 KiB, such as the data of arrays, stay where they are. Each is a *part*. Everything else is one stream of bytes,
the *head*, which ends with the lengths of the parts. The sender then sends three things:

1. The *header*, two numbers: the length of the head, and the number of parts. With it the receiver allocates the head.
   If the object cannot be pickled, the length is negative, and the head is the reason as text.
2. The head. With the lengths at its end, the receiver allocates the parts.
3. The parts, one by one. The received object uses their memory, so they are never copied again.

Unpickling runs code that the sender chooses. So heads and parts travel only over authenticated links. UCX, MPI and the
transports of other packages are not authenticated; there, a second communicator of the same ranks has links that are.
The header still travels over this communicator, so that ranks that make different calls get a `MismatchError`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono.collectives.api.collectives import Collectives
from unisono.collectives.api.vector_collectives import VectorCollectives
from unisono.collectives.calls.arguments import checked_integer
from unisono.collectives.calls.message_handoff import NO_RANK, waits_for_itself
from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.foundation.deadlines import Deadline
from unisono.foundation.records import record
from unisono.transports.contracts.call import AnyArray
from unisono.transports.contracts.transport import (
    ANY_OBJECT_TAG,
    FIRST_RESERVED_TAG,
    OWN_BUFFER_NBYTES,
    OWN_MESSAGE_NBYTES,
)
from unisono.transports.contracts.wildcards import ANY_SOURCE, ANY_TAG, AnySource, AnyTag

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A shorter piece of memory costs less to copy into the head than to send as a part.
_LEAST_PART_NBYTES = 64 << 10
# Tags of arrays are below this one, so an object is never received as an array.
_OBJECT_TAG = FIRST_RESERVED_TAG
_MOST_TAG = ANY_OBJECT_TAG - _OBJECT_TAG - 1
# The tag of the parts in a gather or scatter, above the tags of `send_object`.
_PART_TAG = (1 << 32) - 1
_MOST_REASON = 1000
_BYTE, _NUMBER = DTYPES["uint8"], DTYPES["int64"]


@record
class _PickledObject:
    """A pickled object; head and parts are arrays of bytes.

    Attributes:
        head: the stream; or the reason in UTF-8, if the object cannot be pickled.
        parts: the large pieces of memory in the object.
        is_refused: whether the object cannot be pickled.
    """

    head: AnyArray
    parts: list[AnyArray]
    is_refused: bool = False

    @property
    def header(self) -> AnyArray:
        return np.array([-self.head.size if self.is_refused else self.head.size, len(self.parts)], np.int64)


class Objects(Collectives, VectorCollectives):
    """Collectives and messages of Python objects, which `pickle` must be able to dump and load.

    Large arrays in an object are sent from their own memory, and received into memory that the new object keeps. A rank
    gets its own object back itself, not a copy. These calls are for convenience: arrays are faster as arrays.

    Each call consists of several messages or collectives. So two threads that share a communicator must not make such
    calls at the same time.

    All of them take `timeout_s`, the seconds until the call fails, by default the option `timeout_s`. They raise the
    errors of `Collectives`, and this one:

    - `UsageError`: an object cannot be pickled. Every rank of the call raises it, and later calls work. Or an object of
      another rank cannot be unpickled here. Only this rank raises it, after the call has ended. Or this rank has not
      enough memory for an object of another rank. Then the call cannot be completed on the other ranks either.
    """

    def broadcast_object(self, obj: Any = None, root: int = 0, *, timeout_s: float | None = None) -> Any:
        """Return the object of the root; other ranks' `obj` is ignored.

        >>> import unisono as un
        >>> un.launch(lambda world: world.broadcast_object({"seed": 7} if world.rank == 1 else None, root=1), 2)
        [{'seed': 7}, {'seed': 7}]
        """
        self._check_alone()
        root, remaining_s = self._rank_of(root, "root"), Deadline(self._limit_s(timeout_s)).remaining_s
        mine = _pickle(obj) if self.rank == root else None
        header = self.broadcast(mine.header if mine else np.empty(2, np.int64), root, timeout_s=remaining_s())
        self._check_pickled(header[None], mine, root, remaining_s)
        head = mine.head if mine else self._room(header[0], root)
        self._share(head, root, remaining_s)
        parts = mine.parts if mine else self._new_parts(head, header[1], root)
        for part in parts:
            self._share(part, root, remaining_s)
        return obj if mine else self._unpickle(root, head, parts)

    def allgather_object(self, obj: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Return the objects of all ranks, in the order of ranks.

        >>> import unisono as un
        >>> un.launch(lambda world: world.allgather_object("ab"[world.rank]), 2)
        [['a', 'b'], ['a', 'b']]
        """
        self._check_alone()
        remaining_s, mine = Deadline(self._limit_s(timeout_s)).remaining_s, _pickle(obj)
        headers = self.allgather(mine.header[None], timeout_s=remaining_s())
        self._check_pickled(headers, mine, None, remaining_s)
        counts = headers[:, 0].tolist()
        heads = _split(self._for_objects().allgatherv(mine.head, counts, timeout_s=remaining_s()), counts)
        parts = [
            mine.parts if rank == self.rank else self._new_parts(heads[rank], headers[rank, 1], rank)
            for rank in range(self.size)
        ]
        for rank, parts_of_rank in enumerate(parts):
            for part in parts_of_rank:
                self._share(part, rank, remaining_s)
        return self._unpickle_all(heads, parts, obj)

    def gather_object(self, obj: Any, root: int = 0, *, timeout_s: float | None = None) -> list[Any] | None:
        """Return the objects of all ranks, in the order of ranks, on the root; None on other ranks.

        >>> import unisono as un
        >>> un.launch(lambda world: world.gather_object("ab"[world.rank], root=1), 2)
        [None, ['a', 'b']]
        """
        self._check_alone()
        root, remaining_s, mine = (
            self._rank_of(root, "root"),
            Deadline(self._limit_s(timeout_s)).remaining_s,
            _pickle(obj),
        )
        headers = self.allgather(mine.header[None], timeout_s=remaining_s())
        self._check_pickled(headers, mine, None, remaining_s)
        counts = headers[:, 0].tolist()
        stream = self._for_objects().gatherv(mine.head, counts, root, timeout_s=remaining_s())
        if stream is None:
            self._send_parts(mine.parts, root, _PART_TAG, remaining_s)
            return None
        heads, parts = _split(stream, counts), []
        for rank, head in enumerate(heads):
            parts.append(mine.parts if rank == self.rank else self._new_parts(head, headers[rank, 1], rank))
            if rank != self.rank:
                self._recv_parts(parts[rank], rank, _PART_TAG, remaining_s)
        return self._unpickle_all(heads, parts, obj)

    def scatter_object(
        self, objs: Sequence[Any] | None = None, root: int = 0, *, timeout_s: float | None = None
    ) -> Any:
        """Return this rank's object of the root's `objs`, of which rank r gets the rth; other ranks' `objs` is ignored.

        Raises:
            UsageError: the root passes another number of objects than there are ranks; nothing has been sent.

        >>> import unisono as un
        >>> un.launch(lambda world: world.scatter_object(["a", "b"] if world.rank == 0 else None), 2)
        ['a', 'b']
        """
        self._check_alone()
        root, remaining_s = self._rank_of(root, "root"), Deadline(self._limit_s(timeout_s)).remaining_s
        all_pickled: list[_PickledObject] = []
        if self.rank == root:
            if not isinstance(objs, Sequence) or len(objs) != self.size:
                raise UsageError(f"objs must be a sequence of {self.size} objects, one for each rank")
            all_pickled = [_pickle(obj) for obj in objs]
        headers = (
            np.array([pickled.header for pickled in all_pickled], np.int64)
            if all_pickled
            else np.empty((self.size, 2), "i8")
        )
        headers = self.broadcast(headers, root, timeout_s=remaining_s())
        refused = next((pickled for pickled in all_pickled if pickled.is_refused), None)
        self._check_pickled(headers, refused, root, remaining_s)
        counts = headers[:, 0].tolist()
        head = self._room(counts[self.rank], root)
        stream = np.concatenate([pickled.head for pickled in all_pickled]) if all_pickled else None
        self._for_objects().scatterv(stream, counts, root, out=head, timeout_s=remaining_s())
        if objs is not None and self.rank == root:
            for rank, pickled in enumerate(all_pickled):
                if rank != root:
                    self._send_parts(pickled.parts, rank, _PART_TAG, remaining_s)
            return objs[root]
        parts = self._new_parts(head, headers[self.rank, 1], root)
        self._recv_parts(parts, root, _PART_TAG, remaining_s)
        return self._unpickle(root, head, parts)

    def send_object(self, obj: Any, dest: int, tag: int = 0, *, timeout_s: float | None = None) -> None:
        """Send an object to rank `dest`, which must call `recv_object` with the same tag.

        It returns when the caller may change `obj`. A `recv` of an array never receives an object, even of the same
        tag.

        Args:
            obj: the object.
            dest: a rank, or `NOBODY`. At least 1 MiB of messages to this rank itself are buffered. A larger object is
                refused if there is no other thread to receive it.
            tag: 0 to 2^30 - 1. Objects of one tag arrive in the order in which they were sent.
            timeout_s: seconds until the call fails; by default the option `timeout_s`.

        >>> import unisono as un
        >>> def handed_on(world):
        ...     return world.send_object({"loss": 0.5}, 1) if world.rank == 0 else world.recv_object(0)
        >>> un.launch(handed_on, 2)
        [None, {'loss': 0.5}]
        """
        self._check_alone()
        dest, tag = self._peer_of(dest, "dest"), checked_integer(tag, "tag", 0, _MOST_TAG) | _OBJECT_TAG
        remaining_s = Deadline(self._limit_s(timeout_s)).remaining_s
        if dest == NO_RANK:
            return
        pickled = _pickle(obj)
        if dest == self.rank:
            self._check_room(pickled, tag)
        self._executor.send(pickled.header, _NUMBER, dest, tag).wait(remaining_s())
        self._send_parts([pickled.head, *pickled.parts], dest, tag, remaining_s)
        if pickled.is_refused:
            raise self._refused(self.rank, pickled.head)

    def recv_object(self, source: int | AnySource, tag: int | AnyTag = 0, *, timeout_s: float | None = None) -> Any:
        """Return the next object that rank `source` sends with this tag; see `send_object`.

        `source` may be `ANY_SOURCE`, and `tag` may be `ANY_TAG`. It returns None if `source` is `NOBODY`.
        """
        self._check_alone()
        rank = None if source is ANY_SOURCE else self._peer_of(source, "source")
        number = ANY_OBJECT_TAG if tag is ANY_TAG else checked_integer(tag, "tag", 0, _MOST_TAG) | _OBJECT_TAG
        remaining_s, header = Deadline(self._limit_s(timeout_s)).remaining_s, np.empty(2, np.int64)
        if rank == NO_RANK:
            return None
        receiving = self._executor.recv(header, _NUMBER, rank, number)
        receiving.wait(remaining_s())
        message = receiving.message()
        assert message is not None, "a receive that has ended has got a message"
        source, number = message.source, message.tag
        head = self._room(abs(header[0]), source)
        self._recv_parts([head], source, number, remaining_s)
        if header[0] < 0:
            raise self._refused(source, head)
        parts = self._new_parts(head, header[1], source)
        self._recv_parts(parts, source, number, remaining_s)
        return self._unpickle(source, head, parts)

    def _check_room(self, pickled: _PickledObject, tag: int) -> None:
        """Check that a pickled object can be sent to this rank itself, which receives it later.

        Raises:
            UsageError: the buffer for messages to this rank itself has no room for it.
        """
        messages = [pickled.header, pickled.head, *pickled.parts]
        nbytes = sum(message.nbytes + OWN_MESSAGE_NBYTES for message in messages) - OWN_MESSAGE_NBYTES
        if any(waits_for_itself(each._executor, tag, nbytes) for each in {self, self._for_objects()}):
            raise UsageError(
                f"an object of {nbytes} bytes for this rank itself ({self.rank}) does not fit into the rest of a "
                f"buffer of {OWN_BUFFER_NBYTES} bytes: receive earlier ones before, or keep the object"
            )

    def _for_objects(self) -> Objects:
        """Return the communicator of these ranks over which objects travel."""
        raise NotImplementedError

    def _check_pickled(
        self, headers: NDArray[Any], mine: _PickledObject | None, root: int | None, remaining_s: Callable[[], float]
    ) -> None:
        """Raise the same `UsageError` on all ranks if an object could not be pickled.

        Args:
            headers: a header in each row, the same on all ranks: of each rank, or of the root's objects.
            mine: this rank's object; its head is the reason, if this rank could not pickle it.
            root: the rank whose headers they are; None if each row is of its own rank.
            remaining_s: returns the remaining seconds.
        """
        refused = np.flatnonzero(headers[:, 0] < 0)
        if refused.size == 0:
            return
        speaker = int(refused[0]) if root is None else root
        reason = mine.head if mine and self.rank == speaker else self._room(-headers[refused[0], 0], speaker)
        self._share(reason, speaker, remaining_s)
        raise self._refused(speaker, reason)

    def _new_parts(self, head: AnyArray, count: int, rank: int) -> list[AnyArray]:
        """Return new arrays of the lengths at the end of a `head`, which `rank` has sent."""
        if not 0 <= count <= head.size // _NUMBER.itemsize:
            raise self._impossible(rank, f"{count} parts")
        lengths = np.frombuffer(head[head.size - _NUMBER.itemsize * count :].tobytes(), np.int64)
        return [self._room(length, rank) for length in lengths]

    def _room(self, nbytes: int, rank: int) -> AnyArray:
        """Return memory for a part of an object, whose length `rank` has sent."""
        try:
            return np.empty(nbytes, np.uint8)
        except (MemoryError, ValueError, OverflowError):
            raise self._impossible(rank, f"{nbytes} bytes") from None

    def _impossible(self, rank: int, length: str) -> UsageError:
        sender = self._executor.members[rank]
        return UsageError(f"rank {sender} announced an object of {length}, which cannot be received here", peer=sender)

    def _refused(self, rank: int, reason: AnyArray) -> UsageError:
        speaker, text = self._executor.members[rank], bytes(reason).decode(errors="replace")
        return UsageError(f"rank {speaker} cannot pickle its object: {text}", peer=speaker)

    def _share(self, array: AnyArray, root: int, remaining_s: Callable[[], float]) -> None:
        """Broadcast the root's bytes into the array `array` of each other rank."""
        # The broadcast runs in place. If the root's memory is read-only, it makes a result there that nobody uses.
        out = array if array.flags.writeable else None
        self._for_objects().broadcast(array, root, out=out, timeout_s=remaining_s())

    def _send_parts(self, parts: list[AnyArray], dest: int, tag: int, remaining_s: Callable[[], float]) -> None:
        executor = self._for_objects()._executor
        for part in parts:
            executor.send(part, _BYTE, dest, tag).wait(remaining_s())

    def _recv_parts(self, parts: list[AnyArray], source: int, tag: int, remaining_s: Callable[[], float]) -> None:
        executor = self._for_objects()._executor
        for part in parts:
            executor.recv(part, _BYTE, source, tag).wait(remaining_s())

    def _unpickle_all(self, heads: list[AnyArray], parts: list[list[AnyArray]], mine: Any) -> list[Any]:
        return [
            mine if rank == self.rank else self._unpickle(rank, heads[rank], parts[rank]) for rank in range(self.size)
        ]

    def _unpickle(self, rank: int, head: AnyArray, parts: list[AnyArray]) -> Any:
        try:
            return pickle.loads(head.data, buffers=parts)
        except Exception as error:
            sender = self._executor.members[rank]
            raise UsageError(f"the object of rank {sender} cannot be unpickled here: {_description(error)}") from error


def _pickle(obj: Any) -> _PickledObject:
    parts: list[AnyArray] = []

    def stays_in_head(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes >= _LEAST_PART_NBYTES:
            parts.append(np.frombuffer(memory, np.uint8))
        return memory.nbytes < _LEAST_PART_NBYTES

    stream = io.BytesIO()
    try:
        pickle.Pickler(stream, protocol=5, buffer_callback=stays_in_head).dump(obj)
    except Exception as error:  # noqa: BLE001  (pickling runs code of the object's classes)
        return _PickledObject(
            np.frombuffer(_description(error).encode(errors="replace"), np.uint8), [], is_refused=True
        )
    stream.write(np.array([part.size for part in parts], np.int64).tobytes())
    return _PickledObject(np.frombuffer(stream.getbuffer(), np.uint8), parts)


def _description(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MOST_REASON]


def _split(stream: AnyArray, counts: list[int]) -> list[AnyArray]:
    return np.split(stream, np.cumsum(counts)[:-1])
