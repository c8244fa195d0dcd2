"""Where a checkpoint lies, and whether its files are whole: answered before anything is loaded or bound.

The published format is read: config.json, safetensors in one file or in shards with an index, and the tokenizer's
files. No torch here, so a truncated download is named within a second.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

DEMO = Path(__file__).parents[1] / "demo" / "checkpoint"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
LARGEST_HEADER = 100_000_000  # bytes; the safetensors format's own limit
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Of one number of each of the safetensors format's dtypes."""
_AGAIN = "download it again"


class CheckpointError(ValueError):
    """A checkpoint that cannot be served; the message says what was given, what was looked for and what to do."""


def resolve(name: str, what: Literal["target", "draft"]) -> Path:
    """The folder of a checkpoint: `demo`, an existing folder, or a Hugging Face id, which is downloaded if need be.

    huggingface_hub's own variables hold: HF_HUB_OFFLINE=1 makes no network call, HF_ENDPOINT names another hub.
    Raises CheckpointError.
    """
    if name == "demo":
        return DEMO / what
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{what} {name} is a file; give the folder that holds config.json and the weights")
    if not HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"{what} {name}: there is no such folder (looked for {folder.absolute()}), and it is not a Hugging Face "
            "id either; give a folder, an id such as Qwen/Qwen3-8B, or demo"
        )
    return _from_hub(name, what)


def _from_hub(name: str, what: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    looked = f"{what} {name}: there is no folder {Path(name).absolute()}, and"
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except GatedRepoError:
        raise CheckpointError(
            f"{looked} {constants.ENDPOINT} asks for permission; accept the model's terms there and log in with "
            "`hf auth login` or HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{looked} {constants.ENDPOINT} has no model of that name; check the spelling, or log in with "
            "`hf auth login` or HF_TOKEN if it is private"
        ) from None
    except LocalEntryNotFoundError as error:
        if constants.is_offline_mode():
            raise CheckpointError(
                f"{looked} HF_HUB_OFFLINE is set while {constants.HF_HUB_CACHE} does not hold it; unset "
                f"HF_HUB_OFFLINE for one start, or give the model's folder"
            ) from None
        raise CheckpointError(
            f"{looked} {constants.ENDPOINT} cannot be reached while {constants.HF_HUB_CACHE} does not hold it: check "
            f"the network or HF_ENDPOINT, or give the model's folder ({error})"
        ) from None
    except Exception as error:  # the hub's client raises its HTTP library's errors, disk errors and its own
        raise CheckpointError(f"{looked} the download from {constants.ENDPOINT} failed: {error}") from error


def check_files(folder: Path, need_tokenizer: bool) -> None:
    """Raise CheckpointError unless the folder's config, weights and (if needed) tokenizer are there and whole."""
    _check_config(folder)
    tensor_files(folder)
    if need_tokenizer and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{folder}: no tokenizer; looked for {', '.join(TOKENIZER_FILES)}; copy the tokenizer files of the model "
            "beside its weights"
        )


def _check_config(folder: Path) -> None:
    config = _read_json(folder / "config.json")
    if not config.get("architectures") and not config.get("model_type"):
        raise CheckpointError(
            f"{folder / 'config.json'}: neither `architectures` nor `model_type` is given, so it is no model's "
            "config.json; give the folder of a Hugging Face model"
        )


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it. A single file goes before an index, as in Transformers.

    Raises CheckpointError, naming the file, unless all are there and as long as their headers say.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return dict.fromkeys(_check_safetensors(single), single)
    if single.is_symlink():
        raise CheckpointError(f"{single} is a link to a file that is not there ({single.readlink()}); {_AGAIN}")
    if not index.is_file():
        pickled = " (pytorch_model.bin is not read: only safetensors are)" if any(folder.glob("*.bin")) else ""
        raise CheckpointError(
            f"{folder}: no weights; looked for {single.name} and {index.name}{pickled}; give a folder or a revision "
            "with safetensors"
        )
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no `weight_map` that says which shard holds a tensor; {_AGAIN}")
    shards = sorted({str(shard) for shard in weight_map.values()})
    astray = [shard for shard in shards if Path(shard).name != shard or shard in ("", "..")]
    if astray:
        raise CheckpointError(f"{index}: {astray[0]!r} is not the name of a file beside it; {_AGAIN}")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(shards)} shards named by {index.name} are missing: "
            f"{', '.join(missing)}; download them again"
        )
    for shard in shards:
        tensors = _check_safetensors(folder / shard)
        lost = next((name for name, home in weight_map.items() if home == shard and name not in tensors), None)
        if lost is not None:
            raise CheckpointError(f"{folder / shard}: no tensor {lost}, which {index.name} says is here")
    return {name: folder / shard for name, shard in weight_map.items()}


def _check_safetensors(file: Path) -> set[str]:
    """The names of a file's tensors. The header must parse, its tensors lie behind one another, and the file end where
    the last one does."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            header = stream.read(length) if length <= min(LARGEST_HEADER, size - 8) else b""
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
    if start == b"version ":
        raise CheckpointError(f"{file} is a Git LFS pointer and not the weights; run `git lfs pull` in its folder")
    if len(start) < 8 or len(header) < length:
        raise CheckpointError(f"{file}: the safetensors header is cut off ({size} bytes); {_AGAIN}")
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        spans = sorted(_span(name, tensor) for name, tensor in tensors.items())
    except _BadTensor as error:
        raise CheckpointError(f"{file}: tensor {error}; {_AGAIN}") from None
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{file}: the safetensors header cannot be read; {_AGAIN}") from None
    data = 0
    for begin, end, name in spans:
        if begin != data:
            raise CheckpointError(
                f"{file}: tensor {name!r} begins at byte {begin} of the data, not at {data}; {_AGAIN}"
            )
        data = end
    if size != 8 + length + data:
        raise CheckpointError(
            f"{file}: {size} bytes where its header asks for {8 + length + data}: the file is "
            f"{'cut off' if size < 8 + length + data else 'too long'}; {_AGAIN}"
        )
    return set(tensors)


class _BadTensor(Exception):
    """A tensor whose place in the file makes no sense; its name, and why."""


def _span(name: str, tensor: Any) -> tuple[int, int, str]:
    """(first byte, byte behind the last, name) of a tensor in the data."""
    if not isinstance(tensor, Mapping):
        raise _BadTensor(f"{name!r} is not described")
    dtype, shape, offsets = (tensor.get(key, 0) for key in ("dtype", "shape", "data_offsets"))
    bits = _BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise _BadTensor(f"{name!r} has dtype {dtype!r}, which safetensors does not have")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _BadTensor(f"{name!r} has shape {shape!r} and data_offsets {offsets!r}")
    begin, end = offsets
    if 8 * (end - begin) != bits * math.prod(shape):
        raise _BadTensor(f"{name!r} of {dtype} {shape} lies on {end - begin} bytes")
    return begin, end, name


def _are_sizes(sizes: Any) -> bool:
    return isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; give the folder of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}; download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: an object is wanted, not a {type(content).__name__}; download it again")
    return content
