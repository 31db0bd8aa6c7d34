"""Grids and graphs of ranks, and the calls among neighbours.

- `grid_shape.py`: ranks and coordinates of a grid, and `grid_dims`.
- `placement.py`: which rank gets which place of a grid, so that neighbours share hosts.
- `edges.py`: the edges of a graph, which both ends name.
- `names.py`: the names of the neighbourhood collectives.
- `halo.py`: the halo of an array, which neighbours in a grid exchange.
- `calls.py`: prepares neighbourhood collectives.
"""
