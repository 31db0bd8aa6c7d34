"""Costs of links, rounds and memory: calibration measures them, and the model and the simulator read them.

A `Link` has the constants of the alpha-beta-gamma (Hockney) and LogGP models. If it was measured, it also has `step`:
the time of a whole round by message size, as in PLogP. `step` includes effects that constants cannot, such as a change
of protocol or full caches.

The priors at the end were measured on one x86-64 server of 2025. They only have to order algorithms correctly until the
machine has been calibrated.

All values are frozen data; `to_json` and `from_json` convert them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from unisono.errors import UsageError
from unisono.foundation.printable import brief

FORMAT = 1

# The number of pairs that a link carries at once if its description does not limit it.
UNBOUNDED = math.inf
# Times outside of these bounds, and larger numbers, are not measurements. Arithmetic on them could overflow.
LEAST_S, MOST_S = 1e-15, 1e15
MOST = 1 << 62
# From this latency on, a link is far.
_FAR_S = 1e-3


def between(place: float, low: tuple[float, float], high: tuple[float, float]) -> float:
    """Return the value at `place` on the line through two points (place, value), on logarithmic axes.

    >>> between(4, (1, 1.0), (16, 16.0))
    4.0
    """
    share = math.log(max(1, place) / max(1, low[0])) / math.log(max(1, high[0]) / max(1, low[0]))
    return float(low[1] * (high[1] / low[1]) ** share)


class Curve(NamedTuple):
    """Seconds by number of bytes, never falling: knots with straight lines between them on logarithmic axes.

    Attributes:
        nbytes: sizes of the knots, at least 1 and ascending.
        seconds: times of the knots, positive and not descending. A curve without knots was not measured.
    """

    nbytes: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()

    def at(self, nbytes: float) -> float:
        """Return the seconds for `nbytes`.

        Below the first knot it is the time of that knot. Beyond the last one, time grows in proportion to bytes.
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
    """Return the curve nearest to measured (bytes, seconds), which may repeat sizes and fall because of noise.

    Neighbours that fall are replaced by their geometric mean, until none falls (pool adjacent violators).

    Raises:
        UsageError: a size is not positive, or a time is not a positive number.

    >>> [round(seconds, 3) for seconds in curve([(8, 2.0), (64, 1.0), (512, 4.0)]).seconds]
    [1.414, 1.414, 4.0]
    """
    by_size: dict[int, list[float]] = {}
    for nbytes, seconds in points:
        if nbytes < 1 or not 0 < seconds < math.inf:
            raise UsageError(f"a curve needs positive bytes and seconds, not ({nbytes}, {seconds})")
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
    """The costs of one kind of link between ranks.

    Attributes:
        name: "shm", "tcp", "local", or a name from a topology file.
        latency_s: seconds of one message (alpha), without the work of the ranks.
        overhead_s: seconds of a rank's work for one message. It adds up if the rank has several messages at a time.
        per_byte_s: seconds of each byte sent (beta; the gap per byte).
        reduce_per_byte_s: seconds of each byte combined (gamma), unless `Parameters.reduce` has measured it.
        segment_nbytes: bytes of a block that travel at once in a pipelined plan.
        whole_nbytes: blocks up to this size travel whole where all ranks send all the time, because caches hold them.
        step: seconds of a round in which every rank sends and receives one message, by the bytes of the message. It
            includes all latency and work, but no reduction. If it has knots, it replaces the first three constants.
        ports: how many messages a rank can have under way, each at full bandwidth.
        pairs: how many pairs of ranks of two hosts (or parts of a level) can send at once at full bandwidth. More pairs
            share this bandwidth.
        other_peer_s: seconds more of work for a message to another rank than the message before, because network cards
            keep few connections at hand. The `step` is of messages to one rank, and has none of it.
        incast: the additional time of bytes that very many hosts send to one host at once, as a part of their time.
            The senders share the line of that host, while other lines are idle. n senders add 1 − 1/n of this part.
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
    other_peer_s: float = 0.0
    incast: float = 0.0

    @property
    def is_far(self) -> bool:
        """Whether a message is under way for far longer than a rank works for it."""
        return self.latency_s >= _FAR_S

    def step_s(self, nbytes: float) -> float:
        """Return the seconds of a round in which each rank sends and receives one message of `nbytes`."""
        if self.step.nbytes:
            return self.step.at(nbytes)
        return self.latency_s + self.overhead_s + nbytes * self.per_byte_s


class RoundCosts(NamedTuple):
    """Measured costs of a call and its rounds among all ranks of a job, which share cores, memory and network.

    Attributes:
        ranks, ranks_per_host: the number of ranks that took part, and the most on one host.
        call_s: seconds of a call beyond its rounds.
        rooted_call_s: the same for rooted collectives, where not all ranks wait for each other.
        step: seconds of a round in which each rank sends and receives one message, by the bytes of a message. The
            message is a share of the vector.
        whole: the same for messages that are whole vectors, of which caches hold more.
        further: seconds of each further message that all ranks send in a round.
        reduce: seconds of combining a message as it arrives.
        reduce_apart: the same if several messages arrive in a round and are combined when all have arrived.
        calls: by collective and algorithm, measured seconds of whole calls by the bytes of the vector.
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
        """Return the seconds of a round with messages of `nbytes` from vectors of `whole_nbytes`.

        Between a share and a whole vector, it is on the line through both, on logarithmic axes.
        """
        shared_s, whole_s = self.step.at(nbytes), self.whole.at(nbytes)
        if not 0 < nbytes < whole_nbytes:
            return whole_s
        part = min(1.0, math.log(whole_nbytes / nbytes) / math.log(self.ranks))
        return float(whole_s * (shared_s / whole_s) ** part)


# The level between hosts, where a transport is measured separately from the ranks of one host.
NETWORK = "network"


def at_level(transport: str, level: str = "") -> str:
    """Return the name of a transport's link at a level, such as "tcp/network"; without a level, at all levels."""
    return f"{transport}/{level}" if level else transport


# Measured rounds hold for up to this factor more or fewer ranks.
_ALIKE = 2.0


class Parameters(NamedTuple):
    """All measured costs of a machine.

    Attributes:
        links: by transport, such as "shm" or, where a level was measured apart, transport and level, as "tcp/network".
        reduce: seconds of combining two vectors, by dtype and by the bytes of one of them.
        copy: seconds of copying, by bytes.
        rounds: costs of rounds among all ranks of a job, by transport; one for each measured number of ranks.
    """

    links: Mapping[str, Link]
    reduce: Mapping[str, Curve] = {}
    copy: Curve = UNMEASURED
    rounds: Mapping[str, tuple[RoundCosts, ...]] = {}

    def link(self, transport: str, level: str = "") -> Link:
        """Return the link of a transport at a level, or else its link for all levels.

        Raises:
            UsageError: there are no parameters of the transport.
        """
        link = self.links.get(at_level(transport, level)) or self.links.get(transport)
        if link is None:
            raise UsageError(f"there are no parameters of a link {transport!r}: there are {', '.join(self.links)}")
        return link

    def rounds_of(self, transport: str, ranks: int, ranks_per_host: int, crowd: float = 1.0) -> RoundCosts | None:
        """Return the costs of rounds measured among about as many ranks, or None.

        Measurements on one host say nothing about several hosts, and vice versa. Where `crowd` ranks share each core,
        the numbers of ranks must be equal, because otherwise more or fewer ranks would have shared a core.
        """

        def distance(each: RoundCosts) -> float:
            if (each.ranks == each.ranks_per_host) != (ranks == ranks_per_host):
                return math.inf
            return max(abs(math.log(ranks / each.ranks)), abs(math.log(ranks_per_host / each.ranks_per_host)))

        nearest = min(self.rounds.get(transport, ()), key=distance, default=None)
        most = math.log(_ALIKE) if crowd <= 1 else 0.0
        return nearest if nearest is not None and distance(nearest) <= most else None


LINKS = {
    "shm": Link("shm", 0.3e-6, 0.1e-6, 1 / 10e9, whole_nbytes=8 << 20),
    "tcp": Link("tcp", 10e-6, 2e-6, 1 / 2e9),
    "ucx": Link("ucx", 5e-6, 1e-6, 1 / 4e9),
    "mpi": Link("mpi", 5e-6, 2e-6, 1 / 4e9),
    "local": Link("local", 40e-6, 10e-6, 1 / 5e9, 1 / 2e9, segment_nbytes=1 << 20),
}
# Between hosts, the rate is the geometric mean of Ethernet of 1 and 64 Gbit/s, and senders share the lines of hosts.
INCAST = 0.15  # docs/measurements/many-hosts.md
_ETHERNET = LINKS["tcp"]._replace(name=at_level("tcp", NETWORK), per_byte_s=1 / 1e9, pairs=1, incast=INCAST)
PRIORS = Parameters({**LINKS, _ETHERNET.name: _ETHERNET})

# Shared-memory priors that depend on the maker of the processor; decision 5 has the measurements.
_SHM_BY_MAKER = {"AuthenticAMD": LINKS["shm"]._replace(segment_nbytes=128 << 10, whole_nbytes=2 << 20)}


def priors(maker: str) -> Parameters:
    """Return the priors for a maker of processors, in the words of Linux; an unknown maker gets the usual ones."""
    return PRIORS._replace(links={**PRIORS.links, "shm": _SHM_BY_MAKER.get(maker, LINKS["shm"])})


def to_json(parameters: Parameters) -> dict[str, Any]:
    """Return parameters in their JSON form; curves are lists of [bytes, seconds]."""
    return {
        "format": FORMAT,
        "links": {name: link_to_json(link) for name, link in parameters.links.items()},
        "reduce": {dtype: _knots(times) for dtype, times in parameters.reduce.items()},
        "copy": _knots(parameters.copy),
        "rounds": {name: [_rounds_to_json(each) for each in costs] for name, costs in parameters.rounds.items()},
    }


def from_json(content: object) -> Parameters:
    """Return the parameters in a value that was read from JSON.

    Raises:
        UsageError: a field is not valid, or the format is another one; names the field.
    """
    fields = _fields(content, "parameters", {"format", "links", "reduce", "copy", "rounds"})
    if fields.get("format") != FORMAT:
        raise UsageError(f"parameters of format {brief(fields.get('format'))}; this version reads format {FORMAT}")
    links = _fields(fields.get("links"), "links")
    reduce = _fields(fields.get("reduce", {}), "reduce")
    rounds = _fields(fields.get("rounds", {}), "rounds")
    return Parameters(
        {name: link_from_json(link, f"links.{name}") for name, link in links.items()},
        {dtype: curve_from_json(knots, f"reduce.{dtype}") for dtype, knots in reduce.items()},
        curve_from_json(fields.get("copy", []), "copy"),
        {name: _all_rounds_from_json(costs, f"rounds.{name}") for name, costs in rounds.items()},
    )


def link_to_json(link: Link) -> dict[str, Any]:
    """Return a link in its JSON form, without fields that are unbounded."""
    fields = {**link._asdict(), "step": _knots(link.step)}
    return {name: value for name, value in fields.items() if value != UNBOUNDED}


def link_from_json(entry: object, where: str, also: Iterable[str] = ()) -> Link:
    """Return the link in a value that was read from JSON or TOML; errors list the fields in `also` as valid too.

    Raises:
        UsageError: a field is not valid; names the field, with `where` in front.
    """
    fields = _fields(entry, where, set(Link._fields), also)
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        raise UsageError(f"{where}.name: expected a name, not {brief(name)}")
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
        collective: {name: _knots(each) for name, each in algorithms.items()}
        for collective, algorithms in rounds.calls.items()
    }
    return {**fields, "calls": calls}


def _all_rounds_from_json(value: object, where: str) -> tuple[RoundCosts, ...]:
    if not isinstance(value, list):
        raise UsageError(f"{where}: expected a list, not {brief(value)}")
    return tuple(_rounds_from_json(each, f"{where}[{number}]") for number, each in enumerate(value))


def _rounds_from_json(value: object, where: str) -> RoundCosts:
    fields = _fields(value, where, set(RoundCosts._fields))
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


def _times_from_json(value: object, where: str) -> Curve:
    knots = curve_from_json(value, where)
    if not knots.nbytes:
        raise UsageError(f"{where} has no times")
    return knots


def curve_from_json(value: object, where: str) -> Curve:
    """Return the curve in a list of knots [bytes, seconds] that was read from JSON.

    Raises:
        UsageError: the knots are not a curve; names the field `where`.
    """
    problem = f"{where}: expected [bytes, seconds], positive, with bytes that ascend and seconds that do not descend"
    if not isinstance(value, list) or not all(isinstance(knot, list) and len(knot) == 2 for knot in value):
        raise UsageError(f"{problem}, not {brief(value)}")
    if not all(isinstance(nbytes, int) and isinstance(seconds, (int, float)) for nbytes, seconds in value):
        raise UsageError(f"{problem}, not {brief(value)}")
    if any(isinstance(seconds, int) and seconds > MOST for _, seconds in value):  # float() would overflow
        raise UsageError(f"{problem}, not {brief(value)}")
    knots = Curve(tuple(knot[0] for knot in value), tuple(float(knot[1]) for knot in value))
    ascend = all(low < high for low, high in zip(knots.nbytes, knots.nbytes[1:], strict=False))
    rise = all(LEAST_S <= low <= high <= MOST_S for low, high in zip(knots.seconds, knots.seconds[1:], strict=False))
    within = knots.nbytes and 1 <= knots.nbytes[0] <= knots.nbytes[-1] <= MOST and LEAST_S <= knots.seconds[0] <= MOST_S
    if knots.nbytes and not (within and ascend and rise):
        raise UsageError(f"{problem}, not {brief(value)}")
    return knots


_ROUND_NUMBERS = ("ranks", "ranks_per_host", "call_s", "rooted_call_s")
_ROUND_CURVES = ("step", "whole", "further", "reduce", "reduce_apart")
_NO_NUMBER = ("name", "step")
_WHOLE = ("segment_nbytes", "whole_nbytes", "ports", "ranks", "ranks_per_host")
_AT_LEAST_ONE = (*_WHOLE, "pairs")


def _number(value: object, where: str, field: str) -> Any:
    least = 1 if field in _AT_LEAST_ONE else 0
    kinds = (int,) if field in _WHOLE else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= MOST:
        kind = "whole number" if field in _WHOLE else "number"
        raise UsageError(f"{where}: expected a {kind}, at least {least}, not {brief(value)}")
    return value


def _fields(value: object, where: str, known: set[str] | None = None, also: Iterable[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected fields by name, not {brief(value)}")
    if known is not None and (unknown := sorted(set(map(str, value)) - known)):
        raise UsageError(f"{where} has no field {brief(unknown[0])}: it has {', '.join(sorted({*known, *also}))}")
    return value


def _knots(curve_: Curve) -> list[list[float]]:
    return [[nbytes, seconds] for nbytes, seconds in zip(curve_.nbytes, curve_.seconds, strict=True)]
