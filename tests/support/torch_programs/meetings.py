"""Creates groups in every way of torch, and calls Unisono only by the backend's name."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import unisono as un


def add_up(name: str, group: Any = None) -> None:
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    print(f"{name}: {tensor.tolist()} by {un.torch.communicator(group).size} ranks")


def main() -> None:
    place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    port = int(sys.argv[1])
    dist.init_process_group("unisono", init_method=f"tcp://127.0.0.1:{port}", **place)
    add_up("tcp")
    dist.destroy_process_group()
    store = dist.FileStore(os.path.join(os.getcwd(), "store"), place["world_size"])
    store.set_timeout(timedelta(seconds=60))
    for time in ("first", "second"):
        dist.init_process_group("unisono", store=store, **place)
        add_up(f"a store, the {time} time")
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/beside", **place)
    add_up("beside Gloo", dist.new_group(list(range(place["world_size"])), backend="unisono"))
    dist.destroy_process_group()
    dist.init_process_group("cpu:unisono,cuda:gloo", init_method=f"file://{os.getcwd()}/devices", **place)
    add_up("for the CPU")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
