"""The command lines of the tools: one parser, mistakes like those of `serve`, and vLLM's names for the bench."""

import re

import pytest

from tests import ROOT
from tools.bench import http
from tools.bench.__main__ import main as bench
from tools.lab.__main__ import PARTS as LABS
from tools.lab.__main__ import main as lab
from tools.parts import ToolParser


def test_every_command_line_is_read_by_one_parser() -> None:
    sources = [path for folder in ("app", "tools") for path in (ROOT / folder).rglob("*.py")]
    makers = [path.name for path in sources if re.search(r"ArgumentParser\(|ArgumentParser\):", path.read_text())]
    assert makers == ["parser.py"]


PARSERS = {"tools.bench.http": http.parser} | {f"tools.lab.{name}": part.parser for name, part in LABS.items()}


@pytest.mark.parametrize("part", PARSERS)
def test_a_tool_takes_whole_flags_only_and_names_all_others(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = PARSERS[part]()
    assert isinstance(parser, ToolParser)
    flags = [flag for flag in parser._option_string_actions if flag not in ("-h", "--help")]
    for flag in flags:
        with pytest.raises(SystemExit) as left:
            parser.parse_args([f"{flag}x", "-x", "2"])
        assert left.value.code == 2
        *errors, hint = capsys.readouterr().err.splitlines()
        unknown = f"error: unknown flag {flag}x"
        assert errors in (
            [f"{unknown}: did you mean {flag}?", "error: unknown flag -x"],
            [unknown, "error: unknown flag -x"],
        )
        assert "did you mean" in errors[0] or len(flag) < len("--four")
        assert hint == f"hint: `{parser.prog} --help` lists all flags"
        for prefix in {flag[:end] for end in range(3, len(flag))} - set(flags):
            with pytest.raises(SystemExit):
                parser.parse_args([prefix, "2"])
            assert f"error: unknown flag {prefix}" in capsys.readouterr().err


def test_a_missing_part_or_an_unknown_one_is_told_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert (lab(["stpe"]), lab(["nothing"]), lab([])) == (2, 2, 2)
    told = capsys.readouterr().err
    assert "there is no part stpe\nhint: did you mean step?" in told
    assert "there is no part nothing\nhint: there are step, cpu" in told and "usage: python -m tools.lab PART" in told


def test_vllms_flags_of_its_bench_mean_ours(capsys: pytest.CaptureFixture[str]) -> None:
    command = "--backend openai-chat --dataset-name random --random-input-len 8 --random-output-len 4"
    options = http.parser().parse_args([*command.split(), "--max-concurrency=2"])
    assert (options.input_len, options.output_len, options.concurrency, options.dataset) == (8, 4, [2], None)
    with pytest.raises(SystemExit):
        bench(["serve", "--dataset-name", "random"])
    assert "--dataset-name random wants --input-len or --output-len" in capsys.readouterr().err
