"""`n` choices of a prompt: each is a request of the engine's, and together they are one answer."""

import json

import pytest

from app.api.generate import seed_of_choice
from app.api.schemas import MAX_CHOICES
from tests.fast.api.errors import error_of

CHAT = ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
TEXT = ("/v1/completions", {"model": "tiny", "prompt": "hi"})
WORDS = ["hello", "world", "fox", "dog"]


def submits(server, count):
    return [server.script.see("Submit") for _ in range(count)]


def play(server, words):
    """Answer as many requests as there are words, the last one first and a token at a time by turns."""
    asked = submits(server, len(words))
    tokens = [[*server.ids(word), 2] for word in words]
    for step in range(max(map(len, tokens))):
        for submit, own in reversed(list(zip(asked, tokens, strict=True))):
            if step < len(own):
                server.script.emit(submit["request_id"], own[step : step + 1])
    return asked


def read_stream(chunks):
    """(texts, finish reasons) by index, and all chunks."""
    texts, reasons, everything = {}, {}, list(chunks)
    for chunk in everything:
        for choice in chunk.choices:
            text = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, everything


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_choices_come_with_their_index_and_the_prompt_counts_once(server, background, chat, stream):
    played = background.submit(play, server, WORDS)
    create = server.openai.chat.completions.create if chat else server.openai.completions.create
    ask = (CHAT if chat else TEXT)[1] | {"n": 4}
    if stream:
        with create(**ask, stream=True, stream_options={"include_usage": True}) as chunks:
            texts, reasons, everything = read_stream(chunks)
        assert len({chunk.id for chunk in everything}) == 1
        usage = everything[-1].usage
    else:
        answer = create(**ask)
        texts = {choice.index: choice.message.content if chat else choice.text for choice in answer.choices}
        reasons = {choice.index: choice.finish_reason for choice in answer.choices}
        usage = answer.usage
    asked = played.result()
    assert texts == dict(enumerate(WORDS)) and reasons == dict.fromkeys(range(4), "stop")
    assert usage.prompt_tokens == len(asked[0]["token_ids"])
    assert usage.completion_tokens == sum(len(server.ids(word)) + 1 for word in WORDS)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_streamed_choice_is_told_as_it_comes_and_not_behind_the_others(server, background):
    def answer_in_turns():
        first, second = (submit["request_id"] for submit in submits(server, 2))
        for letter in "abc":
            server.script.emit(second, server.bytes(letter))
            server.script.emit(first, server.bytes(letter.upper()))
        for request_id in (second, first):
            server.script.emit(request_id, [2])

    playing = background.submit(answer_in_turns)
    with server.openai.completions.create(**TEXT[1], n=2, stream=True) as chunks:
        _, _, everything = read_stream(chunks)
    playing.result()
    told = [(choice.index, choice.text) for chunk in everything for choice in chunk.choices if choice.text]
    assert {index for index, _ in told[:4]} == {0, 1}
    assert "".join(text for index, text in told if index == 0) == "ABC"


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_and_choices_are_numbered_prompt_by_prompt(server, background, stream):
    prompts = ["hello", "world"]
    words = ["fox", "dog", "lazy", "brown"]
    played = background.submit(play, server, words)
    ask = {"model": "tiny", "prompt": prompts, "n": 2, "echo": True}
    if stream:
        with server.openai.completions.create(**ask, stream=True, stream_options={"include_usage": True}) as chunks:
            texts, _, everything = read_stream(chunks)
        usage = everything[-1].usage
    else:
        answer = server.openai.completions.create(**ask)
        texts, usage = {choice.index: choice.text for choice in answer.choices}, answer.usage
    asked = played.result()
    assert texts == {0: "hellofox", 1: "hellodog", 2: "worldlazy", 3: "worldbrown"}
    assert [server.text(submit["token_ids"]) for submit in asked] == ["hello", "hello", "world", "world"]
    assert usage.prompt_tokens == sum(len(server.ids(prompt)) for prompt in prompts)


def test_all_are_submitted_before_the_first_token_under_one_name_and_alike_but_for_the_seed(server, background):
    body = TEXT[1] | {"n": 3, "temperature": 1, "seed": 7, "top_p": 0.9, "cache_salt": "s", "speculate": False}
    running = background.submit(lambda: server.http.post(TEXT[0], json=body))
    asked = submits(server, 3)
    ids = [submit.pop("request_id") for submit in asked]
    names, numbers = zip(*(name.rsplit("-", 1) for name in ids), strict=True)
    assert len(set(names)) == 1 and numbers == ("0", "1", "2")
    seeds = [submit["sampling"].pop("seed") for submit in asked]
    assert seeds == [7, seed_of_choice(7, 1), seed_of_choice(7, 2)]
    assert asked[0] == asked[1] == asked[2]
    for name in ids:
        server.script.emit(name, [2])
    assert running.result().status_code == 200


@pytest.mark.parametrize("seed", [0, 7, -2, 2**64 - 1])
def test_the_first_choice_has_the_seed_that_one_alone_would_have(server, seed):
    server.script.plan([2])
    seeds = []
    for n in (1, 4):
        assert server.http.post(TEXT[0], json=TEXT[1] | {"n": n, "seed": seed}).status_code == 200
        seeds.append([submit["sampling"]["seed"] for submit in submits(server, n)])
    assert seeds[0][0] == seeds[1][0] == seed % 2**64
    assert len(set(seeds[1])) == 4


def test_choices_of_neighbouring_seeds_have_no_seed_in_common_and_all_fit_64_bits():
    seeds = [seed_of_choice(seed, choice) for seed in range(64) for choice in range(MAX_CHOICES)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**64 for seed in seeds)


def test_seeds_of_choices_are_those_of_splitmix64():
    """The first numbers of the reference implementation for the seed 1234567."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [seed_of_choice(1234567, choice) for choice in (1, 2, 3)] == known


def test_without_a_seed_every_choice_and_every_request_has_its_own(server):
    server.script.plan([2])
    seeds = set()
    for _ in range(3):
        assert server.http.post(TEXT[0], json=TEXT[1] | {"n": 3, "prompt": ["a", "b"]}).status_code == 200
        seeds |= {submit["sampling"]["seed"] for submit in submits(server, 6)}
    assert len(seeds) == 18


@pytest.mark.parametrize(("path", "base"), [CHAT, TEXT])
@pytest.mark.parametrize("n", [0, -1, MAX_CHOICES + 1, 1.0, "2", True, [2]])
def test_a_wrong_count_is_refused_by_name(server, path, base, n):
    error = error_of(server.http.post(path, json=base | {"n": n}), 400)
    assert (error["param"], error["code"]) == ("n", "invalid_value")
    assert n != 0 or "greater than or equal to 1" in error["message"]


@pytest.mark.parametrize(("path", "base"), [CHAT, TEXT])
def test_as_many_as_may_be_are_answered(server, path, base):
    server.script.plan([*server.ids("fine"), 2])
    answer = server.http.post(path, json=base | {"n": MAX_CHOICES}).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(MAX_CHOICES))


@pytest.mark.parametrize(
    ("prompts", "n", "param"), [(2, 11, "n"), (10, 3, "n"), (20, 2, "n"), (21, 1, "prompt"), (21, 2, "prompt")]
)
def test_more_choices_than_the_server_takes_at_all_are_refused_by_what_makes_them(server, prompts, n, param):
    error = error_of(server.http.post(TEXT[0], json={"prompt": ["hi"] * prompts, "n": n}), 400)
    assert error["param"] == param and "20" in error["message"]


def test_a_small_server_refuses_a_count_that_it_could_never_take(own_server):
    own_server.ready(max_num_seqs=1)
    own_server.script.plan([2])
    error = own_server.http.post(CHAT[0], json=CHAT[1] | {"n": 6}).json()["error"]
    assert error["param"] == "n" and "5" in error["message"]
    assert own_server.http.post(CHAT[0], json=CHAT[1] | {"n": 5}).status_code == 200


def test_every_choice_takes_a_place_and_what_does_not_fit_leaves_nothing_behind(server, background):
    running = background.submit(lambda: server.http.post(TEXT[0], json=TEXT[1] | {"n": 16}))
    ids = [submit["request_id"] for submit in submits(server, 16)]
    refused = server.http.post(TEXT[0], json=TEXT[1] | {"n": 5})
    assert error_of(refused, 429)["type"] == "rate_limit_error" and int(refused.headers["retry-after"]) > 0
    server.script.plan([2])
    assert server.http.post(TEXT[0], json=TEXT[1] | {"n": 4}).status_code == 200
    assert len({submit["request_id"].rpartition("-")[0] for submit in submits(server, 4)}) == 1
    for request_id in ids:
        server.script.emit(request_id, [2])
    assert running.result().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failing", [0, 2])
def test_all_are_aborted_when_one_fails(server, background, stream, failing):
    body = TEXT[1] | {"n": 3, "stream": stream}
    running = background.submit(lambda: server.http.post(TEXT[0], json=body))
    ids = [submit["request_id"] for submit in submits(server, 3)]
    server.script.emit(ids[failing], [], finish="error", error="no luck")
    answer = running.result()
    assert answer.status_code == (200 if stream else 500)
    error = json.loads(answer.text.removeprefix("data: "))["error"]
    assert "no luck" in error["message"]
    others = {request_id for index, request_id in enumerate(ids) if index != failing}
    assert {server.script.see("Abort")["request_id"] for _ in others} == others


def test_a_stream_whose_choice_fails_has_no_end_that_looks_like_one(server, background):
    body = TEXT[1] | {"n": 2, "stream": True}
    running = background.submit(lambda: server.http.post(TEXT[0], json=body))
    first, second = (submit["request_id"] for submit in submits(server, 2))
    server.script.emit(first, server.ids("hello"))
    server.script.emit(second, [], finish="error", error="no luck")
    text = running.result().text
    assert '"error"' in text and "[DONE]" not in text and '"finish_reason":"' not in text
    assert server.script.see("Abort")["request_id"] == first


def test_choices_that_end_differently_each_say_how(server, background):
    running = background.submit(lambda: server.openai.completions.create(**TEXT[1], n=2, max_tokens=3))
    first, second = (submit["request_id"] for submit in submits(server, 2))
    server.script.emit(second, [5, 5, 5])
    server.script.emit(first, [5, 2])
    assert [choice.finish_reason for choice in running.result().choices] == ["stop", "length"]


@pytest.mark.parametrize(("sent", "asked"), [(None, True), (True, True), (False, False), (0, 0), (1, 1), (4, 4)])
def test_speculate_says_whether_to_draft_or_the_most_drafts_of_a_step(server, background, sent, asked):
    running = background.submit(lambda: server.http.post(TEXT[0], json=TEXT[1] | {"speculate": sent}))
    (submit,) = submits(server, 1)
    assert submit["speculate"] is asked if isinstance(asked, bool) else submit["speculate"] == asked
    server.script.emit(submit["request_id"], [2])
    assert running.result().status_code == 200
