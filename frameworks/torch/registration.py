"""Registers the backend "unisono" with torch.distributed, on request or when torch is imported."""

from __future__ import annotations

import contextlib
from typing import Any

from unisono.frameworks.torch.constants import DEVICES, NAME, OLDEST_TORCH


def register() -> None:
    """Register the backend for ``init_process_group("unisono")`` and ``new_group(backend="unisono")``.

    From version 2.14 on, torch calls it when a program asks for the backend, by an entry point of the group
    ``torch.distributed.backends``. A second call does nothing. The other modules of Unisono are imported when a group
    is created.

    Raises:
        ImportError: torch cannot be imported, is too old, or was built without torch.distributed. Or another package
            has registered a backend of this name.
    """
    import torch
    import torch.distributed as dist

    if torch.torch_version.TorchVersion(torch.__version__) < OLDEST_TORCH:
        raise ImportError(f"unisono needs torch {OLDEST_TORCH} or newer, and this is torch {torch.__version__}")
    if not dist.is_available():
        raise ImportError("this build of torch has no torch.distributed: install torch from PyPI, which has it")
    registered = dist.Backend._plugins.get(NAME.upper())
    if registered is None:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))
    elif registered.creator_fn is not _create:
        owner = registered.creator_fn.__module__
        raise ImportError(f"the module {owner} has registered another backend of torch as {NAME!r}: uninstall one")


def autoload() -> None:
    """Call `register` at the end of ``import torch``, if this version of torch does not look for backends when needed.

    Errors are dropped, because they would make the import fail.
    """
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if not hasattr(dist.Backend, "_ensure_backend_registered"):
            register()


def _create(facts: Any, options: Any) -> Any:
    from unisono.frameworks.torch.process_groups.creation import create

    return create(facts, options)
