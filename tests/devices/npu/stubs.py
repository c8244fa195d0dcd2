"""Stub libraries that let the installed torch_npu wheel run on a machine without CANN and without an NPU.

    LD_LIBRARY_PATH=$(python -m tests.devices.npu.stubs build/npu-stubs) TORCH_DEVICE_BACKEND_AUTOLOAD=0 python ...

prints the folder that holds them: one for each version of the wheel and of this generator, built once (gcc, seconds).
The names come from the wheel's own binaries. They are the symbols that neither torch nor the wheel defines, and every
`aclnn` entry that it looks up by name. The bodies that matter are csrc/; the others return 0. Checked with torch_npu
2.13.0 (cp311, x86_64).
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NULL_DEVICE = sorted(Path(__file__).with_name("csrc").glob("*.[ch]"))
LINKED_LIBRARIES = "ascendcl hccl acl_op_compiler ge_runner graph acl_tdt_channel atb".split()
"""Libraries that the wheel's libraries are linked against. libascendcl holds all code, and the others lead to it."""
OPERATOR_LIBRARIES = "opapi nnopbase".split()
"""Where torch_npu looks for aclnn entries, at the first call of an operator."""
FLAGS = "-std=gnu11 -O1 -fPIC -shared -fvisibility=hidden -Wall -Wextra -Werror -Wno-deprecated-declarations"


class StubsError(RuntimeError):
    """Why no stubs can be built here, and what to do."""


def wheel_folder() -> Path:
    """Where the torch_npu package lies. It is not imported: without stubs it cannot be."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or not spec.submodule_search_locations:
        raise StubsError("torch_npu is not installed in this environment; `make test-npu` makes one that has it")
    return Path(spec.submodule_search_locations[0])


def wheel_libraries(wheel: Path) -> list[Path]:
    return [*sorted(wheel.glob("lib/*.so")), *sorted(wheel.glob("_C.*.so"))]


def needed_symbols(wheel: Path) -> list[str]:
    """Return the symbols that the wheel's libraries need to load, because all of them are linked BIND_NOW.

    Symbols of system libraries have a version (`memcpy@GLIBC_2.14`) or are in this process already, like CPython's.
    """
    torch_folder = Path(importlib.util.find_spec("torch").submodule_search_locations[0])  # type: ignore
    libraries = wheel_libraries(wheel)
    defined = _symbols("--defined-only", [*libraries, *torch_folder.glob("lib/*.so")])
    needed = {name for kind, name in _symbols("--undefined-only", libraries) if kind == "U" and "@" not in name}
    names = {name.partition("@")[0] for _, name in defined}
    here = ctypes.CDLL(None)
    return sorted(name for name in needed - names if not (re.match(r"_?Py", name) or hasattr(here, name)))


def operator_entries(wheel: Path) -> list[str]:
    """The `aclnn` names among the wheel's strings: each operator's size query and its launch."""
    data = (wheel / "lib" / "libtorch_npu.so").read_bytes()
    return sorted({name.decode() for name in re.findall(rb"\0(aclnn[A-Z]\w*)(?=\0)", data)})


def optional_setters(wheel: Path) -> list[str]:
    """ACL calls that torch_npu looks up by name and that answer nothing: they may succeed without a body of their own.

    One that answers (Get, Query, Create) exists only if csrc/ knows what to say.
    """
    data = (wheel / "lib" / "libtorch_npu.so").read_bytes()
    verbs = rb"(?:Set|Reset|Destroy|Use|Unuse|Subscribe|UnSubscribe)"
    found = re.findall(rb"\0((?:acl(?:rt|rtCtx|mdl|mdlRI|op)?|Hccl)" + verbs + rb"[A-Z]\w*)(?=\0)", data)
    return sorted({name.decode() for name in found})


def source(needed: list[str], operators: list[str]) -> str:
    """C with a weak body for every name; a body in csrc/ takes its place. ATB's C++ is told by its mangling."""
    lines = ["#pragma GCC visibility push(default)", "extern int npu_stub_launch(const char *name, void *stream);"]
    lines += [f"__attribute__((weak)) long {name}(void) {{ return 0; }}" for name in needed]
    for name in operators:
        if name.endswith("Size"):
            lines.append(f"__attribute__((weak)) int {name}(void) {{ return 0; }}")
        else:
            lines.append(
                f"__attribute__((weak)) int {name}(void *w, unsigned long n, void *e, void *s) "
                f'{{ (void)w, (void)n, (void)e; return npu_stub_launch("{name}", s); }}'
            )
    return "\n".join(lines) + "\n"


def build(out: Path) -> Path:
    """The folder with the stubs for the installed wheel, under `out`; built if it is not there yet."""
    wheel = wheel_folder()
    sources = b"".join(path.read_bytes() for path in (Path(__file__), *NULL_DEVICE))
    generator = hashlib.sha256(sources).hexdigest()[:12]
    folder = out.resolve() / f"torch_npu-{importlib.metadata.version('torch_npu')}-{generator}"
    if folder.is_dir():
        return folder
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            raise StubsError(f"{tool} is not to be found; the NPU tests build small C libraries (apt install gcc)")
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=out))
    try:
        weak = sorted({*needed_symbols(wheel), *optional_setters(wheel)})
        _compile(scratch, source(weak, operator_entries(wheel)), wheel / "include")
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():  # Otherwise another process was first, with the same libraries.
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _compile(folder: Path, generated: str, headers: Path) -> None:
    (folder / "generated.c").write_text(generated)
    written = [str(path) for path in NULL_DEVICE if path.suffix == ".c"]
    _gcc(folder, "ascendcl", *written, str(folder / "generated.c"), f"-I{headers}", "-lpthread")
    for name in [*LINKED_LIBRARIES[1:], *OPERATOR_LIBRARIES]:
        # --no-as-needed: a name looked up through this library is found in libascendcl.
        _gcc(folder, name, "-x", "c", os.devnull, f"-L{folder}", "-Wl,--no-as-needed", "-lascendcl")


def _gcc(folder: Path, name: str, *arguments: str) -> None:
    target = ["-o", str(folder / f"lib{name}.so"), f"-Wl,-soname,lib{name}.so"]
    done = subprocess.run(["gcc", *FLAGS.split(), *target, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise StubsError(f"gcc cannot build lib{name}.so:\n{done.stderr[:4000]}")


def _symbols(option: str, libraries: list[Path]) -> set[tuple[str, str]]:
    """(kind, name) of the dynamic symbols, as `nm` prints them."""
    found = set()
    for library in libraries:
        printed = subprocess.run(["nm", "-D", option, str(library)], capture_output=True, text=True, check=True).stdout
        found |= {(words[-2], words[-1]) for words in map(str.split, printed.splitlines()) if len(words) >= 2}
    return found


if __name__ == "__main__":
    try:
        print(build(Path(sys.argv[1])))
    except StubsError as error:
        sys.exit(str(error))
