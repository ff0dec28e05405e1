"""`python -m maskc`."""

import sys

from maskc.cli import main

sys.exit(main())
