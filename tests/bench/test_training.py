"""The comparison of methods of training: what is chosen and what is shown, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.deadlines import DEADLINE_S
from support.ports import free_port

import unisono as un
from unisono.bench.programs.training import RANK, chosen, methods_of, time_to


def test_time_to_a_loss_is_that_of_the_first_point_that_reaches_it() -> None:
    curve = [(1.0, 3.0), (2.0, 1.0), (3.0, 2.0), (4.0, 0.5)]
    assert [time_to(curve, loss) for loss in (3.0, 2.5, 0.5, 0.1)] == [1.0, 2.0, 4.0, None]


def test_unknown_method_is_refused_with_a_near_name() -> None:
    assert list(chosen("int8,diloco", 10)) == ["int8", "diloco"]
    assert chosen("all", 10) == methods_of(10)
    with pytest.raises(un.UsageError, match="did you mean streaming"):
        chosen("diloco,steaming", 10)


def test_rank_trains_by_each_kind_of_method() -> None:
    pytest.importorskip("torch", reason="make torch installs it")
    methods = {**chosen("synchronous,streaming-int4", 4), "ddp-gloo": ["ddp", "", {}]}
    request = ["transformer", 16, 8, 4, 4, methods, "127.0.0.1"]
    environ = {**os.environ, "UNISONO_RANK": "0", "UNISONO_SIZE": "1", "OMP_NUM_THREADS": "1"}
    environ["UNISONO_STORE"] = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, str(RANK), json.dumps(request)]
    ended = subprocess.run(command, env=environ, capture_output=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    results = json.loads(ended.stdout)
    assert list(results) == list(methods)
    assert [len(curve) for curve, _, _ in results.values()] == [2, 2, 2]
    # A rank alone averages with no other, so both ways of averaging in each step compute the same.
    assert results["synchronous"][0][-1][1] == pytest.approx(results["ddp-gloo"][0][-1][1], rel=1e-5)
