"""Calls inside programs of JAX, made by real ranks. Each test starts them once."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.jax_ranks import lines_of

from unisono.frameworks.jax import installed

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="make jax installs what these tests need")


@pytest.mark.clients
def test_calls_in_programs_equal_direct_calls_and_have_derivatives() -> None:
    for lines in lines_of("calls", ranks=2):
        assert lines == ["all calls were made"]


def test_failed_calls_in_programs_raise_and_ranks_go_on() -> None:
    kinds = {
        "shapes": "MismatchError: ranks disagree on call #0",
        "branches": "MismatchError: ranks disagree on call #0",
        "messages": "MismatchError",
        "aborted": "AbortedError: rank 0 aborted: enough",
        "closed": "UsageError: the communicator",
        "forked": "UsageError: this process was forked from a rank",
    }
    for lines in lines_of("failures", *kinds, ranks=2):
        raised = [line for line in lines if line != "no error"]
        assert [words in line for words, line in zip(kinds.values(), raised, strict=True)] == [True] * len(kinds), lines


def test_interrupt_ends_a_program_and_other_ranks_raise_aborted_error() -> None:
    first, second = lines_of("failures", "interrupted", ranks=2)
    assert first[0].startswith("KeyboardInterrupt")
    assert "AbortedError: rank 0 was interrupted" in second[0]


def test_death_of_a_rank_ends_programs_of_the_others_which_can_exit() -> None:
    first, _, third = lines_of("failures", "died", ranks=3)
    assert "PeerLostError: rank 1 died" in first[0]
    assert "PeerLostError: rank 1 died" in third[0]


@pytest.mark.night
def test_examples_reach_the_loss_of_one_process() -> None:
    examples = sorted(path.name for path in (Path(__file__).parents[2] / "examples").glob("jax_*.py"))
    assert lines_of("examples", ranks=2) == [examples] * 2


def test_program_for_several_devices_of_a_process_is_refused() -> None:
    ((ours, of_jax),) = lines_of("devices", ranks=1, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert "program for 2 devices" in ours
    assert "calls of unisono.jax, which need one process for each device" in of_jax


def test_jax_that_is_missing_or_too_old_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.__version_info__", (0, 4, 38))
    with pytest.raises(ImportError, match=r"needs JAX 0\.5 or newer"):
        installed.check()
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ImportError, match=r"pip install .*jax"):
        installed.check()
