"""Whether this host and its Python environment can drive an NPU, read from files, without an import of torch."""

import importlib.util
import re
from pathlib import Path

from app.config.error import ConfigError

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def has_npu() -> bool:
    """Return True if the NPU driver shows a device on this host."""
    return any(Path("/dev").glob("davinci[0-9]*"))


def is_usable() -> bool:
    """Return True if there is an NPU, and torch_npu is installed."""
    return has_npu() and importlib.util.find_spec("torch_npu") is not None


def check_torch_build(device: str) -> None:
    """Refuse an NPU that this Python environment cannot drive. An unused torch_npu is harmless.

    Raises ConfigError if `device` is an NPU and torch_npu is missing, or torch is a CUDA build. `auto` is an NPU if
    that is usable.
    """
    if not device.startswith("npu") and not (device == "auto" and is_usable()):
        return
    if importlib.util.find_spec("torch_npu") is None:
        raise ConfigError(
            f"--device {device}: torch_npu is not installed",
            f"pip install '.[npu]' in the source tree, on x86 with --extra-index-url {CPU_INDEX}",
        )
    version, cuda = _torch_build()
    if cuda:
        raise ConfigError(
            f"--device {device}: torch {version} is a CUDA {cuda} build, and torch_npu works with a CPU build only",
            f"pip install --index-url {CPU_INDEX} torch=={version.split('+')[0]}, or --device cuda",
        )


def _torch_build() -> tuple[str, str | None]:
    """Return (version, CUDA version or None) of the installed torch, from its version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "(none)", None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*= ['\"](.+?)['\"]", text, re.MULTILINE)
    return version.group(1) if version else "(unknown)", cuda.group(1) if cuda else None
