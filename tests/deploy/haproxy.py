"""The real HAProxy, and the configuration of docker/haproxy.cfg for replicas on this machine."""

import re
import shutil
from collections.abc import Sequence

from tests import ROOT

HAPROXY = shutil.which("haproxy") or shutil.which("/usr/sbin/haproxy")


def configuration(port: int, ports: Sequence[int]) -> str:
    """Return docker/haproxy.cfg on `port` of 127.0.0.1, with replicas on `ports` and without Docker's name server."""
    text = (ROOT / "docker" / "haproxy.cfg").read_text(encoding="utf-8")
    text = re.sub(r"^resolvers docker\n(?: .*\n)*", "", text, flags=re.MULTILINE)
    text = text.replace(" resolvers docker init-addr none", "").replace("bind :8080", f"bind 127.0.0.1:{port}")
    lines = [f"    server server-{number} 127.0.0.1:{replica}\n" for number, replica in enumerate(ports)]
    return re.sub(r"(?:^    server server-\d.*\n)+", "".join(lines), text, flags=re.MULTILINE)
