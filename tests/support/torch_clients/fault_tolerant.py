"""A replica of torchft that trains over the backend. Replica 1 dies once, in a step.

torchft makes a new group over the replicas that live whenever one comes or goes, by its `ProcessGroupWrapper`.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from support.torch_clients import problem
from support.torchrun import report
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.process_group import ProcessGroupWrapper

import unisono as un

STEPS, LAST = 8, 3
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
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, problem.optimizer(model))
    sizes = []
    while manager.current_step() < STEPS:
        if is_first and replica == "1" and manager.current_step() == LAST:
            os._exit(3)
        optimizer.zero_grad()
        problem.loss_of(parallel, *problem.DATA[: problem.BATCH]).backward()
        optimizer.step()
        sizes.append(manager.num_participants())
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    report(sizes=sizes, step=manager.current_step(), weights=weights.tolist(), backend=group.getBackendName())
    manager.shutdown(wait=False)
    assert not dist.is_initialized()


if __name__ == "__main__":
    main()
