"""The page at `/` in a real browser: input, display and messages."""

import json
import re
from collections.abc import Iterator

import pytest

from tests.browser.chromium import BINARY, Tab, browser, new_tab
from tests.fast.api.served import Server, serving, serving_ready
from tests.fast.api.templates import CALL, QWEN, WEATHER

pytestmark = pytest.mark.skipif(BINARY is None, reason="there is no chromium on this machine")

EOS = 2
ANSWER = ".text:not(.reasoning)"
POEM = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def devtools() -> Iterator[str]:
    with browser() as address:
        yield address


@pytest.fixture
def tab(devtools: str) -> Iterator[Tab]:
    """A tab; in the end nothing may have gone wrong in it but refused requests, which browsers always report."""
    with new_tab(devtools) as tab:
        yield tab
        assert [complaint for complaint in tab.complaints if complaint.get("source") != "network"] == []


@pytest.fixture
def page(tab: Tab, server: Server) -> Tab:
    """The page of the server, ready."""
    tab.open(f"{server.url}/")
    tab.until("!document.querySelector('#send').disabled")
    return tab


def plan(server: Server, *texts: str) -> None:
    """Steps of one token a character; the last step ends with the stop token."""
    steps = [server.bytes(text) for text in texts]
    steps[-1].append(EOS)
    server.script.plan(*steps)


def ask(tab: Tab, prompt: str) -> None:
    tab.run("document.querySelector('#prompt').focus()")
    tab.type(prompt)
    tab.press("Enter")


def wait_done(tab: Tab) -> None:
    tab.until("document.querySelector('#status').textContent.startsWith('Done')")


def go(tab: Tab, server: Server, *texts: str) -> None:
    """Plan these steps, ask, and wait for the whole answer."""
    plan(server, *texts)
    ask(tab, "go")
    wait_done(tab)


def text(tab: Tab, selector: str) -> str:
    return tab.run(f"document.querySelector({selector!r}).textContent")


def texts(tab: Tab, selector: str) -> list[str]:
    return tab.run(f"[...document.querySelectorAll({selector!r})].map((found) => found.textContent)")


def colours(tab: Tab) -> list[str]:
    """The background of every step."""
    return tab.run("[...document.querySelectorAll('.step')].map((step) => getComputedStyle(step).backgroundColor)")


def set_field(tab: Tab, selector: str, value: str) -> None:
    tab.run(f"document.querySelector({selector!r}).value = {value!r}")


def narrow(tab: Tab, width: int) -> None:
    """A phone's size. The page folds its panel some time after it has got it."""
    tab.resize(width, 740)
    tab.until("!document.querySelector('#panel').open")


def check(tab: Tab, selector: str) -> None:
    tab.run(f"document.querySelector({selector!r}).click()")


def test_prompt_and_enter_show_the_answer_whole_and_fetch_nothing_from_elsewhere(page, server):
    server.script.plan(server.ids(POEM)[:3], [*server.ids(POEM)[3:], EOS])
    ask(page, "say it")
    wait_done(page)
    assert texts(page, ".question") == ["say it"]
    assert texts(page, ANSWER) == [POEM]
    assert page.run("document.querySelector('#prompt').value") == ""
    fetched = [url.removeprefix(server.url) for url in page.requests if not url.startswith("data:")]
    assert fetched == ["/", "/ready", "/v1/models", "/server_info", "/v1/chat/completions"]


def test_tokens_of_one_step_share_a_colour_and_the_next_step_has_another(page, server):
    go(page, server, "the", " fox", " jumps")
    assert texts(page, ".step") == ["the", " fox", " jumps"]
    assert len(set(colours(page))) == 3
    assert all(re.fullmatch(r"rgb\(.*\)", colour) for colour in colours(page))
    check(page, "#colours")
    assert set(colours(page)) == {"rgba(0, 0, 0, 0)"}


def test_bonus_token_is_marked_and_a_verify_step_is_explained_before_and_beside_the_figures(page, server):
    assert "verify step" in text(page, "#welcome")
    go(page, server, "abcd", "ef")
    assert "tokens a verify step" in text(page, ".meta")
    assert "verify step one pass of the model" in text(page, ".legend")
    assert texts(page, ".step:first-child .bonus") == ["d"]
    border = "getComputedStyle(document.querySelector({!r})).borderBottomWidth"
    assert page.run(border.format(".step .bonus")) == "2px"
    assert page.run(border.format(".step > :not(.bonus)")) == "0px"


def test_steps_tell_about_themselves_to_the_mouse_and_to_the_keyboard(page, server):
    go(page, server, "abcd", "ef")
    x, y = page.run("(({ x, y }) => [x + 3, y + 3])(document.querySelector('.step').getBoundingClientRect())")
    page.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.until("!document.querySelector('#tip').hidden")
    assert text(page, "#tip") == "step 1: 15 verified, 3 accepted + bonus, 10.0 ms"
    page.run("document.querySelector('.step[tabindex=\"0\"]').focus()")
    page.press("ArrowRight")
    assert text(page, "#tip") == "step 2: 15 verified, 2 accepted + bonus, 10.0 ms"


def test_acceptance_length_and_bars_are_those_of_the_steps(page, server):
    plan(server, "abc", "defg")  # The stop token is the second step's bonus.
    ask(page, "go")
    wait_done(page)
    assert text(page, "#length") == "4.00"
    assert text(page, "#steps") == "2"
    assert re.fullmatch(r"\d+(\.\d)? ms", text(page, "#first"))
    bars = page.run("[...document.querySelectorAll('.bar')].map((bar) => bar.title)")
    assert len(bars) == 15
    assert bars[:2] == [f"draft {k}: 100%, accepted in 2 of 2 steps" for k in (1, 2)]
    assert bars[2:4] == [f"draft {k}: 50%, accepted in 1 of 2 steps" for k in (3, 4)]
    assert bars[4] == "draft 5: 0%, accepted in 0 of 2 steps"
    heights = page.run("[...document.querySelectorAll('.fill')].map((fill) => fill.style.height)")
    assert heights == ["100%"] * 2 + ["50%"] * 2 + ["0%"] * 11


def test_a_draft_of_a_smaller_block_has_fewer_bars(tab, own_server):
    own_server.ready(block_size=8)
    tab.open(f"{own_server.url}/")
    tab.until("!document.querySelector('#send').disabled")
    assert len(texts(tab, ".bar")) == 7


def test_figures_are_unknown_until_the_first_token_and_come_with_text_while_the_answer_runs(page, server):
    assert [text(page, f"#{name}") for name in ("rate", "length", "steps", "first")] == ["-"] * 4
    ask(page, "go")
    request_id = server.answer(server.bytes("abc"))
    page.until("document.querySelector('#length').textContent === '3.00'")
    assert text(page, "#rate") == "-"  # All there is came at once.
    server.script.emit(request_id, server.bytes("defgh"))
    page.until("document.querySelector('#length').textContent === '4.00'")
    assert text(page, "#rate") == "500", "5 tokens in the 10 ms that the engine says"
    server.script.emit(request_id, [EOS])
    wait_done(page)
    assert text(page, ANSWER) == "abcdefgh"


def test_compare_shows_both_answers_of_one_seed_and_that_their_text_is_the_same(page, server):
    plan(server, "the fox", " jumps")
    check(page, "#compare")
    ask(page, "go")
    wait_done(page)
    assert texts(page, ANSWER) == ["the fox jumps"] * 2
    assert texts(page, ".answer h2") == ["DFlash", "Plain decoding"]
    assert text(page, ".same") == "yes"
    asked = [server.script.see("Submit") for _ in range(10)]
    assert [one["speculate"] for one in asked] == [True, False] * 5
    assert all(one["sampling"] == asked[0]["sampling"] for one in asked)
    assert all(one["token_ids"] == asked[0]["token_ids"] for one in asked)


def test_the_comparison_is_explained_where_it_is_ticked(page):
    assert not is_shown(page, "#compared")
    check(page, "#compare")
    assert is_shown(page, "#compared")
    explained = text(page, "#compared")
    for word in ("up to 5 times with DFlash", "plain decoding", "texts must be the same", "ratio"):
        assert word in explained, word
    assert page.run("document.querySelector('#compare').getAttribute('aria-describedby')") == "compared"


def test_enter_during_a_comparison_ends_it_and_sends_what_is_typed(page, server):
    check(page, "#compare")
    ask(page, "first")
    server.script.emit(server.answer(server.bytes("one")), [EOS])
    plainly = server.answer(server.bytes("o"))
    page.until(f"document.querySelectorAll('{ANSWER}')[1].textContent === 'o'")
    check(page, "#compare")
    ask(page, "second")
    assert server.script.see("Abort")["request_id"] == plainly
    server.script.emit(server.answer(server.bytes("two")), [EOS])
    wait_done(page)
    assert texts(page, ".question") == ["first", "second"]
    assert texts(page, ".turn > .meta") == ["comparison ended"]
    assert page.run("document.querySelector('#prompt').value") == ""


def test_enter_during_an_answer_waits_for_its_end_and_says_so(page, server):
    check(page, "#compare")
    ask(page, "first")
    request_id = server.answer(server.bytes("on"))
    page.until(f"document.querySelector('{ANSWER}').textContent === 'on'")
    ask(page, "second")
    assert text(page, "#status").startswith("Your message is sent when this answer is complete")
    assert texts(page, ".question") == ["first"]
    page.type("!")
    assert text(page, "#status").startswith("Your message waits no longer"), "it would be sent half edited"
    page.press("Enter")
    check(page, "#compare")
    server.script.emit(request_id, [*server.bytes("e"), EOS])
    server.script.emit(server.answer(server.bytes("two")), [EOS])
    wait_done(page)
    assert texts(page, ".question") == ["first", "second!"]
    assert texts(page, ANSWER) == ["one", "two"], "the first was not compared"


def test_a_message_that_waits_stays_where_it_was_typed_if_the_answer_is_stopped(page, server):
    ask(page, "first")
    server.answer(server.bytes("on"))
    page.until(f"document.querySelector('{ANSWER}').textContent === 'on'")
    ask(page, "second")
    page.press("Escape")
    page.until("!document.querySelector('#send').hidden")
    assert texts(page, ".question") == ["first"]
    assert page.run("document.querySelector('#prompt').value") == "second"


def test_compare_gives_the_ratio_of_several_answers_by_the_engines_clock(page, server):
    check(page, "#compare")
    ask(page, "go")
    for plainly in (6, 2, 3, 4, 10):
        for sizes in ([12], [12 // plainly] * plainly + [12 % plainly]):
            request_id = server.answer(server.bytes("a"))  # with the first step, which no rate counts
            for size in filter(None, sizes):
                server.script.emit(request_id, server.bytes("b" * size))
            server.script.emit(request_id, [EOS])
    wait_done(page)
    assert text(page, ".verdict .ratio").startswith("3.1")
    assert "1.5 to 6.0 in 5 answers, by the engine's clock" in text(page, ".verdict")
    assert "this answer, as received: " in text(page, ".verdict")
    assert text(page, ".same") == "yes"
    assert texts(page, ".answer h2") == ["DFlash", "Plain decoding"]


def test_compare_asks_plainly_only_after_the_first_answer_and_tells_other_text(page, server):
    check(page, "#compare")
    ask(page, "go")
    for answer, speculate in (("one", True), ("two", False)):
        submit = server.script.see("Submit")
        assert submit["speculate"] is speculate
        server.script.emit(submit["request_id"], server.bytes(answer))
        server.script.emit(submit["request_id"], [EOS])
    page.until("document.querySelector('.same')")
    assert text(page, ".same") == "no"
    assert "one answer" in text(page, ".verdict")
    page.press("Escape")
    page.until("document.querySelector('#status').textContent === 'Stopped'")


def test_second_message_carries_the_first_and_a_new_chat_does_not(page, server):
    plan(server, "fine")
    set_field(page, "#system", "be short")
    for prompt in ("how are you?", "and now?"):
        ask(page, prompt)
        wait_done(page)
        prompt_ids = server.script.see("Submit")["token_ids"]
    assert server.tokenizer.backend.decode(prompt_ids, skip_special_tokens=False) == (
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nhow are you?<|im_end|>\n"
        "<|im_start|>assistant\nfine<|im_end|>\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"
    )
    check(page, "#new-chat")
    assert texts(page, ".turn") == []
    ask(page, "hello")
    wait_done(page)
    assert "fine" not in server.text(server.script.see("Submit")["token_ids"])


def test_settings_reach_the_engine(page, server):
    plan(server, "fine")
    for name, value in {"temperature": "0.5", "top-p": "0.9", "seed": "7", "max-tokens": "3"}.items():
        set_field(page, f"#{name}", value)
    ask(page, "go")
    wait_done(page)
    submit = server.script.see("Submit")
    asked = {"temperature": 0.5, "top_p": 0.9, "seed": 7}
    assert {name: submit["sampling"][name] for name in asked} == asked
    assert submit["max_tokens"] == 3
    assert "seed 7 · cut at the limit of tokens" in text(page, ".meta")


def test_escape_stops_the_answer_and_the_engine(page, server):
    ask(page, "go")
    request_id = server.answer(server.bytes("so far"))
    page.until(f"document.querySelector('{ANSWER}').textContent === 'so far'")
    page.press("Escape")
    assert server.script.see("Abort")["request_id"] == request_id
    page.until("!document.querySelector('#send').hidden")
    assert text(page, "#status") == "Stopped"
    assert text(page, ANSWER) == "so far"


def test_slash_focuses_the_prompt_and_shift_enter_makes_a_line(page, server):
    page.run("document.activeElement.blur()")
    page.press("/")
    page.type("a")
    page.press("Enter", shift=True)
    page.type("b")
    assert page.run("document.querySelector('#prompt').value") == "a\nb"


def test_refusal_is_shown_with_its_param_and_the_prompt_comes_back(page, server):
    set_field(page, "#max-tokens", "0")
    ask(page, "go")
    page.until("document.querySelector('.turn .error')")
    assert "(param: max_tokens)" in text(page, ".turn .error")
    assert page.run("document.querySelector('#prompt').value") == "go"


def test_answer_that_breaks_off_says_why(page, server):
    ask(page, "go")
    request_id = server.answer(server.bytes("half"))
    page.until(f"document.querySelector('{ANSWER}').textContent === 'half'")
    server.script.emit(request_id, [], finish="error", error="out of luck")
    page.until("document.querySelector('.turn .error')")
    assert "out of luck" in text(page, ".turn .error")
    page.until("document.querySelector('#status').textContent === 'Ready'")


def test_text_of_the_model_is_never_read_as_html(page, server):
    html = "<img src=x onerror=alert(1)>"
    plan(server, html)
    ask(page, html)
    wait_done(page)
    assert text(page, ".question") == text(page, ANSWER) == html
    assert page.run("document.images.length") == 0


HARMFUL = """<img src=x onerror=a()><script>a()</script>

[a](javascript:a()) [b](JaVaScRiPt&#58;a()) [c](data:text/html,x) [d](/v1) ![e](http://127.0.0.1/e.png)

[f](https://f.f/ "f") [g](mailto:g@g.g)

    <b>code</b>
"""


def markdown(tab: Tab, server: Server, *parts: str) -> None:
    """Hide the steps, ask, and wait until the whole answer is rendered."""
    check(tab, "#colours")
    go(tab, server, *parts)
    tab.until("document.querySelector('.prose:not(.reasoning)').lastElementChild")


def test_without_steps_the_answer_is_markdown_and_with_them_as_it_came(page, server):
    markdown(
        page, server, "# Even\n\nUse `x %", " 2`:\n\n```python\ndef even(x):\n", "    return x\n```\n\n- a\n- **b**\n"
    )
    page.until("document.querySelectorAll('.prose li').length === 2")
    tags = page.run("[...document.querySelector('.prose:not(.reasoning)').children].map((child) => child.tagName)")
    assert tags == ["H1", "P", "PRE", "UL"]
    assert text(page, ".prose pre") == "def even(x):\n    return x\n"
    family = "getComputedStyle(document.querySelector({!r})).fontFamily"
    assert "monospace" in page.run(family.format(".prose pre code"))
    assert "monospace" not in page.run(family.format(".prose p"))
    assert [is_shown(page, box) for box in (ANSWER, ".prose:not(.reasoning)")] == [False, True]
    check(page, "#colours")
    assert [is_shown(page, box) for box in (ANSWER, ".prose:not(.reasoning)")] == [True, False]
    assert "```python" in text(page, ANSWER)


def test_markdown_follows_the_stream(page, server):
    check(page, "#colours")
    ask(page, "go")
    request_id = server.answer(server.bytes("- *a"))
    page.until("document.querySelector('.prose li')?.textContent === '*a'")
    server.script.emit(request_id, [*server.bytes("*"), EOS])
    page.until("document.querySelector('.prose li > em')?.textContent === 'a'")


def test_steps_hidden_after_an_answer_turn_all_answers_into_markdown(page, server):
    for answer in ("*one*", "*two*"):
        plan(server, answer)
        ask(page, "go")
        wait_done(page)
    assert page.run("document.querySelectorAll('.prose em').length") == 0
    check(page, "#colours")
    page.until("document.querySelectorAll('.prose em').length === 2")


def test_a_models_markdown_brings_no_html_no_script_no_image_and_only_links_to_the_web_and_mail(page, server):
    markdown(page, server, HARMFUL)
    page.until("document.querySelector('.prose pre')")
    shown = page.run("document.querySelector('.prose:not(.reasoning)').innerHTML")
    assert set(re.findall(r"<(\w+)", shown)) == {"p", "a", "pre", "code"}
    links = "[...document.querySelectorAll('.prose a')].map((link) => [link.href, link.target, link.rel])"
    safe = ["_blank", "noopener noreferrer"]
    assert page.run(links) == [[href, *safe] for href in ("http://127.0.0.1/e.png", "https://f.f/", "mailto:g@g.g")]
    assert text(page, ".prose pre") == "<b>code</b>\n"
    assert not [url for url in page.requests if "e.png" in url]


def test_a_script_that_got_into_the_page_would_not_run(page, server):
    page.run("document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=\"window.ran = 1\">')")
    page.until("document.images[0].complete")
    page.run("Object.assign(document.body.appendChild(document.createElement('script')), { text: 'window.ran = 2' })")
    assert page.run("window.ran") is None
    assert {complaint["source"] for complaint in page.complaints} == {"security"}
    page.complaints.clear()


def test_reasoning_is_shown_apart_from_the_answer_and_both_in_steps(tab, model_folder):
    with serving(model_folder, reasoning_parser="qwen3") as server:
        server.ready()
        tab.open(f"{server.url}/")
        tab.until("!document.querySelector('#send').disabled")
        ask(tab, "go")
        request_id = server.script.see("Submit")["request_id"]
        for step in ("<think>", "so it ", "is", "</think>", "yes", " and no"):
            server.script.emit(request_id, server.bytes(step))
        server.script.emit(request_id, [EOS])
        wait_done(tab)
        assert texts(tab, ".text.reasoning") == ["so it is"]
        assert texts(tab, ANSWER) == ["yes and no"]


def test_the_api_page_lists_every_operation_and_fetches_nothing_from_elsewhere(tab, server):
    tab.open(f"{server.url}/docs")
    tab.until("document.querySelectorAll('#schemas details').length")
    document = server.http.get("/openapi.json").json()
    wanted = [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
    shown = list(zip(texts(tab, "#operations .method"), texts(tab, "#operations summary code"), strict=True))
    assert shown == wanted
    fetched = [url.removeprefix(server.url) for url in tab.requests if not url.startswith("data:")]
    assert fetched == ["/docs", "/openapi.json"]
    assert tab.complaints == []


def test_no_horizontal_scrolling_at_360_pixels(page, server):
    narrow(page, 360)
    plan(server, "x" * 200)
    check(page, "#compare")
    page.run("document.querySelectorAll('details').forEach((found) => { found.open = true })")
    ask(page, "y" * 200)
    wait_done(page)
    boxes = "['html', '#log', 'aside'].map((box) => document.querySelector(box))"
    assert page.run(f"{boxes}.map((box) => box.scrollWidth <= box.clientWidth)") == [True, True, True]
    first, second = page.run("[...document.querySelectorAll('.answer')].map((box) => box.getBoundingClientRect().top)")
    assert second > first


def is_shown(tab: Tab, selector: str) -> bool:
    return tab.run(f"document.querySelector({selector!r}).checkVisibility()")


def test_on_a_phone_figures_and_legend_are_folded_and_the_answer_has_480_pixels(page, server):
    narrow(page, 375)
    go(page, server, *["a\n" * 10] * 10)
    page.until("document.querySelector('#log').scrollTop > 0")
    top, bottom = page.run(
        "(([answer, log]) => [Math.max(answer.top, log.top), Math.min(answer.bottom, log.bottom)])"
        "(['.answer', '#log'].map((box) => document.querySelector(box).getBoundingClientRect()))"
    )
    assert bottom - top >= 480
    folded = ("#figures", "#bars", ".legend")
    assert [is_shown(page, box) for box in folded] == [False, False, False]
    assert text(page, "#brief") == "20.10 tokens a verify step"
    check(page, "#brief")
    assert [is_shown(page, box) for box in folded] == [True, True, True]
    page.resize(1200, 800)
    page.until("document.querySelector('#panel').open")
    assert [is_shown(page, box) for box in (*folded, "#brief")] == [True, True, True, False]


def test_a_call_is_shown_as_a_call_and_what_is_typed_next_is_its_result(tab, model_folder):
    with serving_ready(model_folder, template=QWEN, tool_call_parser="qwen3") as server:
        tab.resize(375, 740)
        tab.open(f"{server.url}/")
        tab.until("!document.querySelector('#send').disabled")
        tab.run(f"document.querySelector('#tools').value = {json.dumps(json.dumps([WEATHER]))}")
        calls = "".join(CALL.replace("{}", json.dumps({"city": city})) for city in ("Bern", "Oslo"))
        plan(server, calls)
        ask(tab, "weather?")
        wait_done(tab)
        assert texts(tab, ".call") == ['weather({"city": "Bern"})', 'weather({"city": "Oslo"})']
        assert "tool_call" not in text(tab, "#log")
        assert '"weather"' in server.text(server.script.see("Submit")["token_ids"])
        assert tab.run("document.querySelector('#prompt').placeholder") == "Result of weather"
        plan(server, "Sun and rain.")
        ask(tab, "sun")
        ask(tab, "rain")
        tab.until("document.querySelector('#log').textContent.includes('Sun and rain.')")
        wait_done(tab)
        prompt = server.text(server.script.see("Submit")["token_ids"])
        first, second = re.findall(r"<tool_response>\n(.*)\n</tool_response>", prompt)
        assert (first, second) == ("sun", "rain")
        assert tab.run("document.querySelector('#prompt').placeholder") == "Ask something"


def test_tools_that_are_no_json_are_not_sent_and_their_field_says_so(page, server):
    narrow(page, 375)  # where the field is folded away
    set_field(page, "#tools", "[{")
    set_field(page, "#prompt", "go")
    page.run("document.querySelector('#composer').requestSubmit()")  # a key beside a change of size may be lost
    page.until("document.querySelector('#tools + .error').checkVisibility()")
    assert text(page, "#tools + .error").startswith("This is no JSON: ")
    alarm = page.run("getComputedStyle(document.querySelector('#tools + .error')).color")
    assert page.run("getComputedStyle(document.querySelector('#tools')).borderColor") == alarm
    assert page.run("document.querySelector('#prompt').value") == "go"
    set_field(page, "#tools", "")
    plan(server, "fine")
    page.run("document.querySelector('#composer').requestSubmit()")
    wait_done(page)
    assert text(page, "#tools + .error") == ""


def test_what_is_wrong_in_the_settings_leaves_the_focus_where_the_user_types(page):
    check(page, "#settings summary")
    for field, typed in (("#tools", "[{"), ("#temperature", "1e")):
        page.run(f"document.querySelector('{field}').focus()")
        page.type(typed)
        page.run("document.querySelector('#prompt').focus()")
        page.type("a")
        assert page.run("document.activeElement.id") == "prompt"
        assert text(page, f"{field} + .error")
    assert page.run("document.querySelector('#prompt').value") == "aa"
    page.press("Enter")
    assert page.run("document.activeElement.id") == "prompt"
    assert text(page, "#status") == "Not sent: a setting is wrong"
    assert texts(page, ".question") == []


def test_the_welcome_names_the_model_its_limits_and_the_other_pages(page, server):
    assert text(page, "#about") == "tiny on cpu, up to 256 tokens of prompt and answer."
    assert page.run("[...document.querySelectorAll('#welcome a')].map((link) => link.href)") == [f"{server.url}/docs"]
    check(page, "#examples button")
    page.until("document.querySelectorAll('.answer').length === 2")  # compared, because that is what examples are for
    page.press("Escape")


def test_without_a_draft_the_welcome_says_so_and_examples_are_not_compared(tab, own_server):
    own_server.ready(draft=None)
    tab.open(f"{own_server.url}/")
    tab.until("!document.querySelector('#send').disabled")
    assert "It has no draft" in text(tab, "#about")
    check(tab, "#examples button")
    own_server.script.see("Submit")
    assert len(texts(tab, ".answer")) == 1


@pytest.mark.parametrize(
    ("model", "about", "asks_sums"),
    [("demo", "A demo of 3 million parameters", True), ("smollm2", "SmolLM2-135M-Instruct", False), ("a/b", "", False)],
)
def test_the_welcome_speaks_of_the_model_that_is_served(tab, model_folder, model, about, asks_sums):
    with serving_ready(model_folder, model=model) as server:
        tab.open(f"{server.url}/")
        tab.until("!document.querySelector('#send').disabled")
        assert text(tab, "#about").partition("prompt and answer.")[2].strip().startswith(about)
        assert ("million" in text(tab, "#about")) == asks_sums
        examples = texts(tab, "#examples button")
        assert len(examples) == 4 and ("How many apples?" in " ".join(examples)) == asks_sums


def test_the_status_is_ready_again_when_the_engine_is(tab, own_server):
    own_server.ready()
    tab.open(f"{own_server.url}/")
    tab.until("!document.querySelector('#send').disabled")
    ask(tab, "go")
    own_server.answer(own_server.bytes("half"))
    tab.until(f"document.querySelector('{ANSWER}').textContent === 'half'")
    own_server.script.order("die", code=9)
    tab.until("document.querySelector('.turn .error')")
    tab.until("document.querySelector('#status').textContent.startsWith('loading')")
    assert tab.run("document.querySelector('#send').disabled")
    own_server.ready()
    tab.until("document.querySelector('#status').textContent === 'Ready'")
    assert not tab.run("document.querySelector('#send').disabled")


def test_on_a_phone_the_models_name_is_whole_and_a_settled_status_takes_no_room(page, server):
    narrow(page, 390)
    go(page, server, "fine")
    assert not is_shown(page, "#status")
    whole = "((box) => { box.style.maxWidth = 'none'; return box.offsetWidth })"
    shown, wanted = page.run(f"((box) => [box.offsetWidth, {whole}(box)])(document.querySelector('#model'))")
    assert shown == wanted


def test_dark_and_light_follow_the_system(page):
    grounds = {}
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        rgb = page.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        grounds[scheme] = sum(rgb)
    assert grounds["dark"] < 150 < 600 < grounds["light"]


def test_loading_is_shown_until_the_server_is_ready(tab, own_server):
    own_server.script.see("started")
    own_server.script.order("progress", stage="target", done=25, total=100)
    own_server.until(lambda state: state.progress is not None)
    tab.open(f"{own_server.url}/")
    tab.until("document.querySelector('#loading').value === 25")
    assert text(tab, "#status") == "loading: target, 0 s"
    assert tab.run("document.querySelector('#send').disabled")
    own_server.script.order("ready", info=own_server.script.info)
    tab.until("!document.querySelector('#send').disabled")
    assert tab.run("document.querySelector('#loading').hidden")
    assert texts(tab, "#model option") == ["tiny", "also-tiny"]


def test_key_is_asked_for_when_the_server_wants_one(tab, model_folder):
    with serving(model_folder, api_key=["open-sesame"]) as server:
        server.ready()
        tab.open(f"{server.url}/")
        tab.until("!document.querySelector('#access').hidden")
        assert tab.run("document.querySelector('#send').disabled")
        assert text(tab, "#key-error") == "This server needs its API key."
        tab.run("document.querySelector('#key').focus()")
        tab.type("sesame")
        tab.press("Enter")
        tab.until("document.querySelector('#key-error').textContent === 'That key was refused.'")
        tab.run("document.querySelector('#key').select()")
        tab.type("open-sesame")
        tab.press("Enter")
        tab.until("!document.querySelector('#send').disabled")
        assert tab.run("document.querySelector('#access').hidden")
