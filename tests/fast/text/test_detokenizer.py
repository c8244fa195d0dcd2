"""Stop strings and incremental text against a plain reference, over random tokenisations and step boundaries."""

import itertools

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from app.text.detokenizer import Detokenizer

EOS = "<eos>"
PIECES = ["a", "b", "c", "ab", "ba", "abc", "cab", "bb", "aab", "Ġa", "Ġ", "bca"]


@pytest.fixture(scope="module")
def backend():
    """Every byte is a token, some short strings are tokens too, and <eos> is special."""
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet()) + [p for p in PIECES if len(p) > 1]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    return backend


def byte_ids(backend, data: bytes) -> list[int]:
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [backend.token_to_id(c) for text, _ in letters.pre_tokenize_str(data.decode()) for c in text]


def cut_steps(ids: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(bounds)]


def run(backend, ids, stop, cuts, finish, **options) -> tuple[Detokenizer, list[str]]:
    detokenizer = Detokenizer(backend, stop, **options)
    steps = cut_steps(ids, cuts)
    shown = []
    for number, step in enumerate(steps):
        shown.append(detokenizer.push(step, finish if number == len(steps) - 1 else None))
        if detokenizer.finish_reason is not None:
            break
    return detokenizer, shown


def reference(text: str, stop: list[str], include_stop: bool = False) -> str | None:
    """The text before the stop string that is complete first, reading character by character; None if there is none."""
    for end in range(1, len(text) + 1):
        if matched := [s for s in stop if text[:end].endswith(s)]:
            return text[: end if include_stop else end - max(len(s) for s in matched)]
    return None


@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=24),
    stop=st.lists(st.text("abc ", min_size=1, max_size=6), max_size=3),
    cuts=st.lists(st.integers(0, 24), max_size=8),
    finish=st.sampled_from(["stop", "length"]),
)
def test_text_ends_where_a_plain_reading_finds_the_first_stop_string(backend, pieces, stop, cuts, finish):
    ids = [backend.token_to_id(piece) for piece in pieces]
    text = backend.decode(ids)
    if finish == "stop":
        ids.append(backend.token_to_id(EOS))
    detokenizer, shown = run(backend, ids, stop, cuts, finish)
    expected = reference(text, stop)
    assert "".join(shown) == (text if expected is None else expected)
    assert detokenizer.finish_reason == (finish if expected is None else "stop")
    if expected is None:
        assert detokenizer.num_tokens == len(ids)
    else:
        completed = next(n for n in range(len(pieces) + 1) if reference(backend.decode(ids[:n]), stop) is not None)
        assert detokenizer.num_tokens == completed


@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=24),
    stop=st.lists(st.text("abc ", min_size=2, max_size=6), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 24), max_size=8),
)
def test_no_prefix_of_a_stop_string_that_completes_is_ever_shown(backend, pieces, stop, cuts):
    ids = [backend.token_to_id(piece) for piece in pieces]
    _, shown = run(backend, ids, stop, cuts, "length")
    full = reference(backend.decode(ids), stop)
    so_far = ""
    for piece in shown:
        so_far += piece
        assert full is None or full.startswith(so_far)


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 200), max_size=20))
def test_text_of_any_script_comes_whole_and_without_replacement_characters(backend, text, cuts):
    text = text.replace("\ufffd", "")
    _, shown = run(backend, byte_ids(backend, text.encode()), [], cuts, "length")
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)


@given(ids=st.lists(st.integers(0, 255), max_size=60), cuts=st.lists(st.integers(0, 60), max_size=20))
def test_bytes_that_are_no_text_read_as_the_tokenizer_reads_them_whole(backend, ids, cuts):
    _, shown = run(backend, ids, [], cuts, "length")
    assert "".join(shown) == backend.decode(ids)


@pytest.mark.parametrize(
    ("stop", "shown", "found"), [(["bc", "b"], "a", "b"), (["b", "ab"], "", "ab"), (["c", "abc", "bc"], "", "abc")]
)
def test_of_stop_strings_in_one_token_the_first_to_end_wins_and_then_the_longest(backend, stop, shown, found):
    detokenizer = Detokenizer(backend, stop)
    assert detokenizer.push([backend.token_to_id("abc")]) == shown
    assert detokenizer.stop_string == found


@pytest.mark.parametrize(("include_stop", "shown"), [(False, ""), (True, "bca")])
def test_a_stop_string_spanning_two_tokens_is_cut_or_kept_exactly(backend, include_stop, shown):
    detokenizer = Detokenizer(backend, ["bca"], include_stop=include_stop)
    assert detokenizer.push([backend.token_to_id("ab")]) == "a"
    assert detokenizer.push([backend.token_to_id("cab"), backend.token_to_id("c")]) == shown
    assert (detokenizer.finish_reason, detokenizer.num_tokens) == ("stop", 2)


def test_stop_string_behind_the_eos_of_the_same_run_does_not_win(backend):
    detokenizer = Detokenizer(backend, [EOS, "bb"])
    text = detokenizer.push([backend.token_to_id("a"), backend.token_to_id("b"), backend.token_to_id(EOS)], "stop")
    assert (text, detokenizer.finish_reason, detokenizer.num_tokens) == ("ab", "stop", 3)


def test_stop_token_is_counted_and_not_shown_even_if_it_is_ordinary_text(backend):
    detokenizer = Detokenizer(backend, ["ac"])
    assert detokenizer.push([backend.token_to_id("a"), backend.token_to_id("c")], "stop") == "a"
    assert (detokenizer.finish_reason, detokenizer.num_tokens) == ("stop", 2)


def test_stop_string_on_the_last_allowed_token_beats_the_length_limit(backend):
    detokenizer = Detokenizer(backend, ["c"])
    assert detokenizer.push([backend.token_to_id("ab"), backend.token_to_id("c")], "length") == "ab"
    assert detokenizer.finish_reason == "stop"


def test_what_might_become_a_stop_string_is_held_back_and_released_when_it_does_not(backend):
    detokenizer = Detokenizer(backend, ["abc"])
    assert detokenizer.push([backend.token_to_id("ab")]) == ""
    assert detokenizer.push([backend.token_to_id("ab")]) == "ab"
    assert detokenizer.push([backend.token_to_id("b")], "length") == "abb"


def test_an_unfinished_character_is_flushed_at_the_end(backend):
    ids = byte_ids(backend, "a漢".encode())
    detokenizer = Detokenizer(backend)
    assert detokenizer.push(ids[:-1]) == "a"
    assert detokenizer.push([], "length") == "\ufffd"


def test_special_tokens_inside_the_text_are_counted_and_not_shown(backend):
    detokenizer = Detokenizer(backend)
    ids = [backend.token_to_id(t) for t in ("a", EOS, "b")]
    assert detokenizer.push(ids, "length") == "ab"
    assert detokenizer.num_tokens == 3


def test_an_id_beyond_the_vocabulary_is_no_text_and_no_error(backend):
    detokenizer = Detokenizer(backend)
    assert detokenizer.push([backend.token_to_id("a"), 100_000, backend.token_to_id("b")], "length") == "ab"


@given(text=st.text(st.sampled_from("ab é漢👩"), max_size=30), cuts=st.lists(st.integers(0, 90), max_size=20))
def test_byte_fallback_tokens_of_sentencepiece_models_make_whole_characters(text, cuts):
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4} | {f"<0x{n:02X}>": n + 5 for n in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ids = [1]
    for character in text:
        known = vocabulary.get("▁" if character == " " else character)
        ids += [byte + 5 for byte in character.encode()] if known is None else [known]
    _, shown = run(backend, ids, [], cuts, "length")
    assert "".join(shown) == backend.decode(ids) == text
    assert not any("\ufffd" in piece for piece in shown)


@given(
    pieces=st.lists(st.sampled_from([*PIECES, EOS]), min_size=1, max_size=24),
    stop=st.lists(st.text("abc <eos>", min_size=1, max_size=6), max_size=3),
    cuts=st.lists(st.integers(0, 24), max_size=8),
    finish=st.sampled_from(["stop", "length"]),
    include_stop=st.booleans(),
    skip=st.booleans(),
)
def test_text_with_its_stop_and_special_tokens_is_that_of_a_plain_reading(
    backend, pieces, stop, cuts, finish, include_stop, skip
):
    ids = [backend.token_to_id(piece) for piece in pieces]
    shown_ids = ids[:-1] if finish == "stop" and not include_stop else ids
    text = backend.decode(shown_ids, skip_special_tokens=skip)
    options = {"include_stop": include_stop, "skip_special_tokens": skip}
    cuts = [cut % len(ids) for cut in cuts]  # The stop token comes with the finish.
    detokenizer, shown = run(backend, ids, stop, cuts, finish, **options)
    expected = reference(text, stop, include_stop)
    assert "".join(shown) == (text if expected is None else expected)
    assert detokenizer.finish_reason == (finish if expected is None else "stop")
    if expected is None:
        assert detokenizer.num_tokens == len(ids)


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 200), max_size=20))
def test_special_tokens_between_characters_of_any_script_are_whole_text(backend, text, cuts):
    text = text.replace("\ufffd", "")
    eos = backend.token_to_id(EOS)
    ids = [id_ for c in text for id_ in (eos, *byte_ids(backend, c.encode()))]
    _, shown = run(backend, ids, [], cuts, "length", skip_special_tokens=False)
    assert "".join(shown) == "".join(EOS + c for c in text)
    _, shown = run(backend, ids, [], cuts, "length")
    assert "".join(shown) == text


@pytest.mark.parametrize(("skip", "expected"), [(True, "a"), (False, "a" + EOS)])
def test_an_included_stop_token_is_text_unless_special_tokens_are_skipped(backend, skip, expected):
    detokenizer = Detokenizer(backend, include_stop=True, skip_special_tokens=skip)
    assert detokenizer.push([backend.token_to_id("a"), backend.token_to_id(EOS)], "stop") == expected
    assert (detokenizer.finish_reason, detokenizer.num_tokens) == ("stop", 2)


SCARCE = [0xC2, 0xE6, 0xBC, 0xA2, 0xF0, 0x9F, 0x91, 0xA9, 0x41]
"""Bytes that make characters of one to four bytes often, and invalid text more often."""


@given(
    data=st.lists(st.sampled_from([*SCARCE, None]), max_size=200),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    skip=st.booleans(),
)
def test_long_runs_of_invalid_bytes_among_characters_and_special_tokens_read_as_whole(backend, data, cuts, skip):
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = {b"A"[0]: "A"} | {
        c.encode()[i]: s for c in "Â©漢👩" for i, s in enumerate(alphabet.pre_tokenize_str(c)[0][0])
    }
    ids = [backend.token_to_id(EOS if byte is None else letters[byte]) for byte in data]
    _, shown = run(backend, ids, [], cuts, "length", skip_special_tokens=skip)
    assert "".join(shown) == backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("count", range(24))
def test_a_character_after_any_number_of_invalid_bytes_is_whole(backend, count):
    ids = [*[backend.token_to_id("Â")] * count, *byte_ids(backend, "漢👩é".encode())]
    _, shown = run(backend, ids, [], [], "length")
    assert "".join(shown) == backend.decode(ids) == "\ufffd" * count + "漢👩é"


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, backend) -> None:
        self._backend = backend
        self.num_decoded = 0

    def decode(self, ids, skip_special_tokens):
        self.num_decoded += len(ids)
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.fixture(scope="module")
def sentencepiece():
    """A vocabulary with a token for each byte, whose text begins without a space."""
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, EOS: 5} | {f"<0x{n:02X}>": n + 6 for n in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([EOS])
    return backend


@pytest.mark.parametrize("name", ["backend", "sentencepiece"])
@pytest.mark.parametrize("repeated", ["text", "lead", "continuation", "special"])
@pytest.mark.parametrize("options", [{}, {"stop": ["zz"]}, {"skip_special_tokens": False}], ids=str)
def test_each_stream_is_decoded_in_time_that_grows_with_its_length_only(request, name, repeated, options):
    backend = request.getfixturevalue(name)
    tokens = {"text": "a", "lead": "Â", "continuation": "¡", "special": EOS}
    if name == "sentencepiece":
        tokens |= {"lead": "<0xC2>", "continuation": "<0xA1>"}
    ids = [backend.token_to_id(tokens[repeated])] * 2000
    counting = Counting(backend)
    stop = options.get("stop", [])
    _, shown = run(counting, ids, stop, [], "length", **{k: v for k, v in options.items() if k != "stop"})
    assert "".join(shown) == backend.decode(ids, skip_special_tokens=options.get("skip_special_tokens", True))
    assert counting.num_decoded < 20 * len(ids)


def test_invalid_bytes_appear_while_the_stream_goes_on_and_text_after_them_is_whole(sentencepiece):
    detokenizer = Detokenizer(sentencepiece)
    invalid = detokenizer.push([sentencepiece.token_to_id("<0xC2>")] * 20)
    assert len(invalid) > 10 and set(invalid) == {"\ufffd"}
    rest = detokenizer.push([sentencepiece.token_to_id(token) for token in ("▁a", EOS, "▁a", "b")], "length")
    assert invalid + rest == "\ufffd" * 20 + " a ab"


def test_a_skipped_special_token_takes_no_space_from_the_text_after_it(sentencepiece):
    ids = [sentencepiece.token_to_id(token) for token in ("a", *[EOS] * 30, "▁a")]
    _, shown = run(sentencepiece, ids, [], [1, 20, 31], "length")
    assert "".join(shown) == "a a"
