"""The ways from an executor to its workers: ranks of a communicator, spawned ranks, and threads.

Each channel has the `size`, which is the number of workers, `send`, which gives a worker a request, `take`, which
returns an outcome or None, and `close`.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.compat.mpi4py import MPI
from unisono.compat.mpi4py.futures.tasks import Outcome, Welcome
from unisono.compat.mpi4py.futures.worker import Runner, send, take

Reply = tuple[int, Callable[[], Outcome]]


class RankChannel:
    """Ranks that run `worker.serve`."""

    def __init__(self, port: Any, ranks: Sequence[int]) -> None:
        self.size, self._port, self._ranks = len(ranks), port, list(ranks)

    def send(self, worker: int, request: Any) -> None:
        """Send a request to a worker."""
        send(self._port, request, self._ranks[worker])

    def take(self) -> Reply | None:
        """Return a worker and a function that loads its outcome; None if there is no message."""
        message = take(self._port)
        return None if message is None else (self._ranks.index(message[0]), message[1])

    def close(self) -> None:
        """Let the workers end."""
        for worker in range(self.size):
            self.send(worker, None)


class CommChannel(RankChannel):
    """The ranks of the other group of an intercommunicator, which serve until the channel is closed."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm._live.object_port, range(comm.Get_remote_size()))


class SpawnedChannel(CommChannel):
    """Ranks of a job of their own, which this process starts."""

    def __init__(self, workers: int, options: Mapping[str, Any]) -> None:
        flags = [*subprocess._args_from_interpreter_flags(), *options.get("python_args", ())]  # type: ignore[attr-defined]
        modules = ["-m", "unisono.compat.mpi4py.run", "-m", "unisono.compat.mpi4py.futures.server"]
        python = options.get("python_exe") or sys.executable
        self._comm = MPI.COMM_SELF.Spawn(python, [*flags, *modules], workers)  # type: ignore[attr-defined]
        super().__init__(self._comm)
        for worker in range(workers):
            self.send(worker, Welcome.of(options))

    def close(self) -> None:
        """Let the workers end, and part from their job."""
        super().close()
        self._comm.Disconnect()


class ThreadChannel:
    """Threads of this process."""

    def __init__(self, workers: int) -> None:
        self.size = workers
        self._outcomes: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
        self._requests: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(workers)]
        for worker in range(workers):
            threading.Thread(target=self._serve, args=(worker,), name=f"worker-{worker}", daemon=True).start()

    def _serve(self, worker: int) -> None:
        runner = Runner(MPI.COMM_SELF)  # type: ignore[attr-defined]
        while (request := self._requests[worker].get()) is not None:
            self._outcomes.put((worker, runner.outcome(request)))
            del request

    def send(self, worker: int, request: Any) -> None:
        """Give a request to a worker."""
        self._requests[worker].put(request)

    def take(self) -> Reply | None:
        """Return a worker and a function that returns its outcome; None if none has ended a task."""
        try:
            worker, outcome = self._outcomes.get_nowait()
        except queue.Empty:
            return None
        return worker, lambda: outcome

    def close(self) -> None:
        """Let the threads end."""
        for requests in self._requests:
            requests.put(None)
