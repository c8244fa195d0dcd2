"""Text to token ids and back, from the files of a target's folder: tokenizer, chat template, generation defaults.

This reads `tokenizer.json` with the tokenizers library and renders chat templates as Transformers does. Transformers
itself is not imported: it imports torch, which the API process must never do.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from app.text.chat_template import ChatTemplate

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """The folder's files cannot be used; the message names the file and says what to do."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What generation_config.json asks for when a request says nothing.

    `not_applied` lists its settings that this server does not know yet, as "top_k=20".
    """

    temperature: float
    not_applied: tuple[str, ...] = ()


class Tokenizer:
    """The tokenizer of the target in `folder`. Safe to use from several threads.

    Raises TokenizerError if there is no usable tokenizer.json.
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
        self.backend.no_truncation()
        self.backend.no_padding()
        settings = _read_json(folder / "tokenizer_config.json")
        generation = _read_json(folder / "generation_config.json")
        special = {name: _content(settings[name]) for name in _SPECIAL_TOKENS if settings.get(name) is not None}
        self.eos_ids = self._eos_ids(generation, special, _read_json(folder / "config.json"))
        self.defaults = _defaults(generation)
        self.chat_template = ChatTemplate.load(folder, settings, special)

    @property
    def vocab_size(self) -> int:
        """Ids below this can be text; a model's padded vocabulary may be larger."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """The ids of a bare prompt, with the special tokens (BOS) that the tokenizer itself adds."""
        return list(self.backend.encode(text, add_special_tokens=True).ids)

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> list[int]:
        """The ids of a conversation, ending where the assistant's answer begins.

        Raises ChatTemplateError if there is no template, or if it refuses these messages.
        """
        text = self.chat_template.render(messages)
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int]) -> str:
        """The text of finished output, special tokens left out."""
        return str(self.backend.decode(token_ids, skip_special_tokens=True))

    def _eos_ids(self, generation: dict[str, Any], special: dict[str, str], config: dict[str, Any]) -> list[int]:
        ids = _as_list(generation.get("eos_token_id"))
        token = self.backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
        ids += _as_list(token)
        return sorted(set(ids or _as_list(config.get("eos_token_id"))))


def _defaults(generation: dict[str, Any]) -> GenerationDefaults:
    if generation.get("do_sample") is False:
        return GenerationDefaults(temperature=0.0)
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    temperature = generation.get("temperature")
    return GenerationDefaults(
        temperature=1.0 if temperature is None else float(temperature),
        not_applied=tuple(
            f"{name}={generation[name]}"
            for name, value in neutral.items()
            if generation.get(name) is not None and generation[name] != value
        ),
    )


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds no JSON object")
    return value
