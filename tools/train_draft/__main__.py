"""`python -m tools.train_draft`."""

import sys

from tools.train_draft.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
