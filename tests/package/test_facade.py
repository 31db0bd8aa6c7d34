"""The public names in `help`, `dir`, notebooks and editors, and the errors for wrong names."""

from __future__ import annotations

import importlib.util
import inspect
import operator
import pydoc
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import unisono as un
from unisono.collectives.api.mpi_names import INSTEAD

X = np.ones(3)


@pytest.fixture
def world() -> Iterator[un.Communicator]:
    with un.init() as world:
        yield world


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name == "unisono.torch" or name.startswith("unisono.frameworks.torch")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(vars(un), "torch", raising=False)  # another test of this process may have imported it
    monkeypatch.setitem(sys.modules, "torch", None)  # `import torch` raises ModuleNotFoundError


def help_of(thing: object) -> str:
    return pydoc.plain(pydoc.render_doc(thing))


@pytest.mark.parametrize("name", ["allreduce", "barrier", "broadcast", "recv", "send", "sendrecv"])
def test_help_shows_docstring_of_call(name: str) -> None:
    method = getattr(un.Communicator, name)
    assert type(method).__name__ == "CachedMethod"
    text = help_of(method)
    first_line = inspect.getdoc(inspect.unwrap(method)).splitlines()[0]
    assert first_line in text
    assert first_line in help_of(un.Communicator)
    assert "timeout_s" in text.splitlines()[2]
    assert str(inspect.signature(method)).startswith("(self")


@pytest.mark.usefixtures("no_torch")
def test_module_without_torch_has_no_attribute_torch_and_says_why() -> None:
    assert not hasattr(un, "torch")
    assert "torch" not in dir(un)
    with pytest.raises(AttributeError, match=r"needs torch.*pip install .*\[torch\]") as error:
        _ = un.torch
    assert isinstance(error.value.__cause__, ImportError)
    assert "allreduce" in help_of(un.Communicator)
    assert "unisono - Unisono: collective communication" in help_of(un)
    assert dict(inspect.getmembers(un))["init"] is un.init
    with pytest.raises(ImportError):
        import unisono.torch  # noqa: F401


def test_dir_of_module_lists_public_names_only() -> None:
    names = {name for name in dir(un) if not name.startswith("__")}
    assert {*un.__all__} - {"__version__"} <= names
    assert names <= {*un.__all__, "jax", "keras", "tensorflow", "torch"}


def test_communicator_suggests_its_own_names_for_names_of_mpi(world: un.Communicator) -> None:
    for name in INSTEAD:
        assert not hasattr(un.Communicator, name)
        assert name not in dir(world)
        assert name not in dir(un.Communicator)
    for name, advice in (
        ("bcast", "broadcast"),
        ("isend", "wait=False"),
        ("Get_rank", "the attribute rank"),
        ("Allreduce", "allreduce"),
        ("all_reduce", "allreduce"),
        ("world_size", "the attribute size"),
    ):
        with pytest.raises(AttributeError, match=f"a communicator has no '{name}': use .*{advice}"):
            getattr(world, name)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = world.no_such_name


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("allreduce", r"method of the communicator: un.init\(\).allreduce"),
        ("Allreduce", r"method of the communicator: un.init\(\).allreduce"),
        ("COMM_WORLD", r"un.init\(\) returns the communicator"),
        ("init_process_group", r"torch.distributed.init_process_group\('unisono'\)"),
        ("SUM", "op='sum'"),
    ],
)
def test_name_of_another_library_says_what_to_use(name: str, advice: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': .*{advice}"):
        getattr(un, name)


class DataFrame:
    __module__ = "pandas.core.frame"


# The array, and what the error of a collective advises.
NO_ARRAYS: dict[str, tuple[str, object]] = {
    "broadcast_object": ("broadcast", None),
    "values are ignored off the root": ("broadcast", None),
    "gather_object": ("gather", None),
    "every rank passes an array": ("allreduce", None),
    r"result\.item\(\)": ("allreduce", 2.0),
    r"x\.to_numpy\(dtype\)": ("broadcast", DataFrame()),
    "scatter_object": ("allgather", "text"),
}


@pytest.mark.parametrize("advice", NO_ARRAYS)
def test_value_that_is_no_array_is_refused_with_advice(world: un.Communicator, advice: str) -> None:
    collective, x = NO_ARRAYS[advice]
    with pytest.raises(un.UsageError, match=advice):
        getattr(world, collective)(x)


@pytest.mark.parametrize(
    ("op", "meant"),
    [("mean", "avg"), ("SUM", "sum"), ("MPI_MAX", "max"), (np.add, "sum"), (max, "max"), (operator.mul, "prod")],
)
def test_unknown_op_is_refused_with_a_suggestion(world: un.Communicator, op: Any, meant: str) -> None:
    with pytest.raises(un.UsageError, match=f"did you mean '{meant}'"):
        world.allreduce(X, op=op)


WRONG_ARRAYS: dict[str, Callable[[un.Communicator], object]] = {
    "a list is several arrays, and x.0. is of type int: pass numpy.asarray": lambda world: world.allreduce([1, 2]),
    "a list is several arrays, and x.1. is of type list": lambda world: world.broadcast((X, [2])),
    "cannot be sent: .*pass the other fields separately": lambda world: world.broadcast(np.zeros(3, [("a", "g")])),
}


@pytest.mark.parametrize("message", WRONG_ARRAYS)
def test_wrong_array_is_refused_with_advice_for_it(world: un.Communicator, message: str) -> None:
    with pytest.raises(un.UsageError, match=message):
        WRONG_ARRAYS[message](world)


@pytest.mark.parametrize("name", ["jax", "keras", "tensorflow", "torch"])
def test_each_framework_is_an_attribute_of_the_package(name: str) -> None:
    if importlib.util.find_spec(name):
        assert getattr(un, name) is importlib.import_module(f"unisono.{name}")
    else:
        with pytest.raises(AttributeError, match=f"unisono.{name} needs {name}"):
            getattr(un, name)


AT_THE_END = """
import builtins
import numpy as np
import unisono as un

class Late:
    def __init__(self):
        self.world = un.init()

    def __del__(self):
        for call in (self.world.barrier, self.world.stats, un.init, lambda: self.world.broadcast_object(1)):
            try:
                call()
                print("no error")
            except un.UnisonoError as error:
                print(type(error).__name__)

builtins.late = Late()
"""


def test_call_of_a_destructor_while_python_ends_raises_an_error_of_the_library() -> None:
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout.split(), done.stderr) == (["UsageError"] * 4, "")
