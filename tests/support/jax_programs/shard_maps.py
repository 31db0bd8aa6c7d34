"""`shard_map` of old and new versions of JAX, for the programs beside this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def shard_map(fn: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Return ``jax.shard_map``, which has another place and no analysis of replication before JAX 0.6."""
    if hasattr(jax, "shard_map"):
        return jax.shard_map(fn, **settings)  # type: ignore[no-any-return]
    from jax.experimental.shard_map import shard_map as older

    return older(fn, check_rep=False, **settings)  # type: ignore[no-any-return]
