"""A GGUF file is named as llama.cpp and vLLM name it, and becomes a folder that is made once and kept safely."""

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine import cache_folder
from app.engine.checkpoint import gguf_folder as module
from app.engine.checkpoint.files import Checkpoint, find_folder
from app.engine.checkpoint.gguf import GGUF_FILE
from app.engine.checkpoint.gguf_folder import choose, gguf_folder, notes_of
from app.engine.checkpoint.read import find_models
from app.engine.errors import UnsupportedError
from tests.golden.llama_tokens import metadata_of, write_model

FILES = [
    "README.md",
    "Model-Q4_K_M.gguf",
    "Model-Q8_0.gguf",
    "Model-UD-Q4_K_XL.gguf",
    "BF16/Model-BF16-00001-of-00002.gguf",
    "BF16/Model-BF16-00002-of-00002.gguf",
    "mmproj-Model-f16.gguf",
    "Model-imatrix.gguf",
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dflash-server" / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return write_model(folder / "Tiny-Q8_0.gguf", metadata_of("qwen2") | {"general.name": "Tiny"})


# Which file


@pytest.mark.parametrize(
    "wanted, file",
    [
        ("Q4_K_M", "Model-Q4_K_M.gguf"),
        ("q4_k_m", "Model-Q4_K_M.gguf"),
        ("UD-Q4_K_XL", "Model-UD-Q4_K_XL.gguf"),
        ("model-q8_0.gguf", "Model-Q8_0.gguf"),
    ],
)
def test_a_file_is_named_by_its_quantisation_or_its_name(wanted: str, file: str) -> None:
    assert choose(FILES, wanted, "o/m") == file


@pytest.mark.parametrize("name", ["a.Q4_0.gguf", "a-q4_0.gguf", "a_Q4_0.GGUF", "Q4_0.gguf", "deep/down/a-Q4_0.gguf"])
def test_a_quantisation_is_the_last_part_of_a_name(name: str) -> None:
    assert choose([name, "b-Q4_1.gguf", "Q4_0-b.gguf"], "Q4_0", "o/m") == name


def test_a_lone_file_needs_no_suffix_and_no_picture_part_counts() -> None:
    assert choose(["a.gguf", "mmproj-a.gguf", "imatrix.gguf", "a.txt"], "", "o/m") == "a.gguf"


@pytest.mark.parametrize(
    "names, wanted, told",
    [
        (FILES, "", "o/m has 5 GGUF files; give one as o/m:.*; there are BF16, Q4_K_M, Q8_0, UD-Q4_K_XL"),
        (FILES, "Q5_K_M", "o/m has no GGUF file Q5_K_M; it has BF16, Q4_K_M, Q8_0, UD-Q4_K_XL"),
        (FILES, "Q4", "no GGUF file Q4; it has"),
        (FILES, "b.gguf", "no GGUF file b.gguf; it has"),
        (FILES, "BF16", "00001-of-00002.gguf is one of 2 parts; .*`llama-gguf-split --merge FIRST-PART MERGED.gguf`"),
        (FILES, FILES[4], "is one of 2 parts; download them all, merge"),
        (FILES[4:6], "", "is one of 2 parts; .*--merge"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", "Q4_0 is the quantisation of 2 files; .*: a-Q4_0.gguf, b-Q4_0.gguf"),
        (["mmproj-a.gguf"], "", "has no GGUF file of a model"),
        (["a.txt"], "Q4_0", "no GGUF file Q4_0; it has none"),
    ],
)
def test_what_is_not_one_file_is_refused_with_those_that_are_there(names: list[str], wanted: str, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        choose(names, wanted, "o/m")


# Where


def test_a_file_and_its_folder_become_one_kept_folder(file: Path, cache: Path) -> None:
    found = find_folder(str(file), "target")
    assert found.parent == cache and (found / GGUF_FILE).resolve() == file
    assert find_folder(str(file.parent), "target") == found == find_folder(f"{file.parent}:q8_0", "target")
    assert find_folder(str(found), "target") == found  # what is made is a folder with a GGUF file too
    assert Checkpoint(found).config == json.loads((found / "config.json").read_text())
    assert len(list(cache.iterdir())) == 1


def test_a_file_without_a_suffix_is_known_by_its_first_bytes(file: Path) -> None:
    blob = file.rename(file.parent / "sha256-0123")
    assert (find_folder(str(blob), "target") / GGUF_FILE).resolve() == blob


def test_safetensors_go_before_gguf_unless_one_is_named(file: Path) -> None:
    (file.parent / "config.json").write_text("{}")
    assert find_folder(str(file.parent), "target") != file.parent  # a config.json alone has no weights
    (file.parent / "model.safetensors").touch()
    for name in ("model.gguf", file.name):
        file = file.rename(file.parent / name)
        assert find_folder(str(file.parent), "target") == file.parent and not Checkpoint(file.parent).gguf
    assert find_folder(f"{file.parent}:Q8_0", "target") != file.parent


def test_a_folder_whose_name_has_a_colon_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    assert find_folder(str(tmp_path / "a:b"), "target") == tmp_path / "a:b"


@pytest.mark.parametrize("role, told", [("draft", "drafts are safetensors"), ("tokenizer", "is a tokenizer.json")])
def test_only_a_target_may_be_gguf(file: Path, role: Any, told: str) -> None:
    for name in (file, file.parent, f"{file.parent}:Q8_0"):
        with pytest.raises(UnsupportedError, match=rf"{role} .* is GGUF \(Tiny-Q8_0.gguf\), .*{told}"):
            find_folder(str(name), role)


def test_a_file_has_no_revision(file: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"is here, and only a Hugging Face id has a revision \(here v2\)"):
        find_folder(str(file), "target", revision="v2")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no GGUF at all"])
def test_a_file_that_is_none_is_refused_and_leaves_nothing(file: Path, cache: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(UnsupportedError, match=str(file)):
        find_folder(str(file), "target")
    assert not list(cache.iterdir())


def test_a_missing_file_is_looked_for_where_it_was_named() -> None:
    with pytest.raises(UnsupportedError, match=r"there is no such folder or file \(looked for /nowhere/a.gguf\)"):
        find_folder("/nowhere/a.gguf", "target")


def test_a_missing_file_that_could_be_a_repository_is_called_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UnsupportedError, match=r"there is no file .*/models/a\.gguf, and HF_HUB_OFFLINE is set"):
        find_folder("models/a.gguf", "target")


def test_the_log_names_the_model_by_its_file(file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    find_models(str(file), str(tmp_path), speculation=True)
    find_models(str(file), str(tmp_path), speculation=True)
    lines = capsys.readouterr().err.splitlines()
    said = [
        f"{file}: it is called 'Tiny'; its draft is {tmp_path}",
        f"{file}: it has no sampling defaults, so temperature",
    ]
    assert len(lines) == 4 and all(line.startswith(start) for line, start in zip(lines, said * 2, strict=True))


def test_another_tokenizer_leaves_the_files_own_unread(tmp_path: Path, cache: Path) -> None:
    odd = write_model(tmp_path / "a.gguf", metadata_of("qwen2") | {"tokenizer.ggml.pre": "unheard-of"})
    with pytest.raises(UnsupportedError, match=rf"{odd}: tokenizer.ggml.pre = 'unheard-of' .*--tokenizer FOLDER"):
        find_models(str(odd), None, speculation=True)
    other = tmp_path / "texts"
    other.mkdir()
    found = find_models(str(odd), None, speculation=True, tokenizer=str(other))
    assert not (found.target / "tokenizer.json").exists() and (found.target / "generation_config.json").exists()
    assert find_models(str(odd), None, speculation=True, tokenizer=str(other)) == found


# The hub


@pytest.fixture
def hub(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return a function that puts a repository on a hub of its own, and returns what is then downloaded."""

    def put(names: list[str], *, is_reachable: bool = True) -> list[Any]:
        asked: list[Any] = []

        def model_info(_: object, name: str, revision: str | None) -> Any:
            if not is_reachable:
                raise ConnectionError("no route")
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])

        def snapshot_download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
            asked.append((name, revision, allow_patterns))
            folder = tmp_path / "snapshot"
            for stored in names:
                is_shard = stored.endswith(".safetensors") and any(fnmatch(stored, one) for one in allow_patterns)
                if stored in allow_patterns or is_shard or not is_reachable:
                    (folder / stored).parent.mkdir(parents=True, exist_ok=True)
                    (folder / stored).unlink(missing_ok=True)
                    (folder / stored).symlink_to(file)
            return str(folder)

        monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        return asked

    return put


@pytest.mark.parametrize(
    "name, stored",
    [
        ("o/m:Q8_0", "Model-Q8_0.gguf"),
        ("o/m/Model-Q8_0.gguf", "Model-Q8_0.gguf"),
        ("o/m:UD-Q4_K_XL", "Model-UD-Q4_K_XL.gguf"),
    ],
)
def test_of_a_repository_only_the_file_is_downloaded(
    hub: Callable[..., list[Any]], file: Path, name: str, stored: str
) -> None:
    asked = hub([*FILES, "config.json", "model.safetensors"])
    assert (find_folder(name, "target", revision="v2") / GGUF_FILE).resolve() == file
    assert asked == [("o/m", "v2", [stored])]


def test_a_repository_with_one_file_needs_no_suffix(hub: Callable[..., list[Any]], file: Path) -> None:
    asked = hub(["README.md", "config.json", "sub/Model[1]-Q4_0.gguf", "mmproj.gguf"])
    with pytest.raises(UnsupportedError, match=r"the cache does not hold sub/Model\[1\]-Q4_0.gguf"):
        find_folder("o/m", "target")
    assert asked == [("o/m", None, ["sub/Model[[]1]-Q4_0.gguf"])]


def test_a_repository_with_several_files_is_refused_before_any_is_downloaded(hub: Callable[..., list[Any]]) -> None:
    asked = hub(FILES)
    with pytest.raises(UnsupportedError, match="o/m has 5 GGUF files; give one as o/m:BF16; there are BF16, Q4_K_M"):
        find_folder("o/m", "target")
    with pytest.raises(UnsupportedError, match="drafts are safetensors"):
        find_folder("o/m:Q8_0", "draft")
    assert not asked


def test_a_repository_of_safetensors_is_downloaded_as_before(hub: Callable[..., list[Any]]) -> None:
    asked = hub(["config.json", "model.safetensors", "Model-Q4_0.gguf"])
    find_folder("o/m", "target")
    ((_, _, patterns),) = asked
    assert "model*.safetensors" in patterns and not any("gguf" in pattern for pattern in patterns)


def test_of_a_repository_without_weights_of_the_usual_names_all_safetensors_are_downloaded(
    hub: Callable[..., list[Any]],
) -> None:
    asked = hub(["config.json", "weights.safetensors"])
    assert (find_folder("o/m", "target") / "weights.safetensors").exists()
    assert ["*.safetensors" in patterns for _, _, patterns in asked] == [False, True]


def test_without_the_hub_the_cached_file_is_served(hub: Callable[..., list[Any]], file: Path) -> None:
    hub(["Model-Q8_0.gguf"], is_reachable=False)
    for name in ("o/m", "o/m:Q8_0"):
        assert (find_folder(name, "target") / GGUF_FILE).resolve() == file
    with pytest.raises(UnsupportedError, match="o/m has no GGUF file Q4_0; it has Q8_0"):
        find_folder("o/m:Q4_0", "target")


# The kept folder


def test_it_is_private_and_read_again_only_if_the_file_changes(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = gguf_folder(file)
    assert cache.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(module, "read_header", lambda file: pytest.fail("read again"))
    assert gguf_folder(file) == first
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))
    os.utime(file, ns=(0, 0))
    second = gguf_folder(file)
    assert second != first and second.parent == cache


def test_a_folder_that_lost_a_file_is_made_again(file: Path) -> None:
    folder = gguf_folder(file)
    (folder / "tokenizer.json").unlink()
    assert gguf_folder(file) == folder and (folder / "tokenizer.json").is_file()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"notes": 5, "sizes": 5}', "[" * 100_000], ids=range(5))
@pytest.mark.parametrize("damaged", ["tokenizer.json", "config.json", "notes.json"])
def test_a_folder_that_was_damaged_is_made_again(file: Path, damaged: str, content: str) -> None:
    folder = gguf_folder(file)
    written, notes = (folder / damaged).read_bytes(), notes_of(folder)
    (folder / damaged).write_text(content)
    assert notes_of(folder) == ([] if damaged == "notes.json" else notes)
    assert gguf_folder(file) == folder
    assert (folder / damaged).read_bytes() == written and notes_of(folder) == notes


def test_folders_of_files_that_are_gone_are_evicted_unless_they_are_new(file: Path, cache: Path) -> None:
    gone = write_model(file.parent / "gone.gguf", metadata_of("qwen2"))
    old, new = gguf_folder(gone), cache / "work-new"
    gone.unlink()
    new.mkdir()
    gguf_folder(file)
    assert old.exists()
    hours_ago = time.time() - cache_folder.AT_WORK_SECONDS - 60
    os.utime(old, (hours_ago, hours_ago))
    os.utime(gguf_folder(file), (hours_ago, hours_ago))
    kept = gguf_folder(write_model(file.parent / "other.gguf", metadata_of("smollm")))
    assert {path.name for path in cache.iterdir()} == {new.name, kept.name, gguf_folder(file).name}


def test_what_a_user_keeps_beside_the_kept_folders_is_never_removed(file: Path, cache: Path) -> None:
    """A folder of that name looks like a place for models."""
    gguf_folder(file)
    model, folder, abandoned = cache / "mine.gguf", cache / "models", cache / "work-old"
    model.write_bytes(b"GGUF")
    folder.mkdir()
    abandoned.mkdir()
    hours_ago = time.time() - cache_folder.AT_WORK_SECONDS - 60
    for path in (model, folder, abandoned):
        os.utime(path, (hours_ago, hours_ago))
    gguf_folder(write_model(file.parent / "other.gguf", metadata_of("smollm")))
    assert model.exists() and folder.exists() and not abandoned.exists()


def test_a_cache_that_cannot_be_written_is_replaced_for_one_start(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    whole = module._written

    def full(contents: Any, source: Path, parent: Path, name: str) -> Path:
        if parent == cache:
            raise OSError(28, "No space left on device")
        return whole(contents, source, parent, name)

    monkeypatch.setattr(module, "_written", full)
    assert gguf_folder(file).parent.parent == tmp_path
    said = f"{cache} cannot be written (No space left on device), so each start reads {file} anew: set XDG_CACHE_HOME"
    assert said in capsys.readouterr().err
    monkeypatch.setattr(module, "user_folder", lambda name: None)
    monkeypatch.setattr(module, "_written", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(
        UnsupportedError, match=r"no safe folder for caches, and neither can .*No space.*; free some space"
    ):
        gguf_folder(file)


def make(file: Path) -> Path:
    return gguf_folder(file)


def test_servers_that_start_together_make_one_folder(file: Path, cache: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert len(set(pool.map(make, [file] * 8))) == 1
    (folder,) = cache.iterdir()
    assert module._is_whole(folder)
