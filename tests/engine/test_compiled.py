"""`--compile`: what is compiled says what operators one by one say, is kept, and is refused where it cannot be."""

import shutil

import pytest
import torch

from app.engine.build import build_engine
from app.engine.config import EngineConfig
from app.engine.core import EngineCore
from app.engine.errors import UnsupportedError
from app.engine.sequence import Request
from tests.engine.pairs import make_pair

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here to compile with")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"), num_layers=3, draft_layers=1, taps=(0, 1))


@pytest.fixture(scope="module", autouse=True)
def kept(tmp_path_factory):
    """The folder that what is compiled is kept in."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield cache / "dflash-server" / "compiled"


def engine(pair, **settings) -> EngineCore:
    wishes = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "kv_cache_memory": 8 << 20} | settings
    return build_engine(EngineConfig(pair.target, pair.draft, **wishes)).core


def requests(count: int = 6) -> list[Request]:
    """Prompts of several lengths, some drawn, some plain."""
    return [
        Request(
            f"{index}",
            tuple(range(3 + index, 8 + 4 * index)),
            max_tokens=30,
            temperature=[0.0, 0.8][index % 2],
            seed=index,
            speculate=index != 3,
        )
        for index in range(count)
    ]


def counting(core: EngineCore) -> dict[str, int]:
    """How many forwards of the target come, and how many of them are left to operators one by one."""
    counted = {"all": 0, "eager": 0}
    forward, eager = core.runner.stages.forward, core.runner.stages.forward._eager

    def count(name, function):
        def call(*arguments):
            counted[name] += 1
            return function(*arguments)

        return call

    forward._eager = count("eager", eager)
    core.runner.stages.forward = count("all", forward)
    return counted


@pytest.mark.parametrize("settings", [{}, {"verify": 3}, {"max_num_batched_tokens": 70}], ids=str)
def test_texts_are_those_of_operators_one_by_one(pair, settings):
    """Alone and together, with prompts cut, at widths of a block and less; and what is compiled is what ran."""
    core = engine(pair, compile=True, **settings)
    counted = counting(core)
    assert core.run(requests()) == engine(pair, **settings).run(requests())
    for request in requests(2):
        assert core.run([request]) == engine(pair, **settings).run([request])
    assert counted["all"] > 20 and counted["eager"] < counted["all"] / 2


def test_a_target_alone_is_compiled_by_itself(pair, kept):
    """It hands out no features, and nothing else tells the two apart."""
    engine(pair, compile=True)
    before = set(kept.iterdir())
    config = EngineConfig(pair.target, device="cpu", dtype="float32", compile=True, kv_cache_memory=8 << 20)
    assert build_engine(config).core.run(requests(3)) == engine(pair).run(requests(3))
    (more,) = set(kept.iterdir()) - before
    assert more.name.startswith("target-")


def test_what_is_compiled_is_kept_whatever_the_memory(pair, kept, monkeypatch):
    engine(pair, compile=True)
    before = sorted(kept.iterdir())
    monkeypatch.setattr("torch.export.export", None)
    engine(pair, compile=True, kv_cache_memory=4 << 20, max_num_seqs=2)
    assert sorted(kept.iterdir()) == before and kept.stat().st_mode & 0o777 == 0o700


def test_other_code_is_compiled_anew(pair, monkeypatch):
    engine(pair, compile=True)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "another")
    monkeypatch.setattr("torch.export.export", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine(pair, compile=True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"dtype": "bfloat16"}, "bfloat16 is not supported yet"), ({"device": "npu"}, "captures graphs instead")],
)
def test_what_cannot_be_compiled_is_refused_by_name(pair, settings, said):
    with pytest.raises(UnsupportedError, match=f"--compile: .*{said}"):
        engine(pair, compile=True, **settings)


def test_without_a_compiler_it_is_refused(pair, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnsupportedError, match="--compile: there is no g\\+\\+"):
        engine(pair, compile=True)


def test_a_folder_that_cannot_be_made_is_no_reason_to_give_up(pair, monkeypatch, tmp_path):
    from app.engine import compiled

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = compiled._kept_in()
    assert folder.is_dir() and folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
