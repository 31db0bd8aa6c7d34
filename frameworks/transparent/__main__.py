"""``python -m unisono.frameworks.transparent train.py ...``: the command of each rank of a data-parallel run."""

import sys

from unisono.frameworks.transparent.program import main

main(sys.argv[1:])
