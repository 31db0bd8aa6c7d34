"""The backend with versions of torch that differ: too old, with other names, or not the same on all ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S

pytest.importorskip("torch.distributed", reason="make torch installs what these tests need")

from support.torch_ranks import lines_of, run

CALL = """
import torch
import torch.distributed as dist

dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
print(type(dist.group.WORLD).__name__, tensor.tolist())
dist.destroy_process_group()
"""


def output_of(program: str) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torch_that_is_too_old_is_refused_and_can_still_be_imported() -> None:
    program = """
import torch
torch.__version__ = torch.torch_version.TorchVersion("2.1.2")
from unisono.frameworks.torch.registration import autoload, register
autoload()
try:
    import unisono.torch
except ImportError as error:
    print(error)
"""
    text = output_of(program)
    assert text.startswith("unisono needs torch 2.")
    assert text.endswith(" or newer, and this is torch 2.1.2")


@pytest.mark.parametrize("name", ["BackendBase", "_Backend"])
def test_backend_base_of_torch_is_used_under_either_name(name: str) -> None:
    renamed = f"""
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as base
for other in ("BackendBase", "_Backend"):
    vars(dist).pop(other, None)
dist.{name} = base
"""
    kind, total = output_of(renamed + CALL).split(maxsplit=1)
    assert total == "[1.0, 1.0]"
    assert kind == ("DirectGroup" if "DirectGroup" in output_of(CALL) else "ProcessGroup")


def test_process_group_is_used_when_torch_has_no_backend_base() -> None:
    removed = (
        "import torch.distributed as dist; vars(dist).pop('BackendBase', None); vars(dist).pop('_Backend', None)\n"
    )
    assert output_of(removed + CALL) == "ProcessGroup [1.0, 1.0]"


def test_backend_can_be_registered_twice() -> None:
    assert output_of(f"import unisono.torch; unisono.torch.register(); unisono.torch.register()\n{CALL}")


def test_another_backend_of_the_same_name_is_named() -> None:
    program = """
import torch.distributed as dist
def theirs(*facts): raise NotImplementedError
theirs.__module__ = "their.package"
dist.Backend._plugins.pop("UNISONO", None)
if hasattr(dist.Backend, "UNISONO"):
    del dist.Backend.UNISONO
dist.Backend.register_backend("unisono", theirs, devices=["cpu"])
try:
    import unisono.torch
except ImportError as error:
    print(error)
"""
    assert output_of(program).startswith("the module their.package has registered another backend of torch")


def test_ranks_with_different_versions_of_torch_get_an_error_that_names_them(tmp_path: Path) -> None:
    for lines in lines_of(run("versions", 3, tmp_path)):
        assert lines[0].startswith("DistBackendError unisono: ")
        assert "rank 0 has torch 2.99.1" in lines[0]
        assert "rank 1 has torch 2.98.0" in lines[0]
