"""`Settings`: the arguments of a swarm, checked."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping
from typing import Any

from unisono.collectives.bootstrap.environment import job_of_key
from unisono.errors import UsageError
from unisono.foundation.deadlines import checked_timeout_s
from unisono.foundation.records import record
from unisono.options import Options
from unisono.swarm.meeting_place import checked_key
from unisono.swarm.views import MOST_NAME


@record
class Settings:
    """The arguments of a swarm that do not change.

    Attributes:
        name: the name of this process for people.
        key, job: the key and the id of the job.
        options: the options of the communicators, with all defaults.
        min_size: the least number of members; None for a majority of the view before.
        quorum_timeout_s: how long a call waits for a quorum.
        patience_s: how long a call waits for a member that has not begun it; None for ever.
    """

    name: str
    key: bytes
    job: bytes
    options: Options
    min_size: int | None
    quorum_timeout_s: float
    patience_s: float | None

    @property
    def heartbeat_s(self) -> float:
        """The heartbeat timeout."""
        return self.options.heartbeat_timeout_s


def settings_of(
    key: bytes | None,
    name: str | None,
    min_size: int | None,
    quorum_timeout_s: float | None,
    patience_s: float | None,
    options: Options | None,
    fields: Mapping[str, Any],
) -> Settings:
    """Return the settings of the arguments of `Swarm`; `fields` are fields of its options.

    Raises:
        UsageError: an argument cannot be used, or there is no key.
    """
    if fields:
        options = Options(**fields) if options is None else dataclasses.replace(options, **fields)
    options = _with_tls((options or Options()).resolved(os.environ))
    key = checked_key(key)
    return Settings(
        _checked_name(name),
        key,
        job_of_key(key),
        options,
        _checked_size(min_size),
        2 * options.heartbeat_timeout_s
        if quorum_timeout_s is None
        else checked_timeout_s(quorum_timeout_s, name="quorum_timeout_s"),
        None if patience_s is None else checked_timeout_s(patience_s, name="patience_s"),
    )


def _with_tls(options: Options) -> Options:
    """Return the options with TLS, unless the program or the environment has set it."""
    is_set = "tls" in options.passed or "UNISONO_TLS" in os.environ
    return options if is_set else options.adopting({"tls": "on"})


def _checked_name(name: str | None) -> str:
    if name is None:
        return f"{socket.gethostname()[: MOST_NAME - 12]}:{os.getpid()}"
    if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME or not name.isprintable():
        raise UsageError(f"name must be a printable text of 1 to {MOST_NAME} characters; got {name!r}")
    return name


def _checked_size(size: int | None) -> int | None:
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise UsageError(f"min_size must be a positive number of members; got {size!r}")
    return size
