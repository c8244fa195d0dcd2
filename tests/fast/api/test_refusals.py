"""Every row of the table in app/api/refusals.py, through a real socket."""

import pytest

from app.api.refusals import REFUSALS
from tests.fast.api.errors import CHAT, TEXT, refuses

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
HARMFUL = {
    "logprobs": [True, 0, 5],
    "top_logprobs": [3],
    "prompt_logprobs": [0, 1],
    "return_logprob": [True],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {}},
        "text",
        {"type": "text", "schema": {"a": 1}},
    ],
    "structured_outputs": [{"regex": "a"}],
    "guided_json": [{}, {"type": "object"}],
    "thinking": [False, {"type": "disabled"}],
    "parallel_tool_calls": [3],
    "tools": [[TOOL]],
    "tool_choice": ["any", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}],
    "functions": [[{"name": "f"}]],
    "function_call": [{"name": "f"}],
    "best_of": [2],
    "use_beam_search": [True],
    "repeat_penalty": [1.1],
    "length_penalty": [2.0],
    "bad_words": [["a"]],
    "min_new_tokens": [1],
    "echo": [True],
    "suffix": ["end"],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": ["no"],
    "stream_options.include_usage": [1],
    "add_generation_prompt": [False],
    "documents": [[{"text": "a"}]],
    "modalities": [["text", "audio"]],
    "mm_processor_kwargs": [{"a": 1}],
    "logits_processors": [["x"]],
    "vllm_xargs": [{"a": 1}],
    "chat_template_kwargs": [{"enable_thinking": True}],
    "priority": [1],
    "stop_regex": ["a+"],
}
HARMLESS = {
    "logprobs": [False],
    "top_logprobs": [0],
    "response_format": [{"type": "text"}, {"type": "text", "json_schema": None, "strict": False}],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "n": [1],
    "best_of": [1],
    "top_p": [1, 1.0],
    "top_k": [0, -1],
    "min_p": [0],
    "presence_penalty": [0],
    "frequency_penalty": [0.0],
    "repetition_penalty": [1.0],
    "logit_bias": [{}],
    "echo": [False],
    "suffix": [""],
    "skip_special_tokens": [True],
    "parallel_tool_calls": [True, False],
    "stream_options": [{}, {"include_usage": False}],
    "min_tokens": [0],
    "min_new_tokens": [0],
    "repeat_penalty": [1],
    "chat_template_kwargs": [{}, {"enable_thinking": None}],
    "prompt_logprobs": [False],
    "guided_json": [False, ""],
    "guided_choice": [[]],
    "structured_outputs": [False, {}],
    "documents": [False, []],
    "audio": [False],
    "modalities": [["text"]],
}


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.field)
@pytest.mark.parametrize(("path", "base"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_a_field_that_cannot_be_honoured_is_refused_by_name_and_never_reaches_the_engine(server, refusal, path, base):
    values = HARMFUL.get(refusal.field, [True] if not refusal.harmless(True) else ["x"])
    refuses(server, path, base, refusal, values)
    assert server.metric("prompt_tokens_total") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_neutral_values_pass(model_folder, own_server, stream):
    own_server.ready()
    own_server.script.plan([2])
    everything = {refusal.field: None for refusal in REFUSALS if "." not in refusal.field}
    bookkeeping = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "unheard_of": 1}
    bodies = [everything, bookkeeping, {name: values[0] for name, values in HARMLESS.items()}]
    bodies += [{name: value} for name, values in HARMLESS.items() for value in values]
    for fields in bodies:
        for path, base in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            response = own_server.http.post(path, json=base | fields | {"stream": stream})
            assert response.status_code == 200, (fields, response.text)


@pytest.mark.parametrize(
    ("path", "base", "field", "instead"),
    [
        ("/v1/completions", TEXT, "messages", "`prompt`"),
        ("/v1/completions", TEXT, "max_completion_tokens", "`max_tokens`"),
        ("/v1/completions", TEXT, "max_new_tokens", "`max_tokens`"),
        ("/v1/completions", TEXT, "min_new_tokens", "`min_tokens`"),
        ("/v1/completions", TEXT, "repeat_penalty", "`repetition_penalty`"),
        ("/v1/completions", TEXT, "bad_words", "`logit_bias`"),
        ("/v1/completions", TEXT, "best_of", "`n`"),
        ("/v1/chat/completions", CHAT, "prompt", "`messages`"),
        ("/v1/chat/completions", CHAT, "max_new_tokens", "`max_tokens`"),
    ],
)
def test_a_field_of_another_api_is_refused_with_what_to_use_instead(server, path, base, field, instead):
    error = server.http.post(path, json=base | {field: 5}).json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert instead in error["message"]


def test_a_refused_request_does_not_disturb_a_running_one(server, background):
    running, request_id = server.begin(background)
    assert server.http.post("/v1/completions", json=TEXT | {"logprobs": 1}).status_code == 400
    server.script.emit(request_id, [*server.ids("fine"), 2])
    assert running.result().json()["choices"][0]["text"] == "fine"
