"""The store at ``file:///path``: a folder that all ranks see, with one file per key.

The files are in a folder of their own inside `path`, and are opened relative to the descriptor of that folder. So the
store touches nothing else in `path`, and a process that replaces a folder on the way changes nothing for open stores.

Every open store holds a shared lock on one of the files, which the kernel releases even after a SIGKILL. A rank that
can make its lock exclusive is the only one. When it opens the store, any files are from a job that died, and are
removed. When it closes the store, it is the last rank, and removes everything.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
from functools import partial

from unisono.errors import RendezvousError
from unisono.foundation.forks import closed_in_child
from unisono.transports.host.system_limits import is_exhausted
from unisono.transports.rendezvous.stores import VALUE_LIMIT_NBYTES, already_set, check_value, encoded_key, poll

_FOLDER = "unisono.store"
_LOCK = "lock"
# The name of a value, or of a value that is being written. The store removes no other files.
_VALUE = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{16})?")
# The content of the lock file if the job has created `path` itself.
_CREATED = b"made"
# The errors of file systems without hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
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
    """A `Store` in the folder `path`, which is created (0700) if it does not exist.

    Raises:
        RendezvousError: the folder cannot be used, belongs to another user, or others can write in it.
    """

    def __init__(self, path: str) -> None:
        self._path, self._inner = path, os.path.join(path, _FOLDER)
        self._closed = False
        self._names: set[str] = set()  # the file names of the values that this client has set
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
        folder = self._folder.number
        try:
            with open(os.open(draft, _OPEN_DRAFT, 0o600, dir_fd=folder), "wb") as file:
                file.write(value)
            try:
                self._publish(draft, name)
            finally:
                with contextlib.suppress(FileNotFoundError):  # it has been renamed
                    os.unlink(draft, dir_fd=folder)
        except FileExistsError:
            raise already_set(key) from None
        except OSError as error:
            raise RendezvousError(f"the store {self._path} cannot be written: {error.strerror or error}") from error
        self._names.add(name)

    def get(self, key: str, timeout_s: float) -> bytes:
        return poll(partial(self._read, _name(key)), key, timeout_s)

    def clear(self) -> None:
        for name in self._names:
            with contextlib.suppress(OSError):  # the last rank has removed it, or the folder cannot be reached
                os.unlink(name, dir_fd=self._folder.number)
        self._names.clear()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remove_everything()
        self._lock.close()
        self._folder.close()

    def _enter(self) -> tuple[int, int]:
        """Return the descriptors of the folder and of the lock file, which is locked."""
        while True:
            is_created = self._create()
            with contextlib.suppress(FileNotFoundError):  # the last rank of another job has just removed a folder
                folder = self._open()
                try:
                    lock = _locked(folder)
                except BaseException:
                    os.close(folder)
                    raise
                if is_created:
                    os.write(lock, _CREATED)
                return folder, lock

    def _open(self) -> int:
        """Return the descriptor of the store's folder inside `path`; create that folder if it does not exist."""
        outer = _opened_folder(self._path, self._path)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(_FOLDER, 0o700, dir_fd=outer)
            return _opened_folder(self._inner, _FOLDER, outer)
        finally:
            os.close(outer)

    def _create(self) -> bool:
        """Create `path` if it does not exist, and return whether this call has created it."""
        try:
            os.mkdir(self._path, 0o700)
            return True
        except FileExistsError:
            return False

    def _publish(self, draft: str, name: str) -> None:
        """Make a value appear as a whole; raises FileExistsError if another one has the name, also at the same time."""
        folder = self._folder.number
        try:
            os.link(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if self._has(name):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
            os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)

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
                nbytes = os.fstat(file.fileno()).st_size  # a short value in a large buffer would keep all its memory
                value = file.read(min(nbytes, VALUE_LIMIT_NBYTES) + 1)
        except FileNotFoundError:
            return None
        check_value(value)
        return value

    def _remove_everything(self) -> None:
        with contextlib.suppress(OSError):  # another job has begun to use the folder, or its owner has removed it
            is_created = os.pread(self._lock.number, len(_CREATED), 0) == _CREATED
            _remove_values(self._folder.number)
            os.unlink(_LOCK, dir_fd=self._folder.number)
            os.rmdir(self._inner)
            if is_created:
                os.rmdir(self._path)


def _name(key: str) -> str:
    return hashlib.sha256(encoded_key(key)).hexdigest()


def _opened_folder(path: str, name: str, parent: int | None = None) -> int:
    """Return the descriptor of the folder `path`, which is `name` in `parent`.

    Raises:
        RendezvousError: it is not a folder, belongs to another user, or others can write in it.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(name, _OPEN_FOLDER, dir_fd=parent)
    except NotADirectoryError:
        is_link = stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
        hint = ", but a symbolic link: name its target instead" if is_link else ""
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
    """Return the descriptor of a folder's lock file, locked; raises FileNotFoundError if it is removed meanwhile."""
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
