"""The command that installs an extra suits the place that the installed package came from."""

from __future__ import annotations

import json

import pytest

from unisono.foundation.installing import command_for, install_command


@pytest.mark.parametrize(
    ("record", "command"),
    [
        (None, "pip install 'unisono[mpi]'"),
        ("no JSON", "pip install 'unisono[mpi]'"),
        ("[]", "pip install 'unisono[mpi]'"),
        (
            {"url": "file:///home/me/un%20isono", "dir_info": {"editable": True}},
            "pip install -e '/home/me/un isono[mpi]'",
        ),
        ({"url": "file:///home/me/unisono", "dir_info": {}}, "pip install '/home/me/unisono[mpi]'"),
        ({"url": "file:///tmp/u-1.whl", "archive_info": {}}, "pip install 'unisono[mpi] @ file:///tmp/u-1.whl'"),
        (
            {"url": "https://a.b/u.git", "vcs_info": {"vcs": "git", "commit_id": "0123"}},
            "pip install 'unisono[mpi] @ git+https://a.b/u.git'",
        ),
    ],
)
def test_install_command_names_the_origin_of_the_package(record: object, command: str) -> None:
    text = json.dumps(record) if isinstance(record, dict) else record
    assert command_for(text, "mpi") == command  # type: ignore[arg-type]


def test_install_command_of_this_package_names_an_extra() -> None:
    assert install_command("mpi").startswith("pip install ")
    assert "[mpi]" in install_command("mpi")
