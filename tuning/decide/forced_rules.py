"""Rules that force algorithms by collective and size, as the option `algorithm` takes them.

    allreduce:0-8K=recursive_doubling;8K-=ring;broadcast:1M-=chain

Each rule names a collective, the size from which it holds, the size below which it holds, and an algorithm with or
without parameters. Without a collective, it is for that of the rule before. The tuner chooses where no rule holds.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from unisono.algorithms.catalogue.registry import algorithms_of, check_variant
from unisono.algorithms.catalogue.variants import parsed
from unisono.errors import NoAlgorithmError, UsageError
from unisono.options import parse_nbytes


class Rule(NamedTuple):
    """One rule: `variant` is for calls of `collective` from `first` bytes on, below `end` bytes unless it is None."""

    collective: str
    first: int
    end: int | None
    variant: str


@lru_cache(maxsize=8)
def rules(text: str) -> tuple[Rule, ...]:
    """Return the rules in `text`, sorted by collective and size.

    Raises:
        UsageError: a rule is not valid, two overlap, or there is no such collective, algorithm or parameter.

    >>> rules("allreduce:0-8K=recursive_doubling;8K-=ring")[1]
    Rule(collective='allreduce', first=8192, end=None, variant='ring')
    """
    parts, collective = list[Rule](), ""
    for part in text.split(";"):
        head, has_collective, rest = part.rpartition(":")
        collective = head.strip() if has_collective else collective
        parts.append(_rule(collective, rest, part))
    ordered = sorted(parts, key=lambda rule: (rule.collective, rule.first))
    for before, after in pairwise(ordered):
        if before.collective == after.collective and (before.end is None or before.end > after.first):
            overlap = f"{before.variant} and {after.variant} from {after.first} B on"
            raise UsageError(f"the rules of {before.collective} overlap: both {overlap}")
    return tuple(ordered)


def forced(text: str, collective: str, nbytes: int) -> str:
    """Return the variant that the rules in `text` force for a call, else "auto"; raises as `rules` does."""
    for rule in rules(text):
        if rule.collective == collective and rule.first <= nbytes and (rule.end is None or nbytes < rule.end):
            return rule.variant
    return "auto"


def _rule(collective: str, rest: str, part: str) -> Rule:
    sizes, _, name = rest.partition("=")
    first, is_range, end = sizes.partition("-")
    try:
        variant = parsed(name.strip())
        if not (collective and is_range):
            raise ValueError("a rule")
        rule = Rule(collective, _nbytes(first, 0) or 0, _nbytes(end, None), str(variant))
        if rule.end is not None and rule.end <= rule.first:
            raise ValueError("a range that ends after its beginning")
    except ValueError as error:
        example = "write COLLECTIVE:FROM-BELOW=ALGORITHM, as allreduce:0-8K=recursive_doubling;8K-=ring"
        raise UsageError(f"{part.strip()!r} in the option algorithm is not {error}: {example}") from None
    try:
        algorithms_of(collective)
        check_variant(collective, variant)
    except NoAlgorithmError as error:
        raise UsageError(f"{part.strip()!r} in the option algorithm cannot be used: {error}") from None
    return rule


def _nbytes(text: str, default: int | None) -> int | None:
    text = text.strip()
    return default if not text else 0 if text == "0" else parse_nbytes(text)
