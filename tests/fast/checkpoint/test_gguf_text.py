"""Metadata of a GGUF file becomes Hugging Face's files, or is refused in a sentence that says what to do."""

import re
from typing import Any

import pytest

from app.engine.checkpoint import gguf_text
from app.engine.checkpoint.gguf_text import origin, text_files, unread_defaults
from app.engine.errors import UnsupportedError
from tests.golden.llama_tokens import metadata_of

OF = "tokenizer.ggml."
Metadata = dict[str, Any]


def changed(case: str = "qwen2", **keys: Any) -> Metadata:
    """Return the metadata of a case with other values of `tokenizer.ggml.*`, of which None are left out."""
    found = metadata_of(case) | {f"{OF}{key}": value for key, value in keys.items()}
    return {key: value for key, value in found.items() if value is not None}


@pytest.mark.parametrize(
    "keys, told",
    [
        ({"model": None}, "the file has no tokenizer; give --tokenizer FOLDER"),
        ({"model": "bert"}, "tokenizer.ggml.model = 'bert' is not read, only 'gpt2' and 'llama'; give --tokenizer"),
        (
            {"pre": "deepseek-llm"},
            "tokenizer.ggml.pre = 'deepseek-llm' is not known; known are llama-bpe, .*--tokenizer",
        ),
        ({"pre": "default"}, "pre = 'default' is not known"),
        ({"pre": None}, "tokenizer.ggml.pre is missing; known are"),
        ({"pre": ["qwen2"]}, r"pre = \['qwen2'\] is not known"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing; give --tokenizer FOLDER"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be an array of str"),
        ({"tokens": "abc"}, "must be an array of str"),
        ({"token_type": None}, "token_type is missing"),
        ({"token_type": [1]}, r"token_type has 1 values for \d+ tokens"),
        ({"tokens": ["a", "b"], "token_type": [1, 7]}, "token 1 is of the unknown type 7; give --tokenizer"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, "the merge 'ab' is not two tokens with a blank between"),
        ({"merges": [" a"]}, "the merge ' a' is not two tokens"),
        ({"merges": ["a "]}, "the merge 'a ' is not two tokens"),
        ({"merges": ["a nowhere"]}, r"the merge 'a' \+ 'nowhere' needs 'nowhere', which is no token"),
        ({"merges": ["q w"]}, "needs 'qw', which is no token"),
        ({"eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id = 1000000 is not one of the"),
        ({"eos_token_id": -1}, "eos_token_id = -1 is not"),
        ({"eos_token_id": "2"}, "eos_token_id = '2' is not"),
        ({"eot_token_id": 10**6}, "eot_token_id = 1000000 is not"),
        ({"bos_token_id": 151937}, "bos_token_id = 151937 is not"),
        ({"padding_token_id": 2**31}, "padding_token_id = 2147483648 is not"),
        ({"add_bos_token": "no"}, "add_bos_token must be true or false, found 'no'"),
        (
            {"add_bos_token": True, "bos_token_id": None},
            "add_bos_token is true, but tokenizer.ggml.bos_token_id is missing",
        ),
    ],
)
def test_a_tokenizer_that_would_make_other_ids_is_refused(keys: Metadata, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        text_files(changed(**keys))


def test_scores_of_sentencepiece_are_needed() -> None:
    with pytest.raises(UnsupportedError, match="scores is missing"):
        text_files(changed("spm", scores=None))


def test_two_tokens_alike_are_refused() -> None:
    tokens = [*metadata_of("qwen2")[f"{OF}tokens"]]
    tokens[7] = tokens[3]
    with pytest.raises(UnsupportedError, match=f"tokens 3 and 7 are both {re.escape(repr(tokens[3]))}"):
        text_files(changed(tokens=tokens))


def test_a_file_without_any_end_is_refused_and_one_with_a_known_end_is_not() -> None:
    tokens = [*metadata_of("qwen2")[f"{OF}tokens"]]
    assert text_files(changed(eos_token_id=None))["generation_config.json"]["eos_token_id"]
    nameless = [token.replace("<|im_end|>", "<x>").replace("<|endoftext|>", "<y>") for token in tokens]
    with pytest.raises(UnsupportedError, match="eos_token_id is missing, and no token ends a text by its name"):
        text_files(changed(tokens=nameless, eos_token_id=None))


def test_ends_are_all_that_the_file_names_and_control_tokens_that_end_a_text() -> None:
    tokens = metadata_of("qwen2")[f"{OF}tokens"]
    found = text_files(changed(eos_token_id=5, eot_token_id=6, eom_token_id=7))["generation_config.json"]
    assert found["eos_token_id"] == [5, 6, 7, tokens.index("<|endoftext|>"), tokens.index("<|im_end|>")]


@pytest.mark.parametrize(
    "keys", [{"pre": "unheard-of"}, {"model": "bert"}, {"model": None, "tokens": None}, {"merges": None}]
)
def test_another_tokenizer_is_taken_in_the_place_of_one_that_is_not_read(keys: Metadata) -> None:
    found = text_files(changed(**keys), has_tokenizer=False)
    assert found.keys() == {"generation_config.json"}
    assert ("eos_token_id" in found["generation_config.json"]) == ("tokens" not in keys)


def test_chat_templates_are_the_files_by_name() -> None:
    key = "tokenizer.chat_template"
    one = text_files(metadata_of("qwen2") | {key: "{{ a }}"})["tokenizer_config.json"]
    assert one["chat_template"] == "{{ a }}"
    two = text_files(
        metadata_of("qwen2") | {key: "{{ a }}", f"{key}.tool_use": "b", "tokenizer.chat_templates": ["tool_use"]}
    )
    listed = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "{{ a }}"}]
    assert two["tokenizer_config.json"]["chat_template"] == listed
    assert "chat_template" not in text_files(metadata_of("qwen2"))["tokenizer_config.json"]
    with pytest.raises(UnsupportedError, match="the chat template 'default' must be a string, not a list"):
        text_files(metadata_of("qwen2") | {key: ["a"]})


def test_special_tokens_are_named_for_templates() -> None:
    found = text_files(changed("spm", padding_token_id=3))["tokenizer_config.json"]
    names = {name: found[name] for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    assert names == {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "pad_token": "<0x00>"}


def test_sampling_defaults_are_as_they_were_meant() -> None:
    given = {"temp": 0.699999988079071, "top_k": 40, "top_p": 0.8999999761581421, "min_p": 0.05000000074505806}
    metadata = metadata_of("qwen2") | {f"general.sampling.{key}": value for key, value in given.items()}
    found = text_files(metadata)["generation_config.json"]
    assert {name: found[name] for name in found if name != "eos_token_id"} == {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
    }
    assert unread_defaults(metadata) == ""
    assert "temperature is 1; --override-generation-config" in unread_defaults(metadata_of("qwen2"))
    assert "not used: general.sampling.mirostat" in unread_defaults(metadata | {"general.sampling.mirostat": 2})


def test_the_log_has_a_files_own_words_without_their_control_characters() -> None:
    url = "https://huggingface.co/Qwen/Qwen3-8B"
    told = origin({"general.name": "Qwen3\x1b[2J", "general.base_model.0.repo_url": url})
    assert told == rf"it is called 'Qwen3\x1b[2J'; its base model is '{url}'"
    assert origin({}) == "it has no name"
    assert len(origin({"general.name": "x" * 10**6})) < 300


# Hostile files


def hostile(count: int, kind: int, case: str = "qwen2") -> Metadata:
    tokens = [f"{i:x}" for i in range(count)]
    extra = {"scores": [0.0] * count} if case == "spm" else {"merges": []}
    return changed(
        case, tokens=tokens, token_type=[kind] * count, eos_token_id=0, bos_token_id=0, unknown_token_id=0, **extra
    )


def named(tokens: list[str]) -> Metadata:
    return hostile(len(tokens), 3) | {f"{OF}tokens": tokens}


@pytest.mark.parametrize(
    "metadata, told",
    [
        (hostile(2**20 + 1, 1), "1048577 tokens, and at most 1048576"),
        (hostile(2**14 + 1, 3), "16385 control tokens, and at most 16384"),
        (named(["a" * 1025]), "token 0 has 1025 characters, and at most 1024"),
        (named([f"<{i:01000}>" for i in range(300)]), "300 control tokens, and at most 16384 of 262144 characters"),
        (changed(merges=["a a"] * (2**22 + 1)), "4194305 merges, and at most"),
    ],
    ids=["tokens", "control tokens", "length", "control characters", "merges"],
)
def test_more_than_any_model_has_is_refused(metadata: Metadata, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        text_files(metadata)


def test_tokens_with_too_many_places_to_split_are_refused_before_the_work() -> None:
    metadata = hostile(65, 1, "spm")
    metadata[f"{OF}tokens"] = [f"{i:01024}" for i in range(65)]
    with pytest.raises(UnsupportedError, match="the tokens are longer than those of any model, up to 1024; give"):
        text_files(metadata)


def test_tokens_may_have_any_characters() -> None:
    tokens = [*metadata_of("qwen2")[f"{OF}tokens"], "\x00", "\x1b[2J", "\ufffe", '"\\', "\u2028", ""]
    kinds = [*metadata_of("qwen2")[f"{OF}token_type"], *[3] * 6]
    made = text_files(changed(tokens=tokens, token_type=kinds))["tokenizer.json"]
    assert {token["content"] for token in made["added_tokens"]} >= {*tokens[-6:-1]}
    assert "" not in made["model"]["vocab"]


def test_a_merge_that_is_given_twice_counts_once() -> None:
    merges = metadata_of("qwen2")[f"{OF}merges"]
    made = text_files(changed(merges=[*merges, *merges[:5]]))["tokenizer.json"]
    assert len(made["model"]["merges"]) == len(merges)


def test_every_pre_of_the_table_makes_a_tokenizer() -> None:
    for pre in gguf_text._PRE:
        assert text_files(changed(pre=pre))["tokenizer.json"]["model"]["type"] == "BPE"
