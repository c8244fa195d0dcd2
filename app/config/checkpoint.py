"""Checkpoints are found here, and their files are checked to be whole, before anything is loaded or bound.

A checkpoint is config.json, safetensors in one file or in shards with an index, and the tokenizer's files. Headers of
safetensors are read here, because `safe_open` imports NumPy (0.1 s of a start) and does not name the broken tensor.
"""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeGuard

from app.config.error import ConfigError
from app.config.families import family_of

DEMO = Path(__file__).parents[1] / "demo" / "checkpoint"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = (
    "config.json generation_config.json model*.safetensors model.safetensors.index.json tokenizer* vocab.* merges.txt "
    "special_tokens_map.json added_tokens.json chat_template*"
).split()
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""
DTYPE_BITS = {"BOOL": 8} | {
    name: int(re.findall(r"\d+", name)[0])
    for name in "F4 F6_E2M3 F6_E3M2 F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ F8_E8M0 F16 BF16 F32 F64 C64 "
    "U8 I8 U16 I16 U32 I32 U64 I64".split()
}
"""Bits of one number, by the safetensors format's name of its dtype."""
_PREFIX = re.compile(r"^((language_)?model\.)+")
_AGAIN = "download it again"
_QUANTISED = tuple(
    (re.compile(rf".+\.({suffixes})"), quantisation)
    for suffixes, quantisation in (
        ("g_idx", "GPTQ"),
        ("qweight|qzeros|scales", "AWQ or GPTQ"),
        ("weight_packed|weight_shape|weight_g_idx|weight_zero_point", "compressed-tensors"),
        (r"(nested_)?(absmax|quant_map)|quant_state\.\w+|SCB", "bitsandbytes"),
        ("weight_offset|deq_scale|quant_bias", "msModelSlim"),
        ("weight_scale_inv", "fp8 in blocks"),
        ("weight_scale_2|weight_global_scale|input_global_scale", "NVFP4"),
        ("weight_scale|input_scale", "fp8 or int8 with scales"),
    )
)
"""Ends of tensors' names that only weights of one quantisation have, the surest first."""


class CheckpointError(ConfigError):
    """A checkpoint that cannot be served. The message says what was given, what was looked for and what to do."""


def resolve(name: str, role: Literal["target", "draft"]) -> Path:
    """Return the folder of a checkpoint: `demo`, an existing folder, or a Hugging Face id.

    An id is downloaded if the cache does not hold it. The variables of huggingface_hub apply: HF_HUB_OFFLINE=1 makes
    no network call, HF_ENDPOINT names another hub. Raises CheckpointError.
    """
    if name == "demo":
        return DEMO / role
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{role} {name} is a file; give the folder that holds config.json and the weights")
    if not HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"{role} {name}: there is no such folder (looked for {folder.absolute()}), and it is not a Hugging Face "
            "id either; give a folder, an id such as Qwen/Qwen3-8B, or demo"
        )
    return _from_hub(name, role)


def _from_hub(name: str, role: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except GatedRepoError:
        reason = (
            f"{hub} asks for permission; accept the model's terms there and log in with `hf auth login` or HF_TOKEN"
        )
    except RepositoryNotFoundError:
        reason = (
            f"{hub} has no model of that name; check the spelling, or log in with `hf auth login` or HF_TOKEN if it is "
            "private"
        )
    except LocalEntryNotFoundError:
        reason = f"{hub} cannot be reached while {cache} does not hold it: check the network or HF_ENDPOINT, or give "
        reason += "the model's folder"
        if constants.is_offline_mode():
            reason = f"HF_HUB_OFFLINE is set while {cache} does not hold it; unset HF_HUB_OFFLINE for one start, or "
            reason += "give the model's folder"
    except Exception as error:  # the hub's client raises its HTTP library's errors, disk errors and its own
        reason = f"the download from {hub} failed: {error}"
    told = f"{role} {name}: there is no folder {Path(name).absolute()}, and {reason}"
    raise CheckpointError(f"{told}; did you mean {owner}/{name}?" if (owner := _owner(name)) else told)


def _owner(name: str) -> str:
    """Return the account of the hub that publishes models with such a name, or "" if it is unknown or given."""
    if "/" in name or not name.lower().startswith("qwen"):
        return ""
    return "z-lab" if "dflash" in name.lower() else "Qwen"


def check_files(folder: Path, need_tokenizer: bool) -> None:
    """Raise CheckpointError unless the folder's config, weights and (if needed) tokenizer are there and whole."""
    config = read_json(folder / "config.json")
    if not config.get("architectures") and not config.get("model_type"):
        raise CheckpointError(
            f"{folder / 'config.json'}: neither `architectures` nor `model_type` is given, so it is no model's "
            "config.json; give the folder of a Hugging Face model"
        )
    is_draft = "dflash_config" in config or "speculators_model_type" in config
    if need_tokenizer and is_draft:
        raise CheckpointError(f"{folder} is a DFlash draft: give it as --draft-model, and the model it is for as MODEL")
    if not need_tokenizer and not is_draft:
        raise CheckpointError(
            f"{folder} is no DFlash draft: its config.json has no dflash_config (architectures: "
            f"{config.get('architectures')})"
        )
    if need_tokenizer:
        try:
            family_of(config)
        except ConfigError as error:
            raise CheckpointError(f"{folder}: {error}") from None
    tensor_files(folder)
    if need_tokenizer and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{folder}: no tokenizer; looked for {', '.join(TOKENIZER_FILES)}; copy the tokenizer files of the model "
            "beside its weights"
        )


def check_length(folder: Path, max_model_len: int | None) -> None:
    """Raise CheckpointError for a --max-model-len that the folder's config.json does not have."""
    config = read_json(folder / "config.json") if max_model_len else {}
    limit = config.get("max_position_embeddings")
    ropes = [config.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    is_scaled = any(not isinstance(rope, dict) or "factor" in rope for rope in ropes)  # which the engine reads
    if max_model_len and isinstance(limit, int) and not is_scaled and not 2 <= max_model_len <= limit:
        raise CheckpointError(
            f"--max-model-len {max_model_len} is outside 2..{limit}: max_position_embeddings in "
            f"{folder / 'config.json'} is {limit}; a longer context needs rope_scaling of type yarn there"
        )


def count_numbers(folder: Path) -> int:
    """Return how many numbers the folder's tensors hold, two in a byte of mxfp4. Raises CheckpointError like
    `tensor_files`."""
    headers = [_read_header(file)[0] for file in set(tensor_files(folder).values())]
    return sum(
        math.prod(tensor["shape"]) * (2 if name.endswith("_blocks") else 1)
        for header in headers
        for name, tensor in header.items()
    )


def plain_name(stored: str) -> str:
    """Return a tensor's name without `model.` and `language_model.` before it, because files differ in these."""
    return _PREFIX.sub("", stored)


def quantised_tensor(names: Iterable[str]) -> str | None:
    """Return the reason why weights with these tensors are not read: one belongs to quantised weights. Else None.

    Names alone tell, because such a checkpoint may lack `quantization_config` in config.json.
    """
    names = sorted(names)
    for pattern, quantisation in _QUANTISED:
        if (name := next(filter(pattern.fullmatch, names), None)) is not None:
            return (
                f"tensor {name} is of weights that are quantised ({quantisation}), which are not supported yet; give "
                "the model in bfloat16"
            )
    return None


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Return tensor name -> shape. Raises CheckpointError like `tensor_files`."""
    files = tensor_files(folder)
    headers = {file: _read_header(file)[0] for file in set(files.values())}
    return {name: headers[file][name]["shape"] for name, file in files.items()}


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return tensor name -> the file that holds it. A single file goes before an index, like in Transformers.

    Raises CheckpointError, naming the file, unless all files are there and as long as their headers say.
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
    weight_map = read_json(index).get("weight_map")
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
    """Return the names of a file's tensors.

    Raises CheckpointError unless the tensors lie behind one another and the last one ends where the file does.
    """
    header, data_bytes = _read_header(file)
    end_of_last = 0
    for begin, end, name in sorted(_span(file, name, tensor) for name, tensor in header.items()):
        if begin != end_of_last:
            raise CheckpointError(
                f"{file}: tensor {name!r} begins at byte {begin} of the data, not at {end_of_last}; {_AGAIN}"
            )
        end_of_last = end
    if data_bytes != end_of_last:
        size = file.stat().st_size
        raise CheckpointError(
            f"{file}: {size} bytes where its header asks for {size - data_bytes + end_of_last}: the file is "
            f"{'cut off' if data_bytes < end_of_last else 'too long'}; {_AGAIN}"
        )
    return set(header)


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return tensor name -> description, and the number of bytes behind the header. Raises CheckpointError."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            text = stream.read(length) if length <= min(MAX_HEADER_BYTES, size - 8) else b""
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
    if start == b"version ":
        raise CheckpointError(f"{file} is a Git LFS pointer and not the weights; run `git lfs pull` in its folder")
    if len(start) < 8 or len(text) < length:
        raise CheckpointError(f"{file}: the safetensors header is cut off ({size} bytes); {_AGAIN}")
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{file}: the safetensors header cannot be read; {_AGAIN}") from None
    return header, size - 8 - length


def _span(file: Path, name: str, tensor: Any) -> tuple[int, int, str]:
    """Return (first byte, byte behind the last, name) of a tensor in the data. Raises CheckpointError."""
    if not isinstance(tensor, dict):
        raise CheckpointError(f"{file}: tensor {name!r} is not described; {_AGAIN}")
    dtype, shape, offsets = (tensor.get(key) for key in ("dtype", "shape", "data_offsets"))
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        described = f"dtype {dtype!r}, shape {shape!r} and data_offsets {offsets!r}"
        raise CheckpointError(f"{file}: tensor {name!r} has {described}, which safetensors does not have; {_AGAIN}")
    begin, end = offsets
    if 8 * (end - begin) != bits * math.prod(shape):
        raise CheckpointError(f"{file}: tensor {name!r} of {dtype} {shape} lies on {end - begin} bytes; {_AGAIN}")
    return begin, end, name


def _are_sizes(sizes: Any) -> TypeGuard[list[int]]:
    return isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; give the folder of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}; {_AGAIN}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: an object is wanted, not a {type(content).__name__}; {_AGAIN}")
    return content
