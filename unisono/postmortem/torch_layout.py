"""The dumps of a job in the layout of torch's flight recorder, which torch's analyser reads (torchfrtrace).

The layout is a pickle for each rank, of plain values. The analyser compares the ranks of a *process group* call by
call, in the order of the sequence numbers. It was made for NCCL, so not all calls fit:

- It refuses backends that it does not know. The calls carry the name of Gloo, torch's backend for CPUs.
- It expects every rank of a group in every entry, so messages between two ranks are omitted, and so are collectives
  that torch does not have.
- Its buffers begin at the same call on all ranks. Recorders that have dropped calls begin at different ones, so the
  calls that another rank has dropped are omitted.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.errors import UsageError
from unisono.foundation.json_checks import checked
from unisono.postmortem.culprits import WORLD, members
from unisono.postmortem.loading import JobDumps
from unisono.transports.host.whole_file import whole_file
from unisono.transports.recorder.dumps import Dump
from unisono.transports.recorder.memory import RecordedCall

# The version that torch 2.13 and 2.14 write.
_VERSION = "2.10"
_BACKEND = "gloo"
_NAMES = {
    "allreduce": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}
# Their sizes differ from rank to rank, which the analyser would take for errors. So the files do not have them.
_NAMES_WITHOUT_SIZES = {
    "allgatherv": "all_gather_v",
    "reduce_scatterv": "reduce_scatter_v",
    "alltoallv": "all_to_all_v_single",
    "gatherv": "gather",
    "scatterv": "scatter",
}
_MOST_DIGITS = 18
_STATES = {"running": "started", "failed": "started", "done": "completed"}


def write(dumps: JobDumps, directory: Path) -> list[Path]:
    """Write the dumps of a job in torch's layout, one file a rank, and return the paths.

    Args:
        dumps: the dumps.
        directory: is made if it is missing. It must be empty, because the analyser reads every file in it.

    Raises:
        UsageError: the directory has files, or cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(
                f"{str(directory)!r} is not empty, and torch's analyser reads every file of a directory: name a new one"
            )
        return [_write(directory / f"rank_{rank}", _content(dumps, rank, dump)) for rank, dump in dumps.by_rank.items()]
    except OSError as error:
        raise UsageError(f"{str(directory)!r} cannot be written: {error.strerror}") from None


def _write(path: Path, content: Mapping[str, Any]) -> Path:
    with whole_file(path, "wb") as file:
        pickle.dump(content, file)
    return path


def _content(dumps: JobDumps, rank: int, dump: Dump) -> Mapping[str, Any]:
    groups = [WORLD, *(name for name, ranks in dump.snapshot.communicators.items() if rank in ranks)]
    return {
        "version": _VERSION,
        "pg_config": {_group(name)[0]: _config(dumps, name) for name in groups},
        "pg_status": {},
        "entries": [_entry(index, call, dump) for index, call in enumerate(_comparable(dumps, dump))],
    }


def _group(communicator: int) -> tuple[str, str]:
    """Return the name and the description of a communicator, as process group."""
    return ("0", "default_pg") if communicator == WORLD else (f"{communicator:016x}", "undefined")


def _config(dumps: JobDumps, communicator: int) -> Mapping[str, str]:
    name, description = _group(communicator)
    return {"name": name, "desc": description, "ranks": str(list(members(dumps, communicator)))}


def _comparable(dumps: JobDumps, dump: Dump) -> Iterator[RecordedCall]:
    """Yield the collectives of a rank that the analyser can compare with those of the other ranks."""
    first: dict[int, int] = {}  # by communicator, the number from which on all ranks have recorded their calls
    for each in dumps.by_rank.values():
        kept = dict[int, int]()
        for call in each.snapshot.calls:
            if not call.is_message:
                kept.setdefault(call.communicator, call.sequence)
        for communicator, sequence in kept.items():
            first[communicator] = max(sequence, first.get(communicator, 0))
    for call in dump.snapshot.calls:
        if _name(call) is not None and call.sequence >= first[call.communicator]:
            yield call


def _name(call: RecordedCall) -> str | None:
    """Return torch's name of a collective; None of a message, and if torch has no such collective."""
    collective = "" if call.is_message else str(call.facts.get("collective"))
    return _NAMES.get(collective) or _NAMES_WITHOUT_SIZES.get(collective)


def _entry(index: int, call: RecordedCall, dump: Dump) -> Mapping[str, Any]:
    def since_1970_ns(ns: int) -> int | None:
        return int(dump.written_s * 1e9) + ns - dump.written_ns if ns else None

    name, sizes = _name(call), _sizes(call)
    dtypes = [dtype] if isinstance(dtype := call.facts.get("dtype"), str) and dtype else []
    file, _, line = call.site.rpartition(":")
    return {
        "record_id": index,
        "pg_id": call.communicator,
        "process_group": _group(call.communicator),
        "collective_seq_id": call.sequence,
        "p2p_seq_id": 0,
        "op_id": call.sequence,
        "is_p2p": False,
        "profiling_name": f"{_BACKEND}:{name}",
        "input_sizes": [sizes[0]],
        "output_sizes": [sizes[1]],
        "input_dtypes": dtypes,
        "output_dtypes": dtypes,
        "state": _STATES[call.state],
        "retired": call.state != "running",
        "time_created_ns": since_1970_ns(call.called_ns),
        "time_discovered_started_ns": since_1970_ns(call.begun_ns),
        "time_discovered_completed_ns": since_1970_ns(call.ended_ns),
        "frames": [{"name": call.text, "filename": file or "?", "line": _line(line)}],
    }


def _line(text: str) -> int:
    """Return the number of a line; 0 if a text is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else 0


def _sizes(call: RecordedCall) -> tuple[list[int], list[int]]:
    """Return the shapes of the input and of the output as lists of their elements; empty where they may differ.

    They are empty too if the dump has no two numbers there, because anybody may have written it.
    """
    if call.facts["collective"] not in _NAMES or not call.facts.get("dtype"):
        return [], []
    try:
        inputs, outputs = checked(call.facts.get("elements"), [int])
    except ValueError:
        return [], []
    return [inputs], [outputs]
