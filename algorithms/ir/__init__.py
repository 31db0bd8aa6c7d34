"""The plan of one rank as frozen data, and everything that depends on plans alone.

plan.py            plans: buffers, partitions, spans, steps, groups, lanes
contracts.py       the contract of each collective: how INPUT and OUTPUT are cut, and which ranks have them
neighbourhood.py   the ranks that one rank sends to and receives from in a neighbourhood collective
walk.py            one walk over a plan: groups as written, steps as run, and the memory of a step
binding.py         from blocks to elements, when the counts of a call are known
encode.py          a plan as 64-bit integers, which the native core interprets
exposed_memory.py  the blocks of a rank that its peers map
drawing.py         schedules as text and as arrows, for `unisono show` and for errors
"""
