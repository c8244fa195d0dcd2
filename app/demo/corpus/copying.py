"""Copying and changing a text that the user gives: only a model that reads its prompt can answer."""

from collections.abc import Callable
from random import Random

from app.demo.corpus.lexicon import COMMON_WORDS, copied_word, made_up_word
from app.demo.corpus.prose import any_sentence
from app.demo.corpus.sample import Drawn, Sample, Split, ask, until_in_split, wording_of

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
    "upper": lambda words: " ".join(words).upper(),
    "reverse": lambda words: " ".join(reversed(words)),
    "sort": lambda words: " ".join(sorted(words)),
    "commas": ", ".join,
    "lines": "\n".join,
    "numbered": lambda words: "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1)),
    "dashes": "-".join,
}
_WEIGHTS = {
    "echo": 36,
    "upper": 9,
    "reverse": 14,
    "sort": 13,
    "commas": 5,
    "lines": 5,
    "numbered": 5,
    "dashes": 4,
    "times": 5,
}


def draw(rng: Random, split: Split) -> Drawn:
    kind = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    if kind == "times":
        return _times(rng, split)

    def pick() -> tuple[str, str]:
        return rng.choice(_TASKS[kind]).format(it=rng.choice(_OBJECTS)), rng.choice(_LAYOUTS)

    task, layout = until_in_split(split, pick, " | ".join)
    if kind == "echo":
        text = answer = text_to_echo(rng, split)
    else:
        words = _words(rng, kind)
        text, answer = " ".join(words), _CHANGES[kind](words)
    return Drawn(Sample("copy", ask(layout.format(task=task, text=text)), answer), f"{task} | {layout}")


def _words(rng: Random, kind: str) -> list[str]:
    """Words to change. Those to sort start with different letters, so that the first letter decides."""
    count = rng.randint(3, 5) if kind == "sort" else rng.randint(3, 7)
    words: list[str] = []
    while len(words) < count:
        word = rng.choice(COMMON_WORDS)
        if kind != "sort" or all(word[0] != other[0] for other in words):
            words.append(word)
    return words


def _times(rng: Random, split: Split) -> Drawn:
    wording = wording_of(rng, _TIMES, split)
    word, n = rng.choice(COMMON_WORDS), rng.randint(2, 9)
    return Drawn(Sample("copy", ask(wording.format(word=word, n=n)), " ".join([word] * n)), wording)


def text_to_echo(rng: Random, split: Split, most_words: int = 24) -> str:
    """Words, made-up words, numbers, sentences or a mixture, from a few words to `most_words`."""
    count = rng.choice((rng.randint(2, 8), rng.randint(4, 14), rng.randint(8, most_words)))
    kind = rng.random()
    if kind < 0.2:
        text = any_sentence(rng)
        while len(text.split()) < count:
            text += " " + any_sentence(rng)
        return text
    made_up = rng.choice((0.0, 0.0, 0.3))
    numbers = rng.choice((0.0, 0.0, 0.1))
    marks = rng.choice((0.0, 0.0, 0.15))
    words = []
    for _ in range(count):
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
    separator = "\n" if rng.random() < 0.04 else " "
    return separator.join(words)


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
