"""Files of measurements, the decision tables made from them, and the choices by these tables."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support.measured_times import HERE, measurement_of

from unisono.cli.main import main
from unisono.errors import NoAlgorithmError, UsageError
from unisono.foundation.printable import printable
from unisono.tuning.decide import table as tables
from unisono.tuning.decide.choice import Question, TunerState, choose, explain
from unisono.tuning.decide.forced_rules import forced, rules
from unisono.tuning.decide.lint import lint
from unisono.tuning.decide.table import Table, compiled, differences, dumped, from_text, loaded, to_json
from unisono.tuning.machine.parameters import PRIORS, RoundCosts, curve
from unisono.tuning.measure.measurement_log import Context, Measurement, MeasurementStore, line_of, merged, read_line
from unisono.tuning.measure.table_files import log_of, measurements_of

ASKED = Question("allreduce", 1 << 10, 4, "shm")
bounded = settings(max_examples=80, deadline=None, derandomize=True)


def lines(context: Context = HERE, **laws: Callable[[int], float]) -> list[Measurement]:
    return [
        measurement_of(name, n, law(n), context)
        for name, law in laws.items()
        for n in (8, 64, 512, 4096, 32768, 262144)
    ]


# Two laws whose times are equal at 4,000 bytes.
CROSSING = {"recursive_doubling": lambda n: 2 + n / 500, "ring": lambda n: 6 + n / 1000}


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    tables._reported.clear()
    caplog.set_level(logging.DEBUG, "unisono")
    logging.getLogger("unisono").propagate = True
    return caplog


# --- files of measurements -------------------------------------------------------------------------------------------


# A file that somebody else wrote is read without control characters, so no name has any.
NAMES = st.text(max_size=20).map(printable)


@bounded
@given(us=st.floats(1e-3, 1e9), nbytes=st.integers(0, 1 << 40), variant=NAMES, job=NAMES)
def test_measurement_survives_writing_and_reading(us: float, nbytes: int, variant: str, job: str) -> None:
    measurement = measurement_of(variant, nbytes, us)._replace(job=job)
    assert read_line(line_of(measurement)) == measurement


def test_measurement_files_merge_by_concatenation(tmp_path: Path) -> None:
    one, other = MeasurementStore(tmp_path / "one.jsonl"), MeasurementStore(tmp_path / "other.jsonl")
    one.append([measurement_of("ring", 8, 1.0), measurement_of("chain", 8, 2.0)])
    other.append([measurement_of("chain", 8, 2.0), measurement_of("chain", 8, 3.0)])
    both = MeasurementStore(tmp_path / "both.jsonl")
    both.path.write_text(one.path.read_text() + other.path.read_text())
    assert both.read() == list(merged([one.read(), other.read()]))
    assert [measurement.variant for measurement in both.read()] == ["ring", "chain", "chain"]


def test_truncated_line_of_a_measurement_file_loses_only_itself(
    tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    store = MeasurementStore(tmp_path / "store.jsonl")
    store.append([measurement_of("ring", 8, 1.0), measurement_of("chain", 8, 2.0)])
    whole = store.path.read_bytes()
    for cut in (1, 20, 200):
        store.path.write_bytes(whole[:-cut])
        store.append([measurement_of("direct", 8, 3.0)])
        names = [measurement.variant for measurement in store.read()]
        assert names == (["ring", "chain", "direct"] if cut == 1 else ["ring", "direct"])
    assert "line 2" in warnings.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"v": 2}, "format 2"), ({"ranks": "4"}, "ranks cannot be '4'"), ({"median_s": -1.0}, "not positive")],
)
def test_invalid_lines_of_a_measurement_file_are_skipped_with_a_reason(
    change: dict[str, Any], reason: str, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    store = MeasurementStore(tmp_path / "store.jsonl")
    store.path.write_text(json.dumps({**json.loads(line_of(measurement_of("ring", 8, 1.0))), **change}) + "\n")
    assert store.read() == []
    assert reason in warnings.text


def test_missing_folder_of_a_measurement_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be kept in .*Not a directory|No such file"):
        MeasurementStore(tmp_path / "none" / "store.jsonl").append([measurement_of("ring", 8, 1.0)])


# --- tables ----------------------------------------------------------------------------------------------------------


def test_ranges_begin_where_the_curves_cross() -> None:
    (decision,) = compiled(lines(**CROSSING)).decisions.values()
    assert [span.variant for span in decision.ranges] == ["recursive_doubling", "ring"]
    assert decision.ranges[0].first == 0
    assert decision.ranges[-1].end is None
    assert 3000 < decision.ranges[1].first < 6000


@bounded
@given(
    times=st.dictionaries(
        st.sampled_from(["ring", "chain", "direct", "circulant"]),
        st.lists(st.one_of(st.none(), st.floats(1, 100)), min_size=5, max_size=5),
        min_size=1,
    )
)
def test_table_chooses_the_fastest_variant_at_every_measured_size(times: dict[str, list[float | None]]) -> None:
    results = [
        measurement_of(v, 8 << 3 * k, us) for v, row in times.items() for k, us in enumerate(row) if us is not None
    ]
    for context, decision in compiled(results).decisions.items():
        assert context == HERE
        assert [span.end for span in decision.ranges[:-1]] == [span.first for span in decision.ranges[1:]]
        for nbytes in decision.sizes:
            measured = {result.variant: result.median_s for result in results if result.nbytes == nbytes}
            assert measured[str(decision.variant_at(nbytes))] <= tables.WORTH_IT * min(measured.values())


def test_table_survives_writing_and_reading(tmp_path: Path) -> None:
    table = compiled(lines(**CROSSING))
    path = tmp_path / "table.json"
    path.write_text(dumped(to_json(table, library="0")))
    result = loaded(path).decisions[HERE]
    assert result.ranges == table.decisions[HERE].ranges
    assert result.sizes == table.decisions[HERE].sizes
    for variant, times in table.decisions[HERE].times_s.items():
        assert result.times_s[variant] == pytest.approx(times, abs=1e-9)


def changed(**change: Any) -> str:
    content = to_json(compiled(lines(**CROSSING)))
    content["decisions"][0] |= change
    return json.dumps(content)


def twice() -> str:
    content = to_json(compiled(lines(**CROSSING)))
    return json.dumps({**content, "decisions": 2 * content["decisions"]})


OVERLAP = [{"from": 0, "to": 9000, "algorithm": "ring"}, {"from": 8192, "to": None, "algorithm": "chain"}]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (changed()[:-40], "not complete JSON, as if cut short"),
        ("[]", "is not a decision table of Unisono"),
        (
            json.dumps({"format": "unisono table", "version": 2, "decisions": []}),
            "has version 2, and this Unisono reads",
        ),
        (changed(ranges=OVERLAP), "ranges overlap .*ring to 9000 and chain from 8192"),
        (changed(ranges=[{"from": 9, "to": 9, "algorithm": "ring"}]), "a range cannot go from 9 to 9"),
        (changed(sizes=[4, 2]), "sizes must be ascending"),
        (changed(times_us={"ring": [1.0]}), "the times of ring must be"),
        (changed(times_us={"ring": [-1.0] * 6}), "the times of ring must be"),
        (json.dumps({"format": "unisono table", "version": 1, "decisions": [{}]}), "decision 1: 'machine' is missing"),
        (json.dumps({"format": "unisono table", "version": 1, "decisions": {"a": 1}}), "no list of decisions"),
        (json.dumps({"format": "unisono table", "version": 1, "decisions": [1]}), "decision 1: it is not written as"),
        (changed(ranges=["ring"]), "decision 1: it is not written as"),
        (changed(times_us=[1.0]), "decision 1: it is not written as"),
        (changed(ranks="4"), "decision 1: ranks cannot be '4'"),
        (changed(ranks_per_host=0), "decision 1: ranks_per_host cannot be 0"),
        (changed(link=None), "decision 1: link cannot be None"),
        (twice(), "decision 2 is for the same calls as an earlier one"),
    ],
)
def test_invalid_table_is_refused_with_place_and_reason(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        from_text(text, "table.json")


def test_unknown_algorithms_of_a_table_are_skipped_with_one_warning(warnings: pytest.LogCaptureFixture) -> None:
    ranges = [{"from": 0, "to": 64, "algorithm": "rign"}, {"from": 64, "to": None, "algorithm": "ring"}]
    for _ in range(2):
        table = from_text(changed(ranges=ranges, times_us={"rign": [1.0] * 6, "ring": [2.0] * 6}), "t")
    assert warnings.text.count("has no algorithm 'rign'") == 1
    assert "did you mean" not in warnings.text.partition("rign")[0]
    assert [span.variant for span in table.decisions[HERE].ranges] == ["ring"]


def test_table_differences_list_sizes_with_different_choices() -> None:
    table = compiled(lines(**CROSSING))
    other = compiled(lines(recursive_doubling=CROSSING["recursive_doubling"]))
    assert differences(table, table) == []
    assert any("ring and recursive_doubling" in line for line in differences(table, other))


def test_lint_reports_implausible_times_in_a_table() -> None:
    reduce, broadcast = (HERE._replace(collective=name) for name in ("reduce", "broadcast"))
    good = [
        *lines(ring=lambda n: 5 + n),
        *lines(reduce, chain=lambda n: 3 + n),
        *lines(broadcast, chain=lambda n: 3 + n),
    ]
    assert lint(compiled(good)) == []
    slow = [*lines(ring=lambda n: 50 + 5 * n), *good[6:]]
    assert any("reduce and then broadcast" in remark.text for remark in lint(compiled(slow)))
    falling = lines(ring=lambda n: 100 if n == 512 else 5 + n / 1000)
    assert any("measure both again" in remark.text for remark in lint(compiled(falling)))
    edited = from_text(changed(ranges=[{"from": 0, "to": None, "algorithm": "ring"}]), "t")
    assert any("times as long as recursive_doubling" in remark.text for remark in lint(edited))


# --- choosing by tables ----------------------------------------------------------------------------------------------


def known(*measurements: Measurement, machine: str = "here") -> TunerState:
    return TunerState(compiled(measurements), machine=machine)


@pytest.mark.parametrize(("nbytes", "name"), [(8, "recursive_doubling"), (1 << 20, "ring")])
def test_table_takes_precedence_over_the_model(nbytes: int, name: str) -> None:
    choice = choose(replace(ASKED, nbytes=nbytes), known(*lines(**CROSSING)))
    assert (choice.algorithm, choice.tier) == (name, "table")


def test_variant_parameters_set_builder_parameters_and_segments() -> None:
    result = known(measurement_of("multi_lane_ring(lanes=4, segment_nbytes=65536)", 1 << 20, 1.0))
    choice = choose(replace(ASKED, nbytes=1 << 20), result)
    assert choice.params == (("lanes", 4),)
    assert choice.segments == (1 << 20) * 1.5 / 6 / 65536


def test_table_interpolates_times_between_rank_counts() -> None:
    def at(ranks: int, **us: float) -> list[Measurement]:
        return [
            measurement_of(name, 1 << 10, time_us, HERE._replace(ranks=ranks, ranks_per_host=ranks))
            for name, time_us in us.items()
        ]

    # The winners at 2 and at 8 ranks are not the best at 4 ranks.
    result = known(*at(2, ring=1.0, direct=9.0, chain=2.0), *at(8, ring=9.0, direct=1.0, chain=2.0))
    explanation = explain(ASKED, result)
    assert (explanation.choice.algorithm, explanation.choice.tier) == ("chain", "table, interpolated")
    assert next(
        candidate.measured_s for candidate in explanation.candidates if candidate.algorithm == "ring"
    ) == pytest.approx(3e-6)
    assert choose(replace(ASKED, size=16), result).tier == "model"


def test_calibrated_model_takes_precedence_over_an_interpolated_table() -> None:
    measurements = [
        measurement_of(name, 1 << 10, us, HERE._replace(ranks=ranks, ranks_per_host=ranks))
        for ranks in (2, 8)
        for name, us in (("direct", 1.0), ("chain", 2.0))
    ]
    taking = {"direct": curve([(8, 9e-6)]), "chain": curve([(8, 8e-6)]), "ring": curve([(8, 1e-6)])}
    step = curve([(8, 1e-6)])

    def tier(ranks: int, collective: str) -> tuple[str, str]:
        rounds = RoundCosts(ranks, ranks, 1e-6, 1e-6, *5 * [step], calls={collective: taking})
        parameters = PRIORS._replace(rounds={"shm": (rounds,)})
        choice = choose(ASKED, known(*measurements)._replace(parameters=parameters))
        return choice.algorithm, choice.tier

    assert tier(4, "allreduce") == ("ring", "model")
    assert tier(4, "broadcast") == tier(5, "allreduce") == ("direct", "table, interpolated")


def test_only_the_part_of_a_table_for_the_machine_decides(warnings: pytest.LogCaptureFixture) -> None:
    assert choose(ASKED, known(*lines(**CROSSING), machine="there")).tier == "model"
    both = known(*lines(**CROSSING), *lines(HERE._replace(machine="there"), chain=lambda n: 1.0))
    assert choose(ASKED, both).tier == "table"
    assert both.table is not None
    table = both.table._replace(machines={"there": {"processor": "EPYC"}})
    own = table.of("here", "t.json")
    assert own is not None
    assert {context.machine for context in own.decisions} == {"here"}
    assert not warnings.text
    assert table.of("elsewhere", "t.json") is None
    assert "the table t.json is ignored, because it has no times of this machine" in warnings.text
    assert "it is of here, there (EPYC)" in warnings.text


def test_table_falls_back_to_next_variant_when_rank_count_is_unsupported(warnings: pytest.LogCaptureFixture) -> None:
    here = Context("here", "allgather", "shm", "plain", 3, 3)
    result = known(
        measurement_of("recursive_doubling", 1 << 10, 1.0, here), measurement_of("bruck", 1 << 10, 2.0, here)
    )
    explanation = explain(Question("allgather", 1 << 10, 3, "shm"), result)
    assert (explanation.choice.algorithm, explanation.choice.tier) == ("bruck", "table")
    assert "the table's recursive_doubling is not used, because it does not run on 3 ranks" in warnings.text


def test_requirements_of_the_call_take_precedence_over_the_table() -> None:
    result = known(*lines(ring=lambda n: 1.0, recursive_doubling=lambda n: 2.0))
    assert choose(replace(ASKED, commutative=False), result).algorithm == "recursive_doubling"
    assert choose(replace(ASKED, algorithm="chain"), result).tier == "forced"
    assert choose(replace(ASKED, dtype="narrow"), result).tier == "table, another dtype"
    assert choose(replace(ASKED, order="canonical"), result).algorithm == "balanced_tree"


def test_table_can_choose_a_by_name_only_algorithm() -> None:
    assert choose(ASKED, known(measurement_of("two_shot", 1 << 10, 1.0))).algorithm == "two_shot"


def test_explanation_shows_measured_times() -> None:
    text = str(explain(replace(ASKED, nbytes=512), known(*lines(**CROSSING))))
    assert "chosen by tier 'table'" in text
    assert "measured 3.0 us, predicted" in text


# --- forcing by rules ------------------------------------------------------------------------------------------------

RULES = "allreduce:0-8K=recursive_doubling;8K-=ring; broadcast:1M-2M=knomial(radix=4)"


@pytest.mark.parametrize(
    ("collective", "nbytes", "name"),
    [
        ("allreduce", 0, "recursive_doubling"),
        ("allreduce", 8191, "recursive_doubling"),
        ("allreduce", 8192, "ring"),
        ("broadcast", 1 << 20, "knomial(radix=4)"),
        ("broadcast", 2 << 20, "auto"),
        ("reduce", 8, "auto"),
    ],
)
def test_forced_rules_apply_by_collective_and_size(collective: str, nbytes: int, name: str) -> None:
    assert forced(RULES, collective, nbytes) == name


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("allreduce:0-8K=rign", "cannot be used: .*'rign'.*did you mean 'ring'"),
        ("allredcue:0-8K=ring", "cannot be used: .*'allredcue'"),
        ("allreduce:0-8K=ring(radix=2)", "no parameter 'radix'"),
        ("allreduce:0-8K=ring;4K-=chain", "overlap: both ring and chain from 4096 B on"),
        ("allreduce:8K-4K=ring", "ends after its beginning"),
        ("allreduce:x-=ring", "a positive number of bytes"),
        ("allreduce:ring", "is not an algorithm"),
        ("allreduce:0-=segment(", "is not an algorithm"),
        ("allreduce:0-=ring(segment_nbytes=0)", "positive number of bytes"),
    ],
)
def test_invalid_forced_rules_are_errors(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        rules(text)


def test_forced_variant_may_have_parameters() -> None:
    choice = choose(replace(ASKED, algorithm="recursive_multiplying(radix=4)"))
    assert (choice.algorithm, choice.params) == ("recursive_multiplying", (("radix", 4),))
    with pytest.raises(UsageError, match="no parameter 'radix'"):
        choose(replace(ASKED, algorithm="ring(radix=4)"))
    with pytest.raises(NoAlgorithmError, match="no algorithm 'rign'"):
        choose(replace(ASKED, algorithm="rign(radix=4)"))


def test_empty_table_leaves_every_choice_to_the_model() -> None:
    assert choose(ASKED, TunerState(Table({}), machine="here")).tier == "model"


# --- tables of several machines, and of jobs -------------------------------------------------------------------------


def written(path: Path, measurements: list[Measurement], *, with_log: bool = True) -> Path:
    if with_log:
        MeasurementStore(log_of(path)).append(measurements)
    path.write_text(
        dumped(to_json(compiled(measurements), machines={"here": {"measured": ["2026-01-01", "2026-02-02"]}}))
    )
    return path


def test_merged_tables_keep_machines_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = HERE._replace(machine="there")
    one = written(tmp_path / "one.json", lines(**CROSSING))
    other = written(tmp_path / "other.json", lines(there, chain=lambda n: 1.0), with_log=False)
    merging = ["tune", "merge", str(one), str(other), "--out", str(tmp_path / "both.json")]
    for _ in range(2):  # a second time changes nothing
        assert main(merging) == 0
        both = loaded(tmp_path / "both.json")
        assert both.decisions.keys() == {HERE, there}
        assert both.decisions[HERE] == loaded(one).decisions[HERE]
        assert both.decisions[there].variant_at(8) == "chain"
    assert main(["tune", "show", str(tmp_path / "both.json")]) == 0
    assert "machine there" in capsys.readouterr().out


def test_times_of_one_machine_are_averaged_by_rounds(tmp_path: Path) -> None:
    one = written(tmp_path / "one.json", [measurement_of("ring", 8, 1.0, rounds=3)])
    other = written(tmp_path / "other.json", [measurement_of("ring", 8, 16.0, rounds=9)], with_log=False)
    assert main(["tune", "merge", str(one), str(other), "--out", str(tmp_path / "both.json")]) == 0
    assert loaded(tmp_path / "both.json").decisions[HERE].times_s["ring"] == (pytest.approx(2e-6),)
    assert measurements_of(other)[0].date == "2026-02-02"


def test_advice_on_a_damaged_table_depends_on_the_measurements_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("{")
    with pytest.raises(UsageError, match="`unisono tune` makes one"):
        loaded(path)
    (tmp_path / "table.jsonl").touch()
    with pytest.raises(UsageError, match="compiles it anew from the measurements beside it"):
        loaded(path)


def test_tables_that_cannot_be_merged_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = to_json(compiled([measurement_of("ring", 8, 1.0)]))
    table["decisions"][0] |= {"sizes": [], "times_us": {}}
    texts = {"by_hand.json": dumped(table), "damaged.json": '{"format": "unisono ta', "other.json": "[]"}
    reasons = ("decisions without times", "not complete JSON", "is not a decision table")
    for (name, text), reason in zip(texts.items(), reasons, strict=True):
        (tmp_path / name).write_text(text)
        assert main(["tune", "merge", str(tmp_path / name), "--out", str(tmp_path / "both.json")]) == 2
        assert reason in capsys.readouterr().err
        assert not (tmp_path / "both.json").exists()


def test_decision_of_trials_reaches_only_similar_sizes() -> None:
    trials = [
        measurement_of(name, n, us)._replace(trial=True)
        for name, us in (("ring", 1.0), ("chain", 2.0))
        for n in (100, 9000)
    ]
    table = compiled(trials)
    again = from_text(dumped(to_json(table)), "t.json").decisions[HERE]
    assert (again.ranges, again.reach) == (table.decisions[HERE].ranges, tables.REACH)
    state = TunerState(table, machine="here")
    tiers = {n: choose(replace(ASKED, nbytes=n), state).tier for n in (24, 25, 400, 401, 2249, 2250, 36000, 36001)}
    assert {n for n, tier in tiers.items() if tier == "table"} == {25, 400, 2250, 36000}
    assert not lint(table)
    assert compiled([*trials, measurement_of("ring", 8, 1.0)]).decisions[HERE].reach is None


@pytest.mark.parametrize("reach", [0, -1, 1.5, "4", True])
def test_wrong_reach_is_refused(reach: object) -> None:
    content = to_json(compiled(lines(**CROSSING)))
    content["decisions"][0]["reach"] = reach
    with pytest.raises(UsageError, match="reach must be a positive integer"):
        from_text(json.dumps(content), "t.json")


@bounded
@given(
    sizes=st.lists(st.integers(0, 1 << 30), min_size=1, max_size=6, unique=True),
    nbytes=st.integers(0, 1 << 33),
)
def test_ranges_and_times_of_trials_reach_equally_far(sizes: list[int], nbytes: int) -> None:
    table = compiled([measurement_of("ring", n, 1.0 + n)._replace(trial=True) for n in sizes])
    decision = table.decisions[HERE]
    reaches = any(n <= tables.REACH * nbytes and nbytes <= tables.REACH * n for n in sizes)
    assert (decision.variant_at(nbytes) is not None) == bool(decision.times_at(nbytes)) == reaches
