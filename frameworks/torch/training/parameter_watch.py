"""Watching a model: a function is called before one of its modules hands out a parameter.

Theory of operation
-------------------
A module keeps its parameters in a dictionary. Every access reads that dictionary: `module.weight` in the forward of any
module, `model.parameters()` and `model.state_dict()`. So `watch` replaces it by a dictionary that calls a function
before it returns a parameter. A hook of the module's forward would see less: attention reads the weights of a layer
whose forward is never called, and the head of a language model reads those of its embedding.

If the program keeps a reference, as by ``weight = layer.weight`` before a loop, later reads are not seen. The recurrent
layers of torch keep references too, but they look all of them up in each forward, because one may have been replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, ItemsView, ValuesView
from typing import Any

Watcher = Callable[[Any], None]


class WatchedParameters(dict[str, Any]):
    """The parameters of a module by name. Each watcher is called with a parameter before it is returned.

    A copy or a pickle of it is a plain dictionary without watchers.
    """

    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.watchers: list[Watcher] = []

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        for watcher in self.watchers:
            watcher(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (`self.get` would call itself)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._notify_all()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._notify_all()
        return super().values()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)

    def _notify_all(self) -> None:
        for name in self:
            self[name]


def watch(model: Any, parameters: Collection[Any], watcher: Watcher) -> Callable[[], None]:
    """Call ``watcher(parameter)`` before a module of `model` hands out a parameter; return a function that ends this.

    Args:
        model: the model.
        parameters: modules that own none of these parameters are not watched.
        watcher: the function to call, for all parameters of the watched modules. Its argument is None where a module
            has no parameter but could have one.
    """
    watched_ids = {id(parameter) for parameter in parameters}
    modules = []
    for module in model.modules():
        own = module._parameters
        if watched_ids.isdisjoint(map(id, dict.values(own))):
            continue
        if not isinstance(own, WatchedParameters):
            own = module.__dict__["_parameters"] = WatchedParameters(own)
        own.watchers.append(watcher)
        modules.append(module)

    def end() -> None:
        for module in modules:
            _unwatch(module, watcher)

    return end


def owned(model: Any) -> set[int]:
    """Return the ids of all parameters that modules of `model` own, without calling a watcher."""
    return {id(parameter) for module in model.modules() for parameter in dict.values(module._parameters)}


def _unwatch(module: Any, watcher: Watcher) -> None:
    own = module._parameters
    if isinstance(own, WatchedParameters) and watcher in own.watchers:
        own.watchers.remove(watcher)
        if not own.watchers:
            module.__dict__["_parameters"] = dict(own.items())
