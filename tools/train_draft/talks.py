"""Talks that the target writes itself, through the server's engine: the text that a draft learns.

A talk begins with the chat template up to a user's message, and an opening. The target goes on with the message,
answers it, asks the next question, and so on, until the row is full. Given prompts have a talk each, of one answer.
Only answers are learned.
"""

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from app.config.error import ConfigError
from app.engine.core import EngineCore
from app.messages import Request, SamplingParams, TokenDelta
from app.text.chat_template import ChatTemplateError
from app.text.tokenizer import Tokenizer
from tools.bench.formats import Prompt

OPENINGS = Path(__file__).with_name("openings.txt").read_text(encoding="utf-8").splitlines()
"""First words of questions in several languages. Some are empty."""
MAX_QUESTION, MAX_ANSWER = 96, 256
"""Tokens of what the target asks, and of its answer to that. Small models begin to repeat themselves later on."""
LEAST_ROOM = 48
"""Tokens that must be left in a row for another question or answer. A question leaves them to its answer."""
GREEDY_SHARE = 0.7
"""Share of the talks whose answers are greedy."""
QUESTION, GREEDY, WARM = SamplingParams(temperature=1.0, min_p=0.03), SamplingParams(), SamplingParams(temperature=0.8)
_ASKED, _ANSWERED = "Qasked", "Aanswered"
"""Stand for a question and an answer, to find out what the template writes between them."""


class Talk(NamedTuple):
    """Token ids [T], and for each whether it is of an answer, whose end mark counts too."""

    ids: list[int]
    own: list[bool]

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first answer."""
        return self.ids[: self.own.index(True)]


@dataclass(slots=True)
class _Growing:
    """A talk in the engine. `answer` is how its answers are sampled, and `turns` how many it still gets."""

    talk: Talk
    answer: SamplingParams
    turns: int
    is_answering: bool


@dataclass(eq=False)
class Talks:
    """An endless source of talks of at most `length` tokens, of which `at_once` grow in the engine between calls.

    Without `prompts` the target writes the questions. `held_out` are talks of one turn each, answered greedily, whose
    prompts are in no other: those that are given, or `num_held_out` new ones. `switches` are variables of the chat
    template. Raises ConfigError if the template cannot be cut at a question, or refuses prompts, and if too few of
    them, or no opening, is short enough.
    """

    core: EngineCore
    tokenizer: Tokenizer
    prompts: Sequence[Prompt]
    length: int
    at_once: int
    num_held_out: int
    draw: random.Random
    switches: Mapping[str, Any] = field(default_factory=dict)
    held_out: list[Talk] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._growing: dict[str, _Growing] = {}
        self._ended: deque[Talk] = deque()
        self._num_asked = 0
        self._between: tuple[list[int], list[int]] = ([], []) if self.prompts else self._template_between()
        beginnings = self._from_prompts() if self.prompts else self._from_openings()
        if not self.held_out:
            first = (replace(begun, answer=GREEDY, turns=1) for begun in islice(beginnings, self.num_held_out))
            while self._step(first):
                pass
            self.held_out = [self._ended.popleft() for _ in range(len(self._ended))]
        self._beginnings = beginnings

    def more(self) -> Iterator[Talk]:
        """Yield talks as they end. When no more are taken, others stay in the engine, half written."""
        while True:
            while not self._ended:
                self._step(self._beginnings)
            yield self._ended.popleft()

    def _step(self, beginnings: Iterator[_Growing]) -> bool:
        """Run a step of the engine over `at_once` talks. Return False without any."""
        while len(self._growing) < self.at_once and (begun := next(beginnings, None)):
            self._ask(begun)
        if not self._growing:
            return False
        self._ended += filter(None, map(self._grow, self.core.step().deltas))
        return True

    def _from_prompts(self) -> Iterator[_Growing]:
        """Yield each prompt to be answered greedily, and then those that are not held out again and again."""
        longest = self.length - LEAST_ROOM
        found = dict.fromkeys(tuple(ids) for ids in map(self._encoded, self.prompts) if 1 <= len(ids) <= longest)
        prompts = [ids for ids in found if all(ids != tuple(talk.prompt) for talk in self.held_out)]
        if len(prompts) <= (num_apart := 0 if self.held_out else self.num_held_out):
            given = f"--prompts: {len(prompts)} of {len(self.prompts)} have 1 to {longest} tokens"
            raise ConfigError(f"{given}, and {self.num_held_out} are held out", "give more, or a longer --length")
        self.draw.shuffle(prompts)
        for ids in prompts:
            yield _Growing(_prompted(ids), GREEDY, 1, is_answering=True)
        while True:
            yield _Growing(_prompted(self.draw.choice(prompts[num_apart:])), WARM, 1, is_answering=True)

    def _from_openings(self) -> Iterator[_Growing]:
        while True:
            message = {"role": "user", "content": self.draw.choice(OPENINGS)}
            text = self.tokenizer.chat_template.render([message], continue_final_message=True, switches=self.switches)
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            answer = GREEDY if self.draw.random() < GREEDY_SHARE else WARM
            begun = _Growing(_prompted(ids), answer, turns=self.length, is_answering=False)
            if (room := self._room(begun)) < LEAST_ROOM:
                given = f"--length {self.length}: a question and its answer need {LEAST_ROOM - room} tokens more"
                raise ConfigError(given, "give a longer one")
            yield begun

    def _encoded(self, prompt: Prompt) -> list[int]:
        if "messages" not in prompt.body:
            return self.tokenizer.encode(prompt.body["prompt"])
        try:
            text, mark, _ = self.tokenizer.render(prompt.body["messages"], switches=self.switches)
        except ChatTemplateError as error:
            hint = 'give texts, {"prompt": "..."}, or chats that the template takes'
            raise ConfigError(f"--prompts, {prompt.body['messages']!r:.80}: {error}", hint) from None
        return self.tokenizer.encode(text, add_special_tokens=False, mark=mark)

    def _template_between(self) -> tuple[list[int], list[int]]:
        """Return what the template writes after a question and after an answer."""
        turns = [("user", _ASKED), ("assistant", _ANSWERED), ("user", _ASKED)]
        messages = [{"role": role, "content": text} for role, text in turns]
        hint = "give --prompts FILE"
        try:
            text = self.tokenizer.chat_template.render(messages, switches=self.switches)
        except ChatTemplateError as error:
            raise ConfigError(f"the target cannot ask itself questions: {error}", hint) from None
        parts = text.replace(_ANSWERED, _ASKED).split(_ASKED)
        if len(parts) != 4:
            raise ConfigError("the chat template changes what users and assistants say", hint)
        asked, answered = (self.tokenizer.encode(part, add_special_tokens=False) for part in (parts[3], parts[2]))
        return asked, answered

    def _room(self, growing: _Growing) -> int:
        """Return how many tokens the next part of a talk may have."""
        room = self.length - len(growing.talk.ids)
        return room if growing.is_answering else room - len(self._between[0]) - LEAST_ROOM

    def _ask(self, growing: _Growing) -> None:
        """Queue the next part of a talk: a question, or an answer."""
        self._num_asked += 1
        name, ids = f"talk-{self._num_asked}", tuple(growing.talk.ids)
        sampling, most = QUESTION, MAX_QUESTION
        if growing.is_answering:
            sampling, most = growing.answer, self.length if self.prompts else MAX_ANSWER
        sampling = replace(sampling, seed=self.draw.getrandbits(63))
        self._growing[name] = growing
        most = min(most, self._room(growing))
        try:
            self.core.add(Request(name, ids, most, sampling, stop_token_ids=self.tokenizer.eos_ids))
        except ValueError as error:
            raise ConfigError(f"the tokenizer makes tokens that the target lacks: {error}") from None

    def _grow(self, delta: TokenDelta) -> Talk | None:
        """Add new tokens to their talk, and begin its next part when one ends. Return the talk if it is over."""
        if delta.error:
            raise RuntimeError(delta.error)
        growing = self._growing[delta.request_id]
        ids, own = growing.talk
        ids += delta.token_ids
        own += [growing.is_answering] * len(delta.token_ids)
        if delta.finish_reason is None:
            return None
        del self._growing[delta.request_id]
        is_cut = delta.finish_reason == "length"
        between = self._between[growing.is_answering]
        if growing.is_answering:
            growing.turns -= 1
            if is_cut or not growing.turns:  # what is cut, a thought perhaps, is followed by no question
                return growing.talk
            if between[0] == ids[-1]:  # the mark that ended the answer
                between = between[1:]
        elif not is_cut:
            del ids[-1], own[-1]  # whatever mark ended the question, the template writes its own
        growing.is_answering = not growing.is_answering
        if self._room(growing) - len(between) < LEAST_ROOM:
            return growing.talk
        ids += between
        own += [False] * len(between)
        self._ask(growing)
        return None


def _prompted(ids: Sequence[int]) -> Talk:
    return Talk(list(ids), [False] * len(ids))
