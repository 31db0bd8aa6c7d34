"""The store behind ``file:///path``: a folder that all ranks see, one file per key.

The files lie in a folder of their own inside `path`, and are opened relative to its descriptor: nothing else in `path`
is ever touched, and whoever replaces a name on the way changes nothing for those who have opened it.

Every open store holds a shared lock on one of the files, which the kernel releases even after a SIGKILL. A rank that
can make its lock exclusive is alone. On opening, what lies in the folder is then left from a job that died, and is
removed; on closing, this was the last rank, and everything is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
from functools import partial

from unisono.errors import RendezvousError
from unisono.forks import closed_in_child
from unisono.transports.host.system_limits import is_exhausted
from unisono.transports.rendezvous.stores import VALUE_LIMIT_NBYTES, already_set, check_value, encoded_key, poll

_FOLDER = "unisono.store"
_LOCK = "lock"
# A value, or the draft of one. Other files are not ours to remove.
_VALUE = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{16})?")
# Content of the lock: the job has made `path` too.
_MADE = b"made"
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_DRAFT = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_OPEN_VALUE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class _Descriptor:
    """A descriptor that a forked child closes."""

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        os.close(self.number)


class FileStore:
    """A store in the folder `path`, which is made (0700) if it does not exist; `Store` says what its methods do.

    Raises:
        RendezvousError: the folder cannot be used, belongs to another user, or others can write in it.
    """

    def __init__(self, path: str) -> None:
        self._path, self._inner = path, os.path.join(path, _FOLDER)
        self._closed = False
        self._names: set[str] = set()  # of what this client has set
        try:
            folder, lock = self._enter()
            self._folder, self._lock = closed_in_child(_Descriptor(folder)), closed_in_child(_Descriptor(lock))
        except OSError as error:
            if is_exhausted(error):
                raise
            raise RendezvousError(f"the store {path} cannot be used: {error.strerror or error}") from error

    def set(self, key: str, value: bytes) -> None:
        check_value(value)
        name = _name(key)
        draft = f"{name}.{os.urandom(8).hex()}"
        try:
            if self._has(name):
                raise already_set(key)
            with open(os.open(draft, _OPEN_DRAFT, 0o600, dir_fd=self._folder.number), "wb") as file:
                file.write(value)
            # Nobody ever sees a part of the value.
            os.rename(draft, name, src_dir_fd=self._folder.number, dst_dir_fd=self._folder.number)
        except OSError as error:
            raise RendezvousError(f"the store {self._path} is gone: {error.strerror or error}") from error
        self._names.add(name)

    def get(self, key: str, timeout_s: float) -> bytes:
        return poll(partial(self._read, _name(key)), key, timeout_s)

    def clear(self) -> None:
        for name in self._names:
            with contextlib.suppress(OSError):  # the last rank has removed it, or the folder is out of reach
                os.unlink(name, dir_fd=self._folder.number)
        self._names.clear()

    def close(self) -> None:
        """See `Store.close`. The last rank removes what the store has made."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remove_everything()
        self._lock.close()
        self._folder.close()

    def _enter(self) -> tuple[int, int]:
        """Return the descriptors of the folder and of the lock, which is locked."""
        while True:
            is_made = self._make()
            with contextlib.suppress(FileNotFoundError):  # the last rank of another job has just removed a folder
                folder = self._open()
                try:
                    lock = _locked(folder)
                except BaseException:
                    os.close(folder)
                    raise
                if is_made:
                    os.write(lock, _MADE)
                return folder, lock

    def _open(self) -> int:
        """Return the descriptor of the folder inside the given one, which is made if there is none."""
        outer = _opened_folder(self._path, self._path)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(_FOLDER, 0o700, dir_fd=outer)
            return _opened_folder(self._inner, _FOLDER, outer)
        finally:
            os.close(outer)

    def _make(self) -> bool:
        """Make the folder if there is none, and return whether it was made here."""
        try:
            os.mkdir(self._path, 0o700)
            return True
        except FileExistsError:
            return False

    def _has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._folder.number, follow_symlinks=False)
            return True
        except FileNotFoundError:
            return False

    def _read(self, name: str) -> bytes | None:
        try:
            with open(os.open(name, _OPEN_VALUE, dir_fd=self._folder.number), "rb") as file:
                _check_owner(file.fileno(), f"a value in the store {self._path}")
                nbytes = os.fstat(file.fileno()).st_size  # a value cut from a larger buffer would keep a mapping
                value = file.read(min(nbytes, VALUE_LIMIT_NBYTES) + 1)
        except FileNotFoundError:
            return None
        check_value(value)
        return value

    def _remove_everything(self) -> None:
        with contextlib.suppress(OSError):  # another job has begun to use the folder, or its owner has removed it
            is_made = os.pread(self._lock.number, len(_MADE), 0) == _MADE
            _remove_values(self._folder.number)
            os.unlink(_LOCK, dir_fd=self._folder.number)
            os.rmdir(self._inner)
            if is_made:
                os.rmdir(self._path)


def _name(key: str) -> str:
    return hashlib.sha256(encoded_key(key)).hexdigest()


def _opened_folder(path: str, name: str, parent: int | None = None) -> int:
    """Return the descriptor of the folder `path`, which is `name` in `parent`.

    Raises:
        RendezvousError: it is no folder, belongs to another user, or others can write in it.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(name, _OPEN_FOLDER, dir_fd=parent)
    except NotADirectoryError:
        is_link = stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
        hint = ", but a symbolic link: name the folder that it leads to" if is_link else ""
        raise RendezvousError(f"the store {path} is not a folder{hint}") from None
    try:
        _check_owner(descriptor, f"the store {path}")
        if os.fstat(descriptor).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise RendezvousError(
                f"the store {path} can be written by other users: run chmod 700 on it, or choose another"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_owner(descriptor: int, what: str) -> None:
    if os.fstat(descriptor).st_uid != os.geteuid():
        raise RendezvousError(f"{what} belongs to another user")


def _locked(folder: int) -> int:
    """Return the descriptor of the lock in a folder, locked; raises FileNotFoundError if it is removed meanwhile."""
    lock = os.open(_LOCK, _OPEN_LOCK, 0o600, dir_fd=folder)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alone = True
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
            is_alone = False
        if not os.path.samestat(os.fstat(lock), os.stat(_LOCK, dir_fd=folder, follow_symlinks=False)):
            raise FileNotFoundError
        if is_alone:
            _remove_values(folder)
            fcntl.flock(lock, fcntl.LOCK_SH)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _remove_values(folder: int) -> None:
    for name in os.listdir(folder):
        if _VALUE.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
