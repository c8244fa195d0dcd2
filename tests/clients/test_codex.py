"""Codex as installed, with nothing but this server's address and a server of tools, before five families of models."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import FOLDER, NODE, call
from tests.clients.page import LOOP
from tests.clients.scripted import FAMILIES, playing, serving_family

CODEX = FOLDER / "node" / "node_modules" / "@openai" / "codex" / "bin" / "codex.js"
CONFIG = f"""\
model = "tiny"
model_provider = "dflash"
# A test needs no other host.
check_for_update_on_startup = false
analytics.enabled = false

[model_providers.dflash]
name = "dflash"
base_url = "%s/v1"

[mcp_servers.weather]
command = {json.dumps(sys.executable)}
args = [{json.dumps(str(Path(__file__).with_name("mcp_server.py")))}]
"""


def run(home: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return what one turn of Codex made: commands, calls and messages."""
    command: list[str | Path] = [NODE, CODEX, "exec", *arguments, "--json", "--skip-git-repo-check"]
    done = call([*command, "--dangerously-bypass-approvals-and-sandbox"], cwd=home, CODEX_HOME=str(home))
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (events, done.stderr[-3000:])
    return [event["item"] for event in events if event["type"] == "item.completed"]


@pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "not thinking"])
@pytest.mark.parametrize("name", FAMILIES)
def test_codex_runs_commands_and_tools_sees_no_image_and_goes_on(
    environments, model_folder, tmp_path, record_property, name, thinks
):
    record_property("cell", ("Codex", LOOP))
    with serving_family(model_folder, name, thinks) as server, playing(server, FAMILIES[name], thinks) as prompts:
        (tmp_path / "config.toml").write_text(CONFIG % server.url)
        first = run(tmp_path, "What is the weather in Bern?")
        second = run(tmp_path, "resume", "--last", "Again?")
    (tool,) = [item for item in first if item["type"] == "mcp_tool_call"]
    (command,) = [item for item in first if item["type"] == "command_execution"]
    assert (tool["server"], tool["tool"], tool["status"]) == ("weather", "get_weather", "completed"), tool
    assert (command["aggregated_output"], command["exit_code"]) == ("cloudless", 0), command
    assert [items[-1].get("text") for items in (first, second)] == ["It is sunny."] * 2
    is_told = thinks and server.tokenizer.chat_template.writes_reasoning
    assert len(prompts) == 5 and ("Hm." in prompts[-1]) is is_told
