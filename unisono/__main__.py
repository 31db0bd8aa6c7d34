"""``python -m unisono`` is the command `unisono`."""

import sys

from unisono.cli.main import main

sys.exit(main())
