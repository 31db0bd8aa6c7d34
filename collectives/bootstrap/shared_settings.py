"""What rank 0 knows for choosing algorithms, and all ranks adopt: the table, the calibration, and its options.

It travels with the roster, as text, so it costs no message of its own; and all ranks choose by the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from unisono import log
from unisono.algorithms.catalogue.variants import is_rules
from unisono.errors import UsageError
from unisono.options import CUDA_IPC, Options
from unisono.transports.links.preference import resolved
from unisono.tuning.decide.choice import TunerState
from unisono.tuning.machine.parameters import from_json, priors, to_json as parameters_to_json

_log = log.get(log.NAME)

# The options of rank 0 that all ranks adopt: they must choose the same algorithms, and treat links alike.
SHARED_OPTIONS = ("transports", "algorithm", "segment_nbytes", "tcp_streams", "tcp_checksum")
_MOST_NBYTES = 512 << 10


def offered(options: Options, rank: int) -> dict[str, Any]:
    """Return what this rank would have all ranks use: its options, what its machine is, its table and calibration.

    Only rank 0's are looked at. What is wrong with them is an item of its own, for all ranks to raise.
    """
    found = _own(options) | {
        "table": "",
        "table_name": options.table,
        "table_hash": "",
        "parameters": "",
        "machine": "",
        "maker": "",
        "refusal": "",
    }
    if rank > 0:
        return found
    try:
        found["table"], found["table_hash"] = _text_of_table(options.table), _hash_of(options.table)
        found |= _of_this_machine(has_table=bool(options.table))
        if options.table and not _is_of(found["table"], found["machine"]):
            _log.warning("the table %s is of another machine: `unisono tune` makes one of this", options.table)
    except UsageError as error:
        found["refusal"] = str(error)
    return found


def adopted(settings: Mapping[str, Any]) -> TunerState:
    """Return what rank 0's settings tell the tuner.

    Raises:
        UsageError: they cannot be used, on all ranks alike.
    """
    if settings["refusal"]:
        raise UsageError(settings["refusal"])
    if is_rules(settings["algorithm"]):
        from unisono.tuning.decide.forced_rules import rules

        rules(settings["algorithm"])
    usual = priors(settings["maker"])
    if not settings["machine"]:
        return TunerState(parameters=usual)
    table = None
    if settings["table"]:
        from unisono.tuning.decide.table import from_text

        table = from_text(settings["table"], settings["table_name"])
    parameters = from_json(json.loads(settings["parameters"])) if settings["parameters"] else usual
    return TunerState(table, parameters, settings["machine"])


def report_differences(options: Options, settings: Mapping[str, Any]) -> None:
    """Tell which options of this rank give way to others of rank 0; tables differ if their contents do."""
    theirs = [(name, value, settings[name]) for name, value in _own(options).items()]
    if options.table != settings["table_name"]:
        theirs.append(("table", options.table, settings["table_name"]))
    elif options.table and _hash_of(options.table) != settings["table_hash"]:
        theirs.append(("table", f"what is in {options.table} here", "what is there on rank 0"))
    for name, own, of_rank_0 in theirs:
        if own != of_rank_0:
            _log.warning("the option %s is %r on this rank, and gives way to rank 0's %r", name, own, of_rank_0)


def _own(options: Options) -> dict[str, Any]:
    """Return the options that are shared, as they travel."""
    found = {name: getattr(options, name) for name in SHARED_OPTIONS}
    names = (*resolved(options.preference), *([CUDA_IPC] if options.allows_cuda_ipc else []))
    return {**found, "transports": ",".join(names)}


def _hash_of(path: str) -> str:
    """Return a hash of what is in the file of a table, whatever that is; nothing if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


def _text_of_table(path: str) -> str:
    """Return the text of what can be used of a table, as short as can be; what cannot is told here and nowhere else.

    Raises:
        UsageError: it cannot be used.
    """
    if not path:
        return ""
    from unisono.tuning.decide.table import from_text, to_json

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the table {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    short = json.dumps(to_json(from_text(text, path)), separators=(",", ":"))
    if len(short) > _MOST_NBYTES:
        raise UsageError(f"the table {path} has {len(short)} bytes, and ranks take at most {_MOST_NBYTES}: split it up")
    return short


def _is_of(text: str, machine: str) -> bool:
    return any(each["machine"] == machine for each in json.loads(text)["decisions"])


def _of_this_machine(*, has_table: bool) -> dict[str, str]:
    from unisono.tuning.machine.fingerprint import cache_folder, fingerprint, maker

    found, folder = {"maker": maker()}, cache_folder()
    if not has_table and not os.path.isdir(folder):
        _log.info("no calibration of this machine: algorithms are chosen by priors; `unisono calibrate` measures it")
        return found
    from unisono.tuning.measure.calibration_files import calibrated, path_of

    machine = fingerprint()
    parameters = calibrated(machine)
    if parameters is not None:
        _log.info("algorithms are chosen by the calibration in %s", path_of(machine))
    return found | {"machine": machine, "parameters": json.dumps(parameters_to_json(parameters)) if parameters else ""}
