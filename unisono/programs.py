"""What a framework needs for calls inside compiled programs: the world, the collectives, and the handler of XLA.

The calls themselves are registered by `Communicator.program_calls`.

Used by: `unisono.frameworks.jax`.
"""

from __future__ import annotations

from unisono.collectives.bootstrap.init import open_world
from unisono.collectives.calls.programs import distributes_rows, reduces, xla_handler, xla_process, xla_runner

__all__ = ["distributes_rows", "open_world", "reduces", "xla_handler", "xla_process", "xla_runner"]
