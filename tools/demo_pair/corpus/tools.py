"""Conversations with tools: calls in Qwen3's form, answers that tell results, and questions that no tool fits."""

import json
from random import Random
from typing import Any

from tools.demo_pair.corpus import code, copying, math, prose, talk
from tools.demo_pair.corpus.sample import Drawn, Message, Sample, Split
from tools.demo_pair.corpus.tool_kinds import draw_need, draw_tool, draw_tools
from tools.demo_pair.corpus.tool_schemas import STYLES, schema

CALL, END_CALL = "<tool_call>", "</tool_call>"
SYSTEM = (
    "You are a helpful assistant.",
    "You are a small demo model.",
    "Answer briefly.",
    "You are a helpful agent.",
    "Use the tools.",
    "You are a friendly assistant with tools.",
    "Be polite.",
    "Use a tool where one fits.",
    "Answer the user's questions with the tools.",
)
_NO_TOOL = {"math": math.draw, "copy": copying.draw_known, "code": code.draw, "talk": talk.draw, "prose": prose.draw}
_ASKS_FOR_A_TOOL = (
    "what is the",
    "weather",
    "time",
    "translate",
    "alarm",
    "find",
    "book",
    "email",
    "who is",
    "open the",
)


class Conversation:
    """Endless conversation about one set of tools. `head` is its system message, if there is one."""

    def __init__(self, rng: Random, split: Split) -> None:
        self._rng, self._split = rng, split
        count = rng.choices((1, 2, 3, 4, 5), (0.3, 0.35, 0.25, 0.07, 0.03))[0]
        self._tools = draw_tools(rng, count)
        style = rng.choice(STYLES)
        self.tools: list[dict[str, Any]] = [schema(rng, tool, style) for tool in self._tools]
        self.head: list[Message] = []
        if rng.random() < 0.35:
            self.head = [{"role": "system", "content": rng.choice(SYSTEM)}]

    def exchange(self, can_tell_stories: bool = True) -> tuple[list[Message], str]:
        """Return the messages from a question to its answer, and what belongs to one split: the question or its template."""
        if self._rng.random() < 0.15:
            return self._without_call(can_tell_stories)
        need = draw_need(self._rng, self._split, self._rng.choice(self._tools))
        return [_ask(need.question), *_called(need.call, need.result), _say(need.answer)], need.question

    def _without_call(self, can_tell_stories: bool) -> tuple[list[Message], str]:
        """Return a question that none of the tools fits."""
        keys = {tool.key for tool in self._tools}
        if self._rng.random() < 0.4 and "search" not in keys:
            while (tool := draw_tool(self._rng)).key in {*keys, "add", "multiply"}:
                pass
            need = draw_need(self._rng, self._split, tool)
            return [_ask(need.question), _say(talk.CANNOT)], f"without {need.question}"
        domains = list(_NO_TOOL) if can_tell_stories else [domain for domain in _NO_TOOL if domain != "prose"]
        while True:
            domain = self._rng.choice(domains)
            drawn = _NO_TOOL[domain](self._rng, self._split)
            (question, *more) = drawn.sample.messages
            text = question["content"].lower()
            is_a_sum = any(f" {sign} " in text for sign in "+-*/")
            may_fit = is_a_sum if domain == "math" else any(part in text for part in _ASKS_FOR_A_TOOL)
            if not more and not may_fit and len(text) + len(drawn.sample.answer) < 320:
                return [question, _say(drawn.sample.answer)], f"without {drawn.template}"


def draw(rng: Random, split: Split) -> Drawn:
    """Return a conversation that ends somewhere in its last exchange, where it has a call at that call most often."""
    conversation = Conversation(rng, split)
    messages = list(conversation.head)
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        messages += conversation.exchange(can_tell_stories=False)[0]
    last, template = conversation.exchange(can_tell_stories=False)
    ends = [i for i, message in enumerate(last) if message["role"] == "assistant"]
    end = rng.choices(ends, [3 if "tool_calls" in last[i] else 1 for i in ends])[0]
    return Drawn(Sample("tools", messages + last[:end], text_of(last[end]), tuple(conversation.tools)), template)


def text_of(message: Message) -> str:
    """Return the text of an assistant's message with its calls, as the model writes it."""
    return "\n".join(
        [message["content"]] * bool(message["content"]) + [_call_text(c) for c in message.get("tool_calls", ())]
    )


def calls_in(text: str) -> list[Any] | None:
    """Return the calls in `text`, or None if there are none or one is no JSON."""
    try:
        return [json.loads(part.partition(END_CALL)[0]) for part in text.split(CALL)[1:]] or None
    except ValueError:
        return None


def _call_text(call: dict[str, Any]) -> str:
    return f"{CALL}\n{json.dumps(call['function'], ensure_ascii=False)}\n{END_CALL}"


def _ask(text: str) -> Message:
    return {"role": "user", "content": text}


def _say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _called(call: dict[str, Any], result: str) -> list[Message]:
    made = [{"type": "function", "function": call}]
    return [{"role": "assistant", "content": "", "tool_calls": made}, {"role": "tool", "content": result}]
