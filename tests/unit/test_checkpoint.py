"""Checkpoints are found, and broken ones named, without torch and before anything starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.checkpoint import DEMO, CheckpointError, check_files, resolve


def safetensors(file: Path, names: list[str], size: int = 16) -> None:
    header = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(size * len(names)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint in one file."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    safetensors(tmp_path / "model.safetensors", ["a", "b"])
    return tmp_path


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same in two shards with an index."""
    (folder / "model.safetensors").unlink()
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name, shard in shards.items():
        safetensors(folder / shard, [name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return folder


def refusal(folder: Path, need_tokenizer: bool = True) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_files(folder, need_tokenizer)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_a_whole_checkpoint_passes_in_one_file(folder: Path) -> None:
    check_files(folder, need_tokenizer=True)


def test_a_whole_checkpoint_passes_in_shards(sharded: Path) -> None:
    check_files(sharded, need_tokenizer=True)


def test_a_draft_needs_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    check_files(folder, need_tokenizer=False)
    assert "tokenizer.json" in refusal(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert f"{len(whole) - 1} bytes where its header asks for {len(whole)}" in refusal(folder)
    file.write_bytes(whole[:40])
    assert "header is cut off" in refusal(folder)
    file.write_bytes(b"")
    assert "header is cut off" in refusal(folder)


def test_a_header_that_does_not_parse_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"{{{{")
    assert "header cannot be read" in refusal(folder)


def test_a_git_lfs_pointer_is_told_apart_from_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refusal(folder)


def test_missing_shards_are_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(sharded)


def test_a_tensor_that_is_not_in_its_shard_is_named(sharded: Path) -> None:
    safetensors(sharded / "model-00002-of-00002.safetensors", ["c"])
    assert "no tensor b" in refusal(sharded)


def test_pickled_weights_alone_are_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "only safetensors" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "why"), [(None, "missing"), ("{", "JSON"), ("[]", "object"), ("{}", "`architectures`")]
)
def test_a_config_that_is_none_is_named(folder: Path, text: str | None, why: str) -> None:
    if text is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text(text)
    assert why in refusal(folder)


def test_demo_means_the_shipped_pair() -> None:
    assert resolve("demo", "target") == DEMO / "target"
    assert resolve("demo", "draft") == DEMO / "draft"


def test_an_existing_folder_is_itself(folder: Path) -> None:
    assert resolve(str(folder), "target") == folder


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/no-such-folder", "a/b/c", "C:\\models"])
def test_a_path_that_is_not_there_says_what_was_looked_for(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder") as caught:
        resolve(name, "draft")
    assert "draft" in str(caught.value) and name in str(caught.value)


def test_a_file_is_not_a_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(str(folder / "config.json"), "target")


NO_NETWORK = """
import socket
def refuse(*_, **__):
    raise SystemExit("a network call was made")
socket.socket.connect = socket.getaddrinfo = refuse
from app.checkpoint import CheckpointError, resolve
try:
    print(resolve("some-org/some-model", "target"))
except CheckpointError as error:
    print(error)
"""


def run_offline(cache: Path) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", NO_NETWORK], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_offline_makes_no_network_call_and_says_what_is_missing(tmp_path: Path) -> None:
    told = run_offline(tmp_path)
    assert "HF_HUB_OFFLINE" in told and "some-org/some-model" in told and str(tmp_path) in told


def test_offline_serves_what_the_cache_holds(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--some-org--some-model"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    assert run_offline(tmp_path) == str(snapshot)


def test_an_endpoint_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    code = NO_NETWORK.replace('raise SystemExit("a network call was made")', 'raise OSError("no route")')
    environment = {**os.environ, "HF_ENDPOINT": "http://hub.invalid", "HF_HOME": str(tmp_path)}
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "http://hub.invalid" in done.stdout
