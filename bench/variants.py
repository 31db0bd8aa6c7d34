"""The option --algorithms of benchmarks: a list of algorithms, checked before a network is made and ranks start."""

from __future__ import annotations

from unisono.algorithms.catalogue.registry import check_variant
from unisono.algorithms.catalogue.variants import parsed
from unisono.errors import UsageError


def variants_in(text: str, collective: str) -> list[str]:
    """Return the algorithms of a collective in a list with commas between; "auto" is the tuner's choice.

    Raises:
        UsageError: the collective has no algorithm of a name in the list.

    >>> variants_in("auto,knomial(radix=3),chain", "broadcast")
    ['auto', 'knomial(radix=3)', 'chain']
    """
    names = _names(text)
    for name in names:
        if name == "auto":
            continue
        try:
            variant = parsed(name)
        except ValueError as error:
            raise UsageError(f"--algorithms has {name!r}, and must name {error}") from None
        check_variant(collective, variant)
    return names


def _names(text: str) -> list[str]:
    """Return the names between the commas. A comma inside of brackets belongs to a name."""
    names, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            names.append("")
        else:
            names[-1] += letter
    return names
