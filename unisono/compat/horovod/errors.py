"""The errors of Horovod's API. Each is also an error of Unisono, where Unisono has one for the case."""

from __future__ import annotations

from unisono.errors import CollectiveTimeoutError, MismatchError, UnisonoError, UsageError


class HorovodInternalError(RuntimeError):
    """A call failed. Its cause is the error of Unisono, for example a `PeerLostError` that names the lost rank.

    `elastic.run` restores the last committed state after it, except after the errors of the program below.
    """


class NameMismatchError(MismatchError, HorovodInternalError):
    """Ranks passed different shapes, dtypes, ops or roots under one name. Raised on every rank; later calls work."""


class ArgumentError(UsageError, HorovodInternalError):
    """An argument has a value that it cannot have. Nothing has been sent."""


class DuplicateNameError(UsageError, HorovodInternalError):
    """This rank used a name again while its earlier call of that name had not ended. Other ranks are not affected."""


class StalledError(CollectiveTimeoutError, HorovodInternalError):
    """A name was used by some ranks only, for longer than the time limit. Raised on every rank; later calls work."""


class ShutDownError(UnisonoError, HorovodInternalError):
    """A rank called `shutdown` or ended, so no rank can make calls any more."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  (the name of Horovod)
    """Processes have joined the job, or are about to leave it. `elastic.run` catches it, and calls the function again.

    Attributes:
        skip_sync: whether the state of all ranks is the same, so that it need not be copied.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the ranks of the job have changed")
        self.skip_sync = skip_sync
