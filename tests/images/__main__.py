"""Build the images of docker/ for real, run them, and say what was seen. No hub of images is needed.

    make test-images
    make test-images ARGS="--torch-wheel torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"

Root on Linux is needed, with Debian's packages docker.io, debootstrap and slirp4netns, and about 8 GB in /var/tmp. The
network must reach Debian's mirror, PyPI and torch's index. A local wheel of torch stands in for that index.

A Docker engine of its own runs in network, process and mount namespaces of its own. Its data, socket and images are in
one folder, which is deleted at the end. The last line of the result compares the host with the host before.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

import httpx

from tests import ROOT
from tests.images.build import TORCH_INDEX
from tests.images.checks import check_images
from tests.images.report import Row, into_page, table
from tests.images.sandbox import clean_up, enter, host_state

PACKAGES = {"dockerd": "docker.io", "debootstrap": "debootstrap", "slirp4netns": "slirp4netns", "unshare": "util-linux"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.images", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch-wheel", type=Path, help="a CPU wheel for Python 3.11, in place of the locked torch")
    parser.add_argument("--work", type=Path, help="a folder that is kept, so that a second run finds its layers")
    parser.add_argument("--report", type=Path, help="a page whose table is replaced")
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is not None:
        return check_images(given.work, given.torch_wheel, outer_network=given.inside)
    if missing := unmet(given.torch_wheel):
        print(f"error: {missing}", file=sys.stderr)
        return 2
    before = host_state()
    work = given.work or Path(tempfile.mkdtemp(prefix="dflash-images-", dir="/var/tmp"))
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        wheel = ["--torch-wheel", str(given.torch_wheel.resolve())] if given.torch_wheel else []
        code = enter([sys.executable, "-m", "tests.images", "--work", str(work), *wheel])
        rows = [Row(*row) for row in json.loads((work / "rows.json").read_text(encoding="utf-8"))]
    finally:
        clean_up(work, keep=given.work is not None)
    changed = [name for name, state in host_state().items() if state != before[name]]
    same = ", ".join(before)
    rows.append(Row("host", "afterwards", f"CHANGED: {', '.join(changed)}" if changed else f"as before: {same}"))
    print("\n".join(table(rows)))
    if given.report is not None:
        wheel = [f'ARGS="--torch-wheel {given.torch_wheel.name}"'] if given.torch_wheel else []
        threads = [f"OMP_NUM_THREADS={count}" for count in [os.environ.get("OMP_NUM_THREADS")] if count]
        into_page(given.report, " ".join([*threads, "make test-images", *wheel]), rows)
    return code or bool(changed)


def unmet(torch_wheel: Path | None) -> str | None:
    """Return what this machine lacks, or None."""
    if os.geteuid() != 0 or sys.platform != "linux":
        return "root on Linux is needed, because a Docker engine is started"
    if packages := sorted({package for command, package in PACKAGES.items() if shutil.which(command) is None}):
        return f"Debian's packages are needed: apt-get install --no-install-recommends {' '.join(packages)}"
    if torch_wheel is not None:
        return None if torch_wheel.is_file() else f"{torch_wheel} is no file"
    if platform.machine() == "x86_64":
        try:
            httpx.head(f"{TORCH_INDEX}/torch/", timeout=10, follow_redirects=True).raise_for_status()
        except httpx.HTTPError as error:
            return f"{TORCH_INDEX} cannot be reached ({error}). Give --torch-wheel, a CPU wheel for Python 3.11"
    return None


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
