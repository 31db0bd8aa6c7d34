"""Dumps in the layout of torch's flight recorder, as torch's own analyser reads them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import unisono
from support.deadlines import DEADLINE_S

import unisono as un

X = np.ones(8, np.float32)


# The analyser changes the settings of logging and of the garbage collector, so it gets a process of its own.
ANALYSE = """
import pickle, sys
from torch.distributed.flight_recorder import fr_trace
for folder in sys.argv[1:]:
    fr_trace.main([f"{folder}/torch", "-o", f"{folder}/database"])
"""


def analysed(*folders: Path) -> list[list[Any]]:
    """Convert the dumps of each folder, and return the collectives in the analyser's database for it."""
    pytest.importorskip("torch", reason="make torch installs what these tests need")
    pytest.importorskip("torch.distributed.flight_recorder.fr_trace", reason="this torch has no analyser")
    for folder in folders:
        converted = unisono("postmortem", "dumps", "--torch", "torch", folder=folder)
        assert (converted.returncode, converted.stderr) == (0, "")
    subprocess.run([sys.executable, "-c", ANALYSE, *map(str, folders)], check=True, timeout=DEADLINE_S)
    return [list(pickle.loads((folder / "database").read_bytes())[1].collectives) for folder in folders]


def call_all(world: un.Communicator, folder: str) -> None:
    pair = world.subgroup([0, 1]) if world.rank < 2 else None
    if world.rank == 0:
        world.send(X, 1)
    elif world.rank == 1:
        world.recv(X.copy(), 0)
    world.allgatherv(X[: world.rank], [0, 1, 2])
    for call in (world.allreduce, world.reduce, world.broadcast, world.allgather, world.gather, world.scan):
        call(X)
    world.reduce_scatter(np.ones(3, np.int64))
    world.alltoall(np.ones(6, np.int64))
    world.scatter(np.ones(9, np.int64) if world.rank == 0 else None, out=np.ones(3, np.int64) if world.rank else None)
    if pair is not None:
        pair.barrier()
    world.barrier()
    world.dump(folder)


def make_other_calls(world: un.Communicator, hangs: bool) -> None:
    world.allreduce(X)
    if world.rank != 1:
        world.allreduce(X)
    elif hangs:
        world.recv(X.copy(), 0)
    else:
        world.barrier()


def test_torch_analyser_names_the_culprits_and_no_others(tmp_path: Path) -> None:
    right, different, hanging = folders = [tmp_path / name for name in ("right", "different", "hanging")]
    un.launch(partial(call_all, folder=str(right / "dumps")), 3)
    for folder in (different, hanging):
        options = un.Options(dump=str(folder / "dumps"), timeout_s=1)
        with pytest.raises(un.UnisonoError):
            un.launch(partial(make_other_calls, hangs=folder is hanging), 3, options=options)
    collectives, (_, mismatch), (_, late) = analysed(*folders)
    assert len({collective.collective_name for collective in collectives}) == 10
    assert {collective.group_id == "0" for collective in collectives} == {True, False}
    assert [collective for collective in collectives if not collective.pass_check or collective.missing_ranks] == []
    assert "found collective type: 'barrier'" in str(mismatch.mismatch_collectives[1].type_of_mismatch)
    assert "allreduce(float32[8], op=sum)" in mismatch.collective_frames[0]["name"]
    assert late.missing_ranks == {1}
    again = unisono("postmortem", "dumps", "--torch", "torch", folder=right)
    assert again.returncode == 2
    assert "is not empty" in again.stderr
