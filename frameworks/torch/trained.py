"""The parameters that an optimizer trains, by name, also those that the program adds or replaces later."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from unisono import UsageError


class TrainedParameters:
    """Names for the parameters of an optimizer.

    Args:
        optimizer: of torch. The program may change its `param_groups` at any time; `update` looks at them again.
        named_parameters: names and parameters, among which those of the optimizer are; None to number these.

    Attributes:
        named: all parameters by name.
        own: those of them that the optimizer has, in its order.
        added: the names that the optimizer did not have in the beginning.

    Raises:
        UsageError: two parameters have one name, one has two, or those of the optimizer are not among them.
    """

    def __init__(self, optimizer: Any, named_parameters: Iterable[tuple[str, Any]] | None) -> None:
        self._optimizer = optimizer
        self._ids = self._current_ids()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.named = _named(parameters, named_parameters)
        self.own: dict[str, Any] = {}
        self.added: list[str] = []
        self._names = {id(parameter): name for name, parameter in self.named.items()}
        self._name_at: dict[tuple[int, int], str] = {}  # by the numbers of the group and of the parameter in it
        self._name_all()

    def update(self) -> bool:
        """Look at the groups of the optimizer again; return whether it has other parameters now.

        A parameter in the place of one that is gone gets its name. Another new one is called by its place, such as
        ``param_groups[1][0]``, so that it has the same name on all ranks that add the same.
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
        for number, group in enumerate(self._optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                place = (number, index)
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
        raise UsageError("two of named_parameters have the same name")
    known = {id(parameter) for parameter in named.values()}
    if len(known) != len(named):
        raise UsageError("a parameter has two names in named_parameters: give it one, as model.named_parameters() does")
    if unnamed := [tuple(parameter.shape) for parameter in parameters if id(parameter) not in known]:
        raise UsageError(f"named_parameters lacks parameters of the optimizer, with the shapes {unnamed}")
    return named
