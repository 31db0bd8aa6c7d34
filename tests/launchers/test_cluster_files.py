"""The batch scripts and the manifest in examples/clusters: their syntax, and the jobs that they describe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]
from support.deadlines import DEADLINE_S

from unisono.collectives.bootstrap.environment import detect
from unisono.options import unknown_variables

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
FAKE_SRUN = Path(__file__).parents[1] / "support" / "fake_srun.py"
DOCUMENTS = list(yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text()))
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
def test_manifest_obeys_the_schema_of_kubernetes(version: str) -> None:
    for document in DOCUMENTS:
        kubernetes_validate.validate(document, version, strict=True)


def environment_of(index: int, key: Path) -> dict[str, str]:
    """Return the variables of the pod with this index, as Kubernetes sets them."""
    pod = DOCUMENTS[1]["spec"]["template"]["spec"]
    fields = {INDEX: str(index), "status.podIP": f"10.0.0.{index}"}
    (container,) = pod["containers"]

    def value(variable: dict[str, Any]) -> str:
        return str(variable.get("value") or fields[variable["valueFrom"]["fieldRef"]["fieldPath"]])

    return {entry["name"]: value(entry) for entry in container["env"]} | {"UNISONO_KEY_FILE": str(key)}


def test_pods_of_the_manifest_are_the_ranks_of_one_job(tmp_path: Path) -> None:
    service, job = DOCUMENTS
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_bytes(bytes(32))
    launches = [detect(environment_of(index, key)) for index in range(job["spec"]["completions"])]
    assert [launch.rank for launch in launches] == list(range(job["spec"]["parallelism"]))
    assert {launch.size for launch in launches} == {len(launches)}
    assert len({(launch.job, launch.key, launch.store) for launch in launches}) == 1
    assert list(unknown_variables(environment_of(0, key))) == []
    # Rank 0 serves the store at the name that the service gives to the first pod.
    name, subdomain = job["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]
    assert launches[0].store == f"tcp://{name}-0.{subdomain}:29400"
    assert launches[0].served_host == ""
    assert (service["metadata"]["name"], service["spec"]["selector"]) == (subdomain, {"job-name": name})


def test_script_of_srun_runs_a_job_and_removes_its_key(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys, unisono as un\n"
        "assert os.path.exists(os.environ['UNISONO_KEY_FILE'])\n"
        "with un.init(un.Options(bind_address='127.0.0.1')) as world:\n"
        "    print(f'{world.rank} {world.size}\\n', end='')\n"
    )
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/sh\nshift 2\nshift\nexec {sys.executable} {FAKE_SRUN} -n 2 {sys.executable} "$@"\n')
    srun.chmod(0o700)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}
    completed = subprocess.run(
        ["bash", CLUSTERS / "srun.sbatch"],
        cwd=tmp_path,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (completed.returncode, sorted(completed.stdout.splitlines())) == (0, ["0 2", "1 2"]), completed.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["srun", "train.py"]


@pytest.mark.parametrize("script", sorted(CLUSTERS.glob("*.sbatch")), ids=lambda path: path.name)
def test_batch_scripts_are_valid_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
