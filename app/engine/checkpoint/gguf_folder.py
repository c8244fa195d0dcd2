"""A GGUF file as a folder of Hugging Face's files, kept in the user's cache, and the choice of one among several."""

import atexit
import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from app.engine.cache_folder import WORK, remove_if_old, user_folder, work_folder
from app.engine.checkpoint.fields import naming
from app.engine.checkpoint.gguf import GGUF_FILE, read_header
from app.engine.checkpoint.gguf_config import config_of
from app.engine.checkpoint.gguf_text import origin, text_files, unread_defaults
from app.engine.errors import UnsupportedError

_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_QUANTISATION = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d|TQ\d|F16|F32|BF16|FP\d|MXFP\d|NVFP\d)\w*)$", re.IGNORECASE)
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_LISTED = 40
_NOTES = "notes.json"
_MADE = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}(-bare)?")
"""Names of kept folders. Whatever else a user puts beside them stays."""
_Kind = TypeVar("_Kind", list[Any], dict[str, Any])


def is_gguf(name: str) -> bool:
    """Return whether a file is GGUF by its name."""
    return name.lower().endswith(".gguf")


def begins_as_gguf(file: Path) -> bool:
    """Return whether a file is GGUF by its first bytes. Ollama's have no name that says so."""
    if not file.is_file():
        return False
    with suppress(OSError), file.open("rb") as stream:
        return stream.read(4) == b"GGUF"
    return False


def choose(names: Sequence[str], wanted: str, where: str) -> str:
    """Return the GGUF file among `names` that is `wanted`: by its quantisation, as in Q4_K_M, or by its name, without
    regard to case. With "" it is the only one. Raises UnsupportedError with a list of those of `where`."""
    models = [name for name in names if is_gguf(name) and not _NO_MODEL.search(PurePosixPath(name).name)]
    labels = {name: _label(name) for name in sorted(models)}
    meant = wanted.lower()
    if not wanted:
        found = [*labels]
    elif is_gguf(wanted):
        found = [name for name in names if name.lower() == meant]
    else:
        found = [name for name, label in labels.items() if label.lower() == meant]
    if parts := [name for name in found if _PART.search(PurePosixPath(name).stem)]:
        count = int(_PART.findall(PurePosixPath(parts[0]).stem)[0][1])
        if len(found) == 1 or len({_label(name) for name in found}) == 1:
            merge = "download them all, merge them with `llama-gguf-split --merge FIRST-PART MERGED.gguf`"
            raise UnsupportedError(f"{where}: {parts[0]} is one of {count} parts; {merge}, and give MERGED.gguf")
    if len(found) == 1:
        return found[0]
    suffixes = list(dict.fromkeys(labels.values()))
    if found and wanted:
        listed = ", ".join(found[:_LISTED])
        raise UnsupportedError(
            f"{where}: {wanted} is the quantisation of {len(found)} files; give one by name: {listed}"
        )
    listed = ", ".join(suffixes[:_LISTED]) or "none"
    if wanted:
        raise UnsupportedError(f"{where} has no GGUF file {wanted}; it has {listed}")
    if not found:
        raise UnsupportedError(f"{where} has no GGUF file of a model")
    raise UnsupportedError(
        f"{where} has {len(found)} GGUF files; give one as {where}:{suffixes[0]}; there are {listed}"
    )


def gguf_folder(file: Path, *, has_tokenizer: bool = True) -> Path:
    """Return a folder with a link to the file, and config.json, tokenizer.json and their like of what its header says.

    Without `has_tokenizer` the file's own tokenizer is not read. Raises UnsupportedError for a file that cannot be
    served. A folder is kept until its file is gone or another.
    """
    source = file.resolve()
    name = f"{_key(source)}-{_release()}" + ("" if has_tokenizer else "-bare")
    kept = user_folder("gguf")
    if kept and _is_whole(kept / name):
        return kept / name
    header = read_header(file)
    config = config_of(header)
    with naming(str(file)):
        contents = {"config.json": config} | text_files(header.metadata, has_tokenizer=has_tokenizer)
        notes = [note for note in (origin(header.metadata), unread_defaults(header.metadata)) if note]
    files = {name: json.dumps(content, ensure_ascii=False).encode() for name, content in contents.items()}
    sizes = {name: len(content) for name, content in files.items()}
    files[_NOTES] = json.dumps({"notes": notes, "sizes": sizes}).encode()
    reason = "there is no safe folder for caches"
    if kept:
        _evict(kept)
        try:
            return _written(files, source, kept, name)
        except OSError as error:
            reason = f"{kept} cannot be written ({error.strerror or error})"
    print(
        f"{reason}, so each start reads {file} anew: set XDG_CACHE_HOME to a folder of this user only", file=sys.stderr
    )
    try:
        folder = Path(tempfile.mkdtemp(prefix="dflash-gguf-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return _written(files, source, folder, name)
    except OSError as error:
        why = f"{reason}, and neither can {tempfile.gettempdir()} ({error.strerror or error})"
        raise UnsupportedError(f"{file}: {why}; free some space there, or set XDG_CACHE_HOME") from None


def notes_of(folder: Path) -> list[str]:
    """Return what the log says of the GGUF file of a folder, [] for another folder."""
    return [*map(str, _kept(folder, "notes", list))]


def weights_of(folder: Path) -> Path:
    """Return the GGUF file that a folder was made of, or another folder itself."""
    link = folder / GGUF_FILE
    return link.readlink() if link.is_symlink() else folder


def _label(name: str) -> str:
    """Return the quantisation that a file's name ends with, else the name."""
    stem = _PART.sub("", PurePosixPath(name).stem)
    found = _QUANTISATION.search(stem)
    return found[1] if found else PurePosixPath(name).name


def _key(source: Path) -> str:
    """Return a hash of a file's place, size and time, or "" if it is gone."""
    try:
        found = source.stat()
    except OSError:
        return ""
    facts = f"{source}\0{found.st_size}\0{found.st_mtime_ns}"
    return hashlib.sha256(facts.encode(errors="surrogateescape")).hexdigest()[:32]


@cache
def _release() -> str:
    """Return a hash of the code that makes a folder, because another release may make another one of the same file."""
    sources = sorted(Path(__file__).parent.glob("gguf*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:8]


def _is_whole(folder: Path) -> bool:
    """Return whether a folder has all its files, as long as they were written. Cleaners of caches may remove some, and
    a host that loses power or room leaves some empty."""
    sizes = _kept(folder, "sizes", dict)
    with suppress(OSError, ValueError):  # damaged notes may have a name that no file can have
        whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
        return bool(sizes) and whole and (folder / GGUF_FILE).is_symlink()
    return False


def _kept(folder: Path, field: str, kind: type[_Kind]) -> _Kind:
    """Return what a folder's notes say, empty for another folder or notes that are damaged."""
    with suppress(OSError, ValueError, RecursionError):
        notes = json.loads((folder / _NOTES).read_bytes())
        if isinstance(notes, dict) and isinstance(value := notes.get(field), kind):
            return value
    return kind()


def _written(files: dict[str, bytes], source: Path, parent: Path, name: str) -> Path:
    """Write a folder. Another server may write the same one at the same time."""
    folder = parent / name
    with work_folder(parent) as work:
        made = Path(work) / name
        made.mkdir()
        (made / GGUF_FILE).symlink_to(source)
        for file, content in files.items():
            (made / file).write_bytes(content)
        if folder.is_dir() and not _is_whole(folder):
            shutil.rmtree(folder)
        try:
            made.rename(folder)
        except OSError:
            if not _is_whole(folder):
                raise
    return folder


def _evict(kept: Path) -> None:
    """Remove folders whose file is gone or another one now, and what killed processes left."""
    with suppress(OSError):
        for folder in [*kept.iterdir()]:
            link = folder / GGUF_FILE
            is_stale = not link.is_symlink() or _key(link.readlink()) != folder.name.partition("-")[0]
            if folder.name.startswith(WORK) or (_MADE.fullmatch(folder.name) and is_stale):
                with suppress(OSError):  # another server may remove it too
                    remove_if_old(folder)
