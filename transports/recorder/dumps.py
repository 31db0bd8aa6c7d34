"""Dumps: the content of the flight recorder of one rank at one moment, as a JSON file.

docs/file-formats.md has the format.

A process that is killed while it writes, or a full disk, never leaves half a dump (host/whole_file.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from unisono.foundation.json_checks import checked, open_regular, parsed_json, text_of_file
from unisono.foundation.records import record
from unisono.transports.host.whole_file import whole_file
from unisono.transports.recorder.clocks import measured
from unisono.transports.recorder.memory import STATES, ChannelTraffic, RecordedCall, Snapshot, check_place, job_name

FORMAT = "unisono-dump"
VERSION = 1
# The fields before the calls, one a line, fit into this: the longest is the program's command line.
_MOST_OF_HEAD = 1 << 14
_FIELDS_OF_HEAD = ("format", "version", "job", "epoch", "written_s")
_SECONDS = (float, int)
_SHAPE_OF_CALL = {
    **dict.fromkeys(("number", "sequence", "nbytes", "called_ns", "begun_ns", "moved_ns", "ended_ns"), int),
    **dict.fromkeys(("communicator", "digest", "call", "site", "state"), str),
    **dict.fromkeys(("peer", "waits_for"), (int, NoneType)),
    "is_message": bool,
    "facts": dict,
}
_SHAPE_OF_CHANNEL = {
    **dict.fromkeys(
        ("slot", "peer", "sent_messages", "sent_nbytes", "received_messages", "received_nbytes", "waited_ns"), int
    ),
    "transport": str,
}
_SHAPE = {
    **dict.fromkeys(("rank", "size", "pid", "written_ns", "calls_made"), int),
    "reason": str,
    "written_s": _SECONDS,
    "error": (dict, NoneType),
    "stack": dict,
    "traffic": [_SHAPE_OF_CHANNEL],
    "communicators": [{"id": str, "ranks": [int]}],
    "calls": [_SHAPE_OF_CALL],
}
_SHAPE_OF_ERROR = {"type": str, "text": str, "peer": (int, NoneType), "sequence": (int, NoneType)}
_HEAD = re.compile(rf'^ "({"|".join(_FIELDS_OF_HEAD)})": (.*?),?$', re.MULTILINE)


@record
class Dump:
    """The content of a dump.

    Attributes:
        snapshot: the rank and its calls.
        reason: why it was written: "error", "SIGUSR1" or "request".
        written_ns: when, by the host's CLOCK_MONOTONIC, in nanoseconds, as the times of calls.
        written_s: when, in seconds since 1970.
        error: of an error, its "type", "text", "peer" and "sequence"; or None.
        stack: where the threads of the rank were in the program, outermost first, by their names.
        path: the file that the dump was read from; empty if it was not.
    """

    snapshot: Snapshot
    reason: str
    written_ns: int
    written_s: float
    error: Mapping[str, Any] | None
    stack: Mapping[str, list[str]]
    path: str = ""


def file_name(job: str, rank: int, size: int) -> str:
    """Return the name of the dump of a rank, in which all ranks have equally many digits.

    >>> file_name("1a2b3c4d-0", 3, 128)
    'unisono-1a2b3c4d-0-rank-003.json'
    """
    return f"unisono-{job}-rank-{rank:0{len(str(size - 1))}d}.json"


def write(dump: Dump, directory: str | os.PathLike[str], job: str) -> Path:
    """Write a dump to a directory, which is made if it is missing, and return its path. An older dump is replaced.

    `job` distinguishes the dumps of several jobs in one directory.

    Raises:
        OSError: the directory cannot be written, or the disk is full. Nothing stays in the directory.
    """
    path = Path(directory) / file_name(job, dump.snapshot.rank, dump.snapshot.size)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        json.dump(_encoded(dump), file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    return path


class Head(NamedTuple):
    """The job of a dump, and when it was written, in seconds since 1970."""

    job: str
    written_s: float


def read_head(path: str | os.PathLike[str]) -> Head:
    """Return the job and the time of the dump in a file. This is much faster than `read`, which decodes all calls.

    Raises:
        ValueError, OSError: as `read`. A file that is not whole may have a head.
    """
    with open_regular(path) as file:
        values = dict(_HEAD.findall(file.read(_MOST_OF_HEAD).decode(errors="replace")))
    with contextlib.suppress(KeyError, ValueError):
        name, version, job, epoch, written_s = (parsed_json(values[field]) for field in _FIELDS_OF_HEAD)
        if (name, version) == (FORMAT, VERSION):
            return Head(job_name({"job": job, "epoch": epoch}), checked(written_s, _SECONDS))
    dump = read(path)
    return Head(dump.snapshot.job, dump.written_s)


def read(path: str | os.PathLike[str]) -> Dump:
    """Return the dump in a file.

    Raises:
        ValueError: the file holds no dump, only a part of one, or one of a newer version. The text says which.
        OSError: the file cannot be read.
    """
    return parsed(text_of_file(path), str(path))


def parsed(text: str, path: str) -> Dump:
    """Return the dump in the text of a file; raises ValueError as `read` does."""
    try:
        values = parsed_json(text)
    except ValueError:
        raise ValueError(f"{path} is no JSON file, or only a part of one") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"{path} is no dump of Unisono")
    if values.get("version") != VERSION:
        raise ValueError(f"{path} has version {values.get('version')} of the format; this Unisono reads {VERSION}")
    try:
        return _decoded(checked(values, _SHAPE), path)
    except ValueError as error:
        raise ValueError(f"{path} is not a whole dump: {error}") from None


def _encoded(dump: Dump) -> dict[str, Any]:
    snapshot = dump.snapshot
    return {
        "format": FORMAT,
        "version": VERSION,
        "rank": snapshot.rank,
        "size": snapshot.size,
        "pid": snapshot.pid,
        **snapshot.about,
        "reason": dump.reason,
        "written_ns": dump.written_ns,
        "written_s": dump.written_s,
        "error": dump.error,
        "stack": dump.stack,
        "traffic": [asdict(channel) for channel in snapshot.traffic],
        "communicators": [{"id": f"{name:016x}", "ranks": ranks} for name, ranks in snapshot.communicators.items()],
        "calls_made": snapshot.made,
        "calls": [_encoded_call(call) for call in snapshot.calls],
    }


def _encoded_call(call: RecordedCall) -> dict[str, Any]:
    values = asdict(call)
    return {
        **{name: value for name, value in values.items() if name not in ("communicator", "digest", "text", "facts")},
        "call": call.text,
        "communicator": f"{call.communicator:016x}",
        "digest": f"{call.digest:016x}",
        "facts": dict(call.facts),
    }


def _decoded(values: dict[str, Any], path: str) -> Dump:
    own = {"format", "version", "rank", "size", "pid", "reason", "written_ns", "written_s", "error", "stack"}
    own |= {"traffic", "communicators", "calls_made", "calls"}
    if values["error"] is not None:
        checked(values["error"], _SHAPE_OF_ERROR, "error")
    for name, frames in values["stack"].items():
        checked(frames, [str], f"the stack of {name}")
    snapshot = Snapshot(
        values["rank"],
        values["size"],
        values["pid"],
        {name: value for name, value in values.items() if name not in own},
        {int(each["id"], 16): tuple(each["ranks"]) for each in values["communicators"]},
        tuple(ChannelTraffic(**_only(_SHAPE_OF_CHANNEL, channel)) for channel in values["traffic"]),
        values["calls_made"],
        tuple(_decoded_call(call) for call in values["calls"]),
    )
    check_place(snapshot.rank, snapshot.size)
    measured(snapshot.about)
    return Dump(
        snapshot,
        values["reason"],
        values["written_ns"],
        float(values["written_s"]),
        values["error"],
        values["stack"],
        path,
    )


def _decoded_call(values: dict[str, Any]) -> RecordedCall:
    rest = _only(_SHAPE_OF_CALL.keys() - {"call", "communicator", "digest"}, values)
    if values["state"] not in STATES.values():
        raise ValueError(f"the state of a call cannot be {values['state']!r}")
    return RecordedCall(
        text=values["call"],
        communicator=int(values["communicator"], 16),
        digest=int(values["digest"], 16),
        **rest,
    )


def _only(names: Collection[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with these names; others, of a later version, are dropped."""
    return {name: value for name, value in values.items() if name in names}
