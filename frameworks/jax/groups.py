"""XLA's communicators, made for groups of devices whose members are known.

Theory of operation
-------------------
XLA makes a communicator when a program first uses a group of devices. It calls `MPI_Comm_split` and passes the first
device of the group and the rank of this process in it, but not the other members. The members cannot be inferred from
the calls of other processes, because those may use other groups at the same time, or none.

The text of the compiled program names the members. So `DeviceGroups.learn` reads the groups of every program after its
compilation, and rehearses each that has this process as a member and is new:

1. A program with a single sum over this group is compiled and run on this process alone.
2. XLA makes the communicator for it. `split` knows that its members are those of the rehearsed group.
3. The sum itself is left out by `xla.py`, so nothing is sent, and no process waits for another one.

XLA keeps the communicator, and the user's program uses it. If XLA makes a communicator outside of a rehearsal, its
members are unknown, and all calls on it are errors.

Open questions
--------------
Tried: `MPI_Comm_split` on all processes, as MPI defines it. Groups of different sizes that came together at the same
time looked like one good group, and their sums were wrong (decision 20). So members come from the text of the program.

Doubted: that text is no interface. XLA may write `replica_groups` in a fifth form, and a collective in an unknown form
is left out; its first call then raises an error, but never computes a wrong sum. A rehearsal relies on XLA keeping the
communicator that it has made. Programs that JAX loads without compiling them (`serialize_executable`) are not read.

This would change our mind: a table of collectives in XLA's C interface, or a split that names the members. Either would
replace this file and `replica_groups.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from unisono import Communicator
from unisono.errors import UsageError
from unisono.frameworks.jax.compatibility import call_when_compiled, run_sum_over
from unisono.frameworks.jax.replica_groups import groups_of

# The devices of a group, in its order.
Group: TypeAlias = "tuple[int, ...]"


class DeviceGroups:
    """The communicators of the groups of devices of this process.

    Args:
        world: the communicator of all processes. Groups are subgroups of a duplicate of it, because the program may
            make subgroups of `world` in another order.
        ranks: the rank of each process of JAX.
    """

    def __init__(self, world: Communicator, ranks: Sequence[int]) -> None:
        self._world = world.dup()
        self._ranks = ranks
        self._known: set[Group] = set()
        self._lock = threading.Lock()
        # The group that is rehearsed with its devices, and the number of its communicator.
        self._rehearsed: tuple[Group, dict[int, Any]] | None = None
        self._number: int | None = None
        call_when_compiled(self.learn)

    def learn(self, program: Callable[[], str], devices: np.ndarray) -> None:
        """Rehearse the new groups of a compiled program.

        Args:
            program: returns the text of the program.
            devices: its devices, of the shape (replicas, partitions).

        Raises:
            UsageError: the program has collectives, and several devices of a process.
        """
        if devices.size == 1:
            return
        by_number = {device.id: device for device in devices.flat}
        numbers = np.vectorize(lambda device: device.id, otypes=[np.int64])(devices)
        # If all groups of a collective have one device, as those of two devices do, XLA leaves it out.
        groups = [group for group in groups_of(program(), numbers) if len(group) > 1 or devices.size > 2]
        if groups:
            _check_one_device(devices)
        for group in groups:
            if any(self._is_here(by_number[number]) for number in group):
                self._rehearse(group, by_number)

    def split(self, number: int, first: int, rank: int) -> Communicator:
        """Return the communicator of the group that is rehearsed.

        Args:
            number: the number of the new communicator.
            first: the first device of the group, as XLA names it.
            rank: the rank of this process in the group.

        Raises:
            UsageError: another group is, or none.
        """
        if self._rehearsed is not None:
            group, by_number = self._rehearsed
            if group[0] == first and self._is_here(by_number[group[rank]]):
                self._number = number
                return self._world.subgroup([self._rank_of(by_number[each]) for each in group])
        raise UsageError(
            f"XLA makes a communicator with device {first} as its first device and this process as rank {rank}, and "
            "does not name its members. Unisono reads them from each program that JAX compiles in this process, and "
            "no such program has this group: compile the program here instead of loading it"
        )

    def is_rehearsed(self, number: int) -> bool:
        """Return whether the communicator of this number is that of a rehearsal, which still goes on."""
        return number == self._number

    def _rank_of(self, device: Any) -> int:
        return self._ranks[int(device.process_index)]

    def _is_here(self, device: Any) -> bool:
        return self._rank_of(device) == self._world.rank

    def _rehearse(self, group: Group, by_number: dict[int, Any]) -> None:
        with self._lock:
            if group in self._known:
                return
            self._known.add(group)
            self._rehearsed = group, by_number
            try:
                others = [number for number in by_number if number not in group]
                _in_a_thread(lambda: run_sum_over([[*map(by_number.get, each)] for each in (group, others) if each]))
            finally:
                self._rehearsed = self._number = None


def _check_one_device(devices: np.ndarray) -> None:
    processes: Sequence[int] = [device.process_index for device in devices.flat]
    if len(set(processes)) < len(processes):
        raise UsageError(
            f"a program with collectives runs on {len(processes)} devices of {len(set(processes))} processes, and "
            "Unisono needs one device for each process: start more processes, without "
            "--xla_force_host_platform_device_count and jax_num_cpu_devices, or use Gloo"
        )


def _in_a_thread(rehearse: Callable[[], None]) -> None:
    """Call a function in a thread of its own, where no context of the program is in force, such as its mesh."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            rehearse()
        except BaseException as error:  # noqa: BLE001  (the caller raises it)
            errors.append(error)

    thread = threading.Thread(target=body, name="unisono-rehearsal")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
