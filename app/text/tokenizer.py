"""Tokenizer of a target, from the files of its folder, with its chat template and its sampling defaults.

Transformers is not imported, because it imports torch, and the API process must not.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tokenizers
from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from app.config.error import ConfigError
from app.engine.checkpoint.files import read_json
from app.text.chat_template import ChatTemplate
from app.text.parsers import END_THINK, MARKS, THINK, qwen3

_READ_BY_TEMPLATES = {THINK, END_THINK, *qwen3.FORMAT.marks}
"""Tokens that chat templates look for in messages, where they have a meaning."""
_NONCHARACTERS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
"""Code points that Unicode leaves to programs, so no token has one."""
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
_SEARCHED_AT_ONCE = 2**14  # characters; `re` holds the interpreter while it searches them
_MIN_END = 2**8  # characters of a prompt that are searched for its last added token
_MIN_BEGINNING = 2**16  # characters of a text that are encoded to see if the whole is too long

_OVERRIDES = "--override-generation-config"


class PromptTooLong(ValueError):
    """A text whose length already shows that it has too many tokens, `at_least` that many."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the text has at least {at_least} tokens")
        self.at_least = at_least


@dataclass(frozen=True, config=ConfigDict(strict=True))
class GenerationDefaults:
    """Sampling parameters that a request leaves out: from generation_config.json, else neutral."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31, strict=False), AfterValidator(lambda top_k: max(0, top_k))] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0


class Rendered(NamedTuple):
    """A prompt's text, the `mark` for `Tokenizer.encode`, "" without one, and whether system messages were joined."""

    text: str
    mark: str
    is_joined: bool


class Tokenizer:
    """Tokenizer of the target in `folder`, with the chat template in a file or in the folder. Safe in several threads.

    `tokenizer_folder` has the tokenizer and the chat template if they are not the target's own. The sampling defaults
    are those of generation_config.json, if it `has_defaults`, with `overrides` over them; ends of text stay.

    `max_id` is the highest id that it can make, and `special_tokens` has the texts of BOS, EOS and their like by name.
    `model_vocab_size`, `model_type` and `architectures` come from config.json, and `max_new_tokens` from
    generation_config.json; each may be None.
    The constructor raises ConfigError, which names the file at fault. It reads config.json if `config` is None.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any] | None = None,
        *,
        tokenizer_folder: Path | None = None,
        has_defaults: bool = True,
        overrides: Mapping[str, Any] | None = None,
        chat_template: Path | None = None,
    ) -> None:
        texts = tokenizer_folder or folder
        path = texts / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{path} does not exist. Make it with Transformers: "
                f"AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises plain Exception.
            raise ConfigError(f"{path} cannot be read: {error}") from None
        settings = read_json(texts / "tokenizer_config.json", or_empty=True)
        self.special_tokens = special = _special_tokens(texts, settings)
        _add_listed_tokens(self.backend, texts, settings, set(special.values()))
        self._control = _ControlTokens(self.backend)
        added = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        headers = sorted(token for token in added - _READ_BY_TEMPLATES if token.strip())
        self._header = re.compile("|".join(map(re.escape, headers)) or "(?!)")
        self.backend = _with_marks_as_text(self.backend)
        self.backend.no_truncation()
        self.backend.no_padding()
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.max_id = max(vocabulary.values(), default=0)
        self._max_token_bytes = max((len(token.encode()) for token in vocabulary), default=1) or 1
        generation_path, config_path = folder / "generation_config.json", folder / "config.json"
        generation = read_json(generation_path, or_empty=True)
        config = read_json(config_path, or_empty=True) if config is None else config
        text_config = inner if isinstance(inner := config.get("text_config"), dict) else {}
        eos_id = self.backend.token_to_id(special.get("eos_token", ""))
        self.eos_ids = sorted(
            {
                *_ids(generation_path, generation.get("eos_token_id")),
                *_ids(config_path, config.get("eos_token_id")),
                *_ids(config_path, text_config.get("eos_token_id")),
                *([] if eos_id is None else [eos_id]),
            }
        )
        self.model_vocab_size = size if isinstance(size := config.get("vocab_size"), int) else None
        self.model_type = config.get("model_type")
        self.architectures = config.get("architectures")
        sampling = generation if has_defaults else {}
        if overrides:
            _check_overrides(overrides)
            is_sampled = {"do_sample": None} if "temperature" in overrides else {}
            sampling = {**sampling, **is_sampled, **overrides}
        self.defaults = _defaults(str(generation_path), sampling)
        self.max_new_tokens = most if type(most := sampling.get("max_new_tokens")) is int and most > 0 else None
        self.chat_template, self._template_with_tools = ChatTemplate.load(texts, settings, special, chat_template)

    def template_for(self, has_tools: bool) -> ChatTemplate:
        """Return the chat template, or for conversations that offer tools the one named `tool_use`, if there is one."""
        return self._template_with_tools if has_tools else self.chat_template

    def render(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, **options: Any
    ) -> Rendered:
        """Return the prompt of a conversation, as `ChatTemplate.render_joining` makes it. Raises ChatTemplateError.

        Where messages or tools spell a control token, a mark is in the prompt, within each spelling.
        """
        template, mark = self.template_for(bool(tools)), ""
        texts = list(_texts((messages, tools)))
        if any(next(self._control.spelt(text), None) is not None for text in texts):
            mark = next((mark for mark in _NONCHARACTERS if not any(mark in text for text in texts)), _NONCHARACTERS[0])
            messages, tools = _rewritten((messages, tools), lambda text: self._control.marked(text, mark))
        text, is_joined = template.render_joining(messages, tools=tools, **options)
        return Rendered(text, mark, is_joined)

    def end_of(self, prompt: str) -> str:
        """Return what follows a prompt's last added token, like the assistant's header, but for reasoning and calls.

        There only a template writes, unless it has no such tokens.
        """
        length = _MIN_END
        while True:
            tail = prompt[-length:]
            *_, end = 0, *(found.end() for found in self._header.finditer(tail))
            if end or length >= len(prompt):
                return tail[end:]
            length *= 4

    def encode(
        self, text: str, max_tokens: int | None = None, *, add_special_tokens: bool = True, mark: str = ""
    ) -> list[int]:
        """Return the ids of a text, with the special tokens (BOS) that the tokenizer adds to a bare prompt.

        What has the `mark` within is no control token but text, of which the mark is no part.
        Raises PromptTooLong, before most of the work, if the text must have more than `max_tokens` tokens. One bound is
        the longest token of the vocabulary in bytes. It is wrong only for a normalizer that removes most of a text.
        The other is a beginning of the text that alone has twice as many.
        """
        plain = text.replace(mark, "") if mark else text
        if max_tokens is not None and (at_least := math.ceil(len(plain.encode()) / self._max_token_bytes)) > max_tokens:
            raise PromptTooLong(at_least)
        length = len(text) if max_tokens is None else max(4 * max_tokens, _MIN_BEGINNING)
        while True:
            token_ids = self._encode_marked(text[:length], mark, add_special_tokens)
            if length >= len(text):
                return token_ids
            if max_tokens is not None and (at_least := len(token_ids) // 2) > max_tokens:
                raise PromptTooLong(at_least)
            length *= 4

    def _encode_marked(self, text: str, mark: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text without the tokens of its marks. If a token has a mark and other characters, the
        tokenizer cannot tell them apart, and the marks are ignored."""
        if mark and mark in text:
            encoding = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
            pieces = [text[start:end] for start, end in encoding.offsets]
            if all(piece == mark or mark not in piece for piece in pieces):
                return [token_id for token_id, piece in zip(encoding.ids, pieces, strict=True) if piece != mark]
            text = text.replace(mark, "")
        # `encode` holds the interpreter's lock while it works, which is seconds for a large text.
        return list(self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the whole text of `token_ids`."""
        # `decode` holds the interpreter's lock too.
        return self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """Return the vocabulary's spelling of each token, "" for an unknown id."""
        return [self.backend.id_to_token(token_id) or "" for token_id in token_ids]


class _ControlTokens:
    """The special tokens of a tokenizer that only a chat template may write."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        written = sorted(token for token in special - _READ_BY_TEMPLATES if len(token) > 1)
        self._longest = max(map(len, written), default=0)
        # A spelling that begins within another is found too.
        self._spelling = re.compile(f"(?={'|'.join(map(re.escape, written))})") if written else None

    def spelt(self, text: str) -> Iterator[int]:
        """Yield where the text spells a control token."""
        if self._spelling is None:
            return
        for start in range(0, len(text), _SEARCHED_AT_ONCE):
            for found in self._spelling.finditer(text[start : start + _SEARCHED_AT_ONCE + self._longest - 1]):
                if found.start() < _SEARCHED_AT_ONCE:
                    yield start + found.start()

    def marked(self, text: str, mark: str) -> str:
        """Return the text with the mark after the first character of each spelling."""
        ends = [start + 1 for start in self.spelt(text)]
        return mark.join(text[start:end] for start, end in pairwise([0, *ends, len(text)]))


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a value of JSON, the keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _rewritten(value: Any, rewrite: Callable[[str], str]) -> Any:
    """Return a copy of a value of JSON with every string rewritten, the keys too."""
    if isinstance(value, str):
        return rewrite(value)
    if isinstance(value, dict):
        return {rewrite(key): _rewritten(inner, rewrite) for key, inner in value.items()}
    return [_rewritten(inner, rewrite) for inner in value] if isinstance(value, list | tuple) else value


def _with_marks_as_text(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer in which the marks that a parser looks for are not special, because decoding drops those."""
    if not any(token.special and token.content in MARKS for token in backend.get_added_tokens_decoder().values()):
        return backend
    description = json.loads(backend.to_str())
    for token in description["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in MARKS
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def _check_overrides(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for overrides that are no sampling parameters or have a wrong value."""
    known = [*(field.name for field in fields(GenerationDefaults)), "do_sample", "max_new_tokens"]
    for name in given.keys() - known:
        raise ConfigError(f"{_OVERRIDES}: unknown key {name!r}", f"known are {', '.join(known)}")
    most = given.get("max_new_tokens")
    if most is not None and (type(most) is not int or most < 1):
        raise ConfigError(f"{_OVERRIDES}: max_new_tokens is {most!r}: a number of tokens above 0 is wanted")
    _defaults(_OVERRIDES, given)


def _defaults(path: str, generation: Mapping[str, Any]) -> GenerationDefaults:
    values = {field.name: generation.get(field.name) for field in fields(GenerationDefaults)}
    if generation.get("do_sample") is False:
        values["temperature"] = 0.0
    try:
        return GenerationDefaults(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: {first['loc'][0]} is {first['input']!r}: {first['msg']}") from None


def _ids(path: Path, value: Any) -> list[int]:
    """Return the ids of an eos_token_id, which is one id, a list of them, or None."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            raise ConfigError(f"{path}: eos_token_id must be a token id or a list of them, not {value!r}")
    return list(ids)


def _special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of BOS, EOS and their like, from two files as Transformers reads them: special_tokens_map.json
    first, unless tokenizer_config.json lists the added tokens too, as newer ones do."""
    map_path = folder / "special_tokens_map.json"
    files = [(folder / "tokenizer_config.json", settings), (map_path, read_json(map_path, or_empty=True))]
    if settings.get("added_tokens_decoder") is None:
        files.reverse()
    special: dict[str, str] = {}
    for path, given in files:
        for name in _SPECIAL_TOKENS:
            if (token := given.get(name)) is not None:
                special.setdefault(name, _content(path, name, token))
    return special


def _add_listed_tokens(
    backend: tokenizers.Tokenizer, folder: Path, settings: Mapping[str, Any], special: Collection[str]
) -> None:
    """Add the tokens that tokenizer.json lacks: those of `added_tokens_decoder` in tokenizer_config.json, else of
    added_tokens.json, and `special` ones of the vocabulary. Raises ConfigError for one that would get another id."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    ids = {text: token_id for text in special if (token_id := backend.token_to_id(text)) is not None}
    flags: dict[str, dict[str, bool]] = {}
    decoder = settings.get("added_tokens_decoder")
    path = folder / ("added_tokens.json" if decoder is None else "tokenizer_config.json")
    try:
        if decoder is None:
            ids |= read_json(path, or_empty=True)
        else:
            ids |= {token["content"]: int(token_id) for token_id, token in decoder.items()}
            flags = {
                one["content"]: {name: one[name] for name in _TOKEN_FLAGS if name in one} for one in decoder.values()
            }
        missing = sorted(ids.keys() - known, key=lambda text: int(ids[text]))
        defaults = {text: {"special": text in special, "normalized": text not in special} for text in missing}
        backend.add_tokens([tokenizers.AddedToken(text, **defaults[text] | flags.get(text, {})) for text in missing])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: its added tokens cannot be read: {type(error).__name__}: {error}") from None
    for text in missing:
        if (made := backend.token_to_id(text)) != ids[text]:
            raise ConfigError(
                f"{path}: {text!r:.200} is token {ids[text]}, but tokenizer.json lacks it and leaves it the id {made}. "
                "Make both anew with Transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )


def _content(path: Path, name: str, token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise ConfigError(f"{path}: {name} must be a token's text, not {token!r}")
    return content
