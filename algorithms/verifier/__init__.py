"""The proof that the plans of all ranks carry out their collective.

verify.py          the entry points, the report, and the comparison with the declared cost
unrolled.py        plans as flat lists of actions on numbered cells
progress.py        all plans run together: no deadlock, and every message has a receiver
vector_clocks.py   which actions are ordered by messages and flags; rounds and depth of queues
hazards.py         no conflicting accesses on the memory of one rank
mapped_hazards.py  no conflicting accesses on memory that peers map
symbolic.py        every block of OUTPUT holds the promised contributions, each of them once
block_meaning.py   what each block of a collective is about, and how long it is
combine_order.py   the order in which contributions are combined
liveness.py        how much SCRATCH is in use at a time
lower_bounds.py    costs that no algorithm can go below
neighbours.py      the same for neighbourhood collectives
error_pictures.py  pictures of contributions, for errors
"""
