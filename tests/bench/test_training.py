"""The comparison of methods of training: what is chosen and what is shown, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S
from support.ports import free_port

import unisono as un
from unisono.bench.programs.training import RANK, chosen, drawn, methods_of, time_to


def test_time_to_a_loss_is_that_of_the_first_point_that_reaches_it() -> None:
    curve = [[1.0, 3.0, 0], [2.0, 1.0, 0], [3.0, 2.0, 0], [4.0, 0.5, 0]]
    assert [time_to(curve, loss) for loss in (3.0, 2.5, 0.5, 0.1)] == [1.0, 2.0, 4.0, None]


def test_unknown_method_is_refused_with_a_near_name() -> None:
    assert list(chosen("int8,diloco", 10)) == ["int8", "diloco"]
    with pytest.raises(un.UsageError, match="did you mean streaming"):
        chosen("diloco,steaming", 10)


@pytest.mark.parametrize("name", ["synchronous", "streaming-int4", "ddp-gloo", "swarm", "swarm-loss"])
def test_rank_trains_by_each_kind_of_method(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="make torch installs it")
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_bytes(bytes(range(32)))
    hosts = ["127.0.0.1", "127.0.0.1"]
    store = f"tcp://127.0.0.1:{free_port()}"
    ranks, port = [], free_port()
    for rank in range(2):
        request = ["digits", 16, 12, 4, 4, methods_of(6)[name], hosts, port]
        environ = {"UNISONO_RANK": str(rank), "UNISONO_SIZE": "2", "UNISONO_STORE": store}
        environ |= {"OMP_NUM_THREADS": "1", "UNISONO_KEY_FILE": str(key)}
        command = [sys.executable, str(RANK), json.dumps(request)]
        ranks.append(subprocess.Popen(command, env={**os.environ, **environ}, stdout=subprocess.PIPE))
    try:
        report, _ = ranks[0].communicate(timeout=DEADLINE_S)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    curve, nbytes, stall_s = json.loads(report)
    seconds, losses, sent = zip(*curve, strict=True)
    assert [*seconds] == sorted(seconds)
    assert losses[-1] < losses[0]
    assert sent[-1] <= nbytes
    assert stall_s < seconds[-1]


def test_picture_has_a_line_for_each_method(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="make everything installs it")
    results = {name: [[[1.0, 2.0, 0], [2.0, 1.0, 10**6]], 10**6, 0.5] for name in ("diloco", "int8")}
    drawn("a title", results, tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    assert all(word in text for word in ("a title", "diloco", "int8", "seconds"))
