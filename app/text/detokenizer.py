"""Token ids of one request to text, token by token, and stop strings cut out of it exactly."""

from collections.abc import Sequence

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from app.messages import FinishReason

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns the deltas of one request into text that may be shown.

    Text is looked at character by character in token order: the stop string that is complete first wins, and the
    longest of those that end there. The token that completes it is counted, no later one is, and neither the string
    nor what follows is ever returned. So the text depends neither on how the tokens are cut nor on their steps.

    `finish_reason` and `n_tokens` say how the request ended, and how many tokens it is charged. With `include_stop`
    what ended it, a stop string or a stop token, is part of the text. None of the first `min_tokens` tokens completes a
    stop string.
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
        self._stop = tuple(stop)
        self._first_letters = {text[0] for text in self._stop}
        self._most_held = max(map(len, self._stop), default=1) - 1
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self.n_tokens = 0
        self.finish_reason: FinishReason | None = None

    def push(self, token_ids: Sequence[int], finish: FinishReason | None = None) -> str:
        """Text that has become certain; "" if none. `finish` is the delta's finish_reason.

        With "stop" the last token is the stop token: counted, and not text unless stops are included. After the request
        has finished, whether by `finish` or by a stop string, nothing more may be pushed.
        """
        assert self.finish_reason is None, "pushed to a request that has finished"
        shown = token_ids[:-1] if finish == "stop" and not self._include_stop else token_ids
        for token_id in shown:
            self.n_tokens += 1
            if self._append(self._text.step(token_id)):
                return self._release()
        self.n_tokens += len(token_ids) - len(shown)
        if finish is not None:
            if not self._append(self._text.flush()):
                self.finish_reason = finish
            return self._release()
        return self._release(keep=self._longest_beginning())

    def _append(self, piece: str) -> bool:
        """Add to the held text; True if that completed a stop string, which is then cut off."""
        searched = len(self._held)
        self._held += piece
        if not piece or not self._stop or self.n_tokens <= self._min_tokens:
            return False
        matches = [
            (found + len(stop), found)
            for stop in self._stop
            if (found := self._held.find(stop, max(0, searched - len(stop) + 1))) >= 0
        ]
        if not matches:
            return False
        end, start = min(matches)
        self._held = self._held[: end if self._include_stop else start]
        self.finish_reason = "stop"
        return True

    def _longest_beginning(self) -> int:
        """How many characters at the end of the held text could still become a stop string."""
        longest = 0
        if self._first_letters.isdisjoint(self._held[-self._most_held :]):
            return 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _release(self, keep: int = 0) -> str:
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


class _IncrementalText:
    """DecodeStream, fed one token at a time, with a way to get at what it holds back at the end.

    A character whose bytes are not all there is held back, so U+FFFD appears only where the model made bytes that
    are no text.
    """

    def __init__(self, backend: Backend, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._shown: list[int] = []
        self._waiting: list[int] = []

    def step(self, token_id: int) -> str:
        self._waiting.append(token_id)
        try:
            piece = self._stream.step(self._backend, token_id)
        except Exception as error:  # The library raises plain Exception, and then its stream is of no more use.
            if "Invalid prefix" not in str(error):
                raise
            piece = self.flush()
            self._stream = DecodeStream(skip_special_tokens=self._skip)
        if piece is None:
            return ""
        if self._waiting:
            self._shown, self._waiting = self._waiting, []
        return piece

    def flush(self) -> str:
        """What is held back: the end of text whose last character is not complete."""
        before = self._backend.decode(self._shown, skip_special_tokens=self._skip)
        after = self._backend.decode(self._shown + self._waiting, skip_special_tokens=self._skip)
        self._shown, self._waiting = self._waiting, []
        return after[len(before) :]
