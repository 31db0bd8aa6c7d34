"""Benchmarks beside those of collectives, each `unisono bench NAME`.

- `algorithms.py`: every algorithm of a collective, ranked.
- `bootstrap.py`: the time that ranks take to start. `memory.py`: the memory of a rank for its peers.
- `crowded.py`: calls on cores that other processes want too.
- `overlap.py`: calls during computing. `tls.py`: the cost of TLS. `transports.py`: messages over each transport.
- `gradients.py`: exposed communication of gradients. `compression.py`: the cost of compressed gradients.
- `ddp.py`: training steps of DDP. `torch_calls.py`: calls of torch. `jax_calls.py`: calls in programs of JAX.
- `hybrid.py`: hybrid groups. `shaped.py`: slow links between hosts. `wan.py`: far hosts, and `training.py` across them.
- `churn.py`: a swarm whose members are killed, stopped and cut off.
- `ranks/`: the ranks of some of these programs.
"""
