"""The rules of the layers, checked by the imports of every file, including those inside functions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S
from support.source_imports import imports

import unisono

ROOT = Path(__file__).resolve().parents[2]
# The modules at the bottom, below all layers.
_FOUNDATION = "unisono.foundation"
VOCABULARY = (
    *("unisono.errors", "unisono.dtypes", "unisono.operations", "unisono.options"),
    *(f"{_FOUNDATION}.{name}" for name in ("autograph", "deadlines", "html_page", "installing", "json_checks", "log")),
    *(f"{_FOUNDATION}.{name}" for name in ("near_names", "printable", "records", "uncopyable")),
)
# The modules for processes, their children, streams and sockets, which any layer with I/O may import.
OF_PROCESSES = tuple(f"{_FOUNDATION}.{name}" for name in ("forks", "once", "processes", "program", "streams", "wire"))
_OUTSIDE = ("unisono.foundation.entry_points", "typing_extensions.dataclass_transform")
LAYERS = ("algorithms", "bench", "collectives", "frameworks", "transports", "tuning")
# The rooms of the facade, from the top to the bottom: each may import the rooms below it. Only the command line may
# import the benchmarks.
ROOMS = ("cli", "testing", "compat", "launchers", "postmortem", "swarm")
PUBLIC = tuple(f"unisono.{name}" for name in unisono.__all__)

# For each folder, the parts of Unisono that its files may import, with everything inside these parts.
ALLOWED = {
    "algorithms": ("unisono.algorithms", *VOCABULARY),
    "tuning": ("unisono.tuning", "unisono.algorithms", *VOCABULARY),
    "transports": ("unisono.transports", "unisono.algorithms", *VOCABULARY, *OF_PROCESSES),
    "collectives": (
        *("unisono.collectives", "unisono.tuning", "unisono.transports", "unisono.algorithms"),
        *VOCABULARY,
        *OF_PROCESSES,
    ),
    "frameworks": ("unisono.frameworks", "unisono.arrays", "unisono.xla_programs", *PUBLIC, *VOCABULARY),
    "bench": ("unisono.bench", "unisono.compat", "unisono.jax", *PUBLIC, *VOCABULARY, *OF_PROCESSES),
    "examples": (*PUBLIC, "unisono.jax", "unisono.keras", "unisono.tensorflow", "unisono.torch", "unisono.compat"),
}

# For each file, the modules and names that it may import beyond the rule of its folder, and the reason.
EXCEPTIONS = {
    "algorithms/catalogue/flat.py": {
        "unisono.foundation.entry_points.entry_points": "installed packages may have algorithms; they come in here",
    },
    "algorithms/schedules/msccl.py": {
        "defusedxml.DefusedXmlException": "schedules of MSCCL are XML, which only this package reads safely",
        "defusedxml.ElementTree.fromstring": "the same",
    },
    "bench/programs/algorithms.py": {
        "unisono.algorithms.catalogue.registry": "all algorithms are what is measured",
        "unisono.collectives.measurement.call_trials": "it runs calls that take turns, as the tuner does",
        "unisono.tuning.measure.race": "the typical time of a call, as the tuner takes it",
    },
    "bench/programs/memory.py": {
        "unisono.transports._core": "a rank of many peers is simulated by channels that lead back to it",
        "unisono.transports.host.sealed_memory.sealed_memory": "the memory of those channels",
    },
    "bench/variants.py": {
        "unisono.algorithms.catalogue": "benchmarks check the names of algorithms before their ranks start",
    },
    "bench/wide_area.py": {
        "unisono.transports.core_path": "the program that carries packets lies beside the native core",
    },
    "frameworks/arrays.py": {
        "unisono.transports._core": "all ranks must compute the same bits; no user needs what sets the mode",
    },
    "frameworks/sparse_sums.py": {
        "unisono.collectives.calls.serial_queue.SerialQueue": "sums in flight have the same order on all ranks",
    },
    "frameworks/jax/mpi_library.py": {
        "unisono.transports.core_path": "the library that XLA takes for MPI lies beside the native core",
    },
    "frameworks/gradients/blocks.py": {
        **dict.fromkeys(
            [f"unisono.transports.reductions.wire_formats.{name}" for name in ("from_wire", "to_wire", "wire_nbytes")],
            "only gradients travel in these forms; whoever only calls collectives has no use for them",
        ),
    },
    "frameworks/gradients/compression.py": {
        **dict.fromkeys(
            [f"unisono.transports.reductions.wire_formats.{name}" for name in ("from_wire", "to_wire")], "as above"
        ),
    },
    "frameworks/outer/swarm_sums.py": {
        "unisono.transports.reductions.wire_formats.to_wire": "as above",
    },
    "frameworks/gradients/on_device.py": {
        "unisono.collectives.device": "buckets lie in memory of a GPU, between calls whose arrays no user sees",
        "unisono.collectives.arrays.device_detection": "a gradient may be on a GPU or on the host",
        "unisono.transports.cuda": "kernels pack, quantise and unpack there; no user needs them",
    },
    "frameworks/gradients/bucket_comms.py": {
        "unisono.collectives.device.workspace.Workspace": "as above",
    },
    "frameworks/gradients/step_memory.py": {
        "unisono.collectives.device.workspace": "as above",
        "unisono.transports.cuda.device.DeviceCopy": "as above",
    },
    "frameworks/gradients/reducer.py": {
        "unisono.transports.recorder.traces.add_source": "a trace of the calls of a rank shows its training steps too",
    },
    "examples/ray_actors.py": {
        "unisono.launchers.ray": "the launcher of Ray is not imported by the package, because it needs Ray",
    },
    "examples/dask_sort.py": {
        "unisono.launchers.dask": "the launcher of Dask is not imported by the package, because it needs Dask",
    },
    "transports/message/plugin_loading.py": {
        "unisono.foundation.entry_points.entry_points": "installed packages may have transports; they come in here",
    },
    "examples/socket_transport.py": {
        **dict.fromkeys(
            [f"unisono.transports.{name}" for name in ("Bootstrap", "FramedTransport")],
            "what a transport is written with",
        ),
    },
    "collectives/calls/job_trials.py": {
        "unisono.__version__": "measurements say which version they are of",
    },
    "transports/rendezvous/roster.py": {
        "unisono.__version__": "ranks of different versions must not meet",
    },
    "bench/programs/compression.py": {
        "unisono.frameworks.gradients": "the cost of one part of a reduction is measured, without its collectives",
        "unisono.frameworks.sparse_sums.SparseSums": "a reduction takes it",
    },
    "bench/studies/sparse_sums.py": {
        "unisono.frameworks.sparse_sums": "the bytes of each way are counted, which users do not choose",
    },
    "bench/gpu_stages/gpu.py": {
        "unisono.transports.cuda": "kernels are what is measured, of which the public names tell nothing",
    },
    "bench/gpu_stages/speeds/hosts.py": {
        "unisono.collectives.calls.planning.HostLayout": "no public name makes ranks count as those of several hosts",
    },
    "bench/gpu_stages/speeds/issue.py": {
        "unisono.transports.cuda": "no public name switches off the native code that is measured",
    },
    "bench/gpu_stages/speeds/kernels.py": {
        "unisono.transports.cuda": "as above",
        "unisono.transports.reductions.definition": "what results of kernels are compared with",
    },
    "bench/gpu_stages/checks/machine.py": {
        "unisono.cli": "it describes a machine without a calibration as `unisono doctor` does",
    },
    "bench/gpu_stages/speeds/routes.py": {
        "unisono.algorithms.catalogue.on_devices": "the ways that are measured",
        "unisono.algorithms.catalogue.vendors.NCCL_NATIVE": "as above",
        "unisono.transports.nccl.collectives.SHARED_GPU_VARIABLE": "NCCL refuses ranks that share a GPU without it",
        "unisono.tuning": "the stage writes a decision table, which no public name does",
    },
    "bench/gpu_stages/checks/nccl_alone.py": {
        "unisono.algorithms.catalogue.vendors.NCCL_NATIVE": "the name of what carries out the calls",
    },
    "bench/gpu_stages/checks/probes.py": {
        "unisono.transports.cuda": "the driver is what is asked",
    },
    "bench/gpu_stages/checks/sanitizer.py": {
        "unisono.transports.cuda": "kernels are what is run",
        "unisono.transports.reductions.definition": "what results of kernels are compared with",
    },
    "bench/gpu_stages/speeds/threads.py": {
        "unisono.transports.contracts": "what the transport takes",
        "unisono.transports.cuda": "ranks that are threads of one process share a GPU; a launcher makes only processes",
        "unisono.transports.executors.generic": "as above",
        "unisono.transports.message.local": "as above",
    },
    "bench/gpu_stages/speeds/variants.py": {
        "unisono.transports.cuda": "kernels are what is measured",
        "unisono.transports.reductions.definition": "the dtypes of the arrays on which they run",
    },
    "bench/studies/regret_rank.py": {
        "unisono.collectives.measurement.link_probes": "the bench evaluates the model, calibrated in its job",
        "unisono.collectives.measurement.call_trials": "it sends the distance of cores to all ranks",
        "unisono.tuning.decide.choice": "as above",
        "unisono.tuning.machine.parameters": "as above",
    },
    "bench/studies/host_orders.py": {
        "unisono.tuning.decide.host_order": "orders of hosts are what is compared",
        "unisono.tuning.machine.map_topology": "the simulator is what is compared with the network",
        "unisono.tuning.machine.network_map": "as above",
        "unisono.tuning.simulator": "as above",
        "unisono.algorithms.catalogue.registry": "the algorithms that are simulated",
    },
    "bench/studies/selection.py": {
        "unisono.tuning.decide.rank_interpolation": "the bench evaluates it on recorded times",
        "unisono.algorithms.catalogue.registry": "the closed forms of the algorithms that were measured",
        "unisono.algorithms.catalogue.algorithm": "as above",
    },
    "bench/studies/mixture.py": {
        "unisono.tuning.measure.measurement_log": "the bench compares tables of recorded times",
        "unisono.tuning.decide.table": "as above",
    },
    "bench/studies/replay.py": {
        "unisono.tuning.measure.calibrate": "the bench evaluates campaign and model",
        "unisono.tuning.measure.campaign": "as above",
        "unisono.tuning.decide.choice": "as above",
        "unisono.tuning.machine.parameters": "as above",
        "unisono.tuning.measure.measurement_log": "as above",
        "unisono.tuning.decide.table": "as above",
        "unisono.algorithms.catalogue.variants": "the names of what was recorded",
    },
    "bench/studies/contention.py": {
        "unisono.tuning.machine.parameters": "the simulator is what is tried",
        "unisono.tuning.machine.placed_topology.PlacedTopology": "as above",
        "unisono.tuning.machine.topology": "as above",
        "unisono.tuning.simulator.simulate": "as above",
        "unisono.algorithms.catalogue.registry": "the algorithms that are simulated",
    },
    "bench/studies/cluster.py": {
        "unisono.algorithms.catalogue.registry": "which algorithms it simulates",
        "unisono.tuning": "the descriptions and the simulator that it compares with measurements",
    },
    "bench/studies/scaling.py": {
        "unisono.tuning.machine.parameters": "the simulator is what is tried",
        "unisono.tuning.simulator.simulate": "as above",
        "unisono.tuning.machine.topology": "as above",
        "unisono.tuning.simulator.training": "as above",
        "unisono.algorithms.catalogue.registry": "the algorithms that are simulated",
    },
    "bench/studies/regret.py": {"unisono.transports.host.core_distance": "which placements there are to ask for"},
    "bench/driver.py": {
        "unisono.transports.host.core_distance": "native threads measure the latency",
    },
    "bench/studies/campaign.py": {
        "unisono.collectives.calls.verification.SAME_EVERYWHERE": "of which calls a damaged result must be detected",
    },
    "bench/studies/trial_ranks.py": {
        "unisono.collectives.calls.verification": "a trial damages the result of a call there",
    },
}

# With these modules, an algorithm could do more than compute a plan.
IMPURE = {
    "asyncio",
    "concurrent",
    "ctypes",
    "io",
    "logging",
    "mmap",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
}

FILES = sorted(path for folder in ALLOWED for path in (ROOT / folder).rglob("*.py"))
FACADE = sorted(path for path in (ROOT / "unisono").rglob("*.py") if path.resolve().is_relative_to(ROOT / "unisono"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_inside(name: str, parts: tuple[str, ...]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def violations(folder: str, source: str, exceptions: Iterable[str] = ()) -> list[str]:
    allowed = tuple(exceptions)
    return [name for name in imports(source) if not is_inside(name, allowed) and not is_permitted(folder, name)]


def is_permitted(folder: str, name: str) -> bool:
    top = name.partition(".")[0]
    if top == "":
        return False  # a relative import
    if top == "unisono":
        return is_inside(name, ALLOWED[folder]) or (name == "unisono" and folder in ("bench", "examples", "frameworks"))
    if folder == "algorithms":
        return top in sys.stdlib_module_names and top not in IMPURE
    return top not in LAYERS


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_file_imports_only_modules_allowed_for_its_layer(path: Path) -> None:
    exceptions = EXCEPTIONS.get(name_of(path), {})
    assert violations(path.relative_to(ROOT).parts[0], path.read_text(), exceptions) == []


def rooms_above(room: str) -> tuple[str, ...]:
    """Return the modules that the files of a room of the facade must not import."""
    above = tuple(f"unisono.{name}" for name in ROOMS[: ROOMS.index(room)])
    return above if room == "cli" else (*above, "unisono.bench")


@pytest.mark.parametrize("room", ROOMS)
def test_room_of_the_facade_imports_only_rooms_below_it(room: str) -> None:
    files = [path for path in FACADE if path.relative_to(ROOT / "unisono").parts[0] == room]
    assert files
    wrong = {(name_of(path), name) for path in files for name in imports(path.read_text())}
    assert [arrow for arrow in sorted(wrong) if is_inside(arrow[1], rooms_above(room))] == []


def test_native_core_is_imported_only_from_its_package() -> None:
    """`from unisono.transports._core import x` would fail without advice if the core is missing."""
    names = {(name_of(path), name) for path in (*FILES, *FACADE) for name in imports(path.read_text())}
    assert [arrow for arrow in sorted(names) if arrow[1].startswith("unisono.transports._core.")] == []


@pytest.mark.parametrize("name", [part.partition(".")[2] for part in (*VOCABULARY, *OF_PROCESSES)])
def test_vocabulary_imports_only_itself_and_the_standard_library(name: str) -> None:
    source = (ROOT / "unisono" / f"{name.replace('.', '/')}.py").read_text()
    foreign = [
        imported
        for imported in imports(source)
        if not is_inside(imported, (*VOCABULARY, *OF_PROCESSES, *_OUTSIDE))
        and imported.partition(".")[0] not in sys.stdlib_module_names
    ]
    assert foreign == []


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("algorithms", "import numpy"),
        ("algorithms", "import socket"),
        ("algorithms", "def build():\n    from time import sleep"),
        ("algorithms", "from unisono.transports import contracts"),
        ("algorithms", "from unisono import Communicator"),
        ("algorithms", "from .plan import Plan"),
        ("tuning", "from unisono.transports.contracts.call import Call"),
        ("tuning", "def race():\n    import unisono.collectives.bootstrap.init"),
        ("transports", "from unisono.tuning import choice"),
        ("transports", "from unisono.collectives.communicator import Communicator"),
        ("collectives", "from unisono.frameworks import torch"),
        ("collectives", "from transports.contracts.call import Call"),
        ("frameworks", "from unisono.transports import _core"),
        ("examples", "from unisono.collectives.bootstrap.init import init"),
    ],
)
def test_layer_check_reports_a_forbidden_import(folder: str, source: str) -> None:
    assert len(violations(folder, source)) == 1


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("algorithms", "from unisono.errors import PlanError"),
        ("transports", "from unisono.transports import _core"),
        ("collectives", "from unisono.tuning.select import choose"),
        ("examples", "import numpy\nimport unisono as un\nfrom unisono import PeerLostError"),
    ],
)
def test_layer_check_accepts_an_allowed_import(folder: str, source: str) -> None:
    assert violations(folder, source) == []


def test_every_layer_exception_is_used_and_has_a_reason() -> None:
    for name, exceptions in EXCEPTIONS.items():
        modules = list(imports((ROOT / name).read_text()))
        for exception, reason in exceptions.items():
            assert reason
            assert any(is_inside(imported, (exception,)) for imported in modules), (name, exception)


@pytest.mark.parametrize("folder", LAYERS)
def test_a_folder_is_reached_through_a_relative_link(folder: str) -> None:
    link = ROOT / "unisono" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"


@pytest.mark.parametrize("module", ["unisono", *VOCABULARY, "unisono.algorithms"])
def test_importing_a_lower_layer_loads_neither_numpy_nor_the_native_core(module: str) -> None:
    code = (
        f"import sys, {module}; print(*sorted({{'numpy', 'ml_dtypes', 'unisono.transports._core'}} & set(sys.modules)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert process.stdout.split() == []


def test_every_module_of_the_algorithms_is_free_of_numpy() -> None:
    paths = sorted((ROOT / "algorithms").rglob("[a-z]*.py"))
    modules = [f"unisono.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}" for path in paths]
    code = f"import sys, {', '.join(modules)}; print('numpy' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert process.stdout.strip() == "False"


def test_facade_has_every_public_name_and_refuses_unknown_ones() -> None:
    assert set(unisono.__all__) <= set(dir(unisono))
    assert unisono.UsageError is unisono.errors.UsageError
    with pytest.raises(AttributeError, match="has no attribute 'allreduse'"):
        _ = unisono.allreduse
