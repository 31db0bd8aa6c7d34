"""Runs the command `unisono` as a user does, but with its own cache folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.deadlines import DEADLINE_S


def unisono(*arguments: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unisono", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **environ},
        check=False,
    )
