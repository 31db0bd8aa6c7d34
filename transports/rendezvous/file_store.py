"""The store behind ``file:///path``: a folder that all ranks see, one file per key.

Every open store holds a shared lock on one file in the folder, which the kernel releases even after a SIGKILL. Who can
make it exclusive is alone: on opening, what lies in the folder is then left from a job that died, and is removed; on
closing, this was the last rank, and everything is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
from functools import partial
from pathlib import Path

from unisono.errors import RendezvousError
from unisono.forks import closed_in_child
from unisono.transports.rendezvous.stores import VALUE_LIMIT_NBYTES, already_set, check_value, encoded_key, poll

_OURS = "unisono."
_LOCK = _OURS + "lock"
_MADE = b"made"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class FileStore:
    """A store in the folder `path`, which is made (0700) if it does not exist; `Store` says what its methods do.

    Raises:
        RendezvousError: the folder cannot be used, belongs to another user, or others can write in it.
    """

    def __init__(self, path: str) -> None:
        self._folder = Path(path)
        self._closed = False
        try:
            self._lock = closed_in_child(open(self._enter(), "r+b", buffering=0))  # noqa: SIM115 (see `close`)
        except OSError as error:
            raise RendezvousError(f"the store {path} cannot be used: {error.strerror or error}") from error

    def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        check_value(value)
        path = self._path(key)
        if path.exists():
            raise already_set(key)
        draft = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(value)
            draft.rename(path)  # nobody ever sees a part of the value
        except OSError as error:
            raise RendezvousError(f"the store {self._folder} is gone: {error.strerror or error}") from error

    def get(self, key: str, timeout_s: float) -> bytes:
        """See `Store.get`."""
        return poll(partial(_read, self._path(key)), key, timeout_s)

    def close(self) -> None:
        """See `Store.close`. The last rank removes what the store has made."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remove_everything()
        self._lock.close()

    def _path(self, key: str) -> Path:
        return self._folder / (_OURS + hashlib.sha256(encoded_key(key)).hexdigest())

    def _enter(self) -> int:
        """Return the descriptor of the lock file, locked; starts again if the last rank of another job removes it."""
        while True:
            made = _make_folder(self._folder)
            try:
                descriptor = os.open(self._folder / _LOCK, _LOCK_FLAGS, 0o600)
            except FileNotFoundError:
                continue
            if self._join(descriptor):
                if made:
                    os.write(descriptor, _MADE)
                return descriptor
            os.close(descriptor)

    def _join(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            alone = False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(self._folder / _LOCK)):
                if alone:
                    self._remove_values()
                    fcntl.flock(descriptor, fcntl.LOCK_SH)
                return True
        return False

    def _remove_values(self) -> None:
        for path in self._folder.glob(_OURS + "*"):
            if path.name != _LOCK:
                path.unlink(missing_ok=True)

    def _remove_everything(self) -> None:
        with contextlib.suppress(OSError):  # another job has begun to use the folder, or its owner has removed it
            self._remove_values()
            (self._folder / _LOCK).unlink()
            if os.pread(self._lock.fileno(), len(_MADE), 0) == _MADE:
                self._folder.rmdir()


def _make_folder(folder: Path) -> bool:
    """Make `folder` if there is none and return whether it was made here; raises if another user could write in it."""
    try:
        folder.mkdir(mode=0o700)
        return True
    except FileExistsError:
        facts = folder.stat()
    if not stat.S_ISDIR(facts.st_mode):
        raise RendezvousError(f"the store {folder} is not a folder")
    if facts.st_uid != os.geteuid():
        raise RendezvousError(f"the store {folder} belongs to another user")
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RendezvousError(
            f"the store {folder} can be written by other users: run chmod 700 on it, or choose another"
        )
    return False


def _read(path: Path) -> bytes | None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            value = file.read(VALUE_LIMIT_NBYTES + 1)
    except FileNotFoundError:
        return None
    check_value(value)
    return value
