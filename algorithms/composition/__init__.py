"""Algorithms composed of phases, each of which is the plan of another algorithm for a group of ranks.

host_levels.py   how ranks are grouped into hosts, level by level
phases.py        compositions as data: their phases and costs
phase_groups.py  a group of ranks with the algorithm of its phase
embedding.py     the plans of phases, renamed to the ranks and blocks of the whole, one after the other
hierarchical.py  builders that go through all levels of hosts
rank_order.py    plans in another order of ranks
two_level.py     builders of all-to-all and scans on two levels
"""
