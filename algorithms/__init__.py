"""Algorithms as data: plans, the builders that return them, and the verifier that proves them.

Everything here is pure: no input or output, clock, thread, socket or array. Names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.algorithms.catalogue.algorithm import Algorithm as Algorithm, Cost as Cost
    from unisono.algorithms.catalogue.registry import (
        ALGORITHMS as ALGORITHMS,
        algorithms_of as algorithms_of,
        find as find,
    )
    from unisono.algorithms.ir.plan import Plan as Plan
    from unisono.algorithms.verifier.verify import (
        Report as Report,
        verify_algorithm as verify_algorithm,
        verify_plans as verify_plans,
    )

# Public name → the module that defines it. The function `verify` is not here: the module has that name in this package.
_NAMES = {
    "Algorithm": "unisono.algorithms.catalogue.algorithm",
    "Cost": "unisono.algorithms.catalogue.algorithm",
    "Plan": "unisono.algorithms.ir.plan",
    "ALGORITHMS": "unisono.algorithms.catalogue.registry",
    "algorithms_of": "unisono.algorithms.catalogue.registry",
    "find": "unisono.algorithms.catalogue.registry",
    "Report": "unisono.algorithms.verifier.verify",
    "verify_algorithm": "unisono.algorithms.verifier.verify",
    "verify_plans": "unisono.algorithms.verifier.verify",
}

__all__ = [*_NAMES]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'unisono.algorithms' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
