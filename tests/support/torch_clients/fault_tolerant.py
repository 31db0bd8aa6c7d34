"""A replica of torchft that trains over the backend. Replica 1 dies in a step of both, and torchrun starts it again.

torchft makes a new group over the replicas that live whenever one comes or goes, by its `ProcessGroupWrapper`. The
training ends after three steps of both replicas since then.
"""

from __future__ import annotations

import os
import re
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from support.torch_clients import problem
from support.torchrun import report
from torchft import Manager, Optimizer
from torchft.process_group import ProcessGroupWrapper

import unisono as un

PAUSE_S = 0.05  # so that the other replica does not take thousands of steps alone
TIMEOUT = timedelta(seconds=30)


class ProcessGroupUnisono(ProcessGroupWrapper):  # type: ignore[misc]
    """A group of torchft that is made anew over a group of Unisono whenever replicas come or go."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        return un.torch.ProcessGroup(store, rank, world_size, TIMEOUT)

    def getBackendName(self) -> str:  # noqa: N802
        return "unisono"


def main() -> None:
    replica, lighthouse = sys.argv[1:]
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    model = problem.model()
    group = ProcessGroupUnisono(timeout=TIMEOUT)
    manager = Manager(
        pg=group,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=1,
        replica_id=f"replica-{replica}",
        lighthouse_addr=lighthouse,
        timeout=TIMEOUT,
        use_async_quorum=False,
    )
    optimizer = Optimizer(manager, problem.optimizer(model))
    sizes = ""  # of the group in each step; "x" for a step that failed
    while not re.fullmatch("1*2+x+1*222" if replica == "0" else "1*222", sizes):
        step = manager.current_step()
        optimizer.zero_grad()
        loss = problem.loss_of(model, *problem.DATA[: problem.BATCH])
        if is_first and replica == "1" and sizes.endswith("22"):
            os._exit(3)
        loss.backward()
        for parameter in model.parameters():  # torchft's DistributedDataParallel ends a replica whose call fails
            manager.allreduce(parameter.grad).wait()
        optimizer.step()
        sizes += str(manager.num_participants()) if manager.current_step() > step else "x"
        time.sleep(PAUSE_S)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    report(sizes=sizes, step=manager.current_step(), weights=weights.tolist(), backend=group.getBackendName())
    manager.shutdown(wait=False)
    assert not dist.is_initialized()


if __name__ == "__main__":
    main()
