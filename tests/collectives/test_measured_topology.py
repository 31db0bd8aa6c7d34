"""`unisono calibrate topology`: the levels of a job's network, measured between ranks and written to a file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S
from support.hosts import needs_wide_area

from unisono.bench.namespaces import run_ranks
from unisono.bench.wide_area import AccessLine, Area, NetworkWay, WideAreaNetwork
from unisono.cli.main import main
from unisono.tuning.machine.topology_files import load

COMMAND = [sys.executable, "-m", "unisono", "calibrate", "topology", "--short"]
NEAR_MS, FAR_MS = 0.5, 10.0
# Hosts 0 and 2 are near each other, and so are hosts 1 and 3.
CITY = (0, 1, 0, 1)


def two_cities() -> Area:
    pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    ways = {(i, j): NetworkWay(200, NEAR_MS if CITY[i] == CITY[j] else FAR_MS) for i, j in pairs}
    return Area((AccessLine(),) * 4, ways)


@pytest.mark.night
@needs_wide_area
def test_measured_levels_are_groups_of_hosts(
    wide_area_of: Callable[[Area], WideAreaNetwork], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network, file = wide_area_of(two_cities()), tmp_path / "machine.toml"
    shown = run_ranks(network.namespaces, 1, [*COMMAND, str(file)], limit_s=DEADLINE_S).decode()
    assert f"kept in {file}" in shown
    machine = load(file)
    assert [(level.name, level.size) for level in machine.levels] == [("host", 1), ("group", 2), ("network", 0)]
    assert machine.places == (0, 2, 1, 3)
    assert machine.eager
    group, far = (level.link for level in machine.levels[1:])
    assert NEAR_MS / 1e3 <= group.latency_s < FAR_MS / 1e3 <= far.latency_s
    assert all(link.per_byte_s > 0 and link.step.nbytes for link in (group, far))
    assert main(["place", "allreduce", "ring", "--topology", str(file), "--size", "64K", "--json"]) == 0
    proposal = json.loads(capsys.readouterr().out)
    assert proposal["proposed"]["seconds"] <= proposal["present"]["seconds"]
    assert main(["simulate", "allreduce", "ring", "-n", "4", "--topology", str(file), "--size", "64K", "--json"]) == 0
    simulation = json.loads(capsys.readouterr().out)["simulations"][0]
    assert simulation["seconds"] == pytest.approx(proposal["present"]["seconds"])
    assert simulation["seconds"] > 4 * FAR_MS / 1e3


def measured_by(ranks: int, file: Path) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "unisono", "run", "-n", str(ranks), "--"] if ranks > 1 else []
    line = [*launcher, *COMMAND, str(file)]
    return subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_ranks_of_one_host_are_one_level(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    done = measured_by(2, file)
    assert "kept in" in done.stdout, done.stderr
    machine = load(file)
    assert [(level.name, level.size, level.link.step.nbytes[:1]) for level in machine.levels] == [("host", 0, (8,))]
    assert (machine.places, machine.eager) == ((), False)
    assert machine.reduce.nbytes
    assert machine.copy.nbytes


@pytest.mark.parametrize(
    ("ranks", "folder", "reason"), [(1, ".", "start at least two"), (2, "none", "there is no folder '{}/none'")]
)
def test_measurement_that_cannot_be_kept_is_refused(ranks: int, folder: str, reason: str, tmp_path: Path) -> None:
    done = measured_by(ranks, tmp_path / folder / "machine.toml")
    assert done.returncode in (1, 2)  # that of the rank that ends first
    assert reason.format(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
