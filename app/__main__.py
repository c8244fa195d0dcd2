"""`python -m app` is `dflash-server`."""

import sys

from app.cli import main

sys.exit(main())
