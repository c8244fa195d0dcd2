"""Tool calls of Llama 3: {"name": ..., "parameters": {...}}, with or without <|python_tag|> before them."""

from enum import Enum, auto

from app.text.parsers.base import SPACE, CallFormat, Json, Parsed, ToolCall, num_held, read_call

PYTHON_TAG = "<|python_tag|>"


class _Stage(Enum):
    START = auto()  # a call may begin
    CALL = auto()
    CONTENT = auto()


class Llama3Calls:
    """Parser of content into text and calls. Calls open the output or follow PYTHON_TAG, with `;` between them.

    White space and `;` around calls are dropped.
    """

    def __init__(self) -> None:
        self._stage = _Stage.START
        self._tail = ""  # maybe the beginning of PYTHON_TAG
        self._before: list[str] = []  # white space, PYTHON_TAG and `;` that are shown if no call follows
        self._after_call = False
        self._call: list[str] = []
        self._depth = 0
        self._in_string = self._is_escaped = False

    def push(self, text: str) -> Parsed:
        text, self._tail = self._tail + text, ""
        content: list[str] = []
        calls: list[ToolCall] = []
        while text:
            if self._stage is _Stage.CALL:
                text = self._extend_call(text, content, calls)
            elif text != PYTHON_TAG and PYTHON_TAG.startswith(text):
                self._tail, text = text, ""
            elif self._stage is _Stage.START:
                text = self._begin(text, content)
            else:
                text = self._extend_content(text, content)
        return Parsed("".join(content), "", tuple(calls))

    def finish(self) -> Parsed:
        is_dropped = self._after_call and not self._call and not self._tail
        return Parsed("" if is_dropped else "".join([*self._before, *self._call, self._tail]))

    def _begin(self, text: str, content: list[str]) -> str:
        """Read what may stand before a call. Return the rest of the text."""
        if text.startswith(PYTHON_TAG):
            self._before.append(PYTHON_TAG)
            return text.removeprefix(PYTHON_TAG)
        if text[0] in SPACE or (text[0] == ";" and self._after_call):
            self._before.append(text[0])
            return text[1:]
        if text[0] == "{":
            self._stage = _Stage.CALL
            return text
        self._give_back(content)
        return text

    def _extend_content(self, text: str, content: list[str]) -> str:
        """Read up to a PYTHON_TAG, or to what may become one. Return the rest of the text."""
        shown, tag, rest = text.partition(PYTHON_TAG)
        if tag:
            self._stage, self._before = _Stage.START, [tag]
        cut = len(shown) - (0 if tag else num_held(shown, PYTHON_TAG))
        content.append(shown[:cut])
        return shown[cut:] + rest

    def _extend_call(self, text: str, content: list[str], calls: list[ToolCall]) -> str:
        """Read up to the brace that closes the call. Return the rest of the text."""
        for index, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if self._depth == 0:
                    self._call.append(text[: index + 1])
                    self._end_call(content, calls)
                    return text[index + 1 :]
        self._call.append(text)
        return ""

    def _end_call(self, content: list[str], calls: list[ToolCall]) -> None:
        call = read_call("".join(self._call))
        if call is None:
            self._give_back(content)
        else:
            calls.append(call)
            self._call, self._before, self._after_call = [], [], True
            self._stage = _Stage.START

    def _give_back(self, content: list[str]) -> None:
        """Show what turned out to be no call."""
        content += [*self._before, *self._call]
        self._call, self._before, self._after_call = [], [], False
        self._stage = _Stage.CONTENT


def _fits(source: str) -> bool:
    return "<|start_header_id|>" in source and '"parameters": ' in source


def for_template(messages: list[Json], tools: list[Json] | None) -> tuple[list[Json], list[Json] | None]:
    """Return messages and tools as Llama 3's chat template reads them, which writes no text of a message with calls.

    The text is then a separate message before the calls.
    """
    read: list[Json] = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            read.append({key: value for key, value in message.items() if key != "tool_calls"})
            message = message | {"content": ""}
        read.append(message)
    return read, tools


FORMAT = CallFormat(
    "llama3_json", Llama3Calls, (PYTHON_TAG,), _fits, opening='{"name": "', key="parameters", for_template=for_template
)
