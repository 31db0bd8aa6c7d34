"""The calls on host memory that a call on GPU arrays needs, for example between hosts.

Used by: `Communicator`, which inherits from `HostSide` and so is a `collectives.device.contracts.HostCalls`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.collectives.calls.dispatch import Dispatcher
from unisono.collectives.calls.planning import CallSpec
from unisono.collectives.calls.shapes import layout_of
from unisono.transports.contracts.call import AnyArray, Call

if TYPE_CHECKING:
    from unisono.collectives.device.contracts import Counts


class HostSide(Dispatcher):
    """The methods of `HostCalls` that make and plan calls; their contracts are there."""

    def _call_of(self, spec: CallSpec, elements: int) -> Call:
        layout = layout_of(spec.collective, (elements,), size=self.size, rank=self.rank)
        return self._planner.find(spec._replace(layout=layout, algorithm="auto"))

    def _call_on_host(
        self, spec: CallSpec, x: AnyArray | None, out: AnyArray | None, counts: Counts, timeout_s: float
    ) -> None:
        self._dispatch(
            spec.collective,
            x,
            out,
            out,
            op=spec.op,
            root=spec.root,
            counts=counts,
            algorithm=spec.algorithm,
            timeout_s=timeout_s,
        )
