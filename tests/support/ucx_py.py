"""A double of ucx-py's core interface, built on ucxx after the documentation of ucx-py.

The two interfaces differ. In ucx-py, functions post messages, and a message ends at once or by a callback that
`progress` calls. The address of a worker is an object with the buffer protocol.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any


def install(*, with_handles: bool) -> None:
    """Make the double importable as ucx-py, and ucxx not importable.

    Args:
        with_handles: whether objects have the attribute `handle`, with which native code can use UCX directly.
    """
    from ucxx._lib import arr, libucxx as real

    class Handled:
        inner: Any

        def __getattr__(self, name: str) -> Any:
            if name != "handle" or not with_handles:
                raise AttributeError(name)
            return self.inner.handle

    class UCXContext(Handled):
        def __init__(self, config_dict: Any = None, feature_flags: Any = (real.Feature.TAG,)) -> None:
            self.inner = real.UCXContext(dict(config_dict or {}), feature_flags=feature_flags)

    class UCXWorker(Handled):
        def __init__(self, context: UCXContext) -> None:
            self.inner = real.UCXWorker(context.inner)
            self.posted: list[tuple[Any, Callable[..., Any], tuple[Any, ...]]] = []

        def get_address(self) -> memoryview:
            return memoryview(bytes(self.inner.address.tobytes()))

        def progress(self) -> None:
            self.inner.progress()
            ended = [posted for posted in self.posted if posted[0].completed]
            self.posted = [posted for posted in self.posted if not posted[0].completed]
            for request, callback, arguments in ended:
                callback(request, None, *arguments)

    class UCXAddress:
        @classmethod
        def from_buffer(cls, buffer: Any) -> Any:
            return real.UCXAddress.create_from_buffer(buffer)

    class UCXEndpoint:
        @classmethod
        def create_from_worker_address(cls, worker: UCXWorker, address: Any, endpoint_error_handling: bool) -> Any:
            endpoint = cls()
            endpoint.worker = worker
            endpoint.inner = real.UCXEndpoint.create_from_worker_address(
                worker.inner, address, endpoint_error_handling=endpoint_error_handling
            )
            return endpoint

        worker: UCXWorker
        inner: Any

    def posted(worker: UCXWorker, request: Any, callback: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if request.completed:
            return None  # ucx-py does not call the callback then
        worker.posted.append((request, callback, arguments))
        return request

    def tag_send_nb(
        ep: UCXEndpoint, buffer: Any, nbytes: int, tag: int, cb_func: Any, cb_args: tuple[Any, ...] = ()
    ) -> Any:
        assert nbytes == buffer.nbytes
        return posted(ep.worker, ep.inner.tag_send(buffer, real.UCXXTag(tag)), cb_func, cb_args)

    def tag_recv_nb(
        worker: UCXWorker, buffer: Any, nbytes: int, tag: int, cb_func: Any, cb_args: tuple[Any, ...] = ()
    ) -> Any:
        assert nbytes == buffer.nbytes
        request = worker.inner.tag_recv(buffer, real.UCXXTag(tag), real.UCXXTagMaskFull)
        return posted(worker, request, cb_func, cb_args)

    names = {
        "Feature": real.Feature,
        **{kind.__name__: kind for kind in (UCXContext, UCXWorker, UCXAddress, UCXEndpoint)},
        **{function.__name__: function for function in (tag_send_nb, tag_recv_nb)},
    }
    for name, contents in (("ucp", {}), ("ucp._libs", {}), ("ucp._libs.ucx_api", names), ("ucp._libs.arr", vars(arr))):
        module = types.ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module
    sys.modules["ucxx"] = sys.modules["ucxx._lib.libucxx"] = None  # type: ignore[assignment]
