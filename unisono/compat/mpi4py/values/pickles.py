"""`Pickle`, which turns objects into bytes and back, and `pickle`, which the lower-case calls use.

Unpickling runs code that the sender chooses. So pickles travel over authenticated links only.
"""

from __future__ import annotations

import pickle as standard
from collections.abc import Callable
from typing import Any

from unisono.compat.mpi4py.memory.access import buffer, memory_of


class Pickle:
    """Functions that dump and load objects.

    Attributes:
        PROTOCOL: the protocol of pickle.
        THRESHOLD: the least number of bytes of a part of memory that `dumps_oob` leaves out of the pickle.
    """

    def __init__(
        self,
        dumps: Callable[..., bytes] | None = None,
        loads: Callable[[Any], Any] | None = None,
        protocol: int | None = None,
        threshold: int | None = None,
    ) -> None:
        self._dumps, self._loads = dumps or standard.dumps, loads or standard.loads
        is_standard = dumps is None
        self.PROTOCOL = protocol if protocol is not None or not is_standard else standard.HIGHEST_PROTOCOL
        self.THRESHOLD = threshold

    @property
    def THRESHOLD(self) -> int:
        return self._threshold

    @THRESHOLD.setter
    def THRESHOLD(self, nbytes: int | None) -> None:
        self._threshold = 1 << 18 if nbytes is None else nbytes

    def dumps(self, obj: Any) -> bytes:
        """Return the pickle of an object."""
        return self._dumps(obj) if self.PROTOCOL is None else self._dumps(obj, self.PROTOCOL)

    def loads(self, data: Any) -> Any:
        """Return the object of a pickle."""
        return self._loads(data)

    def dumps_oob(self, obj: Any) -> tuple[bytes, list[Any]]:
        """Return the pickle of an object without its large parts of memory, and these parts."""
        parts: list[Any] = []

        def keep(part: Any) -> bool:
            memory = memory_of(part.raw())
            if memory.size < self.THRESHOLD:
                return True
            parts.append(buffer._of(memory, part))
            return False

        protocol = standard.HIGHEST_PROTOCOL if self.PROTOCOL is None else max(self.PROTOCOL, 5)
        return self._dumps(obj, protocol, buffer_callback=keep), parts

    def loads_oob(self, data: Any, buffers: Any) -> Any:
        """Return the object of a pickle and its parts."""
        return self._loads(data, buffers=buffers)  # type: ignore[call-arg]


pickle = Pickle()
