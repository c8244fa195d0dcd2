"""The tokenizer that is made of a GGUF file gives llama.cpp's ids, where these are those of the model's training."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from app.engine.checkpoint.gguf_text import text_files
from app.text.tokenizer import Tokenizer
from tests.golden.llama_tokens import CASES, asked, digest, golden, metadata_of, real_metadata, smollm2_file


def backend(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(text_files(metadata)["tokenizer.json"]))


def ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def wrong(case: str, tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Return the texts whose ids are not the recorded ones."""
    recorded = zip(golden()["texts"], golden()["ids"][case], strict=True)
    return [text for text, expected in recorded if expected is not None and ids(tokenizer, text) != expected]


@pytest.mark.parametrize("case", CASES)
def test_ids_are_llama_cpps(case: str) -> None:
    assert wrong(case, backend(metadata_of(case))) == []


def test_every_text_has_recorded_ids_but_for_those_that_tekkens_ascii_letters_cut_wrongly() -> None:
    assert len(golden()["texts"]) == len(set(golden()["texts"])) == 200
    for case in CASES:
        missing = [text for text, known in zip(golden()["texts"], golden()["ids"][case], strict=True) if known is None]
        assert missing == [text for text in golden()["texts"] if asked(case, text) is None]
        assert len(missing) < 70 if case == "tekken" else not missing


def test_the_wheels_smollm2_has_llama_cpps_ids() -> None:
    tokenizer = backend(real_metadata(smollm2_file(), "smollm"))
    assert [digest(ids(tokenizer, text)) for text in golden()["texts"]] == golden()["real"]["smollm"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("other", CASES)
def test_the_texts_tell_every_rule_from_the_others(case: str, other: str) -> None:
    """A tokenizer of one rule is wrong for all others, unless the rules are the same."""
    same = {"qwen2", "deepseek-r1-qwen"}
    if case == other or {case, other} == same or case.startswith("spm") != other.startswith("spm"):
        return
    assert wrong(case, backend(metadata_of(other)))


def test_tekken_knows_cases_of_all_alphabets_and_keeps_a_mark_with_its_letter() -> None:
    text = "\u0152UVREs e\u0301t\u00e9 \u042f\u0431\u043b\u041a\u043e"
    pieces = backend(metadata_of("tekken")).pre_tokenizer.pre_tokenize_str(text)
    cuts = [text[start:end] for _, (start, end) in pieces]
    assert cuts == ["\u0152UVREs", " e\u0301t\u00e9", " \u042f\u0431\u043b", "\u041a\u043e"]


def test_a_word_that_no_merge_makes_is_a_token_of_llama_3_only() -> None:
    word = " Москвы"
    assert len(ids(backend(metadata_of("llama-bpe")), word)) == 1
    assert len(ids(backend(metadata_of("qwen2")), word)) > 1


def test_a_token_that_looks_like_an_end_is_text_unless_it_is_a_control_token() -> None:
    metadata = metadata_of("qwen2")
    at = metadata["tokenizer.ggml.tokens"].index("</s>")
    assert at not in text_files(metadata)["generation_config.json"]["eos_token_id"]
    assert at not in ids(backend(metadata), "a</s>b")
    metadata = metadata | {"tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"]]}
    metadata["tokenizer.ggml.token_type"][at] = 3
    assert at in text_files(metadata)["generation_config.json"]["eos_token_id"]
    assert at in ids(backend(metadata), "a</s>b")


def test_a_token_of_the_user_is_shown_and_a_control_token_is_not() -> None:
    for case in ("qwen2", "spm"):
        tokenizer = backend(metadata_of(case))
        shown = tokenizer.decode(ids(tokenizer, "a<tool_call>b<|im_end|>"))
        assert "<tool_call>" in shown and "<|im_end|>" not in shown


def test_rows_that_fill_the_embedding_are_no_tokens() -> None:
    metadata = metadata_of("llama-bpe")
    at = len(metadata["tokenizer.ggml.tokens"]) - 1
    tokenizer = backend(metadata)
    assert metadata["tokenizer.ggml.tokens"][at] == f"[PAD{at}]"
    assert tokenizer.id_to_token(at) is None and at not in ids(tokenizer, f"[PAD{at}]")


@pytest.mark.parametrize("case", CASES)
def test_texts_come_back(case: str) -> None:
    tokenizer = backend(metadata_of(case))
    for text in ("Hello, world! 12  345", "a\n\tb é", "漢字 😀"):
        assert tokenizer.decode(ids(tokenizer, text)) == text


@pytest.mark.parametrize(
    "case, given, first",
    [
        ("llama-bpe", None, "<|im_start|>"),
        ("llama-bpe", False, None),
        ("tekken", None, "<|im_start|>"),
        ("qwen2", None, None),
        ("qwen2", True, "<|im_start|>"),
        ("smollm", None, None),
        ("spm", None, "<s>"),
        ("spm", False, None),
    ],
)
def test_a_bare_prompt_begins_with_bos_as_the_file_says_or_as_the_family_does(
    case: str, given: bool | None, first: str | None
) -> None:
    said = {} if given is None else {"tokenizer.ggml.add_bos_token": given}
    found = backend(metadata_of(case) | said).encode("Hello").tokens[0]
    assert found == first if first else found not in ("<|im_start|>", "<s>")


def test_a_file_that_says_so_ends_bare_prompts_with_eos() -> None:
    found = backend(metadata_of("spm") | {"tokenizer.ggml.add_eos_token": True}).encode("Hello").tokens
    assert (found[0], found[-1]) == ("<s>", "<|im_end|>")


def test_the_server_reads_what_was_made(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{{ bos_token }}"
    sampling = {
        "temp": 0.6000000238418579,
        "top_k": 20,
        "top_p": 0.949999988079071,
        "penalty_repeat": 1.0499999523162842,
    }
    named = {"tokenizer.chat_template": template, "tokenizer.chat_template.tool_use": "{{ tools | length }} tools"}
    metadata = metadata_of("llama-bpe") | named
    metadata |= {f"general.sampling.{key}": value for key, value in sampling.items()}
    for name, content in text_files(metadata).items():
        (tmp_path / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    tokenizer = Tokenizer(tmp_path, {"vocab_size": 4096, "model_type": "llama"})
    assert tokenizer.chat_template.source == template
    assert tokenizer.render([], tools=[{}]).text == "1 tools"
    defaults = tokenizer.defaults
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p) == (0.6, 20, 0.95, 0.0)
    assert defaults.repetition_penalty == 1.05
    tokens = golden()["bpe"]["tokens"]
    assert tokenizer.eos_ids == sorted(tokens.index(text) for text in ("<|endoftext|>", "<|im_end|>"))
    text, mark, _ = tokenizer.render([{"role": "user", "content": "say <|im_end|>"}])
    made = tokenizer.encode(text, add_special_tokens=False, mark=mark)
    assert made.count(tokens.index("<|im_end|>")) == 1  # the template's, and not the user's
    assert made[-1] == tokens.index("<|im_start|>")
