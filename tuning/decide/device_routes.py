"""Chooses the route of a call on GPU arrays: an algorithm over mapped memory, or one of `ROUTES`.

A decision table with times of such calls decides. Its contexts have "device" as their memory, and its variants are
names of algorithms over mapped memory and of `ROUTES`. Without such times a rule decides, because there is
no model of devices. The choice depends only on values that are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from unisono.algorithms.catalogue.on_devices import ROUTES, mapped_names, usual_on_devices
from unisono.algorithms.catalogue.vendors import NCCL_NATIVE
from unisono.errors import NoAlgorithmError
from unisono.tuning.decide.choice import (
    NO_STATE,
    Candidate,
    Choice,
    Explanation,
    Question,
    TunerState,
    candidate_key,
    reading_of,
)

# The kind of link in contexts of calls inside one host.
LINK = "cuda_ipc"


def routes_of(collective: str) -> dict[str, str]:
    """Return the routes of a collective by name, each with its transport."""
    return {**dict.fromkeys(mapped_names(collective), LINK), **ROUTES}


def explain_route(question: Question, refusals: Mapping[str, str | None], state: TunerState = NO_STATE) -> Explanation:
    """Return the routes for `question`, best first, and the choice among them.

    Args:
        question: the call; its memory is "device".
        refusals: by name, the reason why the ranks cannot take a route; None if they can.
        state: what the tuner knows.

    Raises:
        NoAlgorithmError: the route that the question forces is refused or unknown, or all are.
    """
    reading = reading_of(question, state)
    times = reading.times_s if reading else {}
    candidates = sorted(
        (Candidate(name, None, 1, refusals.get(name), measured_s=times.get(name)) for name in refusals),
        key=candidate_key,
    )
    able = [each.algorithm for each in candidates if each.refusal is None]
    if question.algorithm != "auto":
        name, tier = question.algorithm, "forced"
    elif reading and reading.variant in able:
        name, tier = reading.variant, reading.tier
    elif able and candidates[0].measured_s is not None:
        name, tier = able[0], reading.tier if reading else ""
    else:
        usual = usual_on_devices(question.collective, question.nbytes, question.size) or ""
        # NCCL is only chosen by times, because the ranks would have to meet in it first.
        others = [each for each in able if each != NCCL_NATIVE]
        name, tier = usual if usual in able or not others else others[0], "rule"
    if name not in able:
        reason = refusals.get(name, "is no route of this collective on a GPU")
        raise NoAlgorithmError(f"{name} {reason}; able: {', '.join(able) or 'none'}")
    return Explanation(question, tuple(candidates), Choice(name, 1, tier, None, (), name))
