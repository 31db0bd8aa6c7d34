"""The command that adds an optional part to Unisono, which depends on where the installed package came from."""

from __future__ import annotations

import json
import shlex
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """Return the command that installs Unisono's extra `extra`, such as "mpi", into this environment.

    The package may come from a checkout, from a file, or from a package index; pip records which (PEP 610).
    """
    return command_for(_direct_url(), extra)


def command_for(record: str | None, extra: str) -> str:
    """Return the command for the text of a file ``direct_url.json``; None if the package has none.

    >>> command_for('{"url": "file:///home/me/unisono", "dir_info": {"editable": true}}', "mpi")
    "pip install -e '/home/me/unisono[mpi]'"
    >>> command_for('{"url": "file:///tmp/unisono-1.whl", "archive_info": {}}', "mpi")
    "pip install 'unisono[mpi] @ file:///tmp/unisono-1.whl'"
    >>> command_for(None, "mpi")
    "pip install 'unisono[mpi]'"
    """
    try:
        facts = json.loads(record or "{}")
        url, folder = facts.get("url", ""), facts.get("dir_info")
        if folder is not None and url.startswith("file://"):
            editable = "-e " if folder.get("editable") else ""
            place = f"{unquote(urlsplit(url).path)}[{extra}]"
            return f"pip install {editable}{shlex.quote(place)}"
        url = f"{facts['vcs_info']['vcs']}+{url}" if "vcs_info" in facts else url
    except (ValueError, AttributeError, KeyError, TypeError):  # a file that is damaged
        url = ""
    return f"pip install 'unisono[{extra}] @ {url}'" if url else f"pip install 'unisono[{extra}]'"


def _direct_url() -> str | None:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return distribution("unisono").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
