"""`File`: a file that all ranks of a communicator read and write, by ``pread`` and ``pwrite``.

A *view* says which bytes of the file a rank accesses: those of the filetype, repeated from a displacement on. Positions
count etypes of these bytes. The shared pointer is an element of a window, which ranks move by `fetch_and_op`. A call
has done its transfer when it returns, also one that returns a request.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from unisono.compat.mpi4py.base.arguments import whole, whole_numbers
from unisono.compat.mpi4py.base.constants import ANY_TAG, CONSTANTS, PROC_NULL
from unisono.compat.mpi4py.base.errors import Exception as MpiException, fail, translating
from unisono.compat.mpi4py.base.handles import ERRORS_RETURN, Errhandler, Handle, Handled, State, constant
from unisono.compat.mpi4py.calls.request import Request, RequestState
from unisono.compat.mpi4py.communicators.comm import CommState
from unisono.compat.mpi4py.memory.buffers import Block, simple
from unisono.compat.mpi4py.memory.datatype import BYTE, Datatype
from unisono.compat.mpi4py.values.group import Shared
from unisono.compat.mpi4py.values.info import INFO_NULL, Hinted

_u1 = np.uint8
_ACCESS = {
    CONSTANTS["MODE_RDONLY"]: os.O_RDONLY,
    CONSTANTS["MODE_WRONLY"]: os.O_WRONLY,
    CONSTANTS["MODE_RDWR"]: os.O_RDWR,
}
_CREATE, _EXCLUSIVE = CONSTANTS["MODE_CREATE"], CONSTANTS["MODE_EXCL"]
_APPEND, _DELETE = CONSTANTS["MODE_APPEND"], CONSTANTS["MODE_DELETE_ON_CLOSE"]
_SET, _CURRENT, _END = (CONSTANTS[f"SEEK_{name}"] for name in ("SET", "CUR", "END"))
_CLASSES = {
    errno.ENOENT: "ERR_NO_SUCH_FILE",
    errno.EEXIST: "ERR_FILE_EXISTS",
    errno.EACCES: "ERR_ACCESS",
    errno.EPERM: "ERR_ACCESS",
    errno.EBADF: "ERR_ACCESS",  # a file that is open for reading only is written, or the reverse
    errno.EROFS: "ERR_READ_ONLY",
    errno.ENOSPC: "ERR_NO_SPACE",
    errno.EDQUOT: "ERR_QUOTA",
    errno.EISDIR: "ERR_BAD_FILE",
    errno.ENOTDIR: "ERR_BAD_FILE",
    errno.ENAMETOOLONG: "ERR_BAD_FILE",
}


@contextmanager
def _system_errors() -> Iterator[None]:
    """Raise errors of the system as `Exception`s."""
    try:
        yield
    except OSError as error:
        raise fail(_CLASSES.get(error.errno or 0, "ERR_IO"), str(error)) from error


class _View:
    """The bytes of a file that a rank accesses.

    Attributes:
        disp: the displacement of the first filetype in bytes.
        etype, filetype: the datatypes.
    """

    def __init__(self, disp: int, etype: Any, filetype: Any) -> None:
        self.disp, self.etype, self.filetype = disp, Datatype._of(etype._live), Datatype._of(filetype._live)
        self._layout, self.unit = filetype._state, etype._state.size
        if self.unit <= 0 or self._layout.size % self.unit or disp < 0:
            raise fail("ERR_ARG", f"a filetype of {self._layout.size} bytes at {disp} has no whole number of etypes")

    def positions(self, first: int, nbytes: int) -> Any:
        """Return the place in the file of each byte from byte `first` of the view on."""
        tiles, within = np.divmod(np.arange(first, first + nbytes), self._layout.size)
        return self.disp + tiles * self._layout.extent + self._layout.index[within]

    def runs(self, position: int, nbytes: int) -> list[tuple[int, int]]:
        """Return the places and lengths of pieces of the file with so many bytes, from a position in etypes on."""
        first = position * self.unit
        if self._layout.is_dense or not nbytes:
            return [(self.disp + first, nbytes)]
        places = self.positions(first, nbytes)
        starts = np.concatenate(([0], np.flatnonzero(np.diff(places) != 1) + 1, [nbytes]))
        return [(int(places[start]), int(end - start)) for start, end in itertools.pairwise(starts)]

    def end(self, size: int) -> int:
        """Return the position behind the last etype in a file of `size` bytes."""
        tiles, rest = divmod(max(size - self.disp, 0), self._layout.extent)
        return int(tiles * self._layout.size + np.count_nonzero(self._layout.index < rest)) // int(self.unit)


class FileState(State):
    """An open file.

    Attributes:
        comm: a communicator for this file alone.
        amode: how it was opened.
        view: the bytes that this rank accesses.
        position: the individual pointer, in etypes.
        split: the transfer of a split collective that has begun.
    """

    def __init__(self, comm: CommState, path: str, amode: int) -> None:
        super().__init__()
        access = [flag for mode, flag in _ACCESS.items() if amode & mode]
        if len(access) != 1 or (access[0] == os.O_RDONLY and amode & (_CREATE | _EXCLUSIVE)):
            raise fail("ERR_AMODE", "pass one of MODE_RDONLY, MODE_WRONLY and MODE_RDWR; the first creates no file")
        self.comm, self.path, self.amode = comm.private(), path, amode
        flags = access[0] | os.O_CLOEXEC
        made = (os.O_CREAT if amode & _CREATE else 0) | (os.O_EXCL if amode & _EXCLUSIVE else 0)
        # Rank 0 creates the file before others open it.
        self.fd = -1
        failure = self._opened(flags | made) if self.comm.rank == 0 else None
        if failure := self._first_failure(failure):
            raise failure
        failure = self._opened(flags) if self.comm.rank > 0 else None
        if failure := self._first_failure(failure):
            if self.fd >= 0:
                os.close(self.fd)
            raise failure
        self._pointer = self.comm.native.window(1 if self.comm.rank == 0 else 0, "int64")
        self._pointer.lock_all()
        self.view, self.datarep, self.is_atomic = _View(0, BYTE, BYTE), "native", False
        self.info: dict[str, str] = {}
        self.split: RequestState | None = None
        self.position = 0
        if amode & _APPEND:
            self.position = self.nbytes
            self.share(self.position)

    def _opened(self, flags: int) -> MpiException | None:
        try:
            with _system_errors():
                self.fd = os.open(self.path, flags, 0o666)
        except MpiException as error:
            return error
        return None

    def _first_failure(self, failure: MpiException | None) -> MpiException | None:
        """Return the first failure of all ranks, so that none waits for a rank that could not open the file."""
        return next((each for each in self.comm.native.allgather_object(failure) if each is not None), None)

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        with _system_errors():
            return os.fstat(self.fd).st_size

    # The shared pointer.

    def taken(self, count: int) -> int:
        """Move the shared pointer by `count` etypes, and return where it was."""
        return int(self._pointer.fetch_and_op(count, 0))

    def share(self, position: int) -> None:
        """Set the shared pointer. All ranks call it."""
        self.comm.native.barrier()
        if self.comm.rank == 0:
            self._pointer.accumulate(position, 0, op="replace")
            self._pointer.flush(0)
        self.comm.native.barrier()

    def ordered(self, count: int) -> int:
        """Move the shared pointer by the counts of all ranks, and return where this rank begins. All ranks call it."""
        counts = self.comm.native.allgather(np.array([count]))
        base = np.array([self.taken(int(counts.sum())) if self.comm.rank == 0 else 0])
        return int(self.comm.native.broadcast(base)[0] + counts[: self.comm.rank].sum())

    def once(self, change: Callable[[], None]) -> None:
        """Let rank 0 change the file between two barriers. All ranks call it, and all raise its error."""
        failure = None
        self.comm.native.barrier()
        if self.comm.rank == 0:
            try:
                with _system_errors():
                    change()
            except MpiException as error:
                failure = error
        if failure := self._first_failure(failure):
            raise failure

    # Transfers.

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other ranks while the file is atomic."""
        with _system_errors():
            if not self.is_atomic:
                yield
                return
            fcntl.lockf(self.fd, fcntl.LOCK_SH if self.amode & CONSTANTS["MODE_RDONLY"] else fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def read(self, block: Block, position: int) -> int:
        """Read elements, and return the number of bytes, which is smaller at the end of the file."""
        array, done = block.target(), 0
        raw = array.view(_u1)
        with self._locked():
            for place, nbytes in self.view.runs(position, block.nbytes):
                end = done + nbytes
                while done < end and (count := os.preadv(self.fd, [raw[done:end]], place + nbytes - (end - done))):
                    done += count
                if done < end:
                    break
        block.store(array, done)
        return done

    def write(self, block: Block, position: int) -> int:
        """Write elements, and return the number of bytes."""
        raw, done = block.array().view(_u1), 0
        with self._locked():
            for place, nbytes in self.view.runs(position, block.nbytes):
                end = done + nbytes
                while done < end:
                    done += os.pwrite(self.fd, raw[done:end], place + nbytes - (end - done))
        return done

    def close(self) -> None:
        """Close the file. All ranks call it."""
        self._pointer.unlock_all()
        self._pointer.free()
        os.close(self.fd)
        try:
            if self.amode & _DELETE:
                self.once(lambda: os.unlink(self.path))
        finally:
            self.comm.release()


class _Handlers:
    """The error handler of files that are opened later, which is that of `FILE_NULL`."""

    later = ERRORS_RETURN._state


@whole_numbers
class File(Handle, Handled, Hinted, Shared):
    """A file that all ranks of a communicator read and write."""

    __slots__ = ()
    _null, _error = "FILE_NULL", "ERR_FILE"

    @classmethod
    @translating
    def Open(cls, comm: Any, filename: Any, amode: int = CONSTANTS["MODE_RDONLY"], info: Any = INFO_NULL) -> Any:
        """Open a file. All ranks call it."""
        state = FileState(comm._live, os.fsdecode(filename), amode)
        state.errhandler = _Handlers.later
        return cls._of(state)

    @classmethod
    def Delete(cls, filename: Any, info: Any = INFO_NULL) -> None:
        """Delete a file."""
        with _system_errors():
            os.unlink(filename)

    def Close(self) -> None:
        """Close the file. All ranks call it."""
        self._free()

    @translating
    def _release(self) -> None:
        self._state.close()

    def Get_errhandler(self) -> Errhandler:
        """Return the error handler; that of files that are opened later if the handle is null."""
        if self._state is not None:
            return super().Get_errhandler()
        handler: Errhandler = Errhandler._of(_Handlers.later)
        return handler

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        """Set the error handler; that of files that are opened later if the handle is null."""
        if self._state is not None:
            super().Set_errhandler(errhandler)
        else:
            _Handlers.later = errhandler._live

    # Facts.

    def Get_size(self) -> int:
        """Return the size in bytes."""
        return int(self._live.nbytes)

    @translating
    def Set_size(self, size: int) -> None:
        """Set the size in bytes. All ranks call it."""
        state = self._live
        state.once(lambda: os.ftruncate(state.fd, size))

    @translating
    def Preallocate(self, size: int) -> None:
        """Reserve storage for the first `size` bytes. All ranks call it."""
        state = self._live
        state.once(lambda: os.posix_fallocate(state.fd, 0, size) if size else None)

    def Get_amode(self) -> int:
        """Return how the file was opened."""
        return int(self._live.amode)

    def Set_atomicity(self, flag: bool) -> None:
        """Set whether each transfer excludes those of other ranks."""
        self._live.is_atomic = bool(flag)

    def Get_atomicity(self) -> bool:
        """Return whether each transfer excludes those of other ranks."""
        return bool(self._live.is_atomic)

    def Sync(self) -> None:
        """Write all data to the storage."""
        with _system_errors():
            os.fsync(self._live.fd)

    def Get_type_extent(self, datatype: Any) -> int:
        """Return the extent of a datatype in the file."""
        self._live  # noqa: B018
        return int(datatype._live.extent)

    size = property(Get_size, doc="The size in bytes.")
    amode = property(Get_amode, doc="How the file was opened.")
    atomicity = property(Get_atomicity, Set_atomicity, doc="Whether each transfer excludes those of other ranks.")

    # Views and pointers.

    @translating
    def Set_view(
        self, disp: int = 0, etype: Any = BYTE, filetype: Any = None, datarep: str = "native", info: Any = INFO_NULL
    ) -> None:
        """Set the view, and both pointers to its begin. All ranks call it."""
        state = self._live
        if datarep != "native":
            raise fail("ERR_UNSUPPORTED_DATAREP", f"files have the data representation 'native', not {datarep!r}")
        state.view = _View(disp, etype, etype if filetype is None else filetype)
        state.position = 0
        state.share(0)

    def Get_view(self) -> tuple[int, Any, Any, str]:
        """Return the displacement, the etype, the filetype and the data representation."""
        state = self._live
        view = state.view
        return view.disp, Datatype._of(view.etype._state), Datatype._of(view.filetype._state), state.datarep

    def Get_byte_offset(self, offset: int) -> int:
        """Return the place in the file of a position."""
        view = self._live.view
        return int(view.positions(offset * view.unit, 1)[0])

    def _sought(self, current: int, offset: int, whence: int) -> int:
        starts = {_SET: 0, _CURRENT: current, _END: self._live.view.end(self._live.nbytes)}
        if whence not in starts or starts[whence] + offset < 0:
            raise fail("ERR_ARG", f"offset {offset} leads before the begin of the view, or whence {whence} is wrong")
        return int(starts[whence] + offset)

    def Seek(self, offset: int, whence: int = _SET) -> None:
        """Set the individual pointer."""
        self._live.position = self._sought(self._live.position, offset, whence)

    def Get_position(self) -> int:
        """Return the individual pointer."""
        return int(self._live.position)

    @translating
    def Seek_shared(self, offset: int, whence: int = _SET) -> None:
        """Set the shared pointer. All ranks call it."""
        self._live.share(self._sought(self._live.taken(0), offset, whence))

    @translating
    def Get_position_shared(self) -> int:
        """Return the shared pointer."""
        return int(self._live.taken(0))


def _transfer(state: FileState, kind: str, pointer: str, buf: Any, offset: int = 0) -> RequestState:
    """Read or write a buffer at an offset or at a pointer: "at", "", "shared" or "ordered"."""
    block = simple(buf, writable=kind == "Read")
    count = block.nbytes // state.view.unit
    if pointer == "at" and offset < 0:
        raise fail("ERR_ARG", f"offset {offset} is negative")
    moves: dict[str, Callable[[], int]] = {
        "at": lambda: offset,
        "": lambda: state.position,
        "shared": lambda: state.taken(count),
        "ordered": lambda: state.ordered(count),
    }
    nbytes = (state.read if kind == "Read" else state.write)(block, moves[pointer]())
    if not pointer:
        state.position += nbytes // state.view.unit
    return RequestState((), lambda status: status._set(PROC_NULL, ANY_TAG, nbytes))


def _methods(kind: str, pointer: str) -> dict[str, Callable[..., Any]]:
    """Return the methods of a transfer by name: those that wait, those that return a request, and split ones."""

    def waits(self: File, buf: Any, status: Any = None, *, offset: int = 0) -> None:
        Request._of(_transfer(self._live, kind, pointer, buf, offset)).wait(status)

    def requests(self: File, buf: Any, *, offset: int = 0) -> Any:
        return Request._of(_transfer(self._live, kind, pointer, buf, offset))

    def begins(self: File, buf: Any, *, offset: int = 0) -> None:
        if self._live.split is not None:
            raise fail("ERR_OTHER", "a split transfer of this file has begun already")
        self._live.split = _transfer(self._live, kind, pointer, buf, offset)

    def ends(self: File, buf: Any, status: Any = None) -> None:
        request, self._live.split = self._live.split, None
        if request is None:
            raise fail("ERR_OTHER", "no split transfer of this file has begun")
        Request._of(request).wait(status)

    name = f"{kind}_{pointer}".rstrip("_")
    together = name if pointer == "ordered" else f"{name}_all"
    methods: dict[str, Callable[..., Any]] = {name: waits}
    if pointer != "ordered":
        methods |= {f"I{name.lower()}": requests}
    if pointer != "shared":
        methods |= {together: waits, f"{together}_begin": begins}
    if pointer in {"at", ""}:
        methods |= {f"I{together.lower()}": requests}
    if pointer == "at":
        methods = {name: _with_offset(method) for name, method in methods.items()}
    return methods if pointer == "shared" else {**methods, f"{together}_end": ends}


def _with_offset(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, offset, buf, *args, **kwargs: method(self, buf, *args, offset=whole(offset), **kwargs)


def _add_method(name: str, method: Callable[..., Any], doc: str) -> None:
    @translating
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    setattr(File, name, call)


_WHERE = {"at": "at an offset", "": "at the individual pointer", "shared": "at the shared pointer"}
_WHERE["ordered"] = "at the shared pointer, in the order of ranks"
for _kind in ("Read", "Write"):
    for _pointer, _where in _WHERE.items():
        for _name, _method in _methods(_kind, _pointer).items():
            _add_method(_name, _method, f"{_kind} a buffer {_where}.")


def Register_datarep(datarep: str, read_fn: Any, write_fn: Any, extent_fn: Any) -> None:
    """Raise `NotImplementedError`: files have the native representation only."""
    raise NotImplementedError("files have the native data representation only")


FILE_NULL = constant("FILE_NULL", File, None)
