"""Calibrations in the user's cache folder: one JSON file for each machine, named by its fingerprint.

A file holds the parameters that every job on that machine chooses algorithms by. It also says where they are from: the
machine in words, and for each link when it was measured, at which load, and how far the model was off afterwards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from unisono import log
from unisono.errors import UsageError
from unisono.tuning.machine import fingerprint as machine_identity
from unisono.tuning.machine.parameters import Parameters, from_json, priors, to_json

_log = log.get()

_SUFFIX = ".json"


class Origin(NamedTuple):
    """How the parameters of a link came about.

    Attributes:
        date: when they were measured, in ISO 8601.
        library: the version of Unisono that measured them.
        load: the load average of the machine when the measurement began.
        cores: the number of cores that the process could use.
        worst_factor: by which factor the model was off at most, in calls that were measured afterwards; 2.0 means that
            it predicted half or twice the time. 1.0 where nothing was checked.
    """

    date: str = "unknown"
    library: str = "unknown"
    load: float = 0.0
    cores: int = 0
    worst_factor: float = 1.0

    def __str__(self) -> str:
        return f"{self.date}, load {self.load:.1f} on {self.cores} cores, model off by up to {self.worst_factor:.1f}×"


class Calibration(NamedTuple):
    """The content of a file.

    Attributes:
        machine: the fingerprint of the machine.
        path: of the file.
        parameters: what was measured.
        identity: the machine in words, as `tuning.identity.describe` gives it; empty if the file does not say.
        origins: by the name of the link, how its parameters came about.
    """

    machine: str
    path: str
    parameters: Parameters
    identity: Mapping[str, Any] = {}
    origins: Mapping[str, Origin] = {}


def path_of(machine: str) -> str:
    """Return the path of the calibration of the machine with this fingerprint."""
    return os.path.join(machine_identity.cache_folder(), machine + _SUFFIX)


def read(machine: str) -> Calibration | None:
    """Return the calibration of the machine with this fingerprint; None if there is none.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no calibration (a `UsageError`), or no JSON.
    """
    path = path_of(machine)
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        return None
    about = content.pop("about", {}) if isinstance(content, dict) else {}
    parameters = from_json(content)
    try:
        origins = {name: _origin(each) for name, each in about.get("links", {}).items()}
        return Calibration(machine, path, parameters, dict(about.get("machine", {})), origins)
    except (AttributeError, TypeError, ValueError):
        raise UsageError("its field 'about' is not written as `unisono calibrate` does") from None


def _origin(found: Mapping[str, Any]) -> Origin:
    """Return the origin in what was read from JSON; raises AttributeError, TypeError or ValueError if it is none."""
    usual = Origin()._asdict()
    return Origin(**{name: type(value)(found.get(name, value)) for name, value in usual.items()})


def read_all() -> tuple[list[Calibration], dict[str, str]]:
    """Return all calibrations in the cache folder, and the files that cannot be used: path → reason."""
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
    """Return the parameters that were measured on the machine with this fingerprint, if they are in the cache.

    A file that cannot be used is named in a warning, and None is returned.
    """
    try:
        calibration = read(machine)
    except (OSError, ValueError) as error:
        path = path_of(machine)
        _log.warning("the calibration in %s is not used: %s; `unisono calibrate` makes it anew", path, error)
        return None
    return calibration.parameters if calibration else None


def parameters_of(machine: str) -> Parameters:
    """Return the parameters that were measured on the machine with this fingerprint, or else the priors of this one."""
    return calibrated(machine) or priors(machine_identity.maker())


def keep(calibration: Calibration) -> bool:
    """Write a calibration to its file; where that cannot be written, warn and return False."""
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
        _log.warning("the calibration is not kept, as %s cannot be written: %s", path, error.strerror)
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
