"""When the members of a view measure their network: they have been the same ones for a while, so the time is worth it.

Theory of operation. Each member knows for how long it has made calls in the present view. The second phase of a call
carries the least of these times. So all members learn in the same call that the view has settled, without a message of
their own. At the beginning of the next call, all measure their network as ranks do (`Communicator.measure_network`),
and follow the new map from that call on. If a member is lost meanwhile, this call is repeated in the next view, which
has to settle anew. A member that does not dial all others passes 0, because relays cannot be measured.

Used by: `attempts`.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from unisono.errors import UsageError
from unisono.foundation import log
from unisono.swarm.routes import Routes
from unisono.swarm.views import View

if TYPE_CHECKING:
    from unisono.collectives.communicator import Communicator

_log = log.get("rendezvous")

# The seconds after which the members of a view measure for the first time, and again. It takes some seconds.
_SETTLED_S, _AGAIN_S = 60.0, 600.0


class Settling:
    """Decides for one member when it measures the network of its view; all members of the view decide alike.

    Args:
        me: the id of this process.
        routes: its ways to the others.
    """

    def __init__(self, me: str, routes: Routes) -> None:
        self._me = me
        self._routes = routes
        self._view: View | None = None
        self._since = 0.0
        self._has_measured = self._is_due = False

    def age_s(self, view: View) -> float:
        """Return for how long this member has made calls in a view, or since it measured there; 0 if it cannot measure.

        Call it in the second phase of each call.
        """
        if view is not self._view:
            self._view, self._since = view, time.monotonic()
            self._has_measured = self._is_due = False
        age_s = time.monotonic() - self._since
        others = (member for member in view.members if member.id != self._me)
        return age_s if age_s < _SETTLED_S or all(map(self._routes.is_direct, others)) else 0.0

    def note(self, least_age_s: float) -> None:
        """Note the least age of all members, as of the second phase of a call."""
        self._is_due = least_age_s >= (_AGAIN_S if self._has_measured else _SETTLED_S)

    def measure_if_due(self, view: View, comm: Communicator, limit_s: float) -> None:
        """Measure the network at the beginning of a call, if all members do; raises the errors of `measure_network`."""
        if not self._is_due or view is not self._view:
            return
        self._is_due, self._has_measured, self._since = False, True, time.monotonic()
        if len(comm.hosts) == 1:
            return
        with contextlib.suppress(UsageError):  # the members use no TCP between hosts, which all of them know
            network = comm.measure_network(timeout_s=limit_s)
            _log.info("the members of the swarm have measured their network: %s", "far" if network else "near hosts")
