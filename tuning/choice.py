"""Choosing an algorithm: candidates, their predicted times, the reasons of those that are refused, and the choice.

The choice depends only on what is equal on all ranks, so all ranks choose alike without a message.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.algorithms.algorithm import Algorithm
from unisono.algorithms.registry import algorithms_of, find
from unisono.errors import NoAlgorithmError
from unisono.tuning.model import LINKS, predicted_s, segments, shown


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
    """

    collective: str
    nbytes: int
    size: int
    link: str
    commutative: bool = True
    algorithm: str = "auto"
    segment_nbytes: int = 0
    varying: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """One algorithm that was looked at: its predicted seconds, if it declares a cost; why it is refused, or None."""

    algorithm: str
    predicted_s: float | None
    segments: int
    refusal: str | None


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen algorithm, over how many segments it runs, and which tier chose it: "forced" or "model"."""

    algorithm: str
    segments: int
    tier: str
    predicted_s: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """A question, everything that was looked at, and the choice."""

    question: Question
    candidates: tuple[Candidate, ...]
    choice: Choice

    def __str__(self) -> str:
        """Return a table for people, best candidate first."""
        asked = self.question
        lines = [
            f"{asked.collective} of {asked.nbytes} B over {asked.size} ranks by {asked.link}: "
            f"{self.choice.algorithm}, {self.choice.segments} segment(s), chosen by tier {self.choice.tier!r}"
        ]
        for candidate in self.candidates:
            what = candidate.refusal or shown(candidate.predicted_s)
            mark = "*" if candidate.algorithm == self.choice.algorithm else " "
            lines.append(f" {mark} {candidate.algorithm:<20} {what}")
        return "\n".join(lines)


def explain(question: Question) -> Explanation:
    """Return the candidates for `question`, best first, and the choice among them.

    Raises:
        NoAlgorithmError: there is no such collective or algorithm, or every candidate is refused; says why.
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
    choice = Choice(best.algorithm, best.segments, "forced" if forced else "model", best.predicted_s)
    return Explanation(question, tuple(candidates), choice)


def choose(question: Question) -> Choice:
    """Return the choice for `question`; raises as `explain` does."""
    return explain(question).choice


def _candidate(algorithm: Algorithm, question: Question) -> Candidate:
    link = LINKS[question.link]
    return Candidate(
        algorithm=algorithm.name,
        predicted_s=predicted_s(algorithm, question.size, question.nbytes, link),
        segments=segments(algorithm, question.size, question.nbytes, question.segment_nbytes or link.segment_nbytes),
        refusal=_refusal(algorithm, question),
    )


def _refusal(algorithm: Algorithm, question: Question) -> str | None:
    unsupported = algorithm.supports(question.size)
    is_named = question.algorithm == algorithm.name
    reasons = (
        (algorithm.mapped, "needs memory that peers can map"),
        (algorithm.commutative_only and not question.commutative, "needs a commutative operation"),
        (question.varying and not algorithm.varying, "needs shares of equal length"),
        (algorithm.cost is None and not is_named, "declares no cost, so it runs where it is named only"),
        (algorithm.by_name_only and not is_named, "runs where it is named only"),
        (unsupported is not None, f"does not run on {question.size} ranks: {unsupported}"),
    )
    return next((reason for applies, reason in reasons if applies), None)
