"""How torch.distributed comes to know the backend: on request, or when torch is imported."""

from __future__ import annotations

import contextlib
from typing import Any

from unisono.frameworks.torch.constants import DEVICES, NAME


def register() -> None:
    """Let ``init_process_group("unisono")`` and ``new_group(backend="unisono")`` make our process groups.

    May be called twice. Nothing else of Unisono is imported before a group is made.

    Raises:
        ImportError: torch cannot be imported, or was built without torch.distributed.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise ImportError("this build of torch has no torch.distributed")
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))


def autoload() -> None:
    """Do what `register` does, at the end of ``import torch``, which nothing here may make fail."""
    with contextlib.suppress(Exception):
        register()


def _create(facts: Any, options: Any) -> Any:
    from unisono.frameworks.torch.process_group import create

    return create(facts, options)
