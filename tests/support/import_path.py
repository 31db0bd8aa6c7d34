"""The modules that processes of tests can import."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def import_path() -> str:
    """Return the PYTHONPATH with which another process can import all modules that this process can import."""
    return os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
