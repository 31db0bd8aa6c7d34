"""Objects whose large parts of memory travel as messages of their own, so that they are not copied into a pickle.

A *parcel* is a header, which holds the sizes of the parts and the pickle, and then each part. All have one tag, so the
parts arrive behind their header.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from unisono.compat.mpi4py.memory.access import memory_of
from unisono.compat.mpi4py.values.pickles import Pickle

_SIZE = struct.calcsize("<q")


class Parcel(NamedTuple):
    """An object as bytes.

    Attributes:
        header: the number of parts, their sizes, and the pickle, as an array of bytes.
        parts: arrays of bytes.
        memory: the parts one behind the other, if the parcel is arriving.
    """

    header: Any
    parts: list[Any]
    memory: Any = None

    @classmethod
    def of(cls, obj: Any, pickle: Pickle) -> Parcel:
        """Return the parcel of an object, whose memory it shares."""
        data, buffers = pickle.dumps_oob(obj)
        parts = [memory_of(each) for each in buffers]
        sizes = struct.pack(f"<{len(parts) + 1}q", len(parts), *(part.size for part in parts))
        return cls(np.frombuffer(sizes + data, np.uint8), parts)

    @classmethod
    def arriving(cls, header: Any) -> Parcel:
        """Return the parcel of a header, with memory for the parts."""
        (number,) = struct.unpack_from("<q", header)
        sizes = struct.unpack_from(f"<{number}q", header, _SIZE)
        memory = np.empty(sum(sizes), np.uint8)
        return cls(header, np.split(memory, np.cumsum(sizes)[:-1]) if sizes else [], memory)

    def joined(self) -> Any:
        """Return the parts as one array, which is copied if there are several; None if there are no bytes."""
        filled = [part for part in self.parts if part.size]
        return np.concatenate(filled) if len(filled) > 1 else next(iter(filled), None)

    def unpacked(self, pickle: Pickle) -> Any:
        """Return the object, which shares the memory of the parts."""
        return pickle.loads_oob(self.header[_SIZE * (1 + len(self.parts)) :].tobytes(), self.parts)

    def send(self, port: Any, dest: int, tag: int, *, synchronous: bool = False) -> list[Any]:
        """Start to send the parcel, and return the operations; `synchronous` is about the header."""
        header = port.start_send(self.header, dest, tag, synchronous=synchronous)
        return [header, *(port.start_send(part, dest, tag) for part in self.parts)]

    def receive(self, port: Any, source: int, tag: int) -> list[Any]:
        """Start to receive the parts, whose header has arrived, and return the operations."""
        return [port.start_receive(part, source, tag) for part in self.parts]
