import contextlib
import os
import subprocess
import sys

import pytest
from support.deadlines import DEADLINE_S

from unisono.collectives.bootstrap.environment import agree_on_key, detect, launchers
from unisono.errors import RendezvousError, UsageError
from unisono.transports.rendezvous.file_store import FileStore

KEY = bytes(range(32))
JOB = "0123456789abcdef" * 2

UNISONO = {
    "UNISONO_RANK": "3",
    "UNISONO_SIZE": "8",
    "UNISONO_STORE": "tcp://127.0.0.1:29400",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "a run/1",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


ENV_VARIABLES = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    return path


def place(launch):
    return launch.rank, launch.size


def test_process_without_a_launcher_is_a_job_of_one():
    launch = detect({"HOME": "/"})
    assert place(launch) == (0, 1)
    assert (launch.store, launch.key, launch.launcher) == (None, None, "none")
    assert len(launch.job) == 16


def test_unisono_launcher_passes_rank_size_store_job_and_key():
    reading, writing = os.pipe()
    os.write(writing, KEY)
    os.close(writing)
    environ = {**UNISONO, "UNISONO_JOB": JOB, "UNISONO_KEY_FD": str(reading)}
    launch = detect(environ)
    assert place(launch) == (3, 8)
    assert (launch.store, launch.job.hex(), launch.key) == ("tcp://127.0.0.1:29400", JOB, KEY)
    assert launch.launcher == "unisono"
    assert launch.served_host is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)
    assert detect(environ) == launch


def test_ranks_that_share_a_pipe_each_take_one_key():
    reading, writing = os.pipe()
    os.write(writing, KEY * 2)
    os.close(writing)
    script = (
        "import os; from unisono.collectives.bootstrap.environment import detect; print(detect(os.environ).key.hex())"
    )
    environ = {**os.environ, **UNISONO, "UNISONO_KEY_FD": str(reading)}
    try:
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", script],
                check=True,
                env=environ,
                pass_fds=[reading],
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
            )
            assert done.stdout.strip() == KEY.hex()
    finally:
        os.close(reading)


def test_process_started_by_a_rank_cannot_be_that_rank():
    script = "import os; from unisono.collectives.bootstrap.environment import detect; detect(os.environ)"
    environ = {**os.environ, **UNISONO, "UNISONO_KEY_FD": "77"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert "UNISONO_KEY_FD=77 cannot be used" in done.stderr
    assert "a process that a rank starts cannot be that rank too" in done.stderr


def test_a_descriptor_that_is_not_a_pipe_is_not_read(key_file):
    with open(key_file, "rb") as file, pytest.raises(UsageError, match="not a pipe"):
        detect({**UNISONO, "UNISONO_JOB": "aa" * 16, "UNISONO_KEY_FD": str(file.fileno())})


def test_a_pipe_with_half_a_key_is_refused():
    reading, writing = os.pipe()
    os.write(writing, KEY[:16])
    os.close(writing)
    with pytest.raises(UsageError, match="must hold 32 bytes"):
        detect({**UNISONO, "UNISONO_JOB": "bb" * 16, "UNISONO_KEY_FD": str(reading)})


def test_key_is_read_from_a_private_file(key_file):
    launch = detect({**UNISONO, "UNISONO_KEY_FILE": str(key_file)})
    assert launch.key == KEY
    assert launch.launcher == "environment"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_file_that_others_can_read_is_refused(key_file, mode):
    key_file.chmod(mode)
    with pytest.raises(UsageError, match="chmod 600"):
        detect({**UNISONO, "UNISONO_KEY_FILE": str(key_file)})


def test_a_key_file_of_another_user_is_refused(key_file, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(UsageError, match="must belong to you"):
        detect({**UNISONO, "UNISONO_KEY_FILE": str(key_file)})


@pytest.mark.parametrize("content", [b"", KEY[:-1], KEY + b"\n"])
def test_a_key_file_of_another_length_is_refused(key_file, content):
    key_file.write_bytes(content)
    with pytest.raises(UsageError, match="must hold 32 bytes"):
        detect({**UNISONO, "UNISONO_KEY_FILE": str(key_file)})


def test_a_key_file_that_is_missing_or_a_link_is_refused(tmp_path, key_file):
    (tmp_path / "link").symlink_to(key_file)
    for name in ("link", "missing"):
        with pytest.raises(UsageError, match="UNISONO_KEY_FILE"):
            detect({**UNISONO, "UNISONO_KEY_FILE": str(tmp_path / name)})


def test_rank_0_serves_the_tcp_store_without_the_unisono_launcher():
    first = {**UNISONO, "UNISONO_RANK": "0"}
    assert detect(first).served_host == "127.0.0.1"
    assert detect(UNISONO).served_host is None
    assert detect({**first, "UNISONO_STORE": "file:///tmp/store"}).served_host is None


def test_job_id_is_derived_from_the_store_when_not_set():
    one, two = detect(UNISONO), detect({**UNISONO, "UNISONO_RANK": "4"})
    assert one.job == two.job
    assert one.job != detect({**UNISONO, "UNISONO_STORE": "tcp://127.0.0.1:29401"}).job


def test_variables_of_torchrun_give_rank_size_and_store():
    launch = detect(TORCHRUN)
    assert place(launch) == (3, 8)
    assert launch.store == "torch://node0:29500"
    assert (launch.launcher, launch.key) == ("torchrun", None)
    assert launch.served_host is None


def test_ranks_of_agents_that_restarted_differently_often_are_of_one_job():
    assert detect(TORCHRUN).job == detect({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3"}).job
    assert detect(TORCHRUN).job != detect({**TORCHRUN, "TORCHELASTIC_RUN_ID": "another run"}).job


def test_torchruns_ipv6_address_is_put_in_brackets():
    assert detect({**TORCHRUN, "MASTER_ADDR": "fe80::1"}).store == "torch://[fe80::1]:29500"


def test_four_env_variables_of_torch_suffice_to_join_a_job():
    first, last = detect({**ENV_VARIABLES, "RANK": "0"}), detect(ENV_VARIABLES)
    assert place(first), place(last) == ((0, 8), (3, 8))
    assert first.store == last.store == "tcp://node0:29500"
    assert (first.launcher, first.job, first.key) == ("env://", last.job, None)
    assert (first.served_host, last.served_host) == ("node0", None)


def test_rank_0_with_a_key_serves_the_store_on_all_addresses(key_file):
    with_key = {**ENV_VARIABLES, "UNISONO_KEY_FILE": str(key_file)}
    first, last = detect({**with_key, "RANK": "0", "MASTER_ADDR": "localhost"}), detect(with_key)
    assert (first.store, first.served_host, first.job) == ("tcp://localhost:29500", "", last.job)
    assert last.store == "tcp://node0:29500"


@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {**ENV_VARIABLES, "RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_world_size_of_one_makes_a_job_of_one(environ):
    launch = detect(environ)
    assert (place(launch), launch.store, launch.launcher) == ((0, 1), None, "env://")


MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2"}
SRUN = {
    **{"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
    "SLURM_STEP_NODELIST": "node0",
}
# The order in which Unisono looks at the launchers' variables.
LAUNCHERS = {
    "Unisono's variables": UNISONO,
    "torchrun": TORCHRUN,
    "env://": ENV_VARIABLES,
    "mpirun of Open MPI": MPIRUN,
    "srun": SRUN,
    "mpiexec of MPICH or Intel MPI": HYDRA,
}


def test_launchers_are_detected_and_listed_in_fixed_order():
    present = {name: value for variables in reversed(LAUNCHERS.values()) for name, value in variables.items()}
    names = list(LAUNCHERS)
    while names:
        assert launchers(present) == names
        for name in LAUNCHERS[names.pop(0)]:
            if not any(name in LAUNCHERS[other] for other in names):
                del present[name]


@pytest.mark.parametrize("alone", [{"WORLD_SIZE": "16"}, {"RANK": "5"}, {"WORLD_SIZE": "1"}, {"MASTER_ADDR": "node0"}])
@pytest.mark.parametrize("launcher", [MPIRUN, HYDRA, SRUN], ids=["mpirun", "Hydra", "srun"])
def test_incomplete_variables_of_torch_do_not_hide_another_launcher(launcher, alone):
    assert place(detect({**launcher, **alone})) == (1, 2)


@pytest.mark.parametrize("environ", [UNISONO, ENV_VARIABLES])
def test_a_missing_variable_is_named(environ):
    for name in environ:
        rest = {key: value for key, value in environ.items() if key != name}
        with pytest.raises(UsageError, match=rf"is set but {name} is not"):
            detect(rest)


@pytest.mark.parametrize("text", ["", "-1", "x", "1.5", "٣", "1e3", "9" * 30])
@pytest.mark.parametrize(
    ("environ", "name"), [(UNISONO, "UNISONO_RANK"), (UNISONO, "UNISONO_SIZE"), (TORCHRUN, "WORLD_SIZE")]
)
def test_variable_that_is_no_number_is_refused_by_name(environ, name, text):
    with pytest.raises(UsageError, match=name):
        detect({**environ, name: text})


@pytest.mark.parametrize(
    ("environ", "changes", "message"),
    [
        (UNISONO, {"UNISONO_RANK": "8"}, "UNISONO_RANK=8 cannot be used: it must be less than UNISONO_SIZE=8"),
        (UNISONO, {"UNISONO_SIZE": "0"}, "UNISONO_SIZE='0' cannot be used"),
        (UNISONO, {"UNISONO_JOB": "xyz"}, "UNISONO_JOB='xyz' cannot be used: it must be 32 hexadecimal digits"),
        (UNISONO, {"UNISONO_JOB": "00"}, "UNISONO_JOB='00' cannot be used"),
        (UNISONO, {"UNISONO_KEY_FD": "-1"}, "UNISONO_KEY_FD='-1' cannot be used"),
        (TORCHRUN, {"RANK": "8"}, "RANK=8 cannot be used: it must be less than WORLD_SIZE=8"),
        (TORCHRUN, {"MASTER_PORT": "65536"}, "MASTER_PORT='65536' cannot be used"),
    ],
)
def test_inconsistent_variable_is_refused_by_name(environ, changes, message):
    with pytest.raises(UsageError) as caught:
        detect({**environ, **changes})
    assert message in caught.value.message


def test_rank_0_creates_the_key_and_shares_it_through_the_store(tmp_path):
    with (
        contextlib.closing(FileStore(str(tmp_path / "store"))) as first,
        contextlib.closing(FileStore(str(tmp_path / "store"))) as second,
    ):
        key = agree_on_key(first, 0, 1.0)
        assert len(key) == 32
        assert agree_on_key(second, 1, 1.0) == key


def test_a_rank_that_waits_for_the_key_names_rank_0(tmp_path):
    with (
        contextlib.closing(FileStore(str(tmp_path / "store"))) as store,
        pytest.raises(RendezvousError, match=r"rank 0 did not arrive within 0\.05 s"),
    ):
        agree_on_key(store, 1, 0.05)


def test_a_key_of_another_length_in_the_store_is_refused(tmp_path):
    with contextlib.closing(FileStore(str(tmp_path / "store"))) as store:
        store.set("key", b"short")
        with pytest.raises(RendezvousError, match="5 bytes"):
            agree_on_key(store, 1, 1.0)
