"""Calibrations in the user's cache folder: one JSON file for each machine, named by its fingerprint.

A file holds the parameters with which every job on the machine chooses algorithms. It also records their origin: the
machine in words, and for each link the date, the load, and the largest error of the model in calls made afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from unisono.errors import UsageError
from unisono.foundation import log
from unisono.foundation.json_checks import parsed_json
from unisono.tuning.machine import fingerprint as machine_identity
from unisono.tuning.machine.parameters import Parameters, from_json, priors, to_json

_log = log.get("tuning")

_SUFFIX = ".json"


class Origin(NamedTuple):
    """The origin of the parameters of a link.

    Attributes:
        date: when they were measured, in ISO 8601.
        library: the version of Unisono that measured them.
        load: the load average of the machine when the measurement began.
        cores: the number of cores that the process could use.
        worst_factor: the largest factor by which the model was off, in calls that were measured afterwards; 2.0 means
            that it predicted half or twice the time. 1.0 if nothing was checked.
    """

    date: str = "unknown"
    library: str = "unknown"
    load: float = 0.0
    cores: int = 0
    worst_factor: float = 1.0

    def __str__(self) -> str:
        return f"{self.date}, load {self.load:.1f} on {self.cores} cores, model off by up to {self.worst_factor:.1f}×"


class Calibration(NamedTuple):
    """The content of a calibration file.

    Attributes:
        machine: the fingerprint of the machine.
        path: the path of the file.
        parameters: the measured parameters.
        identity: the machine in words, from `machine.fingerprint.describe`; empty if the file lacks it.
        origins: the origin of the parameters of each link, by its name.
    """

    machine: str
    path: str
    parameters: Parameters
    identity: Mapping[str, Any] = {}
    origins: Mapping[str, Origin] = {}


def path_of(machine: str) -> str:
    """Return the path of the calibration file of the machine with this fingerprint."""
    return os.path.join(machine_identity.cache_folder(), machine + _SUFFIX)


def read(machine: str) -> Calibration | None:
    """Return the calibration of the machine with this fingerprint; None if there is none.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not JSON, or not a calibration (then a `UsageError`).
    """
    path = path_of(machine)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return None
    return parsed(text, machine, path)


def parsed(text: str, machine: str, path: str) -> Calibration:
    """Return the calibration in the text of a file.

    Raises:
        ValueError: the text is not JSON, or not a calibration (then a `UsageError`).
    """
    content = parsed_json(text)
    about = content.pop("about", {}) if isinstance(content, dict) else {}
    parameters = from_json(content)
    try:
        origins = {name: _origin(each) for name, each in about.get("links", {}).items()}
        return Calibration(machine, path, parameters, dict(about.get("machine", {})), origins)
    except (AttributeError, TypeError, ValueError):
        raise UsageError("the field 'about' does not have the form that `unisono calibrate` writes") from None


def _origin(fields: Mapping[str, Any]) -> Origin:
    """Return the origin in a JSON value; raises AttributeError, TypeError or ValueError if it is not valid."""
    usual = Origin()._asdict()
    return Origin(**{name: type(value)(fields.get(name, value)) for name, value in usual.items()})


def read_all() -> tuple[list[Calibration], dict[str, str]]:
    """Return all calibrations in the cache folder, and a mapping from unusable files to reasons."""
    usable, unusable = list[Calibration](), dict[str, str]()
    folder = machine_identity.cache_folder()
    names = sorted(name for name in os.listdir(folder) if name.endswith(_SUFFIX)) if os.path.isdir(folder) else []
    for name in names:
        machine = name.removesuffix(_SUFFIX)
        try:
            calibration = read(machine)
        except (OSError, ValueError) as error:
            unusable[path_of(machine)] = str(error)
        else:
            usable += [calibration] if calibration else []
    return usable, unusable


def calibrated(machine: str) -> Parameters | None:
    """Return the parameters measured on the machine with this fingerprint, or None.

    If the file cannot be used, a warning names it, and the result is None.
    """
    try:
        calibration = read(machine)
    except (OSError, ValueError) as error:
        path = path_of(machine)
        _log.warning("the calibration in %s is not used: %s; `unisono calibrate` makes a new one", path, error)
        return None
    return calibration.parameters if calibration else None


def parameters_of(machine: str) -> Parameters:
    """Return the parameters measured on the machine with this fingerprint, or else the priors of this machine."""
    return calibrated(machine) or priors(machine_identity.maker())


def keep(calibration: Calibration) -> bool:
    """Write a calibration to its file; if that fails, log a warning and return False."""
    path = calibration.path
    scratch = f"{path.removesuffix(_SUFFIX)}.{os.getpid()}"
    origins = {name: origin._asdict() for name, origin in calibration.origins.items()}
    content = {**to_json(calibration.parameters), "about": {"machine": dict(calibration.identity), "links": origins}}
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(scratch, "w", encoding="utf-8") as file:
            file.write(json.dumps(content))
        os.replace(scratch, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        _log.warning("the calibration is not kept, because %s cannot be written: %s", path, error.strerror)
        return False
    return True


def forget(machine: str) -> bool:
    """Remove the calibration of the machine with this fingerprint; return False if there is none.

    Raises:
        UsageError: the file cannot be removed.
    """
    path = path_of(machine)
    try:
        os.remove(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UsageError(f"the calibration {path} cannot be removed: {error.strerror}") from None
    return True
