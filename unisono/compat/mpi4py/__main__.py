"""``python -m mpi4py program.py``: runs a program."""

from unisono.compat.mpi4py.run import main

if __name__ == "__main__":
    main()
