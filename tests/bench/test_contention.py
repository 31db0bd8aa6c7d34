"""The study of contention: shared links make a difference, and gains are over the fastest older algorithm."""

from __future__ import annotations

import json

import pytest

from unisono.bench.studies import contention
from unisono.bench.studies.contention import SIZES, Contender, Row, gains


def test_gains_are_over_the_fastest_older_algorithm() -> None:
    old = [Row("net", "allreduce", Contender("ring", {}, True), (4.0, 2.0, 1.0, 6.0), 1.0)]
    old.append(Row("net", "allreduce", Contender("rabenseifner", {}, True), (2.0, 8.0, 1.0, 3.0), 1.0))
    new = Row("net", "allreduce", Contender("swing", {"lanes": 2}), (1.0, 4.0, 2.0, 1.0), 1.0)
    other = new._replace(network="other", contender=Contender("ring", {}, True), seconds=(0.1,) * len(SIZES))
    assert gains(new, [*old, new, other]) == [2.0, 0.5, 0.5, 3.0]
    assert str(new.contender) == "swing(lanes=2)"


def test_scattered_jobs_send_less_between_groups_by_bine_than_by_binomial_trees(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = contention.machines()["fat tree"]
    monkeypatch.setattr(contention, "machines", lambda: {"fat tree": machine})
    monkeypatch.setattr(contention, "DRAWS", 3)
    assert contention.main(["--scattered", "--json"]) == 0
    far = {(row["collective"], row["contender"]): row["far"] for row in json.loads(capsys.readouterr().out)}
    assert far["broadcast", "bine"] < far["broadcast", "binomial"]
    assert far["allreduce", "bine"] < far["allreduce", "rabenseifner"]


def test_study_runs_on_each_kind_of_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    networks = contention.networks()
    few = {name: networks[name] for name in ("ring of 64", "dragonfly")}
    monkeypatch.setattr(contention, "networks", lambda: few)
    monkeypatch.setattr(contention, "SIZES", SIZES[:1])
    every = contention.contenders
    monkeypatch.setattr(contention, "contenders", lambda *about: every(*about)[:3])
    assert contention.main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["network"] for row in rows} == few.keys()
    assert all(len(row["gains"]) == 1 and row["gains"][0] > 0 for row in rows)
