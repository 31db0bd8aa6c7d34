"""The command `unisono` as ``python -m unisono``."""

import sys

from unisono.cli.main import main

sys.exit(main())
