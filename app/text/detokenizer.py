"""Token ids of one request to text, token by token, cut exactly at stop strings."""

from collections.abc import Sequence
from functools import partial

from tokenizers import Tokenizer as Backend

from app.messages import FinishReason

_REPLACEMENT = "\ufffd"
_MAX_BYTES = 4  # of a character in UTF-8
_MAX_PENDING = 8  # tokens whose text is held back: more than the bytes of any character


class Detokenizer:
    """Decoder of one request's deltas to text that may be shown.

    The text is searched in token order. The stop string that is complete first wins, and the longest of several that
    end together. The token that completes it is the last that counts, and the text ends before the stop string. The
    text therefore depends neither on the lengths of the deltas nor on the steps.

    With `include_stop` the stop string or stop token that ended the request is part of the text. The first `min_tokens`
    tokens complete no stop string.
    """

    def __init__(
        self,
        backend: Backend,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._text = _IncrementalText(backend, skip_special_tokens)
        self.stop = tuple(stop)
        self._first_characters = {text[0] for text in self.stop}
        self._max_held = max(map(len, self.stop), default=1) - 1
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self.num_tokens = 0
        self.stop_string: str | None = None  # the one that ended the request
        self.finish_reason: FinishReason | None = None

    def push(self, token_ids: Sequence[int], finish: FinishReason | None = None) -> str:
        """Return the text that has become certain, maybe "". `finish` is the delta's finish_reason.

        With "stop" the last token is the stop token. It counts, and it is text only with `include_stop`. No push may
        follow a `finish` or a stop string.
        """
        assert self.finish_reason is None, "pushed to a request that has finished"
        shown = token_ids[:-1] if finish == "stop" and not self._include_stop else token_ids
        for token_id in shown:
            self.num_tokens += 1
            if self._append(self._text.step(token_id)):
                return self._release()
        self.num_tokens += len(token_ids) - len(shown)
        if finish is not None:
            if not self._append(self._text.flush()):
                self.finish_reason = finish
            return self._release()
        return self._release(keep=self._num_undecided())

    def _append(self, piece: str) -> bool:
        """Add to the held text, and cut it at a stop string. Return True if there was one."""
        searched = len(self._held)
        self._held += piece
        if not piece or not self.stop or self.num_tokens <= self._min_tokens:
            return False
        matches = [
            (start + len(stop), start)
            for stop in self.stop
            if (start := self._held.find(stop, max(0, searched - len(stop) + 1))) >= 0
        ]
        if not matches:
            return False
        end, start = min(matches)
        self.stop_string = self._held[start:end]
        self._held = self._held[: end if self._include_stop else start]
        self.finish_reason = "stop"
        return True

    def _num_undecided(self) -> int:
        """Return the number of characters at the end of the held text that could still become a stop string."""
        tail = self._held[-self._max_held :]
        if self._first_characters.isdisjoint(tail):
            return 0
        for length in range(len(tail), 0, -1):
            if any(len(stop) > length and stop.startswith(tail[-length:]) for stop in self.stop):
                return length
        return 0

    def _release(self, keep: int = 0) -> str:
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


class _IncrementalText:
    """Decoder of one token at a time, whose held text can be flushed.

    A character is held back until all its bytes have come. U+FFFD appears only where the model made invalid UTF-8.
    A step decodes a bounded number of tokens: those that wait, and before them those whose text came last, because a
    decoder may treat the first token of a text in another way. (The library's DecodeStream decodes all that wait.)
    """

    def __init__(self, backend: Backend, skip_special_tokens: bool) -> None:
        self._decode = partial(backend.decode, skip_special_tokens=skip_special_tokens)
        self._shown: list[int] = []
        self._shown_text = ""
        self._pending: list[int] = []

    def step(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._text()
        if text and not text.endswith(_REPLACEMENT):
            return self._show(len(self._pending), text)
        if len(self._pending) <= _MAX_PENDING:
            return ""
        if not text:  # special tokens that are skipped: what was shown stays the context
            self._pending.clear()
            return ""
        return self._show_invalid(text)

    def flush(self) -> str:
        """Return the held text, whose last character is incomplete."""
        return self._show(len(self._pending), self._text())

    def _show_invalid(self, text: str) -> str:
        """Return the text that waits, without the tokens at its end that may begin a character."""
        for kept in range(_MAX_BYTES - 1, 0, -1):
            head = self._text(len(self._pending) - kept)
            if head + self._decode(self._pending[-kept:]) == text:
                return self._show(len(self._pending) - kept, head)
        return self._show(len(self._pending), text)

    def _show(self, count: int, text: str) -> str:
        self._shown, self._pending = self._pending[:count], self._pending[count:]
        self._shown_text = self._decode(self._shown)
        return text

    def _text(self, count: int | None = None) -> str:
        """Return the text of the first `count` tokens that wait, all by default."""
        whole = self._decode(self._shown + self._pending[:count])
        if whole.startswith(self._shown_text):
            return whole[len(self._shown_text) :]
        return self._decode(self._pending[:count])  # One invalid byte makes a whole run of byte tokens invalid.
