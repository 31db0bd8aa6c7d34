"""Schedules in the files of other programs: read, turned into plans, proved, and written.

moves.py          a schedule in a form of its own: moves of chunks, and the events that order them
happening.py      which events happen before others
memory.py         the chunks of a rank as blocks of INPUT, OUTPUT and SCRATCH
running.py        one run of a schedule: the blocks of each move, and conflicts
joining.py        moves of single chunks joined into steps
lowering.py       from steps to plans: their order, groups and lanes
building.py       events and moves while a file is read
limited.py        numbers within limits
msccl.py          XML of MSCCL, read
mscclpp.py        execution plans of MSCCL++, read
msccl_writing.py  XML of MSCCL, written
chakra.py         execution traces of Chakra, written
proving.py        any schedule as an algorithm: proved and registered
"""
