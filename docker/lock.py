"""Write the lock files of the images: `pip install uv`, then `python docker/lock.py`.

One resolution for Python 3.11 gives all files, so both architectures and both images have the same versions. torch has
files of its own, because a change of another package must not rebuild its layer of a gigabyte. A file lists the hashes
of the wheels that fit its architecture and Python 3.11 or 3.12, and nothing else installs. The image for CUDA is of
amd64 alone, and has a torch of its own with Triton and CUDA's libraries.
"""

import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12")
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
INDEX = "https://pypi.org/simple"
BUILD = "setuptools>=77,<81"
"""The images install our own package without an index, and CANN's compiler imports pkg_resources, which 82 lacks."""

# PyPI's torch for x86 is a CUDA build, and torch_npu for x86 asks for +cpu by name. These are the wheels for cp311 and
# cp312, manylinux_2_28_x86_64, of https://download.pytorch.org/whl/cpu. Their hashes come from public lock files that
# agree, not from the wheels themselves. pip compares them with the download.
TORCH_CPU = (
    "2.10.0+cpu",
    "b7cb1ec66cefb90fd7b676eac72cfda3b8d4e4d0cacd7a531963bc2e0a9710ab",
    "ee40b8a4b4b2cf0670c6fd4f35a7ef23871af956fecb238fbf5da15a72650b1d",
)


TORCH_CUDA = "2.11.0"
"""PyPI's torch for x86, which brings Triton 3.6."""


def compile_lock(wanted: Iterable[str], arch: str, python: str, *options: str) -> list[dict[str, Any]]:
    """Return the packages of uv's pylock.toml for one platform; it names the one wheel of each that fits."""
    command = "uv pip compile - --quiet --no-config --format pylock.toml --only-binary :all: --default-index".split()
    platform = ["--python-platform", f"{MACHINES[arch]}-manylinux_2_28", "--python-version", python]
    done = subprocess.run(
        [*command, INDEX, *platform, *options], input="\n".join(wanted), stdout=subprocess.PIPE, text=True, check=True
    )
    return list(tomllib.loads(done.stdout)["packages"])


def resolve(*extra: str, arch: str = "arm64") -> dict[str, str]:
    """Package -> version, with `extra`. PyPI's torch is a CPU build on arm64 and a CUDA build on amd64."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["tools"], *(extra or extras["npu"]), BUILD]
    return {package["name"]: package["version"] for package in compile_lock(wanted, arch, PYTHONS[0])}


def lock(versions: dict[str, str], arch: str) -> dict[str, list[str]]:
    """`name==version` -> sha256 of the wheels that fit `arch` and PYTHONS."""
    locked: dict[str, list[str]] = {}
    if arch == "amd64" and versions["torch"] != TORCH_CUDA:
        locked["torch==" + TORCH_CPU[0]] = list(TORCH_CPU[1:])
        versions = {name: version for name, version in versions.items() if name != "torch"}
    for python in PYTHONS:
        pins = [f"{name}=={version}" for name, version in versions.items()]
        for package in compile_lock(pins, arch, python, "--no-deps"):
            hashes = locked.setdefault(f"{package['name']}=={package['version']}", [])
            hashes += [w["hashes"]["sha256"] for w in package["wheels"] if w["hashes"]["sha256"] not in hashes]
    return locked


def main() -> None:
    versions = resolve()
    for arch in MACHINES:
        locked = lock(versions, arch)
        torch = {pin for pin in locked if pin.startswith("torch==")}
        npu = {pin for pin in locked if pin.startswith("torch-npu==")}
        write(f"torch-{arch}", arch, locked, torch)
        write(f"requirements-npu-{arch}", arch, locked, locked.keys() - torch)
        write(f"requirements-cpu-{arch}", arch, locked, locked.keys() - torch - npu)
    main_cuda()


def main_cuda() -> None:
    locked = lock(resolve(f"torch=={TORCH_CUDA}", arch="amd64"), "amd64")
    torch = {pin for pin in locked if pin.startswith(("torch==", "triton==", "nvidia-", "cuda-"))}
    write("torch-cuda-amd64", "amd64", locked, torch)
    write("requirements-cuda-amd64", "amd64", locked, locked.keys() - torch)


def write(name: str, arch: str, locked: dict[str, list[str]], pins: Iterable[str]) -> None:
    text = f"# Written by docker/lock.py for Python {' and '.join(PYTHONS)} on {arch}; do not edit.\n"
    for pin in sorted(pins):
        text += " \\\n".join([pin, *(f"    --hash=sha256:{value}" for value in locked[pin])]) + "\n"
    (ROOT / "docker" / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
