"""The token of a draft's masks: one that no prompt and no answer of the target has."""

from contextlib import suppress

from app.config.error import ConfigError
from app.text.chat_template import ChatTemplateError
from app.text.tokenizer import Tokenizer

_WORDS = ("mask", "reserved", "unused", "empty", "pad")
"""What the name of an unused token says, the best first."""
_USER, _ANSWER, _SYSTEM = ({"role": role, "content": "words"} for role in ("user", "assistant", "system"))
_CONVERSATIONS = ([_USER], [_SYSTEM, _USER], [_USER, _ANSWER, _USER], [_SYSTEM, _USER, _ANSWER, _USER, _ANSWER])


def choose(tokenizer: Tokenizer, vocab_size: int, wanted: str | None = None) -> tuple[int, str]:
    """Return the id and the text of the mask token: the one `wanted`, an id or a text, else an unused special token, if
    possible one whose name says so, else the first row of the embedding that no token has, whose text is "".

    Raises ConfigError for a token that is in use or not there, and if nothing is unused.
    """
    uses, added = _uses(tokenizer), tokenizer.backend.get_added_tokens_decoder()
    if wanted is not None:
        return _given(tokenizer, vocab_size, wanted, uses)
    unused = {i: token.content for i, token in added.items() if token.special and i not in uses and i < vocab_size}
    if unused:
        chosen = min(unused, key=lambda i: (_rank(unused[i]), i))
        return chosen, unused[chosen]
    if (row := tokenizer.max_id + 1) < vocab_size:
        return row, ""
    raise ConfigError(
        "the target has no unused special token, and a tokenizer with a token for each row of the embedding; "
        "give the added token that your prompts need least as --mask-token"
    )


def _given(tokenizer: Tokenizer, vocab_size: int, wanted: str, uses: dict[int, str]) -> tuple[int, str]:
    token = int(wanted) if wanted.isdecimal() else tokenizer.backend.token_to_id(wanted)
    text = "" if token is None else tokenizer.backend.id_to_token(token) or ""
    is_word = bool(text) and token not in tokenizer.backend.get_added_tokens_decoder()
    if token is None:
        wrong = "the target's tokenizer has no such token"
    elif token >= vocab_size:
        wrong = f"the target has the tokens 0 to {vocab_size - 1}"
    elif token in uses or is_word:
        wrong = f"{text!r} {uses.get(token, 'is a token of ordinary text')}"
    else:
        return token, text
    raise ConfigError(f"--mask-token {wanted}: {wrong}; give an unused special token, or leave it out for one")


def _uses(tokenizer: Tokenizer) -> dict[int, str]:
    """Return how the tokens are used that stand in prompts or end answers, by id."""
    templates = [tokenizer.template_for(has_tools) for has_tools in (False, True)]
    texts = []
    for template in templates:
        for messages in _CONVERSATIONS:
            with suppress(ChatTemplateError):  # some take no system message, and some models have no template
                texts.append(template.render(messages, add_generation_prompt=messages[-1] is _USER))
    written = {token for text in texts for token in tokenizer.encode(text)}  # with BOS
    for token, added in tokenizer.backend.get_added_tokens_decoder().items():
        if any(added.content in template.source for template in templates):  # of tool calls and thoughts
            written.add(token)
    uses = dict.fromkeys(written, "is written by the chat template")
    for name, text in tokenizer.special_tokens.items():
        if name != "mask_token" and (named := tokenizer.backend.token_to_id(text)) is not None:
            uses[named] = f"is the tokenizer's {name}"
    return uses | dict.fromkeys(tokenizer.eos_ids, "ends an answer")


def _rank(text: str) -> int:
    return next((i for i, word in enumerate(_WORDS) if word in text.lower()), len(_WORDS))
