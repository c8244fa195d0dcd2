"""Kernels that a report compiled are packed beside it, and the next one takes them up."""

import json
import os
import shutil
from pathlib import Path

import pytest

from app.config.error import ConfigError
from tools.report import triton_cache
from tools.report.triton_cache import NAME, VARIABLE, own_cache


def compiled(name: str) -> None:
    """Leave a kernel like Triton in the cache that child processes have."""
    folder = Path(os.environ[VARIABLE]) / name
    folder.mkdir(parents=True)
    (folder / "k.cubin").write_bytes(b"code")
    (folder / "__grp__k.json").write_text(json.dumps({"child_paths": {"k.cubin": str(folder / "k.cubin")}}))


def test_kernels_are_packed_behind_each_section_and_the_next_report_has_them(tmp_path: Path) -> None:
    out, other, before = tmp_path / "out", tmp_path / "other", os.environ.get(VARIABLE)
    out.mkdir()
    other.mkdir()
    with own_cache(out, None) as told:
        assert told() == {"kernels": "0 compiled"} and not (out / NAME).exists()
        compiled("one")
        assert told() == {"kernels": "1 compiled"}
        after_one = (out / NAME).read_bytes()
        assert told() == {"kernels": "1 compiled"} and (out / NAME).read_bytes() == after_one, "nothing new"
        compiled("two")
        assert told() == {"kernels": "2 compiled"} and (out / NAME).read_bytes() != after_one
    assert os.environ.get(VARIABLE) == before
    with own_cache(out, None) as told:
        assert told() == {"kernels": f"0 compiled, 2 taken from {out / NAME}"}, "the same folder"
    shutil.move(out, tmp_path / "elsewhere")
    with own_cache(other, str(tmp_path / "elsewhere" / NAME)) as told:
        cache = Path(os.environ[VARIABLE])
        for name in ("one", "two"):
            (path,) = json.loads((cache / name / "__grp__k.json").read_text())["child_paths"].values()
            assert Path(path).is_relative_to(cache) and Path(path).read_bytes() == b"code", "paths are of this folder"
        assert told()["kernels"].startswith("0 compiled, 2 taken from") and (other / NAME).exists()
    assert not cache.exists()


def test_a_cache_of_the_users_own_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    with own_cache(tmp_path, None) as told:
        assert os.environ[VARIABLE] != str(tmp_path / "mine") and told() == {"kernels": "0 compiled"}
    assert os.environ[VARIABLE] == str(tmp_path / "mine") and not (tmp_path / "mine").exists()


def test_a_named_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"given\.tar\.gz: No such file"), own_cache(tmp_path, "given.tar.gz"):
        pass


def test_files_outside_of_the_cache_are_not_written(tmp_path: Path) -> None:
    file, inside = tmp_path / NAME, tmp_path / "inside"
    inside.mkdir()
    with triton_cache.tarfile.open(file, "w:gz", pax_headers={triton_cache.MAKER: triton_cache.maker()}) as packed:
        (tmp_path / "evil").write_text("evil")
        packed.add(tmp_path / "evil", arcname="../outside")
    with pytest.raises(ConfigError, match="outside"):
        triton_cache.unpack(file, inside)
    assert not (tmp_path / "outside").exists()
