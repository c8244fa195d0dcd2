"""Copying and changing a text that the user gives: only a model that reads its prompt can answer."""

from collections.abc import Callable, Iterator
from random import Random

from tools.demo_pair.corpus.lexicon import COMMON_WORDS, copied_word, made_up_word
from tools.demo_pair.corpus.prose import any_sentence
from tools.demo_pair.corpus.sample import Drawn, Sample, Split, ask, until_in_split, wording_of
from tools.demo_pair.corpus.sayings import WORD_SETS, plain_words, saying

_OBJECTS = (
    "this",
    "the following",
    "this text",
    "the following text",
    "these words",
    "the words",
    "the text below",
    "what follows",
)
_TASKS: dict[str, tuple[str, ...]] = {
    "echo": (
        "Repeat {it}",
        "Copy {it}",
        "Echo {it}",
        "Say {it}",
        "Write {it} again",
        "Repeat {it} exactly",
        "Copy {it} word for word",
        "Type {it}",
        "Print {it}",
        "Please repeat {it}",
        "Give {it} back to me",
        "Repeat {it} without changes",
        "Repeat after me",
        "Return {it}",
    ),
    "upper": (
        "Write {it} in upper case",
        "Upper-case {it}",
        "Put {it} in capital letters",
        "Convert {it} to upper case",
        "Make {it} upper case",
        "Change {it} to capitals",
        "Shout {it}",
        "Turn {it} into capital letters",
    ),
    "reverse": (
        "Reverse the order of {it}",
        "Write {it} in reverse order",
        "Put {it} in reverse order",
        "Reverse the word order of {it}",
        "Say {it} backwards, word by word",
        "Write {it} from the last word to the first",
        "Turn around the order of {it}",
    ),
    "sort": (
        "Sort {it}",
        "Sort {it} alphabetically",
        "Put {it} in alphabetical order",
        "Arrange {it} alphabetically",
        "Order {it} from A to Z",
        "Write {it} in alphabetical order",
    ),
    "commas": (
        "Put commas between {it}",
        "Separate {it} with commas",
        "Write {it} as a list with commas",
        "Join {it} with commas",
    ),
    "lines": (
        "Put {it} on separate lines",
        "Write {it} one word per line",
        "Write each word of {it} on its own line",
        "Split {it} into lines",
    ),
    "numbered": (
        "Number {it}",
        "Make a numbered list of {it}",
        "Write {it} as a numbered list",
        "Turn {it} into a numbered list",
    ),
    "dashes": (
        "Join {it} with dashes",
        "Put dashes between {it}",
        "Connect {it} with dashes",
        "Write {it} with dashes",
    ),
}
_LAYOUTS = (
    "{task}: {text}",
    "{task}:\n{text}",
    '{task}: "{text}"',
    "{task}.\n\n{text}",
    "{text}\n\n{task}.",
    "{task}:\n\n{text}",
    '"{text}"\n{task}.',
)
_TIMES = (
    "Repeat the word {word} {n} times.",
    "Say {word} {n} times.",
    "Write {word} {n} times.",
    "Print the word {word} {n} times.",
    "Please write the word {word} {n} times.",
    "Can you say {word} {n} times?",
    "{n} times the word {word}, please.",
    "Echo {word} {n} times.",
)
_CHANGES: dict[str, Callable[[list[str]], str]] = {
    "upper": lambda words: "Here it is in upper case:\n" + " ".join(words).upper(),
    "reverse": lambda words: "Here are the words in reverse order:\n" + " ".join(reversed(words)),
    "sort": lambda words: "Here are the words in alphabetical order:\n" + " ".join(sorted(words)),
    "commas": lambda words: "Here are the words with commas:\n" + ", ".join(words),
    "lines": lambda words: "Here are the words on separate lines:\n" + "\n".join(words),
    "numbered": lambda words: "Here is the numbered list:\n" + "\n".join(f"{i}. {w}" for i, w in enumerate(words, 1)),
    "dashes": lambda words: "Here are the words with dashes:\n" + "-".join(words),
}
_WEIGHTS = {
    "echo": 38,
    "upper": 12,
    "reverse": 14,
    "sort": 13,
    "commas": 5,
    "lines": 5,
    "numbered": 5,
    "dashes": 4,
    "times": 4,
}
_SWAPPED = 0.12
"""Share of known texts in which one word is another one, so that knowing them by heart is not enough."""


def draw_known(rng: Random, split: Split) -> Drawn:
    """Texts as people give them: sentences and sets of words that the model has seen before."""
    kind = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    if kind == "times":
        return _times(rng, split)
    if kind == "echo":
        text = " ".join(_swapped(rng, saying(rng)) for _ in range(rng.choice((1, 2, 2, 3))))
        return _drawn(rng, split, "copy", kind, text)
    if kind in ("sort", "upper"):
        chosen = rng.choice(WORD_SETS)
        return _drawn(rng, split, "copy", kind, " ".join(rng.sample(chosen, len(chosen))))
    return _drawn(rng, split, "copy", kind, " ".join(plain_words(_swapped(rng, saying(rng, 10)))))


def draw_jumble(rng: Random, split: Split) -> Drawn:
    """Words in no order at all: nothing but the prompt says which comes next."""
    kind = rng.choices([*list(_CHANGES), "echo"], [_WEIGHTS[kind] for kind in (*_CHANGES, "echo")])[0]
    text = text_to_echo(rng, split) if kind == "echo" else " ".join(_jumbled(rng, kind))
    return _drawn(rng, split, "jumble", kind, text)


def _drawn(rng: Random, split: Split, domain: str, kind: str, text: str) -> Drawn:
    def pick() -> tuple[str, str]:
        return rng.choice(_TASKS[kind]).format(it=rng.choice(_OBJECTS)), rng.choice(_LAYOUTS)

    task, layout = until_in_split(split, pick, " | ".join)
    answer = text if kind == "echo" else _CHANGES[kind](text.split())
    return Drawn(Sample(domain, ask(layout.format(task=task, text=text)), answer), f"{task} | {layout}")


def _jumbled(rng: Random, kind: str) -> list[str]:
    """Words whose capitals the tokenizer has as one piece. Those to sort start with different letters, so that the
    first letter decides."""
    if kind != "sort":
        return [rng.choice(COMMON_WORDS) for _ in range(rng.randint(3, 7))]
    words: list[str] = []
    for _ in range(rng.randint(3, 5)):
        words.append(next(word for word in _endless(rng) if all(word[0] != other[0] for other in words)))
    return words


def _endless(rng: Random) -> Iterator[str]:
    while True:
        yield rng.choice(COMMON_WORDS)


def _swapped(rng: Random, text: str) -> str:
    """Sometimes with one word, not the first or the last, replaced."""
    words = text.split()
    if rng.random() < _SWAPPED:
        words[rng.randrange(1, len(words) - 1)] = rng.choice(COMMON_WORDS)
    return " ".join(words)


def _times(rng: Random, split: Split) -> Drawn:
    wording = wording_of(rng, _TIMES, split)
    word, n = rng.choice(COMMON_WORDS), rng.randint(2, 9)
    return Drawn(Sample("copy", ask(wording.format(word=word, n=n)), " ".join([word] * n)), wording)


def text_to_echo(rng: Random, split: Split) -> str:
    """Words, made-up words, numbers, or a story's sentence."""
    if rng.random() < 0.2:
        return any_sentence(rng)
    made_up = rng.choice((0.0, 0.0, 0.0, 0.2))
    numbers = rng.choice((0.0, 0.0, 0.1))
    marks = rng.choice((0.0, 0.0, 0.1))
    words = []
    for _ in range(rng.choice((rng.randint(2, 6), rng.randint(4, 12)))):
        word = made_up_word(rng) if rng.random() < made_up else copied_word(rng, split)
        if rng.random() < numbers:
            word = str(rng.randint(0, rng.choice((9, 99, 999))))
        if rng.random() < 0.08:
            word = word.upper() if rng.random() < 0.3 else word.capitalize()
        if rng.random() < marks:
            word = _marked(rng, word)
        words.append(word)
    if rng.random() < 0.4:
        words[0] = words[0].capitalize()
        words[-1] += rng.choice(".!?")
    return " ".join(words)


def _marked(rng: Random, word: str) -> str:
    before, after = rng.choice(
        (
            ("", ","),
            ("", "."),
            ("", "!"),
            ("", "?"),
            ("", ";"),
            ("", ":"),
            ("(", ")"),
            ("'", "'"),
            ("", "-x"),
            ("<", ">"),
            ("[", "]"),
            ("#", ""),
            ("", "_a"),
            ("=", ""),
        )
    )
    return before + word + after
