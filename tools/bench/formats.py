"""Prompts from entries of JSON: chats, texts, and the published evaluations, which are recognised by their fields."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tools.bench.judges import Judge, box_is, code_passes, final_number, letter_is, number_is

BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
"""Instruction after the questions of GSM8K and MATH-500 in DFlash's own evaluation, as are HumanEval's and Alpaca's."""
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
    judge: Judge | None = None
    follows: bool = False


@dataclass(frozen=True, slots=True)
class Format:
    """Entries with `fields`. `read` returns the prompts of one, whose questions an instruction follows."""

    name: str
    fields: tuple[str, ...]
    read: Callable[[Fields, str], list[Prompt]]
    instruction: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.fields)})"


def prompts_of(fields: object, instruction: str | None = None) -> list[Prompt]:
    """Return the prompts of one entry, of which MT-Bench has two. `instruction` None means the evaluation's own one.

    Raises ValueError.
    """
    if not isinstance(fields, dict):
        raise ValueError(f"an object is wanted, not {fields!r:.40}")
    for form in FORMATS:
        if all(name in fields for name in form.fields):
            return form.read(fields, form.instruction if instruction is None else instruction)
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


def _question(fields: Fields, content: str, instruction: str, judge: Judge | None = None) -> Prompt:
    content = "\n".join(filter(None, (content, instruction)))
    return Prompt({"messages": [{"role": "user", "content": content}]}, _length(fields), judge=judge)


def _gsm8k(fields: Fields, instruction: str) -> list[Prompt]:
    number = final_number(_text(fields, "answer"))
    if number is None:
        raise ValueError("its answer has no number")
    return [_question(fields, _text(fields, "question"), instruction, number_is(number))]


def _math_500(fields: Fields, instruction: str) -> list[Prompt]:
    return [_question(fields, _text(fields, "problem"), instruction, box_is(_text(fields, "answer")))]


def _mmlu(fields: Fields, instruction: str) -> list[Prompt]:
    choices = _texts(fields, "choices") or [str(fields[letter]) for letter in "ABCD" if letter in fields]
    answer = fields["answer"]
    letters = LETTERS[: len(choices)]
    letter = letters[answer] if isinstance(answer, int) and answer in range(len(letters)) else str(answer).strip()
    if letter not in list(letters):
        raise ValueError(f"answer is {answer!r:.40}, not one of {len(choices)} choices")
    listed = (f"{letter}. {choice}" for letter, choice in zip(letters, choices, strict=True))
    content = "\n".join([_text(fields, "question"), *listed])
    return [_question(fields, content, instruction, letter_is(letter))]


def _human_eval(fields: Fields, instruction: str) -> list[Prompt]:
    start, test, name = (_text(fields, key) for key in ("prompt", "test", "entry_point"))
    function = re.compile(rf"^def {re.escape(name)}\b", re.MULTILINE)
    # An answer may leave out the imports and functions that come before the function, or begin with its body.
    before = function.split(start)[0]

    def program(code: str) -> list[str]:
        return [before + "\n" + code if function.search(code) else start + code, test, f"check({name})"]

    content = f"{HUMAN_EVAL}\n```python\n{start}\n```"
    return [_question(fields, content, instruction, code_passes(program))]


def _mbpp(fields: Fields, instruction: str, *, task: str) -> list[Prompt]:
    tests = _texts(fields, "test_list")
    setup = [*_texts(fields, "test_imports"), str(fields.get("test_setup_code") or "")]
    content = f"{MBPP} {_text(fields, task)} Your code should pass these tests:\n\n" + "\n".join(tests)
    judge = code_passes(lambda code: ["\n".join(setup), code, "\n".join(tests)])
    return [_question(fields, content, instruction, judge)]


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
    Format("MATH-500", ("problem", "answer"), _math_500, BOXED),
    Format("MMLU", ("question", "choices", "answer"), _mmlu, LETTER),
    Format("MMLU", ("question", "A", "B", "C", "D", "answer"), _mmlu, LETTER),
    Format("GSM8K", ("question", "answer"), _gsm8k, BOXED),
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
