"""Sums of sparse vectors over all ranks, by lists of indices.

Theory of operation
-------------------
Each rank has a vector of which most rows are absent: ascending indices, and a row of values for each. The sum has the
rows of all ranks, and equal indices are added. There are three ways:

- *Gathering* is for up to 4 ranks. Each receives the rows of all others, and adds them up. Little of it could be saved,
  and merging partial sums takes longer. Of more ranks, each would receive too many vectors, so partial sums travel.
- *Doubling* is for few rows, because it takes the fewest rounds. In round i, each rank exchanges its partial sum with
  the rank at distance 2^i and adds both. Ranks beyond the largest power of two send their vectors to a partner before,
  and receive the sum after.
- *Splitting* is for many rows, because each row travels twice only. Rank i sums up the rows whose index is i modulo p.
  It receives these rows from all ranks, and all ranks gather the sums. Neighbouring indices have different
  owners, because frequent indices are often neighbours.

A partial sum fills up as it grows. From a certain number of rows on, the *dense form* takes fewer bytes: values for all
indices, and one bit for each, which says whether it is present. With doubling, each pair of ranks changes the form by
itself: both know both halves. With splitting, the ranks exchange the numbers of their rows before they gather them.

All ranks agree first on the facts of the sum: its length, its dtype, and the number of rows of each rank. All choices
follow from agreed facts, so all ranks make the same. A rank whose input is wrong says so then, and all ranks raise.
Each sum of two rows is computed in the order of ranks, so all ranks get the same bits.

Example of doubling: 3 ranks have the rows {0, 5}, {5} and {7} of a vector of 8. Rank 2 sends its row to rank 0, which
then has {0, 5, 7}. Ranks 0 and 1 exchange their rows, and both have {0, 5, 7}. Rank 0 sends these to rank 2.

Reference: Renggli et al., "SparCML: High-performance sparse communication for machine learning", SC 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait as wait_for_futures
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from unisono import CollectiveTimeoutError, Communicator, UnisonoError, UsageError
from unisono.collectives.calls.serial_queue import SerialQueue
from unisono.dtypes import DTYPES
from unisono.foundation.deadlines import Deadline
from unisono.frameworks.arrays import Array, same_bits

# Up to this many ranks gather all rows, if these take fewer bytes than the dense form.
_FEW_RANKS = 4
# Up to this many bytes of all ranks, the time of the rounds counts more than that of the bytes.
_FEW_NBYTES = 256 << 10
_NAMES = tuple(DTYPES)
_DENSE = -1  # in place of the number of rows
_HEADER_NBYTES = 8


class SparseRows(NamedTuple):
    """Some rows of a vector, or in the dense form all of them.

    Attributes:
        places: the indices of the rows, ascending; in the dense form, for each index, whether its row is present.
        values: the rows, an array of two dimensions; in the dense form, a row of zeros for each that is absent.
    """

    places: Array
    values: Array

    @property
    def is_dense(self) -> bool:
        return self.places.dtype == np.bool_


class SparseForm(NamedTuple):
    """The facts of a sum on which all ranks agree, with the forms of its rows on the wire.

    Attributes:
        length: the number of indices.
        width: the number of elements of a row.
        dtype: the dtype of the elements.
    """

    length: int
    width: int
    dtype: np.dtype[Any]

    @property
    def place(self) -> np.dtype[Any]:
        """The dtype of an index on the wire."""
        return np.dtype(np.int32 if self.length <= 1 << 31 else np.int64)

    @property
    def row_nbytes(self) -> int:
        """The bytes of a row with its index."""
        return self.place.itemsize + self.width * self.dtype.itemsize

    @property
    def dense_nbytes(self) -> int:
        """The bytes of the dense form."""
        return self.length * self.width * self.dtype.itemsize + -(-self.length // 8)

    def is_shorter_dense(self, count: int) -> bool:
        """Return whether `count` rows take fewer bytes in the dense form."""
        return count * self.row_nbytes > self.dense_nbytes

    def dense(self, rows: SparseRows) -> SparseRows:
        """Return rows in the dense form."""
        if rows.is_dense:
            return rows
        places, values = np.zeros(self.length, np.bool_), np.zeros((self.length, self.width), self.dtype)
        places[rows.places], values[rows.places] = True, rows.values
        return SparseRows(places, values)

    def shorter(self, rows: SparseRows) -> SparseRows:
        """Return rows that are not dense in the form that takes fewer bytes."""
        return self.dense(rows) if self.is_shorter_dense(rows.places.size) else rows

    def added(self, low: SparseRows, high: SparseRows) -> SparseRows:
        """Return the sum of the rows of lower ranks and of higher ranks, in the shorter form."""
        if low.is_dense or high.is_dense:
            low, high = self.dense(low), self.dense(high)
            return SparseRows(low.places | high.places, low.values + high.values)
        union = np.union1d(low.places, high.places)
        values = np.zeros((union.size, self.width), self.dtype)
        values[np.searchsorted(union, low.places)] = low.values
        values[np.searchsorted(union, high.places)] += high.values
        return self.shorter(SparseRows(union, values))

    def added_all(self, rows: SparseRows, counts: Sequence[int]) -> SparseRows:
        """Return the sum of the rows of all ranks, which follow each other; rank r has `counts[r]` of them."""
        union, slots = np.unique(rows.places, return_inverse=True)
        values, start = np.zeros((union.size, self.width), self.dtype), 0
        for count in counts:
            values[slots[start : start + count]] += rows.values[start : start + count]
            start += count
        return SparseRows(union, values)

    def packed(self, rows: SparseRows) -> Array:
        """Return rows as one array of bytes: the number of rows, the values, and the places."""
        header = np.array([_DENSE if rows.is_dense else rows.places.size])
        places = np.packbits(rows.places) if rows.is_dense else rows.places.astype(self.place, copy=False)
        return np.concatenate([_bytes(part) for part in (header, rows.values, places)])

    def unpacked(self, packed: Array) -> SparseRows:
        """Return the rows that `packed` has written."""
        header = int(packed[:_HEADER_NBYTES].view(np.int64)[0])
        count = self.length if header == _DENSE else header
        end = _HEADER_NBYTES + count * self.width * self.dtype.itemsize
        values = packed[_HEADER_NBYTES:end].view(self.dtype).reshape(count, self.width)
        if header == _DENSE:
            return SparseRows(np.unpackbits(packed[end:], count=count).view(np.bool_), values)
        return SparseRows(packed[end:].view(self.place), values)

    def records(self, rows: SparseRows) -> Array:
        """Return rows as records of equal size: the bytes of the index, and those of the values."""
        records = np.empty((rows.places.size, self.row_nbytes), np.uint8)
        size = self.place.itemsize
        records[:, :size] = _bytes(rows.places.astype(self.place, copy=False)).reshape(len(records), size)
        records[:, size:] = _bytes(rows.values).reshape(len(records), self.row_nbytes - size)
        return records

    def of_records(self, records: Array) -> SparseRows:
        """Return the rows that `records` has written."""
        size = self.place.itemsize
        places, values = _bytes(records[:, :size]).view(self.place), _bytes(records[:, size:]).view(self.dtype)
        return SparseRows(places, values.reshape(len(records), self.width))


class SparseExchange(NamedTuple):
    """The sum of the rows of all ranks, on a communicator of which nothing else uses the messages.

    Attributes:
        comm: the communicator.
        form: the facts of the sum.
        counts: the number of rows of each rank.
        deadline: when the sum must have ended.
    """

    comm: Communicator
    form: SparseForm
    counts: Sequence[int]
    deadline: Deadline

    def way(self) -> Callable[[SparseRows], SparseRows]:
        """Return the way for these counts: a method that takes the rows of this rank, and returns the sum."""
        count = sum(self.counts)
        if self.comm.size <= _FEW_RANKS and not self.form.is_shorter_dense(count):
            return self.gathering
        return self.doubling if count * self.form.row_nbytes <= _FEW_NBYTES else self.splitting

    def gathering(self, rows: SparseRows) -> SparseRows:
        """Return the sum by gathering."""
        left_s = self.deadline.remaining_s()
        calls = [self.comm.allgatherv(part, self.counts, timeout_s=left_s, wait=False) for part in rows]
        places, values = (call.wait(left_s) for call in calls)
        return self.form.added_all(SparseRows(places, values), self.counts)

    def doubling(self, rows: SparseRows) -> SparseRows:
        """Return the sum by doubling."""
        rank, size, form = self.comm.rank, self.comm.size, self.form
        rows, power = form.shorter(rows), 1 << (size.bit_length() - 1)
        if rank >= power:
            self._send(rows, rank - power)
            return self._received(rank - power)
        has_partner = rank + power < size
        if has_partner:
            rows = form.added(rows, self._received(rank + power))
        for distance in (1 << at for at in range(power.bit_length() - 1)):
            peer = rank ^ distance
            other = self._exchanged(rows, peer)
            rows = form.added(rows, other) if rank < peer else form.added(other, rows)
        if has_partner:
            self._send(rows, rank + power)
        return rows

    def splitting(self, rows: SparseRows) -> SparseRows:
        """Return the sum by splitting."""
        comm, form, left = self.comm, self.form, self.deadline.remaining_s
        owners = rows.places % comm.size
        order = np.argsort(owners, kind="stable")
        sent = np.bincount(owners, minlength=comm.size)
        received = comm.alltoall(sent, timeout_s=left()).tolist()
        records = form.records(SparseRows(rows.places[order], rows.values[order]))
        records = comm.alltoallv(records, sent.tolist(), received, timeout_s=left())
        part = form.added_all(form.of_records(records), received)
        counts = comm.allgather(np.array([part.places.size]), timeout_s=left()).tolist()
        if form.is_shorter_dense(sum(counts)):
            return self._gathered_dense(part)
        whole = form.of_records(comm.allgatherv(form.records(part), counts, timeout_s=left()))
        order = np.argsort(whole.places, kind="stable")
        return SparseRows(whole.places[order], whole.values[order])

    def _gathered_dense(self, part: SparseRows) -> SparseRows:
        """Return the parts of all ranks in the dense form; rank i has the rows whose index is i modulo their number."""
        size, length = self.comm.size, self.form.length
        of_rank = [range(owner, length, size) for owner in range(size)]
        own = self.form._replace(length=len(of_rank[self.comm.rank]))
        dense = own.dense(SparseRows(part.places // size, part.values))
        values = self._gathered(
            _bytes(dense.values), [len(each) * self.form.width for each in of_rank], self.form.dtype
        )
        bits = self._gathered(np.packbits(dense.places), [-(-len(each) // 8) for each in of_rank], np.dtype(np.uint8))
        whole = SparseRows(np.empty(length, np.bool_), np.empty((length, self.form.width), self.form.dtype))
        for owner, indices in enumerate(of_rank):
            whole.places[owner::size] = np.unpackbits(bits[owner], count=len(indices)).view(np.bool_)
            whole.values[owner::size] = values[owner].reshape(len(indices), self.form.width)
        return whole

    def _gathered(self, part: Array, counts: Sequence[int], dtype: np.dtype[Any]) -> list[Array]:
        """Return the bytes of all ranks as arrays of a dtype; rank r has `counts[r]` elements."""
        nbytes = [count * dtype.itemsize for count in counts]
        whole = self.comm.allgatherv(part, nbytes, timeout_s=self.deadline.remaining_s())
        return np.split(whole.view(dtype), np.cumsum(counts)[:-1])

    def _send(self, rows: SparseRows, peer: int) -> None:
        self.comm.send(self.form.packed(rows), peer, timeout_s=self.deadline.remaining_s())

    def _received(self, peer: int) -> SparseRows:
        message = self.comm.probe(peer, timeout_s=self.deadline.remaining_s())
        packed = np.empty(message.count, np.uint8)
        return self.form.unpacked(self.comm.recv(packed, peer, timeout_s=self.deadline.remaining_s()))

    def _exchanged(self, rows: SparseRows, peer: int) -> SparseRows:
        """Send rows to a rank, and return those that it sends at the same time."""
        sending = self.comm.send(self.form.packed(rows), peer, timeout_s=self.deadline.remaining_s(), wait=False)
        other = self._received(peer)
        sending.wait(self.deadline.remaining_s())
        return other


class SparseSum:
    """A sum in flight, which is a `Pending`."""

    def __init__(self, comm: Communicator, ended: Any) -> None:
        self._comm, self._ended = comm, ended
        self._sum: tuple[Array, Array] | None = None

    def done(self) -> bool:
        """Return whether the sum has ended, with or without an error."""
        return bool(self._ended.done())

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the sum has ended; raises the errors of `SparseSums.start`."""
        wait_for_futures([self._ended], timeout_s)
        if not self._ended.done():
            text = f"rank {self._comm.rank} waited {timeout_s:g} s for the end of a sum of sparse vectors"
            self._comm.abort(text)
            raise CollectiveTimeoutError(text, rank=self._comm.rank, operation="sum of sparse vectors")
        self._ended.result()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(self)`` when the sum has ended, in any thread."""
        self._ended.add_done_callback(lambda _: callback(self))

    def result(self) -> tuple[Array, Array]:
        """Wait, and return the ascending indices of the sum, and a row of values for each.

        One rank alone gets the values that it passed.
        """
        self.wait()
        assert self._sum is not None, "a sum that has ended without an error has a result"
        return self._sum

    def run(self, timeout_s: float, indices: Any, values: Any, length: int) -> None:
        """Compute the sum in this thread."""
        try:
            self._sum = _sum(self._comm, Deadline(timeout_s), indices, values, length)
        except UnisonoError:
            raise
        except BaseException as error:
            self._comm.abort(f"a sum of sparse vectors was interrupted by {error!r}")
            raise


class SparseSums:
    """Sums of sparse vectors over the ranks of a communicator. All ranks start the same sums in the same order.

    Args:
        comm: the ranks.
        is_own: whether nothing else uses `comm` from the first sum on. Otherwise the first sum duplicates it, so that
            sums and other calls may be in flight at the same time.
    """

    def __init__(self, comm: Communicator, *, is_own: bool = False) -> None:
        self._parent = comm
        self._comm = comm if is_own else None
        self._queue = SerialQueue()

    def start(
        self, indices: Array, values: Array, length: int, *, timeout_s: float | None = None, wait: bool = True
    ) -> SparseSum:
        """Start the sum of a sparse vector of each rank.

        Args:
            indices: integers from 0 to ``length - 1``, ascending, each once. They must not change before the end.
            values: a row for each index: of any shape, the same on all ranks. They must not change before the end.
            length: the number of indices of the vectors, the same on all ranks.
            timeout_s: seconds until the sum fails; by default those of the communicator.
            wait: False computes the sum in another thread. True returns when it has ended.

        Raises:
            UsageError: a rank passed a wrong vector, or the ranks passed vectors of other lengths, widths or dtypes;
                the same on all ranks. `SparseSum.wait` raises it, and so does this method with `wait`.
            PeerLostError, CollectiveTimeoutError, AbortedError: the sum failed; raised likewise.
        """
        if self._comm is None:
            self._comm = self._parent.dup()
        limit_s = self._comm.timeout_s if timeout_s is None else timeout_s
        ticket = self._queue.take()
        started = SparseSum(self._comm, ticket.ended)
        job = partial(started.run, limit_s, indices, values, length)
        if not wait:
            self._queue.do_later(ticket, job)
            return started
        ticket.do(job)
        started.wait()
        return started


# The faults of an input, by number: a predicate, and the text of the error. A predicate may assume that those before
# it are False.
_FAULTS: Sequence[tuple[Callable[[Any, Any, Any], Any], str]] = (
    (lambda _, __, n: isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0, "a length that is no count"),
    (lambda i, _, __: not _is_array(i) or i.ndim != 1 or i.dtype.kind not in "iu", "indices that are no flat integers"),
    (lambda _, v, __: not _is_array(v) or v.dtype.name not in _NAMES, "values that are no array of a known dtype"),
    (lambda i, v, _: v.ndim < 1 or len(v) != len(i), "another number of rows of values than of indices"),
    (lambda i, _, __: (i[1:] <= i[:-1]).any(), "indices that do not ascend, or occur twice: sort and add them"),
    (lambda i, _, n: i.size and (i[0] < 0 or i[-1] >= n), "indices outside of 0 to length - 1"),
)


def _sum(comm: Communicator, deadline: Deadline, indices: Any, values: Any, length: Any) -> tuple[Array, Array]:
    form, counts = _agreed(comm, deadline, indices, values, length)
    rows = SparseRows(
        indices.astype(form.place, copy=False), np.ascontiguousarray(values).reshape(len(values), form.width)
    )
    exchange = SparseExchange(comm, form, counts, deadline)
    with np.errstate(over="ignore", invalid="ignore"):
        total = same_bits(exchange.way())(rows)
    if total.is_dense:
        total = SparseRows(np.flatnonzero(total.places), total.values[total.places])
    return total.places, total.values.reshape(len(total.places), *values.shape[1:])


def _agreed(
    comm: Communicator, deadline: Deadline, indices: Any, values: Any, length: Any
) -> tuple[SparseForm, list[int]]:
    """Return the facts of a sum, and the number of rows of each rank.

    Raises:
        UsageError: a rank passed a wrong vector, or the ranks do not agree; the same on all ranks.
    """
    fault = next((at for at, (is_wrong, _) in enumerate(_FAULTS) if is_wrong(indices, values, length)), -1)
    own = [fault, 0, 0, 0, 0]
    if fault < 0:
        width = int(np.prod(values.shape[1:], dtype=np.int64))
        own = [fault, int(length), width, _NAMES.index(values.dtype.name), indices.size]
    facts = comm.allgather(np.array([own]), timeout_s=deadline.remaining_s())
    wrong = np.flatnonzero(facts[:, 0] >= 0)
    if wrong.size:
        raise UsageError(f"rank {wrong[0]} passed {_FAULTS[facts[wrong[0], 0]][1]}, to a sum of sparse vectors")
    for column, fact in enumerate(("length", "number of elements in a row", "dtype"), 1):
        if (facts[:, column] != facts[0, column]).any():
            shown = [_NAMES[each] for each in facts[:, column]] if fact == "dtype" else facts[:, column].tolist()
            raise UsageError(f"sparse vectors must have one {fact} on all ranks; got {shown}")
    return SparseForm(own[1], own[2], values.dtype), facts[:, 4].tolist()


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def _bytes(x: Array) -> Array:
    """Return the bytes of an array, flat."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)
