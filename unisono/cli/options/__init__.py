"""Options that several subcommands share.

- `completion.py`: names of collectives and algorithms that a shell completes.
- `counts.py`: several numbers of ranks, such as 2,3,4.
- `loading.py`: ``--load``, the files that register algorithms.
- `outputs.py`: files that commands write, checked before the work.
- `sizes.py`: ``--size``, the bytes of a vector.
"""
