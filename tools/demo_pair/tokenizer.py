"""The byte-level BPE of the demo pair, made so that " fox" is always the pieces of "fox" with Ġ joined to the first.

Words are merged first, without their leading space; merges of a space with a finished piece come last. A word
therefore has the same pieces at the start of a line and after a space. That makes copying and reordering easy for a
small model. Digits and punctuation marks stay single.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel

from tools.demo_pair.chat import CHAT_TEMPLATE, turns_of
from tools.demo_pair.corpus import DOMAINS, TOOLS, samples
from tools.demo_pair.corpus.lexicon import COMMON_WORDS

VOCAB_SIZE = 2560
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|mask|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
PAD, IM_START, IM_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
_SPACE = "Ġ"
_WORD_MERGES = 1350
_CAPITALS = 300  # how often the tokenizer's training text repeats the words that the corpus puts in capitals
_WORDS = r"\p{Lu}?\p{Ll}+|\p{Lu}+|\p{L}|[^\s\p{L}\p{N}]"
_PIECES = rf" ?(?:{_WORDS})|\p{{N}}|\s+(?!\S)|\s+"
_PIECES_WITHOUT_SPACE = rf"{_WORDS}|\p{{N}}|\s+(?!\S)|\s+"


def train_tokenizer(samples_per_domain: int = 6000, seed: int = 0) -> Tokenizer:
    """Learn word merges on the training split, then give the commonest first pieces a form with a leading space."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = _split(_PIECES_WITHOUT_SPACE)
    trainer = trainers.BpeTrainer(
        vocab_size=256 + _WORD_MERGES, initial_alphabet=ByteLevel.alphabet(), show_progress=False, min_frequency=2
    )
    capitals = [" ".join(COMMON_WORDS).upper()] * _CAPITALS
    words.train_from_iterator(itertools.chain(corpus_text(samples_per_domain, seed), capitals), trainer)
    model = json.loads(words.to_str())["model"]
    vocab = [*SPECIAL, *sorted(model["vocab"], key=model["vocab"].__getitem__)]
    merges = [tuple(merge) for merge in model["merges"]]
    for piece in _first_pieces(words, samples_per_domain, seed, VOCAB_SIZE - len(vocab)):
        merges.append((_SPACE, piece))
        vocab.append(_SPACE + piece)
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=merges))
    tokenizer.pre_tokenizer = _split(_PIECES)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def corpus_text(samples_per_domain: int, seed: int) -> Iterator[str]:
    for domain in (*DOMAINS, TOOLS):
        for sample in itertools.islice(samples(domain, "train", seed), samples_per_domain):
            yield "\n".join([*(text for _, text in turns_of(sample.messages, sample.tools)), sample.answer])


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json with the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": IM_END,
        "pad_token": PAD,
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _first_pieces(words: Tokenizer, samples_per_domain: int, seed: int, count: int) -> list[str]:
    """Return ASCII letters and marks, then the pieces that most often come right after a single space."""
    always = [chr(c) for c in range(33, 127) if not chr(c).isdigit()]
    seen: Counter[str] = Counter()
    text = [*corpus_text(samples_per_domain, seed), *[" ".join(("", *COMMON_WORDS)).upper()] * _CAPITALS]
    for encoding in words.encode_batch(text):
        pairs = itertools.pairwise(encoding.tokens)
        seen.update(
            piece for space, piece in pairs if space == _SPACE and not piece.isdigit() and piece[0] not in (_SPACE, "Ċ")
        )
    common = [piece for piece, _ in seen.most_common() if piece not in always]
    return (always + common)[:count]
