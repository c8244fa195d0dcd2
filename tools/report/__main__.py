"""`python -m tools.report --device npu|cuda`: measure a device of this host, and write a page of it."""

import sys

from tools.report.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
