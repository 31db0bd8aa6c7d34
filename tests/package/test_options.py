"""Settings are checked in the same way, whatever their source.

Variables that are no settings are ignored or warned about.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.options import FIELDS, unknown_variables

NAN, INFINITY = math.nan, math.inf
REFUSED: dict[str, tuple[Any, ...]] = {
    "log": ("loud", "", None, 3),
    "timeout_s": (0, -1.0, NAN, -INFINITY, None, "30", True, 1j),
    "rendezvous_timeout_s": (0, -1, NAN, None, "5"),
    "heartbeat_timeout_s": (0, -3, NAN, None),
    "transports": (None, 3, (3,), "pigeon"),
    "algorithm": (None, "", " ", 3),
    "table": (None, 5, b"table.json", True, "on", "Off", " yes "),
    "tune": (None, 5, b"table.json", True, "on", "Off", " yes "),
    "load": (None, 5, ["own.py"], "1"),
    "segment_nbytes": (-5, 1.5, None, "64K", True, 1 << 63),
    "bind_address": (None, "", 7),
    "tcp_streams": (0, 17, -1, None, 2.5, "2", True),
    "tcp_checksum": ("maybe", None, 1),
    "gpu_blocks": (-1, None, 2.5, "2", True, 1 << 63),
    "verify_results": ("maybe", None, 1),
    "tls": ("maybe", "", None, True),
    "tls_certificate": (None, 5, b"certificate.pem", "on"),
    "tls_key": (None, 5, b"key.pem", "on"),
    "tls_authority": (None, 5, b"authority.pem", "on"),
    "trace_groups": ("maybe", None, 1),
    "warn_after_s": (0, -1, NAN, None, "5"),
    "recorded_calls": (-1, 100_001, None, 2.5, "2", True),
    "dump": (None, 5, b"dumps", "on", "0", "false"),
    "trace": (None, 5, b"traces", "on", "0", "false"),
    "metrics": (None, 5, b"metrics", "on", "0", "false"),
    "stats": (None, 5, b"stats", "on", "0", "false"),
}
TAKEN: dict[str, tuple[Any, Any]] = {
    "log": ("INFO", "info"),
    "timeout_s": (INFINITY, INFINITY),
    "rendezvous_timeout_s": (10**400, INFINITY),
    "heartbeat_timeout_s": (1, 1.0),
    "transports": (["SHM", "tcp"], "shm,tcp"),
    "algorithm": ("ring", "ring"),
    "table": (Path("table.json"), "table.json"),
    "tune": (Path("table.json"), "table.json"),
    "load": ("own.py:other.py", "own.py:other.py"),
    "segment_nbytes": (0, 0),
    "bind_address": ("eth0", "eth0"),
    "tcp_streams": (16, 16),
    "tcp_checksum": (True, True),
    "gpu_blocks": (16, 16),
    "verify_results": (True, True),
    "tls": ("ON", "on"),
    "tls_certificate": ("", ""),
    "tls_key": ("", ""),
    "tls_authority": ("", ""),
    "trace_groups": (True, True),
    "warn_after_s": (INFINITY, INFINITY),
    "recorded_calls": (0, 0),
    "dump": (Path("dumps"), "dumps"),
    "trace": (Path("traces"), "traces"),
    "metrics": (Path("metrics"), "metrics"),
    "stats": (Path("stats"), "stats"),
}
# Kubernetes sets these variables in every container of a namespace with services "unisono" and "unisono-store".
OF_KUBERNETES = {
    f"{service}_{name}": value
    for service in ("UNISONO", "UNISONO_STORE")
    for name, value in {
        "SERVICE_HOST": "10.96.14.3",
        "SERVICE_PORT": "29400",
        "SERVICE_PORT_HTTP_ALT": "29400",
        "PORT": "tcp://10.96.14.3:29400",
        "PORT_29400_TCP": "tcp://10.96.14.3:29400",
        "PORT_29400_TCP_PROTO": "tcp",
        "PORT_29400_UDP_PORT": "29400",
        "PORT_29400_TCP_ADDR": "10.96.14.3",
    }.items()
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_invalid_option_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(un.UsageError, match=rf"{name}=.* cannot be used: it must be "):
        un.Options(**{name: value})


@pytest.mark.parametrize("name", TAKEN)
def test_option_is_normalized_to_one_form(name: str) -> None:
    value, kept = TAKEN[name]
    result = getattr(un.Options(**{name: value}), name)
    assert (result, type(result)) == (kept, type(kept))


def test_every_option_has_refused_and_accepted_test_values() -> None:
    assert set(REFUSED) == set(TAKEN) == set(FIELDS)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", ""])
def test_environment_variable_is_checked_like_its_option(text: str) -> None:
    with pytest.raises(un.UsageError, match=r"UNISONO_TIMEOUT_S=.*a positive number of seconds"):
        un.Options.from_environment({"UNISONO_TIMEOUT_S": text})


@pytest.mark.parametrize("word", ["on", "ON", "1", "true", "yes", "off", "0", "false", "no"])
def test_word_that_switches_is_no_path_in_a_variable_and_a_value_of_a_switch(word: str) -> None:
    with pytest.raises(un.UsageError, match=rf"UNISONO_TUNE='{word}' cannot be used: it must be a path.* \./{word}$"):
        un.Options.from_environment({"UNISONO_TUNE": word})
    assert un.Options.from_environment({"UNISONO_TUNE": f"./{word}"}).tune == f"./{word}"
    is_on = un.Options.from_environment({"UNISONO_TCP_CHECKSUM": word}).tcp_checksum
    assert is_on == (word.lower() in ("on", "1", "true", "yes"))


def test_variables_of_kubernetes_are_ignored() -> None:
    assert list(unknown_variables(OF_KUBERNETES)) == []
    assert un.Options.from_environment(OF_KUBERNETES) == un.Options()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("UNISONO_LOGG", "did you mean UNISONO_LOG?"),
        ("UNISONO_QUANTUM_LINKS", "`unisono doctor` lists the settings"),
        ("UNISONO_PORT_29400_TCP_NAME", ""),
    ],
)
def test_unknown_unisono_variable_is_named_with_a_hint(name: str, hint: str) -> None:
    (sentence,) = unknown_variables({**OF_KUBERNETES, name: "1"})
    assert sentence.startswith(f"{name} is not a setting of this version of Unisono")
    assert hint in sentence


def test_unknown_unisono_variable_warns_once_and_the_program_runs(tmp_path: Path) -> None:
    program = "import unisono as un\nfor _ in range(2): un.init().close()"
    completed = subprocess.run(
        [sys.executable, "-c", program],
        env={"UNISONO_LOGG": "info", **OF_KUBERNETES, "PATH": "", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (completed.returncode, completed.stdout) == (0, "")
    assert completed.stderr.splitlines() == [
        "unisono [0/1] UNISONO_LOGG is not a setting of this version of Unisono and is ignored; "
        "did you mean UNISONO_LOG?"
    ]


# --- where a setting comes from --------------------------------------------------------------------------------------


def test_setting_comes_from_the_program_else_its_variable_else_its_default() -> None:
    environ = {"UNISONO_TIMEOUT_S": "30", "UNISONO_DUMP": "dumps", "UNISONO_LOG": "info"}
    options = un.Options(timeout_s=4, log="warning").resolved(environ)
    assert (options.timeout_s, options.dump, options.log, options.trace) == (4.0, "dumps", "warning", "")
    assert options.resolved({}) == options


def test_variable_of_a_setting_that_the_program_passes_is_not_read() -> None:
    assert un.Options(timeout_s=4).resolved({"UNISONO_TIMEOUT_S": "never"}).timeout_s == 4.0


@pytest.mark.parametrize("copied", [lambda o: pickle.loads(pickle.dumps(o)), copy.deepcopy, dataclasses.replace])
def test_copy_of_options_keeps_which_settings_were_passed(copied: Any) -> None:
    options = copied(un.Options(timeout_s=4, tcp_streams=1))
    assert options.passed == {"timeout_s", "tcp_streams"}
    assert dataclasses.replace(options, dump="here").passed == {"timeout_s", "tcp_streams", "dump"}


def test_setting_that_does_not_exist_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match=r"no setting 'transport'; did you mean transports\?"):
        un.Options(transport="tcp")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"no setting 'timeout'; did you mean timeout_s\?"):
        un.init(timeout=4)


PROGRAM = """
import sys, unisono as un
with un.init(un.Options(timeout_s=9), warn_after_s=5) as world:
    print(world.rank, world._options.timeout_s, world._options.warn_after_s, world._options.tcp_streams)
    if world.rank == 1:
        sys.exit("ends early")
    world.barrier()
"""


def test_operator_turns_dumps_on_in_a_program_that_passes_other_options(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = {**os.environ, "UNISONO_DUMP": str(tmp_path / "dumps"), "UNISONO_TIMEOUT_S": "3"}
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", "program.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, text=True, capture_output=True, timeout=DEADLINE_S, check=False
    )
    assert "0 9.0 5.0 1" in done.stdout, done.stderr
    assert list((tmp_path / "dumps").iterdir()), done.stderr


def test_advice_names_the_option_that_hides_the_variable() -> None:
    of_program, of_variable = un.Options(algorithm="rnig"), un.Options().resolved({"UNISONO_ALGORITHM": "rnig"})
    for options, place in ((of_program, "option algorithm of the program"), (of_variable, "UNISONO_ALGORITHM")):
        with un.init(options) as world, pytest.raises(un.UsageError, match=place):
            world.allreduce(np.ones(2))


def test_wrong_keyword_of_a_call_is_refused_with_the_nearest_name() -> None:
    with un.init() as world:
        for call in (world.allreduce, world.broadcast, world.sendrecv, world.barrier):
            with pytest.raises(TypeError, match=r"\(\) has no argument 'timeout'; did you mean timeout_s\?"):
                call(timeout=3)
        computed = "".join(["timeout", "_s"])
        assert world.allreduce(np.ones(1), **{computed: 5})[0] == 1


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 18 + "G"])
def test_number_of_bytes_beyond_64_bits_is_refused_in_words(text: str) -> None:
    with pytest.raises(un.UsageError, match=r"UNISONO_SEGMENT_NBYTES=.* must be a positive number of bytes"):
        un.Options.from_environment({"UNISONO_SEGMENT_NBYTES": text})


def test_setting_counts_as_set_when_the_program_a_variable_or_rank_0_has_set_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert un.Options(tcp_streams=1).sets("tcp_streams")
    assert un.Options().adopting({"tcp_streams": 3}).sets("tcp_streams")
    assert not un.Options(timeout_s=5).adopting({"tcp_streams": 1}).sets("tcp_streams")
    monkeypatch.setenv("UNISONO_TCP_STREAMS", "1")
    assert un.Options().sets("tcp_streams")
