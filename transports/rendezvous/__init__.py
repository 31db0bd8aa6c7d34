"""The rendezvous of the ranks of a job: stores, and the roster on which the ranks agree through them.

`stores.py`       the contract of a store, and helpers
`tcp_store.py`    ``tcp://host:port``: a server in one process, and its clients, which retry until it is there
`file_store.py`   ``file:///path``: a folder that all ranks see
`redis_store.py`  ``redis://host:port``: a Redis server
`torch_store.py`  ``torch://host:port``, and stores of torch.distributed that a program passes
`openings.py`     how ranks find the values of one rendezvous in a store of torch that outlives them
`roster.py`       the exchange of entries, and the roster
`mpi.py`          the rendezvous over a communicator of mpi4py, without a store
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from unisono.errors import UsageError
from unisono.transports.host.bind_address import is_numeric
from unisono.transports.rendezvous.stores import PrefixStore, Store
from unisono.transports.rendezvous.tcp_store import TcpStore
from unisono.transports.tcp.tls import TlsPolicy

# (URL, job, rank) → the number of the latest rendezvous, from 0. Every rank counts alike, so a program that calls
# `init` twice does not read the values of the first rendezvous in the second.
_openings: dict[tuple[str, bytes, int], int] = {}
# Only the most recently used entries are kept.
_MOST_OPENINGS = 1024


def next_prefix(url: str, *, rank: int, job: bytes) -> str:
    """Return the prefix of all keys of the next rendezvous of `job` at `url`.

    The n-th call for a rank returns the same prefix as the n-th call for any other rank.
    """
    number = _openings.pop((url, job, rank), -1) + 1
    _openings[url, job, rank] = number
    if len(_openings) > _MOST_OPENINGS:
        del _openings[next(iter(_openings))]
    return f"unisono/{job.hex()}/{number}/"


def open_store(
    url: str, prefix: str, *, key: bytes | None, job: bytes, timeout_s: float, tls: TlsPolicy | None = None
) -> Store:
    """Open the store at `url` for one rendezvous of `job`.

    Args:
        url: ``tcp://host:port``, ``file:///path``, ``redis://host:port/database`` or ``rediss://``.
        prefix: the prefix of the rendezvous, from `next_prefix`.
        key: the job's key, 32 bytes, or None if rank 0 passes it through the store.
        job: the job's id, 16 bytes.
        timeout_s: seconds to wait until the store can be reached.
        tls: whether connections use TLS; by default they do not.

    Raises:
        UsageError: the URL cannot be used.
        RendezvousError: the store cannot be used, or was not reached in time.
    """
    scheme = url.partition("://")[0]
    connect = _SCHEMES.get(scheme)
    if connect is None:
        schemes = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise UsageError(f"the store {url!r} cannot be used: it must begin with one of {schemes}")
    return PrefixStore(connect(url, prefix, key, job, timeout_s, tls), prefix)


def open_waiting_place(url: str, key: bytes, job: bytes, timeout_s: float, tls: TlsPolicy | None = None) -> Store:
    """Open the part of the job's store in which processes ask to join; see `open_store`.

    Raises:
        RendezvousError: the store cannot be used, or was not reached in `timeout_s` seconds.
    """
    return open_store(url, f"unisono/{job.hex()}/join/", key=key, job=job, timeout_s=timeout_s, tls=tls)


def torch_store_of(store: Any, rank: int, size: int, timeout_s: float) -> Store:
    """Return the part of a store of torch.distributed that belongs to this rendezvous; see `openings.agree`.

    Args:
        store: the store, or the URL ``torch://host:port`` of the store of torchrun's agent.
        rank: this rank.
        size: the number of ranks.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        UsageError: `store` is not a store of torch.distributed.
        RendezvousError: the store cannot be used, or ranks did not arrive in time.
    """
    if not isinstance(store, str) and not all(hasattr(store, name) for name in ("compare_set", "set", "delete_key")):
        raise UsageError(f"store must be a URL or a store of torch.distributed, not {store!r}")
    from unisono.transports.rendezvous.openings import agree
    from unisono.transports.rendezvous.torch_store import TorchStore, connect

    opened = TorchStore(connect(*host_and_port(store), timeout_s) if isinstance(store, str) else store)
    return PrefixStore(opened, agree(opened, rank, size, timeout_s))


def store_of_process_group(rank: int, size: int) -> Any | None:
    """Return the store of torch's default process group if it has this rank and size; otherwise None."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    if (distributed.get_rank(), distributed.get_world_size()) != (rank, size):
        return None
    return distributed.distributed_c10d._get_default_store()


def host_and_port(url: str, server: str = "store") -> tuple[str, int]:
    """Return the host and the port in the `url` of a server; raises `UsageError` if either is missing."""
    host, _, port = url.partition("://")[2].partition("/")[0].rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 1 << 16):
        raise UsageError(
            f"the {server} {url!r} cannot be used: it must name a host and a port, such as tcp://127.0.0.1:29400"
        )
    return host, int(port)


def serving_host(url: str, *, has_key: bool) -> str:
    """Return the host on which to serve the store at `url`; empty for all interfaces.

    A name may be that of a service, as in Kubernetes, and on its own machine it may mean loopback, as on Debian. So a
    store with a key, which strangers cannot use, is served on all interfaces if the URL has a name and no address.
    """
    host = host_and_port(url)[0]
    return "" if has_key and not is_numeric(host) else host


def _tcp(url: str, prefix: str, key: bytes | None, job: bytes, timeout_s: float, tls: TlsPolicy | None) -> Store:
    host, port = host_and_port(url)
    return TcpStore(host, port, key=key, job=job, timeout_s=timeout_s, prefix=prefix, tls=tls)


def _file(url: str, _prefix: str, _key: bytes | None, _job: bytes, _timeout_s: float, _tls: TlsPolicy | None) -> Store:
    path = url.removeprefix("file://")
    if not path.startswith("/"):
        raise UsageError(f"the store {url!r} cannot be used: write file:///absolute/path")
    from unisono.transports.rendezvous.file_store import FileStore

    return FileStore(path)


def _redis(url: str, _prefix: str, _key: bytes | None, _job: bytes, timeout_s: float, _tls: TlsPolicy | None) -> Store:
    from unisono.transports.rendezvous.redis_store import RedisStore

    return RedisStore(url, timeout_s)


_SCHEMES: dict[str, Callable[[str, str, bytes | None, bytes, float, TlsPolicy | None], Store]] = {
    "tcp": _tcp,
    "file": _file,
    "redis": _redis,
    "rediss": _redis,
}
