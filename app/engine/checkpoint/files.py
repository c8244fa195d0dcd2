"""The files of a checkpoint: config.json, safetensors in one file or in shards, and the tokenizer's."""

import glob
import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from os.path import lexists
from pathlib import Path
from typing import Any, Literal, NamedTuple

from safetensors import SafetensorError, safe_open

from app.config.pairs import PAIRS
from app.engine.checkpoint.fields import fields, file_below
from app.engine.checkpoint.gguf import GGUF_FILE, GgufHeader, read_header
from app.engine.checkpoint.gguf_config import config_of, plain_name
from app.engine.checkpoint.gguf_folder import begins_as_gguf, choose, gguf_folder, is_gguf
from app.engine.checkpoint.quantised import refuse_formats
from app.engine.errors import UnsupportedError

Role = Literal["target", "draft", "tokenizer"]
DEMO = PAIRS["demo"].draft.parent
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = (
    "config.json generation_config.json model*.safetensors layers-*.safetensors model.safetensors.index.json "
    "mask_embedding.pt quant_model* optional/* tokenizer* vocab.* merges.txt special_tokens_map.json "
    "added_tokens.json chat_template* additional_chat_templates/*"
).split()
TOKENIZER_HUB_FILES = _HUB_FILES[_HUB_FILES.index("tokenizer*") :]
_PREFIX = re.compile(r"^((language_)?model\.)+")
_AGAIN = "download it again"
_FILE_NAME = re.compile(r"(?!\.\.?$)[\w.+ -]{1,200}")
"""A name in an index. It leads out of no folder, and the hub's client takes it for one file and no pattern."""
_SHARD = re.compile(r"(.*)-\d+-of-(\d{1,5})\.safetensors")
_NO_SHARD = re.compile(r"\.|consolidated|adapter_model")
"""Hidden files, the same weights in Mistral's own format, and adapters, which are no shards of a checkpoint."""
_MAX_JSON_MIB = 256
"""Ten times the largest tokenizer.json that is published."""


class StoredTensor(NamedTuple):
    """Where a tensor is stored: its file, its name there, its shape, and its dtype as safetensors or ggml name it."""

    file: Path
    name: str
    shape: list[int]
    dtype: str


class Checkpoint:
    """The files of a checkpoint's folder, each read once, on first use. A `folder` may be one
    file of safetensors, without a config: the description beside it counts. All properties raise UnsupportedError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._around = folder.parent if folder.is_file() else folder

    @cached_property
    def gguf(self) -> GgufHeader | None:
        """The header of the folder's GGUF file, or None without one."""
        file = self.folder / GGUF_FILE
        return read_header(file.resolve()) if file.exists() or file.is_symlink() else None

    @cached_property
    def config(self) -> dict[str, Any]:
        if self.gguf:
            return config_of(self.gguf)
        return {} if self.folder.is_file() else read_config(self.folder)

    @cached_property
    def description(self) -> dict[str, Any]:
        """msModelSlim's description of the tensors, or {} without one."""
        file = _first(self._around, "quant_model_description*.json")
        return read_json(file) if file else {}

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors by their names without `model.` and `language_model.` before them, because files differ in these.
        A single file goes before an index, as in Transformers. Raises UnsupportedError unless all files are there and
        whole, and if a name says that the weights are quantised in a way that is not read."""
        if header := self.gguf:
            named = ((plain_name(name), tensor) for name, tensor in header.tensors.items())
            return {name: StoredTensor(header.file, t.name, t.shape, t.type) for name, t in named if name}
        stored = _stored_tensors(self.folder)
        refuse_formats(self._around, {name: tensor.dtype for name, tensor in stored.items()}, self.description)
        return stored


def find_folder(
    name: str,
    role: Role,
    files: Sequence[str] | None = None,
    revision: str | None = None,
    *,
    has_tokenizer: bool = True,
) -> Path:
    """Return the folder of a checkpoint: the name of a pair, an existing folder, or a Hugging Face id. Raises
    UnsupportedError. Of an id `files`, or else all of a checkpoint, of the `revision`, a branch, tag or commit, are
    downloaded if the cache lacks them. Variables of huggingface_hub apply, like HF_HUB_OFFLINE.

    A target may be a GGUF file too: FILE.gguf, a folder or an id whose weights are GGUF, followed by `:Q4_K_M` to
    choose one of several, or by its file's name. `gguf_folder` makes a folder of it, as `has_tokenizer` says.
    """
    path, (base, wanted) = Path(name).expanduser(), _with_file(name)
    folder = Path(base).expanduser()
    is_local = name in PAIRS or path.exists() or folder.is_dir()
    if is_local and revision:
        given = f"{role} {name} is here, and only a Hugging Face id has a revision (here {revision})"
        raise UnsupportedError(f"{given}; leave it out, or give the id")
    if name in PAIRS:
        return _of_pair(name, role, files, has_tokenizer)
    if is_local:
        file = path if path.exists() and not path.is_dir() else _local_gguf(folder, wanted)
        return folder if file is None else _of_gguf(file, name, role, has_tokenizer)
    if not _HUB_ID.fullmatch(base):
        neither = f"there is no such folder or file (looked for {path.absolute()}), and it is no Hugging Face id either"
        raise UnsupportedError(f"{role} {name}: {neither}; give a folder, an id such as Qwen/Qwen3-8B, or demo")
    stored = _hub_gguf(base, name, role, wanted, revision) if wanted or files is None else None
    if stored is None:
        folder = _downloaded(base, name, role, files or _HUB_FILES, revision)
        if files is None and folder.is_dir() and not any(folder.glob("*.safetensors")):  # weights of other names
            folder = _downloaded(base, name, role, [*_HUB_FILES, "*.safetensors"], revision)
        return folder
    _refuse_role(stored, name, role)
    file = _downloaded(base, name, role, [glob.escape(stored)], revision) / stored
    if not file.exists():
        reason = f"the cache does not hold {stored}; unset HF_HUB_OFFLINE or check the network for one start"
        raise UnsupportedError(f"{role} {name}: {reason}")
    return _of_gguf(file, name, role, has_tokenizer)


def _of_pair(name: str, role: Role, files: Sequence[str] | None, has_tokenizer: bool) -> Path:
    """Return the folder of a pair's draft or target. Raises UnsupportedError."""
    pair = PAIRS[name]
    if role == "draft":
        return pair.draft
    try:
        return find_folder(_target_of(name), role, files, has_tokenizer=has_tokenizer)
    except UnsupportedError as error:
        if not pair.missing:
            raise
        raise UnsupportedError(f"{error}; or bring another target of {name}: `{pair.missing}`") from None


def _target_of(name: str) -> str:
    """Return a pair's target as a name that `find_folder` takes. Raises UnsupportedError for a file with other bytes
    than the draft was trained for."""
    pair = PAIRS[name]
    if isinstance(pair.target, Path):
        return str(pair.target)
    if (file := pair.target.file) is None:
        return pair.original
    try:
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UnsupportedError(f"target {name}: {file} cannot be read: {error.strerror or error}") from None
    if found != pair.target.sha256:
        wrong = f"target {name}: {file} has the SHA-256 {found}, and {pair.target.requirement} has {pair.target.sha256}"
        raise UnsupportedError(f"{wrong}; install it again: `{pair.target.command} --force-reinstall`")
    return str(file)


def _with_file(name: str) -> tuple[str, str]:
    """Return what stands before and after `:` in REPO:Q4_K_M, or the repository and file of OWNER/REPO/FILE.gguf."""
    if Path(name).expanduser().exists():
        return name, ""
    parts = name.split("/")
    if is_gguf(name) and len(parts) > 2 and _HUB_ID.fullmatch("/".join(parts[:2])):
        return "/".join(parts[:2]), "/".join(parts[2:])
    base, _, wanted = name.rpartition(":")
    return (base, wanted) if base and _FILE_NAME.fullmatch(wanted) else (name, "")


def _local_gguf(folder: Path, wanted: str) -> Path | None:
    """Return the GGUF file that is meant by a folder, or None if its weights are not GGUF."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise UnsupportedError(f"{folder} cannot be read: {error.strerror or error}") from None
    return folder / choose(names, wanted, str(folder)) if wanted or _is_of_gguf(names) else None


def _is_of_gguf(names: Sequence[str]) -> bool:
    """Return whether the weights among these files are GGUF. Some have a config.json beside them."""
    return any(map(is_gguf, names)) and not any(name.endswith((".safetensors", ".index.json")) for name in names)


def _of_gguf(file: Path, name: str, role: Role, has_tokenizer: bool) -> Path:
    """Return the folder made of a GGUF file. Raises UnsupportedError for a file that is none, or no target's."""
    if not is_gguf(file.name) and not begins_as_gguf(file):
        raise UnsupportedError(
            f"{role} {name} is a file; give the folder of config.json and safetensors, or a GGUF file"
        )
    _refuse_role(file.name, name, role)
    return gguf_folder(file, has_tokenizer=has_tokenizer)


def _refuse_role(file: str, name: str, role: Role) -> None:
    instead = {"draft": "drafts are safetensors", "tokenizer": "a tokenizer is a tokenizer.json"}
    if role in instead:
        raise UnsupportedError(f"{role} {name} is GGUF ({file}), and {instead[role]}; give their folder or id")


def _hub_gguf(name: str, given: str, role: Role, wanted: str, revision: str | None) -> str | None:
    """Return the GGUF file that is meant by a Hugging Face id, or None if its weights are not GGUF.

    Files that the cache has are chosen among where the hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        listed = HfApi().model_info(name, revision=revision).siblings or []
        names = [sibling.rfilename for sibling in listed]
    except (RepositoryNotFoundError, RevisionNotFoundError):
        names = []  # the download says why
    except Exception:  # no network, HF_HUB_OFFLINE, and errors of the HTTP library
        folder = _downloaded(name, given, role, [], revision)
        names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return choose(names, wanted, name) if (wanted and names) or _is_of_gguf(names) else None


def _downloaded(name: str, given: str, role: Role, files: Sequence[str], revision: str | None) -> Path:
    """Return the cached folder of a Hugging Face id, once it has these files. Messages have what was `given`."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub, cache, login = constants.ENDPOINT, constants.HF_HUB_CACHE, "log in with `hf auth login` or HF_TOKEN"
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*files]))
    except GatedRepoError:
        reason = f"{hub} asks for permission; accept the model's terms there and {login}"
    except RepositoryNotFoundError:
        reason = f"{hub} has no model of that name; check the spelling, or {login} if it is private"
    except RevisionNotFoundError:
        reason = f"{hub} has no revision {revision} of it; give a branch, tag or commit that is there"
    except LocalEntryNotFoundError:
        reason = f"{hub} cannot be reached while {cache} does not hold it: check the network or HF_ENDPOINT"
        if constants.is_offline_mode():
            reason = f"HF_HUB_OFFLINE is set while {cache} does not hold it; unset HF_HUB_OFFLINE for one start"
        reason += ", or give the model's folder"
    except Exception as error:  # the hub's client also raises errors of its HTTP library and of the disk
        reason = f"the download from {hub} failed: {error}"
    if "/" not in name and name.lower().startswith("qwen"):
        reason += f"; did you mean {'z-lab' if 'dflash' in name.lower() else 'Qwen'}/{name}?"
    path = Path(given).expanduser().absolute()
    file, folder = f"there is no file {path}, and {reason}", f"there is no folder {path}, and {reason}"
    raise UnsupportedError(f"{role} {given}: {file if is_gguf(given) else folder}")


def find_file_of(tensor: str, name: str) -> Path:
    """Return the file of safetensors that holds a tensor of a checkpoint, named as for `find_folder`, or the folder if
    its index names none. Of an id only the index and this file are downloaded. Raises UnsupportedError."""
    single, index = "model.safetensors", "model.safetensors.index.json"
    folder = find_folder(name, "target", (index,))
    homes = {} if (folder / single).is_file() else fields(read_json(folder / index, or_empty=True), "weight_map")
    file = str(next((home for stored, home in homes.items() if _PREFIX.sub("", stored) == tensor), single))
    if not _FILE_NAME.fullmatch(file):
        raise UnsupportedError(f"{folder / index}: {file!r:.200} is not the name of a file in its folder; {_AGAIN}")
    path = find_folder(name, "target", (file,)) / file
    return path if path.is_file() else path.parent


def read_json(file: Path, *, or_empty: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file, or with `or_empty` {} if the file is missing. Raises UnsupportedError."""
    if or_empty and not file.is_file():
        return {}
    if file.exists():
        if not file.is_file():  # reading a FIFO or a device may never end
            raise UnsupportedError(f"{file} is no file; {_AGAIN}")
        if (size := file.stat().st_size >> 20) > _MAX_JSON_MIB:
            raise UnsupportedError(f"{file} has {size} MiB, and at most {_MAX_JSON_MIB} are read; {_AGAIN}")
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
        model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        ids = vocabulary if isinstance(vocabulary, dict) else {}
        for token in added if isinstance(added, list) else ():
            if isinstance(token, dict) and token.get("content") == text:
                ids[text] = token.get("id")
        ids |= read_json(folder / "added_tokens.json", or_empty=True)
        if type(ids.get(text)) is int:
            return int(ids[text])
    return None


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    is_given = folder.is_file()
    single = _first(folder, "quant_model_weight*.safetensors") or folder / "model.safetensors"
    if is_given:
        folder, single = folder.parent, folder
    index = _first(folder, "quant_model_weight*.safetensors.index.json") or folder / "model.safetensors.index.json"
    is_shard = not is_given and bool(_SHARD.fullmatch(single.name))
    if single.is_file() and not is_shard and not index.name.startswith("quant"):
        headers = {single.name: _read_header(single)}
        weight_map = dict.fromkeys(headers[single.name], single.name)
    elif (is_shard or not lexists(single)) and not lexists(index) and (shards := _shards(folder)):
        headers = {shard: _read_header(folder / shard) for shard in shards}
        weight_map = _merged(folder, headers)
    else:
        weight_map = _weight_map(folder, single, index)
        headers = {shard: _read_header(folder / shard) for shard in sorted(set(weight_map.values()))}
    stored: dict[str, StoredTensor] = {}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise UnsupportedError(f"{folder / shard}: no tensor {name}, which the index says is here; {_AGAIN}")
        plain = _PREFIX.sub("", name)
        if plain in stored:
            both = f"{stored[plain].file.name} and {shard}"
            raise UnsupportedError(f"{folder}: two tensors are called {plain} after their prefixes, in {both}")
        stored[plain] = StoredTensor(folder / shard, name, *headers[shard][name])
    return stored


def _shards(folder: Path) -> list[str]:
    """Return the names of a folder's safetensors, as vLLM does without an index. Raises UnsupportedError if numbers in
    them say that there are more."""
    names = sorted(path.name for path in folder.glob("*.safetensors") if not _NO_SHARD.match(path.name))
    found = Counter(numbered.groups() for numbered in map(_SHARD.fullmatch, names) if numbered)
    for (base, count), here in found.items():
        if here < int(count):
            raise UnsupportedError(f"{folder}: {here} of {int(count)} shards {base}-...-of-{count} are here; {_AGAIN}")
    return names


def _merged(folder: Path, headers: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Return tensor name -> the name of its file. Raises UnsupportedError for a tensor that two files have."""
    weight_map: dict[str, str] = {}
    for shard, names in headers.items():
        if both := weight_map.keys() & names:
            where = f"{weight_map[min(both)]} and {shard} both have {min(both)}, and no index says which one counts"
            raise UnsupportedError(f"{folder}: {where}; keep one of them")
        weight_map |= dict.fromkeys(names, shard)
    return weight_map


def _first(folder: Path, pattern: str) -> Path | None:
    return min(folder.glob(pattern), default=None)


def find_tensor(stored: Mapping[str, StoredTensor], folder: Path, name: str, shape: Sequence[int]) -> StoredTensor:
    """Return a stored tensor. Raises UnsupportedError if it is missing, or has another shape than config.json says."""
    if name not in stored:
        raise UnsupportedError(f"{folder}: tensor {name} is missing; {_AGAIN}")
    if stored[name].shape != list(shape):
        both = f"{name} has shape {stored[name].shape}, but config.json wants {list(shape)}"
        raise UnsupportedError(f"{folder}: tensor {both}; config.json and weights are of different models")
    return stored[name]


def _weight_map(folder: Path, single: Path, index: Path) -> dict[str, str]:
    """Return tensor name -> the name of its shard, by the index of a folder without a `single` file."""
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
    if astray := [shard for shard in shards if not _FILE_NAME.fullmatch(shard)]:
        raise UnsupportedError(f"{index}: {astray[0]!r:.200} is not the name of a file in its folder; {_AGAIN}")
    if missing := [shard for shard in shards if not file_below(folder, shard)]:
        listed = ", ".join(missing[:20]) + (", ..." if len(missing) > 20 else "")
        found = f"{len(missing)} of {len(shards)} shards named by {index.name} are missing: {listed}"
        raise UnsupportedError(f"{folder}: {found}; download them again")
    return {name: str(shard) for name, shard in weight_map.items()}


def _read_header(file: Path) -> dict[str, tuple[list[int], str]]:
    """Return tensor name -> shape and dtype. Raises UnsupportedError unless the file is whole."""
    if not file.is_file():  # reading a FIFO or a device may never end
        raise UnsupportedError(f"{file} is no file; {_AGAIN}")
    try:
        with safe_open(file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
            return {name: (stored.get_shape(), stored.get_dtype()) for name, stored in slices.items()}
    except OSError as error:
        raise UnsupportedError(f"{file} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        reason = f"is cut off or damaged ({file.stat().st_size} bytes: {error}); {_AGAIN}"
        with file.open("rb") as stream:
            if stream.read(8) == b"version ":
                reason = "is a Git LFS pointer and not the weights; run `git lfs pull` in its folder"
        raise UnsupportedError(f"{file} {reason}") from None
