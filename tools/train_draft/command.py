"""A DFlash draft for a target of your own: `python -m tools.train_draft TARGET --out DIR`.

The target writes questions and answers through this server's engine, and the draft learns the answers until the time
is over. Talks that it does not learn measure it, in tokens a verify step. A run that was stopped goes on when the same
command is given again. The last line printed is the command that serves the result.
"""

import argparse
import fcntl
import json
import random
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from app.config.engine import EngineConfig
from app.config.error import ConfigError
from app.engine.checkpoint.files import find_folder
from app.engine.checkpoint.quantised import rotation_file
from app.engine.checkpoint.read import check_checkpoints, read_checkpoints
from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.device.factory import found_device
from app.engine.load.engine import Engine, build_engine
from app.engine.models.kv_pool import bytes_per_token
from app.text.tokenizer import Tokenizer
from tools.bench import prompts
from tools.bench.command import guarded
from tools.bench.flags import amount, count, json_object
from tools.bench.formats import Prompt
from tools.parts import ToolParser
from tools.train_draft import checkpoint, mask_token, state_file
from tools.train_draft.checkpoint import Stored
from tools.train_draft.loop import TRAINED, State, Trainer
from tools.train_draft.loss import SLICE_BYTES, TOKENS_PER_ANCHOR, Ends
from tools.train_draft.model import Draft
from tools.train_draft.shape import Shape, check_vocabulary, shape_for
from tools.train_draft.talks import Talks
from tools.train_draft.teacher import Teacher

SHAPE_FLAGS = {"head": "dspark", "layers": 4, "block": 8, "taps": None, "rank": 48, "mask_token": None}
"""Flags of the draft's shape, which --start-from brings, and their defaults."""
NUM_HELD_OUT = 24
COUNTED_TOKENS = 100_000
"""Tokens of answers that a reduced vocabulary is chosen by."""
BYTES_IN_MEMORY, BYTES_ON_DISK = 24, 14
"""Bytes of a parameter: itself, its gradient, up to two moments and a step's copies in fp32; in both files together."""


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    with ExitStack() as held:
        return guarded(lambda: train(options, held))


def train(options: argparse.Namespace, held: ExitStack) -> int:
    """Train, and print the command that serves the draft. Raises ConfigError for what cannot be trained, where possible
    before weights are read."""
    console = Console(stderr=True)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(random.Random(options.seed).getrandbits(63))  # any seed will do
    if found_device(options.device).startswith("npu"):
        raise ConfigError("drafts are trained on a CPU or with CUDA", "give --device cpu")
    folder, target = _dense_target(options)
    config = _engine_config(options, folder, target)
    check_checkpoints(config)
    tokenizer = Tokenizer(folder)
    start = checkpoint.read(find_folder(options.start_from, "draft"), target) if options.start_from else None
    shape = _shape(options, target, tokenizer, start)
    draft = Draft(shape)
    settings = _settings(options, shape)
    saved = state_file.load(_with_room(options.out, draft, held), settings)
    conversations = _prompts(options.prompts) if options.prompts else []
    engine = build_engine(config)
    told = f"{options.target} on {engine.device}, {engine.dtype}; {shape.head}, {shape.layers} layers after layers "
    told += f"{','.join(map(str, shape.taps))}; mask token {shape.mask_token_id}, "
    console.print(told + repr(tokenizer.token_strings([shape.mask_token_id])[0]), highlight=False, soft_wrap=True)
    _check_memory(draft, engine, options.batch_tokens)
    step, began = saved[0].step if saved else 0, time.monotonic()
    talks = Talks(
        engine.core,
        tokenizer,
        conversations,
        options.length,
        engine.sizes.max_num_seqs,
        NUM_HELD_OUT,
        random.Random(f"talks {options.seed}/{step}"),
        options.chat_template_kwargs,
        saved[0].held_out if saved else [],
    )
    state, tensors = saved or (State(talks.held_out), {})
    until = began + 15 * options.minutes  # a quarter of the time
    ids = _draft_vocabulary(shape, tensors.get("target_ids"), start, talks, state, until)
    teacher = Teacher(engine, shape.taps, options.batch_tokens + options.length)
    device = teacher.target.embedding.device
    ends = Ends.of(teacher.target, None if ids is None else ids.to(device), half_precision(device))
    if start:
        draft.load_state_dict(start.state if start.target_ids is not None else _reduced(start.state, ids))
    else:
        draft.norm.weight.data.copy_(teacher.target.norm)
    rates = TRAINED if start else 1.0
    trainer = Trainer(draft.to(device), ends, teacher, talks, state, options.batch_tokens, options.seed, rates)
    if saved:
        draft.load_state_dict(tensors["draft"])
        for optimizer, values in zip(trainer.optimizers, tensors["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        console.print(f"going on after {state.seconds / 60:.1f} minutes and {state.step} steps")

    def save() -> None:
        optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        tensors = {"draft": draft.state_dict(), "optimizers": optimizers, "target_ids": ids}
        # First, because a checkpoint without it is not this tool's to overwrite.
        state_file.save(options.out, settings, state, tensors)
        checkpoint.write(draft, options.out, ids, None if ids is None else ends.rows)

    state.seconds += time.monotonic() - began
    found = trainer.run(60 * options.minutes, 60 * options.save_minutes, save, console)
    console.print(f"{found:.2f} tokens a step in {len(state.held_out)} held-out answers, after {state.step} steps")
    print(shlex.join(["dflash-server", "serve", options.target, "--draft-model", str(options.out)]))
    return 0


def _dense_target(options: argparse.Namespace) -> tuple[Path, DecoderConfig]:
    """Return the target's folder and sizes. Raises ConfigError for one that no draft can be trained for here."""
    folder = find_folder(options.target, "target")
    models = read_checkpoints(EngineConfig(folder))
    target = models.target
    if rotation_file(folder, models.target_files.description):
        hint = "train for the original, and serve the draft with this target"
        raise ConfigError(f"{options.target} is rotated (QuaRot)", hint)
    if target.moe or target.gated_delta:
        kind = "a mixture of experts" if target.moe else "a hybrid with recurrent layers"
        raise ConfigError(f"{options.target} is {kind}, and only dense targets are trained for", "give a dense one")
    if options.length > (most := target.max_position_embeddings):
        raise ConfigError(f"--length {options.length}: the target's context has {most} tokens", "give a shorter one")
    return folder, target


def _engine_config(options: argparse.Namespace, folder: Path, target: DecoderConfig) -> EngineConfig:
    return EngineConfig(
        folder,
        device=options.device,
        dtype=options.dtype,
        max_model_len=options.length,
        max_num_seqs=options.concurrency,
        max_num_batched_tokens=max(options.batch_tokens, options.length),
        memory_utilization=options.memory_utilization,
        kv_cache_memory=_kv_memory(options, target) if found_device(options.device) == "cpu" else None,
    )


def half_precision(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return the context of products in bfloat16, where the device multiplies by that faster."""
    if device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported():
        return nullcontext
    return partial(torch.autocast, device.type, torch.bfloat16)


def _shape(options: argparse.Namespace, target: DecoderConfig, tokenizer: Tokenizer, start: Stored | None) -> Shape:
    given = {name: value for name in SHAPE_FLAGS if (value := getattr(options, name)) is not None}
    if start:
        if given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"{flags}: the draft of --start-from has its own", "leave it out")
        if not options.draft_vocab:
            return start.shape
        if start.target_ids is not None:
            raise ConfigError("--draft-vocab: the draft of --start-from has its own", "leave it out")
        check_vocabulary(options.draft_vocab, target.vocab_size)
        return replace(start.shape, draft_vocab=options.draft_vocab)
    chosen: dict[str, Any] = SHAPE_FLAGS | given
    mask, _ = mask_token.choose(tokenizer, target.vocab_size, chosen.pop("mask_token"))
    return shape_for(target, draft_vocab=options.draft_vocab, mask_token_id=mask, **chosen)


def _settings(options: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """Return what a run that goes on must have in common with the one before."""
    asked = ("target", "start_from", "prompts", "length", "seed", "chat_template_kwargs")
    described = {f"--{name.replace('_', '-')}": json.dumps(getattr(options, name)) for name in asked}
    return {f"the draft's {name}": json.dumps(value) for name, value in asdict(shape).items()} | described


def _with_room(folder: Path, draft: Draft, held: ExitStack) -> Path:
    """Make the folder, and return it, for no other run while its lock is `held`.

    Raises ConfigError if it cannot be written, has no room for the files, or has a checkpoint that is no run's.
    """
    needed = BYTES_ON_DISK * (draft.shape.draft_vocab * draft.shape.hidden + _num_parameters(draft))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if not (folder / state_file.FILE).exists():  # a new file is written beside the old one
            needed *= 2
        lock = held.enter_context((folder / "training.lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"--out {folder}: another run trains there", "wait for it, or give another --out") from None
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror or error}", "give a folder that can be made") from None
    if needed > free:
        raise ConfigError(f"--out {folder}: {needed >> 20} MiB are needed, and {free >> 20} MiB are free")
    if (folder / "config.json").exists() and not (folder / state_file.FILE).exists():
        given = f"--out {folder}: there is a checkpoint, and no {state_file.FILE} of a run to go on"
        raise ConfigError(given, "give another --out")
    return folder


def _num_parameters(draft: Draft) -> int:
    return sum(parameter.numel() for parameter in draft.parameters())


def _check_memory(draft: Draft, engine: Engine, batch_tokens: int) -> None:
    """Raise ConfigError if training would take more memory than the engine leaves."""
    shape, length = draft.shape, engine.sizes.max_model_len
    rows = batch_tokens // TOKENS_PER_ANCHOR * shape.block
    of_row = shape.layers * (8 * shape.hidden + 4 * shape.mlp + 3 * shape.heads * length)
    of_token = (len(shape.taps) + 1) * shape.hidden
    numbers = rows * of_row + 2 * batch_tokens * of_token
    needed = BYTES_IN_MEMORY * _num_parameters(draft) + 4 * numbers + 8 * SLICE_BYTES
    free = engine.core.runner.backend.memory()[0]
    if needed > free:
        given = f"training takes about {needed >> 20} MiB, and {free >> 20} MiB are free on {engine.device}"
        wanted = "give a smaller --batch-tokens or --length"
        raise ConfigError(given, wanted + ("" if engine.device == "cpu" else ", or --memory-utilization"))


def _kv_memory(options: argparse.Namespace, target: DecoderConfig) -> int:
    """Return the bytes of KV on a CPU: what the talks need. The prefix cache would fill more, which training needs."""
    talks, page_size = options.concurrency or 32, 16  # the engine's defaults there
    return int(talks * (options.length + page_size) * bytes_per_token(target, torch.bfloat16))


def _prompts(wish: str) -> list[Prompt]:
    return [prompt for dataset in prompts.named(wish, 0) for prompt in dataset.listed]


def _draft_vocabulary(
    shape: Shape, saved: Tensor | None, start: Stored | None, talks: Talks, state: State, until: float
) -> Tensor | None:
    """Return the target's tokens [Vd] of a reduced vocabulary: those that the first answers have most often, and then
    those of the lowest ids, which byte-pair merges made first. No more answers are waited for after `until`."""
    if shape.draft_vocab == shape.vocab:
        return None
    if saved is not None:
        return saved
    if start and start.target_ids is not None:
        return start.target_ids
    for talk in talks.more():
        state.add([talk])
        if state.written >= COUNTED_TOKENS or time.monotonic() > until:
            break
    counted = Counter(token for ids, own in state.talks for token, is_own in zip(ids, own, strict=True) if is_own)
    order = dict.fromkeys([*(token for token, _ in counted.most_common()), *range(shape.vocab)])
    return torch.tensor(sorted(islice(order, shape.draft_vocab)))


def _reduced(state: dict[str, Tensor], ids: Tensor | None) -> dict[str, Tensor]:
    """Return a draft's parameters with the rows of `ids` only, where a table has a row for each candidate."""
    tables = ("candidate_selector.successor_codebook", "markov_head.markov_w2.weight")
    return state if ids is None else state | {name: state[name][ids] for name in tables if name in state}


def layers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def share(text: str) -> float:
    if not 0 < (value := amount(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and up to 1")
    return value


def parser() -> argparse.ArgumentParser:
    made = ToolParser(prog="python -m tools.train_draft", description=__doc__)
    add = made.add_argument
    add("target", metavar="TARGET", help="a pair's name, a folder, FILE.gguf or a Hugging Face id, as `serve` takes it")
    add("--out", type=Path, required=True, metavar="DIR", help="the draft's folder; a run that stopped goes on there")
    add("--minutes", type=amount, default=60.0, metavar="M", help="of training, all runs together [default: 60]")
    add("--save-minutes", type=amount, default=2.0, metavar="M", help="between checkpoints [default: 2]")
    add = made.add_argument_group("draft").add_argument
    add("--head", choices=["dflash", "dflash2", "dspark"], help="[default: dspark]")
    add("--layers", type=count, metavar="N", help="[default: 4]")
    add("--block", type=count, metavar="N", help="rows of a block, the anchor's included [default: 8]")
    add("--taps", type=layers, metavar="N,N", help="the target's layers that feed the draft [default: 5, spread]")
    add("--rank", type=count, metavar="N", help="of the tables of pairs of dflash2 and dspark [default: 48]")
    about = "reduce its vocabulary to the N tokens that the target writes most [default: all]"
    add("--draft-vocab", type=count, metavar="N", help=about)
    about = "id or text of the mask's token [default: a special token that nothing uses]"
    add("--mask-token", metavar="TOKEN", help=about)
    add("--start-from", metavar="DRAFT", help="train on from a draft of this tool, or a pair's")
    add = made.add_argument_group("text").add_argument
    about = "conversations or texts to answer, in the formats of tools.bench [default: the target asks itself]"
    add("--prompts", metavar="FILE", help=about)
    add("--length", type=count, default=640, metavar="N", help="most tokens of a talk [default: 640]")
    about = """variables of the chat template: '{"enable_thinking": false}'"""
    add("--chat-template-kwargs", type=json_object, default={}, metavar="JSON", help=about)
    add("--seed", type=int, default=0, metavar="N", help="[default: 0]")
    add = made.add_argument_group("machine").add_argument
    add("--device", default="auto", metavar="DEVICE", help="auto | cpu | cuda | cuda:N")
    add(
        "--dtype",
        choices=["auto", "float32", "float16", "bfloat16"],
        default="auto",
        help="of the target, as `serve` has it",
    )
    add("--threads", type=count, metavar="N", help="of a CPU [default: all cores]")
    add("--concurrency", type=count, metavar="N", help="talks that the target writes at once [default: as `serve`]")
    add("--batch-tokens", type=count, default=2560, metavar="N", help="most tokens of a step's lesson [default: 2560]")
    about = "share of a GPU's memory for weights and KV; training needs the rest [default: 0.5]"
    add("--memory-utilization", type=share, default=0.5, metavar="SHARE", help=about)
    return made
