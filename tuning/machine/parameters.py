"""What links and memory cost: the numbers that calibration measures, and that the model and the simulator read.

A `Link` is a kind of way between ranks: its constants are those of the alpha-beta-gamma (Hockney) and LogGP models and,
where it was measured, `step` is the time of a whole round by message size, which knows what constants do not (protocols
that change, caches that are full), as in PLogP. The priors below were measured on one x86-64 server of 2025; they only
have to order algorithms rightly until a machine has been calibrated.

Everything here is frozen data, and JSON both ways: `to_json`, `from_json`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from unisono.errors import UsageError

FORMAT = 1

# Of a link that does not say how many pairs of ranks it carries at once: as many as there are.
UNBOUNDED = math.inf


def between(place: float, low: tuple[float, float], high: tuple[float, float]) -> float:
    """Return the value at `place` on the line through two points (place, value), on logarithmic axes.

    >>> between(4, (1, 1.0), (16, 16.0))
    4.0
    """
    share = math.log(max(1, place) / max(1, low[0])) / math.log(max(1, high[0]) / max(1, low[0]))
    return float(low[1] * (high[1] / low[1]) ** share)


class Curve(NamedTuple):
    """Seconds by number of bytes, never falling: knots, straight lines between them where both axes are logarithmic.

    Attributes:
        nbytes: of the knots, at least 1 and ascending.
        seconds: of the knots, positive and not descending. No knots: nothing was measured.
    """

    nbytes: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()

    def at(self, nbytes: float) -> float:
        """Return the seconds of so many bytes.

        Below the first knot it is the time of that one; beyond the last one, each byte takes as long as in the last.
        """
        after = bisect_right(self.nbytes, nbytes)
        if after == 0:
            return self.seconds[0]
        low, below = self.nbytes[after - 1], self.seconds[after - 1]
        if after == len(self.nbytes):
            return below * nbytes / low
        high, above = self.nbytes[after], self.seconds[after]
        return between(nbytes, (low, below), (high, above))


UNMEASURED = Curve()


def curve(points: Iterable[tuple[int, float]]) -> Curve:
    """Return the curve nearest to measured (bytes, seconds), in any order, several of a size or falling by noise too.

    Neighbours that fall are replaced by their geometric mean, until none do (pool adjacent violators).

    Raises:
        UsageError: a size is not positive, or a time is not a positive number.

    >>> [round(seconds, 3) for seconds in curve([(8, 2.0), (64, 1.0), (512, 4.0)]).seconds]
    [1.414, 1.414, 4.0]
    """
    by_size: dict[int, list[float]] = {}
    for nbytes, seconds in points:
        if nbytes < 1 or not 0 < seconds < math.inf:
            raise UsageError(f"a curve has positive bytes and seconds, not ({nbytes}, {seconds})")
        by_size.setdefault(nbytes, []).append(math.log(seconds))
    pools: list[tuple[list[int], list[float]]] = []
    for nbytes in sorted(by_size):
        sizes, logs = [nbytes], by_size[nbytes]
        while pools and _mean(pools[-1][1]) > _mean(logs):
            earlier_sizes, earlier_logs = pools.pop()
            sizes, logs = earlier_sizes + sizes, earlier_logs + logs
        pools.append((sizes, logs))
    knots = [(nbytes, math.exp(_mean(logs))) for sizes, logs in pools for nbytes in sizes]
    return Curve(tuple(nbytes for nbytes, _ in knots), tuple(seconds for _, seconds in knots))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


class Link(NamedTuple):
    """What one kind of link between ranks costs.

    Attributes:
        name: "shm", "tcp", "local", or what a described topology calls it.
        latency_s: of one message (alpha), without the work of the ranks.
        overhead_s: of the work of a rank for one message, which adds up where it has several at a time.
        per_byte_s: of each byte sent (beta; the gap per byte).
        reduce_per_byte_s: of each byte combined (gamma), where `Parameters.reduce` has not measured it.
        segment_nbytes: how much of a block travels at once in a pipelined plan.
        whole_nbytes: blocks of no more travel whole where all ranks send all the time, as caches hold them.
        step: seconds of a round in which every rank sends one message and receives one, by the bytes of the message,
            with all latency and work but no reduction; if it has knots, it stands for the first three constants.
        ports: how many messages a rank can have under way, each at full bandwidth.
        pairs: how many pairs of ranks of two hosts (or parts of a level) send at once, each at full bandwidth; if there
            are more, they share it.
    """

    name: str
    latency_s: float
    overhead_s: float
    per_byte_s: float
    reduce_per_byte_s: float = 1 / 20e9
    segment_nbytes: int = 256 << 10
    whole_nbytes: int = 256 << 10
    step: Curve = UNMEASURED
    ports: int = 1
    pairs: float = UNBOUNDED

    def step_s(self, nbytes: float) -> float:
        """Return the seconds of a round in which each rank sends a message of so many bytes and receives one."""
        if self.step.nbytes:
            return self.step.at(nbytes)
        return self.latency_s + self.overhead_s + nbytes * self.per_byte_s


class RoundCosts(NamedTuple):
    """What a call and its rounds cost where so many ranks take part at once, and share cores, memory and network.

    Attributes:
        ranks, ranks_per_host: how many took part, and the most on one host.
        call_s: of a call, beside its rounds.
        rooted_call_s: the same where not all ranks wait for each other, as a root sends or receives.
        step: seconds of a round in which each rank sends one message and receives one, by the bytes of a message, if
            the ranks share the vector out.
        whole: the same of messages that are whole vectors; caches hold more of these.
        further: seconds of each message more that all ranks send in a round.
        reduce: seconds of combining a message as it arrives.
        reduce_apart: the same of each of several that arrive in a round, and are combined when all have.
        calls: by collective and algorithm, seconds of whole calls by the bytes of the vector; of those measured.
    """

    ranks: int
    ranks_per_host: int
    call_s: float
    rooted_call_s: float
    step: Curve
    whole: Curve
    further: Curve
    reduce: Curve
    reduce_apart: Curve
    calls: Mapping[str, Mapping[str, Curve]] = {}

    def step_s(self, nbytes: float, whole_nbytes: float) -> float:
        """Return the seconds of a round whose messages have so many bytes, of vectors of so many.

        Between a share and a whole vector, it is on the line through both, on logarithmic axes.
        """
        shared_s, whole_s = self.step.at(nbytes), self.whole.at(nbytes)
        if not 0 < nbytes < whole_nbytes:
            return whole_s
        part = min(1.0, math.log(whole_nbytes / nbytes) / math.log(self.ranks))
        return float(whole_s * (shared_s / whole_s) ** part)


# The level between hosts, where a transport is measured apart from the ranks of one host.
NETWORK = "network"


def at_level(transport: str, level: str = "") -> str:
    """Return the name under which a link of a transport at a level is known; without a level, at all of them."""
    return f"{transport}/{level}" if level else transport


# How many times as many ranks there may be as there were when rounds were measured, or as few.
_ALIKE = 2.0


class Parameters(NamedTuple):
    """All that was measured on a machine.

    Attributes:
        links: by transport, such as "shm" or, where a level was measured apart, transport and level, as "tcp/network".
        reduce: seconds of combining two vectors, by dtype and by the bytes of one of them.
        copy: seconds of copying, by bytes.
        rounds: of all ranks of a job, by transport; one for each number of ranks that was measured.
    """

    links: Mapping[str, Link]
    reduce: Mapping[str, Curve] = {}
    copy: Curve = UNMEASURED
    rounds: Mapping[str, tuple[RoundCosts, ...]] = {}

    def link(self, transport: str, level: str = "") -> Link:
        """Return the link of a transport at a level: what was measured there, or what holds for all levels.

        Raises:
            UsageError: the transport is not there.
        """
        found = self.links.get(at_level(transport, level)) or self.links.get(transport)
        if found is None:
            raise UsageError(f"there are no parameters of a link {transport!r}: there are {', '.join(self.links)}")
        return found

    def rounds_of(self, transport: str, ranks: int, ranks_per_host: int, crowd: float = 1.0) -> RoundCosts | None:
        """Return the costs of rounds among about so many ranks; None if none were measured near them.

        What was measured on one host tells nothing of several, and the other way round. Where ranks share cores, each
        with `crowd` of them, it takes just as many: otherwise more or fewer would share a core.
        """

        def distance(each: RoundCosts) -> float:
            if (each.ranks == each.ranks_per_host) != (ranks == ranks_per_host):
                return math.inf
            return max(abs(math.log(ranks / each.ranks)), abs(math.log(ranks_per_host / each.ranks_per_host)))

        nearest = min(self.rounds.get(transport, ()), key=distance, default=None)
        most = math.log(_ALIKE) if crowd <= 1 else 0.0
        return nearest if nearest is not None and distance(nearest) <= most else None


PRIORS = Parameters(
    {
        "shm": Link("shm", 0.3e-6, 0.1e-6, 1 / 10e9, whole_nbytes=8 << 20),
        "tcp": Link("tcp", 10e-6, 2e-6, 1 / 2e9),
        "ucx": Link("ucx", 5e-6, 1e-6, 1 / 4e9),
        "mpi": Link("mpi", 5e-6, 2e-6, 1 / 4e9),
        "local": Link("local", 40e-6, 10e-6, 1 / 5e9, 1 / 2e9, segment_nbytes=1 << 20),
    }
)
LINKS = PRIORS.links

# By the maker of the processor, where it makes a difference to shared memory: decision 5 tells what was measured.
_SHM_BY_MAKER = {"AuthenticAMD": LINKS["shm"]._replace(segment_nbytes=128 << 10, whole_nbytes=2 << 20)}


def priors(maker: str) -> Parameters:
    """Return the priors of a machine whose processor is by this maker, as Linux names it; any other name will do."""
    return PRIORS._replace(links={**LINKS, "shm": _SHM_BY_MAKER.get(maker, LINKS["shm"])})


def to_json(parameters: Parameters) -> dict[str, Any]:
    """Return parameters as JSON has them; curves are lists of [bytes, seconds]."""
    return {
        "format": FORMAT,
        "links": {name: link_to_json(link) for name, link in parameters.links.items()},
        "reduce": {dtype: _knots(found) for dtype, found in parameters.reduce.items()},
        "copy": _knots(parameters.copy),
        "rounds": {name: [_rounds_to_json(each) for each in found] for name, found in parameters.rounds.items()},
    }


def from_json(found: object) -> Parameters:
    """Return the parameters in what was read from JSON.

    Raises:
        UsageError: it is something else, or of a newer format; names the field.
    """
    fields = _fields(found, "parameters", {"format", "links", "reduce", "copy", "rounds"})
    if fields.get("format") != FORMAT:
        raise UsageError(f"parameters of format {fields.get('format')!r}; this version reads format {FORMAT}")
    links = _fields(fields.get("links"), "links")
    reduce = _fields(fields.get("reduce", {}), "reduce")
    rounds = _fields(fields.get("rounds", {}), "rounds")
    return Parameters(
        {name: link_from_json(link, f"links.{name}") for name, link in links.items()},
        {dtype: curve_from_json(knots, f"reduce.{dtype}") for dtype, knots in reduce.items()},
        curve_from_json(fields.get("copy", []), "copy"),
        {name: _all_rounds_from_json(found, f"rounds.{name}") for name, found in rounds.items()},
    )


def link_to_json(link: Link) -> dict[str, Any]:
    """Return a link as JSON has it; what is unbounded is left out."""
    fields = {**link._asdict(), "step": _knots(link.step)}
    return {name: value for name, value in fields.items() if value != UNBOUNDED}


def link_from_json(found: object, where: str, also: Iterable[str] = ()) -> Link:
    """Return the link in what was read from JSON, or from TOML; `also` names fields that errors tell of besides.

    Raises:
        UsageError: it is no link; names the field, which begins with `where`.
    """
    fields = _fields(found, where, set(Link._fields), also)
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        raise UsageError(f"{where}.name: expected a name, not {name!r}")
    for field in ("latency_s", "overhead_s", "per_byte_s"):
        if field not in fields:
            raise UsageError(f"{where}.{field} is missing")
    step = curve_from_json(fields.get("step", []), f"{where}.step")
    numbers = {
        field: _number(value, f"{where}.{field}", field) for field, value in fields.items() if field not in _NO_NUMBER
    }
    return Link(name=name, step=step, **numbers)


def _rounds_to_json(rounds: RoundCosts) -> dict[str, Any]:
    fields = {name: _knots(value) if isinstance(value, Curve) else value for name, value in rounds._asdict().items()}
    calls = {
        collective: {name: _knots(each) for name, each in found.items()} for collective, found in rounds.calls.items()
    }
    return {**fields, "calls": calls}


def _all_rounds_from_json(found: object, where: str) -> tuple[RoundCosts, ...]:
    if not isinstance(found, list):
        raise UsageError(f"{where}: expected a list, not {found!r}")
    return tuple(_rounds_from_json(each, f"{where}[{number}]") for number, each in enumerate(found))


def _rounds_from_json(found: object, where: str) -> RoundCosts:
    fields = _fields(found, where, set(RoundCosts._fields))
    if missing := [name for name in (*_ROUND_NUMBERS, *_ROUND_CURVES) if name not in fields]:
        raise UsageError(f"{where}.{missing[0]} is missing")
    numbers: dict[str, Any] = {name: _number(fields[name], f"{where}.{name}", name) for name in _ROUND_NUMBERS}
    curves = {name: _times_from_json(fields[name], f"{where}.{name}") for name in _ROUND_CURVES}
    calls = {
        collective: {
            name: _times_from_json(knots, f"{where}.calls.{collective}.{name}")
            for name, knots in _fields(measured, f"{where}.calls.{collective}").items()
        }
        for collective, measured in _fields(fields.get("calls", {}), f"{where}.calls").items()
    }
    return RoundCosts(**(numbers | curves), calls=calls)


def _times_from_json(found: object, where: str) -> Curve:
    knots = curve_from_json(found, where)
    if not knots.nbytes:
        raise UsageError(f"{where} has no times")
    return knots


def curve_from_json(found: object, where: str) -> Curve:
    """Return the curve whose knots were read from JSON, as [bytes, seconds].

    Raises:
        UsageError: they are no curve; names the field, which is `where`.
    """
    problem = f"{where}: expected [bytes, seconds], positive, with bytes that ascend and seconds that do not descend"
    if not isinstance(found, list) or not all(isinstance(knot, list) and len(knot) == 2 for knot in found):
        raise UsageError(f"{problem}, not {found!r}")
    if not all(isinstance(nbytes, int) and isinstance(seconds, (int, float)) for nbytes, seconds in found):
        raise UsageError(f"{problem}, not {found!r}")
    knots = Curve(tuple(knot[0] for knot in found), tuple(float(knot[1]) for knot in found))
    ascend = all(low < high for low, high in zip(knots.nbytes, knots.nbytes[1:], strict=False))
    rise = all(0 < low <= high < math.inf for low, high in zip(knots.seconds, knots.seconds[1:], strict=False))
    if knots.nbytes and (knots.nbytes[0] < 1 or not 0 < knots.seconds[0] < math.inf or not ascend or not rise):
        raise UsageError(f"{problem}, not {found!r}")
    return knots


_ROUND_NUMBERS = ("ranks", "ranks_per_host", "call_s", "rooted_call_s")
_ROUND_CURVES = ("step", "whole", "further", "reduce", "reduce_apart")
_NO_NUMBER = ("name", "step")
_WHOLE = ("segment_nbytes", "whole_nbytes", "ports", "ranks", "ranks_per_host")
_AT_LEAST_ONE = (*_WHOLE, "pairs")


def _number(found: object, where: str, field: str) -> Any:
    least = 1 if field in _AT_LEAST_ONE else 0
    kinds = (int,) if field in _WHOLE else (int, float)
    if not isinstance(found, kinds) or isinstance(found, bool) or not least <= found < math.inf:
        kind = "whole number" if field in _WHOLE else "number"
        raise UsageError(f"{where}: expected a {kind}, at least {least}, not {found!r}")
    return found


def _fields(found: object, where: str, known: set[str] | None = None, also: Iterable[str] = ()) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise UsageError(f"{where}: expected fields by name, not {found!r}")
    if known is not None and (unknown := sorted(set(map(str, found)) - known)):
        raise UsageError(f"{where} has no field {unknown[0]!r}: it has {', '.join(sorted({*known, *also}))}")
    return found


def _knots(found: Curve) -> list[list[float]]:
    return [[nbytes, seconds] for nbytes, seconds in zip(found.nbytes, found.seconds, strict=True)]
