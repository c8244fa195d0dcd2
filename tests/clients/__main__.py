"""Run the clients' tests, and print their results as a table.

python -m tests.clients                            the table alone
python -m tests.clients --report docs/clients.md   the page's table is replaced
"""

import argparse
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.clients.page import Results, into_page, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--report", type=Path, help="a page whose table is replaced")
    given = parser.parse_args()
    results = Results()
    code = int(pytest.main([str(ROOT / "tests" / "clients"), "-q"], plugins=[results]))
    print(table(results.outcomes))
    if given.report is not None:
        into_page(given.report, results.outcomes)
    return code


if __name__ == "__main__":
    sys.exit(main())
