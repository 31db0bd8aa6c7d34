"""The checks of message transports: our transports pass, and a transport that breaks one promise fails its check."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import transport_doubles
from support.transport_doubles import BUGS, BUGS_OF_LINKS, Double, QueueLinks, factory_of, framed_factory_of

import unisono as un
from unisono.errors import TransportUnavailableError, UsageError
from unisono.testing import transport_checks, transport_ranks
from unisono.testing.transport_checks import CHECKS
from unisono.testing.transports import local_factory
from unisono.transports.message.plugin import Bootstrap

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "socket_transport.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("socket_transport", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.open_sockets


FACTORIES = {"local": lambda: local_factory(4), "rendezvous": lambda: local_factory(0), "example": example}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("factory", FACTORIES)
def test_own_transports_pass_every_check(factory: str, check: str) -> None:
    assert un.testing.check_transport(FACTORIES[factory](), checks=[check]) == (check,)


@pytest.mark.slow
@pytest.mark.parametrize("factory", FACTORIES)
def test_own_transports_carry_more_than_two_gibibytes(factory: str) -> None:
    un.testing.check_transport(FACTORIES[factory](), checks=["large"])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorten the time limit of the checks. At the end, release transports that block."""
    monkeypatch.setattr(transport_ranks, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(transport_checks, "CYCLES", 100)
    transport_doubles.released.clear()
    yield
    transport_doubles.released.set()
    for descriptor in transport_doubles.kept:
        if isinstance(descriptor, int):
            os.close(descriptor)
    transport_doubles.kept.clear()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_each_check_detects_the_transport_that_breaks_its_promise(
    bug: type[Double], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = BUGS[bug]
    limit_s = 60.0 if name == "open and close" else 1.5
    monkeypatch.setitem(CHECKS, name, CHECKS[name]._replace(limit_s=limit_s))
    with pytest.raises(un.testing.CheckError, match=f"^{name}: "):
        un.testing.check_transport(factory_of(bug), checks=[name])
    assert un.testing.check_transport(factory_of(Double), checks=[name]) == (name,)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("bug", BUGS_OF_LINKS, ids=lambda bug: bug.__name__)
def test_each_check_detects_the_links_that_break_its_promise(
    bug: type[QueueLinks], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, message = BUGS_OF_LINKS[bug]
    monkeypatch.setitem(CHECKS, name, CHECKS[name]._replace(limit_s=5.0))
    with pytest.raises(un.testing.CheckError, match=f"^{name}: .*{re.escape(message)}"):
        un.testing.check_transport(framed_factory_of(bug), checks=[name])
    assert un.testing.check_transport(framed_factory_of(QueueLinks), checks=[name]) == (name,)


def test_every_check_has_a_double_that_breaks_its_promise() -> None:
    # A job of collectives also breaks with each of these bugs.
    broken = {*BUGS.values(), *(name for name, _ in BUGS_OF_LINKS.values())}
    assert broken == set(CHECKS) - {"collectives"}


def test_check_transport_reports_what_is_wrong_with_a_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_ranks, "_OPENING_S", 2.0)

    def raises(_: Bootstrap) -> Any:
        raise KeyError("no such device")

    def second_only(bootstrap: Bootstrap) -> Any:
        bootstrap.exchange(b"")
        return raises(bootstrap) if bootstrap.rank == 1 else factory_of(Double)

    wrong: list[tuple[Callable[[Bootstrap], Any], str]] = [
        (raises, "cannot be opened: KeyError: 'no such device'"),
        (second_only, "no such device|lacks"),
        (lambda _: None, "returned None, which lacks subgroup, announce"),
        (lambda _: local_factory()(Bootstrap(0, 1, (0,), lambda data: [data], 0.0)), "returned one for"),
    ]
    for factory, what in wrong:
        with pytest.raises((un.testing.CheckError, TransportUnavailableError), match=what):
            un.testing.check_transport(factory, checks=["messages"])


def test_check_transport_refuses_an_unknown_check() -> None:
    with pytest.raises(UsageError, match="there is no check 'mesages': there are messages, identities"):
        un.testing.check_transport(local_factory(), checks=["mesages"])
