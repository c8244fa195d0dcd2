"""Where a checkpoint lies, and whether its files are whole: answered before anything is loaded or bound.

The published format is read: config.json, safetensors in one file or in shards with an index, and the tokenizer's
files. No torch here, so a truncated download is named within a second.
"""

import json
import re
from pathlib import Path
from typing import Any, Literal

DEMO = Path(__file__).parent / "demo" / "checkpoint"
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
    _check_weights(folder)
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


def _check_weights(folder: Path) -> None:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        _check_safetensors(single)
        return
    if not index.is_file():
        pickled = " (pytorch_model.bin is not read: only safetensors are)" if any(folder.glob("*.bin")) else ""
        raise CheckpointError(
            f"{folder}: no weights; looked for {single.name} and {index.name}{pickled}; give a folder or a revision "
            "with safetensors"
        )
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no `weight_map` that says which shard holds a tensor; download it again")
    shards = sorted({str(shard) for shard in weight_map.values()})
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


def _check_safetensors(file: Path) -> set[str]:
    """The names of a file's tensors. The header must parse and the file end where its last tensor ends."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            raise CheckpointError(f"{file} is a Git LFS pointer and not the weights; run `git lfs pull` in its folder")
        if len(start) < 8 or length > LARGEST_HEADER or 8 + length > size:
            raise CheckpointError(f"{file}: the safetensors header is cut off ({size} bytes); download it again")
        header = stream.read(length)
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        data = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise CheckpointError(f"{file}: the safetensors header cannot be read; download it again") from None
    if size != 8 + length + data:
        raise CheckpointError(
            f"{file}: {size} bytes where its header asks for {8 + length + data}: the file is "
            f"{'cut off' if size < 8 + length + data else 'too long'}; download it again"
        )
    return set(tensors)


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
