"""A stream tells every step's verified and accepted drafts, and the text of its tokens."""

import itertools
import json
from typing import Any

import pytest

from app.messages import SpecStep
from tests.fast.api.served import Server, cut

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello world"}]}
TEXT = {"model": "tiny", "prompt": "hello world", "max_tokens": 200}
PATHS = {"chat": ("/v1/chat/completions", CHAT), "completions": ("/v1/completions", TEXT)}
SPECULATION = {"include_speculation": True, "include_usage": True}
WORDS = "naïve 漢字 👩‍👩‍👧 e\u0301 stop here"

both = pytest.mark.parametrize("kind", PATHS)


def chunks(server: Server, kind: str, options: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    path, ask = PATHS[kind]
    return server.chunks(path, ask | {"stream_options": options} | fields)


def text_of(received: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in received for choice in chunk["choices"]]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


def steps_of(received: list[dict[str, Any]]) -> list[dict[str, Any]]:
    choices = [choice for chunk in received for choice in chunk["choices"]]
    return [step for choice in choices for step in choice.get("speculation", {}).get("steps", [])]


def totals(steps: list[dict[str, Any]]) -> dict[str, int]:
    return {
        "steps": len(steps),
        "verified": sum(step["verified"] for step in steps),
        "accepted": sum(step["accepted"] for step in steps),
    }


@both
@pytest.mark.parametrize("seed", range(4))
def test_every_step_tells_its_drafts_and_its_tokens_and_they_are_the_text(server, kind, seed):
    ids = server.bytes(WORDS)
    planned = [*cut(ids, seed), [2]]
    server.script.plan(*planned)
    received = chunks(server, kind, SPECULATION)
    steps = steps_of(received)
    assert {step["ms"] for step in steps} == {10.0}, "the time of the scripted engine's steps"
    assert [(s["verified"], s["accepted"], len(s["tokens"])) for s in steps] == [
        (15, len(step) - 1, len(step)) for step in planned
    ]
    tokens = [token for step in steps for token in step["tokens"]]
    assert "".join(tokens) == text_of(received) == WORDS
    assert not any("\ufffd" in token for token in tokens)
    assert received[-1]["usage"]["speculation"] == totals(steps)
    assert received[-1]["usage"]["completion_tokens"] == len(tokens) == len(ids) + 1


@both
def test_tokens_are_told_as_they_are_spelt_in_the_text(server, kind):
    words = [server.ids(word) for word in ("hello", " world", " how")]
    server.script.plan(*words, [2])
    assert [step["tokens"] for step in steps_of(chunks(server, kind, SPECULATION))] == [
        [server.text([token]) for token in word] for word in words
    ] + [[""]]


@both
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stop", ["字 👩", "stop", ["zzz", "p h"], "here!"])
def test_with_stop_strings_the_tokens_are_still_the_text_and_those_that_count(server, kind, stop, seed):
    ids = server.bytes(WORDS)
    server.script.plan(*cut(ids, seed), [2])
    received = chunks(server, kind, SPECULATION, stop=stop)
    steps = steps_of(received)
    tokens = [token for step in steps for token in step["tokens"]]
    ends = [WORDS.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in WORDS]
    assert "".join(tokens) == text_of(received) == (WORDS[: min(ends)] if ends else WORDS)
    assert received[-1]["usage"]["completion_tokens"] == len(tokens)


@both
@pytest.mark.parametrize("width", [1, 4, 15])
def test_usage_counts_the_steps_that_were_told(server, kind, width):
    """However many steps the engine has made by the time the stop string is found."""
    ids = server.bytes("abc stop " + "and on " * 12)
    server.script.plan(*[ids[i : i + width] for i in range(0, len(ids), width)])
    received = chunks(server, kind, SPECULATION, stop="stop")
    steps = steps_of(received)
    assert len(steps) == -(-len("abc stop") // width)
    assert received[-1]["usage"]["speculation"] == totals(steps)


@both
@pytest.mark.parametrize("stop", [None, "quick"])
def test_steps_that_waited_together_are_one_chunk_and_keep_their_bounds(server, background, kind, stop):
    words = ["the", " quick brown", " fox", " jumps over"]
    ids = [server.bytes(word) for word in words]
    made = [SpecStep(len(tokens), 10 + n, len(tokens) - 1) for n, tokens in enumerate(ids)]

    def play() -> None:
        request_id = server.script.see("Submit")["request_id"]
        server.script.deliver(request_id, [*itertools.chain(*ids), 2], [*made, SpecStep(1, 0, 0)], "stop")

    playing = background.submit(play)
    received = chunks(server, kind, SPECULATION, stop=stop)
    playing.result()
    carrying = [chunk for chunk in received if steps_of([chunk])]
    assert len(carrying) == 1
    steps = steps_of(received)
    if stop is None:
        assert ["".join(step["tokens"]) for step in steps] == [*words, ""]
        assert text_of(received) == text_of(carrying) == "".join(words)
        assert received[-1]["usage"]["speculation"] == totals(steps) | {"steps": 4}  # The last verified nothing.
    else:
        assert ["".join(step["tokens"]) for step in steps] == ["the", " "]
        assert [(step["verified"], len(step["tokens"])) for step in steps] == [(10, 3), (11, len(" quick"))]
        assert received[-1]["usage"]["speculation"] == totals(steps)
        assert received[-1]["usage"]["completion_tokens"] == len("the quick")


@both
def test_an_end_without_a_token_flushes_what_was_held_back(server, background, kind):
    ids = server.bytes("a漢")[:-1]

    def play() -> None:
        request_id = server.script.see("Submit")["request_id"]
        server.script.deliver(request_id, ids, [SpecStep(len(ids), 15, len(ids) - 1)])
        server.script.deliver(request_id, [], [], "length")

    playing = background.submit(play)
    received = chunks(server, kind, SPECULATION)
    playing.result()
    assert text_of(received) == "a\ufffd"
    assert received[-1]["usage"]["completion_tokens"] == len(ids)


@both
def test_several_tokens_of_one_step_are_one_chunk(server, background, kind):
    words = ["the quick", " brown fox jumps", " over"]
    path, ask = PATHS[kind]
    started = background.submit(server.answer, server.ids(words[0]))
    told = []
    body = ask | {"stream": True, "stream_options": SPECULATION}
    with server.http.stream("POST", path, json=body) as response:
        request_id = started.result()
        for line in response.iter_lines():
            if line.startswith("data: {") and (steps := steps_of([json.loads(line[6:])])):
                told.append((text_of([json.loads(line[6:])]), ["".join(step["tokens"]) for step in steps]))
                upcoming = server.ids(words[len(told)]) if len(told) < len(words) else [2]
                if len(told) <= len(words):
                    server.script.emit(request_id, upcoming)
    assert told == [(word, [word]) for word in words] + [("", [""])]


@pytest.mark.parametrize("several", [{"prompt": ["x", "y"]}, {"n": 2}], ids=str)
def test_each_of_several_answers_tells_its_own_steps(server, several):
    ids = server.bytes("abcdef")
    server.script.plan(ids[:4], ids[4:], [2])
    received = chunks(server, "completions", SPECULATION, **several)
    for index in (0, 1):
        own = [c for c in received if any(choice["index"] == index for choice in c["choices"])]
        assert [step["tokens"] for step in steps_of(own)] == [list("abcd"), list("ef"), [""]]
    assert received[-1]["usage"]["speculation"] == {"steps": 6, "verified": 90, "accepted": 8}


@both
@pytest.mark.parametrize(
    "options",
    [None, {}, {"include_usage": True}, {"include_speculation": False}, {"include_speculation": None}],
    ids=str,
)
def test_nothing_is_told_unless_it_is_asked_for(server, kind, options):
    server.script.plan(server.ids("hello"), [2])
    received = chunks(server, kind, options)
    assert "speculation" not in json.dumps(received)
    server.script.plan(server.ids("hello"), [2])
    path, ask = PATHS[kind]
    assert "speculation" not in server.http.post(path, json=ask).text


@both
def test_without_include_usage_the_chunks_tell_their_steps_and_no_usage_follows(server, kind):
    server.script.plan(server.ids("hello"), [2])
    received = chunks(server, kind, {"include_speculation": True})
    assert steps_of(received) and all(chunk["choices"] for chunk in received)
    assert not any("usage" in chunk for chunk in received)


@both
@pytest.mark.parametrize("include_usage", [True, None])
def test_continuous_usage_is_on_every_chunk_and_only_grows(server, background, kind, include_usage):
    ids = server.ids("the quick brown fox")
    path, ask = PATHS[kind]
    options = {"continuous_usage_stats": True, "include_usage": include_usage}

    def play() -> str:
        submit = server.script.see("Submit")
        server.script.emit(submit["request_id"], ids[:1])
        return submit

    playing = background.submit(play)
    counts = []
    sent = 1
    with server.http.stream("POST", path, json=ask | {"stream": True, "stream_options": options}) as response:
        submit = playing.result()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk["usage"]
            assert usage["prompt_tokens"] == len(submit["token_ids"])
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            counts.append(usage["completion_tokens"])
            assert include_usage or chunk["choices"]
            if text_of([chunk]):
                assert counts[-1] == sent
                server.script.emit(submit["request_id"], ids[sent : sent + 1] or [2])
                sent += 1
    assert counts == sorted(counts)
    assert set(counts) == set(range(1, len(ids) + 2))


@both
@pytest.mark.parametrize("option", ["include_speculation", "continuous_usage_stats", "include_usage"])
def test_stream_options_are_true_or_false_and_for_streams(server, kind, option):
    path, ask = PATHS[kind]
    wrong = server.http.post(path, json=ask | {"stream": True, "stream_options": {option: "yes"}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, f"stream_options.{option}")
    alone = server.http.post(path, json=ask | {"stream_options": {option: True}})
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, "stream_options")
