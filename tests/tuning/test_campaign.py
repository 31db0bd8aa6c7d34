"""Campaigns: on a simulated machine with its own clock, and on real ranks by the command."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

import numpy as np
import pytest
from support.commands import unisono
from support.deadlines import DEADLINE_S, eventually

import unisono as un
from unisono.algorithms.catalogue.variants import SEGMENT, parsed
from unisono.algorithms.catalogue.vendors import MPI_NATIVE
from unisono.collectives.measurement.call_trials import CallTrials
from unisono.errors import NoAlgorithmError, UsageError
from unisono.tuning.decide.choice import Question, TunerState, candidate, choose
from unisono.tuning.decide.table import compiled, loaded
from unisono.tuning.machine.fingerprint import fingerprint
from unisono.tuning.machine.parameters import PRIORS, Link, Parameters
from unisono.tuning.measure import calibration_files
from unisono.tuning.measure.campaign import FAMILIES, Campaign, PlacementWait, Settings
from unisono.tuning.measure.measurement_log import Measurement, MeasurementStore

# The costs of the simulated machine. The tuner knows only the priors.
REALLY = Parameters({"shm": Link("shm", 2e-6, 0.4e-6, 1 / 3e9, 1 / 2e9), "tcp": PRIORS.links["tcp"]})
DEFAULT_SEGMENT = PRIORS.links["shm"].segment_nbytes
BEST_SEGMENT = DEFAULT_SEGMENT // 2
GRID = [8 * 4**k for k in range(10)]
HELD_OUT = [24 * 4**k for k in range(9)]


class SimulatedTrials:
    """Trials on a simulated machine: times follow from a law, with noise. `elapsed_s` is the machine's clock."""

    def __init__(self, size: int, seed: int, jitter: float = 0.02) -> None:
        self.known = TunerState(machine="made up")
        self.elapsed_s = 0.0
        self.ran: list[tuple[str, int, str]] = []
        self._size, self._noise, self._jitter = size, random.Random(seed), jitter

    def question(self, collective: str, nbytes: int) -> Question:
        return Question(collective, nbytes, self._size, "shm")

    def nbytes(self, collective: str, nbytes: int) -> int:
        return max(1, nbytes)

    def prepare(self, collective: str, nbytes: int, variant: str) -> str | None:
        return "does not run here" if variant == "reduce_broadcast" else None

    def await_placement(self, placement: str, most_s: float) -> PlacementWait:
        return PlacementWait("near", 0.0, 0.0)

    def true_s(self, collective: str, nbytes: int, variant: str) -> float:
        row = parsed(variant)
        result = candidate(
            row.having(**{SEGMENT: None}), self.question(collective, nbytes), TunerState(None, REALLY), None, True
        )
        assert result.predicted_s is not None
        # Segments of 64 KiB are the best ones, by up to 30 %.
        far = abs(math.log2(dict(row.params).get(SEGMENT, DEFAULT_SEGMENT) / BEST_SEGMENT))
        return result.predicted_s * (1 + min(0.3, 0.05 * far) * (nbytes > 256 << 10))

    def run(self, collective: str, nbytes: int, variant: str) -> tuple[list[float], float]:
        self.ran.append((collective, nbytes, variant))
        true_s = self.true_s(collective, nbytes, variant)
        times = [true_s * math.exp(self._noise.gauss(0, self._jitter)) for _ in range(5)]
        self.elapsed_s += sum(times)
        return times, sum(times)


def campaign(
    trials: SimulatedTrials,
    budget_s: float,
    before: Sequence[Measurement] = (),
    collectives: Sequence[str] = ("allreduce",),
) -> list[Measurement]:
    kept: list[Measurement] = []
    Campaign(
        trials, Settings(collectives, GRID, budget_s, {"machine": "made up"}), kept.extend, lambda *_: None, before
    ).run()
    return kept


class WithMpi(SimulatedTrials):
    """Ranks that have met by MPI, whose own collectives are the faster ones from 256 KiB on."""

    def question(self, collective: str, nbytes: int) -> Question:
        return replace(super().question(collective, nbytes), vendors=((MPI_NATIVE, None),))

    def true_s(self, collective: str, nbytes: int, variant: str) -> float:
        if variant != MPI_NATIVE:
            return super().true_s(collective, nbytes, variant)
        return (0.3 if nbytes >= 256 << 10 else 4.0) * super().true_s(collective, nbytes, "ring")


def test_campaign_table_chooses_mpi_collectives_where_they_are_faster() -> None:
    trials = WithMpi(4, seed=3)
    known = TunerState(compiled(campaign(trials, 10.0)), PRIORS, "made up")
    for nbytes in GRID:
        asked = trials.question("allreduce", nbytes)
        taken, otherwise = choose(asked, known).variant, choose(replace(asked, vendors=()), known).variant
        assert (taken == MPI_NATIVE) == (nbytes >= 256 << 10), nbytes
        assert otherwise != MPI_NATIVE
        better_s = min(trials.true_s("allreduce", nbytes, variant) for variant in (MPI_NATIVE, "ring"))
        assert trials.true_s("allreduce", nbytes, taken) <= 1.03 * better_s


def test_campaign_measures_unpredicted_variant_even_on_a_tiny_budget() -> None:
    trials, nbytes = WithMpi(4, seed=5), 8 << 20
    kept: list[Measurement] = []
    budget_s = 12 * trials.true_s("allreduce", nbytes, "ring")
    settings = Settings(["allreduce"], [nbytes], budget_s, {"machine": "made up"})
    Campaign(trials, settings, kept.extend, lambda *_: None).run()
    assert MPI_NATIVE in {measurement.variant for measurement in kept}


def test_first_two_variants_of_a_race_have_different_predictions() -> None:
    trials, nbytes = SimulatedTrials(2, seed=5), 8 << 20
    budget_s = 12 * trials.true_s("allreduce", nbytes, "ring")
    settings = Settings(["allreduce"], [nbytes], budget_s, {"machine": "made up"})
    Campaign(trials, settings, lambda _: None, lambda *_: None).run()
    asked = trials.question("allreduce", nbytes)

    def predicted_s(variant: str) -> float | None:
        return candidate(parsed(variant), asked, trials.known, None, True).predicted_s

    first, second = list(dict.fromkeys(variant for _, _, variant in trials.ran))[:2]
    assert predicted_s(first) != predicted_s(second)
    other = next(name for name in ("direct", "recursive_doubling", "recursive_multiplying") if name != first)
    assert predicted_s("direct") == predicted_s("recursive_doubling") == predicted_s(other)  # the premise of this test


class FastAtOneLength(WithMpi):
    """Ranks whose MPI is faster at one length alone. At its neighbours, Unisono is clearly faster."""

    def true_s(self, collective: str, nbytes: int, variant: str) -> float:
        ours_s = SimulatedTrials.true_s(self, collective, nbytes, "ring" if variant == MPI_NATIVE else variant)
        return ours_s * (1.0 if variant != MPI_NATIVE else 0.5 if nbytes == GRID[7] else 1.6)


def test_campaign_finds_size_range_in_which_mpi_is_faster() -> None:
    kept = campaign(FastAtOneLength(4, seed=6), 10.0)
    (decision,) = compiled(kept).decisions.values()
    assert [decision.variant_at(nbytes) == MPI_NATIVE for nbytes in GRID[6:9]] == [False, True, False]


@pytest.mark.parametrize("size", [4, 6])
@pytest.mark.parametrize("collective", ["allreduce", "broadcast", "allgather"])
def test_campaign_table_is_near_the_best_at_unmeasured_sizes(collective: str, size: int) -> None:
    trials = SimulatedTrials(size, seed=size)
    table = compiled(campaign(trials, 10.0, collectives=[collective]))
    (decision,) = table.decisions.values()
    regrets = []
    for nbytes in HELD_OUT:
        times = {variant: trials.true_s(collective, nbytes, variant) for variant in decision.times_s}
        regrets.append(times[str(decision.variant_at(nbytes))] / min(times.values()))
    assert geometric_mean(regrets) <= 1.03
    assert max(regrets) <= 1.15


def test_campaign_measures_winners_more_often_than_slow_variants() -> None:
    trials = SimulatedTrials(16, seed=1)
    table = compiled(campaign(trials, 10.0))
    (decision,) = table.decisions.values()
    counts = {variant: sum(one[2] == variant for one in trials.ran) for variant in decision.times_s}
    winners = {span.variant for span in decision.ranges}
    assert max(counts[winner] for winner in winners) > 2 * min(counts.values())
    assert all(
        sum(times[k] is not None for times in decision.times_s.values()) >= FAMILIES
        for k, _ in enumerate(decision.sizes)
    )


class WithoutMapping(SimulatedTrials):
    """Ranks without mapped memory. With it, the algorithm `read` would be as fast as the best segments."""

    def prepare(self, collective: str, nbytes: int, variant: str) -> str | None:
        reads = parsed(variant).algorithm == "read"
        return "does not run here" if reads else super().prepare(collective, nbytes, variant)


def test_campaign_refines_segment_size_of_the_winner() -> None:
    result = campaign(WithoutMapping(4, seed=2), 10.0, collectives=["broadcast"])
    (decision,) = compiled(result).decisions.values()
    assert f"{SEGMENT}={BEST_SEGMENT}" in str(decision.variant_at(GRID[-1]))


class WithoutBestSegments(SimulatedTrials):
    """Ranks on which the length of segments makes no difference."""

    def true_s(self, collective: str, nbytes: int, variant: str) -> float:
        return super().true_s(collective, nbytes, str(parsed(variant).having(**{SEGMENT: None})))


@pytest.mark.parametrize("seed", [0, 2, 8])
def test_campaign_drops_refined_segments_that_were_faster_by_chance(seed: int) -> None:
    trials = WithoutBestSegments(4, seed, jitter=0.1)
    results = campaign(trials, 10.0, collectives=["allreduce", "broadcast"])
    assert any(SEGMENT in variant for _, _, variant in trials.ran)
    assert not any(SEGMENT in result.variant for result in results)


class ChangingPlacement(SimulatedTrials):
    """Cores whose placement changes from near to far or back after `period` runs.

    Waiting brings the next change about.
    """

    def __init__(self, size: int, seed: int, period: int) -> None:
        super().__init__(size, seed)
        self.waited_s, self._period, self._beside = 0.0, period, 0

    def label(self) -> str:
        return ("near", "far")[(len(self.ran) + self._beside) // self._period % 2]

    def true_s(self, collective: str, nbytes: int, variant: str) -> float:
        # Between far cores, the otherwise fastest algorithms are the slowest.
        is_far = self.label() == "far" and variant.partition("(")[0] in {"ring", "recursive_doubling", "rabenseifner"}
        return (10.0 if is_far else 1.0) * super().true_s(collective, nbytes, variant)

    def await_placement(self, placement: str, most_s: float) -> PlacementWait:
        waited_s = 0.0
        while placement not in {"any", self.label()} and waited_s < most_s:
            self._beside += 1
            waited_s += 0.01
        self.waited_s += waited_s
        return PlacementWait(self.label(), 0.0, waited_s)


def test_campaign_keeps_only_races_of_the_requested_placement() -> None:
    trials = ChangingPlacement(4, 7, period=150)
    kept: list[Measurement] = []
    settings = Settings(["allreduce"], GRID, 2.0, {"machine": "made up"}, placement="near")
    Campaign(trials, settings, kept.extend, lambda *_: None).run()
    assert trials.waited_s > 0
    assert len({measurement.nbytes for measurement in kept}) >= len(GRID) // 2
    assert {measurement.placement for measurement in kept} == {"near"}
    still = SimulatedTrials(4, 7)
    for measurement in kept:
        true_s = still.true_s("allreduce", measurement.nbytes, measurement.variant)
        assert measurement.median_s == pytest.approx(true_s, rel=0.1), measurement


def test_campaign_fails_when_the_requested_placement_never_comes() -> None:
    trials = ChangingPlacement(4, 7, period=1 << 40)
    settings = Settings(["allreduce"], GRID, 2.0, {"machine": "made up"}, placement="far")
    with pytest.raises(UsageError, match="the cores were not far during a whole measurement, in 60 s of waiting"):
        Campaign(trials, settings, lambda _: None, lambda *_: None).run()
    assert not trials.ran


def test_campaign_does_not_repeat_earlier_measurements() -> None:
    first = campaign(SimulatedTrials(4, seed=3), 10.0)
    again = SimulatedTrials(4, seed=4)
    campaign(again, 10.0, first)
    anchors = {nbytes for nbytes in GRID if any(measurement.nbytes == nbytes for measurement in first)}
    raced = {(nbytes, variant) for _, nbytes, variant in again.ran}
    assert not [(n, v) for n, v in raced if n in anchors and v in {"chain", "double_binary_tree"}]
    assert len(again.ran) < 200


def test_measurements_record_the_placement() -> None:
    assert {measurement.placement for measurement in campaign(SimulatedTrials(4, seed=9), 1.0)} == {"near"}


def placed(world: un.Communicator) -> str:
    return CallTrials(world).placement()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="takes two cores")
@pytest.mark.parametrize("bind", [None, "core"])
def test_all_ranks_measure_the_same_placement_also_when_bound_to_cores(bind: str | None) -> None:
    near, *others = un.launch(placed, 3, bind=bind, timeout_s=DEADLINE_S)
    assert near in {"core", "near", "far"}
    assert others == [near, near]


def test_campaign_is_the_same_on_all_ranks() -> None:
    one, other = SimulatedTrials(4, seed=5), SimulatedTrials(4, seed=5)
    assert campaign(one, 1.0) == campaign(other, 1.0)
    assert one.ran == other.ran


def test_campaign_returns_sizes_that_budget_left_out() -> None:
    def left(budget_s: float) -> list[tuple[str, int]]:
        settings = Settings(["allreduce"], GRID, budget_s, {"machine": "made up"})
        return Campaign(SimulatedTrials(4, seed=8), settings, lambda _: None, lambda *_: None).run()

    assert left(10.0) == []
    few = left(0.02)
    assert 0 < len(few) < len(GRID)
    assert set(few) < {("allreduce", nbytes) for nbytes in GRID}


def test_campaign_measures_doubtful_points_again_and_no_others() -> None:
    before = campaign(SimulatedTrials(4, seed=1), 10.0)
    doubtful = frozenset(
        (measurement.context, measurement.nbytes) for measurement in before if measurement.nbytes < 100
    )
    trials, kept = SimulatedTrials(4, seed=2), list[Measurement]()
    settings = Settings(["allreduce"], GRID, 10.0, {"machine": "made up"}, again=doubtful)
    Campaign(trials, settings, kept.extend, lambda *_: None, before).run()
    known = {(measurement.context, measurement.nbytes) for measurement in before} - doubtful
    variants = Counter((measurement.context, measurement.nbytes) for measurement in kept)
    assert all(variants[point] >= FAMILIES for point in doubtful)
    # At other points, only the parameters of winners are refined.
    assert all("(" in measurement.variant for measurement in kept if (measurement.context, measurement.nbytes) in known)


@pytest.mark.parametrize("budget_s", [0.02, 0.1, 1.0])
def test_a_campaign_ends_soon_after_its_budget(budget_s: float) -> None:
    trials = SimulatedTrials(4, seed=6)
    campaign(trials, budget_s)
    assert trials.elapsed_s < 2 * budget_s + 0.1


def test_campaign_refuses_too_small_a_budget_with_advice() -> None:
    with pytest.raises(
        UsageError, match=r"a budget of 1e-09 s is too small to measure anything: .* give more, or fewer"
    ):
        campaign(SimulatedTrials(4, seed=7), 1e-9)


# --- the command, on real ranks --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a table for two ranks, which takes some seconds to make."""
    folder = tmp_path_factory.mktemp("tuned")
    arguments = ["--collectives", "allreduce,broadcast", "--sizes", "8,1K,64K", "--budget", "9s", "--force"]
    completed = unisono("tune", "-n", "2", *arguments, "--out", "table.json", folder=folder)
    assert completed.returncode == 0, completed.stderr
    return folder


def chosen(world: un.Communicator) -> list[tuple[str, str]]:
    assert world.allreduce(np.arange(300.0)).tolist() == (world.size * np.arange(300.0)).tolist()
    choices = [world.explain(name, n).choice for name in ("allreduce", "broadcast") for n in (8, 1 << 10, 40_000)]
    return [(choice.variant, choice.tier) for choice in choices]


def test_tune_makes_a_table_by_which_two_ranks_choose(tuned: Path) -> None:
    table = loaded(tuned / "table.json")
    assert {context.collective for context in table.decisions} == {"allreduce", "broadcast"}
    assert all(len(decision.times_s) >= FAMILIES for decision in table.decisions.values())
    assert not list((tuned / "cache").rglob("*.json")), "what a campaign calibrates for itself is not kept"
    ranks = un.launch(chosen, 2, options=un.Options(table=str(tuned / "table.json")), timeout_s=DEADLINE_S)
    assert ranks[0] == ranks[1]
    assert {tier for _, tier in ranks[0]} == {"table"}
    decision = next(choice for context, choice in table.decisions.items() if context.collective == "allreduce")
    assert ranks[0][0][0] == decision.variant_at(8)


def test_second_tune_run_adds_to_the_first(tuned: Path) -> None:
    before = len(MeasurementStore(tuned / "table.jsonl").read())
    arguments = ["--collectives", "barrier", "--sizes", "1", "--budget", "20s", "--force", "--out", "table.json"]
    assert unisono("tune", "-n", "2", *arguments, folder=tuned).returncode == 0
    assert len(MeasurementStore(tuned / "table.jsonl").read()) > before
    assert "barrier" in unisono("tune", "show", "table.json", folder=tuned).stdout
    assert unisono("tune", "lint", "table.json", folder=tuned).returncode in (0, 1)
    assert unisono("tune", "merge", "table.json", "table.jsonl", "--out", "both.json", folder=tuned).returncode == 0
    same = unisono("tune", "diff", "table.json", "both.json", folder=tuned)
    assert (same.returncode, same.stdout) == (0, "")


def test_tune_report_is_one_self_contained_page(tuned: Path) -> None:
    pytest.importorskip("matplotlib")
    completed = unisono("tune", "report", "table.json", "--out", "report", folder=tuned)
    assert completed.returncode == 0, completed.stderr
    page = (tuned / "report" / "index.html").read_text()
    contexts = len(loaded(tuned / "table.json").decisions)
    assert page.count("<svg ") == contexts + 2  # the times of each context, the model and its regret
    assert "at a load of" in page
    links = set(re.findall("https?://[^\"' <]*", page))
    assert links <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, "only names of XML, no addresses"


def test_tune_inside_a_job_measures_over_its_ranks(tmp_path: Path) -> None:
    arguments = ["--collectives", "reduce", "--sizes", "64", "--budget", "5s", "--force", "--out", "t.json"]
    tune = ["-m", "unisono", "tune", *arguments]
    completed = unisono("run", "-n", "3", "--", sys.executable, *tune, folder=tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert {context.ranks for context in loaded(tmp_path / "t.json").decisions} == {3}


def test_calibrate_inside_a_job_measures_over_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = [sys.executable, "-m", "unisono", "calibrate", "--short", "--force", "--json"]
    completed = unisono("run", "-n", "3", "--", *command, folder=tmp_path)
    assert completed.returncode == 0, completed.stderr
    result = calibration_files.parameters_of(fingerprint())
    assert {name for name, link in result.links.items() if link.step.nbytes} == {"shm"}
    # On one host there are no pairs to measure, and no compositions.
    assert result.links["shm"].pairs == math.inf
    assert [(row.ranks, row.ranks_per_host, row.calls) for row in result.rounds["shm"]] == [(3, 3, {})]


def test_interrupted_tune_keeps_its_measurements(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unisono", "tune", "-n", "2", "--budget", "60s", "--force", "--out", "t.json"]
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tuning:
        assert eventually((tmp_path / "t.jsonl").exists)
        tuning.send_signal(signal.SIGINT)
        _, errors = tuning.communicate(timeout=DEADLINE_S)
        assert tuning.returncode == 130, errors
    assert loaded(tmp_path / "t.json").decisions


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--budget", "1ns"], "'1ns' is not a time"),
        (["--budget", "0.001s", "--sizes", "1M"], "too small to measure anything"),
        (["-n", "1"], "at least 2"),
        (["--collectives", "allredcue"], "did you mean 'allreduce'"),
        (["--out", "none/t.json"], "there is no folder"),
        (["--out", "t.jsonl"], "use another suffix"),
    ],
)
def test_tune_refuses_wrong_arguments_in_one_line(arguments: list[str], reason: str, tmp_path: Path) -> None:
    completed = unisono("tune", "--collectives", "allreduce", *arguments, folder=tmp_path)
    assert completed.returncode == 2
    assert reason in completed.stderr
    assert "Traceback" not in completed.stderr


def test_calibration_is_kept_and_used_by_later_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    completed = unisono("calibrate", "--short", "--force", "--transports", "shm", "--json", folder=tmp_path)
    assert completed.returncode == 0, completed.stderr
    parameters = json.loads(completed.stdout)
    assert len(parameters["links"]["shm"]["step"]) > 3
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    results = un.launch(lambda world: world.tuner_state.parameters.links["shm"], 2, timeout_s=DEADLINE_S)
    assert results[0] == results[1] != PRIORS.links["shm"]


def test_unwritable_cache_is_a_warning_of_calibrate(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where a folder should be")
    completed = unisono("calibrate", "--short", "--force", "--transports", "shm", "--json", folder=tmp_path)
    assert completed.returncode == 0
    assert "the calibration is not kept" in completed.stderr
    assert json.loads(completed.stdout)["links"]["shm"]["step"]


# --- agreement among ranks -------------------------------------------------------------------------------------------


def test_unusable_table_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text("{")
    with pytest.raises(un.UsageError, match="not complete JSON"):
        un.launch(lambda world: None, 3, options=un.Options(table=str(tmp_path / "table.json")), timeout_s=DEADLINE_S)
    with pytest.raises(un.UsageError, match="cannot be read: No such file"):
        un.launch(lambda world: None, 2, options=un.Options(table=str(tmp_path / "none.json")), timeout_s=DEADLINE_S)


def test_table_of_another_machine_with_unknown_algorithm_warns_once(tuned: Path, tmp_path: Path) -> None:
    table = json.loads((tuned / "table.json").read_text())
    for decision in table["decisions"]:
        decision["machine"] = "0" * 16
    strange = next(row for row in table["decisions"] if row["collective"] == "allreduce")
    strange["ranges"][0]["algorithm"] = "quantum"
    strange["times_us"]["quantum"] = next(iter(strange["times_us"].values()))
    (tmp_path / "table.json").write_text(json.dumps(table))
    (tmp_path / "program.py").write_text(
        "import unisono as un\n"
        "with un.init() as world:\n"
        "    assert world.explain('broadcast', 8).choice.tier == 'model'\n"
    )
    completed = unisono("run", "-n", "2", "program.py", folder=tmp_path, UNISONO_TABLE="table.json")
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr.count("it is of 0000000000000000") == 1
    assert completed.stderr.count("allreduce has no algorithm 'quantum'") == 1


def test_forced_rules_are_applied_or_refused() -> None:
    def both(world: un.Communicator) -> list[str]:
        return [world.explain("allreduce", nbytes).choice.variant for nbytes in (8, 1 << 20)]

    options = un.Options(algorithm="allreduce:0-8K=recursive_doubling;8K-=ring(segment_nbytes=65536)")
    assert un.launch(both, 2, options=options, timeout_s=DEADLINE_S)[1] == [
        "recursive_doubling",
        "ring(segment_nbytes=65536)",
    ]
    with pytest.raises(un.UsageError, match="cannot be used"):
        un.launch(both, 2, options=un.Options(algorithm="allreduce:0-8K=rign"), timeout_s=DEADLINE_S)
    with pytest.raises(NoAlgorithmError, match="scatter_doubling does not run on 3 ranks"):
        un.launch(
            lambda world: world.broadcast(np.ones(4)),
            3,
            options=un.Options(algorithm="broadcast:0-=scatter_doubling"),
            timeout_s=DEADLINE_S,
        )


def test_warning_names_option_replaced_by_that_of_rank_0(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, unisono as un\n"
        "own = 'ring' if os.environ['UNISONO_RANK'] == '0' else 'chain'\n"
        "with un.init(un.Options(algorithm=own)) as world:\n"
        "    assert world.explain('allreduce', 8).choice.algorithm == 'ring'\n"
    )
    completed = unisono("run", "-n", "2", "program.py", folder=tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert "the option algorithm is 'chain' on this rank: rank 0's 'ring' is used instead" in completed.stderr


def test_warning_names_table_that_differs_from_that_of_rank_0(tuned: Path, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text("another one")
    (tmp_path / "program.py").write_text(
        "import os, unisono as un\n"
        "if os.environ['UNISONO_RANK'] == '0':\n"
        f"    os.chdir({str(tuned)!r})  # as on a host that has another file there\n"
        "with un.init(un.Options(table='table.json')) as world:\n"
        "    assert world.explain('allreduce', 8).choice.tier == 'table'\n"
    )
    completed = unisono("run", "-n", "2", "program.py", folder=tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr.count("rank 0's 'the content of that file on rank 0' is used instead") == 1
