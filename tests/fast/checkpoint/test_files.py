"""Checkpoints are found, and broken files named, without torch and before anything starts."""

import json
import os
import re
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from app.engine.checkpoint import files
from app.engine.checkpoint.files import DEMO, Checkpoint, find_file_of, find_folder, read_json, token_id
from app.engine.checkpoint.read import find_models
from app.engine.errors import UnsupportedError
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
    """Whole weights in one file."""
    safetensors(tmp_path / "model.safetensors", ["a", "model.b"])
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Whole weights in two shards with an index."""
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name, shard in shards.items():
        safetensors(tmp_path / shard, [name])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return tmp_path


def refusal(folder: Path) -> str:
    with pytest.raises(UnsupportedError) as caught:
        len(Checkpoint(folder).tensors)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_whole_weights_are_read_by_name_in_one_file_and_in_shards(tmp_path: Path, sharded: Path) -> None:
    shard = "model-00002-of-00002.safetensors"
    assert Checkpoint(sharded).tensors["b"] == (sharded / shard, "b", [16], "U8")
    safetensors(tmp_path / "model.safetensors", ["a", "model.b"])
    one = Checkpoint(tmp_path).tensors
    assert one["b"] == (tmp_path / "model.safetensors", "model.b", [16], "U8") and list(one) == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (lambda whole: whole[:-1], "cut off or damaged"),
        (lambda whole: whole[:40], "cut off or damaged (40 bytes"),
        (lambda whole: whole + b"0", "cut off or damaged"),
        (lambda whole: b"", "cut off or damaged (0 bytes"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        *((lambda whole, n=n: n.to_bytes(8, "little") + b"{}", "damaged") for n in (10**6, 100_000_001, 2**64 - 1)),
        *(
            (lambda whole, header=header: len(header).to_bytes(8, "little") + header, "damaged")
            for header in (b"{{{{", b"[" * 100_000, b"null", b"[1]", b'{"a": 3}', b"\xff\xfe", b'{"a": {}}', b"")
        ),
    ],
)
def test_a_file_that_is_not_whole_is_named(folder: Path, content: Any, why: str) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(content(file.read_bytes()))
    found = refusal(folder)
    assert str(file) in found and why in found


def test_missing_shards_and_tensors_that_are_not_in_theirs_are_named(sharded: Path) -> None:
    safetensors(sharded / "model-00002-of-00002.safetensors", ["c"])
    assert "no tensor b" in refusal(sharded)
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(sharded)


@pytest.mark.parametrize(
    "names",
    [
        ("a-00001-of-00002", "a-00002-of-00002"),
        ("weights", "more"),
        ("quant_model_weight-1-of-2", "quant_model_weight-2-of-2"),
    ],
)
def test_files_without_an_index_are_read_whatever_their_names(tmp_path: Path, names: tuple[str, str]) -> None:
    for name, tensors in zip(names, (["a", "model.b"], ["c"]), strict=True):
        safetensors(tmp_path / f"{name}.safetensors", tensors)
    stored = Checkpoint(tmp_path).tensors
    assert sorted(stored) == ["a", "b", "c"]
    assert stored["b"] == (tmp_path / f"{names[0]}.safetensors", "model.b", [16], "U8")
    assert find_file_of("c", str(tmp_path)) == tmp_path, "whose files are all read"


def test_files_without_an_index_that_have_the_same_tensor_or_lack_a_shard_are_named(tmp_path: Path) -> None:
    safetensors(tmp_path / "one.safetensors", ["a", "b"])
    safetensors(tmp_path / "two.safetensors", ["c", "b"])
    assert "one.safetensors and two.safetensors both have b" in refusal(tmp_path)
    safetensors(tmp_path / "two.safetensors", ["c", "model.b"])
    assert "two tensors are called b after their prefixes, in one.safetensors and two.safetensors" in refusal(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    for number in (1, 3):
        safetensors(tmp_path / f"x-0000{number}-of-00003.safetensors", [f"x{number}"])
    assert "2 of 3 shards x-...-of-00003 are here" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["consolidated", "consolidated-00001-of-00002", "adapter_model", "._x-00001-of-00001"])
def test_what_is_no_shard_is_not_read_beside_shards_without_an_index(tmp_path: Path, name: str) -> None:
    safetensors(tmp_path / f"{name}.safetensors", ["a", "b"])
    assert "no weights" in refusal(tmp_path)
    safetensors(tmp_path / "x-00001-of-00001.safetensors", ["a"])
    assert {stored.file.name for stored in Checkpoint(tmp_path).tensors.values()} == {"x-00001-of-00001.safetensors"}


def test_a_shard_that_is_no_file_is_refused_and_never_opened(tmp_path: Path) -> None:
    shard = tmp_path / "x.safetensors"
    for make in (shard.mkdir, partial(os.mkfifo, shard), partial(shard.symlink_to, tmp_path / "gone")):
        make()
        assert f"{shard} is no file" in refusal(tmp_path)
        shard.rmdir() if shard.is_dir() else shard.unlink()


def test_pickled_weights_are_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "only safetensors" in refusal(folder)


ASTRAY = [
    "../secret.safetensors",
    "/etc/passwd",
    "sub/model.safetensors",
    "..",
    ".",
    "",
    "a" * 5_000,
    "a\0b",
    "*",
    "a\nb",
]


@pytest.mark.parametrize("shard", [*ASTRAY, "\ud800"], ids=lambda shard: ascii(shard)[:20])
def test_an_index_that_leads_out_of_its_folder_is_refused(sharded: Path, shard: str) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": shard}}))
    assert "is not the name of a file in its folder" in refusal(sharded)


@pytest.mark.parametrize("name", ASTRAY, ids=lambda name: ascii(name)[:20])
def test_no_file_of_a_target_is_fetched_by_a_name_that_is_none(sharded: Path, name: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(UnsupportedError, match="is not the name of a file in its folder") as caught:
        find_file_of("lm_head.weight", str(sharded))
    assert len(str(caught.value)) < 600


def test_the_file_of_a_tensor_is_found_by_the_index(sharded: Path) -> None:
    assert find_file_of("b", str(sharded)) == sharded / "model-00002-of-00002.safetensors"


def test_a_shard_whose_name_the_disk_cannot_hold_is_missing(sharded: Path) -> None:
    shards = [f"{i}{'é' * 190}" for i in range(100)]
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: name for name in shards}}))
    assert "100 of 100 shards" in (found := refusal(sharded)) and len(found) < 6000


@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "loop"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"])
def test_what_is_no_file_is_named_and_never_waited_for(sharded: Path, kind: str, name: str) -> None:
    file = sharded / name
    file.unlink(missing_ok=True)
    match kind:
        case "folder":
            file.mkdir()
        case "fifo":
            os.mkfifo(file)
        case "device":
            file.symlink_to("/dev/zero")
        case "loop":
            file.symlink_to(file)
    with pytest.raises(UnsupportedError, match=re.escape(str(sharded))):
        read_json(file) if name.endswith(".json") else len(Checkpoint(sharded).tensors)
    with pytest.raises(UnsupportedError):
        len(Checkpoint(sharded).tensors) if name != "config.json" else Checkpoint(sharded).config


def test_a_json_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as opened:
        opened.truncate(1 << 40)
    with pytest.raises(UnsupportedError, match="has 1048576 MiB, and at most 256 are read"):
        read_json(file)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "", '{"weight_map"'])
def test_an_index_that_is_none_is_named(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(sharded)


def test_links_are_followed_as_in_the_hubs_cache_and_named_where_they_lead_nowhere(folder: Path) -> None:
    file, blob = folder / "model.safetensors", folder.parent / f"{folder.name} blob"
    file.rename(blob)
    file.symlink_to(blob)
    assert len(Checkpoint(folder).tensors) == 2
    blob.unlink()
    assert "model.safetensors is a link to a file that is not there" in refusal(folder)
    file.unlink()
    file.symlink_to(file)
    assert "model.safetensors" in refusal(folder)


def test_a_file_that_may_not_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "safe_open", refuse)
    assert "model.safetensors cannot be read: Permission denied" in refusal(folder)


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
            tensors = Checkpoint(folder).tensors
        except UnsupportedError as error:
            assert str(file) in str(error) or "quantised" in str(error)
        else:
            with safe_open(file, "numpy") as opened:
                for tensor in tensors.values():
                    assert list(opened.get_tensor(tensor.name).shape) == tensor.shape


@pytest.mark.parametrize(("text", "why"), [(None, "missing"), ("{", "JSON"), ("[" * 100_000, "JSON"), ("[]", "object")])
def test_a_config_that_is_none_is_named(tmp_path: Path, text: str | None, why: str) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UnsupportedError, match=f"{file}.* .*{why}"):
        read_json(file)


def test_a_token_is_found_by_its_text_in_the_first_folder_that_has_it(tmp_path: Path) -> None:
    own, old, other = (tmp_path / name for name in ("own", "old", "other"))
    for folder in (own, old, other):
        folder.mkdir()
    added = {"added_tokens": [{"content": "<|mask|>", "id": 7}], "model": {"vocab": {"a": 1}}}
    (own / "tokenizer.json").write_text(json.dumps(added))
    (old / "added_tokens.json").write_text('{"<mask>": 5}')
    (other / "tokenizer.json").write_text('{"model": {"vocab": [["a", 0.5]]}}')
    folders = (other, tmp_path, old, own)
    assert [token_id(text, folders) for text in ("<|mask|>", "a", "<mask>", "b")] == [7, 1, 5, None]


@pytest.mark.parametrize("model", [None, [], "a", {"vocab": 5}, {"vocab": {"a": "1"}}, {"vocab": {"a": None}}])
@pytest.mark.parametrize(
    "added", [None, 5, {}, [None], [{}], [{"content": ["a"], "id": 1}], [{"content": "a", "id": []}]]
)
def test_a_tokenizer_that_is_none_has_no_token(tmp_path: Path, model: Any, added: Any) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    assert token_id("a", [tmp_path]) is None


# Folders


def test_demo_means_the_shipped_pair_and_a_folder_itself(tmp_path: Path) -> None:
    assert [find_folder("demo", role) for role in ("target", "draft")] == [DEMO / "target", DEMO / "draft"]
    assert find_folder(str(tmp_path), "target") == tmp_path


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/no-such-folder", "a/b/c", "C:\\models"])
def test_a_path_that_is_not_there_says_what_was_looked_for(name: str) -> None:
    with pytest.raises(UnsupportedError, match="no such folder") as caught:
        find_folder(name, "draft")
    assert "draft" in str(caught.value) and name in str(caught.value)


def test_a_file_is_not_a_folder(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="is a file"):
        find_folder(str(folder / "model.safetensors"), "target")


NO_NETWORK = """
import socket, sys
def refuse(*_, **__):
    if sys.argv[2:]:
        raise OSError("no route")
    raise SystemExit("a network call was made")
socket.socket.connect = socket.getaddrinfo = refuse
from app.engine.checkpoint.files import UnsupportedError, find_folder
try:
    name, _, revision = sys.argv[1].partition("@")
    print(find_folder(name, "target", revision=revision or None))
except UnsupportedError as error:
    print(error)
"""


def run_without_network(cache: Path, name: str = "some-org/some-model", *, offline: bool = True) -> str:
    environment = os.environ | {"HF_HOME": str(cache)}
    environment.pop("HF_HUB_OFFLINE", None)
    environment |= {"HF_HUB_OFFLINE": "1"} if offline else {"HF_ENDPOINT": "http://hub.invalid"}
    command = [sys.executable, "-c", NO_NETWORK, name, *([] if offline else ["online"])]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_offline_makes_no_network_call_and_serves_what_the_cache_holds(tmp_path: Path) -> None:
    told = run_without_network(tmp_path)
    assert "HF_HUB_OFFLINE" in told and "some-org/some-model" in told and str(tmp_path) in told
    repo = tmp_path / "hub" / "models--some-org--some-model"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    assert run_without_network(tmp_path) == str(snapshot)
    (repo / "refs" / "v2").write_text("1" * 40)
    other = repo / "snapshots" / ("1" * 40)
    other.mkdir()
    assert run_without_network(tmp_path, "some-org/some-model@v2") == str(other)
    assert "HF_HUB_OFFLINE" in run_without_network(tmp_path, "some-org/some-model@v3")


@pytest.mark.parametrize("name", ["demo", "."])
def test_a_folder_has_no_revision(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"only a Hugging Face id has a revision \(here v2\); leave it out"):
        find_folder(name, "target", revision="v2")


def test_models_are_found_by_their_own_revisions_and_a_tokenizer_without_weights(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, revision: SimpleNamespace(siblings=None))
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda name, revision, allow_patterns: (
            asked.append((name, revision, "tokenizer*" in allow_patterns, "model*.safetensors" in allow_patterns))
            or name
        ),
    )
    found = find_models("o/t", "o/d", speculation=True, revision="a", draft_revision="b", tokenizer="o/text")
    assert found == (Path("o/t"), Path("o/d"), Path("o/text"))
    assert asked == [("o/t", "a", True, True), ("o/text", None, True, False), ("o/d", "b", True, True)]


@pytest.mark.parametrize(
    "meant", fast_ones(["z-lab/Qwen3-8B-DFlash-b16", "Qwen/Qwen3-8B", "Qwen/qwen3-0.6B"], ("Qwen/qwen3-0.6B",))
)
def test_an_id_without_its_owner_gets_one(tmp_path: Path, meant: str) -> None:
    assert f"did you mean {meant}?" in run_without_network(tmp_path, meant.partition("/")[2])
    assert "did you mean" not in run_without_network(tmp_path, meant)


def test_a_hub_that_cannot_be_reached_is_named_in_our_words(tmp_path: Path) -> None:
    told = run_without_network(tmp_path, offline=False)
    assert "http://hub.invalid" in told and "snapshot folder" not in told and "\n" not in told


def test_a_broken_checkpoint_ends_the_server_before_it_binds_and_without_a_traceback(tmp_path: Path) -> None:
    for file in (DEMO / "target").iterdir():
        (tmp_path / file.name).write_bytes(b"" if file.suffix == ".safetensors" else file.read_bytes())
    with socket.socket() as taken:  # binding would fail by name
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            [sys.executable, "-m", "app", "serve", str(tmp_path), "--device", "cpu", "--port", port],
            capture_output=True,
            text=True,
            timeout=1700,
        )
    assert ended.returncode not in (0, None)
    assert str(tmp_path / "model.safetensors") in ended.stderr and "Traceback" not in ended.stderr
    assert port not in ended.stderr
