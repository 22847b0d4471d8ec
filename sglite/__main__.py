"""``python -m sglite``: the same as the ``sglite`` command."""

import sys

from sglite.cli import main

sys.exit(main())
