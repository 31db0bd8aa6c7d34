"""The calls of the Cray PE ML plugin (``ml_comm``, ``dl_comm``) over Unisono: ``import unisono.compat.mlcomm as mc``.

A serial training script becomes a parallel one in five steps: import, `init` and `config_team`, `broadcast` of the
parameters, `gradients` between computing and applying them, `finalize`. Arrays are lists of those of numpy, torch, JAX
or TensorFlow; inside a ``tf.function`` too. All ranks make the same calls in the same order.

What is as with the plugin: names, the order and meaning of arguments, what is returned. What is not: a wrong call is a
`UsageError` that says what to do, and ranks that disagree get a `MismatchError` on all of them, where there were hangs.
How ranks start and meet is Unisono's (`unisono run`, `mpirun`, `torchrun`); there need be no MPI for `init_mpi`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from unisono import Communicator, GradientReducer, UsageError, init as init_world
from unisono.data_parallel import broadcast_parameters, first_difference
from unisono.frameworks.arrays import flatten

__all__ = [
    "average",
    "barrier",
    "broadcast",
    "check_buffers_match",
    "config_team",
    "finalize",
    "get_nranks",
    "get_rank",
    "gradients",
    "init",
    "init_mpi",
]


class _Team:
    """A schedule of steps and the reducer that keeps to it."""

    def __init__(
        self, world: Communicator, nthreads: int, ksteps: int, max_steps: int, verbosity: int, perf_freq: int
    ) -> None:
        prompt = abs(ksteps) == max_steps
        # What is in flight in the end is applied with the last step, so that nothing is lost.
        last = max(-ksteps, 1)
        self.reducer = GradientReducer(
            world,
            lag=0 if prompt else 1,
            warmup_fraction=0.0 if prompt else max(ksteps, 0) / max_steps,
            cooldown_fraction=0.0 if prompt else last / max_steps,
            total_steps=max_steps,
            teams=nthreads,
        )
        self.max_steps = max_steps
        self.step = 0
        self._tells_every = perf_freq if verbosity > 0 and world.rank == 0 else 0

    def reduce(self, arrays: Mapping[int, np.ndarray[Any, Any]]) -> None:
        """Overwrite each array with the mean of the step that is due, or with zeros if none is."""
        for index, array in arrays.items():
            self.reducer.ready(f"gradient {index}", array)
        self.reducer.finish()
        self.step += 1
        if self._tells_every and self.step % self._tells_every == 0:
            report = self.reducer.report()
            times = f"{report.step_s * 1e3:.3g} ms a step, of which {report.exposed_s * 1e3:.3g} ms waiting"
            sys.stdout.write(f"mlcomm: step {self.step} of {self.max_steps}: {times}\n")


class _Job:
    """What there is between `init_mpi` and `finalize`."""

    def __init__(self, world: Communicator, *, is_own: bool) -> None:
        self.world = world
        self.is_own = is_own
        self.nthreads = self.nteams = self.max_elements = 0  # until `init`
        self.teams: dict[int, _Team] = {}


_job: _Job | None = None


def init_mpi(*, world: Communicator | None = None) -> None:
    """Meet the other ranks. After it, everything but teams and gradients can be called.

    Args:
        world: the ranks, if they have met; by default they do here, by `unisono.init`.

    Raises:
        UsageError: it has been called.
        RendezvousError: as in `unisono.init`.
    """
    global _job  # noqa: PLW0603  (the plugin is one for the process, as its functions are of a module)
    if _job is not None:
        raise UsageError("the plugin has been initialised: call finalize() before it is again")
    _job = _Job(init_world() if world is None else world, is_own=world is None)


def init(
    nthreads_per_team: int = 1,
    nteams: int = 1,
    max_elements: int = 0,
    framework: str = "",
    *,
    world: Communicator | None = None,
) -> None:
    """Say how many teams there will be, and of what size; meets the other ranks if `init_mpi` has not.

    Args:
        nthreads_per_team: how many reductions of a team may be under way at a time; they need no threads here.
        nteams: the number of teams, for gradients of different models.
        max_elements: how many elements there are in the gradients of a step, at most; 0 for any number.
        framework: of no consequence here; "tensorflow" with the plugin.
        world: as in `init_mpi`.

    Raises:
        UsageError: a number cannot be, or it has been called; nothing has been sent.
        RendezvousError: as in `unisono.init`.
    """
    for name, number, least in (
        ("nthreads_per_team", nthreads_per_team, 1),
        ("nteams", nteams, 1),
        ("max_elements", max_elements, 0),
    ):
        _check_integer(name, number, least)
    if not isinstance(framework, str):
        raise UsageError(f"framework must be a name, such as 'tensorflow', not {framework!r}")
    if _job is None:
        init_mpi(world=world)
    elif _job.nteams or world is not None:
        raise UsageError("the plugin has been initialised: call finalize() before it is again")
    job = _joined("init")
    job.nthreads, job.nteams, job.max_elements = nthreads_per_team, nteams, max_elements


def config_team(
    team: int = 0,
    transition_alg: int = 0,
    ksteps: int = 1,
    max_steps: int = 1,
    verbosity: int = 0,
    perf_freq: int = 100,
) -> None:
    """Set the schedule of a team, which begins anew; what is still in flight from before is dropped.

    Args:
        team: its number, from 0.
        transition_alg: 0, the only one.
        ksteps: the number of steps in the beginning that are synchronous: `gradients` returns the means of the same
            step. In later ones it returns those of the step before, while these are being reduced. If it is negative,
            the last -ksteps steps are synchronous, and those before are not. `max_steps` makes all synchronous.
        max_steps: how many steps there will be. The last one returns what is in flight as well, in a sum.
        verbosity: with 1 or more, rank 0 prints how long steps take,
        perf_freq: once in so many steps.

    Raises:
        UsageError: `init` has not been called, there is no such team, or a number cannot be; nothing has been sent.
    """
    job = _initialised("config_team")
    _check_team(job, team)
    if transition_alg != 0:
        raise UsageError(f"transition_alg must be 0, not {transition_alg!r}: there is one way to become asynchronous")
    _check_integer("max_steps", max_steps, 1)
    _check_integer("ksteps", ksteps, -max_steps)
    if ksteps > max_steps:
        raise UsageError(f"ksteps must be from -max_steps to max_steps, {max_steps}, not {ksteps}")
    _check_integer("verbosity", verbosity, 0)
    _check_integer("perf_freq", perf_freq, 1)
    if team in job.teams:
        job.teams.pop(team).reducer.close()
    job.teams[team] = _Team(job.world, job.nthreads, ksteps, max_steps, verbosity, perf_freq)


def get_rank() -> int:
    """Return this rank, from 0."""
    return _joined("get_rank").world.rank


def get_nranks() -> int:
    """Return the number of ranks."""
    return _joined("get_nranks").world.size


def barrier() -> None:
    """Wait until all ranks have called it."""
    _joined("barrier").world.barrier()


def broadcast(tensors: Sequence[Any], root: int = 0) -> list[Any]:
    """Copy the arrays of the root to all ranks, and check that all hold the same bits then.

    Args:
        tensors: a list of arrays, of the same dtypes and shapes on all ranks. Those of numpy and torch, and a
            ``tf.Variable``, are overwritten.
        root: the rank whose arrays are copied.

    Returns:
        The arrays; of JAX, and for a ``tf.Tensor``, new ones.

    Raises:
        UsageError: these are no arrays that can be written; nothing has been sent.
        MismatchError: dtypes or shapes differ; it names the first array that does.
    """
    world = _joined("broadcast").world

    def copy(given: list[Any]) -> list[Any]:
        named = {f"tensor {index}": x for index, x in enumerate(given)}
        return list(broadcast_parameters(world, named, root).values())

    return _outside_of_graphs(_listed(tensors, "broadcast"), copy)


def gradients(grads: Sequence[Any], team: int = 0) -> list[Any]:
    """Return the means of gradients over all ranks: of this step, or of the step before, as `config_team` has it.

    In the first step that is not synchronous there is nothing to return yet: the arrays are zeros.

    Args:
        grads: a list of arrays of floats, of the same dtypes and shapes on all ranks and in each step. Those of numpy
            and torch are overwritten. None stands for no gradient, on all ranks alike, and is returned.
        team: the number of the team.

    Raises:
        UsageError: `config_team` has not been called, its `max_steps` have been made, or there are more elements than
            `max_elements`; nothing has been sent. Or some rank has given what is no gradient.
        MismatchError: the ranks differ; it names the first gradient that does.
    """
    job = _initialised("gradients")
    _check_team(job, team)
    if team not in job.teams:
        raise UsageError(f"team {team} has no schedule: call config_team({team}, …) before gradients()")
    its = job.teams[team]

    def reduce(given: list[Any]) -> list[Any]:
        if its.step == its.max_steps:
            raise UsageError(f"team {team} has made its {its.max_steps} steps: call config_team({team}, …) for more")
        lent = {index: flatten(x, f"gradient {index}") for index, x in enumerate(given) if x is not None}
        elements = sum(each.flat.size for each in lent.values())
        if job.max_elements and elements > job.max_elements:
            raise UsageError(f"the gradients have {elements} elements, more than max_elements={job.max_elements}")
        arrays = {
            index: (each.flat if each.writable else each.flat.copy()).reshape(each.shape)
            for index, each in lent.items()
        }
        its.reduce(arrays)
        made = {index: each.put_back() if each.writable else arrays[index] for index, each in lent.items()}
        return [made.get(index) for index in range(len(given))]

    return _outside_of_graphs(_listed(grads, "gradients"), reduce)


def average(metric: Any) -> Any:
    """Overwrite an array of floats, such as a loss, with its mean over all ranks, and return it.

    Raises:
        UsageError: it is no such array, or cannot be written; nothing has been sent.
    """
    world = _joined("average").world
    lent = flatten(metric, "metric")
    if lent.flat.dtype.kind not in "fcV" or not lent.writable:
        raise UsageError(f"metric is {lent.described()}: pass an array of floats that can be written: np.array([loss])")
    world.allreduce(lent.flat, "avg", out=lent.flat)
    return lent.put_back()


def check_buffers_match(buffers: Sequence[Any], verbosity: int = 0) -> int:
    """Return 0 if all ranks hold the same bits, and 1 otherwise; on all ranks.

    Args:
        buffers: a list of arrays; only read.
        verbosity: with 1 or more, rank 0 prints which is the first that differs, and on which ranks.
    """
    world = _joined("check_buffers_match").world
    named = {f"buffer {index}": x for index, x in enumerate(_listed(buffers, "check_buffers_match"))}
    difference = first_difference(world, named)
    if difference is not None and verbosity > 0 and world.rank == 0:
        sys.stdout.write(f"mlcomm: {difference}\n")
    return int(difference is not None)


def finalize() -> None:
    """Leave the other ranks. After it, `init` may be called again.

    It may be registered by ``atexit``. What is in flight of a schedule that has not come to its end is dropped.

    Raises:
        UsageError: there is nothing to finalize.
    """
    global _job
    job, _job = _joined("finalize"), None
    for team in job.teams.values():
        team.reducer.flush()
        team.reducer.close()
    if job.is_own:
        job.world.close()


def _joined(call: str) -> _Job:
    if _job is None:
        raise UsageError(f"{call}() needs the other ranks: call init() or init_mpi() before")
    return _job


def _initialised(call: str) -> _Job:
    job = _joined(call)
    if not job.nteams:
        raise UsageError(f"{call}() needs teams: call init(nthreads_per_team, nteams, max_elements) before")
    return job


def _check_team(job: _Job, team: int) -> None:
    if not _is_integer(team) or not 0 <= team < job.nteams:
        raise UsageError(f"there is no team {team!r}: init() was given nteams={job.nteams}, and they count from 0")


def _check_integer(name: str, value: int, least: int) -> None:
    if not _is_integer(value) or value < least:
        raise UsageError(f"{name} must be an integer, {least} or more, not {value!r}")


def _is_integer(value: object) -> bool:
    """Return whether it is an integer of Python or numpy, which sizes of models often are."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _listed(tensors: Sequence[Any], call: str) -> list[Any]:
    if not isinstance(tensors, (list, tuple)):
        raise UsageError(f"{call}() takes a list of arrays, not one of type {type(tensors).__name__}")
    return list(tensors)


def _outside_of_graphs(tensors: list[Any], call: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Make a call on a list of arrays; where TensorFlow traces a graph, let the graph make it when it runs."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or not any(_is_symbolic(tensorflow, x) for x in tensors):
        return call(tensors)
    there = [tensorflow.convert_to_tensor(x) for x in tensors if x is not None]

    def run(*arrays: Any) -> list[Any]:
        return call([np.array(x) for x in arrays])  # TensorFlow's own must not be written

    made = tensorflow.numpy_function(run, there, [x.dtype for x in there])
    for x, result in zip(there, made, strict=True):
        result.set_shape(x.shape)
    left = iter(made)
    return [None if x is None else next(left) for x in tensors]


def _is_symbolic(tensorflow: Any, x: Any) -> bool:
    return isinstance(x, tensorflow.Tensor) and not hasattr(x, "numpy")
