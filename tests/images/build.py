"""Building without a hub of images: a base from Debian's mirror, and a local wheel in place of torch's index."""

import hashlib
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from tests import ROOT
from tests.images.sandbox import BRIDGE

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
BASES = ("python:3.11-slim-bookworm", "debian:bookworm-slim")
"""Defaults of PYTHON_IMAGE and TINI_IMAGE. The base that is made here gets both names."""
CA = Path("/etc/ssl/certs/ca-certificates.crt")
INDEX_PORT = 8181
"""Port of the index in the sandbox's own network. It is fixed, because a new build argument is a new layer of torch."""
MARK = "a-password-that-must-not-stay"
"""Word in the secret pip.conf. Neither the images nor their history may have it."""
CLIENT = "/usr/bin/docker" if Path("/usr/bin/docker").exists() else "docker"
"""Debian's own client, because another one in PATH may lack BuildKit."""


class Docker:
    """Client of one engine. A failed command raises RuntimeError with the end of its output."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.environment = environment
        self._log = log

    def __call__(self, *arguments: str, cwd: Path = ROOT, fails: bool = False) -> str:
        """Run a command and return its output, standard error included. `fails` allows another exit status than 0."""
        done = subprocess.run(
            [CLIENT, *arguments],
            cwd=cwd,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"$ docker {' '.join(arguments)}\n{done.stdout}\n")
        if done.returncode != 0 and not fails:
            raise RuntimeError(f"docker {' '.join(arguments)}\n{done.stdout[-4000:]}")
        return done.stdout.strip()

    def gigabytes(self, image: str) -> str:
        return f"{int(self('image', 'inspect', '--format', '{{.Size}}', image)) / 1e9:.2f} GB"


def make_base(docker: Docker, work: Path, outer_network: int) -> None:
    """Import a Debian with Python 3.11 under the names of BASES."""
    base = work / "base"
    shutil.rmtree(base, ignore_errors=True)
    packages = "--include=ca-certificates,python3,python3-pip,python3-venv"
    command = ["debootstrap", "--variant=minbase", packages, "bookworm", str(base)]
    with (work / "debootstrap.log").open("w") as log:
        outside = ["nsenter", f"--net=/proc/self/fd/{outer_network}"]
        subprocess.run([*outside, *command], pass_fds=[outer_network], stdout=log, check=True)
    for path in base.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        path.unlink()
    archive = work / "base.tar"
    left_out = [f"--exclude=./{path}/*" for path in ("proc", "sys", "var/cache/apt", "var/lib/apt/lists")]
    subprocess.run(["tar", "-C", base, "-cf", archive, *left_out, "."], check=True)
    search = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    docker("import", "--change", search, str(archive), BASES[0])
    docker("tag", *BASES)
    archive.unlink()
    shutil.rmtree(base)


def write_secrets(work: Path) -> list[str]:
    """Write the pip.conf of the builds, and return the options that give it to them."""
    conf = f"# {MARK}\n[global]\ncert = /run/secrets/ca\ntrusted-host = {BRIDGE}\nretries = 10\n"
    (work / "pip.conf").write_text(conf, encoding="utf-8")
    return ["--secret", f"id=pip,src={work}/pip.conf", "--secret", f"id=ca,src={CA}"]


@contextmanager
def torch_source(work: Path, wheel: Path | None) -> Iterator[tuple[Path, list[str], str]]:
    """Yield the build's context, the options about torch's index, and a word about the lock.

    Without a wheel the context is the tree itself. With one it is a copy whose lock of torch names that wheel, which an
    index at the engine's bridge serves.
    """
    if wheel is None:
        yield ROOT, [], "the lock untouched"
        return
    context = copied_tree(work / "context")
    version, lock = torch_lock(wheel)
    (context / "docker" / "torch-amd64.txt").write_text(lock, encoding="utf-8")
    index = work / "index" / "torch"
    index.mkdir(parents=True, exist_ok=True)
    (index / wheel.name).unlink(missing_ok=True)
    (index / wheel.name).symlink_to(wheel)
    handler = partial(_Quiet, directory=work / "index")
    with ThreadingHTTPServer((BRIDGE, INDEX_PORT), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        argument = f"TORCH_INDEX_URL=http://{BRIDGE}:{INDEX_PORT}/"
        yield context, ["--build-arg", argument], f"torch {version} in place of the locked one"
        server.shutdown()


def torch_lock(wheel: Path) -> tuple[str, str]:
    """Return the version that a wheel's file name has, and a lock file of that wheel alone."""
    match = re.match(r"torch-([^-]+)-", unquote(wheel.name))
    if match is None:
        raise RuntimeError(f"{wheel.name} is no wheel of torch")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return match.group(1), f"torch=={match.group(1)} \\\n    --hash=sha256:{digest}\n"


def copied_tree(folder: Path) -> Path:
    """Copy what .dockerignore lets into a build, and return the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("app", "docker", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("LICENSE", "NOTICE", "pyproject.toml", ".dockerignore"):
        shutil.copy2(ROOT / name, folder / name)
    return folder


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass
