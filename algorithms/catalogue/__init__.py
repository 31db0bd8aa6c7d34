"""The algorithms of Unisono and of its users, with their costs, references and properties.

algorithm.py      the declaration of one algorithm, and its cost
reducing.py       the table rows of the collectives that reduce
moving.py         the table rows of the collectives that only move data
rows.py           `row` and `table`, by which both are written
composed.py       the table rows of the algorithms that are composed of phases
vendors.py        algorithms that a library carries out without a plan, such as "mpi.native"
flat.py           the table of the algorithms that are not composed, and of the registered ones
registry.py       the table of all algorithms, and look-ups by name
registration.py   `un.algorithm`: proves and registers an algorithm of a user
costs.py          costs in closed form
on_devices.py     which algorithms over mapped memory GPUs run, and which of them by a rule
host_crossing.py  the part of a cost that lies between hosts
references.py     the papers that algorithms and costs are taken from
variants.py       algorithms with parameters as text, such as "knomial(radix=3)"
"""
