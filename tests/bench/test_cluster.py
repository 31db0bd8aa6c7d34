"""Measurements of a cluster beside the simulator, on data of machines whose costs are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unisono.algorithms.catalogue.registry import find
from unisono.bench.studies.cluster import REDUCE_PER_BYTE_S, main
from unisono.bench.studies.selection import COLUMNS
from unisono.tuning.machine.parameters import Link
from unisono.tuning.machine.topology import flat
from unisono.tuning.simulator.simulate import simulate

CALLS = (
    ("ALLGATHER", "ring_ompi", "ring"),
    ("ALLREDUCE", "ring_ompi", "ring"),
    ("ALLTOALL", "pairwise_ompi", "pairwise"),
    ("SCATTER", "linear_ompi", "linear"),
)


def data_of(folder: Path, links: dict[int, Link]) -> Path:
    """Write the times of calls on machines with these links; each number of ranks is a job."""
    file = folder / "data.csv"
    lines = [",".join(COLUMNS)]
    for size, link in links.items():
        for collective, algorithm, own in CALLS:
            for nbytes in (1 << 10, 1 << 16, 1 << 22):
                time_s = simulate(find(collective.lower(), own), nbytes, flat(size, link)).seconds
                lines.append(f"{collective},{size},1,{nbytes // 4},job{size},0,OMPI,{algorithm},{time_s * 1e6}")
    file.write_text("\n".join(lines) + "\n")
    return file


def test_simulator_predicts_the_collectives_of_each_job_from_its_rings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = Link("a", 2e-6, 0, 1e-10, REDUCE_PER_BYTE_S)
    links = {8: link, 16: Link("b", 9e-6, 0, 8e-10, REDUCE_PER_BYTE_S, other_peer_s=5e-6)}
    file = data_of(tmp_path, links)
    assert main(["--data", str(file), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {(each["collective"], each["size"]) for each in result["comparisons"]} == {
        (collective, size) for collective in ("allreduce", "alltoall") for size in links
    }
    # The description counts the latency of the scatter, and the change of ranks of the ring, as parts of each message.
    assert [each["ratio"] for each in result["comparisons"]] == pytest.approx([1.0] * 12, rel=0.2)
    assert result["summary"]["allreduce ring_ompi"] == pytest.approx(
        {"points": 6, "geomean": 1.0, "within_25_percent": 1.0, "within_factor_2": 1.0}, rel=0.1
    )
    assert main(["--data", str(file)]) == 0
    assert "within 25 %" in capsys.readouterr().out


def test_data_without_a_ring_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "data.csv"
    file.write_text(",".join(COLUMNS) + "\nALLREDUCE,4,1,8,job,0,OMPI,ring_ompi,3.5\n")
    with pytest.raises(SystemExit, match="2"):
        main(["--data", str(file)])
    assert "has no job with a ring allgather" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--data", str(tmp_path / "none.csv")])
    assert "none.csv cannot be read: No such file" in capsys.readouterr().err
