"""`Session`, and the constants `COMM_WORLD` and `COMM_SELF`."""

from __future__ import annotations

from typing import Any

from unisono.compat import mpi4py as package
from unisono.compat.mpi4py.base.arguments import whole_numbers
from unisono.compat.mpi4py.base.errors import fail
from unisono.compat.mpi4py.base.handles import Handle, Handled, State, constant
from unisono.compat.mpi4py.base.world import Init_thread, native_world, own_number, own_universe
from unisono.compat.mpi4py.calls.request import Buffering
from unisono.compat.mpi4py.communicators.comm import CommState, Intracomm
from unisono.compat.mpi4py.values.group import Group
from unisono.compat.mpi4py.values.info import INFO_NULL, Info

_SETS = ("mpi://WORLD", "mpi://SELF")


class _Lazy(CommState):
    """A communicator whose members are known when MPI is initialized."""

    def __init__(self, constant: str) -> None:
        State.__init__(self, constant)
        self._begin()
        self.topology = None

    def __getattr__(self, name: str) -> Any:
        if name not in {"members", "universe", "native"}:
            raise AttributeError(name)
        self.universe, is_world = own_universe(), self.constant == "COMM_WORLD"
        self.members = self.universe.numbers if is_world else (own_number(),)
        self.native = self.universe.native if is_world else self.universe.subgroup(self.members)
        return getattr(self, name)


class _SessionState(State):
    """A session, with its buffer."""

    buffer: Any = None


@whole_numbers
class Session(Handle, Handled, Buffering):
    """A session, which gives groups by the names of process sets."""

    __slots__ = ()
    _null, _error = "SESSION_NULL", "ERR_SESSION"

    @classmethod
    def Init(cls, info: Any = INFO_NULL, errhandler: Any = None) -> Any:
        """Return a new session."""
        state = _SessionState()
        state.errhandler = None if errhandler is None else errhandler._state
        return cls._of(state)

    def Finalize(self) -> None:
        """Make the handle null."""
        self._free()

    def Get_num_psets(self, info: Any = INFO_NULL) -> int:
        """Return the number of process sets."""
        self._live  # noqa: B018
        return len(_SETS)

    def Get_nth_pset(self, n: int, info: Any = INFO_NULL) -> str:
        """Return the name of a process set."""
        self._live  # noqa: B018
        if not 0 <= n < len(_SETS):
            raise fail("ERR_ARG", f"there is no process set {n}")
        return _SETS[n]

    def Get_info(self) -> Any:
        """Return hints."""
        self._live  # noqa: B018
        return Info.Create({"thread_level": "MPI_THREAD_MULTIPLE"})

    def Get_pset_info(self, pset_name: str) -> Any:
        """Return the size of a process set as a hint."""
        return Info.Create({"mpi_size": str(self.Create_group(pset_name).size)})

    def Create_group(self, pset_name: str) -> Any:
        """Return the group of a process set."""
        self._live  # noqa: B018
        if pset_name not in _SETS:
            raise fail("ERR_ARG", f"there is no process set {pset_name!r}")
        return Group._with(range(native_world().size) if pset_name == _SETS[0] else [own_number()])


SESSION_NULL = constant("SESSION_NULL", Session, None)
COMM_SELF = constant("COMM_SELF", Intracomm, _Lazy("COMM_SELF"))
COMM_WORLD = constant("COMM_WORLD", Intracomm, _Lazy("COMM_WORLD"))


def _absent(name: str) -> Any:
    def absent(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"Unisono has no {name}")

    absent.__name__ = absent.__qualname__ = name
    absent.__doc__ = "Raise `NotImplementedError`: there is no such function."
    return absent


for _name in [
    "Get_hw_resource_info",
    "Get_abi_info",
    "Get_abi_fortran_info",
]:
    globals()[_name] = _absent(_name)


def initialize() -> None:
    """Initialize MPI as the settings of the package say."""
    if package.rc.initialize:
        Init_thread()
