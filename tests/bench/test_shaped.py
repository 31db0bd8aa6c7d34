"""The benchmark between network namespaces: its arithmetic, and the removal of the namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S, eventually

import unisono as un
from unisono.bench.namespaces import PREFIX, missing
from unisono.bench.programs.ranks.shaped_rank import prepare
from unisono.bench.programs.shaped import BESIDE, BOUNDS, AlgorithmTimes, judge
from unisono.bench.variants import variants_in

BURST_NBYTES = 128 << 10
NAMESPACES = Path("/run/netns")

needs_namespaces = pytest.mark.skipif(bool(missing()), reason=missing())


def test_algorithm_is_compared_with_the_stream_of_its_own_round() -> None:
    times = [[1.0, 1.6], [2.0, 3.0], [1.0, 1.5]]
    assert judge(times, ["ring"]) == [AlgorithmTimes("ring", 1600.0, 1500.0, 1000.0, 2 / 3)]


def test_bounds_count_what_crosses_the_busiest_link() -> None:
    bounds = {collective: bound(1000, 4, 2) for collective, bound in BOUNDS.items()}
    assert bounds == {
        "allreduce": 1500,
        "reduce_scatter": 750,
        "allgather": 750,
        "alltoall": 1500,
        "broadcast": 1000,
    }


def results_of_calls(world: un.Communicator) -> list[tuple[bool, bool]]:
    """Return for each collective whether the result was as expected before the call, and after it."""
    outcomes = []
    for collective in BOUNDS:
        array, result, expected, call = prepare(world, collective, 8)
        array.fill(world.rank + 1)
        before = bool((result == expected).all())
        call(array, None)
        outcomes.append((before, bool((result == expected).all())))
    return outcomes


def test_each_collective_of_the_shaped_benchmark_gives_its_expected_result() -> None:
    first, second = un.launch(results_of_calls, 2, timeout_s=DEADLINE_S)
    assert second == [(False, True)] * len(BOUNDS)
    assert first == [(False, True)] * (len(BOUNDS) - 1) + [(True, True)]  # rank 0 has the broadcast's value


def start(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "unisono.bench.programs.shaped", "--hosts", "2", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def left_by(process: subprocess.Popen[bytes]) -> list[str]:
    if not NAMESPACES.exists():
        return []
    return [name for name in os.listdir(NAMESPACES) if name.startswith(f"{PREFIX}{process.pid}-")]


@pytest.mark.parametrize("program", ["shaped", "wan"])
def test_unknown_algorithm_is_refused_before_a_network_is_made(program: str) -> None:
    words = [sys.executable, "-m", "unisono", "bench", program, "--algorithms", "auto,nope"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode != 0
    assert "allreduce has no algorithm 'nope'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("collective", BOUNDS)
def test_the_algorithms_measured_by_default_exist(collective: str) -> None:
    assert variants_in(f"auto,{BESIDE.get(collective, 'ring')}", collective)[0] == "auto"


@needs_namespaces
def test_shaped_benchmark_removes_its_namespaces_after_measuring(tmp_path: Path) -> None:
    output = tmp_path / "found.jsonl"
    choices = ("--collective", "allgather", "--algorithms", "ring")
    process = start("--size", "2M", "--rounds", "1", *choices, "--json", str(output))
    assert process.wait(DEADLINE_S) == 0
    document = json.loads(output.read_text())
    assert [row["algorithm"] for row in document["found"]] == ["ring"]
    shaped_nbytes = (1 << 20) - BURST_NBYTES  # the token bucket is full when the stream begins
    assert document["shaped"]["collective"] == "allgather"
    assert document["found"][0]["bound_ms"] > 1e3 * shaped_nbytes / (1e9 / 8)
    assert left_by(process) == []


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_shaped_benchmark_leaves_no_namespace(number: int) -> None:
    process = start("--rounds", "1000")
    assert eventually(lambda: len(left_by(process)) == 3)
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == 1
    assert left_by(process) == []
