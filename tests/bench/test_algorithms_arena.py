"""The arena of algorithms: standings by hand, a measurement on ranks with a schedule of a file, and interruption."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from xml.etree.ElementTree import parse

import pytest
from support import schedule_files as files

from unisono.bench.programs import algorithms as arena
from unisono.bench.programs.algorithms import Point, Standing, standings
from unisono.errors import NoAlgorithmError, UsageError

POINTS = [
    Point(2, 8, {"ring": 2.0, "tree": 1.0, "odd": 4.0}, "ring"),
    Point(4, 8, {"ring": 1.0, "tree": 2.0}, "ring"),
]


def test_standings_are_those_computed_by_hand() -> None:
    ring, tree, odd = standings(POINTS)
    assert ring == Standing("ring", 1, 2, pytest.approx(2**0.5), 2.0)
    assert tree == Standing("tree", 1, 2, pytest.approx(2**0.5), 2.0)
    assert odd == Standing("odd", 0, 1, pytest.approx(4.0), 4.0)
    assert POINTS[1].regret("odd") is None


def test_arena_ranks_own_algorithms_and_those_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule, svg = tmp_path / "all.xml", tmp_path / "map.svg"
    schedule.write_bytes(files.allpairs_allreduce(2, 1))
    arguments = ["allreduce", "-n", "2", "--sizes", "8,1K", "--rounds", "1", "--seconds", "0.0001", "--json"]
    assert arena.main([*arguments, "--load", str(schedule), "--svg", str(svg), "--chosen", "swing"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["complete"]
    assert [point["nbytes"] for point in found["points"]] == [8, 1024]
    for point in found["points"]:
        assert {"allpairs", "ring", "swing", "one_shot"} <= point["times_s"].keys()
        assert point["regret"] == pytest.approx(point["times_s"]["swing"] / min(point["times_s"].values()))
    texts = "".join(parse(svg).getroot().itertext())
    assert "fastest algorithm" in texts
    assert "regret of swing" in texts


def test_interrupted_arena_keeps_complete_points(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    see = Point._make

    def interrupting(*fields: object) -> Point:
        os.kill(os.getpid(), signal.SIGINT)
        return see(fields)

    monkeypatch.setattr(arena, "Point", interrupting)
    arguments = ["allreduce", "-n", "2", "--sizes", "8,1K,4K,16K,64K", "--rounds", "2", "--json"]
    assert arena.main(arguments) == arena._INTERRUPTED
    found = json.loads(capsys.readouterr().out)
    assert not found["complete"]
    assert 1 <= len(found["points"]) <= 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["allreduce", "-n", "0"], "numbers of ranks"),
        (["allreduce", "--rounds", "0"], "at least 1"),
        (["allreduce", "--svg", "/no/such/folder/map.svg"], "no folder"),
    ],
)
def test_bad_requests_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        arena.main(arguments)


def test_unknown_collective_is_refused() -> None:
    with pytest.raises(NoAlgorithmError, match="nonsense"):
        arena.main(["nonsense"])


def test_unknown_chosen_algorithm_is_refused() -> None:
    with pytest.raises(NoAlgorithmError, match="no algorithm 'rign'"):
        arena.main(["allreduce", "-n", "2", "--sizes", "8", "--chosen", "rign"])
    with pytest.raises(UsageError, match="--chosen is 'ring\\('"):
        arena.main(["allreduce", "-n", "2", "--sizes", "8", "--chosen", "ring("])
