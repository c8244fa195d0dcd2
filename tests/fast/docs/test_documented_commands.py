"""Every command of the bench and of the laboratories that a page names is one that they take."""

import argparse
import re
import shlex

import pytest

from app.config.flags import parse_flags
from app.config.sources import load_config
from tests import ROOT
from tools.bench import http
from tools.bench.own_server import flags_of
from tools.lab.__main__ import PARTS as LABS

PERFORMANCE = ROOT / "docs" / "performance.md"
PAGES = [ROOT / "README.md", ROOT / "tools" / "lab" / "NOTES.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"python -m tools\.(?:bench|lab)(?: (?:\\\n|[^`\n])*)?(?![\w/])")
STANDS_FOR = {"NAME=URL": "name=http://127.0.0.1:1", "FILE": "file.jsonl", "FOLDER": "folder"}


def documented() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found += [(page.name, command.replace("\\\n", " ").strip()) for command in COMMAND.findall(text)]
    return found


def parsed(command: str) -> tuple[str, argparse.Namespace]:
    """Return the part that a command line means, and its options."""
    package = "tools.lab" if "tools.lab" in command else "tools.bench"
    words = shlex.split(command.partition(package)[2], comments=True)
    part, *arguments = words if words and not words[0].startswith("-") else ["http", *words]
    assert part in (LABS if package == "tools.lab" else ["http"])
    parser = (LABS[part] if package == "tools.lab" else http).parser()
    return part, parser.parse_args([STANDS_FOR.get(argument, argument) for argument in arguments])


@pytest.mark.parametrize(("page", "command"), documented())
def test_a_documented_command_is_understood(page: str, command: str) -> None:
    part, options = parsed(command)
    for variant in options.compare if part == "http" else ():
        load_config(parse_flags([*options.serve_args, *flags_of(variant)]))


def test_the_published_table_has_its_command() -> None:
    commands = [command for page, command in documented() if page == PERFORMANCE.name and "gsm8k.jsonl" in command]
    ((part, options),) = map(parsed, commands)
    assert part == "http" and options.compare == ["plain", "dflash"]
    assert options.max_tokens == 2048 and options.temperature == [0] and options.concurrency == [1, 2, 4, 8, 16, 32]
    assert options.extra_body == {"chat_template_kwargs": {"enable_thinking": False}}
    config = load_config(parse_flags(options.serve_args))
    assert (config.model, config.draft_model) == ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16")
