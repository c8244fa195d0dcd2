"""docker/Dockerfile.npu, step by step, with all of its packages and without CANN's image and torch."""

import json
import os
import platform
import re
import shutil
import sys
import venv
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import httpx
import pytest

from tests import ROOT
from tests.images.build import copied_tree, torch_lock
from tests.images.recipe import Recipe

DOCKERFILE = ROOT / "docker" / "Dockerfile.npu"
NEEDED = ("apt-get", "dpkg", "useradd")


def unmet() -> str:
    """Return what this machine lacks for the steps, or ""."""
    if platform.machine() != "x86_64" or sys.version_info[:2] not in ((3, 11), (3, 12)):
        return "amd64 is needed, and Python 3.11 or 3.12"
    path = f"{os.environ['PATH']}:/usr/sbin"  # which a user's may lack
    if missing := [name for name in NEEDED if shutil.which(name, path=path) is None]:
        return f"{', '.join(missing)} are needed"
    try:
        httpx.head("https://pypi.org/simple/numpy/", timeout=10).raise_for_status()
    except httpx.HTTPError as error:
        return "" if os.environ.get("CI") else f"PyPI cannot be reached ({error})"
    return ""


pytestmark = pytest.mark.skipif(bool(reason := unmet()), reason=reason or "nothing is missing")


def torch_wheel(folder: Path) -> Path:
    """Write a torch of the lock's version that holds nothing but a module and tests."""
    wheel = folder / "torch-2.10.0+cpu-py3-none-any.whl"
    about = "torch-2.10.0+cpu.dist-info"
    files = {
        "torch/__init__.py": "__version__ = '2.10.0+cpu'\n",
        "torch/test/test_all.py": "",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.10.0+cpu\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)
    return wheel


def cann_base(folder: Path) -> Path:
    """Return a root with what the recipe takes from CANN's image: a Python of its own, set_env.sh, and HwHiAiUser."""
    venv.create(folder / "usr/local/python3.11.15", with_pip=True, symlinks=True)
    toolkit = folder / "usr/local/Ascend/ascend-toolkit"
    toolkit.mkdir(parents=True)
    (toolkit / "set_env.sh").write_text("export ASCEND_OPP_PATH=/opp\n")
    for name in ("etc", "home", "tmp"):
        (folder / name).mkdir()
    (folder / "etc/passwd").write_text("HwHiAiUser:x:1000:1000::/home/HwHiAiUser:/bin/bash\n")
    (folder / "etc/group").write_text("HwHiAiUser:x:1000:\n")
    return folder


def image_in(work: Path) -> Recipe:
    """Run every step. torch is found on no index but its own."""
    context, index = copied_tree(work / "context"), work / "index" / "torch"
    index.mkdir(parents=True)
    wheel = torch_wheel(index)
    (index / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    (context / "docker" / "torch-amd64.txt").write_text(torch_lock(wheel)[1])
    arguments = {"TARGETARCH": "amd64", "TORCH_INDEX_URL": index.parent.as_uri()}
    return Recipe(DOCKERFILE, context, work, cann_base(work / "root"), arguments)


def packages(image: Recipe) -> dict[str, str]:
    """Package -> version of what is installed, but for pip."""
    found = (
        PathDistribution(path) for path in image.root.glob("usr/local/python*/lib/python*/site-packages/*.dist-info")
    )
    return {d.metadata["Name"].lower().replace("_", "-"): d.version for d in found if d.metadata["Name"] != "pip"}


def has_the_locked_packages_and_none_conflicts(image: Recipe) -> None:
    lock = (ROOT / "docker/requirements-npu-amd64.txt").read_text()
    locked = dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", lock, re.MULTILINE))
    assert packages(image) == locked | {"torch": "2.10.0+cpu", "dflash-server": "0.1.0"}
    assert image.run("python3", "-m", "pip", "check").stdout.endswith("No broken requirements found.\n")
    assert image.run("python3", "-W", "ignore", "-c", "import pkg_resources").returncode == 0, (
        "CANN's compiler needs it"
    )
    assert not list(image.root.glob("usr/local/python*/lib/python*/site-packages/torch/test"))


def has_the_whole_server_and_its_instruments(image: Recipe) -> None:
    (app,) = image.root.glob("usr/local/python*/lib/python*/site-packages/app")
    tree = {path.relative_to(ROOT / "app") for path in (ROOT / "app").rglob("*") if path.is_file()}
    left_out = {path.suffix for path in tree if not (app / path).exists()}
    assert left_out <= {".pyc", ".md", ".txt"}, "bytecode, and pages for readers of the source"
    said = image.run("python3", "-P", "-m", "tools.report", "--device", "cpu")
    assert said.returncode == 2 and "a report is on npu or cuda" in said.stdout
    assert not (image.root / "src").exists()


def starts_under_tini_with_canns_environment(image: Recipe) -> None:
    entrypoint = [image.moved(word) for word in json.loads(image.settings["ENTRYPOINT"])]
    assert json.loads(image.settings["CMD"]) == ["serve"]
    said = image.run(*entrypoint, "--help")
    assert said.returncode == 0 and "\n  serve " in said.stdout, said.stdout
    program = (
        "import os, pathlib; maps = pathlib.Path('/proc/self/maps').read_text()\n"
        "print(os.environ['ASCEND_OPP_PATH'], os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'], 'libjemalloc' in maps)"
    )
    under_tini = [*entrypoint, "python3", "-c", program]
    assert image.run(*under_tini, TINI_SUBREAPER="1").stdout == "/opp 0 True\n"
    assert image.run(*under_tini, TINI_SUBREAPER="1", LD_PRELOAD="").stdout == "/opp 0 False\n"


def has_a_user_with_the_numbers_of_huaweis_and_a_home_for_any(image: Recipe) -> None:
    entries = (image.root / "etc/passwd").read_text().splitlines()
    assert [entry.split(":")[2:4] for entry in entries if entry.startswith("dflash:")] == [["1000", "1000"]]
    assert (image.root / "home/dflash").stat().st_mode & 0o7777 == 0o1777
    assert image.settings["USER"] == "${USER_ID}:${GROUP_ID}" and image.settings["WORKDIR"] == "/home/dflash"


def test_every_step_of_the_recipe_runs_and_the_image_has_what_it_needs(tmp_path: Path) -> None:
    """One test, because a test's process runs all steps."""
    image = image_in(tmp_path)
    has_the_locked_packages_and_none_conflicts(image)
    has_the_whole_server_and_its_instruments(image)
    starts_under_tini_with_canns_environment(image)
    has_a_user_with_the_numbers_of_huaweis_and_a_home_for_any(image)
