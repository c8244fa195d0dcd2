"""Published schemas of YAML files, which the package check-jsonschema has."""

import subprocess
import sys
from pathlib import Path


def schema_errors(text: str, schema: str, folder: Path) -> str:
    """Return what the vendor's `schema` minds in a YAML text, or "". A file of it is written into `folder`."""
    (folder / "file.yaml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*command, str(folder / "file.yaml")], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr
