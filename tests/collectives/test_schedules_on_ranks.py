"""Schedules of other programs on real ranks, and the commands that prove and write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support import schedule_files as files
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.cli.main import unisono

COUNTS = (0, 1, 7, 1000, 300_001)


def sums(world: un.Communicator, path: str, dtype: str) -> tuple[list[bool], str]:
    """Return whether sums and averages by a schedule are right for each count, and the variant that has run."""
    schedule = un.algorithm.load(path)
    right = []
    for count in COUNTS:
        x = np.arange(count).astype(dtype) + world.rank
        total = np.arange(count).astype(dtype) * world.size + sum(range(world.size))
        right.append(bool((world.allreduce(x, algorithm=schedule.name) == total).all()))
        right.append(bool((world.allreduce(x, "max", out=x, algorithm=schedule.name) == x).all()))
    variants = {row.algorithm for row in world.stats().calls if row.collective == "allreduce"}
    return right, ",".join(variants)


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize(
    "text",
    [files.ring_allreduce(3), files.allpairs_allreduce(3, 2), files.put_allreduce(3)],
    ids=["ring", "all pairs", "puts"],
)
def test_sums_by_a_schedule_are_right(text: bytes, transports: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule"
    path.write_bytes(text)
    options = un.Options(transports=transports)
    for right, variant in un.launch(sums, 3, str(path), "float64", options=options, timeout_s=DEADLINE_S):
        assert all(right)
        assert variant.split("(")[0] in ("ring_fused_1", "allpairs", "put_sum")


def shares(world: un.Communicator, paths: list[str]) -> list[Any]:
    gathering, scattering, sending = (un.algorithm.load(path).name for path in paths)
    x = np.arange(5) + 10 * world.rank
    scattered = world.reduce_scatter(np.arange(4 * 3) * (world.rank + 1), algorithm=scattering)
    sent = [world.broadcast(np.arange(9) * (world.rank == root), root=root, algorithm=sending) for root in (0, 2)]
    return [world.allgather(x, algorithm=gathering).tolist(), scattered.tolist(), *(each.tolist() for each in sent)]


def test_shares_by_a_schedule_are_right(tmp_path: Path) -> None:
    paths = []
    for name, text in {
        "a": files.two_way_allgather(4),
        "b": files.reduce_scatter_by_scratch(4),
        "c": files.broadcast_chain(4),
    }.items():
        paths.append(str(tmp_path / name))
        Path(paths[-1]).write_bytes(text)
    results = un.launch(shares, 4, paths, timeout_s=DEADLINE_S)
    gathered = [10 * rank + i for rank in range(4) for i in range(5)]
    for rank, (of_all, own, *sent) in enumerate(results):
        assert of_all == gathered
        assert own == [10 * at for at in range(3 * rank, 3 * rank + 3)]
        assert sent == [list(range(9))] * 2


def variant_that_runs(world: un.Communicator) -> str:
    world.allreduce(np.ones(4))
    return next(row.algorithm for row in world.stats().calls if row.collective == "allreduce")


def test_options_load_a_schedule_and_force_it(tmp_path: Path) -> None:
    path = tmp_path / "ring.xml"
    path.write_bytes(files.ring_allreduce(2))
    options = un.Options(load=str(path), algorithm="ring_fused_1")
    assert un.launch(variant_that_runs, 2, options=options, timeout_s=DEADLINE_S) == ["ring_fused_1"] * 2


def test_schedule_with_the_name_of_an_algorithm_gets_another_one(tmp_path: Path) -> None:
    path = tmp_path / "chain.xml"
    path.write_bytes(files.broadcast_chain(2))
    assert un.algorithm.load(path, replace=True).name == "imported_chain"
    with pytest.raises(un.UsageError, match="broadcast has an algorithm 'chain' already"):
        un.algorithm.load(path, name="chain")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(unisono, list(map(str, arguments)), catch_exceptions=True)


def test_import_shows_the_cost_beside_other_algorithms(tmp_path: Path) -> None:
    path = tmp_path / "pairs.xml"
    path.write_bytes(files.allpairs_allreduce(4, 1))
    output = run("import", path).output
    assert "allreduce allpairs for 4 ranks: proved" in output
    assert "recursive_doubling" in output
    facts = json.loads(run("import", path, "--json", "--name", "mine").output)
    assert (facts["algorithm"], facts["rounds"], facts["sent"], facts["size"]) == ("mine", 2, 1.5, 4)


def test_import_says_where_a_schedule_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "ring.xml"
    path.write_bytes(files.ring_allreduce(3).replace(b"rrcs", b"rcs"))
    result = run("import", path)
    assert isinstance(result.exception, un.PlanError)
    assert "ring.xml: rank" in str(result.exception)
    path.write_bytes(b"x" * ((16 << 20) + 1))
    assert "the file has 16,777,217 bytes" in str(run("import", path).exception)


def test_export_writes_what_import_reads(tmp_path: Path) -> None:
    path = tmp_path / "out.xml"
    assert run("export", "allreduce", "rabenseifner", "-n", 4, "--out", path).exit_code == 0
    facts = json.loads(run("import", path, "--json", "--name", "again").output)
    assert (facts["sent"], facts["reduced"]) == (1.5, 0.75)
    assert run("export", "allreduce", "rabenseifner", "-n", 4).output == path.read_text()
