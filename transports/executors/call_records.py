"""`CallRecords`: lets the generic executor record its collectives in the flight recorder of the rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from unisono.transports import _core
from unisono.transports.contracts.call import Call
from unisono.transports.contracts.communicator_id import communicator_id

# The executor over Unisono's own links, which is beside, records its calls under the id 0.
_BESIDE = -1
_MOST_DESCRIPTIONS = 256


class CallRecords:
    """The records of one communicator. The executor's lock guards it.

    Args:
        control: the native control of the session, which holds the recorder.
        members: the ranks of the job in the communicator.
        communicator: its id, which is equal on all of them; by default that of a communicator of all ranks.
    """

    def __init__(self, control: _core.Control, members: tuple[int, ...], communicator: int | None = None) -> None:
        self._control = control
        self._communicator = communicator_id(0, members, _BESIDE) if communicator is None else communicator
        self._descriptions: dict[int, _core.Description] = {}  # by digest
        control.name_communicator(self._communicator, members)

    def subgroup(self, members: tuple[int, ...], number: int) -> CallRecords:
        """Return the records of a communicator of some ranks of the job; `number` counts those of the same ranks."""
        return CallRecords(self._control, members, communicator_id(self._communicator, members, number))

    def begin(self, call: Call, sequence: int) -> int:
        """Record that the program has made a call, and return the index of the record."""
        digest = call.signature.digest
        description = self._descriptions.get(digest)
        if description is None:
            if len(self._descriptions) >= _MOST_DESCRIPTIONS:
                self._descriptions.clear()
            nbytes = sum(extent.dtype.itemsize * max(extent.elements) for extent in call.extents)
            description = _core.Description(str(call.signature), json.dumps(facts_of(call)), nbytes)
            self._descriptions[digest] = description
        return self._control.begin_call(self._communicator, sequence, digest, description)

    def end(self, index: int, *, is_done: bool) -> None:
        """Record the end of a call: `is_done` if it has succeeded, and otherwise the communicator has failed."""
        self._control.end_call(index, is_done)

    def close(self) -> None:
        """Note that the communicator is closed."""
        self._control.close_communicator(self._communicator)


def facts_of(call: Call) -> Mapping[str, Any]:
    """Return the facts of a call for readers of the flight recorder."""
    signature = call.signature
    return {
        "collective": signature.collective,
        "dtype": signature.dtype,
        "shape": signature.shape,
        "op": signature.op,
        "root": signature.root,
        "algorithm": signature.algorithm,
        "segments": signature.segments,
        "arrays": 1 + len(signature.others),
        "elements": [sum(each.elements[side] for each in call.extents) for side in (0, 1)],
    }
