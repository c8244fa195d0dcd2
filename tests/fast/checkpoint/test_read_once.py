"""Each file of a checkpoint is read once by a process: on a network's file system a start waits for each of them."""

import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from app import cli
from app.api import process
from app.api.server import Server
from app.config.engine import EngineConfig
from app.engine.checkpoint import files
from app.engine.checkpoint.files import DEMO
from app.engine.load import loader
from app.engine.load.engine import build_engine
from tests import UNTIMED
from tests.fast.engine.pairs import make_pair
from tests.fast.engine.quantised import quantise


class Opened(Counter[tuple[str, Path]]):
    """Number of times that each file was opened, by the way: its text, a header, its weights, or the tokenizer."""

    def counting(self, way: str, open_file: Callable[..., Any]) -> Callable[..., Any]:
        def counted(file: Any, *rest: Any, **options: Any) -> Any:
            if isinstance(file, str | Path):
                self[way, Path(file)] += 1
            return open_file(file, *rest, **options)

        return counted

    def of(self, *folders: Path) -> dict[tuple[str, str], int]:
        found = {(way, file): count for (way, file), count in self.items() if file.parent in folders}
        return {(way, str(Path(file.parent.name) / file.name)): count for (way, file), count in found.items()}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    counts = Opened()

    class CountedTokenizer:
        from_file = staticmethod(counts.counting("tokenizer", tokenizers.Tokenizer.from_file))
        from_str = staticmethod(tokenizers.Tokenizer.from_str)

    monkeypatch.setattr(io, "open", counts.counting("text", io.open))
    monkeypatch.setattr(files, "safe_open", counts.counting("header", files.safe_open))
    monkeypatch.setattr(loader, "safe_open", counts.counting("weights", loader.safe_open))
    monkeypatch.setattr(tokenizers, "Tokenizer", CountedTokenizer)
    return counts


def test_the_api_process_reads_each_file_once(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "run", lambda config, target_config: Server(config, target_config) and 7)
    assert cli.main(["serve", "demo", "--port", "0"]) == 7
    folders = DEMO / "target", DEMO / "draft"
    found = opened.of(*folders)
    assert ("text", "target/config.json") in found and ("tokenizer", "target/tokenizer.json") in found
    assert {file for way, file in found if way == "header"} == {
        f"{folder.name}/{file.name}" for folder in folders for file in folder.glob("*.safetensors")
    }
    assert set(found.values()) == {1}, found


def test_a_process_of_the_engine_reads_each_file_once(opened: Opened, tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair", seed=3, shards=2)
    target, _ = quantise(pair.target, tmp_path, "W8A8 static")
    (target / "quant_model_description.json").write_text('{"version": "1.0.0"}')
    opened.clear()
    build_engine(EngineConfig(target, pair.draft, device="cpu", dtype="float32", max_model_len=64, **UNTIMED))
    found = opened.of(target, pair.draft)
    texts = {file for way, file in found if way == "text"}
    assert {"quantised/config.json", "quantised/quant_model_description.json", "draft/config.json"} <= texts
    assert {way for way, _ in found} == {"text", "header", "weights"}
    assert set(found.values()) == {1}, found
