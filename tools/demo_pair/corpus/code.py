"""Small Python functions with docstrings, written on request or explained. The answer is a function of the request."""

from dataclasses import dataclass
from random import Random

from tools.demo_pair.corpus.sample import Drawn, Sample, Split, ask, until_in_split

_WRITE = (
    "Write a Python function that {does}.",
    "Please write a function in Python that {does}.",
    "Show me Python code that {does}.",
    "I need a Python function which {does}.",
    "Can you write a function that {does}?",
    "Give me a Python function that {does}.",
    "Code a function that {does}.",
    "How do I write a Python function that {does}?",
    "Python function that {does}, please.",
)
_EXPLAIN = (
    "Explain this code:\n{code}",
    "What does this function do?\n{code}",
    "{code}\nWhat does this do?",
    "{code}\nPlease explain it.",
    "Tell me what this code does:\n{code}",
    "Describe this function:\n{code}",
)


@dataclass(frozen=True)
class Function:
    name: str
    parameters: str
    does: str  # "returns the even numbers of a list"
    body: str
    how: str

    def code(self) -> str:
        doc = self.does[0].upper() + self.does[1:]
        doc = doc.replace("Returns", "Return", 1)
        return f'```python\ndef {self.name}({self.parameters}):\n    """{doc}."""\n    {self.body}\n```'

    def explanation(self) -> str:
        return f"The function {self.name} {self.does}. {self.how}"


_KEEP = {
    "even": ("even", "n % 2 == 0"),
    "odd": ("odd", "n % 2 == 1"),
    "positive": ("positive", "n > 0"),
    "negative": ("negative", "n < 0"),
    "nonzero": ("nonzero", "n != 0"),
    "big": ("big", "n > {k}"),
    "small": ("small", "n < {k}"),
    "multiples": ("divisible", "n % {k} == 0"),
}
_CHANGE = {
    "doubled": "2 * n",
    "squared": "n * n",
    "plus": "n + {k}",
    "minus": "n - {k}",
    "negated": "-n",
    "halved": "n / 2",
    "as_text": "str(n)",
    "same": "n",
}
_CHANGED = {
    "doubled": "doubled",
    "squared": "squared",
    "plus": "plus {j}",
    "minus": "minus {j}",
    "negated": "negated",
    "halved": "halved",
    "as_text": "as text",
    "same": "unchanged",
}
_NOUNS = {"doubled": "doubles", "squared": "squares", "negated": "negatives", "halved": "halves"}
_KEPT = {
    "even": "even numbers",
    "odd": "odd numbers",
    "positive": "positive numbers",
    "negative": "negative numbers",
    "nonzero": "numbers that are not zero",
    "big": "numbers above {k}",
    "small": "numbers below {k}",
    "multiples": "multiples of {k}",
}
_FOLD = {"sum": "sum", "largest": "max", "smallest": "min", "number": "len", "sorted list": "sorted"}
_TEXT = {
    "reverse_text": ("returns a text backwards", "return text[::-1]", "It takes a slice with step minus one."),
    "shout": ("returns a text in upper case", "return text.upper()", "It calls the method upper."),
    "whisper": ("returns a text in lower case", "return text.lower()", "It calls the method lower."),
    "count_words": (
        "counts the words of a text",
        "return len(text.split())",
        "It splits the text and takes the length.",
    ),
    "first_word": (
        "returns the first word of a text",
        "return text.split()[0]",
        "It splits the text and takes the first part.",
    ),
    "last_word": (
        "returns the last word of a text",
        "return text.split()[-1]",
        "It splits the text and takes the last part.",
    ),
    "is_palindrome": (
        "checks if a text is a palindrome",
        "return text == text[::-1]",
        "It compares the text with its reverse.",
    ),
    "count_letter": ("counts a letter in a text", "return text.count(letter)", "It calls the method count."),
    "join_words": ("joins words with spaces", 'return " ".join(words)', "It calls the method join on a space."),
    "count_lines": (
        "counts the lines of a text",
        "return len(text.splitlines())",
        "It splits the text into lines and takes the length.",
    ),
}
_SUMS = {
    "add": ("adds {k} to a number", "n + {k}"),
    "subtract": ("subtracts {k} from a number", "n - {k}"),
    "multiply_by": ("multiplies a number by {k}", "n * {k}"),
    "divide_by": ("divides a number by {k}", "n / {k}"),
    "power": ("raises a number to the power {k}", "n ** {k}"),
    "remainder": ("returns the remainder after dividing by {k}", "n % {k}"),
}


def draw(rng: Random, split: Split) -> Drawn:
    def pick() -> tuple[str, Function, str]:
        function, template = _function(rng)
        return rng.choice(_EXPLAIN if rng.random() < 0.3 else _WRITE), function, template

    wording, function, template = until_in_split(split, pick, lambda p: f"{p[0]} {p[2]}")
    question = wording.format(does=function.does, code=function.code())
    answer = f"{function.code()}\n{function.explanation()}" if "{does}" in wording else function.explanation()
    return Drawn(Sample("code", ask(question), answer), f"{wording} {template}")


def _function(rng: Random) -> tuple[Function, str]:
    """A function and its template: what it does, whatever the numbers in it are."""
    k, j = rng.randint(2, 20), rng.randint(2, 20)
    kind = rng.random()
    if kind < 0.5:
        keep, change = rng.choice(list(_KEEP)), rng.choice(list(_CHANGE))
        condition, value = _KEEP[keep][1].format(k=k), _CHANGE[change].format(k=j)
        kept, changed = _KEPT[keep].format(k=k), _CHANGED[change].format(j=j)
        template, does = f"{keep} {change}", f"returns the {kept} of a list, {changed}"
        if change in _NOUNS and rng.random() < 0.5:
            where = rng.choice(("of a list", "in a list"))
            template, does = f"{template} {where}", f"returns the {_NOUNS[change]} of the {kept} {where}"
        how = f"It goes over the list, keeps each n with {condition} and puts {value} in the new list."
        return Function(
            f"{_KEEP[keep][0]}_{change}", "numbers", does, f"return [{value} for n in numbers if {condition}]", how
        ), template
    if kind < 0.7:
        fold, keep = rng.choice(list(_FOLD)), rng.choice(list(_KEEP))
        condition, kept = _KEEP[keep][1].format(k=k), _KEPT[keep].format(k=k)
        how = f"It keeps each n with {condition} and calls {_FOLD[fold]}."
        name = f"{fold.split()[0]}_{_KEEP[keep][0]}"
        return Function(
            name,
            "numbers",
            f"returns the {fold} of the {kept} of a list",
            f"return {_FOLD[fold]}([n for n in numbers if {condition}])",
            how,
        ), f"{fold} {keep}"
    if kind < 0.85:
        name = rng.choice(list(_TEXT))
        does, body, how = _TEXT[name]
        parameters = "words" if name == "join_words" else "text, letter" if name == "count_letter" else "text"
        return Function(name, parameters, does, body, how), name
    name = rng.choice(list(_SUMS))
    does, value = (part.format(k=k) for part in _SUMS[name])
    return Function(f"{name}_{k}", "n", does, f"return {value}", f"It returns {value}."), name
