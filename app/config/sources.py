"""Settings from their sources: flags > DFLASH_* environment > YAML file (`--config FILE`) > defaults.

Every value keeps the spelling it came with, so an error names the flag, the variable or the key that the user wrote.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from app.config.aliases import PEER_FLAGS
from app.config.engine import MODEL, SPECULATION
from app.config.error import ConfigError, nearest
from app.config.pairs import draft_name, notes_of
from app.config.settings import ENGINE_SETTINGS, ENV_PREFIX, SERVER_SETTINGS, Config, env_name, setting
from app.config.values import UNREADABLE, parse_json

SETTINGS: dict[str, Any] = {
    **SERVER_SETTINGS,
    **ENGINE_SETTINGS,
    "config": setting(MODEL, None, "YAML file with the same names: `max_num_seqs: 8` (default: none)", metavar="PATH"),
    "hf_file": setting(
        MODEL, None, "GGUF file of MODEL, a Hugging Face id, as in llama-server (default: the only one)", metavar="NAME"
    ),
    "speculative_config": setting(
        SPECULATION,
        None,
        'vLLM\'s: {"method": "dflash", "model": PATH, "num_speculative_tokens": N} (default: none)',
        metavar="JSON",
    ),
}
"""Name -> pydantic FieldInfo. The last three are not settings themselves, but bring others."""
SECRETS = {"api_key", "admin_key"}
UPPER_BOUNDS = {"max_num_batched_tokens"}
"""Settings of which the smallest counts, if several flags give one: llama-server's -b and -ub stand side by side."""
_OF_DRAFTS = {"draft_revision"} | {
    name for name, field in SETTINGS.items() if field.json_schema_extra["group"] == SPECULATION
} - {"speculation"}
"""Settings that do nothing without a draft."""
EXCLUSIVE = {"kv_cache_memory": "memory_utilization", "memory_utilization": "kv_cache_memory"}


class GivenSetting(NamedTuple):
    """A setting as a user gave it: its spelling there, its field, its value. Without a field it sets nothing."""

    spelling: str
    field: str
    value: Any


def load_config(flags: Iterable[GivenSetting] = ()) -> Config:
    """Settle flags, environment and YAML file. Raises ConfigError naming the flag, variable or key at fault."""
    notes, given_flags, environment, file = list[str](), list(flags), list(_environment()), list[GivenSetting]()
    settings = _put_beneath(_put_beneath({}, given_flags, notes), environment, notes)
    if path := settings.pop("config", None):
        file = list(_yaml_file(Path(path.value)))
        settings = _put_beneath(settings, file, notes)
    if file_name := settings.pop("hf_file", None):
        settings["model"] = _with_file(settings.get("model"), file_name)
    try:
        config = Config.of(**{field: given.value for field, given in settings.items()}, notes=notes)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        shown = "" if field in SECRETS else f" {first['input']}"
        reason = first["msg"].removeprefix("Value error, ")
        message = f"{settings[field].spelling}{shown}: {reason[0].lower()}{reason[1:]}"
        raise ConfigError(message, "see `dflash-server serve --help`") from None
    lacks_draft = config.speculation and not draft_name(config.model, config.draft_model)
    for given in (*given_flags, *environment, *file):
        if given.field == "speculative_config" and lacks_draft:
            raise ConfigError(f"{given.spelling} names no draft", 'give its "model", or --draft-model')
    for given in settings.values():
        try:
            json.dumps(given.value, default=str, ensure_ascii=False).encode()  # an argument's bytes may be no UTF-8
        except (UnicodeError, TypeError, *UNREADABLE) as error:
            raise ConfigError(f"{given.spelling}: {' '.join(str(error).split())}") from None
    chosen = notes_of(config.model, is_default="model" not in settings)
    idle = _OF_DRAFTS & settings.keys() if lacks_draft or not config.speculation else set()
    of_drafts = sorted(f"{settings[name].spelling}: nothing to set, no draft is served" for name in idle)
    return config.model_copy(update={"notes": (*chosen, *config.notes, *of_drafts)})


def _with_file(model: GivenSetting | None, file: GivenSetting) -> GivenSetting:
    """Return the MODEL that is a file of a repository. It goes before a quantisation, as in llama-server."""
    if model is None:
        raise ConfigError(
            f"{file.spelling} {file.value} is a file of no repository", "give its Hugging Face id as MODEL"
        )
    return model._replace(value=f"{str(model.value).partition(':')[0]}/{file.value}")


def _environment() -> Iterator[GivenSetting]:
    """Yield the DFLASH_* variables that are set. Raises ConfigError for an unknown one."""
    foreign = _kubernetes_variables()
    known = {env_name(field) for field in SETTINGS}
    for name in sorted(os.environ):
        if name.startswith(ENV_PREFIX) and name not in known and name not in foreign:
            raise _unknown("environment variable", name, SETTINGS, name.removeprefix(ENV_PREFIX).lower(), env_name)
    values = {name.upper(): value for name, value in os.environ.items() if name not in foreign}
    for field in SETTINGS:
        if value := values.get(env_name(field)):
            yield GivenSetting(env_name(field), field, value)


def _kubernetes_variables() -> set[str]:
    """Return the DFLASH_* variables that Kubernetes sets in every pod for a Service whose name begins with `dflash`."""
    services = [n.removesuffix("_SERVICE_HOST") for n in os.environ if re.fullmatch(r"DFLASH.*_SERVICE_HOST", n)]
    names = {name for service in services for name in os.environ if name.startswith(f"{service}_SERVICE_")}
    names |= {name for service in services for name in os.environ if name.startswith(f"{service}_PORT_")}
    return names | {f"{s}_PORT" for s in services if "://" in os.environ.get(f"{s}_PORT", "")}


def _yaml_file(path: Path) -> Iterator[GivenSetting]:
    """Yield the settings of a file. Its keys are the fields, and `-` may stand for `_`."""
    import yaml  # only a start with a file pays for it

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from None
    except (yaml.YAMLError, *UNREADABLE) as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"--config {path}: a mapping of names to values is wanted, not a {type(content).__name__}")
    yield from settings_of(content or {}, f" in {path}", SETTINGS.keys() - {"config"})


def settings_of(
    content: Mapping[str, Any], where: str = "", known: Collection[str] = SETTINGS.keys()
) -> Iterator[GivenSetting]:
    """Yield the settings of a mapping, in whose keys `-` may stand for `_`. Raises ConfigError for an unknown one."""
    for key, value in content.items():
        field = str(key).replace("-", "_")
        if field not in known:
            raise _unknown("key", f"{key}{where}", known, field, str)
        if value is not None:
            yield GivenSetting(f"{field}{where}", field, value)


def _unknown(kind: str, shown: str, known: Iterable[str], field: str, spell: Callable[[str], str]) -> ConfigError:
    """Return the error for an unknown setting. It hints at our name for another project's, or at the nearest."""
    peers = {name.lstrip("-").replace("-", "_"): peer for peer in PEER_FLAGS for name in peer.names}
    if peer := peers.get(field):
        hint = f"it is {spell(peer.field)} here" if peer.field else f"{peer.ours}: {peer.note}"
    else:
        near = nearest(field, known)
        hint = f"did you mean {spell(near)}?" if near else "`dflash-server serve --help` lists them all"
    return ConfigError(f"unknown {kind} {shown}", hint)


def _put_beneath(
    above: dict[str, GivenSetting], source: Iterable[GivenSetting], notes: list[str]
) -> dict[str, GivenSetting]:
    """Return the settings of a further source beneath those `above`, which win, also over the other memory limit.

    What sets nothing is added to `notes`. Raises ConfigError if the source contradicts itself.
    """
    beneath: dict[str, GivenSetting] = {}
    for given in chain.from_iterable(map(_spread, source)):
        if not given.field:
            notes.append(f"{given.spelling}: {given.value}")
            continue
        before = beneath.get(given.field)
        if before is not None and isinstance(before.value, list) and isinstance(given.value, list):
            given = given._replace(value=before.value + given.value)
        elif before is not None and given.field in UPPER_BOUNDS:
            given = min(before, given, key=_bound)
        elif before is not None and isinstance(before.value, dict) and isinstance(given.value, dict):
            given = given._replace(value=before.value | given.value)
        elif before is not None and before.spelling != given.spelling and str(before.value) != str(given.value):
            values = "" if given.field in SECRETS else f": {before.value} and {given.value}"
            raise ConfigError(
                f"{before.spelling} and {given.spelling} contradict each other{values}", "give one of them"
            )
        beneath[given.field] = given
    if beneath.keys() >= EXCLUSIVE.keys():
        first, second = (beneath[field].spelling for field in EXCLUSIVE)
        raise ConfigError(f"{first} and {second} exclude each other", "give one of them")
    return {field: given for field, given in beneath.items() if EXCLUSIVE.get(field) not in above} | above


def _bound(given: GivenSetting) -> int:
    """Return the number that a setting gives. One that is none is the smallest, so that it is refused later."""
    return int(text) if (text := str(given.value)).isdecimal() else -1


def _spread(given: GivenSetting) -> Iterator[GivenSetting]:
    """Yield the setting, or the settings inside a speculative config: JSON text, or a mapping in a YAML file."""
    if given.field != "speculative_config":
        yield given
        return
    spelling, config = given.spelling, given.value
    example = """for example '{"method": "dflash", "model": "PATH", "num_speculative_tokens": 15}'"""
    try:
        config = parse_json(config) if isinstance(config, str) else config
    except ValueError as error:
        raise ConfigError(f"{spelling}: {error}", example) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{spelling}: an object is wanted, not {config!r}", example)
    beginning = "--speculative-config."
    peers = {name.removeprefix(beginning): peer for peer in PEER_FLAGS for name in peer.names if beginning in name}
    for key, value in config.items():
        peer = peers.get(str(key).replace("_", "-"))
        if not peer:
            hint = f"known are {', '.join(peers).replace('-', '_')}"
            raise ConfigError(f"{spelling}: unknown key {key!r}", hint)
        if value is not None and (fault := peer.fault(f"{spelling}: {key}", str(value))):
            raise ConfigError(fault)
        if value is not None and peer.kind != "only":
            yield GivenSetting(f"{spelling} ({key})", peer.field, value if peer.field else peer.read(value))
