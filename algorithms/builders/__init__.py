"""Builders: functions `<collective>_<name>(size, rank, root=0, **params) -> Plan`. Each file holds one idea.

arguments.py           checks of arguments, for all builders
lane_pieces.py         pieces of lanes, for all builders

balanced_tree.py       reductions in the canonical order: one balanced binary tree over the ranks
bine.py                trees and exchanges over short distances to both sides
block_schedule.py      which blocks ranks pass on in each round, on a circulant graph
bruck.py               distances 1, k, k², …, at any number of ranks
butterfly.py           exchanges of halves between pairs, for any pairs
chain.py               all ranks in a row, in many segments
circulant.py           distances that halve, at any number of ranks
circulant_blocks.py    broadcast and reduce in n blocks on a circulant graph
direct.py              every rank with every other
dissemination.py       barriers in ⌈log_k p⌉ rounds
double_tree.py         two trees at once, each with half of the vector
doubling.py            recursive doubling
folding.py             reduction to a power of two of ranks
gather_scatter.py      gathers and scatters, along trees and directly
grid_lanes.py          plans for grids of ranks, in parts with lanes of their own
in_order_tree.py       trees whose subtrees are runs of ranks
mapped.py              through memory that peers map
multiplying.py         recursive multiplying: doubling with a radix
neighbour_exchange.py  pairs of neighbours
neighbours.py          neighbourhood collectives, by direct messages
pairwise.py            one partner in each round
pat.py                 aggregated trees, the far distances first
rabenseifner.py        recursive halving, then doubling
ring.py                around a ring
scan.py                inclusive and exclusive scans
scatter_allgather.py   broadcast as scatter and allgather
swing.py               doubling over distances to both sides, on rings and tori
torus.py               rings in each dimension of a torus
tree.py                k-nomial and binary trees
"""
