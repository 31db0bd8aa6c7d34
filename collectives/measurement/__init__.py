"""Measurements on a communicator, for `unisono tune` and `unisono calibrate`.

- `call_trials`: how long collective calls take
- `link_probes`: the costs of links, memory and rounds
- `topology_probes`: the levels of the network between the hosts of a job
"""
