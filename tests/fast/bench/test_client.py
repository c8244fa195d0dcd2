"""One request's stream: events however they are cut, moments exactly, failures told; and a server's counters."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fast.bench.scripted_server import DONE, Script, event, serving, usage
from tools.bench.client import Answer, Drafting, Events, Server, ServerError, ask, first_model, positions
from tools.bench.formats import Prompt

HELLO = Prompt({"messages": [{"role": "user", "content": "hello"}]})


def asked(script: Script, prompt: Prompt = HELLO, status: int = 200, **server: Any) -> tuple[Answer, Any, str]:
    """The answer, and the body and path that the server saw; the request is sent at second 10."""

    async def ask_once() -> tuple[Answer, Any, str]:
        async with serving(script, status, now=10.0) as scripted:
            peer = Server("peer", scripted.url, "tiny", **server)
            async with peer.connect(600.0) as http:
                answer = await ask(http, peer, prompt, {"max_tokens": 9}, clock=scripted.clock)
            return answer, scripted.seen[0], scripted.paths[0]

    return asyncio.run(ask_once())


def test_the_times_of_an_answer_are_exactly_those_of_its_chunks() -> None:
    role = 'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    answer, *_ = asked(
        [
            (10.5, role),
            (11.0, event("one")),
            (11.25, event(" two three")),
            (12.0, event(" four five six")),
            (12.0, event(reason="stop") + usage(6, 7, 3) + DONE),
        ]
    )
    assert answer.error is None and answer.text == "one two three four five six"
    assert answer.ttft == 1.0
    assert answer.gaps == [0.25, 0.75]
    assert answer.tpot == (12.0 - 11.0) / (6 - 1)
    assert answer.e2el == 2.0
    assert (answer.prompt_tokens, answer.cached_tokens, answer.tokens) == (7, 3, 6)


@pytest.mark.parametrize(
    ("script", "ttft", "tpot"),
    [
        ([(11.0, event("one")), (13.0, event(reason="stop") + usage(2) + DONE)], 1.0, 2.0),
        ([(11.0, event("one", "length") + usage(1) + DONE)], 1.0, None),
        ([(11.0, event("one")[:20]), (12.5, event("one")[20:] + event(reason="stop") + usage(1) + DONE)], 2.5, None),
    ],
    ids=["last token without text", "single token", "event cut in two"],
)
def test_times_to_and_per_token(script: Script, ttft: float, tpot: float | None) -> None:
    answer, *_ = asked(script)
    assert (answer.error, answer.ttft, answer.tpot, answer.gaps) == (None, ttft, tpot, [])


def test_completions_and_reasoning_bring_text_too() -> None:
    text = 'data: {"choices": [{"index": 0, "text": "one", "finish_reason": null}]}\n\n'
    end = 'data: {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}\n\n'
    answer, _, path = asked([(11.0, text), (12.0, end + usage(1) + DONE)], Prompt({"prompt": "hello"}))
    assert (path, answer.text, answer.ttft) == ("/v1/completions", "one", 1.0)
    thought = 'data: {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}\n\n'
    answer, *_ = asked([(11.0, thought), (12.0, event("one", "stop") + usage(2) + DONE)])
    assert (answer.text, answer.ttft) == ("one", 1.0)


def test_the_request_wants_a_stream_with_usage() -> None:
    _, body, path = asked([(11.0, event("x", "stop") + usage(1))], fields={"top_k": 1}, api_key="secret")
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "tiny",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 9,
        "top_k": 1,
    }


def test_a_prompt_of_exact_length_ignores_the_end_of_the_text() -> None:
    _, body, _ = asked([(11.0, event("x", "length") + usage(1))], Prompt({"prompt": "a"}, max_tokens=4, exact=True))
    assert (body["max_tokens"], body["ignore_eos"], body["skip_special_tokens"]) == (4, True, False)


@pytest.mark.parametrize(
    ("script", "status", "error"),
    [
        ([(11.0, '{"error": {"message": "too long"}}')], 400, "HTTP 400: too long"),
        ([(11.0, "<html>bad\n gateway")], 502, "HTTP 502: <html>bad gateway"),
        ([(11.0, event("x")), (12.0, 'data: {"error": {"message": "engine died"}}\n\n')], 200, "engine died"),
        ([(11.0, event("x"))], 200, "the stream ended without a finish_reason"),
        ([(11.0, event("x", "stop") + DONE)], 200, "no usage came"),
        ([(11.0, "data: {nonsense\n\n")], 200, "an event is no chunk of an answer"),
        ([(11.0, 'data: ["list"]\n\n')], 200, "an event is no chunk of an answer"),
    ],
)
def test_what_goes_wrong_is_told(script: Script, status: int, error: str) -> None:
    answer, *_ = asked(script, status=status)
    assert answer.error is not None and answer.error.startswith(error)
    assert answer.last >= 11.0


def test_a_server_that_is_not_there_fails_the_request_and_names_no_model() -> None:
    nobody = Server("nobody", "http://127.0.0.1:9")

    async def ask_nobody() -> Answer:
        async with nobody.connect(600.0) as http:
            return await ask(http, nobody, HELLO, {})

    assert "ConnectError" in str(asyncio.run(ask_nobody()).error)
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        asyncio.run(first_model(nobody))


def looked(find: Callable[[Server], Awaitable[Any]], said: str, status: int = 200) -> Any:
    """Return what `find` makes of a server that says this."""

    async def look() -> Any:
        async with serving([(0.0, said)], status) as scripted:
            return await find(Server("peer", scripted.url, "small"))

    return asyncio.run(look())


@pytest.mark.parametrize(
    ("status", "said", "error"),
    [
        (401, "{}", "wants a key"),
        (404, "not here", "names no model: HTTP 404: not here"),
        (200, '{"data": []}', "names"),
    ],
)
def test_a_server_that_names_no_model_is_an_error(status: int, said: str, error: str) -> None:
    with pytest.raises(ServerError, match=error):
        looked(first_model, said, status)


@pytest.mark.parametrize(("keep_alive", "connections"), [(True, 1), (False, 3)])
def test_a_request_has_a_connection_of_its_own_if_none_is_kept(keep_alive: bool, connections: int) -> None:
    async def ask_thrice() -> int:
        async with serving([]) as app:
            async with Server("peer", app.url, keep_alive=keep_alive).connect(600.0) as http:
                for _ in range(3):
                    await http.get("/metrics")
            return len(app.clients)

    assert asyncio.run(ask_thrice()) == connections


def test_the_first_model_that_is_named_is_taken() -> None:
    assert looked(first_model, '{"data": [{"id": "big"}, {"id": "small"}]}') == "big"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('{"data": [{"id": "big", "max_model_len": 9}, {"id": "small", "max_model_len": 7}]}', 7),
        ('{"data": [{"id": "small"}]}', None),
        ('{"data": [{"id": "big", "max_model_len": 9}]}', None),
        ("none of that", None),
    ],
)
def test_the_positions_of_a_model_are_what_its_server_tells(said: str, told: int | None) -> None:
    assert looked(positions, said) == told


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_events_come_out_the_same_however_their_bytes_are_cut(end: str, step: int) -> None:
    text = end.join([": keep-alive", "", "data: één", "", "event: x", "data:a", "data: b", "", "data: [DONE]", "", ""])
    raw = text.encode()
    events = Events()
    found = [data for at in range(0, len(raw), step) for data in events.feed(raw[at : at + step])]
    assert found == ["één", "a\nb", "[DONE]"]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"))), st.data())
def test_any_events_come_out_the_same_wherever_their_bytes_are_cut(sent: list[str], data: st.DataObject) -> None:
    """Within a character, a line end, a field's name; with comments between them, as keep-alives are."""
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    raw = "".join(f": keep-alive{end}{end}data: {text}{end}{end}" for text in sent).encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))))
    events = Events()
    found = [text for start, stop in pairwise([0, *cuts, len(raw)]) for text in events.feed(raw[start:stop])]
    assert found == sent


OURS = """\
# TYPE dflash:spec_decode_num_drafts_total counter
dflash:spec_decode_num_drafts_total 10.0
dflash:spec_decode_num_draft_tokens_total 100.0
dflash:spec_decode_num_accepted_tokens_total 25.0
dflash:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 8.0
dflash:spec_decode_num_accepted_tokens_per_pos_total{position="10"} 1.0
dflash:spec_decode_num_verified_tokens_per_pos_total{position="0"} 10.0
dflash:spec_decode_num_verified_tokens_per_pos_total{position="10"} 4.0
dflash:spec_decode_num_drafts_created 1.7e+09
"""
VLLM = """\
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 3.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 1.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 1.0
"""


def test_drafting_is_what_the_counters_grew_by() -> None:
    before = Drafting.read(OURS)
    after = Drafting.read(OURS.replace(" 10.0", " 20.0").replace(" 25.0", " 55.0").replace(" 8.0", " 17.0"))
    assert before is not None and after is not None
    grown = after.since(before)
    assert grown.steps == 10 and grown.acceptance_length == 1 + 30 / 10
    assert grown.acceptance_at == [0.9]  # the draft at 10 was never verified in between
    assert before.acceptance_at == [0.8, 0.25]
    assert grown.and_also(before).acceptance_length == 1 + 55 / 20


def test_vllms_counters_are_read_over_its_engines_and_without_counts_of_what_was_verified() -> None:
    found = Drafting.read(VLLM)
    assert found is not None
    assert (found.acceptance_length, found.acceptance_at) == (1 + 6 / 4, [3 / 4])


SGLANG = """\
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{model_name="m",tp_rank="0"} 9.5
sglang:num_requests_total{model_name="m"} 2.0
sglang:generation_tokens_total{model_name="m",is_streaming="true"} 50.0
sglang:generation_tokens_total{model_name="m",is_streaming="false"} 12.0
"""
VERIFY_CALLS = 'sglang:spec_verify_calls_total{model_name="m"} 25.0\n'


def test_sglangs_acceptance_is_of_tokens_after_the_first_and_of_verify_calls() -> None:
    plain = Drafting.read(SGLANG)
    after = Drafting.read(SGLANG.replace(" 2.0", " 6.0").replace(" 50.0", " 1.54e+02") + VERIFY_CALLS)
    assert plain is not None and after is not None
    assert after.since(plain).steps == 25 and after.since(plain).acceptance_length == (104 - 4) / 25
    assert after.acceptance_at == []


def test_without_verify_calls_sglang_has_no_acceptance_length_even_if_its_gauge_has_one() -> None:
    before, after = Drafting.read(SGLANG), Drafting.read(SGLANG.replace(" 50.0", " 99.0"))
    assert before is not None and after is not None and after.since(before).acceptance_length is None
    fresh = Drafting.read("sglang:num_running_reqs 1.0\n")
    assert fresh is not None and fresh.steps == 0 and fresh.acceptance_length is None


def test_without_counters_there_is_no_drafting_and_without_drafts_no_acceptance_length() -> None:
    assert Drafting.read("peer:num_running_reqs 1.0\n") is Drafting.read("") is None
    found = Drafting.read("dflash:spec_decode_num_drafts_total 0.0\n")
    assert found is not None and found.acceptance_length is None and found.acceptance_at == []
