"""The command line: our flags and other projects', quick help, and errors in one line with exit code 2."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app import cli
from app.config.error import ConfigError
from app.config.flags import THREE_WAYS, parse_flags, serve_parser
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
    module = SimpleNamespace(run=lambda config, target, draft: calls.append((target, draft)) or 7)
    monkeypatch.setitem(sys.modules, "app.api.process", module)  # type: ignore[arg-type]
    monkeypatch.setattr("app.engine.checkpoint.read.check_checkpoints", lambda config: None)
    return calls


@pytest.mark.parametrize(
    ("arguments", "pair", "said"),
    [
        ("", (DEMO / "target", DEMO / "draft"), ""),
        ("--no-speculation", (DEMO / "target", None), "plainly"),
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


def test_an_unknown_flag_names_the_nearest() -> None:
    error = refusal("--max-num-seq", "8")
    assert str(error) == "unknown flag --max-num-seq" and error.hint == "did you mean --max-num-seqs?"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port"], "--port"),
        (["a", "b"], "unexpected argument b"),
        (["--port", "x"], "--port x"),
        (["--speculation", "--no-speculation"], "--speculation and --no-speculation"),
        (["a", "--model", "b"], "MODEL and --model"),
        (["--speculative-algorithm", "EAGLE3"], "DFLASH only"),
        (["--enable-prefix-caching", "--no-prefix-caching"], "--enable-prefix-caching and --no-prefix-caching"),
        (["--attention-backend", "fa3"], "leave it out"),
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


def test_an_unknown_command_is_told_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["Qwen/Qwen3-8B"]) == 2
    assert "dflash-server serve Qwen/Qwen3-8B" in capsys.readouterr().err


def test_serve_help_shows_every_flag_its_default_and_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", "--help"])
    assert left.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--memory-utilization" in shown and "default: 0.9, DFLASH_MEMORY_UTILIZATION" in shown


def test_every_setting_is_in_one_group_of_the_help() -> None:
    *groups, peers = serve_parser()._action_groups[2:]
    assert [group.title for group in groups][:2] == ["model", "speculative decoding"] and "vLLM" in str(peers.title)
    settings = [action.const for group in groups for action in group._group_actions]
    assert sorted(settings) == sorted([*SETTINGS, *THREE_WAYS]), "--no-compile stands beside --compile"
    shown = serve_parser().format_help()
    assert all(f"{flag_name(name)}" in shown for name in SETTINGS)


@pytest.mark.parametrize(
    ("arguments", "compile", "model"),
    [
        ("", "auto", "demo"),
        ("--compile", True, "demo"),
        ("--compile x", True, "x"),
        ("--compile auto x", "auto", "x"),
        ("x --compile off", False, "x"),
        ("--compile --port 1", True, "demo"),
        ("--no-compile x", False, "x"),
    ],
)
def test_a_bare_flag_turns_compilation_on_and_takes_no_model(arguments: str, compile: bool | str, model: str) -> None:
    config = load(*arguments.split())
    assert (config.engine.compile, config.model) == (compile, model)


@pytest.mark.parametrize(
    ("arguments", "heavy", "most"),
    [
        ("--help", "pydantic asyncio torch fastapi", 40),
        ("serve --help", "torch transformers fastapi uvicorn zmq numpy huggingface_hub tokenizers httpx", 300),
        ("", "torch transformers fastapi huggingface_hub", 1000),
    ],
)
def test_help_and_settings_and_checkpoints_import_little(arguments: str, heavy: str, most: int) -> None:
    """Imports take the time of help. `python -m tools.lab api --parts start` measures it."""
    code = (
        "import contextlib, sys\n"
        "before = set(sys.modules)\n"
        "from app import cli\n"
        "if not sys.argv[1:]:\n"
        "    import app.engine.checkpoint.read\n"
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
    cli.main(["serve"])
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
