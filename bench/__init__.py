"""Benchmarks of Unisono, next to other libraries: the same calls, on the same cores, in interleaved rounds.

Used by `unisono bench`:

- `driver.py`, `ranks.py`: run libraries in rounds; the processes of one library.
- `peers.py`, `adapters/`: the libraries and how they are installed, and the code that calls each of them.
- `placement.py`, `sizes.py`, `statistics.py`, `report.py`: cores, sizes, numbers and results. `formats.py`: results for
  other tools. `comparison.py`: what has changed between two saved results. `page.py`: results as an HTML page.

Programs, each `unisono bench NAME` or `python -m unisono.bench.NAME`:

- `bootstrap.py`: the time that ranks take to start. `joins.py`: the time that a process takes to join a job.
  `churn.py`: a swarm whose members are killed, stopped and cut off.
  `memory.py`: the memory of a rank for its peers. `leaks.py`: what long use leaves behind.
- `curves.py`: pictures of saved results, for the README and the site.
- `decision.py`: the cost of the decision at call time. `overlap.py`: calls during computing.
- `compression.py`: the cost of compressing gradients.
- `gradients.py`: exposed communication of gradients. `ddp.py`, `horovod_itself.py`: training
  steps of DDP and of Horovod. `torch_calls.py`: calls of torch.
  `jax_calls.py`: calls in programs of JAX.
- `faults.py`: faults planted in jobs, and which sources name the culprit. `campaign.py`, `trial_ranks.py`: seeded
  faults, and latencies.
- `gpu.py`, `gpu_stages/`: everything that needs a GPU.
- `hybrid.py`, `shaped.py`, `mpi_ring.py`, `transports.py`: host levels, slow links, MPI and UCX. `tls.py`: the cost of
  TLS.
- `mixture.py`, `regret.py`, `replay.py`, `selection.py`: how good the tuner's choices are.

`namespaces.py` makes hosts on one machine, and `wide_area.py` far ones, across which `wan.py`
measures; `judgement.py` and `studies.py` score choices.
"""
