"""One rank of `unisono.bench.regret`: says what is chosen where, or calibrates and then measures everything there.

Run by path as ``regret_rank.py FILE``. FILE is JSON: the points as [collective, bytes], and to measure them also
`rounds`, `run_s`, the `placement` that the cores shall have, and the variants to run at each beside those of the tuner,
as `also`. Rank 0 writes its answer beside it, to FILE.answer: for each point what is chosen or, where all is measured,
what the model chooses and predicts of each variant, and the times; and the seconds that it took. Unisono's variables
say who this rank is.
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
from typing import Any, TypeVar

import unisono as un
from unisono.bench.statistics import usual_s
from unisono.collectives.probes import rounds_calibrated
from unisono.collectives.trials import Trials, Turns
from unisono.tuning.choice import Known, explain
from unisono.tuning.parameters import Parameters

PR_SET_PDEATHSIG = 1
SEED = 1
FEWEST, MOST = 3, 256
# How long to wait for cores to be as far apart as is wanted, and how often a round is run at most, until they stay so.
PATIENCE_S = 60.0
ATTEMPTS = 4

T = TypeVar("T")


def choices(world: un.Communicator, points: Sequence[tuple[str, int]]) -> list[str]:
    """Return what is chosen at each point by what this communicator knows."""
    return [world.explain(collective, nbytes).choice.variant for collective, nbytes in points]


class Sweep:
    """Everything that is asked for, measured on one rank of all; `spent_s` is what that has taken, without waiting."""

    def __init__(self, world: un.Communicator, asked: Mapping[str, Any]) -> None:
        self.spent_s = 0.0
        self._world, self._asked = world, asked
        self._trials, self._draw = Trials(world), random.Random(SEED)

    def study(self) -> dict[str, Any]:
        """Let the model predict the points of each collective, as calibrated just before, and then measure them."""
        world, model, times_s = self._world, list[Any](), list[Any]()
        wanted = list(zip(self._asked["points"], self._asked["also"], strict=True))
        for collective, of_collective in groupby(wanted, key=lambda each: each[0][0]):
            calibrate = partial(rounds_calibrated, world, world.known.parameters, short=False, collectives=[collective])
            parameters, _ = self._steadily(calibrate)
            for (_, nbytes), also in of_collective:
                model.append(predictions(world, parameters, collective, nbytes))
                times_s.append(self._measure(collective, nbytes, also))
        return {"model": model, "times_s": times_s, "sweep_s": self.spent_s}

    def _measure(self, collective: str, nbytes: int, also: Sequence[str]) -> dict[str, list[float]]:
        """Run all algorithms at a point, in random order in each round; return the times of each round, by variant."""
        world, began = self._world, time.perf_counter()
        able = [each.variant for each in world.explain(collective, nbytes).candidates if each.refusal is None]
        runs = dict[str, Turns]()
        for name in dict.fromkeys((*able, *also)):
            with suppress(un.NoAlgorithmError):
                runs[name] = self._trials.planned(collective, nbytes, name)
        if world.rank == 0:
            sys.stderr.write(f"{collective} {nbytes}\n")
        least = {name: self._run(turns, nbytes, FEWEST) for name, turns in runs.items()}
        self.spent_s += time.perf_counter() - began
        rounds = list[dict[str, float]]()
        while len(rounds) < self._asked["rounds"]:
            rounds.append(self._round(runs, nbytes, least))
            least = {name: min(least[name], rounds[-1][name]) for name in runs}
        return {name: [each[name] for each in rounds] for name in runs}

    def _round(self, runs: Mapping[str, Turns], nbytes: int, least: Mapping[str, float]) -> dict[str, float]:
        """Run everything once, in random order and for about as long."""

        def measured() -> dict[str, float]:
            return {
                name: self._run(runs[name], nbytes, max(FEWEST, min(MOST, round(self._asked["run_s"] / least[name]))))
                for name in self._draw.sample(sorted(runs), len(runs))
            }

        times, took_s = self._steadily(measured)
        self.spent_s += took_s
        return times

    def _steadily(self, measure: Callable[[], T]) -> tuple[T, float]:
        """Return what is measured and the seconds that it takes; it is measured again if the cores move meanwhile.

        Raises:
            UsageError: they have each time.
        """
        placement = self._asked["placement"]
        for _ in range(ATTEMPTS):
            self._await_placement()
            began = time.perf_counter()
            found, took_s = measure(), time.perf_counter() - began
            if placement in {"any", self._trials.placement()}:
                return found, took_s
        raise un.UsageError(f"the cores were never {placement} for as long as it takes to measure")

    def _run(self, turns: Turns, nbytes: int, calls: int) -> float:
        self._trials.warm_up(turns, nbytes, calls)
        return usual_s(self._trials.times(turns, calls))

    def _await_placement(self) -> None:
        if self._asked["placement"] != "any":
            self._trials.await_placement(self._asked["placement"], PATIENCE_S)


def predictions(
    world: un.Communicator, parameters: Parameters, collective: str, nbytes: int
) -> tuple[str, dict[str, float]]:
    """Return what the model chooses, and the predicted times, by variant."""
    said = explain(world.explain(collective, nbytes).question, Known(None, parameters))
    able = [each for each in said.candidates if each.refusal is None]
    return said.choice.variant, {each.variant: each.predicted_s for each in able if each.predicted_s is not None}


def main() -> None:
    """Do what the file says."""
    path = Path(sys.argv[1])
    asked = json.loads(path.read_text())
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with un.init() as world:
        answer = Sweep(world, asked).study() if "rounds" in asked else choices(world, asked["points"])
        if world.rank == 0:
            path.with_suffix(".answer").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
