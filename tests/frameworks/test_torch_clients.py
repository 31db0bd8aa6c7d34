"""Libraries that stand on torch, with the backend under them. `make torch-clients` installs and tests them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.distributed", reason="make torch installs what these tests need")

from support.deadlines import DEADLINE_S
from support.torchrun import torchrun

import unisono as un

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parents[1] / "support" / "torch_clients"


def run(library: str, program: str, folder: Path) -> list[dict[str, Any]]:
    """Run the program of a library on two ranks; return their reports."""
    pytest.importorskip(library, reason="make torch-clients installs it")
    return torchrun(PROGRAMS / f"{program}.py", folder).reports


@pytest.mark.parametrize("ranks", [2, 4])
def test_transformers_shares_a_model_among_ranks(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("transformers", reason="make torch-clients installs it")
    words = ("--tokens", "4", "--rounds", "1", "--layers", "2", "--against", "gloo")
    output = torchrun(ROOT / "examples" / "tensor_parallel.py", tmp_path, *words, ranks=ranks).output
    first, *rates = output.splitlines()
    assert first.startswith(f"{ranks} ranks: logits equal those of one process")
    assert [line.split(":")[0] for line in rates] == ["unisono", "gloo"]


def test_accelerate_uses_the_existing_process_group(tmp_path: Path) -> None:
    expected = {
        "trained": True,
        "backends": ["unisono"],
        "gathered": [0, 1],
        "objects": ["rank 0", "rank 1"],
    }
    reports = run("accelerate", "accelerated", tmp_path)
    assert [one.pop("padded") for one in reports] == [[1.0, 0.0], [1.0, 1.0]]
    assert reports == [expected] * 2


def test_trainer_of_hugging_face_uses_the_existing_process_group(tmp_path: Path) -> None:
    expected = {"trained": True, "backends": ["unisono"], "predictions": 24, "mode": "ParallelMode.DISTRIBUTED"}
    assert run("transformers", "hf_trainer", tmp_path) == [expected] * 2


def test_trainer_of_hugging_face_uses_the_optimizer_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="make torch-clients installs it")
    from support.torch_clients import hf_optimizer

    alone = hf_optimizer.trained(None, f"{tmp_path}/alone")
    result, other = un.launch(hf_optimizer.compared, 2, str(tmp_path), timeout_s=DEADLINE_S, on_output=lambda *_: None)
    assert result == other
    assert result["plain"] == pytest.approx(alone, abs=1e-4)
    assert result["resumed"] == pytest.approx(result["whole"], abs=0.05)


def test_lightning_makes_the_process_group_by_its_name(tmp_path: Path) -> None:
    assert (
        run("lightning", "lightning_ddp", tmp_path)
        == [{"trained": True, "backends": ["unisono"], "mean_rank": 0.5}] * 2
    )


def test_ignite_uses_the_existing_process_group(tmp_path: Path) -> None:
    reports = run("ignite", "ignite_ddp", tmp_path)
    assert reports[0] == reports[1]
    assert 0 < reports[0].pop("accuracy") <= 1
    assert reports[0] == {
        "trained": True,
        "backends": ["unisono"],
        "gathered": [0, 1],
        "objects": ["rank 0", "rank 1"],
        "reduced": 3,
        "sent": "rank 1",
    }


def test_torchmetrics_combines_the_rows_of_all_ranks(tmp_path: Path) -> None:
    for one in run("torchmetrics", "metrics", tmp_path):
        assert set(one["equal"].values()) == {True}
        assert len(one["equal"]) == 3
        assert (one["mean"], one["rows"]) == (11.5, list(range(24)))


def test_deepspeed_trains_at_every_stage_of_zero(tmp_path: Path) -> None:
    expected = {"trained": dict.fromkeys("0123", True), "backends": ["unisono"], "total": [2.0, 2.0, 2.0]}
    assert run("deepspeed", "deepspeed_zero", tmp_path) == [expected] * 2


def test_torchft_goes_on_without_a_replica_and_heals_it(tmp_path: Path) -> None:
    coordination = pytest.importorskip("torchft.coordination", reason="make torch-clients installs it")
    lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)

    def train(replica: int) -> dict[str, Any]:
        folder = tmp_path / str(replica)
        folder.mkdir()
        words = (str(replica), lighthouse.address())
        return torchrun(PROGRAMS / "fault_tolerant.py", folder, *words, ranks=1, restarts=1).reports[0]

    try:
        with ThreadPoolExecutor(2) as pool:
            one, other = pool.map(train, range(2))
    finally:
        lighthouse.shutdown()
    assert one["weights"] == other["weights"]
    assert one["step"] == other["step"]
    assert other["sizes"].endswith("222")
