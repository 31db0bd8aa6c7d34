from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.deadlines import DEADLINE_S

from unisono.foundation import log


@pytest.fixture(autouse=True)
def restored_logger() -> Iterator[None]:
    logger = logging.getLogger(log.NAME)
    before = list(logger.handlers), logger.propagate
    logger.setLevel(logging.NOTSET)
    yield
    logger.handlers, logger.propagate = before
    logger.setLevel(logging.NOTSET)  # a level that Unisono has not set last would count as the program's


def configure_alone(setting: str, rank: int | None = None, size: int | None = None) -> None:
    """Configure the log without the handlers of pytest, which Unisono would use instead of its own."""
    logger = logging.getLogger(log.NAME)
    logger.handlers, logger.propagate = [], False
    log.configure(setting, rank, size)


def test_log_line_names_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    configure_alone("info", rank=2, size=4)
    log.get().info("ring over %s", "shm")
    assert capsys.readouterr() == ("", "unisono [2/4] ring over shm\n")


def test_log_line_outside_a_job_names_no_rank(capsys: pytest.CaptureFixture[str]) -> None:
    configure_alone("warning")
    log.get().warning("careful")
    assert capsys.readouterr().err == "unisono careful\n"


def test_child_loggers_write_through_the_unisono_handler(capsys: pytest.CaptureFixture[str]) -> None:
    configure_alone("debug", rank=0, size=1)
    logging.getLogger("unisono.links").debug("a stranger")
    assert capsys.readouterr().err.endswith(" a stranger\n")


@pytest.mark.parametrize(("level", "expected"), [("error", 1), ("warning", 2), ("info", 3), ("debug", 4)])
def test_log_level_filters_messages(level: str, expected: int, capsys: pytest.CaptureFixture[str]) -> None:
    configure_alone(level, rank=0, size=1)
    logger = log.get()
    for say in (logger.exception, logger.warning, logger.info, logger.debug):
        say("message")
    assert capsys.readouterr().err.count("message") == expected
    assert [logger.shows(name) for name in ("error", "warning", "info", "debug")] == [
        position < expected for position in range(4)
    ]


def test_reconfiguring_the_log_changes_the_rank_without_duplicates(capsys: pytest.CaptureFixture[str]) -> None:
    configure_alone("info", rank=0, size=2)
    configure_alone("info", rank=1, size=3)
    log.get().info("once")
    assert capsys.readouterr().err == "unisono [1/3] once\n"


def test_handlers_of_the_program_are_kept() -> None:
    own = logging.NullHandler()
    logging.getLogger(log.NAME).addHandler(own)
    log.configure("info")
    assert own in logging.getLogger(log.NAME).handlers


def test_logged_exception_includes_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    configure_alone("error", rank=0, size=1)
    try:
        raise KeyError("what")
    except KeyError:
        log.get().exception("a callback failed")
    lines = capsys.readouterr().err.splitlines()
    assert (lines[0], lines[-1]) == ("unisono [0/1] a callback failed", "KeyError: 'what'")


def test_log_record_has_function_and_file_of_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger(log.NAME).propagate = True
    with caplog.at_level(logging.INFO, logger=log.NAME):
        log.get().info("here")
    assert (caplog.records[0].funcName, caplog.records[0].filename) == (
        "test_log_record_has_function_and_file_of_the_caller",
        "test_log.py",
    )


def test_debug_of_a_subsystem_leaves_the_others_at_info(capsys: pytest.CaptureFixture[str]) -> None:
    configure_alone("debug:links", rank=0, size=2)
    for subsystem in ("links", "tuning", ""):
        for say in (log.get(subsystem).debug, log.get(subsystem).info):
            say("%s says", subsystem or "job")
    lines = [line.split(maxsplit=3)[3] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["links says", "links says", "tuning says", "job says"]
    configure_alone("warning", rank=0, size=2)  # the level of a subsystem does not outlive its setting
    assert not log.get("links").shows("info")


@pytest.mark.parametrize("setting", ["", "loud", "debug:", "debug:wires", "info:links", 3])
def test_wrong_log_settings_are_refused(setting: object) -> None:
    with pytest.raises(ValueError, match="one of error, warning, info, debug, or debug:NAME,… with names of calls"):
        log.checked_setting(setting)


def test_handlers_of_the_program_get_the_messages_with_the_rank(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure("info", rank=2, size=3)
    logging.getLogger(log.NAME).propagate = True  # to pytest's handler at the root, as after logging.basicConfig
    log.get("links").info("ring over %s", "shm")
    (record,) = caplog.records
    assert (record.name, record.getMessage(), record.__dict__["rank"], record.__dict__["size"]) == (
        "unisono.links",
        "ring over shm",
        2,
        3,
    )
    assert capsys.readouterr().err == ""  # not twice


def test_a_level_that_the_program_has_set_stays(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger(log.NAME).setLevel(logging.ERROR)
    configure_alone("info", rank=0, size=2)
    log.get().warning("careful")
    assert capsys.readouterr().err == ""


SILENT = """
import sys
from unisono.foundation import log
log.configure({level!r}, rank=0, size=2)
log.get().info("met")
loaded = "logging" in sys.modules
import logging
{then}
log.get().warning("careful")
print(loaded, logging.getLogger(log.NAME).level)
"""


@pytest.mark.parametrize(
    ("level", "then", "expected", "ends"),
    [
        ("warning", "", ["unisono [0/2] careful"], "False 30"),
        ("error", "", [], "False 40"),
        ("info", "", ["unisono [0/2] met", "unisono [0/2] careful"], "True 20"),
        ("warning", "logging.getLogger('unisono').setLevel('ERROR')", [], "False 40"),
    ],
)
def test_logging_module_is_loaded_by_the_first_shown_message(level: str, then: str, expected: list[str], ends: str):
    code = SILENT.format(level=level, then=then)
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert (completed.stderr.splitlines(), completed.stdout.strip()) == (expected, ends)
