"""Chooses an algorithm for a call, and explains the choice: all candidates, their predicted times, and refusals.

The choice depends only on values that are equal on all ranks, so all ranks choose alike without a message. A forced
name comes first, then a decision table if it has times for such calls, and then the model.

The model needs to know which part of an algorithm's cost lies between hosts. For a flat algorithm among consecutive
ranks, its `Crossing` says so, and how many ranks of a host send there at once, because they may share the host's link.
A composition knows which of its phases stay inside hosts. Its time grows with that of each phase, so the fastest
algorithm of each phase can be chosen on its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.algorithms.catalogue.algorithm import Algorithm, Cost, Order
from unisono.algorithms.catalogue.host_crossing import Crossing
from unisono.algorithms.catalogue.registry import candidates_of, check_variant, find
from unisono.algorithms.catalogue.variants import BLOCKS, ORDER, SEGMENT, Variant, parsed
from unisono.algorithms.catalogue.vendors import NEEDS
from unisono.algorithms.composition.host_levels import Hosts, Levels, levels_of
from unisono.algorithms.composition.phases import Composition, PhaseKind, algorithm_named, total
from unisono.algorithms.composition.rank_order import IN_RANK_ORDER, check_order
from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.errors import NoAlgorithmError
from unisono.foundation import log
from unisono.foundation.records import record
from unisono.tuning.decide.model import (
    factor_at,
    filling_s,
    incast_s,
    over_lines,
    overlapped_s,
    predicted_by_rounds_s,
    predicted_s,
    segments,
    shown,
    split,
    usual_blocks,
    usual_path_segments,
    usual_segment_nbytes,
)
from unisono.tuning.machine.parameters import NETWORK, PRIORS, UNMEASURED, Curve, Link, Parameters, RoundCosts

if TYPE_CHECKING:
    from unisono.tuning.decide.table import Reading, Table
    from unisono.tuning.machine.network_map import NetworkMap

_log = log.get("tuning")

# For each class of dtypes, the dtype whose reductions are measured.
_MEASURED = {"plain": "float32", "narrow": "bfloat16"}
_LARGE = 1 << 20  # bytes at which the reductions of the two classes are compared


class TunerState(NamedTuple):
    """The tuner's knowledge of the machine, which is the same on all ranks.

    Attributes:
        table: the decision table with measured times, or None.
        parameters: the costs of links and memory, measured or by priors.
        machine: the fingerprint of the machine.
        network: the measured network between hosts that are far apart, or None.
    """

    table: Table | None = None
    parameters: Parameters = PRIORS
    machine: str = ""
    network: NetworkMap | None = None

    def over(self, network: NetworkMap, link: str) -> TunerState:
        """Return this state, in which measurements of a network replace the earlier costs of a link."""
        links = {**self.parameters.links, link: network.link(link)}
        return self._replace(parameters=self.parameters._replace(links=links), network=network)

    def among(self, hosts: Sequence[int]) -> TunerState:
        """Return the state for a communicator on these hosts, in this order."""
        if self.network is None:
            return self
        return self._replace(network=self.network.among(hosts) if len(hosts) > 1 else None)


NO_STATE = TunerState()

# Predictions over a measured network that differ by less are alike.
_ALIKE = 1.05
_MOST_SHOWN = 8
_MOST_NAMED = 4  # the most algorithms that an error suggests


@record
class Question:
    """A call for which the tuner chooses an algorithm.

    Attributes:
        collective: "allreduce", "broadcast", …
        nbytes: bytes of the vector.
        size: number of ranks.
        link: the slowest kind of link between the ranks, by the name of its transport.
        commutative: whether the op is commutative.
        algorithm: the algorithm to force, by name or with parameters as in "knomial(radix=3)", or "auto".
        segment_nbytes: bytes of a block that travel at once, or 0 to let the model decide.
        varying: whether ranks contribute or receive different numbers of elements.
        hosts: the ranks of each host; empty if the hosts are not known.
        inside: the kind of link between the ranks of one host.
        crowd: the number of ranks for each core on the most crowded host, at least 1.
        order: the order in which contributions must be combined; None for any order.
        vendors: the library algorithms that the ranks can use, each with the reason why it cannot run this call, or
            None if it can.
        dtype: the class of dtypes: "narrow" if elements are combined in a wider type, else "plain".
        memory: where the arrays are, "host" or "device"; see `device_routes` for the latter.
        root: the root of the collective; 0 if it has none.
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
    memory: str = "host"
    root: int = 0

    @property
    def ranks_per_host(self) -> int:
        """The largest number of ranks on one host; all ranks if the hosts are not known."""
        return max(map(len, self.hosts), default=self.size)

    @property
    def level(self) -> str:
        """The level of the slowest link: the network if there are several hosts, else none."""
        return NETWORK if len(self.hosts) > 1 else ""


@record
class Candidate:
    """One algorithm that the tuner considered for a call.

    Attributes:
        algorithm: its name.
        predicted_s: its predicted seconds; None if it declares no cost.
        segments: the number of segments that it would use.
        blocks: for an algorithm in blocks, the number of blocks that the tuner has chosen, else 0.
        refusal: the reason why it cannot run the call, as text; None if it can.
        phases: for a composition, the algorithm of each phase, by the parameter of the builder.
        measured_s: its seconds according to the decision table, or None.
        params: the parameters of the variant.
        order: the order of ranks that a measured network suggests; empty for the order of ranks.
    """

    algorithm: str
    predicted_s: float | None
    segments: int
    refusal: str | None
    phases: tuple[tuple[str, str], ...] = ()
    measured_s: float | None = None
    params: tuple[tuple[str, Any], ...] = ()
    order: tuple[int, ...] = ()
    blocks: int = 0

    @property
    def variant(self) -> str:
        """The algorithm with its parameters."""
        return str(Variant(self.algorithm, self.params))

    @property
    def in_order(self) -> str:
        """The variant as it runs: with the order of ranks, unless that is the usual one, and the number of blocks."""
        return str(Variant(self.algorithm, tuple({**dict(self.params), **self.chosen_params}.items())).having())

    @property
    def chosen_params(self) -> dict[str, Any]:
        """The parameters that the tuner has chosen, without the algorithms of phases."""
        return {name: value for name, value in ((BLOCKS, self.blocks), (ORDER, self.order)) if value}


@record
class Choice:
    """The chosen algorithm.

    Attributes:
        algorithm: its name.
        segments: the number of segments that it uses.
        tier: what decided: "forced", "table…" or "model".
        predicted_s: its predicted seconds; None if it declares no cost.
        params: arguments for its builder: `build(size, rank, root, **dict(params))`.
        variant: the algorithm with its parameters, as text.
    """

    algorithm: str
    segments: int
    tier: str
    predicted_s: float | None
    params: tuple[tuple[str, Any], ...] = ()
    variant: str = ""

    @property
    def shown(self) -> str:
        """The variant without its segment size, because reports of calls show their number of segments apart."""
        return str(parsed(self.variant).having(**{SEGMENT: None}))


@record
class Explanation:
    """A question with all candidates and the choice.

    Attributes:
        question: the call.
        candidates: all algorithms that were considered, best first.
        choice: the chosen algorithm.
        links: for each rank that is reached over a link, a description of it.
        on_device: how arrays on a GPU would travel; empty if that is not known.
        is_calibrated: whether the link was measured on this machine. If not, predictions use priors.
    """

    question: Question
    candidates: tuple[Candidate, ...]
    choice: Choice
    links: Mapping[int, str] = field(default_factory=dict)
    on_device: str = ""
    is_calibrated: bool = False

    def __str__(self) -> str:
        """Return a table for people, best candidate first."""
        question = self.question
        hosts = f", on {len(question.hosts)} hosts by {question.inside}" if len(question.hosts) > 1 else ""
        lines = [
            f"{question.collective} of {question.nbytes} B over {question.size} ranks by {question.link}{hosts}: "
            f"{self.choice.algorithm}, {self.choice.segments} segment(s), chosen by tier {self.choice.tier!r}, "
            f"predicted by {'a calibration' if self.is_calibrated else 'priors'}"
        ]
        for candidate in self.candidates:
            measured = "" if candidate.measured_s is None else f"measured {candidate.measured_s * 1e6:.1f} us, "
            verdict = candidate.refusal or f"{measured}{shown(candidate.predicted_s)}"
            mark = "*" if candidate.in_order == self.choice.variant else " "
            phases = ", ".join(f"{parameter}={name}" for parameter, name in candidate.phases)
            lines.append(f" {mark} {candidate.in_order:<20} {verdict}{phases and f' with {phases}'}")
        for link in dict.fromkeys(self.links.values()):
            ranks = [rank for rank, link_of_rank in self.links.items() if link_of_rank == link]
            shown_ranks = ", ".join(map(str, ranks[:_MOST_SHOWN])) + (", …" if len(ranks) > _MOST_SHOWN else "")
            lines.append(f"   rank{'s' if len(ranks) > 1 else ''} {shown_ranks}: {link}")
        if self.on_device:
            lines.append(f"   arrays on a GPU: {self.on_device}")
        return "\n".join(lines)


def explain(question: Question, state: TunerState = NO_STATE) -> Explanation:
    """Return the candidates for `question`, best first, and the choice among them.

    Raises:
        NoAlgorithmError: there is no such collective or algorithm, or every candidate is refused; gives the reasons.
        UsageError: `hosts` does not name every rank exactly once, or the algorithm has no such parameters.
    """
    return _explained(question, state, looked_at(question))


def _explained(question: Question, state: TunerState, among: Sequence[Algorithm]) -> Explanation:
    """Return the explanation of a choice among some algorithms, and those that the call or the table names."""
    forced = None if question.algorithm == "auto" else _forced(question)
    reading = reading_of(question, state)
    times = reading.times_s if reading else {}
    named = [*([forced] if forced else []), *_variants_of(reading)]
    algorithms = {Variant(each.name): each for each in among}
    algorithms |= {variant: find(question.collective, variant.algorithm) for variant in named}
    costs = _costs_for(question, state)
    candidates: list[Candidate] = []
    least_s = math.inf  # of the usable candidates
    for row, algorithm in _searched_last(algorithms, costs):
        limit_s = math.inf if row in named else _ALIKE * least_s
        measured_s = times.get(str(row)) if times else None
        made = _candidate(algorithm, row.params, question, costs, measured_s, row in named, limit_s)
        candidates.append(made)
        if made.refusal is None and made.predicted_s is not None:
            least_s = min(least_s, made.predicted_s)
    candidates.sort(key=candidate_key)
    if costs.network is not None:
        candidates = _fewest_rounds_first(candidates, question)
    best, tier = _best(candidates, forced, reading)
    if best.refusal is not None and forced:
        raise NoAlgorithmError(_why_not_forced(best, candidates, question))
    if best.refusal is not None:
        refusals = "; ".join(f"{each.variant} {each.refusal}" for each in candidates if each.refusal)
        raise NoAlgorithmError(f"no algorithm carries out {question.collective} over {question.size} ranks: {refusals}")
    hosts = (("hosts", question.hosts),) if best.phases and question.hosts else ()
    params = tuple({**dict(hosts), **dict(best.phases), **best.chosen_params, **builder_params(best.params)}.items())
    choice = Choice(best.algorithm, best.segments, tier, best.predicted_s, params, best.in_order)
    return Explanation(question, tuple(candidates), choice, is_calibrated=bool(costs.far.step.nbytes))


def _searched_last(algorithms: Mapping[Variant, Algorithm], costs: _Costs) -> list[tuple[Variant, Algorithm]]:
    """Return the algorithms in an order in which those come last whose order of hosts is searched."""
    if costs.network is None:
        return list(algorithms.items())
    from unisono.tuning.decide.host_order import ORDERED

    return sorted(algorithms.items(), key=lambda each: each[1].name in ORDERED)


def _fewest_rounds_first(candidates: Sequence[Candidate], question: Question) -> list[Candidate]:
    """Return sorted candidates of which the one with the fewest rounds comes first, among those that are alike.

    Candidates are alike if their simulated times differ by a few per cent. Of those with equally few rounds, the one
    with the fewest messages comes first. The reason is that jitter and lost packets between far hosts hold up each
    round and each message, and the simulation ignores both.
    """
    fastest = candidates[0]
    most_s = _ALIKE * (fastest.predicted_s or 0.0)

    def key(number: int) -> tuple[float, float, int]:
        each = candidates[number]
        params = {**dict(each.params), **each.chosen_params}
        cost = find(question.collective, each.algorithm).cost_of(question.size, params)
        is_alike = candidate_key(each)[:2] == candidate_key(fastest)[:2] and (each.predicted_s or math.inf) <= most_s
        return (cost.rounds, cost.most_messages, number) if cost and is_alike else (math.inf, math.inf, number)

    first = min(range(len(candidates)), key=key)
    return [candidates[first], *candidates[:first], *candidates[first + 1 :]]


def _why_not_forced(forced: Candidate, candidates: Sequence[Candidate], question: Question) -> str:
    """Return an error text: the reason why the forced algorithm cannot run the call, and the algorithms that can."""
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


def candidate_key(each: Candidate) -> tuple[bool, bool, float]:
    """Return the sort key of a candidate: refused ones come last, measured ones before predicted ones, then by time."""
    return each.refusal is not None, each.measured_s is None, each.measured_s or each.predicted_s or 0.0


def choose(question: Question, state: TunerState = NO_STATE) -> Choice:
    """Return the choice for `question`; raises as `explain` does."""
    with contextlib.suppress(NoAlgorithmError):
        return _explained(question, state, _choosable(question)).choice
    return explain(question, state).choice  # its error has the refusal of every algorithm


def _choosable(question: Question) -> list[Algorithm]:
    """Return the algorithms that the tuner may choose. Not predicting the others shortens the first call of a shape."""
    algorithms = looked_at(question)
    if question.order is not None:
        return algorithms
    return [each for each in algorithms if each.chosen_far or not each.by_name_only]


def looked_at(question: Question) -> list[Algorithm]:
    """Return the algorithms to consider: all of ours, and library algorithms that the ranks have or the call names."""
    vendors = {question.algorithm, *dict(question.vendors)}
    return [each for each in candidates_of(question.collective).values() if not each.vendor or each.name in vendors]


def builder_params(params: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the parameters of a variant that go to `build_in_order`."""
    return {name: value for name, value in params if name != SEGMENT}


def _forced(question: Question) -> Variant:
    """Return the variant that a question forces; raises as `check_variant` does."""
    try:
        variant = parsed(question.algorithm)
    except ValueError:
        variant = Variant(question.algorithm)  # check_variant refuses it, and its error lists the algorithms
    check_variant(question.collective, variant)
    if (order := dict(variant.params).get(ORDER)) is not None:
        check_order(order, question.size)
    return variant


def _context(question: Question, state: TunerState) -> Any:
    from unisono.tuning.measure.measurement_log import Context

    return Context(
        state.machine,
        question.collective,
        question.link,
        question.dtype,
        question.size,
        question.ranks_per_host,
        question.memory,
    )


def reading_of(question: Question, state: TunerState) -> Reading | None:
    """Return the reading of the decision table. It is None if there is no table, or if the model is the better source.

    The model is better than a reading that was interpolated between numbers of ranks if whole calls were calibrated
    among exactly these ranks.
    """
    reading = state.table.read(_context(question, state), question.nbytes) if state.table else None
    is_less = reading is not None and reading.is_interpolated and _is_calibrated(question, state.parameters)
    return None if is_less else reading


def _is_calibrated(question: Question, parameters: Parameters) -> bool:
    """Return whether whole calls of the collective were calibrated among exactly as many ranks."""
    rounds = parameters.rounds_of(question.link, question.size, question.ranks_per_host, question.crowd)
    alike = (question.size, question.ranks_per_host)
    return rounds is not None and (rounds.ranks, rounds.ranks_per_host) == alike and question.collective in rounds.calls


def _variants_of(reading: Reading | None) -> list[Variant]:
    """Return the variants in a reading of the table. The table has checked that they exist."""
    if reading is None:
        return []
    return [parsed(text) for text in {**reading.times_s, **({reading.variant: None} if reading.variant else {})}]


def _best(candidates: list[Candidate], forced: Variant | None, reading: Reading | None) -> tuple[Candidate, str]:
    """Return the chosen one of the sorted candidates, and the source of the choice, as in `Choice`."""
    if forced:
        return next(each for each in candidates if each.variant == str(forced)), "forced"
    if reading:
        of_range = next((each for each in candidates if each.variant == reading.variant), None)
        if of_range and of_range.refusal is None:
            return of_range, reading.tier
        if of_range and of_range.refusal:
            _log.debug("the table's %s is not used, because it %s", of_range.variant, of_range.refusal)
        if candidates[0].refusal is None and candidates[0].measured_s is not None:
            return candidates[0], reading.tier
    return candidates[0], "model"


def candidate(
    row: Variant, question: Question, state: TunerState, measured_s: float | None, is_named: bool
) -> Candidate:
    """Return a variant with its prediction and its refusal. `is_named`: the caller or the decision table names it."""
    algorithm = find(question.collective, row.algorithm)
    return _candidate(algorithm, row.params, question, _costs_for(question, state), measured_s, is_named, math.inf)


class _Costs(NamedTuple):
    """The measured costs of a machine that a question needs.

    Attributes:
        near, far: the link inside hosts, and the slowest link.
        rounds: costs of rounds among about as many ranks that share cores alike, or None.
        alike: the same among ranks that share no core, by which compositions are corrected.
        reduce: the time of combining elements of the question's class of dtypes, by bytes.
        slower: the ratio of that time to the time of the dtypes by which `rounds` were measured.
        network: the measured network between the hosts of the question, or None.
    """

    near: Link
    far: Link
    rounds: RoundCosts | None
    alike: RoundCosts | None
    reduce: Curve
    slower: float
    network: NetworkMap | None


def _costs_for(question: Question, state: TunerState) -> _Costs:
    parameters, network = state.parameters, state.network
    reduce, plain = (parameters.reduce.get(_MEASURED[each], UNMEASURED) for each in (question.dtype, "plain"))
    ranks = question.link, question.size, question.ranks_per_host
    return _Costs(
        parameters.link(question.inside),
        parameters.link(question.link, question.level),
        parameters.rounds_of(*ranks, question.crowd),
        parameters.rounds_of(*ranks),
        reduce,
        reduce.at(_LARGE) / plain.at(_LARGE) if reduce.nbytes and plain.nbytes else 1.0,
        network if network is not None and network.hosts == len(question.hosts) else None,
    )


def _candidate(
    algorithm: Algorithm,
    variant_params: tuple[tuple[str, Any], ...],
    question: Question,
    costs: _Costs,
    measured_s: float | None,
    is_named: bool,
    limit_s: float,
) -> Candidate:
    """Return an algorithm with these parameters as a candidate; see `candidate`.

    It keeps the order of hosts if no order takes less than `limit_s`.
    """
    is_possible = is_named or (algorithm.chosen_far and costs.far.is_far)
    params = dict(variant_params)
    blocks = 0
    if algorithm.in_blocks and BLOCKS not in params:
        params[BLOCKS] = blocks = _blocks(algorithm, question, costs, params)
    refusal = _refusal(algorithm, question, is_possible)
    if refusal is None and ORDER in params and not _may_be_reordered(question):
        refusal = "takes another order than that of ranks, which this call needs"
    phases: tuple[tuple[str, str], ...] = ()
    if not isinstance(algorithm, Composition):
        cost = algorithm.cost_of(question.size, params)
        predicted = None if cost is None else _predicted_s(algorithm, cost, question, costs, params)
    elif refusal is None:
        phases, cost, predicted = _composed(algorithm, question, costs, params)
        predicted *= _composed_factor(algorithm, question, costs, params)
    else:
        cost, predicted = None, None
    parts = _segments(algorithm, cost, question, costs, params) if algorithm.segmentable else 1
    order: tuple[int, ...] = ()
    if costs.network is not None and refusal is None and predicted is not None:
        order, predicted = _over_network(algorithm, params, phases, question, costs.network, parts, predicted, limit_s)
        if cost is not None and not phases and question.size == len(question.hosts):
            predicted += _incast_s(algorithm, cost, question, costs)
    return Candidate(algorithm.name, predicted, parts, refusal, phases, measured_s, variant_params, order, blocks)


def _segments(
    algorithm: Algorithm, cost: Cost | None, question: Question, costs: _Costs, params: Mapping[str, Any]
) -> int:
    """Return the number of segments: the caller's, or else the usual one.

    Between near hosts, the path from rank to rank determines the usual one, if the algorithm declares its path.
    """
    is_set = params.get(SEGMENT) or question.segment_nbytes
    if cost is not None and cost.path is not None and question.level and not costs.far.is_far and not is_set:
        return usual_path_segments(cost, question.nbytes, costs.far)
    usual_nbytes = usual_segment_nbytes(algorithm, cost, question.nbytes, costs.far)
    return segments(algorithm, cost, question.nbytes, is_set or usual_nbytes)


def _blocks(algorithm: Algorithm, question: Question, costs: _Costs, params: Mapping[str, Any]) -> int:
    """Return the number of blocks of an algorithm in blocks: as many as the caller says, or those of the least time."""
    if block_nbytes := params.get(SEGMENT) or question.segment_nbytes:
        return segments(algorithm, None, question.nbytes, block_nbytes)
    return usual_blocks(question.size, question.nbytes, costs.far)


def _over_network(
    algorithm: Algorithm,
    params: Mapping[str, Any],
    phases: tuple[tuple[str, str], ...],
    question: Question,
    network: NetworkMap,
    segments: int,
    predicted_s: float,
    limit_s: float,
) -> tuple[tuple[int, ...], float]:
    """Return the order of ranks in which an algorithm takes the least time on a network, and that time.

    The order is empty if it is the usual one, if the caller has set one, or if no order takes less than `limit_s`. The
    time is `predicted_s` if hosts have several ranks.
    """
    from unisono.tuning.decide import host_order

    across = host_order.ordered_across(algorithm, phases)
    root_host = next(number for number, ranks in enumerate(question.hosts) if question.root in ranks)
    usual = tuple(range(network.hosts))
    hosts = usual
    plain = builder_params(tuple(params.items()))
    facts = question.nbytes, segments, question.root
    is_searched = across and ORDER not in params and _may_be_reordered(question)
    if is_searched and question.size == network.hosts:
        is_searched = host_order.least_s(algorithm, plain, network, *facts) < limit_s
    if is_searched:
        hosts = host_order.best_order(question.collective, across, network, question.nbytes, root_host)
    order = tuple(rank for host in hosts for rank in question.hosts[host])
    if question.size == network.hosts:
        predicted_s = host_order.simulated_s(algorithm, plain, network, params.get(ORDER, order), *facts)
    return order if hosts != usual else (), predicted_s


def _may_be_reordered(question: Question) -> bool:
    """Return whether the order in which contributions are combined is left to the tuner."""
    contract = CONTRACTS[question.collective]
    return not contract.reduces or (
        question.order is None and question.commutative and question.collective not in IN_RANK_ORDER
    )


def _predicted_s(
    algorithm: Algorithm, cost: Cost, question: Question, costs: _Costs, params: Mapping[str, Any]
) -> float:
    """Return the prediction for a flat algorithm, by measured rounds and calls of about as many ranks if there are."""
    rounds = costs.rounds
    if rounds is None:
        return _by_links(algorithm, cost, question, costs, params)
    contract = CONTRACTS[question.collective]
    by_rounds_s = partial(
        predicted_by_rounds_s,
        rounds=rounds,
        is_rooted=contract.has_root,
        crowd=question.crowd,
    )
    seconds = by_rounds_s(cost, question.nbytes, slower=costs.slower)
    calls = rounds.calls.get(question.collective, {}).get(algorithm.name)
    if calls is None:
        return seconds

    def predicted_there_s(nbytes: int) -> float:
        usual = {BLOCKS: _blocks(algorithm, replace(question, nbytes=nbytes), costs, {})} if algorithm.in_blocks else {}
        cost_there = algorithm.cost_of(rounds.ranks, usual)
        return by_rounds_s(cost_there or cost, nbytes)

    return seconds * factor_at(calls, predicted_there_s, question.nbytes)


def _by_links(algorithm: Algorithm, cost: Cost, question: Question, costs: _Costs, params: Mapping[str, Any]) -> float:
    """Return the prediction for a flat algorithm by the costs of the links inside hosts and between them.

    All links are of one kind if the hosts are not known, or if there is only one.
    """
    is_rooted = CONTRACTS[question.collective].has_root
    if len(question.hosts) < 2:
        return predicted_s(cost, question.nbytes, costs.far, question.crowd, costs.reduce, is_rooted=is_rooted)
    crossing = _crossing(algorithm, question, params)
    inside, across = split(cost, crossing)
    across = over_lines(across)
    parts = _segments(algorithm, cost, question, costs, params)
    senders = _senders(algorithm, question)

    def inside_s(nbytes: int) -> float:
        return predicted_s(inside, nbytes, costs.near, question.crowd, costs.reduce, is_rooted=is_rooted)

    def across_s(nbytes: int) -> float:
        facts = costs.far, question.crowd, costs.reduce, crossing.at_once, is_rooted, senders
        return predicted_s(across, nbytes, *facts) + filling_s(across, nbytes, costs.far, parts)

    return overlapped_s(inside_s, across_s, question.nbytes, parts)


def _senders(algorithm: Algorithm, question: Question) -> float:
    """Return how many hosts send to one host at once."""
    from unisono.tuning.decide.senders import senders  # not at the top, because calls on one host need no plans

    return senders(algorithm.collective, algorithm.name, len(question.hosts))


def _incast_s(algorithm: Algorithm, cost: Cost, question: Question, costs: _Costs) -> float:
    """Return the additional seconds of an algorithm with one rank on each host, because several hosts send to one."""
    return incast_s(costs.far, question.nbytes * over_lines(cost).sent, _senders(algorithm, question))


def _crossing(algorithm: Algorithm, question: Question, params: Mapping[str, Any]) -> Crossing:
    """Return the part of an algorithm's cost between several hosts: all of it if their ranks are not consecutive."""
    levels = levels_of(question.hosts, question.size)
    if not levels.is_ascending:
        return Crossing(1, 1, levels.widest[0])
    return algorithm.crossing_of(levels.ranks_per_host, params)


def _composed(
    algorithm: Composition, question: Question, costs: _Costs, named: Mapping[str, Any]
) -> tuple[tuple[tuple[str, str], ...], Cost | None, float]:
    """Return the algorithm of each phase, then the total cost and the predicted seconds of all phases.

    `named` has the algorithms that are set for phases. For each other phase, the fastest by prediction is chosen.
    """
    levels = algorithm.levels(question.hosts or None, question.size)
    between = algorithm.between(levels)
    links = {True: costs.near, False: costs.far}
    chosen = list[tuple[PhaseKind, str, Cost]]()
    for phase in algorithm.phases:
        among = (named[phase.parameter],) if phase.parameter in named else phase.algorithms
        chosen.append((phase, *_fastest(phase, among, levels, question, links[phase.is_inside])))
    cost = total((between, *(cost for _, _, cost in chosen)))

    def phases_s(is_inside: bool, nbytes: int) -> float:
        asked, link = replace(question, nbytes=nbytes), links[is_inside]
        ran = (_phase_s(*each, levels, asked, link) for each in chosen if each[0].is_inside == is_inside)
        return sum(ran, predicted_s(between, nbytes, link, question.crowd) if is_inside else 0.0)

    parts = _segments(algorithm, cost, question, costs, named) if question.level else 1
    seconds = overlapped_s(partial(phases_s, True), partial(phases_s, False), question.nbytes, parts)
    return tuple((phase.parameter, name) for phase, name, _ in chosen), cost, seconds


def _composed_factor(algorithm: Composition, question: Question, costs: _Costs, named: Mapping[str, Any]) -> float:
    """Return the ratio of a composition's measured time to the predicted time of its phases; 1 without measurements.

    Only measured calls among exactly as many ranks, and as many ranks per host, count.
    """
    rounds = costs.alike
    if rounds is None or (rounds.ranks, rounds.ranks_per_host) != (question.size, question.ranks_per_host):
        return 1.0
    calls = rounds.calls.get(question.collective, {}).get(algorithm.name)
    if calls is None:
        return 1.0
    return factor_at(
        calls, lambda nbytes: _composed(algorithm, replace(question, nbytes=nbytes), costs, named)[2], question.nbytes
    )


def _fastest(
    phase: PhaseKind, among: Sequence[str], levels: Levels, question: Question, link: Link
) -> tuple[str, Cost]:
    """Return the name and the cost model of the algorithm that is predicted fastest for a phase.

    Raises:
        NoAlgorithmError: none of the algorithms has a cost model, so no time can be predicted.
    """
    costs = {name: cost for name in among if (cost := phase.cost(levels, name)) is not None}
    if not costs:
        raise NoAlgorithmError(f"cannot predict {phase.parameter}: the costs of {', '.join(among)} are not known")
    return min(costs.items(), key=lambda row: _phase_s(phase, row[0], row[1], levels, question, link))


def _phase_s(phase: PhaseKind, name: str, cost: Cost, levels: Levels, question: Question, link: Link) -> float:
    """Return the predicted seconds of a phase that an algorithm with this cost runs."""
    phase_s = partial(
        predicted_s,
        nbytes=question.nbytes,
        link=link,
        crowd=question.crowd,
        at_once=levels.widest[0] if phase.by_all else 1,
        is_rooted=CONTRACTS[phase.collective].has_root,
    )
    if phase.is_inside or not question.level:
        return phase_s(cost)
    algorithm, _ = algorithm_named(phase.collective, name)
    cost = over_lines(cost)
    filling = filling_s(cost, question.nbytes, link, usual_path_segments(cost, question.nbytes, link))
    return phase_s(cost, senders=_senders(algorithm, question)) + filling


# For each order that a call can ask for, how errors describe it.
_ORDERS: dict[Order | None, str] = {
    "rank": "one after the other, in the order of ranks",
    "at_once": "all contributions at once",
    "canonical": "by the balanced tree",
}

# For each order, the argument by which a call asks for it.
_ORDER_ASKED_BY: dict[Order | None, str] = {
    "rank": "reproducible=True",
    "at_once": "accumulate",
    "canonical": "reproducible=True",
}


def _order_refusal(question: Question) -> str:
    return f"does not combine {_ORDERS.get(question.order)}"


# Links whose ranks can map each other's memory.
_MAPPABLE = ("shm", "local")


def _refusal(algorithm: Algorithm, question: Question, is_named: bool) -> str | None:
    unsupported = algorithm.supports(question.size)
    vendor = dict(question.vendors).get(algorithm.name, NEEDS.get(algorithm.name))
    has_other_order = question.order not in (None, algorithm.order)
    reasons = (
        (algorithm.vendor and vendor is not None, vendor),
        (
            algorithm.mapped and question.link not in _MAPPABLE,
            "needs memory that its peers can map, so all ranks must be on one host",
        ),
        (algorithm.commutative_only and not question.commutative, "needs a commutative operation"),
        (question.varying and not algorithm.varying, "needs shares of equal length"),
        (algorithm.cost is None and not is_named, "declares no cost, so it runs only if it is named"),
        (has_other_order, _order_refusal(question) if has_other_order else None),
        # An algorithm that is the only one of its order may be chosen, because no other prediction competes with it.
        (algorithm.by_name_only and not is_named and question.order is None, "runs only if it is named"),
        (unsupported is not None, f"does not run on {question.size} ranks: {unsupported}"),
    )
    refusal = next(filter(None, [reason for applies, reason in reasons if applies]), None)
    return refusal or (_refusal_of_hosts(algorithm, question, is_named) if isinstance(algorithm, Composition) else None)


def _refusal_of_hosts(algorithm: Composition, question: Question, is_named: bool) -> str | None:
    """Return the reason not to run a composition on the hosts of this call, as text; None if there is none.

    A composition may be unable to run on these hosts. It would gain nothing on one host, or on hosts of one rank each.
    And its gain is unknown if the hosts are not known. If the caller or the decision table names the composition
    (`is_named`), only the first reason counts.
    """
    levels = levels_of(question.hosts or None, question.size)
    unfit = algorithm.needs(levels)
    reasons = (
        (unfit is not None, f"does not run on these hosts: {unfit}"),
        (not question.hosts and not is_named, "runs only if it is named, because the hosts of the ranks are not known"),
        (len(question.hosts) == 1 and not is_named, "has nothing to do on one host"),
        (len(question.hosts) == question.size and not is_named, "has nothing to do inside hosts of one rank each"),
    )
    return next((reason for applies, reason in reasons if applies), None)
