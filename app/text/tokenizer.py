"""Text to token ids and back, from the files of a target's folder: tokenizer, chat template, generation defaults.

This reads `tokenizer.json` with the tokenizers library and renders chat templates as Transformers does. Transformers
itself is not imported: it imports torch, which the API process must never do.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from app.text.chat_template import ChatTemplate
from app.text.parsers.qwen3 import MARKS

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """The folder's files cannot be used; the message names the file and says what to do."""


class PromptTooLong(ValueError):
    """A text that has more tokens than it may, by its length alone; `at_least` is how many it must have."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the text has at least {at_least} tokens")
        self.at_least = at_least


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """How to sample when a request says nothing: what generation_config.json recommends, else what changes nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Tokenizer:
    """The tokenizer of the target in `folder`. Safe to use from several threads.

    `largest_id` is the highest id it can make, and `model_vocab_size` what config.json says the model has, if it does.

    Raises TokenizerError or ChatTemplateError, naming the file, if one of its files cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{path} does not exist. Make it with Transformers: "
                f"AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises plain Exception.
            raise TokenizerError(f"{path} cannot be read: {error}") from None
        self.backend = _with_marks_as_text(self.backend)
        self.backend.no_truncation()
        self.backend.no_padding()
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.largest_id = max(vocabulary.values(), default=0)
        self._longest_token = max((len(token.encode()) for token in vocabulary), default=1) or 1
        settings_path, generation_path, config_path = (
            folder / name for name in ("tokenizer_config.json", "generation_config.json", "config.json")
        )
        settings, generation, config = (_read_json(path) for path in (settings_path, generation_path, config_path))
        special = {
            name: _content(settings_path, name, settings[name])
            for name in _SPECIAL_TOKENS
            if settings.get(name) is not None
        }
        eos_ids = _ids(generation_path, generation.get("eos_token_id"))
        eos_ids += _ids(
            settings_path, self.backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
        )
        self.eos_ids = sorted(set(eos_ids or _ids(config_path, config.get("eos_token_id"))))
        self.model_vocab_size = size if isinstance(size := config.get("vocab_size"), int) else None
        self.defaults = _defaults(generation_path, generation)
        self.chat_template = ChatTemplate.load(folder, settings, special)

    def encode(self, text: str, most: int | None = None, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the special tokens (BOS) that the tokenizer itself adds to a bare prompt.

        Raises PromptTooLong if the text must have more than `most` tokens. No token stands for more bytes than the
        longest has, so a text that is far too long is never tokenised. (A normalizer that throws text away could do
        with fewer tokens; it would have to throw away most of the text.)
        """
        if most is not None and (at_least := math.ceil(len(text.encode()) / self._longest_token)) > most:
            raise PromptTooLong(at_least)
        # `encode` keeps the interpreter's lock for as long as it works, which for a large text is seconds.
        return list(self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`, whole."""
        return str(self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """How the vocabulary spells each token; an id that it does not have is ""."""
        return [self.backend.id_to_token(token_id) or "" for token_id in token_ids]


def _with_marks_as_text(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Some files call the marks of reasoning and tool calls special: decoding would drop what the parser looks for."""
    if not any(token.special and token.content in MARKS for token in backend.get_added_tokens_decoder().values()):
        return backend
    files = json.loads(backend.to_str())
    for token in files["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in MARKS
    return tokenizers.Tokenizer.from_str(json.dumps(files))


_RECOMMENDED: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda value: 0 <= value < math.inf, "a number, 0 or more"),
    ("top_k", lambda value: -1 <= value < 2**31 and value == int(value), "a whole number, -1 or more"),
    ("top_p", lambda value: 0 < value <= 1, "a number above 0, at most 1"),
    ("min_p", lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    ("repetition_penalty", lambda value: 0.01 <= value <= 100, "a number from 0.01 to 100"),
)


def _defaults(path: Path, generation: dict[str, Any]) -> GenerationDefaults:
    values: dict[str, Any] = {}
    for name, allowed, wanted in _RECOMMENDED:
        if (value := generation.get(name)) is not None:
            if type(value) not in (int, float) or not allowed(value):
                raise TokenizerError(f"{path}: {name} must be {wanted}, not {value!r}")
            values[name] = max(0, int(value)) if name == "top_k" else float(value)
    if generation.get("do_sample") is False:
        values["temperature"] = 0.0
    return GenerationDefaults(**values)


def _ids(path: Path, value: Any) -> list[int]:
    """The value of eos_token_id, which may be one id, a list of them, or none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for item in ids:
        if type(item) is not int or not 0 <= item < 2**31:
            raise TokenizerError(f"{path}: eos_token_id must be a token id or a list of them, not {value!r}")
    return list(ids)


def _content(path: Path, name: str, token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise TokenizerError(f"{path}: {name} must be a token's text, not {token!r}")
    return content


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds no JSON object")
    return value
