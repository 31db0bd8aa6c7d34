"""Options of benchmarks that name algorithms, checked before anything is measured."""

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
        if name != "auto":
            check_named("--algorithms", name, collective)
    return names


def check_named(option: str, name: str, collective: str) -> None:
    """Check that a collective has the algorithm that an option of this name has as its value.

    Raises:
        UsageError: it has none.
    """
    try:
        variant = parsed(name)
    except ValueError as error:
        raise UsageError(f"{option} is {name!r}, and must name {error}") from None
    check_variant(collective, variant)


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
