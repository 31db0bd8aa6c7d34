from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from unisono import log


@pytest.fixture(autouse=True)
def restored_logger() -> Iterator[None]:
    logger = logging.getLogger(log.NAME)
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_each_line_says_which_rank_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", rank=2, size=4).info("ring over %s", "shm")
    assert capsys.readouterr() == ("", "unisono [2/4] ring over shm\n")


def test_outside_a_job_no_rank_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("warning").warning("careful")
    assert capsys.readouterr().err == "unisono careful\n"


def test_modules_below_speak_through_the_same_logger(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("debug", rank=0, size=1)
    logging.getLogger("unisono.transports.listener").debug("a stranger")
    assert capsys.readouterr().err == "unisono [0/1] a stranger\n"


@pytest.mark.parametrize(("level", "told"), [("error", 1), ("warning", 2), ("info", 3), ("debug", 4)])
def test_the_level_says_how_much_is_told(level: str, told: int, capsys: pytest.CaptureFixture[str]) -> None:
    logger = log.configure(level, rank=0, size=1)
    for say in (logger.error, logger.warning, logger.info, logger.debug):
        say("message")
    assert len(capsys.readouterr().err.splitlines()) == told


def test_configuring_again_changes_the_rank_and_adds_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", rank=0, size=2)
    log.configure("info", rank=1, size=3).info("once")
    assert capsys.readouterr().err == "unisono [1/3] once\n"


def test_handlers_of_the_program_are_kept() -> None:
    own = logging.NullHandler()
    logging.getLogger(log.NAME).addHandler(own)
    assert own in log.configure("info").handlers
