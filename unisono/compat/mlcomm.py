"""The calls of the Cray PE ML plugin (``ml_comm``, ``dl_comm``) over Unisono: ``import unisono.compat.mlcomm as mc``.

A serial training script becomes parallel in five steps: the import, `init` and `config_team`, `broadcast` of the
parameters, `gradients` between computing and applying them, and `finalize`. The functions take lists of arrays of
numpy, torch, JAX or TensorFlow, also inside a ``tf.function``. All ranks make the same calls in the same order.

Names, arguments, their order and results are those of the plugin. There are three differences. A wrong call raises a
`UsageError` that says what to do. Ranks that disagree get a `MismatchError` on all of them, where the plugin hangs. And
ranks are started by `unisono run`, `mpirun` or `torchrun`, so `init_mpi` needs no MPI.
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
    """A team: a schedule of steps, and the reducer that follows it."""

    def __init__(
        self, world: Communicator, nthreads: int, ksteps: int, max_steps: int, verbosity: int, perf_freq: int
    ) -> None:
        is_prompt = abs(ksteps) == max_steps
        # At least the last step is prompt: it also applies the step in flight, so that no gradient is lost.
        last = max(-ksteps, 1)
        self.reducer = GradientReducer(
            world,
            lag=0 if is_prompt else 1,
            warmup_fraction=0.0 if is_prompt else max(ksteps, 0) / max_steps,
            cooldown_fraction=0.0 if is_prompt else last / max_steps,
            total_steps=max_steps,
            teams=nthreads,
        )
        self.max_steps = max_steps
        self.step = 0
        self._prints_every = perf_freq if verbosity > 0 and world.rank == 0 else 0

    def reduce(self, arrays: Mapping[int, np.ndarray[Any, Any]]) -> None:
        """Overwrite each array with the mean of the step that is due, or with zeros if none is."""
        for index, array in arrays.items():
            self.reducer.ready(f"gradient {index}", array)
        self.reducer.finish()
        self.step += 1
        if self._prints_every and self.step % self._prints_every == 0:
            report = self.reducer.report()
            times = f"{report.step_s * 1e3:.3g} ms a step, of which {report.exposed_s * 1e3:.3g} ms waiting"
            sys.stdout.write(f"mlcomm: step {self.step} of {self.max_steps}: {times}\n")


class _PluginState:
    """The state of the plugin between `init_mpi` and `finalize`.

    Attributes:
        world: the ranks.
        is_own: whether the plugin has opened `world` and must close it.
        nthreads, nteams, max_elements: the arguments of `init`; 0 before it.
        teams: by number, the teams that `config_team` has configured.
    """

    def __init__(self, world: Communicator, *, is_own: bool) -> None:
        self.world = world
        self.is_own = is_own
        self.nthreads = self.nteams = self.max_elements = 0
        self.teams: dict[int, _Team] = {}


_job: _PluginState | None = None


def init_mpi(*, world: Communicator | None = None) -> None:
    """Join the other ranks. After it, all functions except those for teams and gradients can be called.

    Args:
        world: a communicator that is already open; by default, `unisono.init` opens one.

    Raises:
        UsageError: it has been called before.
        RendezvousError: as in `unisono.init`.
    """
    global _job  # noqa: PLW0603  (the plugin has one state for the process, because its functions are those of a module)
    if _job is not None:
        raise UsageError("the plugin is already initialised: call finalize() first")
    _job = _PluginState(init_world() if world is None else world, is_own=world is None)


def init(
    nthreads_per_team: int = 1,
    nteams: int = 1,
    max_elements: int = 0,
    framework: str = "",
    *,
    world: Communicator | None = None,
) -> None:
    """Set the number and the size of teams. It joins the other ranks unless `init_mpi` has.

    Args:
        nthreads_per_team: how many reductions of a team may be in flight at a time. They need no threads here.
        nteams: the number of teams, for gradients of different models.
        max_elements: the greatest number of elements in the gradients of a step; 0 for any number.
        framework: ignored here; "tensorflow" with the plugin.
        world: as in `init_mpi`.

    Raises:
        UsageError: a number is too small, or `init` has been called before; nothing has been sent.
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
        raise UsageError("the plugin is already initialised: call finalize() first")
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
    """Set the schedule of a team, which starts again. A step of an earlier schedule that is in flight is dropped.

    Args:
        team: the number of the team, from 0.
        transition_alg: must be 0.
        ksteps: the number of synchronous steps at the beginning, in which `gradients` returns the means of the same
            step. In later steps it returns the means of the step before, while those of this step are being reduced. If
            it is negative, the last -ksteps steps are synchronous instead. With `max_steps`, all steps are.
        max_steps: the number of all steps. The last one returns the sum of its own gradients and those in flight.
        verbosity: with 1 or more, rank 0 prints the times of steps.
        perf_freq: in how many steps it prints them once.

    Raises:
        UsageError: `init` has not been called, there is no such team, or a number has a value that it cannot have;
            nothing has been sent.
    """
    job = _initialised("config_team")
    _check_team(job, team)
    if transition_alg != 0:
        raise UsageError(f"transition_alg must be 0, not {transition_alg!r}: Unisono has only one transition")
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
    """Copy the arrays of the root to all ranks, and check that all ranks then hold the same bits.

    Args:
        tensors: a list of arrays, of the same dtypes and shapes on all ranks. Arrays of numpy and torch, and a
            ``tf.Variable``, are overwritten.
        root: the rank whose arrays are copied.

    Returns:
        The arrays. For an array of JAX and a ``tf.Tensor`` it is a new one.

    Raises:
        UsageError: an element is no array that can be written; nothing has been sent.
        MismatchError: dtypes or shapes differ; the message names the first array that differs.
    """
    world = _joined("broadcast").world

    def copy(arrays: list[Any]) -> list[Any]:
        named = {f"tensor {index}": x for index, x in enumerate(arrays)}
        return list(broadcast_parameters(world, named, root).values())

    return _outside_of_graphs(_listed(tensors, "broadcast"), copy)


def gradients(grads: Sequence[Any], team: int = 0) -> list[Any]:
    """Return the means of gradients over all ranks, of this step or of the step before: see `config_team`.

    In the first step that is not synchronous, the returned arrays are zeros.

    Args:
        grads: a list of arrays of floats, of the same dtypes and shapes on all ranks and in each step. Arrays of numpy
            and torch are overwritten. An element may be None on all ranks; it is returned as None.
        team: the number of the team.

    Raises:
        UsageError: `config_team` has not been called, its `max_steps` steps are over, or there are more elements than
            `max_elements`; nothing has been sent. Or a rank has passed an object that is no gradient.
        MismatchError: the ranks differ; the message names the first gradient that differs.
    """
    job = _initialised("gradients")
    _check_team(job, team)
    if team not in job.teams:
        raise UsageError(f"team {team} has no schedule: call config_team({team}, …) before gradients()")
    configured = job.teams[team]

    def reduce(passed: list[Any]) -> list[Any]:
        if configured.step == configured.max_steps:
            raise UsageError(
                f"team {team} has made its {configured.max_steps} steps: call config_team({team}, …) for more"
            )
        lent = {index: flatten(x, f"gradient {index}") for index, x in enumerate(passed) if x is not None}
        elements = sum(each.flat.size for each in lent.values())
        if job.max_elements and elements > job.max_elements:
            raise UsageError(f"the gradients have {elements} elements, more than max_elements={job.max_elements}")
        arrays = {
            index: (each.flat if each.writable else each.flat.copy()).reshape(each.shape)
            for index, each in lent.items()
        }
        configured.reduce(arrays)
        results = {index: each.put_back() if each.writable else arrays[index] for index, each in lent.items()}
        return [results.get(index) for index in range(len(passed))]

    return _outside_of_graphs(_listed(grads, "gradients"), reduce)


def average(metric: Any) -> Any:
    """Overwrite an array of floats, such as a loss, with its mean over all ranks, and return it.

    Raises:
        UsageError: `metric` is no array of floats, or cannot be written; nothing has been sent.
    """
    world = _joined("average").world
    lent = flatten(metric, "metric")
    if lent.flat.dtype.kind not in "fcV" or not lent.writable:
        raise UsageError(f"metric is {lent.described()}: pass a writable array of floats, such as np.array([loss])")
    world.allreduce(lent.flat, "avg", out=lent.flat)
    return lent.put_back()


def check_buffers_match(buffers: Sequence[Any], verbosity: int = 0) -> int:
    """Return 0 on all ranks if all hold the same bits, and 1 on all ranks otherwise.

    Args:
        buffers: a list of arrays, which are only read.
        verbosity: with 1 or more, rank 0 prints the first array that differs, and the ranks.
    """
    world = _joined("check_buffers_match").world
    named = {f"buffer {index}": x for index, x in enumerate(_listed(buffers, "check_buffers_match"))}
    difference = first_difference(world, named)
    if difference is not None and verbosity > 0 and world.rank == 0:
        sys.stdout.write(f"mlcomm: {difference}\n")
    return int(difference is not None)


def finalize() -> None:
    """Leave the other ranks. After it, `init` may be called again.

    It may be registered by ``atexit``. If a schedule has not come to its end, its step in flight is dropped.

    Raises:
        UsageError: the plugin is not initialised.
    """
    global _job
    job, _job = _joined("finalize"), None
    for team in job.teams.values():
        team.reducer.flush()
        team.reducer.close()
    if job.is_own:
        job.world.close()


def _joined(call: str) -> _PluginState:
    if _job is None:
        raise UsageError(f"{call}() needs the other ranks: call init() or init_mpi() first")
    return _job


def _initialised(call: str) -> _PluginState:
    job = _joined(call)
    if not job.nteams:
        raise UsageError(f"{call}() needs teams: call init(nthreads_per_team, nteams, max_elements) first")
    return job


def _check_team(job: _PluginState, team: int) -> None:
    if not _is_integer(team) or not 0 <= team < job.nteams:
        raise UsageError(
            f"there is no team {team!r}: pass a number from 0 to nteams - 1, with nteams={job.nteams} in init()"
        )


def _check_integer(name: str, value: int, least: int) -> None:
    if not _is_integer(value) or value < least:
        raise UsageError(f"{name} must be an integer, {least} or more, not {value!r}")


def _is_integer(value: object) -> bool:
    """Return whether `value` is an integer of Python or numpy. Sizes of models often are integers of numpy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _listed(tensors: Sequence[Any], call: str) -> list[Any]:
    if not isinstance(tensors, (list, tuple)):
        raise UsageError(f"{call}() takes a list of arrays, not one of type {type(tensors).__name__}")
    return list(tensors)


def _outside_of_graphs(tensors: list[Any], call: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Run ``call(tensors)``. If TensorFlow traces a graph, add the call to the graph, which makes it when it runs."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or not any(_is_symbolic(tensorflow, x) for x in tensors):
        return call(tensors)
    inputs = [tensorflow.convert_to_tensor(x) for x in tensors if x is not None]

    def run(*arrays: Any) -> list[Any]:
        return call([np.array(x) for x in arrays])  # copies, because arrays of TensorFlow must not be written

    outputs = tensorflow.numpy_function(run, inputs, [x.dtype for x in inputs])
    for x, output in zip(inputs, outputs, strict=True):
        output.set_shape(x.shape)
    remaining = iter(outputs)
    return [None if x is None else next(remaining) for x in tensors]


def _is_symbolic(tensorflow: Any, x: Any) -> bool:
    return isinstance(x, tensorflow.Tensor) and not hasattr(x, "numpy")
