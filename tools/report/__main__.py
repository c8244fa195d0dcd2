"""`python -m tools.report --device npu|cuda`: measure a device of this host, and write a page of it."""

import os
import sys

from tools.report.command import main

if __name__ == "__main__":
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # see app/cli.py
    sys.exit(main(sys.argv[1:]))
