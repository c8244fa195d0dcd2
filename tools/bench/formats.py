"""Prompts from entries of JSON: chats, texts, and the published evaluations, which are recognised by their fields."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
"""Instruction after the questions of GSM8K and MATH-500 in DFlash's evaluation, like HumanEval's and Alpaca's below."""
LETTER = 'End with the letter of the right choice, like this: "Answer: A".'
HUMAN_EVAL = "Write a solution to the following problem and make sure that it passes the tests:"
MBPP = "You are an expert Python programmer, and here is your task:"
IN_A_BLOCK = "Put the whole solution into one block of Python code."
LETTERS = "ABCDEFGHIJ"
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Fields `messages` or `prompt` of a request.

    `max_tokens` None leaves the length to the bench. `exact` asks for all tokens, beyond the end of the text. A prompt
    that `follows` is asked after the answer to the previous one, in the same conversation.
    """

    body: Mapping[str, Any]
    max_tokens: int | None = None
    exact: bool = False
    follows: bool = False


@dataclass(frozen=True, slots=True)
class Format:
    """Entries with `fields`. `read` returns the prompts of one, whose questions `instruction` follows."""

    name: str
    fields: tuple[str, ...]
    read: Callable[[Fields, str], list[Prompt]]
    instruction: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.fields)})"


def prompts_of(fields: object) -> list[Prompt]:
    """Return the prompts of one entry (two for MT-Bench). Raises ValueError."""
    if not isinstance(fields, dict):
        raise ValueError(f"an object is wanted, not {fields!r:.40}")
    for form in FORMATS:
        if all(name in fields for name in form.fields):
            return form.read(fields, form.instruction)
    raise ValueError(f"its fields ({', '.join(fields)}) are of no known format")


def _text(fields: Fields, name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r:.40}, not a text")
    return value


def _texts(fields: Fields, name: str) -> list[str]:
    values = fields.get(name) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} is {values!r:.40}, not a list of texts")
    return values


def _length(fields: Fields) -> int | None:
    max_tokens = fields.get("max_tokens")
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise ValueError(f"max_tokens is {max_tokens!r}, not a number of tokens")
    return max_tokens


def _question(fields: Fields, content: str, instruction: str) -> Prompt:
    content = "\n".join(filter(None, (content, instruction)))
    return Prompt({"messages": [{"role": "user", "content": content}]}, _length(fields))


def _asked(fields: Fields, instruction: str, *, field: str) -> list[Prompt]:
    return [_question(fields, _text(fields, field), instruction)]


def _mmlu(fields: Fields, instruction: str) -> list[Prompt]:
    choices = _texts(fields, "choices") or [str(fields[letter]) for letter in "ABCD"]
    if len(choices) > len(LETTERS):
        raise ValueError(f"it has {len(choices)} choices, at most {len(LETTERS)} have letters")
    listed = (f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
    return [_question(fields, "\n".join([_text(fields, "question"), *listed]), instruction)]


def _human_eval(fields: Fields, instruction: str) -> list[Prompt]:
    return [_question(fields, f"{HUMAN_EVAL}\n```python\n{_text(fields, 'prompt')}\n```", instruction)]


def _mbpp(fields: Fields, instruction: str, *, task: str) -> list[Prompt]:
    content = f"{MBPP} {_text(fields, task)} Your code should pass these tests:\n\n"
    return [_question(fields, content + "\n".join(_texts(fields, "test_list")), instruction)]


def _alpaca(fields: Fields, instruction: str) -> list[Prompt]:
    more = _text(fields, "input") if fields.get("input") else ""
    content = _text(fields, "instruction") + (f"\n\nInput:\n{more}" if more else "")
    return [_question(fields, content, instruction)]


def _mt_bench(fields: Fields, instruction: str) -> list[Prompt]:
    asked = [_question(fields, turn, instruction) for turn in _texts(fields, "turns")]
    if not asked:
        raise ValueError("turns is empty")
    return [asked[0], *(replace(prompt, follows=True) for prompt in asked[1:])]


def _plain(fields: Fields, _: str) -> list[Prompt]:
    return [Prompt({"prompt": _text(fields, "prompt")}, _length(fields))]


def _chat(fields: Fields, _: str, *, key: str, role: str, content: str) -> list[Prompt]:
    return [Prompt({"messages": list(_up_to_an_answer(fields[key], key, role, content))}, _length(fields))]


FORMATS = (
    Format("HumanEval", ("task_id", "prompt", "test", "entry_point"), _human_eval, IN_A_BLOCK),
    Format("MBPP", ("text", "code", "test_list"), partial(_mbpp, task="text"), IN_A_BLOCK),
    Format("sanitised MBPP", ("prompt", "test_list"), partial(_mbpp, task="prompt"), IN_A_BLOCK),
    Format("MATH-500", ("problem", "answer"), partial(_asked, field="problem"), BOXED),
    Format("MMLU", ("question", "choices", "answer"), _mmlu, LETTER),
    Format("MMLU", ("question", "A", "B", "C", "D", "answer"), _mmlu, LETTER),
    Format("GSM8K", ("question", "answer"), partial(_asked, field="question"), BOXED),
    Format("MT-Bench", ("question_id", "turns"), _mt_bench),
    Format("Alpaca", ("instruction", "output"), _alpaca),
    Format("a text", ("prompt",), _plain),
    Format("a chat", ("messages",), partial(_chat, key="messages", role="role", content="content")),
    Format("ShareGPT", ("conversations",), partial(_chat, key="conversations", role="from", content="value")),
)
KNOWN = f"known formats: {', '.join(map(str, FORMATS))}"


def _up_to_an_answer(turns: object, key: str, role: str, content: str) -> Iterator[dict[str, str]]:
    """Yield `messages` without an answer at their end, or ShareGPT's `conversations` up to the first answer."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"{key} is no list of objects")
    if key == "messages":
        while turns and turns[-1].get(role) == "assistant":
            turns = turns[:-1]
    found = False
    for turn in turns:
        who = ROLES.get(str(turn.get(role)))
        if who is None or not isinstance(turn.get(content), str):
            raise ValueError(f"in {key} a turn has {role} {turn.get(role)!r} and {content} {turn.get(content)!r:.40}")
        if key == "conversations" and who == "assistant" and found:
            return
        if key == "messages" or who != "assistant":
            found = found or who == "user"
            yield {"role": who, "content": turn[content]}
    if not found:
        raise ValueError(f"{key} has no user's turn")
