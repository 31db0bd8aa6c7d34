"""`check_transport` tests a message transport against each promise of its contract.

Each check runs in a thread. If it does not end in time, a call has blocked, and the error shows its stack.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

from unisono.errors import UsageError
from unisono.testing.differences import CheckError
from unisono.testing.transport_checks import CHECKS, LARGE, TransportCheck
from unisono.testing.transport_ranks import Ranks
from unisono.transports.contracts.transport import MessageTransport
from unisono.transports.message.local import LocalNetwork
from unisono.transports.message.plugin import Bootstrap, Factory


def check_transport(
    factory: Factory,
    *,
    checks: Sequence[str] | None = None,
    large: bool = False,
    progress: Callable[[str], object] | None = None,
) -> tuple[str, ...]:
    """Check a message transport against `unisono.transports.contracts.transport.MessageTransport`; return the checks.

    Threads of this process open the ranks, up to 8 at a time, and one check opens two of them a thousand times. Errors
    that only occur between processes need another test: `check_collectives`, on ranks that use the transport.

    Args:
        factory: the object that an entry point of the group ``unisono.transports`` names. It takes a `Bootstrap` and
            returns the transport of that rank.
        checks: the names of the checks to run; by default all.
        large: whether to send more than 2 GiB as well, which needs about 8 GiB of memory.
        progress: called with the name of each check before it runs.

    Raises:
        CheckError: the transport breaks a promise; the message names the check and the error.
        UsageError: there is no such check.

    >>> from unisono.testing.transports import local_factory
    >>> import unisono as un
    >>> un.testing.check_transport(local_factory(), checks=["messages", "abort"])
    ('messages', 'abort')
    """
    available = CHECKS | LARGE
    names = (*CHECKS, *(LARGE if large else ())) if checks is None else tuple(checks)
    if unknown := [name for name in names if name not in available]:
        raise UsageError(f"there is no check {unknown[0]!r}: there are {', '.join(available)}")
    for name in names:
        if progress is not None:
            progress(name)
        _run(name, available[name], factory)
    return names


def local_factory(capacity: int = 4) -> Factory:
    """Return a factory of the transport `local`, whose ranks are threads of one process."""
    networks: dict[bytes, LocalNetwork] = {}

    def local(bootstrap: Bootstrap) -> MessageTransport:
        token = os.urandom(16)
        if bootstrap.rank == 0:
            networks[token] = LocalNetwork(bootstrap.size, capacity)
        transport = networks[bootstrap.exchange(token)[0]].transports[bootstrap.rank]
        bootstrap.exchange(b"")
        networks.pop(token, None)
        return transport

    return local


def _run(name: str, check: TransportCheck, factory: Factory) -> None:
    """Run a check in a thread, because it may block."""
    failures: list[BaseException] = []

    def carry_out() -> None:
        ranks: Ranks | None = None
        try:
            ranks = Ranks(factory, check.size)
            check.run(ranks)
        except Exception as error:  # noqa: BLE001  (any exception is a finding)
            failures.append(error)
        finally:
            if ranks is not None:
                ranks.close_all()

    thread = threading.Thread(target=carry_out, daemon=True)
    thread.start()
    thread.join(check.limit_s)
    if thread.is_alive() and thread.ident is not None:
        stack = traceback.extract_stack(sys._current_frames()[thread.ident])
        where = "".join(traceback.format_list(stack[-4:]))
        raise CheckError(f"{name}: not over within {check.limit_s:g} s; it is at\n{where}")
    for error in failures:
        reason = error.message if isinstance(error, CheckError) else f"{type(error).__name__}: {error}"
        raise CheckError(f"{name}: {reason}") from error
