"""The ranks that mpirun and srun assign to processes by environment variables."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from support import fake_srun
from support.deadlines import DEADLINE_S

from unisono.collectives.bootstrap.environment import MPI_WORLD, Launch, detect
from unisono.collectives.bootstrap.launcher_variables import (
    HYDRA,
    JSRUN,
    MVAPICH,
    OPEN_MPI,
    PALS,
    LauncherStep,
    Variables,
    node_names,
)
from unisono.errors import UsageError

FAKE_SRUN = Path(__file__).parents[1] / "support" / "fake_srun.py"
LAUNCHERS = [OPEN_MPI, MVAPICH, JSRUN, PALS, HYDRA]
STEP = fake_srun.variables(3, 5, nodes="node[01-02,7]")


def place(launch: Launch) -> tuple[int, int]:
    return launch.rank, launch.size


def mpirun(variables: Variables, rank: int = 3, size: int = 8) -> dict[str, str]:
    return dict(zip(variables[1:], (str(rank), str(size)), strict=True))


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return str(path)


# --- mpirun --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variables", LAUNCHERS)
def test_ranks_of_mpirun_use_mpi_as_their_store(variables: Variables) -> None:
    launch = detect(mpirun(variables))
    assert place(launch) == (3, 8)
    assert (launch.store, launch.key, launch.launcher) == (MPI_WORLD, None, variables.launcher)
    assert detect(mpirun(variables, 0)).served_host is None


@pytest.mark.parametrize("variables", LAUNCHERS)
def test_explicit_store_replaces_the_mpi_store(variables: Variables) -> None:
    launch = detect({**mpirun(variables, 0), "UNISONO_STORE": "tcp://127.0.0.1:29400"})
    assert (launch.store, launch.served_host, launch.size) == ("tcp://127.0.0.1:29400", "127.0.0.1", 8)


@pytest.mark.parametrize("variables", LAUNCHERS)
def test_single_rank_of_mpirun_needs_no_store(variables: Variables) -> None:
    assert detect(mpirun(variables, 0, 1)).store is None


@pytest.mark.parametrize("variables", LAUNCHERS)
def test_a_missing_variable_of_mpirun_is_named(variables: Variables) -> None:
    environ = mpirun(variables)
    shown_by = variables.rank if variables == PALS else variables.size
    for name in set(environ) - {shown_by}:
        with pytest.raises(UsageError, match=f"is set but {name} is not"):
            detect({other: value for other, value in environ.items() if other != name})


def test_pals_is_named_although_it_sets_the_variables_of_hydra() -> None:
    assert detect({**mpirun(PALS), **mpirun(HYDRA)}).launcher == "mpiexec of PALS"


def test_jsrun_of_spectrum_mpi_agrees_with_the_variables_of_open_mpi() -> None:
    assert place(detect({**mpirun(JSRUN), **mpirun(OPEN_MPI)})) == (3, 8)


# --- srun ----------------------------------------------------------------------------------------------------------


def test_srun_variables_give_rank_job_and_store_on_the_first_node(key_file: str) -> None:
    launch = detect({**STEP, "UNISONO_KEY_FILE": key_file})
    assert place(launch) == (3, 5)
    assert launch.launcher == "srun"
    assert str(launch.store).startswith("tcp://node01:")
    assert launch.served_host is None
    assert detect({**STEP, "UNISONO_KEY_FILE": key_file, "SLURM_PROCID": "0"}).served_host == ""  # on all interfaces
    others = [{"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "4712"}, {"SLURM_RESTART_COUNT": "1"}]
    jobs = [detect({**STEP, "UNISONO_KEY_FILE": key_file, **other}).job for other in others]
    assert len({launch.job, *jobs}) == 4


def test_srun_step_on_one_node_needs_no_key() -> None:
    launch = detect(fake_srun.variables(1, 3))
    assert str(launch.store).startswith("tcp://127.0.0.1:")
    assert launch.key is None


def test_srun_step_on_several_nodes_needs_a_key_or_a_file_store() -> None:
    with pytest.raises(UsageError, match=r"on 3 nodes, .* make a key, .* UNISONO_KEY_FILE .* UNISONO_STORE=file"):
        detect(STEP)
    assert detect({**STEP, "UNISONO_STORE": "file:///shared/folder"}).store == "file:///shared/folder"


def test_a_batch_script_is_no_task_of_a_step() -> None:
    script = {name: value for name, value in STEP.items() if name not in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")}
    assert detect(script).launcher == "none"


def test_launcher_that_started_the_rank_wins_over_an_outer_srun(key_file: str) -> None:
    key = {"UNISONO_KEY_FILE": key_file}
    by_hydra = {**STEP, **key, **mpirun(HYDRA, 7)}
    assert (detect(by_hydra).launcher, detect(by_hydra).rank) == (HYDRA.launcher, 7)
    serving_mpi = {**STEP, **key, "PMI_RANK": "3", "PMI_SIZE": "5"}
    assert (detect(serving_mpi).launcher, detect(serving_mpi).rank) == ("srun", 3)
    assert detect({**STEP, **key, **mpirun(OPEN_MPI)}).launcher == OPEN_MPI.launcher


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"SLURM_STEP_NODELIST": "node[1-"}, "SLURM_STEP_NODELIST='node[1-' cannot be used"),
        ({"SLURM_PROCID": "5"}, "SLURM_PROCID=5 cannot be used: it must be less than SLURM_STEP_NUM_TASKS=5"),
        ({"SLURM_JOB_ID": ""}, "is set but SLURM_JOB_ID is not"),
    ],
)
def test_inconsistent_srun_variable_is_refused_by_name(changes: dict[str, str], why: str, key_file: str) -> None:
    with pytest.raises(UsageError) as caught:
        detect({**STEP, "UNISONO_KEY_FILE": key_file, **changes})
    assert why in caught.value.message


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[009-011]-ib", ["n009-ib", "n010-ib", "n011-ib"]),
        ("a,b[1,3],c", ["a", "b1", "b3", "c"]),
        ("r[1-2]n[0-1]x", ["r1n0x", "r1n1x", "r2n0x", "r2n1x"]),
    ],
)
def test_slurm_node_list_expands_to_node_names(text: str, names: list[str]) -> None:
    assert node_names(text) == names


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "node", "rack-"]), st.integers(0, 90), st.integers(0, 9), st.integers(1, 4))
    )
)
def test_slurm_node_range_expands_to_every_number(parts: list[tuple[str, int, int, int]]) -> None:
    text = ",".join(f"{name}[{first:0{width}}-{first + more:0{width}}]" for name, first, more, width in parts)
    results = [
        f"{name}{number:0{len(f'{first:0{width}}')}}"
        for name, first, more, width in parts
        for number in range(first, first + more + 1)
    ]
    if parts:
        assert node_names(text) == results


@given(st.text(alphabet="ab01[]-,", max_size=12))
def test_node_list_parser_refuses_or_expands_any_text(text: str) -> None:
    try:
        names = node_names(text)
    except UsageError:
        return
    assert names
    assert not any(set(name) & set("[],") for name in names)


def test_tasks_of_a_fake_srun_form_a_job() -> None:
    program = (
        "import numpy as np, unisono as un\n"
        "with un.init() as world: total = int(world.allreduce(np.array(world.rank)))\n"
        # one write for each line, because all ranks write to one pipe
        "print(f'{world.rank} {world.size} {total}\\n', end='')"
    )
    command = [sys.executable, str(FAKE_SRUN), "-n", "3", sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            output, _ = process.communicate(timeout=DEADLINE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert sorted(output.split("\n")) == ["", "0 3 3", "1 3 3", "2 3 3"]


def test_every_task_reports_a_store_port_held_by_another_process() -> None:
    """The other process does not answer as a store does, and no rank may wait for it for long."""
    environ = {**fake_srun.variables(0, 2), "SLURM_JOB_ID": "4712"}
    port = int(str(detect(environ).store).rpartition(":")[2])
    program = (
        "import unisono as un\ntry: un.init()\nexcept un.UnisonoError as error: print(type(error).__name__, error)"
    )
    with socket.create_server(("127.0.0.1", port)) as squatter:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", program],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **environ, "SLURM_PROCID": str(rank), "UNISONO_RENDEZVOUS_TIMEOUT_S": "2"},
            )
            for rank in range(2)
        ]
        try:
            assert "RendezvousError the store cannot listen on" in ranks[0].communicate(timeout=DEADLINE_S)[0]
            squatter.accept()[0].close()
            assert "RendezvousError the store at" in ranks[1].communicate(timeout=DEADLINE_S)[0]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def test_port_of_an_srun_step_is_below_ephemeral_ports() -> None:
    ports = {int(LauncherStep(f"slurm {job}.0 0", ["a"]).store.rpartition(":")[2]) for job in range(1000)}
    assert min(ports) >= 15_000
    assert max(ports) < 30_000
    assert len(ports) > 900
