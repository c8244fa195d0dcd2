"""The command line: our flags and other projects', quick help, and errors in one line with exit code 2."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app import cli
from app.config.aliases import PEER_FLAGS, PeerFlag
from app.config.error import ConfigError
from app.config.flags import parse_flags, serve_parser
from app.config.pairs import default_model
from app.config.settings import Config, flag_name
from app.config.sources import SETTINGS, load_config
from app.engine.checkpoint.files import DEMO
from app.engine.npu.torch_build import check_torch_build


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DFLASH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def load(*arguments: str) -> Config:
    return load_config(parse_flags(arguments))


def typed(command: str) -> Config:
    """Return the settings of a shell command."""
    return load(*shlex.split(command))


def refusal(*arguments: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    return caught.value


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Path | None]]:
    """Return the targets and drafts that an API server was started with, which a stand-in ends with 7."""
    calls: list[tuple[Path, Path | None]] = []
    module = SimpleNamespace(run=lambda config, _: calls.append((config.engine.target, config.engine.draft)) or 7)
    monkeypatch.setitem(sys.modules, "app.api.process", module)  # type: ignore[arg-type]
    monkeypatch.setattr("app.engine.load.refusals.check_models", lambda *_: None)
    return calls


@pytest.mark.parametrize(
    ("arguments", "pair", "said"),
    [
        ("demo", (DEMO / "target", DEMO / "draft"), ""),
        ("demo --no-speculation", (DEMO / "target", None), "plainly"),
        ("target", (Path("target"), None), "--draft-model"),
        ("target --draft-model draft", (Path("target"), Path("draft")), ""),
    ],
)
def test_a_server_gets_the_demo_pair_or_the_folders_it_is_given(
    arguments: str,
    pair: tuple[Path, Path | None],
    said: str,
    served: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
    assert cli.main(["serve", *arguments.split()]) == 7
    assert served == [pair] and said in capsys.readouterr().err


def test_a_broken_checkpoint_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "app.api.process", None)
    assert cli.main(["serve", str(tmp_path)]) == 2
    assert "config.json is missing" in capsys.readouterr().err


def test_flags_are_read_from_every_group() -> None:
    config = typed(
        "some/model --draft-model d --device cpu --dtype half --max-num-seqs 8 --page-size=32 --port 9000 "
        "--served-model-name a b --served-model-name c --log-format json --enforce-eager"
    )
    assert (config.model, config.draft_model, config.engine.device, config.engine.dtype) == (
        "some/model",
        "d",
        "cpu",
        "float16",
    )
    assert (config.engine.max_num_seqs, config.engine.page_size, config.port) == (8, 32, 9000)
    assert config.served_model_name == ["a", "b", "c"]
    assert config.engine.enforce_eager and config.engine.log_format == "json"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--max-num-seq", "--max-num-seqs"),
        ("--prot", "--port"),
        ("--gpu-memory-utilisation", "--gpu-memory-utilization"),
        ("--verfiy", "--verify"),
        ("--tmep", "--temp"),
        *((other, "") for other in ("--enable-lore-x", "--npu-chunk", "--fp8", "--tx-size", "-d", "-p", "--max-loros")),
        *(
            (other, "")
            for other in ("--tmp", "--top", "--toP", "--swap", "--slow", "--embed", "--download-dri", "--ssl-keyfiel")
        ),
    ],
)
def test_a_typo_gets_the_flag_that_was_meant_and_another_flag_no_guess(given: str, meant: str) -> None:
    error = refusal(given, "8")
    assert str(error) == f"unknown flag {given}" + (f": did you mean {meant}?" if meant else "")
    assert error.hint == "`dflash-server serve --help` lists all flags"


def test_all_flags_at_fault_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    command = "x --fast 1 --prot 9 --download-dir d --fast=2 --nnodes 2 --max-num-seq 3"
    assert cli.main(["serve", *command.split()]) == 2
    *errors, hint = capsys.readouterr().err.splitlines()
    assert [line.split(" is refused")[0] for line in errors] == [
        "error: --download-dir",
        "error: --nnodes 2",
        "error: unknown flag --fast",
        "error: unknown flag --prot: did you mean --port?",
        "error: unknown flag --max-num-seq: did you mean --max-num-seqs?",
    ]
    assert hint == "hint: `dflash-server serve --help` lists all flags"


ONE_DASH = sorted(name for peer in PEER_FLAGS for name in peer.names if not name.startswith("--"))
PREFIXES = sorted({name[:end] for name in ONE_DASH for end in range(2, len(name))} - {"-h", *ONE_DASH})


@pytest.mark.parametrize("command", ["serve", "check"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_no_beginning_of_a_flag_means_that_flag(
    command: str,
    prefix: str,
    served: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checked = SimpleNamespace(report=lambda *_, **__: 7)
    monkeypatch.setitem(sys.modules, "app.check.command", checked)  # type: ignore[arg-type]
    for arguments in ([prefix, "2"], [f"{prefix}2"], [f"{prefix}=2"]):
        assert cli.main([command, *arguments]) == 2
        assert capsys.readouterr().err.startswith(f"error: unknown flag {arguments[0].partition('=')[0]}\n")


def test_a_flag_that_is_also_the_beginning_of_another_means_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert "-t is refused: set OMP_NUM_THREADS" in str(refusal("-t", "2"))
    assert typed("-s 7").seed == 7
    assert typed("-m a -c 64 -a b").engine.max_model_len == 64
    assert cli.main(["check", "-t", "2"]) == 2
    assert "unknown flag -t" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port"], "--port"),
        (["a", "b"], "unexpected argument b"),
        (["--port", "x"], "--port x"),
        (["--speculation", "--no-speculation"], "--speculation and --no-speculation"),
        (["a", "--model", "b"], "MODEL and --model"),
        (["--speculative-algorithm", "EAGLE3"], "give one of dflash dflash2 dspark"),
        (["--enable-prefix-caching", "--no-prefix-caching"], "--enable-prefix-caching and --no-prefix-caching"),
        (["--quantization", "awq"], "AWQ, GPTQ and others are not read"),
        (["--speculative-dflash-block-size", "1"], "at least one draft"),
        (["--speculative-dflash-block-size", "16", "--num-speculative-tokens", "16"], "15 and 16"),
        (["-tp", "0"], "greater than 0"),
        (["--data-parallel-size", "2"], "run replicas behind a router"),
        (["--pipeline-parallel-size=4"], "run replicas behind a router"),
        (["-pp", "2"], "run replicas behind a router"),
        (["--nnodes", "2"], "--nnodes 2 is refused: only 1, because a model is on one host; run replicas"),
        (["--enable-expert-parallel"], "each expert is split among the ranks"),
        (["--distributed-executor-backend", "ray"], "the engine starts its own ranks"),
    ],
)
def test_a_mistake_exits_2_with_one_line_that_names_it(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: ") and words in lines[0]
    assert all(line.startswith("hint: ") for line in lines[1:])


def test_the_same_flag_again_wins_as_in_any_command_line() -> None:
    assert typed("--port 1 --port 2").port == 2


VLLMS = """Qwen/Qwen3.5-27B --speculative-config '{"method": "dflash", "model": "z-lab/Qwen3.5-27B-DFlash",
    "num_speculative_tokens": 15}' --attention-backend flash_attn --max-num-batched-tokens 32768"""
SGLANGS = """--model-path Qwen/Qwen3.5-35B-A3B --speculative-algorithm DFLASH --speculative-draft-model-path
    z-lab/Qwen3.5-35B-A3B-DFlash --speculative-num-draft-tokens 16 --tp-size 1 --attention-backend trtllm_mha
    --speculative-draft-attention-backend fa4 --mem-fraction-static 0.75 --mamba-scheduler-strategy extra_buffer
    --trust-remote-code"""


@pytest.mark.parametrize(("command", "size"), [(VLLMS, "27B"), (SGLANGS, "35B-A3B")], ids=["vLLM", "SGLang"])
def test_a_command_of_dflashs_own_readme_starts_as_it_stands(command: str, size: str) -> None:
    config = typed(command)
    assert (config.model, config.draft_model) == (f"Qwen/Qwen3.5-{size}", f"z-lab/Qwen3.5-{size}-DFlash")
    assert config.num_speculative_tokens == 15 and config.engine.tensor_parallel_size == 1
    assert config.engine.max_num_batched_tokens == (32768 if command == VLLMS else None)
    assert config.engine.memory_utilization == (0.9 if command == VLLMS else 0.75)
    backend = "flash_attn" if command == VLLMS else "trtllm_mha"
    assert f"--attention-backend {backend}: nothing to set, the device decides" in config.notes
    assert len(config.notes) == (1 if command == VLLMS else 4)


@pytest.mark.parametrize("flag", ["-fa", "--flash-attn"])
def test_llama_servers_switch_of_flash_attention_takes_no_model(flag: str) -> None:
    assert typed(f"{flag} MODEL").model == typed(f"{flag} on MODEL").model == "MODEL"


def test_a_flag_that_is_taken_needs_its_value() -> None:
    assert "expected one argument" in str(refusal("MODEL", "--attention-backend"))


@pytest.mark.parametrize("peer", PEER_FLAGS, ids=lambda peer: peer.names[0])
def test_a_flag_of_another_project_takes_the_values_that_it_has_there_and_no_model(peer: PeerFlag) -> None:
    value = {"only": peer.means.upper().split()[0] if peer.means else "", "block": "8", "taken": "on", "sampling": "1"}
    ours = {"memory_utilization": "0.5", "speculative_config": '{"model": "d"}', "draft_enforce_eager": "true"}
    ours |= {
        "quantization": "int8",
        "draft_quantization": "int8",
        "device": "cpu",
        "generation_config": "openai",
        "root_path": "/llm",
        "mamba_ssm_cache_dtype": "bfloat16",
    }
    ours |= dict.fromkeys(("default_chat_template_kwargs", "override_generation_config"), '{"top_k": 1}')
    for name in peer.names:
        given = value.get(peer.kind) or ours.get(peer.field, "1")
        arguments = [name, given] if peer.nargs(name) != 0 else [name]
        if peer.kind == "refused":
            assert f"{name} is refused: {peer.note}" in str(refusal("m", *arguments))
            continue
        if peer.nargs(name) == "+":
            assert load("MODEL", *arguments, "2").notes == (f"{name} {given} 2: nothing to set, {peer.note}",)
            continue
        draft = [] if peer.field in ("draft_model", "speculative_config") else ["--draft-model", "d"]
        settings = parse_flags([*arguments, *draft, *([] if peer.field == "model" else ["MODEL"])])
        assert peer.field == "model" or settings[-1] == ("MODEL", "model", "MODEL")
        assert (peer.field in [setting.field for setting in settings]) is (peer.kind != "only")
        config = load_config(setting for setting in settings if setting.field != "draft_tensor_parallel_size")
        assert bool(config.notes) is (peer.kind == "taken")


@pytest.mark.parametrize(
    "command",
    [
        "--speculative-config.method dflash --speculative-config.model d --speculative-config.num_speculative_tokens 7",
        "--speculative_config.method=dflash --speculative_config.model=d --speculative_config.num_speculative_tokens=7",
    ],
)
def test_keys_of_a_speculative_config_may_be_dotted(command: str) -> None:
    config = typed(command)
    assert (config.draft_model, config.num_speculative_tokens) == ("d", 7)
    assert "give one of dflash" in str(refusal("--speculative-config.method", "eagle3"))


@pytest.mark.parametrize(("given", "tokens"), [("2k", 2000), ("2K", 2048), ("1.5k", 1500), ("1M", 2**20), ("77", 77)])
def test_numbers_of_tokens_may_be_short(given: str, tokens: int) -> None:
    assert typed(f"--max-model-len {given}").engine.max_model_len == tokens
    assert typed(f"--max-num-batched-tokens {given}").engine.max_num_batched_tokens == tokens
    assert all(typed(f"--max-model-len {auto}").engine.max_model_len is None for auto in ("auto", "-1", "0"))
    for wrong in ("2kk", "k", "2.5", "-2"):
        assert f"--max-model-len {wrong}" in str(refusal("--max-model-len", wrong))


def test_a_vllm_command_starts_as_it_stands() -> None:
    config = typed(
        """Qwen/Qwen3-8B --gpu-memory-utilization 0.8 --max_model_len 4096 --block-size 128 --dtype bfloat16
        -tp 1 -pp 1 --data-parallel-size 1 --nnodes 1 --distributed-executor-backend mp --disable-custom-all-reduce
        --trust-remote-code --enforce-eager --no-enable-prefix-caching --speculative-config
        '{"method": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16", "num_speculative_tokens": 15}'"""
    )
    assert (config.model, config.draft_model) == ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16")
    assert (config.num_speculative_tokens, config.engine.max_model_len, config.engine.page_size) == (15, 4096, 128)
    assert config.engine.memory_utilization == 0.8 and config.engine.enforce_eager
    assert not config.engine.prefix_caching and typed("--enable-prefix-caching").engine.prefix_caching


def test_an_sglang_command_starts_as_it_stands() -> None:
    config = typed(
        "--model-path Qwen/Qwen3-8B --speculative-algorithm DFLASH --tp-size 1 --dtype bfloat16 "
        "--speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16 --mem-fraction-static 0.75 "
        "--speculative-num-draft-tokens 16 --speculative-dflash-block-size 16 --trust-remote-code "
        "--context-length 4096 --max-running-requests 8 --disable-radix-cache --disable-cuda-graph"
    )
    assert (config.model, config.draft_model) == ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16")
    assert config.num_speculative_tokens == 15
    assert (config.engine.max_model_len, config.engine.max_num_seqs, config.engine.enforce_eager) == (4096, 8, True)
    assert not config.engine.prefix_caching


def test_a_misspelt_command_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["srve", "--port", "1"]) == 2
    assert "did you mean `dflash-server serve --port 1`?" in capsys.readouterr().err


def test_a_leading_flag_means_serve(served: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--port", "9000", "demo"]) == 7 and len(served) == 1
    assert cli.main(["--prot", "9000"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown flag --prot: did you mean --port?\n")


def test_a_reader_that_has_seen_enough_of_a_check_ends_it_without_a_word() -> None:
    code = (
        "import sys, types\n"
        "report = lambda *_, **__: [print(i, flush=True) for i in range(100_000)]\n"
        "sys.modules['app.check.command'] = types.SimpleNamespace(report=report)\n"
        "from app import cli\n"
        "sys.exit(cli.main(['check']))\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr and process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--num-speculative-tokens", "31"], "num_speculative_tokens 31 is outside 1..15"),
        (["--verify", "99"], "--verify 99: a block has 16 rows; give 1 to 16"),
        (["--tensor-parallel-size", "5"], "the target has 4 attention heads, which 5 does not divide"),
        (["--max-model-len", "1m"], "max_position_embeddings"),
    ],
)
def test_settings_that_do_not_fit_the_checkpoints_exit_2_before_a_server_starts(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "app.api.process", None)
    assert cli.main(["serve", "demo", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("Qwen/Qwen3-8B", "did you mean `dflash-server serve Qwen/Qwen3-8B`?"),
        ("run llama3.2", "did you mean `dflash-server serve llama3.2`?"),
        ("launch_server --model-path X", "did you mean `dflash-server serve --model-path X`?"),
        ("sglang.launch_server --model-path X", "did you mean `dflash-server serve --model-path X`?"),
        ("vllm.entrypoints.openai.api_server --model X", "did you mean `dflash-server serve --model X`?"),
        ("pull llama3.2", "`dflash-server serve MODEL` downloads"),
        ("list", "`hf cache ls`"),
        ("chat", "`dflash-server serve MODEL` prints the address"),
        ("bench serve", "`python -m tools.bench`"),
        ("collect-env", "`dflash-server check`"),
        ("chek", "did you mean `dflash-server check`?"),
        ("nonsense", "`dflash-server --help` lists the commands"),
    ],
)
def test_an_unknown_command_is_told_what_to_type(command: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command.split()) == 2
    error, said = capsys.readouterr().err.splitlines()
    assert error == f"error: unknown command {command.split()[0]}" and said.startswith(f"hint: {hint}")


RECIPES = (
    # vLLM's recipes and vllm-ascend's tutorials
    "Qwen/Qwen3.6-35B-A3B --tensor-parallel-size 8 --max-model-len 262144 --reasoning-parser qwen3 "
    "--language-model-only --enable-prefix-caching --mamba-cache-mode align --mamba-block-size 8",
    "/mnt/weight/Qwen3.6-27B --host 0.0.0.0 --port 8000 --data-parallel-size 1 --tensor-parallel-size 2 --seed 1024 "
    "--served-model-name qwen3.6-27b --max-num-seqs 32 --max-model-len 133000 --max-num-batched-tokens 8096 "
    "--trust-remote-code --reasoning-parser qwen3 --gpu-memory-utilization 0.90 --no-enable-prefix-caching "
    """--speculative_config '{"method": "dflash", "model": "d", "num_speculative_tokens": 15, """
    """"disable_padded_drafter_batch": false}' --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}' """
    """--additional-config '{"enable_cpu_binding": true}' --async-scheduling""",
    "openai/gpt-oss-20b --revision main --tokenizer openai/gpt-oss-20b --generation-config vllm --load-format "
    "safetensors --guided-decoding-backend xgrammar --max-logprobs 20 --chat-template-content-format auto "
    "--tool-call-parser openai --enable-auto-tool-choice --max-cudagraph-capture-size 2048 --stream-interval 20 "
    "--cudagraph-capture-sizes 1 2 4 8 --cpu-offload-gb 0 --max-model-len auto --disable-uvicorn-access-log "
    """--override-generation-config '{"temperature": 0.6, "max_new_tokens": 512}'""",
    # SGLang's cookbook
    "--model-path Qwen/Qwen3.5-27B --speculative-algorithm DFLASH --speculative-draft-model-path d --dtype bfloat16 "
    "--speculative-draft-attention-backend fa4 --attention-backend trtllm_mha --skip-server-warmup --random-seed 1 "
    "--dist-init-addr 127.0.0.1:5000 --nnodes 1 --node-rank 0 --cuda-graph-bs 1 2 4 --tool-call-parser qwen3_coder "
    "--mamba-ssm-dtype float32 --sampling-defaults openai --enable-metrics --admin-api-key k --moe-runner-backend auto",
    # llama-server's README and its users
    "-m Qwen/Qwen3-8B --spec-draft-model d --spec-type draft-dflash --spec-draft-n-max 15 -c 0 -np 4 -ngl 99 -fa on "
    "--temp 0.6 --top-k 20 --top-p 0.95 --min-p 0 --repeat-penalty 1.05 --jinja --no-webui --slots --metrics --props "
    """--no-mmap --cont-batching --chat-template-kwargs '{"enable_thinking": false}' --reasoning-format deepseek """
    "--cache-type-k auto --no-context-shift -s -1 --predict -1",
    "-hf ggml-org/Qwen3-8B-GGUF:Q4_K_M -md d --draft 7 --load-format gguf --no-mmproj -ngl all -fa auto",
    "-m x --model-draft d --draft-max 7 --draft-min 0 --draft-p-min 0.8 -ngld 99 --no-warmup -a name",
)


@pytest.mark.parametrize("command", RECIPES, ids=lambda command: command.split()[0])
def test_a_published_command_starts_as_it_stands(command: str) -> None:
    config = typed(command)
    assert config.model != "demo" and config.notes


@pytest.mark.parametrize(
    "command, model",
    [
        ("-m a.gguf", "a.gguf"),
        ("-hf o/m", "o/m"),
        ("--hf-repo o/m:Q8_0", "o/m:Q8_0"),
        ("--hf-repo o/m --hf-file sub/a.gguf", "o/m/sub/a.gguf"),
        ("-hff a.gguf -hfr o/m:Q4_0", "o/m/a.gguf"),
        ("o/m --hf-file a.gguf", "o/m/a.gguf"),
    ],
)
def test_llama_servers_ways_to_name_a_file_are_a_model(command: str, model: str) -> None:
    config = typed(command)
    assert config.model == model and config.model_names == [model]


@pytest.mark.parametrize(
    "command, told",
    [
        ("--hf-file a.gguf", "--hf-file a.gguf is a file of no repository"),
        ("-m a.gguf -hf o/m", "-m and -hf contradict each other: a.gguf and o/m"),
        ("-hfd o/d", "-hfd is refused: drafts are safetensors; see --draft-model"),
        ("--override-kv a=int:1", "--override-kv is refused: a GGUF file is read as it is"),
    ],
)
def test_llama_servers_flags_of_files_that_cannot_be_honoured_are_refused(command: str, told: str) -> None:
    assert told in str(refusal(*command.split()))


def test_llama_servers_defaults_of_sampling_are_the_servers() -> None:
    config = typed("--temp 0.6 --top-k 20 --predict 5")
    assert config.override_generation_config == {"temperature": 0.6, "top_k": 20, "max_new_tokens": 5}
    assert "--temp hot: a number is wanted" in str(refusal("--temp", "hot"))
    assert "contradict" in str(refusal("--temp", "1", "--override-generation-config", "{}"))


def test_keys_that_contradict_each_other_are_not_shown() -> None:
    error = refusal("--admin-key", "first-secret", "--admin-api-key", "second-secret")
    assert "--admin-key and --admin-api-key contradict each other" in str(error) and "secret" not in str(error)


def test_serve_help_shows_every_flag_its_default_and_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", "--help"])
    assert left.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--memory-utilization" in shown and "default: 0.9, DFLASH_MEMORY_UTILIZATION" in shown


@pytest.mark.parametrize("name", SETTINGS)
def test_help_has_the_type_and_the_default_of_every_setting(name: str) -> None:
    groups = serve_parser()._action_groups[2:-1]
    (action,) = [action for group in groups for action in group._group_actions if action.const == name]
    assert action.nargs == 0 or (str(action.metavar).isupper() and action.metavar != "VALUE")
    assert re.search(r"default: \S", str(action.help)), action.help
    field = SETTINGS[name]
    default = field.get_default(call_default_factory=True)
    if default not in (None, [], {}, ""):
        assert f"[default: {str(default).lower()}, " in str(action.help)
    kinds = {int: "N SECONDS SIZE", float: "SECONDS SHARE"}
    assert action.nargs == 0 or str(action.metavar) in kinds.get(type(default), str(action.metavar)).split()


def test_every_setting_is_in_one_group_of_the_help() -> None:
    *groups, peers = serve_parser()._action_groups[2:]
    assert [group.title for group in groups][:2] == ["model", "speculative decoding"] and "vLLM" in str(peers.title)
    settings = [action.const for group in groups for action in group._group_actions]
    assert sorted(settings) == sorted(SETTINGS)
    shown = serve_parser().format_help()
    assert all(f"{flag_name(name)}" in shown for name in SETTINGS)


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        ("-fa", default_model()),
        ("-fa x", "x"),
        ("--flash-attn auto x", "x"),
        ("x -fa off", "x"),
        ("--flash-attn --port 1", default_model()),
    ],
)
def test_a_flag_that_sets_nothing_takes_no_model(arguments: str, model: str) -> None:
    assert load(*arguments.split()).model == model


@pytest.mark.parametrize(
    ("arguments", "heavy", "most"),
    [
        ("--help", "pydantic asyncio torch fastapi", 40),
        ("serve --help", "torch transformers fastapi uvicorn zmq numpy huggingface_hub tokenizers httpx", 300),
        ("", "torch transformers fastapi huggingface_hub", 1000),
    ],
)
def test_help_and_settings_and_checkpoints_import_little(arguments: str, heavy: str, most: int) -> None:
    """Imports take the time of help."""
    code = (
        "import contextlib, sys\n"
        "before = set(sys.modules)\n"
        "from app import cli\n"
        "if not sys.argv[1:]:\n"
        "    import app.engine.checkpoint.read\n"
        "    import app.engine.load.refusals\n"
        "    from app.config.flags import parse_flags\n"
        "    parse_flags(['--port', '1'])\n"
        "with contextlib.suppress(SystemExit):\n"
        "    cli.main(sys.argv[1:] or ['--help'])\n"
        "print('imported', *set(sys.modules) - before)\n"
    )
    command = [sys.executable, "-c", code, *arguments.split()]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    shown, _, imported = done.stdout.rpartition("imported ")
    assert shown.startswith("usage: ")
    assert not set(heavy.split()) & set(imported.split()) and len(imported.split()) <= most


def test_a_torch_npu_without_cann_cannot_break_imports_of_torch(served: list[Any]) -> None:
    os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    cli.main(["serve", "demo"])
    assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages with torch_npu and a CUDA build of torch."""
    for package in ("torch", "torch_npu"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.10.0+cu128'\ncuda: Optional[str] = '12.8'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for package in ("torch", "torch_npu"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    return tmp_path


def test_a_cuda_build_of_torch_beside_torch_npu_is_reported_by_name(site: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch 2\.10\.0\+cu128 is a CUDA 12\.8 build") as caught:
        check_torch_build("npu:0")
    assert "torch==2.10.0" in caught.value.hint
    for harmless in ("cpu", "cuda", "auto"):
        check_torch_build(harmless)


def test_a_cpu_build_of_torch_serves_an_npu(site: Path) -> None:
    (site / "torch" / "version.py").write_text("__version__ = '2.10.0+cpu'\ncuda: Optional[str] = None\n")
    check_torch_build("npu")


def test_an_npu_without_torch_npu_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="torch_npu is not installed"):
        check_torch_build("npu")
