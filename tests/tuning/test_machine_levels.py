from __future__ import annotations

import os
from pathlib import Path

import pytest

from unisono.algorithms.composition.host_levels import levels_of
from unisono.errors import UsageError
from unisono.tuning.machine.fingerprint import _gpus
from unisono.tuning.machine.levels import names, numbers, processors, switches


def machine(root: Path) -> Path:
    """Write Linux's files for 2 sockets with 2 caches of 2 cores of 2 threads each. One of 16 threads is offline."""
    files = {"cpu/online": "0-14"}
    for cpu in range(15):
        socket, cache, core = cpu // 8 * 8, cpu // 4 * 4, cpu // 2 * 2
        files[f"cpu/cpu{cpu}/topology/package_cpus_list"] = f"{socket}-{socket + 7}"
        files[f"cpu/cpu{cpu}/cache/index3/shared_cpu_list"] = f"{cache}-{cache + 3}"
        files[f"cpu/cpu{cpu}/cache/index2/shared_cpu_list"] = f"{core}-{core + 1}"
        files[f"cpu/cpu{cpu}/topology/thread_siblings_list"] = f"{core},{core + 1}"
    files |= {"node/node0/cpulist": "0-7\n", "node/node1/cpulist": "8-15\n"}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_machine_levels_are_read_without_duplicates(tmp_path: Path) -> None:
    result = processors(machine(tmp_path))
    assert list(result.levels) == ["socket", "l3"]  # one processor of a core is offline, so the cores differ in size
    assert [sorted(group) for group in result.levels["socket"]] == [list(range(8)), list(range(8, 15))]
    assert (result.shared(0, 3), result.shared(0, 4), result.shared(0, 8)) == ("l3", "socket", "host")


def test_machine_without_topology_files_has_no_levels(tmp_path: Path) -> None:
    result = processors()
    online = set(range(os.cpu_count() or 1))
    assert all(set().union(*sets) <= set(range(4096)) for sets in result.levels.values())
    assert all(result.shared(cpu, cpu) for cpu in online)
    assert processors(tmp_path).levels == {}


def test_number_lists_and_name_lists_are_expanded() -> None:
    assert numbers("0-3,7\n") == (0, 1, 2, 3, 7)
    assert names("n[01-03]x[1,2],m") == ["n01x1", "n01x2", "n02x1", "n02x2", "n03x1", "n03x2", "m"]


def slurm(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_switches_of_slurm_are_levels_of_hosts(tmp_path: Path) -> None:
    file = slurm(
        tmp_path / "topology.conf",
        "# two leaves\nSwitchName=leaf0 Nodes=n[0-3] LinkSpeed=1\nswitchname=leaf1 nodes=n[4-7]\n"
        "SwitchName=top Switches=leaf[0-1]\n",
    )
    result = switches(file, ["n0", "n0", "n5", "n4", "n1"])
    assert result == (((0, 1), (4,)), ((3,), (2,)))
    assert len(levels_of(result, 5).sizes) == 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("SwitchName=a Nodes=n[0-1]\nNodes=n2\n", "line 2: expected SwitchName="),
        ("SwitchName=a\n", "line 1: expected SwitchName="),
        ("SwitchName=a Nodes=m0\n", "names no switch of the host 'n0'"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a,n0\n", "has no switch that is below no other"),
        ("SwitchName=t Switches=a\nSwitchName=a Switches=b,n0\nSwitchName=b Switches=a\n", "'a' is below itself"),
        ("SwitchName=a Nodes=n[x]\n", "'x' is not a list of numbers"),
    ],
)
def test_invalid_slurm_topology_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        switches(slurm(tmp_path / "topology.conf", text), ["n0"])


def test_missing_slurm_topology_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"topology\.conf cannot be read"):
        switches(tmp_path / "topology.conf", ["n0"])


def test_machine_fingerprint_reads_gpu_models(tmp_path: Path) -> None:
    for bus, model in (("0000:17:00.0", "NVIDIA H200"), ("0000:18:00.0", "NVIDIA A2")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 16\n")
    (tmp_path / "half").mkdir()
    assert _gpus(tmp_path) == ["NVIDIA A2", "NVIDIA H200"]
    assert _gpus(tmp_path / "none") == []
