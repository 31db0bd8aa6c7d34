"""The command `unisono` as ``python -m unisono``."""

import sys

from unisono.cli.entry import command

sys.exit(command())
