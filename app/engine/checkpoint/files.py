"""The files of a checkpoint: config.json, safetensors in one file or in shards with an index, and the tokenizer's."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from safetensors import SafetensorError, safe_open

from app.engine.errors import UnsupportedError

DEMO = Path(__file__).parents[2] / "demo" / "checkpoint"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = (
    "config.json generation_config.json model*.safetensors model.safetensors.index.json tokenizer* vocab.* merges.txt "
    "special_tokens_map.json added_tokens.json chat_template*"
).split()
_PREFIX = re.compile(r"^((language_)?model\.)+")
_AGAIN = "download it again"
_QUANTISED = {
    "g_idx": "GPTQ",
    "qweight|qzeros|scales": "AWQ or GPTQ",
    "weight_packed|weight_shape|weight_g_idx|weight_zero_point": "compressed-tensors",
    r"(nested_)?(absmax|quant_map)|quant_state\.\w+|SCB": "bitsandbytes",
    "weight_offset|deq_scale|quant_bias": "msModelSlim",
    "weight_scale_inv": "fp8 in blocks",
    "weight_scale_2|weight_global_scale|input_global_scale": "NVFP4",
    "weight_scale|input_scale": "fp8 or int8 with scales",
}
"""Ends of tensors' names that only weights of one quantisation have, the surest first."""


class StoredTensor(NamedTuple):
    """A tensor's place: its file, its name there, and its shape."""

    file: Path
    name: str
    shape: list[int]


def find_folder(name: str, role: Literal["target", "draft"]) -> Path:
    """Return the folder of a checkpoint: `demo`, an existing folder, or a Hugging Face id. Raises UnsupportedError.

    An id is downloaded if the cache does not hold it. The variables of huggingface_hub apply, like HF_HUB_OFFLINE.
    """
    if name == "demo":
        return DEMO / role
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UnsupportedError(f"{role} {name} is a file; give the folder of config.json and safetensors (not GGUF)")
    if not _HUB_ID.fullmatch(name):
        neither = f"there is no such folder (looked for {folder.absolute()}), and it is not a Hugging Face id either"
        raise UnsupportedError(f"{role} {name}: {neither}; give a folder, an id such as Qwen/Qwen3-8B, or demo")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    hub, cache, login = constants.ENDPOINT, constants.HF_HUB_CACHE, "log in with `hf auth login` or HF_TOKEN"
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except GatedRepoError:
        reason = f"{hub} asks for permission; accept the model's terms there and {login}"
    except RepositoryNotFoundError:
        reason = f"{hub} has no model of that name; check the spelling, or {login} if it is private"
    except LocalEntryNotFoundError:
        reason = f"{hub} cannot be reached while {cache} does not hold it: check the network or HF_ENDPOINT"
        if constants.is_offline_mode():
            reason = f"HF_HUB_OFFLINE is set while {cache} does not hold it; unset HF_HUB_OFFLINE for one start"
        reason += ", or give the model's folder"
    except Exception as error:  # the hub's client raises its HTTP library's errors, disk errors and its own
        reason = f"the download from {hub} failed: {error}"
    if "/" not in name and name.lower().startswith("qwen"):
        reason += f"; did you mean {'z-lab' if 'dflash' in name.lower() else 'Qwen'}/{name}?"
    raise UnsupportedError(f"{role} {name}: there is no folder {folder.absolute()}, and {reason}")


def read_json(file: Path, *, or_empty: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file, or with `or_empty` {} if there is no such file. Raises UnsupportedError."""
    if or_empty and not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedError(f"{file} is missing; give the folder of a Hugging Face model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedError(f"{file} cannot be read as JSON: {error}; {_AGAIN}") from None
    if not isinstance(content, dict):
        raise UnsupportedError(f"{file}: an object is wanted, not a {type(content).__name__}; {_AGAIN}")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's config.json. Raises UnsupportedError."""
    return read_json(folder / "config.json")


def token_id(text: str, folders: Iterable[Path]) -> int | None:
    """Return the id of a token by the tokenizer.json or added_tokens.json of the first folder that has it, or None."""
    for folder in folders:
        tokenizer = read_json(folder / "tokenizer.json", or_empty=True)
        vocabulary = tokenizer.get("model", {}).get("vocab")
        ids = vocabulary if isinstance(vocabulary, dict) else {}
        ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
        ids |= read_json(folder / "added_tokens.json", or_empty=True)
        if text in ids:
            return int(ids[text])
    return None


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return tensors by their names without `model.` and `language_model.` before them, because files differ in these.

    A single file goes before an index, as in Transformers. Raises UnsupportedError unless all files are there and
    whole, and if a name says that the weights are quantised, which config.json may not say.
    """
    single = folder / "model.safetensors"
    if single.is_file():
        headers = {single.name: _read_shapes(single)}
        weight_map = dict.fromkeys(headers[single.name], single.name)
    else:
        weight_map = _weight_map(folder, single)
        headers = {shard: _read_shapes(folder / shard) for shard in sorted(set(weight_map.values()))}
    stored: dict[str, StoredTensor] = {}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise UnsupportedError(f"{folder / shard}: no tensor {name}, which the index says is here; {_AGAIN}")
        plain = _PREFIX.sub("", name)
        if plain in stored:
            raise UnsupportedError(f"{folder}: two tensors are called {plain} after their prefixes")
        stored[plain] = StoredTensor(folder / shard, name, headers[shard][name])
    for ends, quantisation in _QUANTISED.items():
        if quantised := min(filter(re.compile(rf".+\.({ends})").fullmatch, stored), default=None):
            which = f"tensor {quantised} is of weights that are quantised ({quantisation})"
            raise UnsupportedError(f"{folder}: {which}, which are not supported yet; give the model in bfloat16")
    return stored


def find_tensor(stored: Mapping[str, StoredTensor], folder: Path, name: str, shape: Sequence[int]) -> StoredTensor:
    """Return a tensor's place. Raises UnsupportedError if it is missing, or has another shape than config.json says."""
    if name not in stored:
        raise UnsupportedError(f"{folder}: tensor {name} is missing; {_AGAIN}")
    if stored[name].shape != list(shape):
        both = f"{name} has shape {stored[name].shape}, but config.json wants {list(shape)}"
        raise UnsupportedError(f"{folder}: tensor {both}; config.json and weights are of different models")
    return stored[name]


def _weight_map(folder: Path, single: Path) -> dict[str, str]:
    """Return tensor name -> the name of its shard, by the index of a folder without a `single` file."""
    index = folder / "model.safetensors.index.json"
    if single.is_symlink():
        raise UnsupportedError(f"{single} is a link to a file that is not there ({single.readlink()}); {_AGAIN}")
    if not index.is_file():
        pickled = " (pytorch_model.bin is not read: only safetensors are)" if any(folder.glob("*.bin")) else ""
        looked = f"no weights; looked for {single.name} and {index.name}{pickled}"
        raise UnsupportedError(f"{folder}: {looked}; give a folder or a revision with safetensors")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedError(f"{index}: no `weight_map` that says which shard holds a tensor; {_AGAIN}")
    shards = sorted(set(map(str, weight_map.values())))
    if astray := [shard for shard in shards if Path(shard).name != shard or shard in ("", "..")]:
        raise UnsupportedError(f"{index}: {astray[0]!r} is not the name of a file in its folder; {_AGAIN}")
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        found = f"{len(missing)} of {len(shards)} shards named by {index.name} are missing: {', '.join(missing)}"
        raise UnsupportedError(f"{folder}: {found}; download them again")
    return {name: str(shard) for name, shard in weight_map.items()}


def _read_shapes(file: Path) -> dict[str, list[int]]:
    """Return tensor name -> shape. Raises UnsupportedError unless the file is whole."""
    try:
        with safe_open(file, framework="np") as opened:
            return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 (not a dict)
    except OSError as error:
        raise UnsupportedError(f"{file} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        reason = f"is cut off or damaged ({file.stat().st_size} bytes: {error}); {_AGAIN}"
        with file.open("rb") as stream:
            if stream.read(8) == b"version ":
                reason = "is a Git LFS pointer and not the weights; run `git lfs pull` in its folder"
        raise UnsupportedError(f"{file} {reason}") from None
