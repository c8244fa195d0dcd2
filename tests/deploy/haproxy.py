"""The real HAProxy, and the configuration of docker/haproxy.cfg for replicas on this machine."""

import contextlib
import csv
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx

from tests import ROOT
from tests.fast.api.served import PATIENCE

HAPROXY = shutil.which("haproxy") or shutil.which("/usr/sbin/haproxy")
STATES = "/haproxy-states"


def configuration(listener: int, ports: Sequence[int]) -> str:
    """Return docker/haproxy.cfg for a listening descriptor and replicas on `ports`, without Docker's name server.

    Checks wait for a slow machine, and STATES tells of the replicas.
    """
    text = (ROOT / "docker" / "haproxy.cfg").read_text(encoding="utf-8")
    text = re.sub(r"^resolvers docker\n(?: .*\n)*", "", text, flags=re.MULTILINE)
    text = text.replace(" resolvers docker init-addr none", "").replace("bind :8080", f"bind fd@{listener}")
    text = text.replace("timeout connect 5s", f"timeout connect {PATIENCE:.0f}s\n    timeout check {PATIENCE:.0f}s")
    text = text.replace("balance leastconn", f"balance leastconn\n    stats enable\n    stats uri {STATES}")
    lines = [f"    server server-{number} 127.0.0.1:{replica}\n" for number, replica in enumerate(ports)]
    return re.sub(r"(?:^    server server-\d.*\n)+", "".join(lines), text, flags=re.MULTILINE)


@contextlib.contextmanager
def proxy(folder: Path, ports: Sequence[int], change: Callable[[str], str] = str) -> Iterator[str]:
    """Run HAProxy before the replicas, and yield its address, where connections are taken at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number, port = listener.fileno(), listener.getsockname()[1]
        (folder / "haproxy.cfg").write_text(change(configuration(number, ports)))
        command = [str(HAPROXY), "-f", str(folder / "haproxy.cfg")]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, pass_fds=[number])
    with running:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            running.terminate()


def states(url: str) -> list[str]:
    """Return what the proxy thinks of each replica: "UP", "DOWN", or that it goes there."""
    table = httpx.get(f"{url}{STATES};csv", timeout=PATIENCE, trust_env=False).text.removeprefix("# ")
    return [row["status"] for row in csv.DictReader(table.splitlines()) if row["svname"].startswith("server-")]
