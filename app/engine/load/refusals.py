"""Settings that do not go together, or not with a model. docs/operations.md prints the table. A limit of a device, of
memory or of a tensor is refused where it is known."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from app.config.engine import EngineConfig
from app.engine.checkpoint.decoder import EXPERTS_ALIGNMENT
from app.engine.checkpoint.read import check_checkpoints
from app.engine.checkpoint.shapes import DecoderConfig, DFlashConfig
from app.engine.errors import UnsupportedError

_VOCAB = "tokens in its vocabulary"
_COPIED = "KV heads", "key heads in its recurrent layers"  # more ranks than heads have copies of them


class Facts(NamedTuple):
    """The settings, and once known the models, the dtype and the kind of device: cpu, cuda or npu."""

    config: EngineConfig
    target: DecoderConfig | None = None
    draft: DFlashConfig | None = None
    dtype: str = ""
    kind: str = ""

    @property
    def block_size(self) -> int:
        return self.draft.block_size if self.draft else 1


class Refusal(NamedTuple):
    """A setting that is refused with `other` if `applies`. Facts and its result fill the texts. `why` ends with what to
    do, after a semicolon."""

    flag: str
    other: str
    applies: Callable[[Facts], Any]
    why: str


def _indivisible(facts: Facts) -> str:
    """Return the first number of a model that the ranks cannot share, or ""."""
    size, target, draft = facts.config.tensor_parallel_size, facts.target, facts.draft
    numbers = [("target", *each) for each in _divided(target, target.vocab_size)] if target else []
    numbers += [("draft", *each) for each in _divided(draft.decoder, draft.draft_vocab_size)] if draft else []
    for model, what, number in numbers:
        may_be_whole, may_be_copied = model == "draft" and what != _VOCAB, what in _COPIED
        is_whole = may_be_whole and facts.config.draft_tensor_parallel_size == 1
        if number % size and not is_whole and not (may_be_copied and size % number == 0):
            nor = " and is no multiple of" if may_be_copied else ""
            hint = "; --draft-tensor-parallel-size 1 leaves its layers whole" if may_be_whole else ""
            return f"the {model} has {number} {what}, which {size} does not divide{nor}{hint}"
    return ""


def _divided(decoder: DecoderConfig, vocab_size: int) -> list[tuple[str, int]]:
    numbers = [("attention heads", decoder.num_heads), (_COPIED[0], decoder.num_kv_heads), (_VOCAB, vocab_size)]
    if decoder.moe is None or decoder.moe.dense_layers:
        numbers.append(("columns in its MLP", decoder.intermediate_size))
    if decoder.moe:
        groups = decoder.moe.intermediate_size // EXPERTS_ALIGNMENT
        numbers.append((f"groups of {EXPERTS_ALIGNMENT} columns in each expert", groups))
        numbers.append(("columns in its shared expert", decoder.moe.shared_size))
    if delta := decoder.gated_delta:
        numbers += [(_COPIED[1], delta.num_k_heads), ("value heads in its recurrent layers", delta.num_v_heads)]
    return numbers


REFUSALS = (
    Refusal(
        "--batch-invariant",
        "an NPU",
        lambda facts: facts.config.batch_invariant and facts.kind == "npu",
        "an NPU's operators choose how they sum; it is for --device cpu and cuda",
    ),
    Refusal(
        "--batch-invariant",
        "`--tensor-parallel-size` above 1",
        lambda facts: facts.config.batch_invariant and facts.config.tensor_parallel_size > 1,
        "the library of --tensor-parallel-size {size} chooses the order of a sum over ranks; leave one of the two out",
    ),
    Refusal(
        "--batch-invariant",
        "a target with experts",
        lambda facts: facts.config.batch_invariant and facts.target and facts.target.moe,
        "its experts are computed in groups of rows; leave it out",
    ),
    Refusal(
        "--batch-invariant",
        "a target with recurrent layers",
        lambda facts: facts.config.batch_invariant and facts.target and facts.target.gated_delta,
        "its recurrent layers commit rows in groups; leave it out",
    ),
    Refusal(
        "--dtype float16",
        "a target with recurrent layers",
        lambda facts: facts.dtype == "float16" and facts.target and facts.target.gated_delta,
        "a target with recurrent layers was not tried in it; give bfloat16 or float32",
    ),
    Refusal(
        "--state-cache-memory",
        "`--no-prefix-caching`",
        lambda facts: facts.config.state_cache_memory and not facts.config.prefix_caching,
        "it is for the prefix cache, which --no-prefix-caching turns off; leave one of the two out",
    ),
    Refusal(
        "--state-cache-memory",
        "a target without recurrent layers",
        lambda facts: facts.config.state_cache_memory and facts.target and not facts.target.gated_delta,
        "the target has no recurrent layers; leave it out",
    ),
    Refusal(
        "--mamba-ssm-cache-dtype {config.mamba_ssm_cache_dtype}",
        "a target without recurrent layers",
        lambda facts: facts.config.mamba_ssm_cache_dtype != "float32" and facts.target and not facts.target.gated_delta,
        "the target has no recurrent layers; leave it out",
    ),
    Refusal(
        "--verify {config.verify}",
        "a draft with blocks of fewer rows",
        lambda facts: facts.target and facts.config.verify not in ("auto", "full", *range(1, facts.block_size + 1)),
        "a block has {block_size} rows; give 1 to {block_size}",
    ),
    Refusal(
        "--draft-tensor-parallel-size {config.draft_tensor_parallel_size}",
        "another `--tensor-parallel-size`",
        lambda facts: facts.config.draft_tensor_parallel_size not in (None, 1, facts.config.tensor_parallel_size),
        "the draft is split like the target, or not at all; give 1 or --tensor-parallel-size, which is {size}",
    ),
    Refusal(
        "--tensor-parallel-size {config.tensor_parallel_size}",
        "heads, experts or a vocabulary that it does not divide; KV heads may divide it",
        _indivisible,
        "{result}; give a divisor of it",
    ),
)


def check(facts: Facts) -> None:
    """Raise UnsupportedError for the first combination that is refused."""
    for refusal in REFUSALS:
        if result := refusal.applies(facts):
            known = {"kind": facts.kind, "block_size": facts.block_size, "size": facts.config.tensor_parallel_size}
            raise UnsupportedError(f"{refusal.flag}: {refusal.why}".format(config=facts.config, result=result, **known))


def check_models(config: EngineConfig, tokenizer: Path | None = None) -> Mapping[str, Any]:
    """Return the target's config.json. Raises UnsupportedError for checkpoints that the engine cannot load, or not with
    these settings, and without a tokenizer. Without torch."""
    models = check_checkpoints(config, tokenizer)
    check(Facts(config, models.target, models.draft))
    return models.target_files.config
