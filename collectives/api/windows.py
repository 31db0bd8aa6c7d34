"""`Communicator.window`: one-sided access to memory of other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.collectives.calls.dispatch import Dispatcher
from unisono.options import Options
from unisono.tuning.decide.choice import NO_STATE, TunerState

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from unisono.collectives.calls.planning import HostLayout
    from unisono.collectives.windows.contracts import WindowComm
    from unisono.collectives.windows.window import OpenWindow, Window
    from unisono.transports.contracts.executor import Executor, WindowExecutor


class Windows(Dispatcher):
    """The method that makes windows, and the windows of this communicator that are open."""

    def __init__(
        self, executor: Executor, host_layout: HostLayout, options: Options, tuner_state: TunerState = NO_STATE
    ) -> None:
        super().__init__(executor, host_layout, options, tuner_state)
        self._windows: list[OpenWindow] = []

    def window(
        self,
        shape_or_array: Any,
        dtype: DTypeLike | None = None,
        *,
        contiguous: bool = False,
        timeout_s: float | None = None,
    ) -> Window:
        """Make a window: memory of all ranks that each of them accesses by itself. All ranks call it.

        Each rank exposes a part. With a shape, the library makes the part, of zeros. Ranks of a host then access the
        parts of each other directly, in shared memory. With an array of the user, every access of another rank is a
        message to a thread of this rank. The parts may have different lengths, and a part may have none: pass 0.

        The window is closed by its `free`, as a context manager, or with this communicator.

        Args:
            shape_or_array: the shape of this rank's part; or a numpy array that becomes the part, contiguous in C
                order and writable.
            dtype: the dtype of the elements, the same on all ranks; float64 by default, or that of the array.
            contiguous: put the parts of a host one right after the other, without gaps. Otherwise each begins at a
                cache line of its own. The same on all ranks.
            timeout_s: seconds until the call fails; by default the option `timeout_s`.

        Raises:
            UsageError: the arguments are wrong, the links of the communicator do not belong to the native core, or a
                rank has no memory for its part; then all ranks raise it.
            MismatchError: ranks pass different dtypes. The communicator stays usable.
            PeerLostError, CollectiveTimeoutError, AbortedError: as in `allgather`.

        >>> import numpy as np, unisono as un
        >>> def halo(world):
        ...     with world.window(4, "float64") as window:
        ...         with window.fence():
        ...             window.put(float(world.rank), (world.rank + 1) % world.size, at=3)
        ...         return window.array.tolist()
        >>> un.launch(halo, 2)
        [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
        """
        self._check_alone()
        from unisono.collectives.windows.creation import create, planned

        limit_s, plan = self._limit_s(timeout_s), planned(shape_or_array, dtype)
        comm, executor = self._for_window()
        try:
            window = create(comm, executor, plan, is_contiguous=contiguous, timeout_s=limit_s)
        except BaseException:
            comm.close()
            raise
        self._windows = [each for each in self._windows if not each.is_closed]
        self._windows.append(window._opened)
        return window

    def _for_window(self) -> tuple[WindowComm, WindowExecutor]:
        """Return a communicator of these ranks for one window alone, and its executor."""
        raise NotImplementedError
