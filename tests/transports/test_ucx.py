"""How UCX is found, chosen and shown. test_tagged_fabrics.py tests its messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S
from support.programs import by_launcher
from support.ranks import Job, require

import unisono as un
from unisono.transports.links import preference
from unisono.transports.ucx import library, python_links

pytestmark = pytest.mark.timeout(120)

BY_UCX_PY = """
from support import ucx_py
ucx_py.install(with_handles={with_handles})
import numpy as np, unisono as un
with un.init(un.Options(transports="ucx")) as world:
    total = world.allreduce(np.full(100_000, world.rank + 1))
    used = [traffic.transport for traffic in world.stats().values()]
    print(int(total.min()), int(total.max()), used)
"""

TELL = """
import numpy as np, unisono as un
try:
    with un.init(un.Options(transports="{transports}")) as world:
        world.barrier()
except un.UnisonoError as error:
    print("REPORT", type(error).__name__, error)
"""


def test_ucx_transport_works_with_ucx_py(tmp_path: Path) -> None:
    require("ucx")
    done = by_launcher(BY_UCX_PY.format(with_handles=True), tmp_path)
    assert done.stdout.count("3 3 ['ucx']") == 2, done.stderr


def test_ucx_without_handles_is_used_through_its_python_interface(tmp_path: Path) -> None:
    require("ucx")
    done = by_launcher(BY_UCX_PY.format(with_handles=False), tmp_path)
    assert done.stdout.count("3 3 ['ucx_core']") == 2, done.stderr
    assert "the native core cannot enter the UCX of ucp (handle)" in done.stderr


def sum_and_judge(world: un.Communicator) -> tuple[int, set[str]]:
    un.testing.check_collectives(world, cases=15, seed=4)
    x = np.full(300_000, world.rank, np.int64)
    return int(world.allreduce(x).sum()), {traffic.transport for traffic in world.stats().values()}


def test_ucx_core_carries_all_messages_through_the_python_interface() -> None:
    require("ucx")
    results = un.launch(sum_and_judge, 2, options=un.Options(transports="ucx_core"), timeout_s=DEADLINE_S)
    assert results == [(300_000, {"ucx_core"})] * 2


@pytest.mark.parametrize(
    "check",
    [
        *("many peers", "unexpected messages", "close with pending", "abort", "abort of a full link", "departure"),
        pytest.param("open and close", marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
    ],
)
def test_ucx_python_interface_keeps_the_contract_of_transports(check: str) -> None:
    require("ucx")
    un.testing.check_transport(python_links.open_links, checks=[check])


def sum_for_ever(world: un.Communicator, say: Callable[[Any], None], count: int) -> None:
    world.barrier()
    say("ready")
    try:
        while True:
            world.allreduce(np.ones(count))
    except un.UnisonoError as error:
        say((type(error).__name__, str(error)))


# Without cma, UCX mixes shared memory with TCP on one host, and closing an endpoint waits for the peer.
@pytest.mark.parametrize("carriers", ["^cma", "tcp"])
@pytest.mark.parametrize("count", [1, 1_000_000])
def test_rank_killed_during_ucx_core_calls_is_a_lost_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carriers: str, count: int
) -> None:
    require("ucx")
    monkeypatch.setenv("UCX_TLS", carriers)
    with Job(sum_for_ever, 3, tmp_path, count, transports="ucx_core") as job:
        job.hear_all()
        time.sleep(0.1)
        job.signal(1, signal.SIGKILL)
        for kind, text in job.hear_all(but=1):
            assert (kind, "rank 1" in text) == ("PeerLostError", True), text
        assert [job.exit_code(rank) for rank in (0, 2)] == [0, 0]


@pytest.mark.parametrize("carriers", ["^cma", "tcp"])
def test_ranks_over_ucx_core_can_exit_after_a_peer_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carriers: str
) -> None:
    require("ucx")
    monkeypatch.setenv("UCX_TLS", carriers)
    with Job(sum_for_ever, 3, tmp_path, 1_000_000, transports="ucx_core", timeout_s=3.0) as job:
        job.hear_all()
        job.signal(1, signal.SIGSTOP)
        try:
            assert [kind for kind, _ in job.hear_all(but=1)] == ["CollectiveTimeoutError"] * 2
            assert [job.exit_code(rank) for rank in (0, 2)] == [0, 0]
        finally:
            job.signal(1, signal.SIGKILL)


SHOWN = """
from support import ucx_py
ucx_py.install(with_handles=False)
from unisono.transports.ucx import library
print(library.report())
"""


def test_ucx_report_says_that_the_python_interface_is_used() -> None:
    require("ucx")
    done = subprocess.run(
        [sys.executable, "-c", SHOWN],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        timeout=60,
        check=False,
    )
    assert "its Python interface is used instead" in done.stdout, done.stderr


def shown_by(**variables: str) -> str:
    statement = "from unisono.transports.ucx import library; print(library.report())"
    done = subprocess.run(
        [sys.executable, "-c", statement],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=DEADLINE_S,
        check=False,
    )
    return done.stdout + done.stderr


def test_ucx_report_shows_the_chosen_transports() -> None:
    require("ucx")
    by_tcp = shown_by(UCX_TLS="tcp", UCX_NET_DEVICES="lo")
    assert "which chooses tcp/lo, listens on 127.0.0.1:" in by_tcp
    assert "does not check who connects" in by_tcp
    assert "tcp" not in shown_by(UCX_TLS="self,posix,cma")


def test_ucx_uses_tcp_and_sysv_only_if_the_user_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    require("ucx")
    monkeypatch.delenv("UCX_TLS", raising=False)
    shown = shown_by()
    assert "posix/memory" in shown
    assert " with cuda, which" in shown or " without cuda (arrays of a GPU pass through the host), which" in shown
    assert not any(word in shown for word in ("tcp", "sysv", "listens"))


def test_ucx_uses_cma_only_if_the_user_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require("ucx")
    assert "cma/" in shown_by(UCX_TLS="self,posix,cma")
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert "cma/" not in shown_by()


@pytest.mark.parametrize("name", ["ucx", "ucx_core"])
@pytest.mark.parametrize(
    "variables", [{"UCX_TLS": "pigeon"}, {"UCX_TLS": "rc"}, {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "loft0"}]
)
def test_unavailable_ucx_transports_are_an_error_that_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, variables: dict[str, str]
) -> None:
    require("ucx")
    if "rc" in variables.values() and library.drives_infiniband():
        pytest.skip("this UCX has rc")
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    done = by_launcher(TELL.format(transports=name), tmp_path)
    lines = [line for line in done.stdout.splitlines() if "REPORT" in line]
    assert len(lines) == 2, done.stderr
    for line in lines:
        assert "UCX cannot be used with " in line
        assert all(f"{variable}={value}" in line for variable, value in variables.items()), line


@pytest.mark.parametrize("name", ["ucx", "ucx_core"])
def test_rank_unreachable_by_ucx_is_an_error_on_all_ranks(tmp_path: Path, name: str) -> None:
    require("ucx")
    alone = "import os\nif os.environ['UNISONO_RANK'] == '1': os.environ['UCX_TLS'] = 'self'\n"
    done = by_launcher(alone + TELL.format(transports=name), tmp_path, ranks=3)
    lines = [line for line in done.stdout.splitlines() if "REPORT" in line]
    assert len(lines) == 3, done.stderr
    for line in lines:
        assert "TransportUnavailableError" in line
        assert "with the transports that UCX_TLS and the machines allow" in line
    assert "Traceback" not in done.stderr


CARRIED = """
import os
if os.environ["UNISONO_RANK"] == "{alone}":
    os.environ["UCX_TLS"] = "self"
import numpy as np, unisono as un
with un.init(un.Options(transports="ucx,tcp")) as world:
    world.allreduce(np.ones(100_000))
    world.sendrecv(np.ones(3), 1 - world.rank, np.ones(3), 1 - world.rank)
    print("carried", [traffic.transport for traffic in world.stats().values()])
"""


@pytest.mark.parametrize("alone", [0, 1])
def test_rank_unreachable_by_ucx_is_reached_by_the_next_transport(tmp_path: Path, alone: int) -> None:
    require("ucx")
    done = by_launcher(CARRIED.format(alone=alone), tmp_path)
    assert done.stdout.count("carried ['tcp']") == 2, done.stderr


def test_auto_takes_ucx_only_with_a_device_that_ucx_can_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("ucx")
    assert preference.resolved(("tcp", "shm")) == ("tcp", "shm")
    monkeypatch.setattr(preference, "_DEVICES", tmp_path / "no such folder")
    assert preference.resolved(("auto",)) == ("shm", "tcp")
    (tmp_path / "devices" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(preference, "_DEVICES", tmp_path / "devices")
    libucp = tmp_path / "lib" / "libucp.so.0"
    monkeypatch.setattr(library, "library_path", lambda: str(libucp))
    assert preference.resolved(("auto",)) == ("shm", "tcp")
    (tmp_path / "lib" / "ucx").mkdir(parents=True)
    (tmp_path / "lib" / "ucx" / "libuct_ib_mlx5.so.0").touch()
    assert preference.resolved(("auto",)) == ("shm", "ucx", "tcp")
