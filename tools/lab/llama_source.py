"""llama.cpp's server, built from source and kept, and models as its GGUF files."""

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.bench.client import ServerError

SOURCE = "llama-cpp-python==0.3.36"
"""The package whose sdist has llama.cpp's source, of a release with DFlash drafts."""
INSIDE = "vendor/llama.cpp/"
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}
TARGETS = ("llama-server", "llama-quantize")
CONVERT = """
import runpy, sys
source = sys.argv.pop(1)
sys.path[:0] = [source, source + "/gguf-py"]
sys.argv[0] = source + "/convert_hf_to_gguf.py"
from conversion.base import TextModel
from conversion.qwen import Qwen2Model

known = TextModel.get_vocab_base_pre

def known_or_qwen2(self, tokenizer):
    try:
        return known(self, tokenizer)
    except NotImplementedError:
        return "qwen2"

TextModel.get_vocab_base_pre = known_or_qwen2
Qwen2Model.set_vocab = TextModel._set_vocab_gpt2
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""llama.cpp's converter, without sentencepiece. A tokenizer that it does not know is told to be Qwen2's."""


def unpack(sdist: Path, to: Path) -> None:
    """Write llama.cpp's files of an sdist, without its top folder."""
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = member.name.partition("/")[2]
            if path.startswith(INSIDE):
                archive.extract(member.replace(name=path.removeprefix(INSIDE)), to, filter="data")


class LlamaCpp:
    """llama.cpp in `folder`: `source`, `cmake` with its server, and logs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.source, self._build = folder / "source", folder / "cmake"
        self.server, self._quantizer = (self._build / "bin" / name for name in TARGETS)

    def build(self, tell: Callable[[str], None]) -> None:
        """Download and compile what is not there. Raises ServerError with the last lines of a command that failed."""
        self.download(tell)
        if not (self.server.is_file() and self._quantizer.is_file()):
            tell("compiling llama-server, which takes two cores some 10 minutes")
            flags = [f"-D{name}={value}" for name, value in OPTIONS.items()]
            self._run("cmake", ["cmake", "-S", str(self.source), "-B", str(self._build), *flags])
            jobs = str(os.cpu_count())
            self._run("build", ["cmake", "--build", str(self._build), "--target", *TARGETS, "--parallel", jobs])

    def download(self, tell: Callable[[str], None]) -> None:
        """Download the source if it is not there. Raises ServerError with the last lines of a command that failed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self.source.is_dir():
            tell(f"downloading {SOURCE}")
            self._unpack_sdist()

    def convert(self, checkpoint: Path, to: Path, outtype: str, target: Path | None = None) -> Path:
        """Write a checkpoint as `to`, and return it. A draft needs the folder of its `target`, for the tokenizer."""
        flags = ["--outtype", outtype, "--outfile", str(to), *(["--target-model-dir", str(target)] if target else [])]
        self._run("convert", [sys.executable, "-c", CONVERT, str(self.source), str(checkpoint), *flags])
        return to

    def quantize(self, file: Path, to: Path, outtype: str) -> Path:
        """Write a GGUF file with its weights in another type as `to`, and return it."""
        self._run("quantize", [str(self._quantizer), "--allow-requantize", str(file), str(to), outtype])
        return to

    def _unpack_sdist(self) -> None:
        """Unpack the sdist's copy of llama.cpp. pip asks its build backend for a name only, and compiles nothing."""
        package = SOURCE.partition("==")[0]
        flags = ["--no-deps", "--no-binary", package, "--dest", str(self._folder), SOURCE]
        self._run("download", [sys.executable, "-m", "pip", "download", *flags])
        (sdist,) = self._folder.glob("*.tar.gz")
        unpacking = self._folder / "unpacking"
        unpack(sdist, unpacking)
        unpacking.rename(self.source)
        sdist.unlink()

    def _run(self, name: str, command: Sequence[str]) -> None:
        log = self._folder / f"{name}.log"
        try:
            with log.open("w") as written:
                subprocess.run(command, stdout=written, stderr=subprocess.STDOUT, check=True)
        except FileNotFoundError:
            raise ServerError(f"{command[0]} is not installed", "install cmake and g++") from None
        except subprocess.CalledProcessError:
            lines = log.read_text(errors="replace").split("\n")
            last = " | ".join(line.strip() for line in lines[-6:] if line.strip())
            raise ServerError(f"{name} of llama.cpp failed: {last}", f"all it said is in {log}") from None
