"""Checkpoints are found, and broken ones named, without torch and before anything starts."""

import json
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from app.config.checkpoint import DEMO, CheckpointError, check_files, check_length, resolve, tensor_files
from tests.costs import fast_ones


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
    """A whole checkpoint in two shards with an index."""
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


DRAFTS = [
    '{"model_type": "qwen3", "dflash_config": {}}',
    '{"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "transformer_layer_config": {}}',
]


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_needs_no_tokenizer(folder: Path, draft: str) -> None:
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(folder)
    (folder / "config.json").write_text(draft)
    check_files(folder, need_tokenizer=False)


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_given_as_the_model_is_told_apart(folder: Path, draft: str) -> None:
    (folder / "config.json").write_text(draft)
    (folder / "tokenizer.json").unlink()
    told = refusal(folder)
    assert "is a DFlash draft" in told and "--draft-model" in told and "tokenizer" not in told


def test_a_model_given_as_the_draft_is_told_apart(folder: Path) -> None:
    told = refusal(folder, need_tokenizer=False)
    assert "no DFlash draft" in told and "dflash_config" in told


@pytest.mark.parametrize("model_type", ["mixtral", None, 5, ["qwen3"]])
def test_a_family_that_is_not_supported_is_refused_before_anything_is_loaded(folder: Path, model_type: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": ["X"]}))
    told = refusal(folder)
    assert f"model_type {model_type!r} is not supported yet" in told and "'qwen3' (dense Qwen3)" in told


@pytest.mark.parametrize("length", [1, 1025, 99999])
def test_a_length_that_the_model_does_not_have_is_refused_by_its_config(folder: Path, length: int) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 1024}')
    with pytest.raises(CheckpointError) as caught:
        check_length(folder, length)
    told = str(caught.value)
    assert f"--max-model-len {length}" in told and "2..1024" in told
    assert "max_position_embeddings" in told and "rope_scaling" in told


@pytest.mark.parametrize(
    ("rope", "passes"),
    [({"rope_type": "default", "rope_theta": 1e6}, False), ({"rope_type": "yarn", "factor": 4.0}, True)],
)
def test_a_longer_length_is_left_to_the_engine_if_rope_is_scaled(
    folder: Path, rope: dict[str, Any], passes: bool
) -> None:
    """Transformers 5 writes rope_parameters into every config.json."""
    config = {"model_type": "qwen3", "max_position_embeddings": 1024, "rope_parameters": rope}
    (folder / "config.json").write_text(json.dumps(config))
    with nullcontext() if passes else pytest.raises(CheckpointError, match="--max-model-len"):
        check_length(folder, 4096)


@pytest.mark.parametrize("length", [None, 2, 1024])
def test_a_length_that_the_model_has_passes(folder: Path, length: int | None) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 1024}')
    check_length(folder, length)


@pytest.mark.parametrize(
    "meant", fast_ones(["z-lab/Qwen3-8B-DFlash-b16", "Qwen/Qwen3-8B", "Qwen/qwen3-0.6B"], ("Qwen/qwen3-0.6B",))
)
def test_an_id_without_its_owner_gets_one(tmp_path: Path, meant: str) -> None:
    name = meant.partition("/")[2]
    told = run_offline(tmp_path, name)
    assert f"did you mean {meant}?" in told
    assert "did you mean" not in run_offline(tmp_path, meant)


def test_a_hub_out_of_reach_is_told_in_our_words(tmp_path: Path) -> None:
    code = NO_NETWORK.replace('raise SystemExit("a network call was made")', 'raise OSError("no route")')
    environment = {**os.environ, "HF_ENDPOINT": "http://hub.invalid", "HF_HOME": str(tmp_path)}
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "snapshot folder" not in done.stdout and done.stdout.count("\n") == 1


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
from app.config.checkpoint import CheckpointError, resolve
try:
    print(resolve("some-org/some-model", "target"))
except CheckpointError as error:
    print(error)
"""


def run_offline(cache: Path, name: str = "some-org/some-model") -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", NO_NETWORK.replace("some-org/some-model", name)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
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


# Broken in any way


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put(file: Path, header: object, data: bytes, length: int | None = None) -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(encoded) if length is None else length).to_bytes(8, "little") + encoded + data)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("dtype", "F33", "'b' has dtype 'F33'"),
        ("dtype", None, "'b' has dtype None"),
        ("dtype", ["F32"], "'b' has dtype ['F32']"),
        ("dtype", "F16", "'b' of F16 [16] lies on 16 bytes"),
        ("shape", [15], "lies on 16 bytes"),
        ("shape", [-4, -4], "shape [-4, -4]"),
        ("shape", [True] * 3, "shape [True"),
        ("shape", 16, "shape 16"),
        ("data_offsets", [-16, 0], "data_offsets [-16, 0]"),
        ("data_offsets", [32, 16], "data_offsets [32, 16]"),
        ("data_offsets", [8, 24], "'b' begins at byte 8 of the data, not at 16"),
        ("data_offsets", [0, 16], "begins at byte 0 of the data, not at 16"),
        ("data_offsets", [20, 36], "begins at byte 20"),
        ("data_offsets", [16], "data_offsets [16]"),
        ("data_offsets", [16.0, 32.0], "data_offsets [16.0"),
        ("data_offsets", [10**30, 10**30 + 16], "begins at byte 1000"),
    ],
)
def test_a_tensor_in_the_wrong_place_is_named(folder: Path, field: str, value: object, why: str) -> None:
    header, data = header_of(folder / "model.safetensors")
    header["b"][field] = value
    put(folder / "model.safetensors", header, data)
    assert why in refusal(folder) and "model.safetensors" in refusal(folder)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 10**6])
def test_a_header_that_claims_to_be_huge_is_not_read(folder: Path, length: int) -> None:
    put(folder / "model.safetensors", {}, b"", length)
    assert "header is cut off" in refusal(folder)


@pytest.mark.parametrize("header", [b"[" * 100_000, b"null", b"[1]", b'{"a": 3}', b"\xff\xfe", b'{"a": {}}', b""])
def test_a_header_that_is_something_else_is_named(folder: Path, header: bytes) -> None:
    put(folder / "model.safetensors", header, b"")
    assert "model.safetensors: " in refusal(folder)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_an_index_that_leads_out_of_its_folder_is_refused(sharded: Path, shard: str) -> None:
    elsewhere = sharded.parent / "secret.safetensors"
    safetensors(elsewhere, ["b"])
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": shard}}))
    assert "is not the name of a file beside it" in refusal(sharded)
    elsewhere.unlink()


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "", '{"weight_map"'])
def test_an_index_that_is_none_is_named(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(sharded)


def test_links_are_followed_as_in_the_hubs_cache_and_named_where_they_lead_nowhere(folder: Path) -> None:
    file, blob = folder / "model.safetensors", folder.parent / f"{folder.name} blob"
    file.rename(blob)
    file.symlink_to(blob)
    check_files(folder, need_tokenizer=True)
    blob.unlink()
    assert "model.safetensors is a link to a file that is not there" in refusal(folder)
    file.unlink()
    file.symlink_to(file)
    assert "model.safetensors" in refusal(folder)


def test_a_file_that_may_not_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: Permission denied"):
        tensor_files(folder)


@settings(max_examples=300)
@given(data=st.data())
def test_whatever_is_broken_in_a_file_is_refused_by_its_name_or_loads(data: st.DataObject) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "model.safetensors"
        safetensors(file, ["a", "b", "c"], size=8)
        content = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            match data.draw(st.sampled_from(("cut", "flip", "grow", "digit", "length"))):
                case "cut":
                    del content[data.draw(st.integers(0, len(content))) :]
                case "flip" if content:
                    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
                case "grow":
                    content += data.draw(st.binary(max_size=20))
                case "digit":
                    digits = [place for place, byte in enumerate(content) if chr(byte).isdigit()]
                    if digits:
                        content[data.draw(st.sampled_from(digits))] = ord(data.draw(st.sampled_from("0123456789-.e")))
                case "length":
                    content[:8] = data.draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
        file.write_bytes(content)
        try:
            names = tensor_files(folder)
        except CheckpointError as error:
            assert str(file) in str(error)
        else:
            with safe_open(file, "numpy") as opened:
                assert set(opened.keys()) == set(names)
                for tensor in names:
                    opened.get_tensor(tensor)


def test_a_broken_checkpoint_ends_the_server_before_it_binds_and_without_a_traceback(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    with socket.socket() as taken:  # binding would fail by name
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            [sys.executable, "-m", "app", "serve", str(folder), "--device", "cpu", "--port", port],
            capture_output=True,
            text=True,
            timeout=1700,
        )
    assert ended.returncode not in (0, None)
    assert str(folder / "model.safetensors") in ended.stderr and "Traceback" not in ended.stderr
    assert port not in ended.stderr
