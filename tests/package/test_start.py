"""The modules that a rank loads until its first result. They take most of the time in which it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.deadlines import DEADLINE_S

FIRST_RESULT = """
import sys
import numpy as np

before = {*sys.modules}

import unisono as un

with un.init() as world:
    x = np.ones(4, np.float32)
    world.allreduce(x, out=x)
"""

# Modules of Python, of packages and of Unisono that only some calls need, or only programs with an error.
UNUSED = (
    *("asyncio", "concurrent", "difflib", "email", "importlib.metadata", "multiprocessing", "ssl", "sqlite3"),
    *("heapq", "ipaddress", "pathlib", "urllib"),
    *("click", "ifaddr", "ml_dtypes", "numpy.typing", "rich"),
    *(
        "unisono.algorithms.verifier.verify",
        "unisono.algorithms.catalogue.registration",
        "unisono.algorithms.composition.hierarchical",
    ),
    "unisono.algorithms.verifier.block_meaning",
    *("unisono.cli", "unisono.frameworks", "unisono.launchers", "unisono.testing"),
    *(
        "unisono.collectives.arrays.typing",
        "unisono.collectives.custom_ops.reducer",
        "unisono.collectives.arrays.dlpack",
    ),
    *("unisono.collectives.calls.group_recorder", "unisono.collectives.calls.statistics"),
    *(
        "unisono.collectives.bootstrap.shrink",
        "unisono.collectives.bootstrap.grow",
        "unisono.collectives.bootstrap.join",
        "unisono.collectives.bootstrap.plugin_transport",
        "unisono.collectives.measurement.call_trials",
    ),
    *(
        "unisono.transports.cuda",
        "unisono.transports.executors.generic",
        "unisono.transports.mpi.messenger",
        "unisono.transports.ucx.library",
    ),
    *("unisono.transports.rendezvous.file_store", "unisono.transports.rendezvous.torch_store"),
    *(
        "unisono.tuning.measure.calibrate",
        "unisono.tuning.simulator.event_model",
        "unisono.tuning.simulator.simulate",
        "unisono.tuning.measure.measurement_log",
    ),
    *(
        "unisono.transports.links.joiners",
        "unisono.transports.links.survivors",
        "unisono.tuning.decide.forced_rules",
        "unisono.tuning.decide.table",
        "unisono.tuning.machine.topology",
    ),
)
LOADED = f"""
def is_in(name, part):
    return name == part or name.startswith(part + ".")

loaded = sys.modules.keys() - before
print(*(part for part in {UNUSED!r} if any(is_in(name, part) for name in loaded)))
"""

LACKED = """
    x = un.empty(2, "bfloat16")
    x[...] = 3
    print(x.dtype, world.allreduce(x).sum())

    import ml_dtypes

    x = np.full(2, 3, ml_dtypes.float8_e5m2)
    print(x.dtype, world.allreduce(x).sum())
"""

COMPILED = """
from dataclasses import is_dataclass

modules = [module for name, module in list(sys.modules.items()) if name.startswith("unisono.")]
classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
made = [kind for kind in classes if is_dataclass(kind) and kind.__module__.startswith("unisono.")]
assert len(made) > 40, "classes are looked for where they are not"
print(*sorted(kind.__qualname__ for kind in made if kind.__init__.__module__ != "unisono.foundation.records"))
"""


def printed(program: str, folder: Path) -> list[str]:
    """Return the words that a program of one rank prints. No calibration of the machine exists."""
    completed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={"XDG_CACHE_HOME": str(folder), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (completed.returncode, completed.stderr) == (0, "")
    return completed.stdout.split()


def test_first_result_loads_no_unneeded_module(tmp_path: Path) -> None:
    assert printed(FIRST_RESULT + LOADED, tmp_path) == []


def test_ml_dtypes_work_by_name_and_on_an_existing_communicator(
    tmp_path: Path,
) -> None:
    assert printed(FIRST_RESULT + LACKED, tmp_path) == ["bfloat16", "6", "float8_e5m2", "6"]


WITHOUT_TOKENIZER = """
import tokenize

def refuse(*_, **__):
    raise AssertionError("the first use of Python's tokenizer compiles its pattern, which takes milliseconds")

tokenize.tokenize = tokenize.generate_tokens = refuse
"""


def test_first_result_tokenizes_nothing(tmp_path: Path) -> None:
    assert printed("import numpy\n" + WITHOUT_TOKENIZER + FIRST_RESULT, tmp_path) == []


def test_first_result_compiles_no_data_classes(tmp_path: Path) -> None:
    assert printed(FIRST_RESULT + COMPILED, tmp_path) == []
