"""The CPU's own product of few rows: right, the same for a row in every batch, and left out where it cannot be made."""

import ctypes
import errno
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from app.engine import cache_folder
from app.engine.cpu import backend as cpu_backend
from app.engine.cpu import library, linear
from app.engine.cpu.backend import CpuBackend
from app.messages import Request
from tests.fast.engine.lossless import LUCKY, make_engine
from tests.fast.engine.pairs import make_pair

torch.set_num_threads(1)
CPU = torch.device("cpu")
SHAPES = [(1, 1), (5, 7), (3, 16), (4, 17), (11, 70), (60, 1024), (64, 1056), (130, 3072), (57, 2085)]
"""[out, in]: with and without outputs that fill no tile, numbers that fill no step, and numbers behind 2 KiB."""
needs_compiler = pytest.mark.skipif(not shutil.which(library.compiler()), reason="there is no g++")


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def multiply_here(dtype: torch.dtype, rows: int = 128) -> linear.Multiply:
    """Return the operator, which computes itself up to so many rows."""
    multiply = linear.operator_for(dtype)
    assert multiply
    linear.set_up(most_rows=rows)
    return multiply


@needs_compiler
@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize(("out", "size"), SHAPES)
def test_a_product_is_right_and_a_row_of_it_has_the_same_bits_in_every_batch_and_on_every_thread(dtype, out, size):
    multiply = multiply_here(dtype)
    x, weight, bias = (
        drawn(70, size, dtype=dtype),
        drawn(out, size, dtype=dtype, seed=1),
        drawn(out, dtype=dtype, seed=2),
    )
    whole = multiply(x, weight, bias)
    expected = x.double() @ weight.double().T + bias.double()
    error = (whole.double() - expected).abs().max() / expected.abs().max()
    assert error < (1e-6 if dtype == torch.float32 else 2**-8)
    for rows in range(1, 34):
        for first in (0, 5, 70 - rows):
            own = x[first : first + rows]
            assert torch.equal(multiply(own, weight, bias), whole[first : first + rows])
    assert torch.equal(multiply(x, weight, None).float(), multiply(x, weight, torch.zeros_like(bias)).float())


@needs_compiler
@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
def test_threads_share_a_product_and_change_no_bit(dtype):
    out, size = 1501, 2085
    multiply = multiply_here(dtype)
    x, weight = drawn(33, size, dtype=dtype), drawn(1, size, dtype=dtype, seed=1).repeat(out, 1)
    weight *= torch.arange(out).remainder(7)[:, None]
    whole = multiply(x, weight, None)
    try:
        for threads in (2, 3):
            linear.set_up(threads=threads)
            for rows in (1, 17, 33, 33, 33):
                assert torch.equal(multiply(x[:rows], weight, None), whole[:rows])
    finally:
        linear.set_up(threads=1)


def error_in_float32(x: torch.Tensor, weight: torch.Tensor) -> float:
    """Return the largest error of `linear.float32` beside a sum in float64, which a sum in bfloat16 has 2^-9 of."""
    found, expected = linear.float32(x, weight), x.double() @ weight.double().T
    assert found.dtype == torch.float32 and found.shape == expected.shape
    return ((found - expected).abs().max() / expected.abs().max()).item()


@needs_compiler
@pytest.mark.parametrize(("out", "size"), SHAPES)
def test_a_product_of_bfloat16_in_float32_is_summed_in_float32_with_the_same_bits_for_a_row_in_every_batch(out, size):
    x, weight = drawn(40, size, dtype=torch.bfloat16), drawn(out, size, dtype=torch.bfloat16, seed=1)
    whole = linear.float32(x, weight)
    assert error_in_float32(x, weight) < 1e-6
    for rows in (1, 3, 33):
        assert torch.equal(linear.float32(x[5 : 5 + rows], weight), whole[5 : 5 + rows])
    multiply = multiply_here(torch.bfloat16)
    assert torch.equal(whole.bfloat16(), multiply(x, weight, None)), "the same sums, rounded last"


@needs_compiler
def test_the_operator_in_float32_refuses_what_it_does_not_compute():
    x = drawn(3, 40, dtype=torch.bfloat16)
    for wrong in (drawn(5, 41, dtype=torch.bfloat16), drawn(5, 40, dtype=torch.float32)):
        with pytest.raises(RuntimeError, match="linear_float32 takes"):
            library.operators(torch.bfloat16).linear_float32(x, wrong)


@pytest.mark.parametrize("missing", [False, True])
def test_other_layouts_and_dtypes_are_summed_in_float32_too_some_rows_of_a_weight_at_a_time(monkeypatch, missing):
    if missing:
        monkeypatch.setattr(linear, "compiled", lambda dtype: None)
    monkeypatch.setattr(linear, "_WIDENED_NUMBERS", 1000)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        x, weight = drawn(4, 96, dtype=dtype), drawn(50, 96, dtype=dtype, seed=1)
        assert error_in_float32(x, weight) < 1e-6
        assert error_in_float32(x.t().contiguous().t(), weight.t().contiguous().t()) < 1e-6


@needs_compiler
@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
def test_more_rows_than_the_limit_and_other_layouts_are_pytorchs(dtype):
    x, weight = drawn(5, 70, dtype=dtype), drawn(11, 70, dtype=dtype, seed=1)
    multiply = multiply_here(dtype, rows=4)
    assert torch.equal(multiply(x, weight, None), F.linear(x, weight))
    assert torch.equal(multiply(x[:4], weight, None), multiply_here(dtype)(x, weight, None)[:4])
    columns = x.t().contiguous().t()
    assert torch.equal(multiply(columns, weight, None), F.linear(columns, weight))
    with pytest.raises(RuntimeError):
        multiply(x, drawn(11, 71, dtype=dtype), None)


@needs_compiler
@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize("place", [3, 39, 1500, 2051])
def test_what_is_not_finite_stays_so_and_touches_no_other_row_or_output(dtype, place):
    multiply = multiply_here(dtype)
    x, weight = torch.zeros(7, 2052, dtype=dtype), torch.ones(14, 2052, dtype=dtype)
    x[0, place], x[1, place], x[2, place] = torch.nan, torch.inf, -torch.inf
    x[3, [place, 7]] = torch.tensor([torch.inf, -torch.inf], dtype=dtype)
    x[4, [place, 7]] = torch.finfo(dtype).max
    x[5] = 1
    weight[13, place] = torch.inf
    if dtype == torch.bfloat16:
        x[0].view(torch.int16)[place] = 0x7FFF  # the NaN that rounding up would turn into -0
    found = multiply(x, weight, None)
    assert found[0].isnan().all() and found[3].isnan().all() and found[[0, 3, 6], 13].isnan().all()
    assert (found[[1, 4]] == torch.inf).all() and (found[2] == -torch.inf).all() and found[5, 13] == torch.inf
    assert torch.equal(found[5, :13], torch.full((13,), 2052, dtype=dtype)) and not found[6, :13].any()
    if dtype == torch.bfloat16:
        assert torch.equal(linear.float32(x, weight).bfloat16().nan_to_num(7), found.nan_to_num(7))


@needs_compiler
@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize("place", [2, 6, 34])
def test_tensors_of_a_mapped_file_lie_at_any_place(dtype, place):
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        memory = bytearray(place) + tensor.view(torch.uint8).numpy().tobytes()
        return torch.frombuffer(memory, dtype=dtype, offset=place).view(tensor.shape)

    multiply = multiply_here(dtype)
    x, weight, bias = (drawn(*shape, dtype=dtype, seed=shape[0]) for shape in ((5, 70), (57, 70), (1, 57)))
    whole = multiply(x, weight, bias[0])
    assert torch.equal(multiply(moved(x), moved(weight), moved(bias)[0]), whole)


@needs_compiler
@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
def test_small_numbers_count_and_a_tie_is_rounded_to_even(dtype):
    multiply = multiply_here(dtype)
    x, weight = torch.zeros(3, 64, dtype=dtype), torch.ones(2, 64, dtype=dtype)
    x[0, :2] = torch.tensor([1, 2**-8], dtype=dtype)
    x[1, :2] = torch.tensor([1 + 2**-7, 2**-8], dtype=dtype)
    x[2, :2] = 2**-120
    expected = [1 + 2**-8, 1 + 2**-7 + 2**-8, 2**-119] if dtype == torch.float32 else [1, 1 + 2**-6, 2**-119]
    assert multiply(x, weight, None).tolist() == [[value] * 2 for value in expected]


def test_without_a_compiler_weights_lie_in_columns_and_products_are_pytorchs(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(linear, "why_not_compiled", linear.why_not_compiled.__wrapped__)
    monkeypatch.setattr(linear, "_warn", linear._warn.__wrapped__)
    monkeypatch.setattr(linear, "compiled", linear.compiled.__wrapped__)
    monkeypatch.setattr(cpu_backend, "_SMALL_MODEL", 1)  # a large model is timed
    monkeypatch.setattr(linear, "tune", lambda weights: pytest.fail("there is nothing to time"))
    with caplog.at_level("DEBUG"):
        backend, weight = CpuBackend(CPU), drawn(6, 8, dtype=torch.float32)
        packed = backend.pack_weight(weight)
        backend.end_of_load(tune=True)
    (warned,) = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert "3 to 5 times as long, because CXX=no-such-compiler is not there" in warned and "apt install g++" in warned
    assert packed.t().is_contiguous()
    assert "by one operator" not in caplog.text
    x = drawn(3, 8, dtype=torch.float32, seed=1)
    torch.testing.assert_close(backend.linear(x, packed), x @ weight.T)


@needs_compiler
def test_products_of_a_large_model_are_timed_and_the_rows_of_the_operator_are_logged(caplog, monkeypatch):
    monkeypatch.setattr(cpu_backend, "_SMALL_MODEL", 1)
    backend = CpuBackend(CPU)
    backend.pack_weight(drawn(1024, 1024, dtype=torch.float32))
    with caplog.at_level("DEBUG"):
        backend.end_of_load(tune=True)
    assert re.search(r"forwards by one operator: up to \d+ rows$", caplog.messages[-1])
    multiply_here(torch.float32)


@needs_compiler
@pytest.mark.parametrize(
    ("theirs", "most"),
    [
        ({8: 0.75}, 7),
        ({8: 1.0, 16: 0.78, 32: 0.76, 64: 2.0}, 16),  # 1.3 times as quick at 32
        (dict.fromkeys((8, 16, 32, 64, 128), 1.0), linear.ALL_ROWS),
    ],
)
def test_the_operator_multiplies_rows_with_which_pytorch_is_not_quicker(monkeypatch, theirs, most):
    served = [drawn(11, 70, dtype=torch.float32), drawn(6, 11, dtype=torch.float32)]

    def seconds(rows, weights, multiply):
        assert weights is served
        return theirs[rows] if multiply is F.linear else 1.0

    monkeypatch.setattr(linear, "_seconds", seconds)
    assert linear.tune(served) == most


@needs_compiler
def test_without_weights_to_time_the_operator_multiplies_all_rows(monkeypatch):
    """Where all of them are int8, which only the operator multiplies by."""
    monkeypatch.setattr(linear, "_seconds", lambda rows, weights, multiply: float(multiply is not F.linear))
    assert linear.tune([]) == linear.ALL_ROWS


@needs_compiler
def test_what_is_timed_are_served_weights_up_to_a_size_which_are_then_let_go(monkeypatch):
    monkeypatch.setattr(cpu_backend, "_SMALL_MODEL", 1)
    monkeypatch.setattr(linear, "TRIED_BYTES", 300)
    timed = []
    monkeypatch.setattr(linear, "tune", lambda weights: timed.extend(weights) or 16)
    backend = CpuBackend(CPU)
    packed = [backend.pack_weight(drawn(6, 8, dtype=torch.float32, seed=i)) for i in range(4)]
    backend.end_of_load(tune=True)
    assert [weight.data_ptr() for weight in timed] == [weight.data_ptr() for weight in packed[:2]]
    timed.clear()
    backend.end_of_load(tune=True)
    assert not timed


@needs_compiler
def test_a_decoder_on_the_operator_has_the_texts_of_pytorchs_products_and_drafts_change_none(tmp_path, monkeypatch):
    pair = make_pair(tmp_path, **LUCKY)
    asked = [Request(f"r{i}", (1, 2, i), 24) for i in range(4)]

    def texts(draft: Path | None) -> dict[str, list[int]]:
        engine = make_engine(pair.target, draft, page_size=16, max_num_seqs=4, max_model_len=64)
        in_order = all(weight.is_contiguous() for weight in engine.core.runner.forward.target.parameters())
        assert in_order == bool(linear.operator_for(torch.float32))
        accepted = 0
        for request in asked:
            engine.core.add(request)
        found: dict[str, list[int]] = {request.request_id: [] for request in asked}
        while engine.core.has_work:
            for delta in engine.core.step().deltas:
                found[delta.request_id] += delta.token_ids
                accepted += delta.steps[0].n_accepted
        assert (accepted > 0) == (draft is not None)
        return found

    by_operator = texts(pair.draft), texts(None)
    monkeypatch.setattr(linear, "compiled", lambda dtype: None)
    by_pytorch = texts(None)
    assert by_operator == (by_pytorch, by_pytorch)


class Loader:
    """Fake of `torch.ops.load_library`. It loads no library of another system, and a part of one would kill it."""

    def __init__(self) -> None:
        self.loaded: list[Path] = []

    def __call__(self, path: Path) -> None:
        code = path.read_bytes()
        if code == library.sealed(b"another system's"):
            raise OSError("wrong ELF class")
        assert code == library.sealed(b"whole")
        self.loaded.append(path)


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Return the libraries that were compiled, by a stub, and the fake loader."""
    compiled: list[Path] = []
    loader = Loader()

    def compile_it(dtype: torch.dtype, flags: tuple[str, ...], sources: list[Path], to: Path) -> None:
        compiled.append(to)
        to.write_bytes(library.sealed(b"whole"))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("app.engine.cache_folder._owners_above", lambda folder: {0})
    monkeypatch.setattr(library, "compile_sources", compile_it)
    monkeypatch.setattr(torch.ops, "load_library", loader)
    return compiled, loader.loaded


@needs_compiler
def test_a_library_is_compiled_once_and_anew_if_it_is_broken_or_its_source_is_another(made, tmp_path, monkeypatch):
    compiled, loaded = made
    source = tmp_path / "linear.cpp"
    source.write_text("one")
    for _ in range(2):
        library.load_operators(torch.float32, [source])
    assert len(compiled) == 1 and loaded == compiled * 2
    whole = library.sealed(b"whole")
    broken = [library.sealed(b"another system's"), b"", whole[:3], whole[:-1], b"W" + whole[1:]]
    for count, found in enumerate(broken, 2):
        compiled[0].write_bytes(found)
        library.load_operators(torch.float32, [source])
        assert len(compiled) == count and compiled[-1] == compiled[0]
    source.write_text("two")
    library.load_operators(torch.float32, [source])
    assert compiled[-1] != compiled[0]
    made_before = len(compiled)
    (tmp_path / "vectors.h").write_text("a header counts as well")
    library.load_operators(torch.float32, [source])
    assert len(compiled) == made_before + 1
    monkeypatch.setattr(cache_folder, "AT_WORK_SECONDS", -1.0)
    for number in range(cache_folder.MAX_OF_A_NAME + 2):
        source.write_text(f"more {number}")
        library.load_operators(torch.float32, [source])
    assert len(list(compiled[0].parent.glob("*.so"))) == cache_folder.MAX_OF_A_NAME


V3 = b"avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = V3 + b" avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (V3, "v3"),
        (V4, "v4"),
        (V4 + b" avx512_vnni", "v4_vnni"),
        (V4 + b" avx512_vnni avx512_bf16", "v4_bf16"),
        (b"avx avx2 fma", None),
    ],
)
def test_an_images_library_of_the_best_level_is_taken_without_a_compiler_and_others_compile(
    made, tmp_path, monkeypatch, flags, level
):
    compiled, loaded = made
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(library, "processor", lambda: b"flags\t\t: " + flags)
    monkeypatch.setattr(library, "PREBUILT", tmp_path / "prebuilt")
    library.prebuild(library.PREBUILT)
    assert len(compiled) == len(library.LEVELS["x86_64"]) * len(library.DTYPES)
    monkeypatch.setenv("CXX", "no-such-compiler")
    if level is None:
        with pytest.raises(RuntimeError, match="CXX=no-such-compiler is not there"):
            library.load_operators(torch.bfloat16)
        return
    library.load_operators(torch.bfloat16)
    (flags_of,) = [own.flags for own in library.LEVELS["x86_64"] if own.name == level]
    assert loaded == [library.PREBUILT / library._name(torch.bfloat16, flags_of, library.SOURCES)]


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")
def test_the_command_of_an_image_makes_operators_that_multiply(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "LEVELS", {"x86_64": library.LEVELS["x86_64"][-1:]})
    monkeypatch.setattr(library, "DTYPES", (torch.bfloat16,))
    library.prebuild(tmp_path)
    (made,) = tmp_path.glob("bfloat16-*.so")
    library.check_sealed(made)
    code = f"import torch; torch.ops.load_library({str(made)!r}); x = torch.ones(2, 70).bfloat16(); "
    code += "print(torch.ops.dflash_server_bfloat16.linear(x, x, None).tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[[70.0, 70.0], [70.0, 70.0]]"


def test_a_dtype_that_is_loaded_later_has_the_settings_of_the_others(monkeypatch):
    """A router in float32 beside weights in bfloat16 keeps its bits with --batch-invariant, too."""
    told: list[tuple[torch.dtype, str, int]] = []

    class Operators:
        linear = SimpleNamespace(default=F.linear)

        def __init__(self, dtype: torch.dtype) -> None:
            for name in ("threads", "most_rows", "heartbeat"):
                setattr(self, f"set_{name}", lambda value, name=name: told.append((dtype, name, value)))

    monkeypatch.setattr(linear, "_settings", {})
    monkeypatch.setattr(linear, "_loaded", [])
    monkeypatch.setattr(linear, "why_not_compiled", lambda dtype: "")
    monkeypatch.setattr(linear, "operators", Operators)
    load = linear.compiled.__wrapped__
    load(torch.bfloat16)
    linear.set_up(threads=2, most_rows=linear.ALL_ROWS)
    load(torch.float32)
    settings = [("threads", 2), ("most_rows", linear.ALL_ROWS)]
    assert told == [(dtype, *one) for dtype in (torch.bfloat16, torch.float32) for one in settings]


@needs_compiler
def test_no_library_is_taken_from_a_folder_that_another_user_could_change(made, tmp_path, monkeypatch):
    compiled, _ = made
    monkeypatch.setattr("app.engine.cache_folder._owners_above", lambda folder: {0, 12345})
    source = tmp_path / "linear.cpp"
    source.write_text("one")
    library.load_operators(torch.float32, [source])
    (library_made,) = compiled
    assert not library_made.is_relative_to(tmp_path) and not library_made.exists()


@pytest.fixture
def refuse(monkeypatch) -> Callable[..., None]:
    """Return a function that makes each of some folders refuse new files with an error number, or code (None)."""

    def refuse(reason: int | None, *folders: Path) -> None:
        write, facts = os.posix_fallocate, os.statvfs

        def is_meant(path: str | Path) -> bool:
            return any(Path(path).is_relative_to(folder) for folder in folders)

        def full(file: int, at: int, size: int) -> None:
            if reason is not None and is_meant(Path(f"/proc/self/fd/{file}").readlink()):
                raise OSError(reason, os.strerror(reason))
            write(file, at, size)

        def mounted(path: Path) -> object:
            noexec = os.ST_NOEXEC if reason is None and is_meant(path) else 0
            return SimpleNamespace(f_flag=facts(path).f_flag & ~os.ST_NOEXEC | noexec)

        monkeypatch.setattr(os, "posix_fallocate", full)
        monkeypatch.setattr(os, "statvfs", mounted)

    return refuse


REFUSED = [*((code, os.strerror(code)) for code in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT))]
REFUSED += [(None, "mounted noexec")]


@needs_compiler
@pytest.mark.parametrize(("reason", "said"), REFUSED, ids=lambda value: str(value))
def test_where_the_home_takes_no_library_it_is_compiled_in_tmpdir_and_a_kept_one_is_still_used(
    made, refuse, tmp_path, monkeypatch, caplog, reason, said
):
    compiled, loaded = made
    home, other = tmp_path / "dflash-server", tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    source = tmp_path / "linear.cpp"
    source.write_text("one")
    library.load_operators(torch.float32, [source])
    refuse(reason, home)
    library.load_operators(torch.float32, [source])
    assert len(compiled) == 1 and loaded == compiled * 2 and not caplog.records
    source.write_text("two")
    library.load_operators(torch.float32, [source])
    assert compiled[0].is_relative_to(home) and compiled[1].is_relative_to(other) and loaded[-1] == compiled[1]
    (warned,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert f"{home}/libraries cannot be used ({said})" in warned.getMessage()
    assert f"in {other}: free some, or set XDG_CACHE_HOME" in warned.getMessage()
    assert not list(other.iterdir())


@needs_compiler
@pytest.mark.parametrize(("reason", "said"), REFUSED, ids=lambda value: str(value))
def test_where_no_folder_takes_a_library_that_is_said_before_anything_is_compiled(
    made, refuse, tmp_path, monkeypatch, reason, said
):
    compiled, _ = made
    home, other = tmp_path / "dflash-server", tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    refuse(reason, home, other)
    source = tmp_path / "linear.cpp"
    source.write_text("one")
    with pytest.raises(OSError, match=re.escape(f"cannot be used ({said}), nor can {other} ({said}): free 16 MiB")):
        library.load_operators(torch.float32, [source])
    assert not compiled


@needs_compiler
@pytest.mark.exhaustive
def test_progress_counts_the_sources_that_are_done_in_the_order_of_their_ends(tmp_path, monkeypatch, caplog):
    sources = [tmp_path / f"{name}.cpp" for name in ("slow", "one", "two")]
    released, told = tmp_path / "released", []
    for source in sources:
        source.write_text("")
    script = tmp_path / "g++"
    waits = f'case "$*" in *slow.cpp) while [ ! -e {released} ]; do sleep 0.01; done;; esac'
    script.write_text(f'#!/bin/sh\n{waits}\nexec {shutil.which("g++")} "$@"\n')
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))

    def report(done: int, total: int) -> None:
        told.append((done, total))
        if done == 2:
            released.touch()

    library.on_source.set(report)
    with caplog.at_level("INFO"):
        library.compile_sources(torch.float32, (), sources, tmp_path / "empty.so")
    assert told == [(done, 3) for done in range(4)]
    assert "operators of float32, once, in about 10 s of processor time" in caplog.text


@needs_compiler
@pytest.mark.exhaustive
def test_what_is_compiled_is_sealed(tmp_path):
    (tmp_path / "empty.cpp").write_text("")
    library.compile_sources(torch.float32, (), [tmp_path / "empty.cpp"], tmp_path / "empty.so")
    library.check_sealed(tmp_path / "empty.so")
    ctypes.CDLL(str(tmp_path / "empty.so"))


@needs_compiler
@pytest.mark.exhaustive
def test_a_source_that_cannot_be_compiled_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "wrong.cpp"
    source.write_text("this is no C++")
    with pytest.raises(RuntimeError, match=r"(?s)cannot compile it: .*wrong.cpp"):
        library.load_operators(torch.float32, [source])


@needs_compiler
def test_a_weight_of_one_part_stays_in_its_mapped_file_and_several_parts_become_one_copy(tmp_path):
    stored = {"one": drawn(600, 40, dtype=torch.bfloat16), "two": drawn(7, 40, dtype=torch.bfloat16, seed=1)}
    save_file(stored, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        one, two = file.get_tensor("one"), file.get_tensor("two")
    backend = CpuBackend(CPU)
    packed = backend.pack_weight(one)
    assert packed.data_ptr() == one.data_ptr() and torch.equal(packed, stored["one"])
    (where,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if _holds(line, packed.data_ptr())]
    assert where.endswith("model.safetensors") and "rw-p" in where, "private: no write reaches the file"
    both = backend.pack_weight(one, two, one)
    assert torch.equal(both, torch.cat((stored["one"], stored["two"], stored["one"]))) and both.is_contiguous()


def _holds(line: str, address: int) -> bool:
    start, end = (int(part, 16) for part in line.split()[0].split("-"))
    return start <= address < end


@pytest.fixture
def three_threads():
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)
    linear.set_up(threads=1)


def threads_of_steps(backend: CpuBackend) -> list[int]:
    found = []
    for rows in (1, linear.MOST_ROWS, linear.MOST_ROWS + 1):
        with backend.step(rows):
            found.append(torch.get_num_threads())
        assert torch.get_num_threads() == 3
    return found


@needs_compiler
@pytest.mark.usefixtures("three_threads")
def test_pytorch_has_threads_for_steps_of_many_rows_alone(monkeypatch):
    """They wait for one another in busy loops, which make a step many times slower beside a busy process."""
    small, large, mixed = CpuBackend(CPU), CpuBackend(CPU), CpuBackend(CPU)
    small.pack_weight(torch.zeros(4, 4))
    monkeypatch.setattr(cpu_backend, "_SMALL_MODEL", 16)
    assert threads_of_steps(small) == [1, 1, 3]
    monkeypatch.setattr(cpu_backend, "_SMALL_MODEL", 17)
    assert threads_of_steps(small) == [1, 1, 1]
    large.pack_weight(torch.zeros(5, 4))
    assert threads_of_steps(large) == [1, 1, 3]
    monkeypatch.setattr(linear, "tune", lambda weights: 1)
    large.end_of_load(tune=True)
    assert threads_of_steps(large) == [1, 3, 3]
    multiply_here(torch.float32)
    mixed.pack_weight(torch.zeros(5, 4))
    mixed.empty_experts(torch.zeros(1), 2, 2, 2)
    mixed.end_of_load(tune=True)
    assert threads_of_steps(mixed) == [3, 3, 3]
    x, weight = drawn(2, 1000, dtype=torch.float32), drawn(50, 1000, dtype=torch.float32, seed=1)
    assert torch.equal(mixed.linear(x, weight), F.linear(x, weight)), "more than one row is PyTorch's here, too"
    assert not torch.equal(multiply_here(torch.float32)(x, weight, None), F.linear(x, weight))


@pytest.mark.usefixtures("three_threads")
def test_pytorch_has_threads_for_all_products_that_are_its_own(monkeypatch):
    monkeypatch.setattr(linear, "operator_for", lambda dtype: None)
    backend = CpuBackend(CPU)
    backend.pack_weight(torch.zeros(4, 4))
    assert threads_of_steps(backend) == [3, 3, 3]


@needs_compiler
@pytest.mark.usefixtures("three_threads")
def test_an_engine_steps_in_the_context_of_its_backend(tmp_path, monkeypatch):
    found = []
    run = CpuBackend.choose
    monkeypatch.setattr(CpuBackend, "choose", lambda *args: found.append(torch.get_num_threads()) or run(*args))
    pair = make_pair(tmp_path, **LUCKY)
    core = make_engine(pair.target, pair.draft, page_size=16, max_num_seqs=4, max_model_len=64).core
    found.clear()
    core.run([Request("r", (1, 2, 3), 8)])
    assert set(found) == {1} and torch.get_num_threads() == 3
