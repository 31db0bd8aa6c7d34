"""XLA's own collectives between processes, carried out by Unisono: results, failures, and wrong order of imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S

from unisono.frameworks.jax import mpi_library

pytest.importorskip("jax", reason="make jax installs what these tests need")

BEGIN = """
import sys
import unisono.jax as uj
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

world = uj.use_for_xla()
size, rank = world.size, world.rank
mesh = Mesh(np.array(jax.devices()), ("i",))

def sharded(whole, spec=P("i"), mesh=mesh):
    return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda index: whole[index])

def local(array):
    return np.asarray(array.addressable_data(0))

def over(mesh, fn, spec=P("i"), out=P("i")):
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=out))
"""

COLLECTIVES = (
    BEGIN
    + """
for dtype in ("float32", "int32", "uint8", "complex64"):
    whole = np.arange(size * 24).astype(dtype)
    parts = whole.reshape(size, -1)
    x = sharded(whole)
    assert (local(over(mesh, lambda x: jax.lax.psum(x, "i"), out=P())(x)) == parts.sum(0).astype(dtype)).all()
    assert (local(over(mesh, lambda x: jax.lax.all_gather(x, "i", tiled=True), out=P("i"))(x)) == whole).all()
    rolled = over(mesh, lambda x: jax.lax.ppermute(x, "i", [(k, (k + 1) % size) for k in range(size)]))(x)
    assert (local(rolled) == parts[(rank - 1) % size]).all()
    scattered = local(over(mesh, lambda x: jax.lax.psum_scatter(x, "i", tiled=True))(x))
    assert (scattered == parts.sum(0).astype(dtype).reshape(size, -1)[rank]).all()
    exchanged = local(over(mesh, lambda x: jax.lax.all_to_all(x.reshape(size, -1), "i", 0, 0))(x))
    assert (exchanged.reshape(size, -1) == parts.reshape(size, size, -1)[:, rank]).all()

largest = over(mesh, lambda x: (jax.lax.pmax(x, "i"), jax.lax.pmin(x, "i")), out=P())
assert [int(local(each)[0]) for each in largest(sharded(np.arange(size)))] == [size - 1, 0]

# XLA adds collectives to a product of sharded matrices, and makes communicators of the rows and columns of a mesh.
square = np.arange(64.0, dtype=np.float32).reshape(8, 8)
product = jax.jit(lambda x: x @ x, out_shardings=NamedSharding(mesh, P()))(sharded(square, P("i", None)))
assert np.allclose(local(product), square @ square)
if size == 4:
    grid = Mesh(np.array(jax.devices()).reshape(2, 2), ("row", "column"))
    x = sharded(np.arange(4.0), P(("row", "column")), grid)
    for axis, sums in (("row", [2, 4, 2, 4]), ("column", [1, 1, 5, 5])):
        total = over(grid, lambda x: jax.lax.psum(x, axis), P(("row", "column")), P(("row", "column")))(x)
        assert local(total)[0] == sums[rank], (axis, rank)

def loss(w, x):
    return ((x * w) ** 2).sum()

x = sharded(np.arange(size * 4.0))
gradient = jax.jit(jax.grad(loss))(2.0, x)
assert float(gradient) == float((4.0 * np.arange(size * 4.0) ** 2).sum())
calls = {call.collective for call in world.stats().calls}
print("right", flush=True)
"""
)

FAILURE = (
    BEGIN
    + """
import os, signal, time
add, gather = over(mesh, lambda x: jax.lax.psum(x, "i"), out=P()), over(mesh, lambda x: jax.lax.all_gather(x, "i"))
x = sharded(np.ones(4 * size))
add(x).block_until_ready()
fault = sys.argv[1]
try:
    for step in range(20):
        if (step, rank) == (10, 1):
            if fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "raise":
                raise ArithmeticError("planted")
            elif fault == "disagree":
                gather(x).block_until_ready()
            else:
                time.sleep(3)
                os._exit(0)
        add(x).block_until_ready()
except (jax.errors.JaxRuntimeError, ValueError) as error:
    print("raised", str(error).replace("\\n", " "), flush=True)
    raise SystemExit(3)
"""
)


def run(program: str, ranks: int, *arguments: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    file = folder / "program.py"
    file.write_text(program)
    command = [sys.executable, "-m", "unisono", "run", "--keep-going", "-n", str(ranks), str(file), *arguments]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=env)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_collectives_of_xla_have_right_results(ranks: int, tmp_path: Path) -> None:
    done = run(COLLECTIVES, ranks, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("right") == ranks


@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        ("die", ["PeerLostError: rank 1 died"]),
        ("raise", ["PeerLostError: rank 1 has left: ArithmeticError: planted"]),
        ("disagree", ["MismatchError", "rank 1 called allgather"]),
        ("sleep", ["CollectiveTimeoutError", "in call #11 allreduce"]),
    ],
)
def test_failure_is_an_error_of_jax_on_every_other_process(fault: str, texts: list[str], tmp_path: Path) -> None:
    done = run(FAILURE, 3, fault, folder=tmp_path, UNISONO_TIMEOUT_S="1" if fault == "sleep" else "30")
    raised = [line for line in done.stdout.splitlines() if "raised" in line]
    assert len(raised) >= 2, done.stderr
    assert all(text in line for line in raised for text in texts), raised
    assert "exited with code 3" in done.stderr


def test_jax_must_not_be_imported_before(tmp_path: Path) -> None:
    done = run("import jax\nimport unisono.jax as uj\nuj.use_for_xla()", 1, folder=tmp_path)
    assert "UsageError: JAX was imported before unisono.jax" in done.stderr


def test_jax_must_not_be_used_before(tmp_path: Path) -> None:
    done = run("import unisono.jax as uj\nimport jax\njax.devices()\nuj.use_for_xla()", 1, folder=tmp_path)
    assert "UsageError: JAX has already been used in this process" in done.stderr


def test_another_mpi_library_is_respected(tmp_path: Path) -> None:
    other = shutil.copy(mpi_library.path(), tmp_path / "libmpiwrapper.so")
    program = "import unisono.jax as uj\nuj.use_for_xla()"
    done = run(program, 1, folder=tmp_path, MPITRAMPOLINE_LIB=str(other))
    assert f"UsageError: MPITRAMPOLINE_LIB names another MPI library, {other}: unset it" in done.stderr
