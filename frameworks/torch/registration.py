"""Registration of the backend with torch.distributed, on request or when torch is imported."""

from __future__ import annotations

import contextlib
from typing import Any

from unisono.frameworks.torch.constants import DEVICES, NAME


def register() -> None:
    """Register the backend for ``init_process_group("unisono")`` and ``new_group(backend="unisono")``.

    A second call does nothing. The other modules of Unisono are imported when a group is created.

    Raises:
        ImportError: torch cannot be imported, or was built without torch.distributed.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise ImportError("this build of torch has no torch.distributed")
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))


def autoload() -> None:
    """Call `register` at the end of ``import torch``. Errors are dropped, because they would make the import fail."""
    with contextlib.suppress(Exception):
        register()


def _create(facts: Any, options: Any) -> Any:
    from unisono.frameworks.torch.process_group import create

    return create(facts, options)
