"""The engine process that is started is ours, wherever somebody starts the server."""

import subprocess
from pathlib import Path

from app.api.server import ENGINE_COMMAND
from app.child_process import engine_environment


def test_another_app_in_the_working_folder_is_not_imported_in_our_place(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    for name in ("app/__init__.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit('hijacked')")
    ended = subprocess.run(
        ENGINE_COMMAND, cwd=tmp_path, env=engine_environment(), capture_output=True, text=True, timeout=120
    )
    assert "hijacked" not in ended.stderr
    assert "not enough values to unpack" in ended.stderr  # our main(), which wants three arguments
