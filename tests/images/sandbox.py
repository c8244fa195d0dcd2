"""Namespaces in which a Docker engine runs, so that the host keeps no bridge, firewall rule, mount or process of it."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

BRIDGE = "172.29.0.1"
"""Address of the engine's bridge, at which containers reach this process."""
CGROUP = "dflash-images"
CONTAINERD = Path("/opt/containerd")
"""Folder that containerd makes in any case, and leaves empty."""
HIDDEN = ("/run", "/etc/docker")
"""Folders in which the engine sees empty ones in memory, because it writes there whatever its settings say."""


def enter(command: list[str]) -> int:
    """Run `command --inside FD` in namespaces of its own, and return its exit code. FD is the host's network."""
    network = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        unshare = "unshare --mount --net --pid --fork --kill-child --mount-proc".split()
        return subprocess.run([*unshare, *command, "--inside", str(network)], pass_fds=[network]).returncode
    finally:
        os.close(network)


@contextmanager
def engine(work: Path, outer_network: int) -> Iterator[dict[str, str]]:
    """Start a Docker engine whose files are all in `work`. Yield the environment of its clients."""
    _connect(outer_network)
    for folder in filter(os.path.isdir, HIDDEN):
        _run("mount", "-t", "tmpfs", "tmpfs", folder)
    socket = f"unix://{work}/docker.sock"
    settings = {
        "data-root": str(work / "data"),
        "exec-root": str(work / "exec"),
        "pidfile": str(work / "docker.pid"),
        "hosts": [socket],
        "storage-driver": "overlay2",
        "bip": f"{BRIDGE}/24",
        "dns": ["10.0.2.3"],
        "cgroup-parent": CGROUP,
        "exec-opts": ["native.cgroupdriver=cgroupfs"],
    }
    (work / "daemon.json").write_text(json.dumps(settings), encoding="utf-8")
    environment = os.environ | {"DOCKER_HOST": socket, "DOCKER_CONFIG": str(work / "client"), "DOCKER_BUILDKIT": "1"}
    with (work / "dockerd.log").open("w") as log:
        daemon = subprocess.Popen(["dockerd", "--config-file", work / "daemon.json"], stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 60
            while not Path(work / "docker.sock").is_socket() or _fails(["docker", "version"], environment):
                if daemon.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"dockerd did not start:\n{(work / 'dockerd.log').read_text()[-2000:]}")
                time.sleep(0.5)
            yield environment
        finally:
            daemon.terminate()
            daemon.wait()


def _connect(outer_network: int) -> None:
    """Give this network namespace a way out through slirp4netns, which needs no bridge and no rule of the host."""
    _run("ip", "link", "set", "lo", "up")
    inner = os.open("/proc/self/ns/net", os.O_RDONLY)
    ready, told = os.pipe()
    slirp = f"slirp4netns --configure --mtu=65520 --disable-host-loopback --ready-fd={told} --netns-type=path"
    subprocess.Popen(
        ["nsenter", f"--net=/proc/self/fd/{outer_network}", *slirp.split(), f"/proc/self/fd/{inner}", "tap0"],
        pass_fds=[outer_network, inner, told],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(told)
    if os.read(ready, 1) != b"1":
        raise RuntimeError("slirp4netns did not start")


def clean_up(work: Path, *, keep: bool) -> None:
    """Remove what a namespace cannot hold: files, control groups, and the folder of containerd."""
    deadline = time.monotonic() + 10  # Processes of an interrupted run take a moment to end.
    while (groups := _control_groups()) and time.monotonic() < deadline:
        for folder in groups:
            with suppress(OSError):
                folder.rmdir()
    for folder in (CONTAINERD / "bin", CONTAINERD / "lib", CONTAINERD):
        with suppress(OSError):
            folder.rmdir()
    if not keep:
        shutil.rmtree(work)


def host_state() -> dict[str, object]:
    """Return what an engine would change on a host that does not isolate it."""
    paths = "/run/docker /run/docker.sock /run/containerd /var/lib/docker /var/lib/containerd /etc/docker/key.json"
    return {
        "links": _output("ip", "-brief", "link"),
        "routes": _output("ip", "route"),
        "firewall": _output("iptables-save", "-t", "filter") + _output("iptables-save", "-t", "nat"),
        "ip_forward": Path("/proc/sys/net/ipv4/ip_forward").read_text(),
        "mounts": Path("/proc/self/mounts").read_text(),
        "control groups": _control_groups(),
        "folders": [path for path in [*paths.split(), str(CONTAINERD)] if Path(path).exists()],
    }


def _control_groups() -> list[Path]:
    """Return the engine's control groups, the innermost first."""
    groups = Path("/sys/fs/cgroup").glob(f"**/{CGROUP}")
    return sorted((path for group in groups for path in [group, *group.rglob("*/")]), reverse=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _output(*command: str) -> str:
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


def _fails(command: list[str], environment: dict[str, str]) -> bool:
    return subprocess.run(command, env=environment, capture_output=True).returncode != 0
