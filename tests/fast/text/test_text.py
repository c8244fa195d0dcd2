"""The tokenizer and the chat template agree with Transformers, without importing it."""

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tokenizers

from app.config.error import ConfigError
from app.text import sandbox
from app.text.chat_template import ChatTemplate, ChatTemplateError
from app.text.tokenizer import GenerationDefaults, PromptTooLong, Tokenizer

MESSAGES = [
    {"role": "system", "content": "be <b>kind</b>"},
    {"role": "user", "content": "hello 漢字 & 'you'"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "stop"},
]
TEMPLATE = (
    "{%- for m in messages %}\n    {%- if m.role == 'bad' %}{{ raise_exception('no bad roles') }}{% endif %}\n"
    "    {{- bos_token or '' }}{{ '[' + m.role + ']' + m.content | trim | tojson }}\n"
    "{%- generation %}{{ eos_token }}{% endgeneration %}{% endfor %}"
    "{%- for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}"
    "{% if add_generation_prompt %}[go]{% endif %}{% if tools %}tools{% endif %}"
)


@pytest.fixture
def folder(model_folder, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(model_folder, tmp_path / "copy")


def test_neither_torch_nor_transformers_is_imported_by_the_api_process(model_folder):
    code = (
        "import sys; from pathlib import Path; import app.api.process; from app.text.tokenizer import Tokenizer\n"
        "Tokenizer(Path(sys.argv[1])).chat_template.render([{'role': 'user', 'content': 'hi'}])\n"
        "print(sorted({'torch', 'transformers', 'app.engine.core'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(model_folder)], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.exhaustive
def test_prompts_are_those_of_transformers(folder, recwarn):
    transformers = pytest.importorskip("transformers")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ours = Tokenizer(folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.encode(MESSAGES[1]["content"]) == theirs(MESSAGES[1]["content"])["input_ids"]
    rendered = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours.chat_template.render(MESSAGES) == rendered
    ids = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ours.encode(rendered, add_special_tokens=False) == ids


def test_a_template_that_refuses_is_an_error_for_the_client():
    template = ChatTemplate(TEMPLATE, {"eos_token": "</s>"})
    with pytest.raises(ChatTemplateError, match="no bad roles"):
        template.render([{"role": "bad", "content": "x"}])


def test_without_a_template_chat_is_refused_with_what_to_do():
    with pytest.raises(ChatTemplateError, match="/v1/completions"):
        ChatTemplate(None, {}).render(MESSAGES)


NAMED = {"tool_use": "{{ tools | length }} tools", "default": "plain"}
LISTED = {"chat_template": [{"name": name, "template": template} for name, template in NAMED.items()]}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": json.dumps(LISTED)},
        {"tokenizer_config.json": json.dumps({"chat_template": NAMED})},
        {"chat_template.json": json.dumps(LISTED)},
        {"chat_template.jinja": "plain", "additional_chat_templates/tool_use.jinja": NAMED["tool_use"]},
        {
            "tokenizer_config.json": json.dumps({"chat_template": "plain"}),
            "additional_chat_templates/tool_use.jinja": NAMED["tool_use"],
        },
    ],
    ids=["list", "dict", "json", "files", "file beside settings"],
)
def test_a_template_named_tool_use_is_taken_with_tools_and_the_default_without(folder, files):
    (folder / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    found = Tokenizer(folder)
    assert (found.render(MESSAGES).text, found.render(MESSAGES, tools=[{}]).text) == ("plain", "1 tools")
    (folder / "mine.jinja").write_text("mine")
    found = Tokenizer(folder, chat_template=folder / "mine.jinja")
    assert found.render(MESSAGES, tools=[{}]).text == "mine", "a file that is given counts for both"


@pytest.mark.parametrize(
    ("settings", "listed", "bos", "ends"),
    [
        ({}, {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}, "<|im_start|>", [2]),
        ({"bos_token": None}, {"bos_token": "<|im_start|>"}, "<|im_start|>", []),
        ({"bos_token": "a", "eos_token": "<|im_end|>"}, {"eos_token": "<|endoftext|>"}, "a", [0]),
        (
            {"eos_token": "<|im_end|>", "added_tokens_decoder": {}},
            {"eos_token": "<|endoftext|>", "bos_token": "b"},
            "b",
            [2],
        ),
    ],
    ids=["map alone", "null", "map first", "listed in the settings"],
)
def test_special_tokens_come_from_special_tokens_map_too(folder, settings, listed, bos, ends):
    (folder / "generation_config.json").unlink()
    (folder / "chat_template.jinja").write_text("{{ bos_token }}")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps(listed))
    found = Tokenizer(folder)
    assert (found.chat_template.render(MESSAGES), found.eos_ids) == (bos, ends)


@pytest.mark.parametrize("where", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_that_tokenizer_json_lacks_are_added(folder, where):
    a, b = (Tokenizer(folder).max_id + number for number in (2, 1))
    if where == "added_tokens.json":
        (folder / where).write_text(json.dumps({"<b>": b, "<a>": a}))
        (folder / "special_tokens_map.json").write_text('{"eos_token": "<b>"}')
    else:
        listed = {b: {"content": "<b>", "special": True}, a: {"content": "<a>", "special": False}}
        (folder / where).write_text(json.dumps({"added_tokens_decoder": listed, "chat_template": "{{ messages }}"}))
        (folder / "added_tokens.json").write_text('{"<c>": 7}')
    found = Tokenizer(folder)
    ids = found.encode("x<a>y<b>")
    assert ids == [*found.encode("x"), a, *found.encode("y"), b] and found.max_id == a
    assert found.decode(ids) == "x<a>y", "<b> is special"
    text, mark, _ = found.render([{"role": "user", "content": "<b>"}])
    assert mark and b not in found.encode(text, mark=mark), "and only a template writes it"


def test_a_special_token_of_the_vocabulary_is_one_token(folder):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    described = json.loads(backend.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] != "<|im_end|>"]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    assert Tokenizer(folder).encode("<|im_end|>") == [2]


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, GenerationDefaults()),
        ({"temperature": 0.6}, GenerationDefaults(0.6)),
        ({"temperature": None, "top_k": None}, GenerationDefaults()),
        ({"do_sample": False, "temperature": 0.6, "top_k": 50}, GenerationDefaults(0.0, 50)),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 5},
            GenerationDefaults(0.6, 20, 0.95),
        ),
        ({"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.05}, GenerationDefaults(1.0, 0, 1.0, 0.1, 1.05)),
        ({"top_p": 1, "top_k": 20.0, "min_p": 0, "repetition_penalty": 1}, GenerationDefaults(top_k=20)),
    ],
)
def test_defaults_are_those_of_the_generation_config(folder, generation, expected):
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert Tokenizer(folder).defaults == expected


GENERATION = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 5, "eos_token_id": [0, 2]}


@pytest.mark.parametrize(
    ("has_defaults", "overrides", "expected", "most"),
    [
        (True, {}, GenerationDefaults(0.6, 20), 5),
        (False, {}, GenerationDefaults(), None),
        (True, {"temperature": 0.9, "top_p": 0.5}, GenerationDefaults(0.9, 20, 0.5), 5),
        (True, {"do_sample": False}, GenerationDefaults(0.0, 20), 5),
        (False, {"temperature": 0.2, "max_new_tokens": 7}, GenerationDefaults(0.2), 7),
    ],
)
def test_defaults_may_be_left_out_or_overridden_and_ends_of_text_stay(folder, has_defaults, overrides, expected, most):
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    found = Tokenizer(folder, has_defaults=has_defaults, overrides=overrides)
    assert (found.defaults, found.max_new_tokens, found.eos_ids) == (expected, most, [0, 2])


def test_an_override_of_greedy_defaults_by_a_temperature_samples(folder):
    (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    assert Tokenizer(folder, overrides={"top_k": 3}).defaults == GenerationDefaults(0.0, 3)
    assert Tokenizer(folder, overrides={"temperature": 0.3}).defaults == GenerationDefaults(0.3)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"temprature": 1}, "unknown key 'temprature'"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_an_override_that_is_wrong_is_named(folder, overrides, said):
    with pytest.raises(ConfigError, match=f"--override-generation-config: {said}"):
        Tokenizer(folder, overrides=overrides)


def test_a_tokenizer_of_another_folder_brings_its_template_and_ends_of_text(folder, model_folder, tmp_path):
    texts = shutil.copytree(model_folder, tmp_path / "texts")
    (texts / "chat_template.jinja").write_text("other")
    (texts / "generation_config.json").write_text('{"temperature": 0.1}')
    (texts / "config.json").write_text('{"vocab_size": 3}')
    (folder / "tokenizer.json").unlink()
    found = Tokenizer(folder, tokenizer_folder=texts)
    assert found.chat_template.render(MESSAGES) == "other" and found.encode("hello") == Tokenizer(texts).encode("hello")
    assert found.defaults == Tokenizer(model_folder).defaults and found.model_vocab_size != 3


@pytest.mark.parametrize(
    ("generation", "settings", "config", "expected"),
    [
        ({"eos_token_id": [0, 2]}, {"eos_token": "<|im_end|>"}, {}, [0, 2]),
        ({"eos_token_id": 0}, {"eos_token": {"content": "<|im_end|>"}}, {"eos_token_id": 7}, [0, 2, 7]),
        ({}, {"eos_token": "<|im_end|>"}, {"eos_token_id": [7, 8], "text_config": {"eos_token_id": 9}}, [2, 7, 8, 9]),
        ({}, {}, {"eos_token_id": 7, "text_config": None}, [7]),
        ({}, {}, {}, []),
    ],
)
def test_eos_ids_come_from_every_file_that_names_them(folder, generation, settings, config, expected):
    for name, content in (("generation_config", generation), ("tokenizer_config", settings), ("config", config)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    assert Tokenizer(folder).eos_ids == expected


@pytest.mark.parametrize("content", [None, "{", '{"a": 1}'])
def test_an_unusable_tokenizer_file_is_named(folder, content):
    path = folder / "tokenizer.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(folder)


WRONG = {
    "generation_config.json": [
        *(b'{"temperature": "hot"}', b'{"temperature": -3}', b'{"temperature": NaN}', b'{"temperature": true}'),
        *(b'{"top_k": 2.5}', b'{"top_k": -2}', b'{"top_k": Infinity}', b'{"top_p": 0}', b'{"top_p": "0.9"}'),
        *(b'{"min_p": 1.5}', b'{"repetition_penalty": 0}', b'{"eos_token_id": "x"}', b'{"eos_token_id": [2, -1]}'),
        *(b'{"eos_token_id": 18446744073709551616}', b"{"),
    ],
    "tokenizer_config.json": [
        *(b'{"chat_template": 5}', b'{"chat_template": [5]}', b'{"chat_template": [{"name": "default"}]}'),
        *(b'{"chat_template": "{% if %}"}', b'{"eos_token": {"text": "x"}}', b"{"),
    ],
    "config.json": [b"{", b'{"eos_token_id": "x"}', b'{"text_config": {"eos_token_id": -1}}'],
    "special_tokens_map.json": [b'{"bos_token": 5}', b"{"],
    "added_tokens.json": [b'{"<a>": 700}', b'{"<a>": "x"}', b'{"<a>": null}', b"[]", b"{"],
    "chat_template.json": [b"[1]", b"{"],
    "chat_template.jinja": [b"\xff\xfe"],
}


@pytest.mark.parametrize(("name", "content"), [(name, content) for name, all_ in WRONG.items() for content in all_])
def test_a_file_with_a_wrong_value_is_named(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(name)):
        Tokenizer(folder)


def turns_beside(working: threading.Thread) -> int:
    """Return the number of turns of another thread during the work of this one."""
    turns = 0
    working.start()
    while working.is_alive():
        time.sleep(0.001)
        turns += 1
    return turns


def test_encoding_a_large_text_does_not_hold_the_interpreters_lock(folder):
    """Other threads wait for other reasons too where the machine is busy. Held, they get few turns of any text."""
    tokenizer = Tokenizer(folder)
    texts = ("hello brown fox " * (60_000 << doubled) for doubled in range(5))
    assert any(turns_beside(threading.Thread(target=tokenizer.encode, args=(text,))) >= 30 for text in texts)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{{ j }}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ caller() }}{% endmacro %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% call f() %}{% endcall %}{% endfor %}{% endfor %}",
        "{% for m in [[[]] * 30] recursive %}{{ loop([m] * 30) }}{% endfor %}",
    ],
    ids=["loops", "filters", "macros", "calls", "recursive"],
)
def test_a_template_that_never_ends_is_ended(monkeypatch, template):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    began = time.thread_time()
    with pytest.raises(ChatTemplateError, match=r"longer than 0\.2 s|recursion"):
        ChatTemplate(template, {}).render(MESSAGES)
    assert time.thread_time() - began < 3, "of this thread's own, whatever else the machine does"


@pytest.mark.parametrize(
    "source",
    [
        "x" * (sandbox.MAX_SOURCE + 1),
        "{{ " + "(" * 3000,
        "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ a|urlize }}",
    ],
    ids=["long", "deep", "loops", "a filter that is not offered"],
)
def test_a_template_that_cannot_be_compiled_is_a_settings_error(folder, source):
    (folder / "chat_template.jinja").write_text(source)
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be compiled"):
        Tokenizer(folder)


def test_a_file_replaces_the_folders_template(folder, tmp_path):
    (folder / "chat_template.jinja").write_text("the folder's")
    (file := tmp_path / "mine").write_text("mine")
    assert Tokenizer(folder, chat_template=file).chat_template.render(MESSAGES) == "mine"
    assert Tokenizer(folder).chat_template.render(MESSAGES) == "the folder's"
    with pytest.raises(ConfigError, match=r"--chat-template chatml is no file"):
        Tokenizer(folder, chat_template=Path("chatml"))


def test_a_template_that_makes_too_much_text_is_ended(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_CHARACTERS", 1000)
    with pytest.raises(ChatTemplateError, match="more than 1,000 characters"):
        ChatTemplate("{% for i in range(99999) %}{{ i }}{% endfor %}", {}).render(MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.json }}",
        "{% for m in messages %}{% set _ = messages.append(1) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_reaches_nothing_of_python(template):
    with pytest.raises(ChatTemplateError):
        ChatTemplate(template, {}).render(MESSAGES)


class Seeing:
    """A tokenizer that knows how long the texts were that it encoded."""

    def __init__(self, backend):
        self._backend = backend
        self.lengths = []

    def encode_batch_fast(self, texts, **settings):
        self.lengths += map(len, texts)
        return self._backend.encode_batch_fast(texts, **settings)


@pytest.mark.parametrize("max_tokens", [4_000, 20_000])
def test_a_text_is_refused_by_its_beginning_if_that_alone_is_too_long(model_folder, max_tokens):
    tokenizer = Tokenizer(model_folder)
    seeing = tokenizer.backend = Seeing(tokenizer.backend)
    text = "zq%" * 40_000  # a token for each character
    tokenizer._max_token_bytes = 1000  # as of real vocabularies, whose longest token is many spaces
    with pytest.raises(PromptTooLong) as refused:
        tokenizer.encode(text, max_tokens)
    assert max_tokens < refused.value.at_least <= len(text)
    assert seeing.lengths == [max(4 * max_tokens, 2**16)]


def test_a_long_text_of_long_tokens_is_encoded_whole(model_folder):
    tokenizer = Tokenizer(model_folder)
    text = "hello " * 40_000
    whole = tokenizer.encode(text)
    assert len(whole) < len(text) / 2
    assert tokenizer.encode(text, len(whole)) == whole


def test_the_end_of_a_prompt_is_what_follows_its_last_header(model_folder):
    found = Tokenizer(model_folder)
    for end in ("<think>\nOkay, ", "<think>\n" + "long " * 1000, "", "plain"):
        assert found.end_of(f"<|im_start|>user\n<think><|im_end|>\n<|im_start|>{end}") == end
    assert found.end_of("no header <think>") == "no header <think>"
