"""`DiLoCo`, `BlockMomentum` and `LocalSGD` for JAX: functions of pytrees that now and then join the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from jax import tree_util

from unisono import Communicator, UsageError
from unisono.frameworks.outer import training

if TYPE_CHECKING:
    from unisono import Swarm

Tree = TypeVar("Tree")


class DiLoCo:
    """Training in which ranks take steps alone, and join their changes every `inner_steps` steps, for pytrees of JAX.

    Call `step` outside compiled functions, after each step of the inner optimizer, as of optax. At the end, all ranks
    call `synchronize`. All else is that of `unisono.data_parallel.DiLoCo`. A context manager that closes itself.

    Args:
        world: the ranks, or a swarm.
        parameters: a pytree of arrays of floats, with the same bits on all ranks. Leaves whose paths are equal up to
            the last key form a layer. On a swarm, begin with the attribute `parameters`.
        options: the other arguments of `unisono.data_parallel.DiLoCo`, such as `inner_steps`.

    Attributes:
        outer: the outer optimizer, with `state_dict` and `group`.

    Raises:
        UsageError, MismatchError: as for `unisono.data_parallel.DiLoCo`.
    """

    _kind: ClassVar[type[training.DiLoCo]] = training.DiLoCo

    def __init__(self, world: Communicator | Swarm, parameters: Any, **options: Any) -> None:
        named, self._structure = _named(parameters)
        self.outer = self._kind(world, named, **options)

    def __enter__(self) -> DiLoCo:
        self.outer.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.outer.__exit__(kind, error, trace)

    @property
    def parameters(self) -> Any:
        """The pytree with which training begins: on a swarm, the one that the members share. None after a step."""
        return self._tree(self.outer.parameters) if self.outer.parameters else None

    def step(self, parameters: Tree) -> Tree:
        """Count a step of the inner optimizer, and return the parameters to continue with.

        Raises:
            UsageError, MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: as for
                `unisono.data_parallel.DiLoCo.step`.
        """
        return cast(Tree, self._tree(self.outer.step(self._leaves(parameters))))

    def synchronize(self, parameters: Tree) -> Tree:
        """Average all parameters now, and return them, with the same bits on all ranks. All ranks call it."""
        return cast(Tree, self._tree(self.outer.synchronize(self._leaves(parameters))))

    def close(self) -> None:
        """Close the communicators. A second call does nothing."""
        self.outer.close()

    def _leaves(self, parameters: Any) -> dict[str, Any]:
        named, structure = _named(parameters)
        if structure != self._structure:
            raise UsageError(
                f"the parameters have the structure {structure}, and had {self._structure} at the start: "
                "pass the same pytree"
            )
        return named

    def _tree(self, named: dict[str, Any]) -> Any:
        return tree_util.tree_unflatten(self._structure, list(named.values()))


class BlockMomentum(DiLoCo):
    """`DiLoCo` with the defaults of `unisono.data_parallel.BlockMomentum`."""

    _kind = training.BlockMomentum


class LocalSGD(DiLoCo):
    """`DiLoCo` with the defaults of `unisono.data_parallel.LocalSGD`."""

    _kind = training.LocalSGD


def _named(parameters: Any) -> tuple[dict[str, Any], Any]:
    """Return the leaves of a pytree by their paths, in order, and the structure of the pytree."""
    pairs, structure = tree_util.tree_flatten_with_path(parameters)
    return {".".join(tree_util.keystr((key,)) for key in path): leaf for path, leaf in pairs}, structure
