"""Choosing an algorithm: candidates, their predicted times, the reasons of those that are refused, and the choice.

The choice depends only on what is equal on all ranks, so all ranks choose alike without a message. A name that is
forced comes first; then a table, if one has times for such calls; then the model.

Of a flat algorithm it is known which part of its cost lies between hosts, of consecutive ranks; and how many ranks of a
host send there at once, as they may share its link. A composition knows which of its phases stay inside hosts, and its
costs add up; so the cheapest algorithm of each phase is found by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono import log
from unisono.algorithms.catalogue.algorithm import Algorithm, Cost, Order
from unisono.algorithms.catalogue.host_crossing import Crossing
from unisono.algorithms.catalogue.registry import candidates_of, check_variant, find
from unisono.algorithms.catalogue.variants import SEGMENT, Variant, parsed
from unisono.algorithms.composition.host_levels import Hosts, Levels, levels_of
from unisono.algorithms.composition.phases import Composition, PhaseKind, total
from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.errors import NoAlgorithmError
from unisono.records import record
from unisono.tuning.decide.model import (
    factor_at,
    predicted_by_rounds_s,
    predicted_s,
    segments,
    shown,
    split,
    usual_segment_nbytes,
)
from unisono.tuning.machine.parameters import NETWORK, PRIORS, UNMEASURED, Curve, Link, Parameters

if TYPE_CHECKING:
    from unisono.tuning.decide.table import Reading, Table

_log = log.get()

# The dtype whose reductions are measured for each class.
_MEASURED = {"plain": "float32", "narrow": "bfloat16"}
_LARGE = 1 << 20  # bytes at which the two are compared


class TunerState(NamedTuple):
    """What is known of a machine, beside the question; the same on all ranks.

    Attributes:
        table: measured times and decisions, or None.
        parameters: what links cost, measured or not.
        machine: the fingerprint of the machine.
    """

    table: Table | None = None
    parameters: Parameters = PRIORS
    machine: str = ""


NO_STATE = TunerState()

_MOST_SHOWN = 8
_MOST_NAMED = 4  # algorithms that an error suggests


@record
class Question:
    """What is to be carried out.

    Attributes:
        collective: "allreduce", "broadcast", …
        nbytes: bytes of the vector.
        size: number of ranks.
        link: the slowest kind of link between the ranks: the name of a transport.
        commutative: whether the operation is.
        algorithm: an algorithm to force, by name or with parameters as "knomial(radix=3)", or "auto".
        segment_nbytes: bytes of a block that travel at once, or 0 to leave it to the model.
        varying: whether the shares of the ranks differ in length.
        hosts: the ranks of each host; none if they are not known.
        inside: the kind of link between the ranks of a host.
        crowd: the number of ranks for each core on the most crowded host, and at least 1.
        order: the order in which contributions must be combined; None for any.
        vendors: the algorithms of libraries that the ranks have, each with the reason why it does not carry this out,
            or None.
        dtype: the class of dtypes: "narrow" where elements are combined in a wider type, or else "plain".
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
    vendors: tuple[tuple[str, str | None], ...] = ()
    dtype: str = "plain"

    @property
    def ranks_per_host(self) -> int:
        """The most ranks on one host; all of them, if hosts are not known."""
        return max(map(len, self.hosts), default=self.size)

    @property
    def level(self) -> str:
        """The level of the slowest link, where there are several hosts."""
        return NETWORK if len(self.hosts) > 1 else ""


@record
class Candidate:
    """One algorithm that was looked at: its predicted seconds, if it declares a cost; why it is refused, or None.

    `phases` names the algorithm of each phase of a composition, by the parameter of its builder; `measured_s` are the
    seconds that a table knows; `params` are those of the variant.
    """

    algorithm: str
    predicted_s: float | None
    segments: int
    refusal: str | None
    phases: tuple[tuple[str, str], ...] = ()
    measured_s: float | None = None
    params: tuple[tuple[str, Any], ...] = ()

    @property
    def variant(self) -> str:
        """The algorithm with its parameters."""
        return str(Variant(self.algorithm, self.params))


@record
class Choice:
    """The chosen algorithm, over how many segments it runs, and which tier chose it: "forced", "table…" or "model".

    `params` are for its builder: `build(size, rank, root, **dict(params))`.
    """

    algorithm: str
    segments: int
    tier: str
    predicted_s: float | None
    params: tuple[tuple[str, Any], ...] = ()
    variant: str = ""

    @property
    def shown(self) -> str:
        """The algorithm with what is given of its builder's parameters: of its segments, calls tell otherwise."""
        return str(parsed(self.variant).having(**{SEGMENT: None}))


@record
class Explanation:
    """A question, everything that was looked at, and the choice; and how each rank is reached, as far as known.

    `is_calibrated` says whether the link was measured on this machine; if not, predictions are by priors. `on_device`
    says how arrays of a GPU would go; empty if that is not known.
    """

    question: Question
    candidates: tuple[Candidate, ...]
    choice: Choice
    links: Mapping[int, str] = field(default_factory=dict)
    on_device: str = ""
    is_calibrated: bool = False

    def __str__(self) -> str:
        """Return a table for people, best candidate first."""
        asked = self.question
        hosts = f", on {len(asked.hosts)} hosts by {asked.inside}" if len(asked.hosts) > 1 else ""
        lines = [
            f"{asked.collective} of {asked.nbytes} B over {asked.size} ranks by {asked.link}{hosts}: "
            f"{self.choice.algorithm}, {self.choice.segments} segment(s), chosen by tier {self.choice.tier!r}, "
            f"predicted by {'a calibration' if self.is_calibrated else 'priors'}"
        ]
        for candidate in self.candidates:
            measured = "" if candidate.measured_s is None else f"measured {candidate.measured_s * 1e6:.1f} us, "
            what = candidate.refusal or f"{measured}{shown(candidate.predicted_s)}"
            mark = "*" if candidate.variant == self.choice.variant else " "
            phases = ", ".join(f"{parameter}={name}" for parameter, name in candidate.phases)
            lines.append(f" {mark} {candidate.variant:<20} {what}{phases and f' with {phases}'}")
        for link in dict.fromkeys(self.links.values()):
            ranks = [rank for rank, its_link in self.links.items() if its_link == link]
            shown_ranks = ", ".join(map(str, ranks[:_MOST_SHOWN])) + (", …" if len(ranks) > _MOST_SHOWN else "")
            lines.append(f"   rank{'s' if len(ranks) > 1 else ''} {shown_ranks}: {link}")
        if self.on_device:
            lines.append(f"   arrays on a GPU: {self.on_device}")
        return "\n".join(lines)


def explain(question: Question, known: TunerState = NO_STATE) -> Explanation:
    """Return the candidates for `question`, best first, and the choice among them.

    Raises:
        NoAlgorithmError: there is no such collective or algorithm, or every candidate is refused; says why.
        UsageError: `hosts` does not name every rank once, or the algorithm has no such parameters.
    """
    forced = None if question.algorithm == "auto" else _forced(question)
    reading = _reading(question, known)
    times = reading.times_s if reading else {}
    named = [*([forced] if forced else []), *_variants_of(reading)]
    rows = dict.fromkeys([*(Variant(each.name) for each in looked_at(question)), *named])
    candidates = sorted(
        (candidate(row, question, known, times.get(str(row)), row in named) for row in rows),
        key=_place,
    )
    best, tier = _best(candidates, forced, reading)
    if best.refusal is not None and forced:
        raise NoAlgorithmError(_why_not_forced(best, candidates, question))
    if best.refusal is not None:
        refusals = "; ".join(f"{each.variant} {each.refusal}" for each in candidates if each.refusal)
        raise NoAlgorithmError(f"no algorithm carries out {question.collective} over {question.size} ranks: {refusals}")
    hosts = (("hosts", question.hosts),) if best.phases and question.hosts else ()
    params = tuple({**dict(hosts), **dict(best.phases), **builder_params(best.params)}.items())
    choice = Choice(best.algorithm, best.segments, tier, best.predicted_s, params, best.variant)
    is_calibrated = bool(known.parameters.link(question.link, question.level).step.nbytes)
    return Explanation(question, tuple(candidates), choice, is_calibrated=is_calibrated)


def _why_not_forced(forced: Candidate, candidates: Sequence[Candidate], question: Question) -> str:
    """Return why the algorithm that is forced cannot carry a call out, and which algorithms can, best first."""
    asked_by = _ORDER_ASKED_BY.get(question.order) if forced.refusal == _order_refusal(question) else None
    reason = f"{forced.variant} {forced.refusal}"
    if asked_by:
        reason += f", which {asked_by} asks for"
    able = [
        each.algorithm
        for each in candidates
        if _refusal(find(question.collective, each.algorithm), question, is_named=True) is None
    ]
    more = [f"{len(able) - _MOST_NAMED} more"] if len(able) > _MOST_NAMED else []
    *names, last = [*able[:_MOST_NAMED], *more] or ["no other algorithm"]
    return f"{reason}; {', '.join(names)}{' and ' if names else ''}{last} can carry out this {question.collective}"


def _place(each: Candidate) -> tuple[bool, bool, float]:
    """Return by what candidates are in order: those refused come last, and those that were measured first."""
    return each.refusal is not None, each.measured_s is None, each.measured_s or each.predicted_s or 0.0


def choose(question: Question, known: TunerState = NO_STATE) -> Choice:
    """Return the choice for `question`; raises as `explain` does."""
    return explain(question, known).choice


def looked_at(question: Question) -> list[Algorithm]:
    """Return the algorithms, and of what libraries do by themselves that which the ranks have or the question names."""
    vendors = {question.algorithm, *dict(question.vendors)}
    return [each for each in candidates_of(question.collective).values() if not each.vendor or each.name in vendors]


def builder_params(params: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the parameters of a variant that are its builder's."""
    return {name: value for name, value in params if name != SEGMENT}


def _forced(question: Question) -> Variant:
    """Return the variant that a question forces; raises as `check_variant` does."""
    try:
        variant = parsed(question.algorithm)
    except ValueError:
        variant = Variant(question.algorithm)  # which there is not, as the error says with those that there are
    check_variant(question.collective, variant)
    return variant


def _context(question: Question, known: TunerState) -> Any:
    from unisono.tuning.measure.measurement_log import Context

    asked = question
    return Context(known.machine, asked.collective, asked.link, asked.dtype, asked.size, asked.ranks_per_host)


def _reading(question: Question, known: TunerState) -> Reading | None:
    """Return what the table says; nothing where the model knows more: of ranks among which calls were calibrated."""
    found = known.table.read(_context(question, known), question.nbytes) if known.table else None
    is_less = found is not None and found.is_interpolated and _is_calibrated(question, known.parameters)
    return None if is_less else found


def _is_calibrated(question: Question, known: Parameters) -> bool:
    """Return whether whole calls of the collective were calibrated among just so many ranks."""
    rounds = known.rounds_of(question.link, question.size, question.ranks_per_host, question.crowd)
    alike = (question.size, question.ranks_per_host)
    return rounds is not None and (rounds.ranks, rounds.ranks_per_host) == alike and question.collective in rounds.calls


def _variants_of(reading: Reading | None) -> list[Variant]:
    """Return the variants that a table knows for a call, all of which there are."""
    if reading is None:
        return []
    return [parsed(text) for text in {**reading.times_s, **({reading.variant: None} if reading.variant else {})}]


def _best(candidates: list[Candidate], forced: Variant | None, reading: Reading | None) -> tuple[Candidate, str]:
    """Return the best of the candidates, which are in order, and the tier that says so."""
    if forced:
        return next(each for each in candidates if each.variant == str(forced)), "forced"
    if reading:
        of_range = next((each for each in candidates if each.variant == reading.variant), None)
        if of_range and of_range.refusal is None:
            return of_range, reading.tier
        if of_range and of_range.refusal:
            _log.info("the table's %s is not taken, as it %s", of_range.variant, of_range.refusal)
        if candidates[0].refusal is None and candidates[0].measured_s is not None:
            return candidates[0], reading.tier
    return candidates[0], "model"


def candidate(
    row: Variant, question: Question, known: TunerState, measured_s: float | None, is_named: bool
) -> Candidate:
    """Return what there is to say of a variant; `is_named` if someone or a table has named it."""
    algorithm, links, params = find(question.collective, row.algorithm), known.parameters, dict(row.params)
    refusal = _refusal(algorithm, question, is_named)
    phases: tuple[tuple[str, str], ...] = ()
    link = links.link(question.link, question.level)
    if not isinstance(algorithm, Composition):
        cost = algorithm.cost_of(question.size, params)
        predicted = None if cost is None else _predicted_s(algorithm, cost, question, links)
    elif refusal is None:
        phases, cost, predicted = _composed(algorithm, question, links, params)
        predicted *= _composed_factor(algorithm, question, links, params)
    else:
        cost, predicted = None, None
    usual_nbytes = usual_segment_nbytes(algorithm, cost, question.nbytes, link)
    parts = segments(algorithm, cost, question.nbytes, params.get(SEGMENT) or question.segment_nbytes or usual_nbytes)
    return Candidate(algorithm.name, predicted, parts, refusal, phases, measured_s, row.params)


def _predicted_s(algorithm: Algorithm, cost: Cost, question: Question, known: Parameters) -> float:
    """Return the prediction of a flat algorithm: by rounds and calls of about as many ranks, if they were measured."""
    rounds = known.rounds_of(question.link, question.size, question.ranks_per_host, question.crowd)
    reduce = known.reduce.get(_MEASURED[question.dtype], UNMEASURED)
    if rounds is None:
        return _by_links(algorithm, cost, question, known, reduce)
    contract = CONTRACTS[question.collective]
    by_rounds_s = partial(
        predicted_by_rounds_s,
        rounds=rounds,
        is_rooted=contract.input_at_root or contract.output_at_root,
        crowd=question.crowd,
    )
    plain = known.reduce.get(_MEASURED["plain"], UNMEASURED)
    slower = reduce.at(_LARGE) / plain.at(_LARGE) if reduce.nbytes and plain.nbytes else 1.0
    seconds = by_rounds_s(cost, question.nbytes, slower=slower)
    calls = rounds.calls.get(question.collective, {}).get(algorithm.name)
    there = algorithm.cost_of(rounds.ranks, {})
    if calls is None or there is None:
        return seconds
    return seconds * factor_at(calls, partial(by_rounds_s, there), question.nbytes)


def _by_links(algorithm: Algorithm, cost: Cost, question: Question, known: Parameters, reduce: Curve) -> float:
    """Return the prediction of a flat algorithm by what the links inside hosts and between them cost."""
    crossing = _crossing(algorithm, question)
    inside, across = split(cost, crossing)
    near, far = known.link(question.inside), known.link(question.link, question.level)
    inside_s = predicted_s(inside, question.nbytes, near, question.crowd, reduce)
    return inside_s + predicted_s(across, question.nbytes, far, question.crowd, reduce, crossing.at_once)


def _crossing(algorithm: Algorithm, question: Question) -> Crossing:
    """Return what of an algorithm lies between hosts: everything, if they are not known or no runs of ranks."""
    if len(question.hosts) < 2:
        return Crossing(1, 1, 1)
    levels = levels_of(question.hosts, question.size)
    if not levels.is_ascending:
        return Crossing(1, 1, levels.widest[0])
    return algorithm.crossing(question.size, levels.widest[0])


def _composed(
    algorithm: Composition, question: Question, links: Parameters, named: Mapping[str, Any]
) -> tuple[tuple[tuple[str, str], ...], Cost | None, float]:
    """Return the algorithms of the phases, as named or predicted to be fastest, their cost, and the prediction."""
    levels = algorithm.levels(question.hosts or None, question.size)
    names: dict[str, str] = {}
    costs = [algorithm.between(levels)]
    predicted = predicted_s(costs[0], question.nbytes, links.link(question.inside), question.crowd)
    for phase in algorithm.phases:
        link = links.link(question.inside) if phase.is_inside else links.link(question.link, question.level)
        among = (named[phase.parameter],) if phase.parameter in named else phase.algorithms
        seconds, names[phase.parameter], cost = _fastest(phase, among, levels, question, link)
        costs.append(cost)
        predicted += seconds
    return tuple(names.items()), total(costs), predicted


def _composed_factor(algorithm: Composition, question: Question, known: Parameters, named: Mapping[str, Any]) -> float:
    """Return how many times as long as the phases a composition takes, if it was called on as many ranks and hosts."""
    rounds = known.rounds_of(question.link, question.size, question.ranks_per_host)
    if rounds is None or (rounds.ranks, rounds.ranks_per_host) != (question.size, question.ranks_per_host):
        return 1.0
    calls = rounds.calls.get(question.collective, {}).get(algorithm.name)
    if calls is None:
        return 1.0
    return factor_at(
        calls, lambda nbytes: _composed(algorithm, replace(question, nbytes=nbytes), known, named)[2], question.nbytes
    )


def _fastest(
    phase: PhaseKind, among: Sequence[str], levels: Levels, question: Question, link: Link
) -> tuple[float, str, Cost]:
    """Return the prediction, the name and the cost of the algorithm of a phase that is predicted to be fastest.

    Raises:
        NoAlgorithmError: no cost is known of any.
    """
    costs = {name: cost for name in among if (cost := phase.cost(levels, name)) is not None}
    at_once = levels.widest[0] if phase.by_all else 1
    predicted = {
        name: predicted_s(cost, question.nbytes, link, question.crowd, at_once=at_once) for name, cost in costs.items()
    }
    if not predicted:
        raise NoAlgorithmError(f"the costs of {', '.join(among)} as {phase.parameter} are not known")
    name = min(predicted, key=predicted.__getitem__)
    return predicted[name], name, costs[name]


# How contributions are combined in the orders that can be asked for.
_ORDERS: dict[Order | None, str] = {
    "rank": "one after the other, in the order of ranks",
    "at_once": "all contributions at once",
    "canonical": "by the balanced tree",
}

# The argument of a call that asks for an order.
_ORDER_ASKED_BY: dict[Order | None, str] = {
    "rank": "reproducible=True",
    "at_once": "accumulate",
    "canonical": "reproducible=True",
}


def _order_refusal(question: Question) -> str:
    return f"does not combine {_ORDERS.get(question.order)}"


# Kinds of link whose ranks can map each other's memory.
_MAPPABLE = ("shm", "local")


def _refusal(algorithm: Algorithm, question: Question, is_named: bool) -> str | None:
    unsupported = algorithm.supports(question.size)
    vendor = dict(question.vendors).get(algorithm.name, "needs ranks that meet by its library: see un.init(mpi_comm=)")
    reasons = (
        (algorithm.vendor and vendor is not None, vendor),
        (
            algorithm.mapped and question.link not in _MAPPABLE,
            "needs memory that peers can map, so all ranks on one host",
        ),
        (algorithm.commutative_only and not question.commutative, "needs a commutative operation"),
        (question.varying and not algorithm.varying, "needs shares of equal length"),
        (algorithm.cost is None and not is_named, "declares no cost, so it runs where it is named only"),
        (question.order not in (None, algorithm.order), _order_refusal(question)),
        # Of those that combine in one order, its cost misleads nobody.
        (algorithm.by_name_only and not is_named and question.order is None, "runs where it is named only"),
        (unsupported is not None, f"does not run on {question.size} ranks: {unsupported}"),
    )
    told = next((reason for applies, reason in reasons if applies), None)
    return told or (_refusal_of_hosts(algorithm, question, is_named) if isinstance(algorithm, Composition) else None)


def _refusal_of_hosts(algorithm: Composition, question: Question, is_named: bool) -> str | None:
    """Return why a composition cannot run on the hosts or, where it is not named, would have nothing to gain there."""
    levels = levels_of(question.hosts or None, question.size)
    unfit = algorithm.needs(levels)
    reasons = (
        (unfit is not None, f"does not run on these hosts: {unfit}"),
        (not question.hosts and not is_named, "runs where it is named only, as the hosts of the ranks are not known"),
        (len(question.hosts) == 1 and not is_named, "has nothing to do on one host"),
        (len(question.hosts) == question.size and not is_named, "has nothing to do inside hosts of one rank each"),
    )
    return next((reason for applies, reason in reasons if applies), None)
