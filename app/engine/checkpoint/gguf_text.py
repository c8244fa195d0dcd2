"""The texts of a GGUF file in Hugging Face's formats: tokenizer, chat templates, ends, and sampling defaults.

What llama.cpp does with `tokenizer.ggml.*` is in its src/llama-vocab.cpp. Where it departs from the tokenizer that a
model was trained with, the latter counts.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from app.engine.checkpoint.fields import flag
from app.engine.errors import UnsupportedError

Metadata = Mapping[str, Any]

_MAX_TOKENS, _MAX_LENGTH, _MAX_MERGES = 1 << 20, 1 << 10, 1 << 22
_MAX_ADDED, _MAX_ADDED_CHARACTERS = 1 << 14, 1 << 18
"""Tokens that are searched for in every text, and their characters together. Gemma has 6,000, of 10 characters."""
_MAX_SQUARES = 1 << 26
"""Sum of the squared lengths of SentencePiece's tokens, which bounds the work and the merges. Llama 2 has 2 million."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
"""Types of tokens, by llama.cpp's numbers. 6 is a byte, and 0 is undefined. There are no others."""
_ENDS = frozenset(
    "<|im_end|> <|eot_id|> <|eom_id|> <|end_of_text|> <|endoftext|> <\uff5cend▁of▁sentence\uff5c> </s>".split()
)
"""Control tokens that end a text in every model that has them. Converters write one end of several."""
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_GIVE = "give --tokenizer FOLDER, with the tokenizer.json of the model that the file was made from"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's blank."""


class _Pre(NamedTuple):
    """What comes before the merges of byte-level BPE, by `tokenizer.ggml.pre`.

    Without a `regex` a text is split as in GPT-2. With `ignore_merges` a word that is a token is not merged.
    """

    regex: str = ""
    digits: bool = False  # each digit is split off first
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False  # if the file does not say


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _Pre(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", ignore_merges=True, adds_bos=True)
_QWEN2 = _Pre(rf"{_WORDS}|\p{{N}}|{_REST}", nfc=True)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_TEKKEN = _Pre(
    rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+", ignore_merges=True, adds_bos=True
)
_PRE = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _Pre(digits=True),
    "gpt-2": _Pre(),
    "tekken": _TEKKEN,
}


def text_files(metadata: Metadata, *, has_tokenizer: bool = True) -> dict[str, dict[str, Any]]:
    """Return the content of tokenizer.json, tokenizer_config.json and generation_config.json, by name.

    Without `has_tokenizer` only the last is made, because the user gave another tokenizer. Raises UnsupportedError for
    a tokenizer that would make other ids than the model was trained with.
    """
    tokens = _Tokens(metadata, has_tokenizer)
    ends = sorted(tokens.ends())
    sampling = {name: value for key, name in _SAMPLING.items() if (value := _sampling(metadata, key)) is not None}
    generation: dict[str, Any] = {"eos_token_id": ends, **sampling} if ends else sampling
    if not has_tokenizer:
        return {"generation_config.json": generation}
    if not ends:
        raise UnsupportedError(f"tokenizer.ggml.eos_token_id is missing, and no token ends a text by its name; {_GIVE}")
    is_spm = metadata.get("tokenizer.ggml.model") == "llama"
    tokenizer = _sentence_piece(tokens) if is_spm else _byte_level(tokens)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {
        name: tokens.texts[token_id] for name, key in _SPECIAL.items() if (token_id := tokens.id(key)) is not None
    }
    if templates := _templates(metadata):
        only_default = templates.keys() == {"default"}
        listed = [{"name": name, "template": template} for name, template in templates.items()]
        settings["chat_template"] = templates["default"] if only_default else listed
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings, "generation_config.json": generation}


def origin(metadata: Metadata) -> str:
    """Return what a file says of its model, for the log: its name, and the model that it was made from."""
    name = metadata.get("general.name") or metadata.get("general.basename")
    base = metadata.get("general.base_model.0.repo_url") or metadata.get("general.base_model.0.name")
    parts = [f"it is called {name!r:.200}" if name else "it has no name"]
    return "; ".join([*parts, f"its base model is {base!r:.200}"] if base else parts)


def unread_defaults(metadata: Metadata) -> str:
    """Return what the log says of sampling defaults that the file lacks, or that this server does not have, or ""."""
    beginning = "general.sampling."
    foreign = sorted(
        key for key in metadata if key.startswith(beginning) and key.removeprefix(beginning) not in _SAMPLING
    )
    if foreign:
        return f"these of its sampling defaults are not used: {', '.join(foreign):.200}"
    if not any(beginning + key in metadata for key in _SAMPLING):
        return "it has no sampling defaults, so temperature is 1; --override-generation-config sets them"
    return ""


class _Tokens:
    """The tokens of a file: `texts` by id, `kinds`, and the `vocabulary`, which lacks those that are not used."""

    def __init__(self, metadata: Metadata, is_needed: bool) -> None:
        self.metadata = metadata
        if is_needed:
            self._check_kind()
        self.texts = _array(metadata, "tokens", str) if is_needed or "tokenizer.ggml.tokens" in metadata else []
        if len(self.texts) > _MAX_TOKENS:
            raise UnsupportedError(f"the file has {len(self.texts)} tokens, and at most {_MAX_TOKENS} are read")
        self.kinds = _array(metadata, "token_type", int, len(self.texts)) if self.texts else []
        self.vocabulary = dict[str, int]()
        for token_id, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True)):
            if len(text) > _MAX_LENGTH:
                raise UnsupportedError(
                    f"token {token_id} has {len(text)} characters, and at most {_MAX_LENGTH} are read"
                )
            if not 0 <= kind <= 6:
                raise UnsupportedError(f"token {token_id} is of the unknown type {kind}; {_GIVE}")
            if not text or kind == _UNUSED or text == f"[PAD{token_id}]":  # rows that fill up the embedding
                continue
            if (other := self.vocabulary.setdefault(text, token_id)) != token_id:
                raise UnsupportedError(f"tokens {other} and {token_id} are both {text!r:.200}; convert the model again")

    def _check_kind(self) -> None:
        model, pre = (self.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
        if model is None:
            raise UnsupportedError(f"the file has no tokenizer; {_GIVE}")
        if model not in ("gpt2", "llama"):
            raise UnsupportedError(
                f"tokenizer.ggml.model = {model!r:.200} is not read, only 'gpt2' and 'llama'; {_GIVE}"
            )
        if model == "gpt2" and pre not in [*_PRE]:
            found = "is missing" if pre is None else f"= {pre!r:.200} is not known"
            raise UnsupportedError(f"tokenizer.ggml.pre {found}; known are {', '.join(_PRE)}; {_GIVE}")

    def id(self, name: str) -> int | None:
        """Return `tokenizer.ggml.NAME_token_id`, or None without one. Raises UnsupportedError for no token's id."""
        value = self.metadata.get(key := f"tokenizer.ggml.{name}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value < len(self.texts)):
            raise UnsupportedError(f"{key} = {value!r:.200} is not one of the {len(self.texts)} tokens; {_GIVE}")
        return value

    def ends(self) -> set[int]:
        """Return the ids of all tokens that end a text."""
        named = {self.vocabulary[text] for text in _ENDS & self.vocabulary.keys()}
        given = [self.id(name) for name in ("eos", "eot", "eom")] if self.texts else []
        ends = {token_id for token_id in named if self.kinds[token_id] == _CONTROL}
        return ends | {token_id for token_id in given if token_id is not None}

    def added(self) -> list[dict[str, Any]]:
        """Return the tokens that are found before anything else is done to a text."""
        strips = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        found = [
            {"id": token_id, "content": text, "special": self.kinds[token_id] != _USER_DEFINED, **strips}
            for text, token_id in self.vocabulary.items()
            if self.kinds[token_id] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
        if len(found) > _MAX_ADDED or sum(len(token["content"]) for token in found) > _MAX_ADDED_CHARACTERS:
            most = f"{_MAX_ADDED} of {_MAX_ADDED_CHARACTERS} characters together"
            raise UnsupportedError(f"the file has {len(found)} control tokens, and at most {most} are read")
        return found

    def around(self, adds_bos: bool) -> dict[str, Any] | None:
        """Return the post-processor that adds BOS and EOS to a bare prompt, where `adds_bos` holds by default."""
        wanted = {"bos": adds_bos and self.id("bos") is not None, "eos": False}
        for name in wanted:
            key = f"tokenizer.ggml.add_{name}_token"
            if (given := flag(self.metadata, key)) is not None:
                wanted[name] = given
            if wanted[name] and self.id(name) is None:
                raise UnsupportedError(f"{key} is true, but tokenizer.ggml.{name}_token_id is missing; {_GIVE}")
        ids = {name: token_id for name in wanted if wanted[name] and (token_id := self.id(name)) is not None}
        if not ids:
            return None
        pieces = {name: {"SpecialToken": {"id": self.texts[token_id], "type_id": 0}} for name, token_id in ids.items()}
        text = {name: {"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB")}
        return {
            "type": "TemplateProcessing",
            "single": [piece for piece in (pieces.get("bos"), text["A"], pieces.get("eos")) if piece],
            "pair": [text["A"], text["B"]],
            "special_tokens": {
                self.texts[id_]: {"id": self.texts[id_], "ids": [id_], "tokens": [self.texts[id_]]}
                for id_ in ids.values()
            },
        }


def _byte_level(tokens: _Tokens) -> dict[str, Any]:
    """Return the tokenizer.json of byte-level BPE, whose tokens are spelt in GPT-2's letters for bytes."""
    pre = _PRE[tokens.metadata["tokenizer.ggml.pre"]]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not pre.regex}
    steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if pre.digits else []
    if pre.regex:
        steps.append({"type": "Split", "pattern": {"Regex": pre.regex}, "behavior": "Isolated", "invert": False})
    merges = _array(tokens.metadata, "merges", str)
    if len(merges) > _MAX_MERGES:
        raise UnsupportedError(f"the file has {len(merges)} merges, and at most {_MAX_MERGES} are read")
    pairs = dict.fromkeys(_pair(merge) for merge in merges)
    for left, right in pairs:
        for text in (left, right, left + right):
            if text not in tokens.vocabulary:
                raise UnsupportedError(
                    f"the merge {left!r:.200} + {right!r:.200} needs {text!r:.200}, which is no token; {_GIVE}"
                )
    return _tokenizer(
        tokens,
        normalizer={"type": "NFC"} if pre.nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        adds_bos=pre.adds_bos,
        decoder=byte_level,
        model={"merges": list(pairs), "ignore_merges": pre.ignore_merges},
    )


def _sentence_piece(tokens: _Tokens) -> dict[str, Any]:
    """Return the tokenizer.json of SentencePiece's BPE, which has scores of tokens in the place of merges."""
    unknown, prefix = tokens.id("unknown"), flag(tokens.metadata, "tokenizer.ggml.add_space_prefix") is not False
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    to_blank = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    steps = [to_blank, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    return _tokenizer(
        tokens,
        normalizer={
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": _SPACE}, blank] if prefix else [blank],
        },
        pre_tokenizer=None,
        adds_bos=True,
        decoder={"type": "Sequence", "decoders": steps},
        model={
            "unk_token": None if unknown is None else tokens.texts[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "merges": _merges_of(tokens),
        },
    )


def _merges_of(tokens: _Tokens) -> list[tuple[str, str]]:
    """Return the merges that SentencePiece makes, as Transformers derives them: the best score first."""
    scores = _array(tokens.metadata, "scores", float, len(tokens.texts))
    vocabulary = {text: i for text, i in tokens.vocabulary.items() if tokens.kinds[i] == _NORMAL}
    if sum(len(text) ** 2 for text in vocabulary) > _MAX_SQUARES:
        raise UnsupportedError(
            f"the tokens are longer than those of any model, up to {max(map(len, vocabulary))}; {_GIVE}"
        )
    ranked = []
    for text, token_id in vocabulary.items():
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in vocabulary and right in vocabulary:
                ranked.append((scores[token_id], len(left), len(right), -vocabulary[left], left, right))
    ranked.sort(reverse=True)
    return [(left, right) for *_, left, right in ranked]


def _tokenizer(
    tokens: _Tokens, *, adds_bos: bool, model: dict[str, Any], **parts: dict[str, Any] | None
) -> dict[str, Any]:
    defaults = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens.added(),
        **parts,
        "post_processor": tokens.around(adds_bos),
        "model": {**defaults, "vocab": tokens.vocabulary, **model},
    }


def _pair(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)
    if at < 1 or at == len(merge) - 1:
        raise UnsupportedError(f"the merge {merge!r:.200} is not two tokens with a blank between; {_GIVE}")
    return merge[:at], merge[at + 1 :]


def _templates(metadata: Metadata) -> dict[str, str]:
    """Return the chat templates by name. The one without a name is the default."""
    key = "tokenizer.chat_template"
    found = {name.removeprefix(f"{key}."): value for name, value in metadata.items() if name.startswith(f"{key}.")}
    found |= {"default": metadata[key]} if key in metadata else {}
    for name, template in found.items():
        if not isinstance(template, str):
            raise UnsupportedError(f"the chat template {name!r:.200} must be a string, not a {type(template).__name__}")
    return found


def _sampling(metadata: Metadata, key: str) -> Any:
    """Return a sampling default. The file has it in float32, and 0.6 was meant by 0.60000002."""
    value = metadata.get(f"general.sampling.{key}")
    return round(value, 6) if isinstance(value, float) else value


def _array(metadata: Metadata, name: str, of: type, length: int | None = None) -> list[Any]:
    """Return `tokenizer.ggml.NAME`, an array of this type and length. Raises UnsupportedError."""
    value = metadata.get(key := f"tokenizer.ggml.{name}")
    if value is None:
        raise UnsupportedError(f"{key} is missing; {_GIVE}")
    if not isinstance(value, list) or any(type(item) is not of for item in value):
        raise UnsupportedError(f"{key} must be an array of {of.__name__}; {_GIVE}")
    if length is not None and len(value) != length:
        raise UnsupportedError(f"{key} has {len(value)} values for {length} tokens; {_GIVE}")
    return value
