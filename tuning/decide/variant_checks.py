"""Checks that a variant names an existing algorithm and parameters that it has.

Forced names, forced rules and decision tables all use this check, so that they accept the same variants.
"""

from __future__ import annotations

from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.catalogue.variants import Variant
from unisono.errors import UsageError

# This parameter of a variant is not passed to its builder: it is the number of bytes of a block that travel at once.
SEGMENT = "segment_nbytes"


def check_variant(collective: str, variant: Variant) -> None:
    """Check that the algorithm of a variant exists and has its parameters.

    Raises:
        NoAlgorithmError: there is no such algorithm.
        UsageError: it has no such parameter, or the segment size is not positive.
    """
    find(collective, variant.algorithm).check_parameters((name for name, _ in variant.params), also=[SEGMENT])
    size = dict(variant.params).get(SEGMENT, 1)
    if type(size) is not int or size < 1:
        raise UsageError(f"{SEGMENT} of {variant} must be a positive number of bytes")
