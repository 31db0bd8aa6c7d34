"""Choosing an algorithm: candidates, their predicted times, the reasons of those that are refused, and the choice.

The choice depends only on what is equal on all ranks, so all ranks choose alike without a message.

What a flat algorithm sends may take the slowest link, and all of it is priced so. A composition knows which of its
phases stay inside hosts, and its costs add up; so the cheapest algorithm of each phase is found by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unisono.algorithms.algorithm import Algorithm, Cost, Order
from unisono.algorithms.hosts import Hosts, Levels, levels_of
from unisono.algorithms.phases import Composition, PhaseKind, total
from unisono.algorithms.registry import algorithms_of, find
from unisono.errors import NoAlgorithmError
from unisono.tuning.model import LINKS, Link, predicted_s, segments, shown


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be carried out.

    Attributes:
        collective: "allreduce", "broadcast", …
        nbytes: bytes of the vector.
        size: number of ranks.
        link: the slowest kind of link between the ranks: "shm", "tcp" or "local".
        commutative: whether the operation is.
        algorithm: the name of an algorithm to force, or "auto".
        segment_nbytes: bytes of a block that travel at once, or 0 to leave it to the model.
        varying: whether the shares of the ranks differ in length.
        hosts: the ranks of each host; none if they are not known.
        inside: the kind of link between the ranks of a host.
        crowd: the number of ranks for each core on the most crowded host, and at least 1.
        order: the order in which contributions must be combined; None for any.
    """

    collective: str
    nbytes: int
    size: int
    link: str
    commutative: bool = True
    algorithm: str = "auto"
    segment_nbytes: int = 0
    varying: bool = False
    hosts: Hosts = ()
    inside: str = "shm"
    crowd: float = 1.0
    order: Order | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One algorithm that was looked at: its predicted seconds, if it declares a cost; why it is refused, or None.

    `phases` names the algorithm of each phase of a composition, by the parameter of its builder.
    """

    algorithm: str
    predicted_s: float | None
    segments: int
    refusal: str | None
    phases: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen algorithm, over how many segments it runs, and which tier chose it: "forced" or "model".

    `params` are for its builder: `build(size, rank, root, **dict(params))`.
    """

    algorithm: str
    segments: int
    tier: str
    predicted_s: float | None
    params: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """A question, everything that was looked at, and the choice."""

    question: Question
    candidates: tuple[Candidate, ...]
    choice: Choice

    def __str__(self) -> str:
        """Return a table for people, best candidate first."""
        asked = self.question
        hosts = f", on {len(asked.hosts)} hosts by {asked.inside}" if len(asked.hosts) > 1 else ""
        lines = [
            f"{asked.collective} of {asked.nbytes} B over {asked.size} ranks by {asked.link}{hosts}: "
            f"{self.choice.algorithm}, {self.choice.segments} segment(s), chosen by tier {self.choice.tier!r}"
        ]
        for candidate in self.candidates:
            what = candidate.refusal or shown(candidate.predicted_s)
            mark = "*" if candidate.algorithm == self.choice.algorithm else " "
            phases = ", ".join(f"{parameter}={name}" for parameter, name in candidate.phases)
            lines.append(f" {mark} {candidate.algorithm:<20} {what}{phases and f' with {phases}'}")
        return "\n".join(lines)


def explain(question: Question) -> Explanation:
    """Return the candidates for `question`, best first, and the choice among them.

    Raises:
        NoAlgorithmError: there is no such collective or algorithm, or every candidate is refused; says why.
        UsageError: `hosts` does not name every rank once.
    """
    candidates = sorted(
        (_candidate(algorithm, question) for algorithm in algorithms_of(question.collective).values()),
        key=lambda candidate: (candidate.refusal is not None, candidate.predicted_s or 0.0),
    )
    forced = question.algorithm != "auto"
    if forced:
        find(question.collective, question.algorithm)
        best = next(candidate for candidate in candidates if candidate.algorithm == question.algorithm)
    else:
        best = candidates[0]
    if best.refusal is not None:
        refusals = "; ".join(f"{each.algorithm} {each.refusal}" for each in candidates if each.refusal)
        raise NoAlgorithmError(f"no algorithm carries out {question.collective} over {question.size} ranks: {refusals}")
    hosts = (("hosts", question.hosts),) if best.phases and question.hosts else ()
    params: tuple[tuple[str, Any], ...] = (*hosts, *best.phases)
    choice = Choice(best.algorithm, best.segments, "forced" if forced else "model", best.predicted_s, params)
    return Explanation(question, tuple(candidates), choice)


def choose(question: Question) -> Choice:
    """Return the choice for `question`; raises as `explain` does."""
    return explain(question).choice


def _candidate(algorithm: Algorithm, question: Question) -> Candidate:
    refusal = _refusal(algorithm, question)
    phases: tuple[tuple[str, str], ...] = ()
    if not isinstance(algorithm, Composition):
        cost = algorithm.cost_of(question.size, {})
        predicted = None if cost is None else predicted_s(cost, question.nbytes, LINKS[question.link], question.crowd)
    elif refusal is None:
        phases, cost, predicted = _composed(algorithm, question)
    else:
        cost, predicted = None, None
    segment_nbytes = question.segment_nbytes or LINKS[question.link].segment_nbytes
    parts = segments(algorithm, cost, question.nbytes, segment_nbytes)
    return Candidate(algorithm.name, predicted, parts, refusal, phases)


def _composed(algorithm: Composition, question: Question) -> tuple[tuple[tuple[str, str], ...], Cost | None, float]:
    """Return the algorithms of the phases that are predicted to be fastest, their cost together, and the prediction."""
    levels = algorithm.levels(question.hosts or None, question.size)
    names: dict[str, str] = {}
    costs = [algorithm.between(levels)]
    predicted = predicted_s(costs[0], question.nbytes, LINKS[question.inside], question.crowd)
    for phase in algorithm.phases:
        link = LINKS[question.inside if phase.is_inside else question.link]
        seconds, names[phase.parameter], cost = _fastest(phase, levels, question, link)
        costs.append(cost)
        predicted += seconds
    return tuple(names.items()), total(costs), predicted


def _fastest(phase: PhaseKind, levels: Levels, question: Question, link: Link) -> tuple[float, str, Cost]:
    """Return the prediction, the name and the cost of the algorithm of a phase that is predicted to be fastest."""
    costs = {name: cost for name in phase.algorithms if (cost := phase.cost(levels, name)) is not None}
    predicted = {name: predicted_s(cost, question.nbytes, link, question.crowd) for name, cost in costs.items()}
    name = min(predicted, key=predicted.__getitem__)
    return predicted[name], name, costs[name]


# How contributions are combined in the orders that can be asked for.
_ORDERS: dict[Order | None, str] = {
    "rank": "one after the other, in the order of ranks",
    "at_once": "all contributions at once",
    "canonical": "by the balanced tree",
}


def _refusal(algorithm: Algorithm, question: Question) -> str | None:
    unsupported = algorithm.supports(question.size)
    is_named = question.algorithm == algorithm.name
    reasons = (
        (algorithm.mapped and question.link == "tcp", "needs memory that peers can map, so all ranks on one host"),
        (algorithm.commutative_only and not question.commutative, "needs a commutative operation"),
        (question.varying and not algorithm.varying, "needs shares of equal length"),
        (algorithm.cost is None and not is_named, "declares no cost, so it runs where it is named only"),
        (question.order not in (None, algorithm.order), f"does not combine {_ORDERS.get(question.order)}"),
        # Of those that combine in one order, its cost misleads nobody.
        (algorithm.by_name_only and not is_named and question.order is None, "runs where it is named only"),
        (unsupported is not None, f"does not run on {question.size} ranks: {unsupported}"),
    )
    told = next((reason for applies, reason in reasons if applies), None)
    return told or (_refusal_of_hosts(algorithm, question) if isinstance(algorithm, Composition) else None)


def _refusal_of_hosts(algorithm: Composition, question: Question) -> str | None:
    """Return why a composition cannot run on the hosts or, where it is not named, would have nothing to gain there."""
    levels = levels_of(question.hosts or None, question.size)
    is_named = question.algorithm == algorithm.name
    unfit = algorithm.needs(levels)
    reasons = (
        (unfit is not None, f"does not run on these hosts: {unfit}"),
        (not question.hosts and not is_named, "runs where it is named only, as the hosts of the ranks are not known"),
        (len(question.hosts) == 1 and not is_named, "has nothing to do on one host"),
        (len(question.hosts) == question.size and not is_named, "has nothing to do inside hosts of one rank each"),
    )
    return next((reason for applies, reason in reasons if applies), None)
