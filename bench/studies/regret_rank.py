"""One rank of `unisono bench regret`: returns the choices at some points, or calibrates and measures everything there.

A machine with other load changes its speed within seconds. So the rounds of all points of a collective are interleaved.
The model is calibrated before, between and after them, and its prediction is the mean of three. It chooses by the first
calibration, before anything else is measured.

Run by path as ``regret_rank.py FILE``. FILE is JSON with the points as [collective, bytes]. To measure them, it also
has
`rounds`, `run_s`, the required `placement` of the cores, and `also`: the variants to run at each point besides those of
the tuner. Rank 0 writes its answer to FILE.answer: the choice at each point or, if all is measured, the model's choice
and predictions, the times, and the seconds that it took. Unisono's variables say which rank this is.
"""

from __future__ import annotations

import ctypes
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple, TypeAlias, TypeVar

import unisono as un
from unisono.bench.statistics import usual_s
from unisono.collectives.measurement.call_trials import CallCycle, CallTrials
from unisono.collectives.measurement.link_probes import rounds_calibrated
from unisono.tuning.decide.choice import TunerState, explain
from unisono.tuning.machine.parameters import Parameters

PR_SET_PDEATHSIG = 1
SEED = 1
FEWEST, MOST = 3, 256
# The longest wait for the required placement, and how often a round is tried until the cores stay in place.
PATIENCE_S = 60.0
ATTEMPTS = 4

T = TypeVar("T")
# The model's choice, and its predicted seconds by variant.
Forecast: TypeAlias = tuple[str, dict[str, float]]


class TimedVariants(NamedTuple):
    """All variants at a point: their calls, the times of each round up to now, and the least of them in seconds."""

    trials: CallTrials
    nbytes: int
    runs: Mapping[str, CallCycle]
    times_s: dict[str, list[float]]
    least_s: dict[str, float]

    def run(self, name: str, calls: int) -> float:
        """Return the usual time of a call of a variant, by `calls` calls after as many that warm up."""
        self.trials.warm_up(self.runs[name], self.nbytes, calls)
        return usual_s(self.trials.times(self.runs[name], calls))


def choices(world: un.Communicator, points: Sequence[tuple[str, int]]) -> list[str]:
    """Return the choice of this communicator's tuner at each point."""
    return [world.explain(collective, nbytes).choice.variant for collective, nbytes in points]


class Sweep:
    """All requested measurements, on one rank of all; `spent_s` is the time that they took, without waiting."""

    def __init__(self, world: un.Communicator, request: Mapping[str, Any]) -> None:
        self.spent_s = 0.0
        self._world, self._request = world, request
        self._trials, self._draw = CallTrials(world), random.Random(SEED)

    def study(self) -> dict[str, Any]:
        """Measure the points of each collective, and predict them by the model."""
        model, times_s = list[Any](), list[Any]()
        requested = list(zip(self._request["points"], self._request["also"], strict=True))
        for _, of_collective in groupby(requested, key=lambda each: each[0][0]):
            predicted, measured = self._study([(*point, also) for point, also in of_collective])
            model += predicted
            times_s += measured
        return {"model": model, "times_s": times_s, "sweep_s": self.spent_s}

    def _study(self, points: Sequence[tuple[str, int, Sequence[str]]]) -> tuple[list[Any], list[Any]]:
        """Return the model's choices and predictions at the points of a collective, and their measurements."""
        began = time.perf_counter()
        fields = [self._prepared(*point) for point in points]
        self.spent_s += time.perf_counter() - began
        forecasts, rounds = [self._forecasts(points)], self._request["rounds"]
        for number in range(1, rounds + 1):
            for field in fields:
                self._round(field)
            if number in (rounds // 2, rounds):
                forecasts.append(self._forecasts(points))
        return [means(of_point) for of_point in zip(*forecasts, strict=True)], [field.times_s for field in fields]

    def _prepared(self, collective: str, nbytes: int, also: Sequence[str]) -> TimedVariants:
        """Return all variants that can run at a point, after a few calls of each."""
        world, trials, runs = self._world, CallTrials(self._world), dict[str, CallCycle]()
        able = [each.variant for each in world.explain(collective, nbytes).candidates if each.refusal is None]
        for name in dict.fromkeys((*able, *also)):
            with suppress(un.NoAlgorithmError):
                runs[name] = trials.planned(collective, nbytes, name)
        if world.rank == 0:
            sys.stderr.write(f"{collective} {nbytes}\n")
        field = TimedVariants(trials, nbytes, runs, {name: [] for name in runs}, {})
        field.least_s.update({name: field.run(name, FEWEST) for name in runs})
        return field

    def _forecasts(self, points: Sequence[tuple[str, int, Sequence[str]]]) -> list[Forecast]:
        """Calibrate the model, and return its forecast of each point."""
        world, collective = self._world, points[0][0]
        calibrate = partial(
            rounds_calibrated, world, world.tuner_state.parameters, short=False, collectives=[collective]
        )
        parameters, _ = self._steadily(calibrate)
        return [predictions(world, parameters, collective, nbytes) for _, nbytes, _ in points]

    def _round(self, field: TimedVariants) -> None:
        """Run all variants at a point once, in random order and for about equal times."""

        def measured() -> dict[str, float]:
            return {
                name: field.run(name, max(FEWEST, min(MOST, round(self._request["run_s"] / field.least_s[name]))))
                for name in self._draw.sample(sorted(field.runs), len(field.runs))
            }

        times, took_s = self._steadily(measured)
        self.spent_s += took_s
        for name, seconds in times.items():
            field.times_s[name].append(seconds)
            field.least_s[name] = min(field.least_s[name], seconds)

    def _steadily(self, measure: Callable[[], T]) -> tuple[T, float]:
        """Return a measurement and its seconds. The measurement is repeated if the hypervisor moves cores meanwhile.

        Raises:
            UsageError: the cores moved each time.
        """
        placement = self._request["placement"]
        for _ in range(ATTEMPTS):
            if placement != "any":
                self._trials.await_placement(placement, PATIENCE_S)
            began = time.perf_counter()
            result, took_s = measure(), time.perf_counter() - began
            if placement in {"any", self._trials.placement()}:
                return result, took_s
        raise un.UsageError(f"the cores were never {placement} during a whole measurement")


def means(forecasts: Sequence[Forecast]) -> Forecast:
    """Return the choice of the first forecast, and the geometric mean of the times of all of them."""
    (choice, first), *_ = forecasts
    return choice, {name: geometric_mean([predicted[name] for _, predicted in forecasts]) for name in first}


def predictions(world: un.Communicator, parameters: Parameters, collective: str, nbytes: int) -> Forecast:
    """Return the model's choice, and its predicted times by variant."""
    explanation = explain(world.explain(collective, nbytes).question, TunerState(None, parameters))
    able = [each for each in explanation.candidates if each.refusal is None]
    return explanation.choice.variant, {each.variant: each.predicted_s for each in able if each.predicted_s is not None}


def main() -> None:
    """Carry out the request in FILE. Rank 0 writes the answer to FILE.answer."""
    path = Path(sys.argv[1])
    request = json.loads(path.read_text())
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with un.init() as world:
        answer = Sweep(world, request).study() if "rounds" in request else choices(world, request["points"])
        if world.rank == 0:
            path.with_suffix(".answer").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
