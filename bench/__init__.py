"""Benchmarks of Unisono, next to other libraries: the same calls, on the same cores, in interleaved rounds.

Used by `unisono bench COLLECTIVE`:

- `driver.py`, `ranks.py`: run libraries in rounds; the processes of one library.
- `peers.py`, `adapters/`: the libraries and how they are installed, and the code that calls each of them.
- `placement.py`, `sizes.py`, `variants.py`, `statistics.py`, `report.py`: cores, sizes, algorithms, numbers, results.
  `formats.py`: results for other tools. `comparison.py`: what has changed between two saved results. `page.py`: results
  as an HTML page. `curves.py`: pictures of saved results, for the README and the site.

Programs of their own, each `unisono bench NAME`:

- `programs/`: what else users may measure.
- `studies/`: the programs that made the pages of `docs/measurements/`. They are no part of the wheel.
- `argument_types.py`: the values that arguments of these programs may have.
- `gpu.py`, `gpu_stages/`: everything that needs a GPU.

`namespaces.py` makes hosts on one machine, and `wide_area.py` far ones.
"""
