"""Headless Chromium, driven by its DevTools protocol over one websocket."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from tests.fast.api.served import PATIENCE

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-port=0"
GIVING_WAY = ("context was destroyed", "navigated or closed", "Cannot find context")
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "ArrowRight": (39, ""), "/": (191, "/")}


class Tab:
    """One tab. Its requests, and what went wrong in it, are kept while commands are waited for."""

    def __init__(self, socket: ClientConnection) -> None:
        self.requests: list[str] = []
        self.complaints: list[Any] = []
        self._socket = socket
        self._numbers = itertools.count()
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (message := json.loads(self._socket.recv(PATIENCE))).get("id") != number:
            self._note(message["method"], message["params"])
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown" or (
            event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert")
        ):
            self.complaints.append(params)
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"])

    def open(self, url: str) -> None:
        self.command("Page.navigate", url=url)
        self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        done = self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"]["exception"]["description"])
        return done["result"].get("value")

    def _holds(self, script: str) -> bool:
        """Return True if the expression is true. It is never true while one document replaces another."""
        try:
            return bool(self.run(f"Boolean({script})"))
        except RuntimeError as error:
            if not any(words in str(error) for words in GIVING_WAY):
                raise
            return False

    def until(self, script: str) -> None:
        """Wait until the expression is true."""
        deadline = time.monotonic() + PATIENCE
        while not self._holds(script):
            assert time.monotonic() < deadline, f"never true: {script}\n{self.run('document.body.innerText')}"
            time.sleep(0.03)

    def press(self, key: str, *, shift: bool = False) -> None:
        code, text = KEYS[key]
        pressed = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.command("Input.dispatchKeyEvent", type="keyDown", text=text, **pressed)
        self.command("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def type(self, text: str) -> None:
        self.command("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme: str) -> None:
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


@contextlib.contextmanager
def browser() -> Iterator[str]:
    """A running Chromium; yields the address of its DevTools."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        command = [str(BINARY), *FLAGS.split(), f"--user-data-dir={folder}", "about:blank"]
        null = subprocess.DEVNULL
        with subprocess.Popen(command, stdout=null, stderr=null, start_new_session=True) as process:
            try:
                yield f"http://127.0.0.1:{_port(process, Path(folder) / 'DevToolsActivePort')}"
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # With its children, which would still write to the folder.


def _port(process: "subprocess.Popen[bytes]", told: Path) -> int:
    deadline = time.monotonic() + PATIENCE
    while not (told.exists() and (lines := told.read_text().splitlines())):
        assert process.poll() is None and time.monotonic() < deadline, "Chromium did not start"
        time.sleep(0.05)
    return int(lines[0])


@contextlib.contextmanager
def new_tab(devtools: str) -> Iterator[Tab]:
    """A blank tab, closed afterwards."""
    target = httpx.put(f"{devtools}/json/new?about:blank", timeout=PATIENCE).json()
    with connect(target["webSocketDebuggerUrl"], max_size=2**25, open_timeout=PATIENCE, ping_interval=None) as socket:
        yield Tab(socket)
    httpx.get(f"{devtools}/json/close/{target['id']}", timeout=PATIENCE)
