"""Install packages by uv with pip's settings: `.venv/bin/python tools/install.py [OPTION | PACKAGE]...`.

uv takes a tenth of pip's time, and reads none of pip's settings, so these are translated. Where one of them has no
counterpart here, or uv itself cannot be installed, pip installs. Python's own library suffices.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterable

_UV = "uv>=0.9"
_SAME = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}
"""pip's settings: uv's variable, and what parts a list in it."""
_NOTHING_TO_SET = set(
    "cache-dir disable-pip-version-check no-color no-compile no-input no-warn-script-location progress-bar quiet "
    "retries root-user-action verbose".split()
)
_SECTIONS = ("global", "install", ":env:")
"""Of pip's settings, the last that has one wins."""


def settings(lines: Iterable[str]) -> dict[str, str]:
    """Return what `pip config list` prints and `pip install` honours, by name."""
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in lines:
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in found:
            found[section][key.replace("_", "-")] = str(ast.literal_eval(value))
    return {key: value for section in _SECTIONS for key, value in found[section].items()}


def variables(found: dict[str, str]) -> dict[str, str]:
    """Return uv's variables for pip's settings. pip takes the best version of all indexes. Raises LookupError, which
    names a setting that has none."""
    asked = {key: value for key, value in found.items() if key not in _NOTHING_TO_SET and value.strip()}
    if unknown := sorted(asked.keys() - _SAME.keys()):
        raise LookupError(", ".join(unknown))
    translated = {_SAME[key][0]: _SAME[key][1].join(value.split()) for key, value in asked.items()}
    return {"UV_INDEX_STRATEGY": "unsafe-best-match"} | translated


def main(arguments: list[str]) -> int:
    pip = [sys.executable, "-m", "pip"]
    listed = subprocess.run([*pip, "config", "list"], stdout=subprocess.PIPE, text=True, check=True).stdout
    try:
        own = {name: value for name, value in os.environ.items() if name.startswith("UV_")}
        environment = os.environ | variables(settings(listed.splitlines())) | own
        subprocess.run([*pip, "install", "--quiet", _UV], check=True)
        command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, *arguments]
        return subprocess.run(command, env=environment).returncode
    except (LookupError, subprocess.CalledProcessError) as error:
        reason = f"has no counterpart of pip's {error}" if isinstance(error, LookupError) else "cannot be installed"
        print(f"pip installs, in place of uv, which {reason}", file=sys.stderr)
        return subprocess.run([*pip, "install", "--no-compile", *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
