"""The means of a framework for its calls: the default communicator and, in compiled programs, the handler of XLA.

The calls themselves are registered by `Communicator.program_calls`.

Used by: `unisono.frameworks.jax`, `unisono.frameworks.keras`, `unisono.frameworks.tensorflow`.
"""

from __future__ import annotations

from unisono.collectives.bootstrap.init import open_world
from unisono.collectives.calls.programs import distributes_rows, reduces, xla_handler, xla_process, xla_runner
from unisono.collectives.communicator import Communicator
from unisono.errors import UsageError

__all__ = ["communicator_or_world", "distributes_rows", "reduces", "xla_handler", "xla_process", "xla_runner"]


def communicator_or_world(comm: Communicator | None) -> Communicator:
    """Return `comm`, or the world that `unisono.init` has made.

    Raises:
        UsageError: `comm` is neither None nor a communicator, or there is not exactly one open world.
    """
    if comm is None:
        return open_world()
    if not isinstance(comm, Communicator):
        raise UsageError(f"comm must be a Communicator, not {type(comm).__name__}")
    return comm
