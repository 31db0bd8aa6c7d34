"""The parameters of an optimizer by name, including those that the program adds or replaces later."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from unisono import UsageError


class TrainedParameters:
    """Names for the parameters of an optimizer.

    Args:
        optimizer: an optimizer of torch. The program may change its `param_groups` at any time; `update` reads them
            again.
        named_parameters: names and parameters, which include those of the optimizer; None to number the parameters.

    Attributes:
        named: all parameters by name.
        own: the parameters of the optimizer by name, in its order.
        added: the names of parameters that the optimizer did not have at first.

    Raises:
        UsageError: two parameters have the same name, one has two names, or `named_parameters` lacks a parameter of the
            optimizer.
    """

    def __init__(self, optimizer: Any, named_parameters: Iterable[tuple[str, Any]] | None) -> None:
        self._optimizer = optimizer
        self._ids = self._current_ids()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.named = _named(parameters, named_parameters)
        self.own: dict[str, Any] = {}
        self.added: list[str] = []
        self._names = {id(parameter): name for name, parameter in self.named.items()}
        self._name_at: dict[tuple[int, int], str] = {}  # by the index of the group and the index in it
        self._name_all()

    def update(self) -> bool:
        """Read the groups of the optimizer again; return whether it has other parameters now.

        A parameter that replaces another one gets its name. Any other new parameter is named by its place, such as
        ``param_groups[1][0]``, so that it has the same name on all ranks that add it there.
        """
        ids = self._current_ids()
        if ids == self._ids:
            return False
        self._ids = ids
        self._name_all()
        return True

    def _current_ids(self) -> list[int]:
        return [id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]]

    def _name_all(self) -> None:
        present, before, self._name_at = set(self._ids), self._name_at, {}
        self.own.clear()
        for group_index, group in enumerate(self._optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                place = (group_index, index)
                name = self._names.get(id(parameter))
                if name is None:
                    name = self._new_name(place, before.get(place), present)
                    if name in self.named:
                        del self._names[id(self.named[name])]
                    else:
                        self.added.append(name)
                    self.named[name], self._names[id(parameter)] = parameter, name
                self.own[name] = parameter
                self._name_at[place] = name

    def _new_name(self, place: tuple[int, int], before: str | None, present: Collection[int]) -> str:
        if before is not None and id(self.named[before]) not in present:
            return before
        name = "param_groups[{}][{}]".format(*place)
        return name if name not in self.named else f"{name} #{len(self.named)}"


def _named(parameters: list[Any], named_parameters: Iterable[tuple[str, Any]] | None) -> dict[str, Any]:
    pairs = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    pairs = list(named_parameters) if named_parameters is not None else pairs
    named = dict(pairs)
    if len(named) != len(pairs):
        raise UsageError("two parameters in named_parameters have the same name: rename one")
    ids = {id(parameter) for parameter in named.values()}
    if len(ids) != len(named):
        raise UsageError("a parameter has two names in named_parameters: give it one, as model.named_parameters() does")
    if unnamed := [tuple(parameter.shape) for parameter in parameters if id(parameter) not in ids]:
        raise UsageError(f"named_parameters lacks parameters of the optimizer, with the shapes {unnamed}")
    return named
