import pytest

ASK = {"model": "tiny"}


@pytest.mark.parametrize("as_ids", [False, True])
def test_prompt_may_be_text_or_token_ids(server, as_ids):
    ids = server.ids("hello world")
    server.script.plan(server.ids(" again"), [2])
    answer = server.openai.completions.create(**ASK, prompt=ids if as_ids else "hello world")
    submit = server.script.see("Submit")
    assert submit["token_ids"] == ids
    assert submit["max_tokens"] == 16
    assert answer.choices[0].text == " again"
    assert answer.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_list_of_prompts_gets_an_answer_each_in_its_own_order(server, background, as_ids, stream):
    prompts = ["hello", "world", "fox"]
    sent = [server.ids(p) for p in prompts] if as_ids else prompts

    def answer_in_reverse():
        submits = [server.script.see("Submit") for _ in prompts]
        for submit in reversed(submits):
            server.script.emit(submit["request_id"], submit["token_ids"])
            server.script.emit(submit["request_id"], [2])

    done = background.submit(answer_in_reverse)
    if stream:
        texts = ["", "", ""]
        with server.openai.completions.create(**ASK, prompt=sent, stream=True) as chunks:
            for chunk in chunks:
                texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        answer = server.openai.completions.create(**ASK, prompt=sent)
        texts = [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]
        tokens = sum(len(server.ids(p)) for p in prompts)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (tokens, tokens + 3)
    done.result()
    assert texts == prompts


def test_stream_equals_non_stream_and_counts_the_same(server):
    ids = server.bytes("漢字 and more")
    server.script.plan(ids[:2], ids[2:5], ids[5:])
    ask = ASK | {"prompt": "x", "max_tokens": len(ids)}
    whole = server.openai.completions.create(**ask)
    with server.openai.completions.create(**ask, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text == "漢字 and more"
    assert chunks[-1].usage == whole.usage
    assert whole.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "expected", "counted"),
    [("o wo", "hell", 8), (["zzz", "rld"], "hello wo", 11), ("h", "", 1), ("d!", "hello worl", 12), ("xyz", None, 15)],
)
@pytest.mark.parametrize("width", [1, 3, 15])
def test_stop_strings_are_cut_exactly_across_tokens_and_steps(server, stream, stop, expected, counted, width):
    words = "hello world! x"
    ids = [*server.bytes(words), 2]
    server.script.plan(*[ids[i : i + width] for i in range(0, len(ids), width)])
    ask = ASK | {"prompt": "p", "stop": stop, "max_tokens": 40}
    if stream:
        with server.openai.completions.create(**ask, stream=True, stream_options={"include_usage": True}) as chunks:
            received = list(chunks)
        text = "".join(c.choices[0].text for c in received if c.choices)
        usage = received[-1].usage
        reasons = [c.choices[0].finish_reason for c in received if c.choices and c.choices[0].finish_reason]
    else:
        answer = server.openai.completions.create(**ask)
        text, usage, reasons = answer.choices[0].text, answer.usage, [answer.choices[0].finish_reason]
    assert text == (words if expected is None else expected)
    assert usage.completion_tokens == counted
    assert reasons == ["stop"]


def test_a_matched_stop_string_aborts_what_the_engine_still_does(server, background):
    running = background.submit(lambda: server.openai.completions.create(**ASK, prompt="p", stop="lo w"))
    request_id = server.script.see("Submit")["request_id"]
    server.script.emit(request_id, server.bytes("hello"))
    server.script.emit(request_id, server.bytes(" world"))
    assert server.script.see("Abort")["request_id"] == request_id
    answer = running.result()
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hel", "stop")
    assert answer.usage.completion_tokens == 7


def test_a_stop_string_is_never_leaked_in_a_stream(server, background):
    def play():
        request_id = server.script.see("Submit")["request_id"]
        for letter in "abENabEND more":
            server.script.emit(request_id, server.bytes(letter))

    playing = background.submit(play)
    with server.openai.completions.create(**ASK, prompt="p", stop="END", stream=True) as chunks:
        pieces = [chunk.choices[0].text for chunk in chunks]
    playing.result()
    assert "".join(pieces) == "abENab"
    assert not any(piece.endswith("E") for piece in pieces)
