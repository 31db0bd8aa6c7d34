"""Runs the examples of JAX on all ranks, and each on one rank alone: the losses must be equal. Prints faults."""

from __future__ import annotations

import runpy
from pathlib import Path

import jax

import unisono as un

EXAMPLES = Path(__file__).parents[3] / "examples"

world = un.init()
alone = world.subgroup([world.rank])
for number, path in enumerate(sorted(EXAMPLES.glob("jax_*.py"))):
    if "jax.shard_map" in path.read_text() and not hasattr(jax, "shard_map"):
        print(path.name)
        continue
    train = runpy.run_path(str(path))["train"]
    together = train(world)
    if number % world.size == world.rank:
        expected = train(alone)
        if abs(together - expected) > 1e-5 * abs(expected):
            print(f"{path.name}: {together} instead of {expected}")
    print(path.name)
world.close()
