"""Unisono: collective communication for Python.

``import unisono as un``; ``world = un.init()``; ``world.allreduce(x)``.

The module of a public name is imported when the name is first used. So importing the package (or `unisono.algorithms`)
imports neither numpy nor the native module.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # `typing` would take most of the time of this import.

if TYPE_CHECKING:
    from unisono import (
        data_parallel as data_parallel,
        jax as jax,
        metrics as metrics,
        testing as testing,
        torch as torch,
    )
    from unisono.collectives.api.reduce_local import reduce_local as reduce_local
    from unisono.collectives.arrays.mapped import empty as empty
    from unisono.collectives.bootstrap.init import init as init, join as join
    from unisono.collectives.bootstrap.user_algorithms import algorithm as algorithm
    from unisono.collectives.calls.taken_message import TakenMessage as TakenMessage
    from unisono.collectives.calls.work import (
        Work as Work,
        test_all as test_all,
        test_any as test_any,
        test_some as test_some,
        wait_all as wait_all,
        wait_any as wait_any,
        wait_some as wait_some,
    )
    from unisono.collectives.communicator import Communicator as Communicator, Graph as Graph, Grid as Grid
    from unisono.collectives.neighbourhoods.grid_shape import grid_dims as grid_dims
    from unisono.collectives.windows.window import Window as Window
    from unisono.errors import (
        AbortedError as AbortedError,
        CollectiveTimeoutError as CollectiveTimeoutError,
        CorruptionError as CorruptionError,
        InternalError as InternalError,
        LeftBehindError as LeftBehindError,
        MismatchError as MismatchError,
        NoAlgorithmError as NoAlgorithmError,
        PeerLostError as PeerLostError,
        PlanError as PlanError,
        QuorumLostError as QuorumLostError,
        RendezvousError as RendezvousError,
        TransportUnavailableError as TransportUnavailableError,
        UnisonoError as UnisonoError,
        UsageError as UsageError,
    )
    from unisono.frameworks.gradients.reducer import GradientReducer as GradientReducer
    from unisono.launchers.launch import Pool as Pool, launch as launch
    from unisono.operations import Op as Op
    from unisono.options import Options as Options
    from unisono.swarm.meeting_place import MeetingPlace as MeetingPlace
    from unisono.swarm.swarm import Swarm as Swarm
    from unisono.transports.contracts.executor import Message as Message
    from unisono.transports.contracts.wildcards import (
        ANY_SOURCE as ANY_SOURCE,
        ANY_TAG as ANY_TAG,
        NOBODY as NOBODY,
    )

__version__ = "0.1.0"

_ERRORS = (
    "AbortedError",
    "CollectiveTimeoutError",
    "CorruptionError",
    "InternalError",
    "LeftBehindError",
    "MismatchError",
    "NoAlgorithmError",
    "PeerLostError",
    "PlanError",
    "QuorumLostError",
    "RendezvousError",
    "TransportUnavailableError",
    "UnisonoError",
    "UsageError",
)

# Public name → the module that defines it.
_NAMES = {
    "algorithm": "unisono.collectives.bootstrap.user_algorithms",
    **dict.fromkeys(("Communicator", "Graph", "Grid"), "unisono.collectives.communicator"),
    "empty": "unisono.collectives.arrays.mapped",
    "GradientReducer": "unisono.frameworks.gradients.reducer",
    **dict.fromkeys(("init", "join"), "unisono.collectives.bootstrap.init"),
    **dict.fromkeys(("Bridge", "Port", "connect"), "unisono.collectives.bootstrap.bridge"),
    **dict.fromkeys(("Pool", "launch"), "unisono.launchers.launch"),
    **dict.fromkeys(("parent", "spawn"), "unisono.launchers.spawn"),
    "Op": "unisono.operations",
    "Options": "unisono.options",
    "MeetingPlace": "unisono.swarm.meeting_place",
    "Swarm": "unisono.swarm.swarm",
    "grid_dims": "unisono.collectives.neighbourhoods.grid_shape",
    "reduce_local": "unisono.collectives.api.reduce_local",
    **dict.fromkeys(("ANY_SOURCE", "ANY_TAG", "NOBODY"), "unisono.transports.contracts.wildcards"),
    "TakenMessage": "unisono.collectives.calls.taken_message",
    "Message": "unisono.transports.contracts.executor",
    **dict.fromkeys(("Work", "wait_all", "wait_any", "wait_some"), "unisono.collectives.calls.work"),
    **dict.fromkeys(("test_all", "test_any", "test_some"), "unisono.collectives.calls.work"),
    "Window": "unisono.collectives.windows.window",
    **dict.fromkeys(_ERRORS, "unisono.errors"),
}

# Public modules. A module in `_FRAMEWORKS` needs the library of the same name.
_MODULES = ("data_parallel", "metrics", "testing")
_FRAMEWORKS = ("jax", "keras", "tensorflow", "torch")

__all__ = ["__version__", *_NAMES, *_MODULES]  # noqa: PLE0604


_METHODS = (
    *("allreduce", "reduce", "broadcast", "allgather", "gather", "scatter", "alltoall", "reduce_scatter", "scan"),
    *("exscan", "barrier", "send", "recv", "sendrecv", "broadcast_object", "allgather_object", "subgroup", "split"),
)
_JOB = ": un.init() returns the communicator of all ranks"
# A name that programs look for here, often one of another library → the end of the error.
_ELSEWHERE = {
    **{name: f": it is a method of the communicator: un.init().{name}" for name in _METHODS},
    **{name.capitalize(): f": it is a method of the communicator: un.init().{name}" for name in _METHODS},
    **dict.fromkeys(("all_reduce", "pmean", "psum"), ": it is a method of the communicator: un.init().allreduce"),
    **dict.fromkeys(("all_gather", "bcast"), f"{_JOB}, which has allgather() and broadcast()"),
    **dict.fromkeys(("COMM_WORLD", "MPI", "world", "new_group"), _JOB),
    "init_process_group": f"{_JOB}; for torch.distributed: torch.distributed.init_process_group('unisono')",
    **dict.fromkeys(("rank", "get_rank", "Get_rank"), f"{_JOB}, with the attribute rank"),
    **dict.fromkeys(("size", "get_world_size", "Get_size", "world_size"), f"{_JOB}, with the attribute size"),
    **dict.fromkeys(("SUM", "MAX", "MIN", "PROD", "ReduceOp"), ": an operation is a name, as op='sum'"),
    **dict.fromkeys(("shutdown", "finalize", "destroy_process_group"), ": a communicator has close()"),
}


def __getattr__(name: str) -> object:
    if name in _FRAMEWORKS:
        return _framework(name)
    if name in _MODULES:
        return _imported(f"unisono.{name}")
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}{_ELSEWHERE.get(name, '')}")
    value = getattr(_imported(module), name)
    # With the errors, because nothing can be imported any more while Python ends, and a `__del__` may catch them then.
    if "unisono.errors" in sys.modules and hasattr(sys.modules["unisono.errors"], _ERRORS[-1]):
        globals().update((error, getattr(sys.modules["unisono.errors"], error)) for error in _ERRORS)
    globals()[name] = value
    return value


def _imported(module: str) -> object:
    """Import a module of Unisono. If the native core is missing, the error shows no chain of imports."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name != "unisono.transports._core":
            raise
        raise error.with_traceback(None) from None


def _framework(name: str) -> object:
    """Import ``unisono.<name>``. A failure is an AttributeError that says why, so that `hasattr` and `help` work."""
    try:
        return importlib.import_module(f"unisono.{name}")
    except ImportError as error:
        from unisono.foundation.installing import install_command

        why = f"{name} cannot be imported here ({error}); to install it: {install_command(name)}"
        raise AttributeError(f"unisono.{name} needs {name}, and {why}") from error


def __dir__() -> list[str]:
    """Return the public names. A framework is among them if its library is installed."""
    from importlib.util import find_spec

    frameworks = [name for name in _FRAMEWORKS if find_spec(name)]
    return sorted({*__all__, *frameworks, *(name for name in globals() if name.startswith("__"))})
