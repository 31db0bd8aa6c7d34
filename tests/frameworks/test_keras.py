"""Data-parallel training by Keras on each of its backends. Each test starts its ranks once."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S
from support.keras_swarm import AGAIN, PROGRAM as PROGRAM_OF_SWARM
from support.ports import free_port
from support.swarms import SwarmProcesses

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("keras") is None, reason="make keras and make tensorflow install it and run these tests"
)
PROGRAM = Path(__file__).parents[1] / "support" / "keras_program.py"
# Ranks are forked from a process that has imported Keras, because the import takes longer than the rest of the test.
START = f"""
import os, runpy, sys
import unisono.keras

pids = []
for rank in range(2):
    pids.append(os.fork())
    if pids[-1] == 0:
        os.environ["RANK"] = str(rank)
        runpy.run_path({str(PROGRAM)!r}, run_name="__main__")
        sys.exit()
sys.exit(any([os.waitpid(pid, 0)[1] for pid in pids]))
"""
# Keras imports TensorFlow on each backend if it is installed. So that environment is for that backend only.
HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None


@pytest.mark.parametrize("interface", ["unisono", "horovod"])
@pytest.mark.parametrize("backend", ["tensorflow"] if HAS_TENSORFLOW else ["torch", "jax"])
def test_training_by_keras_equals_that_of_one_process(backend: str, interface: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed: make keras installs it")
    environ = {
        **{"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        **{"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
    }
    command = [sys.executable, "-W", "ignore:os.fork:RuntimeWarning", "-c", START, str(tmp_path), interface]
    completed = subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stdout.splitlines() == ["all was checked"] * 2


@pytest.mark.parametrize("backend", ["tensorflow"] if HAS_TENSORFLOW else ["torch", "jax"])
def test_ranks_that_train_alone_by_keras_end_with_equal_weights(backend: str) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed: make keras installs it")
    environ = {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    completed = subprocess.run(
        [sys.executable, str(PROGRAM.with_name("keras_outer.py"))],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "all was checked" in completed.stdout


@pytest.mark.parametrize("backend", ["tensorflow"] if HAS_TENSORFLOW else ["torch", "jax"])
def test_members_of_a_swarm_share_models_and_optimizers_of_keras_and_train_by_fit(tmp_path: Path, backend: str) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed: make keras installs it")
    environ = {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with SwarmProcesses(tmp_path) as swarm:
        swarm.start("a", PROGRAM_OF_SWARM, environ)
        swarm.await_marks("a has it")
        swarm.start("b", PROGRAM_OF_SWARM, environ)
        one, other = swarm.output("a"), swarm.output("b")
    assert "call optimizer.build(model.trainable_variables) before the call of state" in other
    assert re.findall("^(?:state|trained) .*$", one, re.MULTILINE) == re.findall(
        "^(?:state|trained) .*$", other, re.MULTILINE
    )


@pytest.mark.parametrize("backend", ["tensorflow"] if HAS_TENSORFLOW else ["torch", "jax"])
def test_models_of_keras_that_are_left_behind_train_on_with_the_others(tmp_path: Path, backend: str) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed: make keras installs it")
    environ = {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with SwarmProcesses(tmp_path) as swarm:
        for name in "abc":
            swarm.start(name, AGAIN, environ)
        swarm.await_marks("a with a,b,c 1", "c with a,b,c 1")
        entries = swarm.left_behind("c", "ab")
        swarm.await_marks(f"c with a,b,c {entries + 1}")
        swarm.mark("stop")
        # TensorFlow logs to the standard error, too.
        trained = [re.findall("^trained .*$", swarm.output(name), re.MULTILINE) for name in "abc"]
    assert len(trained[0]) == 1
    assert trained == [trained[0]] * 3
