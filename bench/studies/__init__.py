"""The programs that made the pages of `docs/measurements/`, each `unisono bench NAME` in a checkout.

- `campaign.py`, `trial_ranks.py`: seeded faults, and latencies.
- `faults.py`, `faulty_rank.py`: planted faults, and which sources name the culprit.
- `leaks.py`: what long use leaves behind. `joins.py`: the time of a join.
- `footprint.py`: memory, descriptors and messages of a rank on a large host.
- `decision.py`: the cost of the decision at call time.
- `regret.py`, `regret_rank.py`, `replay.py`, `selection.py`, `mixture.py`: how good the tuner's choices are.
  `judgement.py` scores choices.
- `host_orders.py`: the order of far hosts against all orders, simulated and across a wide-area network.
- `contention.py`: new and old algorithms on networks with shared links, simulated.
- `cluster.py`: collectives of a real cluster, simulated on a description that its data gives.
- `sparse_sums.py`: sums of sparse vectors beside gathering all rows.
- `scaling.py`: published scaling studies, repeated by the simulator.
- `horovod_itself.py`: training steps of Horovod. `mpi_ring.py`: our ring over the messages of MPI.
  `halo_exchange.py`: halos beside MPI's neighbourhood calls.
"""
