"""The registry: the table of all algorithms of Unisono, and the functions that look algorithms up by name.

The costs in the table are the closed forms of the references, for any number of ranks p ≥ 1. The tests of the verifier
compare them with the plans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from unisono.algorithms.catalogue.algorithm import Algorithm, suggestion
from unisono.algorithms.catalogue.composed import COMPOSED
from unisono.algorithms.catalogue.flat import FLAT, REGISTERED, load_installed
from unisono.algorithms.catalogue.variants import ORDER, SEGMENT, Variant
from unisono.algorithms.catalogue.vendors import VENDORS
from unisono.errors import NoAlgorithmError, UsageError

ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    collective: {**algorithms, **COMPOSED.get(collective, {})} for collective, algorithms in FLAT.items()
}


def algorithms_of(collective: str) -> Mapping[str, Algorithm]:
    """Return all algorithms of `collective` by name: first those of Unisono, then the registered ones.

    Raises:
        NoAlgorithmError: there is no such collective; the message lists the collectives and suggests the nearest. Or
            the installed packages cannot be read.
    """
    if collective not in ALGORITHMS:
        collectives = f"{', '.join(ALGORITHMS)}{suggestion(collective, ALGORITHMS)}"
        raise NoAlgorithmError(f"no algorithm carries out {collective!r}: there are {collectives}")
    load_installed()
    return {**ALGORITHMS[collective], **REGISTERED.get(collective, {})}


def candidates_of(collective: str) -> Mapping[str, Algorithm]:
    """Return the algorithms of `collective` by name, followed by the vendor algorithms, which a library carries out.

    Raises:
        NoAlgorithmError: as `algorithms_of` does.
    """
    return {**algorithms_of(collective), **VENDORS[collective]}


def find(collective: str, name: str) -> Algorithm:
    """Return the algorithm of `collective` with this name, which may be a vendor algorithm.

    Raises:
        NoAlgorithmError: there is none; the message lists the algorithms and suggests the nearest.
    """
    candidates = candidates_of(collective)
    if name not in candidates:
        names = f"{', '.join(candidates)}{suggestion(name, candidates)}"
        raise NoAlgorithmError(f"{collective} has no algorithm {name!r}: it has {names}")
    return candidates[name]


def check_known(name: str) -> None:
    """Check that at least one collective has an algorithm with this name.

    Raises:
        UsageError: none has; the message names the nearest algorithms and their collectives.
    """
    collectives = defaultdict[str, list[str]](list)
    for collective in ALGORITHMS:
        for algorithm in candidates_of(collective):
            collectives[algorithm].append(collective)
    if name not in collectives:
        from difflib import get_close_matches  # only a wrong name pays for this import

        near = [f"{match!r} (of {', '.join(collectives[match])})" for match in get_close_matches(name, collectives)]
        meant = f"; did you mean {' or '.join(near)}?" if near else f": there are {', '.join(collectives)}"
        raise UsageError(f"no collective has an algorithm {name!r}{meant}")


def check_variant(collective: str, variant: Variant) -> None:
    """Check that the algorithm of `variant` exists and takes the parameters of `variant`.

    Raises:
        NoAlgorithmError: there is no such algorithm.
        UsageError: the algorithm has no such parameter, or `segment_nbytes` is not a positive number.
    """
    also = [SEGMENT, ORDER]
    find(collective, variant.algorithm).check_parameters((name for name, _ in variant.params), also)
    size = dict(variant.params).get(SEGMENT, 1)
    if type(size) is not int or size < 1:
        raise UsageError(f"{SEGMENT} of {variant} must be a positive number of bytes")
