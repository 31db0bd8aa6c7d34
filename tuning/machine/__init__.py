"""Describes machines and networks: their identity, their structure, and the costs of their links and memory.

- `fingerprint.py`: the identity of a machine, and its hash.
- `gpu_inventory.py`: the GPUs of a machine and their NVLink connections.
- `inventory.py`: what a machine has: processors, NUMA nodes, GPUs and network interfaces.
- `levels.py`: the processors that share a core, a cache, a NUMA node or a socket, and the hosts that share a switch.
- `map_topology.py`: the topology of hosts that are far apart, in many orders at once.
- `network_map.py`: delays and rates between hosts that are far apart.
- `parameters.py`: costs of links, rounds and memory, by priors or from a calibration.
- `placed_topology.py`: a topology whose ranks stand at chosen places, in many orders at once.
- `topology.py`: the paths of messages over levels of links, and the resources that they share.
- `topology_files.py`: topologies described in TOML or JSON.
"""
