"""Modules that tell when one of their parameters is looked up.

Theory of operation. A module keeps its own parameters in a dictionary, through which all goes that asks the module for
them: `module.weight` in its forward or in that of another one, `model.parameters()`, `model.state_dict()`. That is more
than a hook of its forward would see: attention reads the weights of a layer whose forward is never called, and the head
of a language model those of its embedding. So another dictionary takes its place, which tells before it hands out.

What a program holds by itself, as `weight = layer.weight` does before a loop, nobody sees being read. Recurrent layers
of torch hold theirs like that, but look all of them up in each forward, in case that they have been replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, ItemsView, ValuesView
from typing import Any

Tell = Callable[[Any], None]


class Watched(dict[str, Any]):
    """The parameters that a module owns, by name; each watcher is called with one before it is handed out.

    A copy of it, and what is pickled, is a plain dictionary, which nobody watches.
    """

    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.watchers: list[Tell] = []

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        for tell in self.watchers:
            tell(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (which would call itself)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._tell_all()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._tell_all()
        return super().values()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)

    def _tell_all(self) -> None:
        for name in self:
            self[name]


def watch(model: Any, parameters: Collection[Any], tell: Tell) -> Callable[[], None]:
    """Have ``tell(parameter)`` called before a module of `model` hands out a parameter, and return what ends that.

    Args:
        model: the module.
        parameters: modules that own none of these are left as they are.
        tell: it is called for all parameters of the others; also None, where a module could have one.
    """
    wanted = {id(parameter) for parameter in parameters}
    modules = []
    for module in model.modules():
        own = module._parameters
        if wanted.isdisjoint(map(id, dict.values(own))):
            continue
        if not isinstance(own, Watched):
            own = module.__dict__["_parameters"] = Watched(own)
        own.watchers.append(tell)
        modules.append(module)

    def end() -> None:
        for module in modules:
            _unwatch(module, tell)

    return end


def owned(model: Any) -> set[int]:
    """Return the identities of all parameters that modules of `model` own, without looking one up."""
    return {id(parameter) for module in model.modules() for parameter in dict.values(module._parameters)}


def _unwatch(module: Any, tell: Tell) -> None:
    own = module._parameters
    if isinstance(own, Watched) and tell in own.watchers:
        own.watchers.remove(tell)
        if not own.watchers:
            module.__dict__["_parameters"] = dict(own.items())
