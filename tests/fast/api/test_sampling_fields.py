"""Sampling fields reach the engine unchanged, and the model's own files fill the fields that a request leaves open."""

import json
import random
import shutil

import pytest

from app.api.schemas import MAX_BIASES, MAX_SALT_LENGTH
from tests.fast.api.errors import error_of
from tests.fast.api.served import serving_ready

CHAT = ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
TEXT = ("/v1/completions", {"model": "tiny", "prompt": "hi"})
ENDPOINTS = pytest.mark.parametrize(("path", "base"), [CHAT, TEXT])
LONGEST = "x" * MAX_SALT_LENGTH
NEUTRAL = {
    "temperature": 0.6,  # The model's own.
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": [],
    "min_tokens": 0,
}
HONOURED = [
    ({}, {}),
    ({"temperature": 1.3}, {"temperature": 1.3}),
    ({"temperature": 2.5, "min_p": 0.1}, {"temperature": 2.5, "min_p": 0.1}),
    ({"temperature": 1e6}, {"temperature": 1e6}),
    ({"top_k": 20}, {"top_k": 20}),
    ({"top_k": 1}, {"top_k": 1}),
    ({"top_k": 0}, {}),
    ({"top_k": -1}, {}),
    ({"top_k": 2**31 - 1}, {"top_k": 2**31 - 1}),
    ({"top_p": 0.9}, {"top_p": 0.9}),
    ({"top_p": 1e-9}, {"top_p": 1e-9}),
    ({"top_p": 1}, {}),
    ({"min_p": 0.05}, {"min_p": 0.05}),
    ({"min_p": 1}, {"min_p": 1.0}),
    ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
    ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
    ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ({"repetition_penalty": 0.01}, {"repetition_penalty": 0.01}),
    ({"logit_bias": {"5": -100, "511": 0.5, "0": 100}}, {"logit_bias": [[5, -100.0], [511, 0.5], [0, 100.0]]}),
    ({"logit_bias": {}}, {}),
    ({"min_tokens": 3}, {"min_tokens": 3}),
    ({"min_tokens": 7, "max_tokens": 7}, {"min_tokens": 7}),
    (dict.fromkeys(NEUTRAL), {}),
]
WRONG = [
    ("top_k", [-2, 1.5, 20.0, "20", True, 2**31, [5]]),
    ("top_p", [0, -0.1, 1.01, "0.9", True, {}]),
    ("min_p", [-0.01, 1.01, "0", False]),
    ("presence_penalty", [-2.01, 2.01, "1", True]),
    ("frequency_penalty", [-3, 3, "1", True]),
    ("repetition_penalty", [0, -1, 0.001, 101, "1.1", True]),
    ("min_tokens", [-1, 1.5, "1", True, 2**31]),
    ("logit_bias", [5, "5", [5], [[5, 1]], True]),
]
WRONG_BIASES = [
    ({"7": 1, "5": "1"}, "5"),
    ({"5": None}, "5"),
    ({"5": True}, "5"),
    ({"hello": 1}, "hello"),
    ({"": 1}, ""),
    ({"-1": 1}, "-1"),
    ({"05": 1}, "05"),
    ({"5.0": 1}, "5.0"),
    ({" 5": 1}, " 5"),
    ({"\u0665": 1}, "\u0665"),
    ({"5": 1, "512": 1}, "512"),
    ({"9999999999": 1}, "9999999999"),
]


def refusal(server, path, body):
    return error_of(server.http.post(path, json=body), 400)


def submitted(server, path, body):
    """Return the message that the engine got for a request that it answered."""
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return server.script.see("Submit")


@ENDPOINTS
@pytest.mark.parametrize(("fields", "expected"), HONOURED, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_sampling_field_reaches_the_engine_as_it_stands(server, path, base, fields, expected, stream):
    server.script.plan([2])
    sampling = submitted(server, path, base | fields | {"stream": stream})["sampling"]
    del sampling["seed"]
    assert sampling == NEUTRAL | expected


def test_the_sdk_says_them_by_openais_names_and_by_vllms(server):
    server.script.plan([2])
    server.openai.chat.completions.create(
        **CHAT[1],
        top_p=0.8,
        presence_penalty=1.5,
        frequency_penalty=0.5,
        logit_bias={"5": 10},
        extra_body={"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05, "min_tokens": 2, "cache_salt": "mine"},
    )
    submit = server.script.see("Submit")
    assert submit["cache_salt"] == "mine"
    assert submit["sampling"] | {"seed": 0} == {
        "temperature": 0.6,
        "seed": 0,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.1,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.05,
        "logit_bias": [[5, 10.0]],
        "min_tokens": 2,
    }


@ENDPOINTS
@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG for value in values], ids=repr)
def test_a_wrong_value_is_refused_by_name(server, path, base, field, value):
    error = refusal(server, path, base | {field: value})
    assert (error["param"], error["code"]) == (field, "invalid_value")
    assert f"`{field}`" in error["message"]


@ENDPOINTS
@pytest.mark.parametrize(("biases", "entry"), WRONG_BIASES, ids=repr)
def test_a_wrong_bias_is_refused_by_its_entry(server, path, base, biases, entry):
    error = refusal(server, path, base | {"logit_bias": biases})
    assert (error["param"], error["code"]) == (f"logit_bias.{entry}", "invalid_value")


@ENDPOINTS
def test_a_value_that_is_clamped_is_told_in_the_answer(server, path, base):
    fields = {"logit_bias": {"7": 100, "5": 150, "6": -1e300}, "temperature": 1e300}
    server.script.plan([2])
    answer = server.http.post(path, json=base | fields).json()
    assert [(one["code"], one["param"]) for one in answer["warnings"]] == [
        ("value_clamped", "logit_bias.5"),
        ("value_clamped", "temperature"),
    ]
    assert "2 of them" in answer["warnings"][0]["message"]
    sampling = server.script.see("Submit")["sampling"]
    assert (sampling["logit_bias"], sampling["temperature"]) == ([[7, 100.0], [5, 100.0], [6, -100.0]], 1e6)
    for event in server.chunks(path, base | fields)[-1:]:
        assert event["warnings"] == answer["warnings"]


def test_responses_clamp_and_tell_it_once(server):
    server.script.plan([2])
    answer = server.http.post("/v1/responses", json={"input": "hi", "logit_bias": {"5": 101}}).json()
    assert [one["param"] for one in answer["warnings"]] == ["logit_bias.5"]
    assert server.script.see("Submit")["sampling"]["logit_bias"] == [[5, 100.0]]


def test_a_bias_beyond_the_vocabulary_says_where_that_ends(server):
    assert "511" in refusal(server, TEXT[0], TEXT[1] | {"logit_bias": {"512": 1}})["message"]


def test_there_may_be_so_many_biases_and_no_more(own_server):
    own_server.ready(vocab_size=2**17)
    own_server.script.plan([2])
    biases = {str(token): 1 for token in range(MAX_BIASES)}
    submit = submitted(own_server, TEXT[0], TEXT[1] | {"logit_bias": biases})
    assert submit["sampling"]["logit_bias"] == [[token, 1.0] for token in range(MAX_BIASES)]
    for more in (1, 100_000):
        biases |= {str(MAX_BIASES + token): "x" for token in range(more)}
        error = refusal(own_server, TEXT[0], TEXT[1] | {"logit_bias": biases})
        assert error["param"] == "logit_bias" and str(MAX_BIASES) in error["message"]


@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_greedy_decoding_keeps_penalties_and_biases_and_has_no_filters(server, temperature):
    server.script.plan([2])
    fields = {"temperature": temperature, "top_k": 5, "top_p": 0.5, "min_p": 0.5, "frequency_penalty": 1}
    sampling = submitted(server, TEXT[0], TEXT[1] | fields | {"logit_bias": {"5": 1}, "min_tokens": 2})["sampling"]
    kept = {"temperature": 0.0, "frequency_penalty": 1.0, "logit_bias": [[5, 1.0]], "min_tokens": 2}
    assert sampling | {"seed": 0} == NEUTRAL | {"seed": 0} | kept


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT[0], TEXT[1] | {"min_tokens": 8, "max_tokens": 7}),
        (TEXT[0], TEXT[1] | {"min_tokens": 17}),
        (TEXT[0], TEXT[1] | {"min_tokens": 12, "prompt": [[5], [5] * 250]}),
        (CHAT[0], CHAT[1] | {"min_tokens": 8, "max_tokens": 7}),
        (CHAT[0], CHAT[1] | {"min_tokens": 8, "max_completion_tokens": 7, "max_tokens": 20}),
        (CHAT[0], CHAT[1] | {"min_tokens": 256}),
    ],
)
def test_min_tokens_above_what_is_made_at_most_is_refused_and_nothing_is_sent(server, path, body):
    error = refusal(server, path, body)
    assert (error["param"], error["code"]) == ("min_tokens", "invalid_value")
    assert "`max_tokens`" in error["message"]
    server.script.plan([2])
    assert submitted(server, TEXT[0], TEXT[1] | {"max_tokens": 9})["max_tokens"] == 9


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(None, ""), (2, ""), (3, "END a"), (6, "END a"), (7, "END and "), (11, "END and END a"), (15, "END and END and")],
)
@pytest.mark.parametrize("width", [1, 4, 15])
def test_no_stop_string_is_complete_before_min_tokens(server, stream, min_tokens, expected, width):
    ids = server.bytes("END and END and")
    server.script.plan(*[ids[i : i + width] for i in range(0, len(ids), width)])
    body = TEXT[1] | {"min_tokens": min_tokens, "max_tokens": 15, "stop": ["END", "nd"]}
    answers = server.chunks(TEXT[0], body) if stream else [server.http.post(TEXT[0], json=body).json()]
    assert "".join(event["choices"][0]["text"] for event in answers) == expected


@pytest.fixture
def recommending(model_folder, tmp_path):
    """A server whose model recommends every setting that is taken."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    recommended = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.05}
    (folder / "generation_config.json").write_text(json.dumps(recommended | {"eos_token_id": 2}))
    with serving_ready(folder) as server:
        yield server, recommended


@ENDPOINTS
def test_what_a_request_leaves_open_the_models_generation_config_says(recommending, path, base):
    server, recommended = recommending
    said = {"temperature": 1.0, "top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    for fields in ({}, dict.fromkeys(recommended), {"top_k": 5}, {"temperature": 1.5}, said):
        sampling = submitted(server, path, base | fields)["sampling"]
        expected = recommended | {name: value for name, value in fields.items() if value is not None}
        expected["top_k"] = max(0, expected["top_k"])
        assert {name: sampling[name] for name in recommended} == expected


def test_greedy_decoding_keeps_the_models_own_repetition_penalty_alone(recommending):
    server, _ = recommending
    sampling = submitted(server, TEXT[0], TEXT[1] | {"temperature": 0})["sampling"]
    assert sampling | {"seed": 0} == NEUTRAL | {"seed": 0, "temperature": 0.0, "repetition_penalty": 1.05}


@pytest.mark.parametrize(("fields", "budget"), [({}, 7), ({"max_tokens": 9}, 9), ({"max_completion_tokens": 3}, 3)])
def test_a_chat_without_max_tokens_has_the_models_max_new_tokens(model_folder, tmp_path, fields, budget):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7, "eos_token_id": 2}))
    with serving_ready(folder) as server:
        server.script.plan([2])
        assert submitted(server, CHAT[0], CHAT[1] | fields)["max_tokens"] == budget


CLAMPED = [
    (*CHAT, "max_tokens"),
    (*CHAT, "max_completion_tokens"),
    (*TEXT, "max_tokens"),
    ("/v1/responses", {"input": "hi"}, "max_output_tokens"),
]


@pytest.mark.parametrize(("path", "base", "field"), CLAMPED)
def test_a_limit_that_does_not_fit_is_refused_or_clamped_as_the_operator_says(server, clamping, path, base, field):
    error = refusal(server, path, base | {field: 32_000})
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    answer = clamping.http.post(path, json=base | {field: 32_000}).json()
    submit = clamping.script.see("Submit")
    room = clamping.script.info["max_model_len"] - len(submit["token_ids"])
    assert submit["max_tokens"] == room
    (warning,) = answer["warnings"]
    assert (warning["code"], warning["param"]) == ("value_clamped", field)
    assert warning["message"] == f"32000 tokens do not fit beside the prompt. The answer may have {room}."
    for fits in ({field: room}, {field: 1}, {}):
        assert "warnings" not in clamping.http.post(path, json=base | fits).json()
    streamed = clamping.http.post(path, json=base | {field: 32_000, "stream": True}).text
    assert streamed.count("value_clamped") == 1


def test_of_several_prompts_the_least_room_is_told_and_one_that_fills_the_context_is_refused(clamping):
    asked = {"prompt": [[5], [5] * 100], "max_tokens": 1000}
    (warning,) = clamping.http.post("/v1/completions", json=asked).json()["warnings"]
    assert warning["message"].endswith(f"The answer may have {clamping.script.info['max_model_len'] - 100}.")
    full = [5] * clamping.script.info["max_model_len"]
    assert refusal(clamping, "/v1/completions", {"prompt": full})["code"] == "context_length_exceeded"


@pytest.fixture(scope="module")
def clamping_server(model_folder):
    with serving_ready(model_folder, clamp_max_tokens=True) as server:
        yield server


@pytest.fixture
def clamping(clamping_server):
    clamping_server.settle()
    clamping_server.script.plan([2])
    return clamping_server


@ENDPOINTS
@pytest.mark.parametrize("salt", ["", LONGEST + "x", 5, ["a"], True])
def test_a_cache_salt_is_a_text_that_is_not_empty_and_not_long(server, path, base, salt):
    error = refusal(server, path, base | {"cache_salt": salt})
    assert (error["param"], error["code"]) == ("cache_salt", "invalid_value")


@ENDPOINTS
@pytest.mark.parametrize(
    ("fields", "salt"),
    [
        ({}, ""),
        ({"cache_salt": None}, ""),
        ({"cache_salt": "tenant é"}, "tenant é"),
        ({"cache_salt": LONGEST}, LONGEST),
    ],
    ids=["absent", "null", "text", "longest"],
)
def test_a_cache_salt_is_passed_on(server, path, base, fields, salt):
    server.script.plan([2])
    assert submitted(server, path, base | fields)["cache_salt"] == salt


def test_requests_without_a_seed_get_the_servers_row_of_them_and_others_keep_theirs(model_folder):
    with serving_ready(model_folder, seed=5) as server:
        seeds = []
        for fields in ({}, {"seed": 7}, {"seed": -1}):  # vLLM's and llama-server's -1 is a random seed
            server.script.plan([2])
            server.http.post("/v1/completions", json={"prompt": "a"} | fields)
            seeds.append(server.script.see("Submit")["sampling"]["seed"])
    row = random.Random(5)
    assert seeds == [row.getrandbits(64), 7, row.getrandbits(64)]
