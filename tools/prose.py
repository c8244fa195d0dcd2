"""Check of the prose in docstrings, comments and pages, by the rules of "Prose" in docs/DESIGN.md.

python -m tools.prose          print each finding in a place of CLEAN; exit with 1 if there is one
python -m tools.prose --all    print every finding, then their number in each folder; exit with 0
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("app/**/*.py", "docker/*.py", "tools/**/*.py", "tests/**/*.py")
PAGES = ("*.md", "docs/**/*.md", "app/**/*.md", "tools/**/*.md")
SCRIPTS = ("Makefile", ".ci/run", "docker/Dockerfile.*", "docker/*.sh", "docker/*.yml", "docker/*.yaml", "docker/*.cfg")
LEFT_OUT = ("tools/demo_pair/corpus", "app/demo/checkpoint")
CLEAN = ("README.md", "CHANGELOG.md", "SECURITY.md", "Makefile", ".ci", "app", "docker", "docs", "tests", "tools")
"""Files and folders that `make check` holds to the rules, with all below them. This list only grows."""

MAX_WORDS = 25
BANNED = re.compile(r"\b(nobody|somebody|anybody|whoever|whomever|who leaves|what waits)\b", re.IGNORECASE)
FOR_BECAUSE = re.compile(r",? for (?:it|they|there|he|she|we|you) (?!that\b)[a-z]+", re.IGNORECASE)
OPENING = re.compile(r"(What|Whether|Of|How)\b")
CODE = re.compile(r"``.+?``|`[^`]*`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
SENTENCE_END = re.compile(r"[.!?:;][\"')\]*]*(?=\s|$)")
LIST_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")

Passage = tuple[int, str]
"""First line in its file, and text."""


def docstrings(source: str) -> Iterator[Passage]:
    """Yield every string that is a statement: docstrings, and those below a constant or a field."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(source: str) -> Iterator[Passage]:
    """Yield every comment of Python. Comments on lines of their own that follow one another are one passage."""
    last_line, alone = 0, False
    text: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, own_line = token.start[0], not token.line[: token.start[1]].strip()
        if text and not (own_line and alone and line == last_line + 1):
            yield last_line - len(text) + 1, "\n".join(text)
            text = []
        text.append(token.string.lstrip("#").removeprefix(" "))
        last_line, alone = line, own_line
    if text:
        yield last_line - len(text) + 1, "\n".join(text)


def script_comments(source: str) -> Iterator[Passage]:
    """Yield the runs of lines that begin with `#`."""
    text: list[str] = []
    lines = source.splitlines()
    for number, line in enumerate([*lines, ""], 1):
        if line.lstrip().startswith("#") and not line.startswith("#!"):
            text.append(line.lstrip().lstrip("#").removeprefix(" "))
        elif text:
            yield number - len(text), "\n".join(text)
            text = []


def paragraphs(text: str) -> Iterator[Passage]:
    """Yield (line within `text`, paragraph on one line), without code blocks, tables and columns of text."""
    words: list[str] = []
    first, fenced = 0, False
    for number, line in enumerate([*text.splitlines(), ""]):
        stripped = line.strip()
        starts_fence = stripped.startswith("```")
        fenced ^= starts_fence
        apart = (
            fenced
            or starts_fence
            or not stripped
            or stripped.startswith(("|", "<!--", ">>>", "$ "))
            or "   " in stripped
        )
        if words and (apart or LIST_ITEM.match(line) or stripped.startswith("#")):
            yield first, " ".join(words)
            words = []
        if not apart:
            first = first if words else number
            words.append(LIST_ITEM.sub("", line).strip())
            if stripped.startswith("#"):
                yield first, " ".join(words)
                words = []


def plain(text: str) -> str:
    """Return `text` without code and addresses."""
    return LINK.sub(r"\1", CODE.sub("", text))


def long_sentences(text: str) -> Iterator[Passage]:
    """Yield (line within `text`, complaint) for each sentence of more than MAX_WORDS words outside of code."""
    for line, paragraph in paragraphs(text):
        for sentence in SENTENCE_END.split(plain(paragraph)):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if len(words) > MAX_WORDS:
                yield line, f"{len(words)} words in one sentence: {' '.join(words[:6])} ..."


def wording(passages: list[Passage]) -> list[Passage]:
    """Return (line, complaint) for each banned word and each long sentence."""
    found = []
    for start, text in passages:
        for line, paragraph in paragraphs(text):
            unquoted = CODE.sub("", paragraph)
            found += [(start + line, f"name the thing instead of {word!r}") for word in BANNED.findall(unquoted)]
            found += [
                (start + line, f"say because instead of {words.strip(' ,')!r}")
                for words in FOR_BECAUSE.findall(unquoted)
            ]
        found += [(start + line, complaint) for line, complaint in long_sentences(text)]
    return found


def findings(source: str) -> list[Passage]:
    """Return (line, complaint) for the docstrings and comments of a Python source."""
    strings = list(docstrings(source))
    found = wording([*strings, *comments(source)])
    for line, text in strings:
        if opening := OPENING.match(text.strip()):
            found.append((line, f"begin with a verb or a noun, not with {opening[0]!r}"))
    return sorted(found)


def findings_of(path: Path) -> list[Passage]:
    """Return the findings of a file: Python, Markdown, or comments of a script."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return findings(source)
    return sorted(wording([(1, source)] if path.suffix == ".md" else list(script_comments(source))))


def main(arguments: list[str]) -> int:
    everything = "--all" in arguments
    counts: Counter[str] = Counter()
    for path in sorted({path for pattern in (*SOURCES, *PAGES, *SCRIPTS) for path in ROOT.glob(pattern)}):
        name = path.relative_to(ROOT).as_posix()
        held = any(name == clean or name.startswith(f"{clean}/") for clean in CLEAN)
        if name.startswith(LEFT_OUT) or not (everything or held):
            continue
        found = findings_of(path)
        counts[name.rpartition("/")[0] or "."] += len(found)
        for line, complaint in found:
            print(f"{name}:{line}: {complaint}")
    for folder, count in sorted(counts.items()) if everything else ():
        print(f"{count:4} {folder}")
    return 0 if everything or not counts.total() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
