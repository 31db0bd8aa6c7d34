"""Settings of rank 0 that all ranks apply: its options, its decision table and its calibration.

They travel as text with the roster, so they need no message of their own. With equal settings, all ranks choose the
same algorithms.

Used by: `init`, which calls `collect` before the rendezvous and `apply` after it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from unisono.algorithms.catalogue.variants import is_rules
from unisono.errors import RendezvousError, UsageError
from unisono.foundation import log
from unisono.foundation.json_checks import checked, parsed_json
from unisono.options import CUDA_IPC, Options
from unisono.transports.links.preference import resolved
from unisono.tuning.decide.choice import TunerState
from unisono.tuning.machine.parameters import Parameters, from_json, priors, to_json as parameters_to_json

_log = log.get()
_NO_CALIBRATION = "no calibration of this machine: algorithms are chosen by defaults; `unisono calibrate` measures it"

# The options that all ranks take from rank 0, because they must choose the same algorithms and treat links alike.
SHARED_OPTIONS = ("transports", "algorithm", "tune", "segment_nbytes", "tcp_streams", "tcp_checksum", "verify_results")
# `Options` checks the values of options.
_SHAPE = {
    **dict.fromkeys(SHARED_OPTIONS, (str, int, float, bool)),
    **dict.fromkeys(
        ("algorithm", "table", "table_name", "table_hash", "parameters", "machine", "maker", "refusal"), str
    ),
}
_MOST_NBYTES = 512 << 10


def collect(options: Options, rank: int) -> dict[str, Any]:
    """Return the settings that this rank publishes: options, a description of the machine, table and calibration.

    Only those of rank 0 are used. If one of them is invalid, the item ``refusal`` holds the error, which all ranks
    then raise in `apply`.
    """
    settings = _shared_options(options) | {
        "table": "",
        "table_name": options.table,
        "table_hash": "",
        "parameters": "",
        "machine": "",
        "maker": "",
        "refusal": "",
    }
    if rank > 0:
        return settings
    try:
        if options.verify_results and options.third_party:
            raise UsageError(
                f"verify_results is not possible with transports={options.third_party!r}, whose communicators cannot "
                "be used by several threads: use shm, tcp, ucx or mpi"
            )
        if options.tune:
            _check_tune(options)
        settings["table_hash"] = _hash_of(options.table)
        settings |= _of_this_machine(has_table=bool(options.table))
        settings["table"] = _text_of_table(options.table, settings["machine"])
    except UsageError as error:
        settings["refusal"] = str(error)
    return settings


def _check_tune(options: Options) -> None:
    """Raise UsageError if the calls of this job cannot be tuned, or the table could not be written."""
    from pathlib import Path

    from unisono.tuning.measure.table_files import check_writable

    if options.verify_results:
        raise UsageError(f"{options.source_of('tune')} times calls, and verify_results makes them longer: set only one")
    try:
        check_writable(Path(options.tune))
    except UsageError as error:
        raise UsageError(f"{options.source_of('tune')}: {error.message}") from None


def apply(settings: Mapping[str, Any]) -> TunerState:
    """Return the tuner state that the settings of rank 0 describe.

    Raises:
        UsageError: a setting is invalid. All ranks raise the same error.
        RendezvousError: settings are missing, or are of another type than this version publishes.
    """
    try:
        checked(settings, _SHAPE)
    except ValueError as error:
        raise RendezvousError(f"the settings of rank 0 cannot be used: {error}") from None
    if settings["refusal"]:
        raise UsageError(settings["refusal"])
    if is_rules(settings["algorithm"]):
        from unisono.tuning.decide.forced_rules import rules

        rules(settings["algorithm"])
    default_parameters = priors(settings["maker"])
    if not settings["machine"]:
        return TunerState(parameters=default_parameters)
    table = None
    if settings["table"]:
        from unisono.tuning.decide.table import from_text

        table = from_text(settings["table"], settings["table_name"])
    parameters = _parameters(settings["parameters"]) if settings["parameters"] else default_parameters
    return TunerState(table, parameters, settings["machine"])


def _parameters(text: str) -> Parameters:
    try:
        return from_json(parsed_json(text))
    except ValueError as error:  # UsageError is a ValueError
        raise UsageError(f"the calibration of rank 0 cannot be used: {error}") from None


def report_differences(options: Options, settings: Mapping[str, Any]) -> None:
    """Log each option of this rank that differs from rank 0's, whose value is used. Tables are compared by content."""
    pairs = [(name, value, settings[name]) for name, value in _shared_options(options).items()]
    if options.table != settings["table_name"]:
        pairs.append(("table", options.table, settings["table_name"]))
    elif options.table and _hash_of(options.table) != settings["table_hash"]:
        pairs.append(("table", f"the content of {options.table} here", "the content of that file on rank 0"))
    for name, here, on_rank_0 in pairs:
        if here != on_rank_0:
            _log.warning("the option %s is %r on this rank: rank 0's %r is used instead", name, here, on_rank_0)


def _shared_options(options: Options) -> dict[str, Any]:
    """Return the options that rank 0 publishes, in the form in which they travel."""
    values = {name: getattr(options, name) for name in SHARED_OPTIONS}
    names = (
        *resolved(options.preference, is_encrypted=options.tls == "on"),
        *([CUDA_IPC] if options.allows_cuda_ipc else []),
    )
    return {**values, "transports": ",".join(names)}


def _hash_of(path: str) -> str:
    """Return a hash of a file, valid table or not; an empty text if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


def _text_of_table(path: str, machine: str) -> str:
    """Return the text of the part of a table that was measured on a machine, without spaces; empty if none was.

    It lacks the parts that this version ignores. Reading the table logs these, so they are logged on rank 0 only.

    Raises:
        UsageError: the table cannot be used.
    """
    if not path:
        return ""
    from pathlib import Path

    from unisono.tuning.decide.table import loaded, to_json

    table = loaded(Path(path)).of(machine, path)
    short = json.dumps(to_json(table), separators=(",", ":")) if table else ""
    if len(short) > _MOST_NBYTES:
        raise UsageError(f"the table {path} has {len(short)} bytes, and ranks take at most {_MOST_NBYTES}: split it up")
    return short


def _of_this_machine(*, has_table: bool) -> dict[str, str]:
    from unisono.tuning.machine.fingerprint import cache_folder, fingerprint, maker

    settings, folder = {"maker": maker()}, cache_folder()
    if not has_table and not os.path.isdir(folder):
        _log.info(_NO_CALIBRATION)
        return settings
    from unisono.tuning.measure.calibration_files import calibrated, path_of

    machine = fingerprint()
    parameters = calibrated(machine)
    if parameters is None and not has_table:
        _log.info(_NO_CALIBRATION)
    if parameters is not None:
        _log.info("algorithms are chosen by the calibration in %s", path_of(machine))
    return settings | {
        "machine": machine,
        "parameters": json.dumps(parameters_to_json(parameters)) if parameters else "",
    }
