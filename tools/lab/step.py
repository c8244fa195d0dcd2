"""The cost of a decode step and of its parts, in this process: `python -m tools.lab step`.

Plain steps and whole blocks are timed against the number of sequences and against their context. A plain step keeps the
draft's context too, like in serving. Without --model the model has the demo pair's shape, random weights and positions
for every context. Exits with 1 if a cost certainly grows faster than linearly, or the host's part certainly grows with
context, which takes 6 rounds to tell. Exits with 2 for a mistake in the command line.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch

from app.config.engine import EngineConfig
from app.config.error import ConfigError
from app.config.pairs import draft_name
from app.engine.checkpoint.draft import draft_config
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import find_folder, read_config
from app.engine.device.factory import make_backend
from app.engine.errors import UnsupportedError
from app.engine.load.engine import Engine, build_engine
from app.engine.load.loader import CheckpointWeights
from app.engine.load.memory import CPU_KV_BYTES
from app.engine.models.kv_pool import bytes_per_token
from tools.bench.command import progress
from tools.bench.flags import amount, count, counts
from tools.bench.markdown import Row, Table
from tools.bench.paired import Ratio, ratio
from tools.lab import random_weights, simulated
from tools.lab.publish import Verdict, part_parser, publish
from tools.lab.step_timing import Bench, Measured, Shape, Split, measure, room

CONTEXTS = [256, 512, 1024, 2048, 4096, 8192]
LINEAR_ALLOWANCE = 0.2
"""Share by which a cost may exceed proportion: noise, and sizes that suit a device less than others."""
HOST_ALLOWANCE, HOST_ALLOWANCE_MS = 0.25, 0.02
"""Share, and milliseconds, by which the host's part may grow: noise."""
_FROM_GOOD_TO_BAD = (True, None, False)

Found = Mapping[Shape, Measured]


class Series(NamedTuple):
    """Shapes that differ only in the number of sequences, or only in their context."""

    axis: Literal["batch", "context"]
    shapes: Sequence[Shape]

    @property
    def kind(self) -> str:
        return "whole block" if self.shapes[0].drafts else "plain"

    @property
    def held(self) -> str:
        """The size that the shapes have in common."""
        first = self.shapes[0]
        if self.axis == "batch":
            return f"context {first.context}"
        return "1 sequence" if first.batch == 1 else f"{first.batch} sequences"

    def size(self, shape: Shape) -> int:
        return shape.batch if self.axis == "batch" else shape.context

    def __str__(self) -> str:
        return f"{self.kind} step against {self.axis} at {self.held}"


def bench(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    options = settled(options)
    torch.set_num_threads(options.threads)
    banners = [random_weights.BANNER] * bool(options.random_weights)
    banners += [simulated.BANNER] * bool(options.simulate_acceptance)
    print("".join(f"*** {banner} ***\n" for banner in banners), end="")
    engine, acceptance_length = load(options)
    timed = Bench(engine)
    all_series, left_out = fitting(options, timed, drafts=engine.draft is not None)
    shapes = list(dict.fromkeys(shape for series in all_series for shape in series.shapes))
    with progress() as bar:
        task = bar.add_task("", total=len(shapes) * (options.rounds + 1))
        tell: Callable[[str], None] = lambda text: bar.update(task, advance=1, description=text)  # noqa: E731
        found = measure(timed, shapes, options.rounds, tell)
    rounds = f"medians of {options.rounds} rounds, each of which ran every shape"
    return publish(
        "step",
        arguments,
        tables(all_series, found, is_asynchronous=timed.is_asynchronous, acceptance_length=acceptance_length),
        options.out,
        about=[*banners, describe(engine), rounds, *left_out],
        verdicts=verdicts(all_series, found),
        shapes=as_json(found),
    )


def settled(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options, with random weights if no model is given. Raises ConfigError if both are."""
    if not (options.model or options.draft_model):
        options.random_weights = options.random_weights or random_weights.DEMO_PAIR
    elif options.random_weights:
        raise ConfigError("--random-weights and --model or --draft-model exclude each other", "leave one of them out")
    return options


def load(options: argparse.Namespace) -> tuple[Engine, float | None]:
    """Return the engine, and the mean acceptance length if that is simulated. Raises ConfigError."""
    try:
        with TemporaryDirectory() as folder:
            config = engine_config(options, *_checkpoints(options, Path(folder)))
            weights = random_weights.RandomWeights if options.random_weights else CheckpointWeights
            engine = build_engine(config, open_weights=weights)
    except UnsupportedError as error:
        raise ConfigError(str(error)) from None
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the models do not fit on --device {options.device}: {error}") from None
    if not options.simulate_acceptance:
        return engine, None
    if engine.draft is None:
        raise ConfigError("--simulate-acceptance: without a draft nothing is accepted", "give --draft-model")
    length, block_size = options.simulate_acceptance, engine.draft.block_size
    if not 1 <= length <= block_size:
        given = f"--simulate-acceptance {length:g}: a block of {block_size} yields no such mean"
        raise ConfigError(given, f"give 1 to {block_size}, the bonus token included")
    simulated.simulate(engine.core, simulated.even_rates(length, block_size), options.seed)
    return engine, length


def _checkpoints(options: argparse.Namespace, folder: Path) -> tuple[Path, Path | None]:
    """Return the folders of target and draft. Those of random weights are written to `folder`."""
    if options.random_weights:
        return random_weights.write_configs(options.random_weights, folder)
    target = options.model or "demo"
    draft = draft_name(target, options.draft_model)
    return find_folder(target, "target"), find_folder(draft, "draft") if draft else None


def engine_config(options: argparse.Namespace, target: Path, draft: Path | None) -> EngineConfig:
    """Return a configuration with room for the longest context, within the model's positions."""
    config: dict[str, Any] = read_config(target)
    block_size = read_config(draft).get("block_size", random_weights.BLOCK_SIZE) if draft else 1
    longest = max(options.context, *options.contexts) + room(block_size)
    memory = options.kv_cache_memory
    return EngineConfig(
        target,
        draft,
        device=options.device,
        dtype=options.dtype,
        quantization=options.quantization,
        max_model_len=min(longest, config.get("max_position_embeddings") or longest),
        max_num_seqs=max(*options.batches, *options.context_batches),
        kv_cache_memory=_kv_memory(options, target, draft) if memory is None else int(memory * 2**30),
        enforce_eager=True if options.enforce_eager else None,
        verify="full",
    )


def _kv_memory(options: argparse.Namespace, target: Path, draft: Path | None) -> int | None:
    """Return the bytes that the largest shape fills, on a CPU within serving's limits. None means like in serving."""
    backend = make_backend(options.device)
    if backend.device.type != "cpu":
        return None
    decoders = [target_config(read_config(target))]
    block_size = 1
    if draft:
        shape = draft_config(read_config(draft), decoders[0])
        decoders.append(shape.decoder)
        block_size = shape.block_size
    dtype = torch.float32 if options.dtype == "auto" else getattr(torch, options.dtype)
    more = room(block_size) + 2 * block_size + 2 * backend.defaults.page_size
    sizes = [(options.batches, [options.context]), (options.context_batches, options.contexts)]
    tokens = max(max(batches) * (max(contexts) + more) for batches, contexts in sizes)
    free, _ = backend.memory()
    return min(tokens * sum(bytes_per_token(decoder, dtype) for decoder in decoders), CPU_KV_BYTES, free // 2)


def fitting(options: argparse.Namespace, timed: Bench, *, drafts: bool) -> tuple[list[Series], list[str]]:
    """Return the series that the model and its KV memory hold, and a line about each size that is left out."""
    longest = timed.longest
    too_long = sorted(length for length in options.contexts if length > longest)
    contexts = sorted({min(length, longest) for length in options.contexts})
    fitted, left_out = [], []
    if too_long:
        left_out.append(f"contexts {_listed(too_long)} are more than the model has room for: {longest} instead")
    for series in all_series(options.batches, min(options.context, longest), contexts, options.context_batches, drafts):
        shapes = [shape for shape in series.shapes if timed.fits(shape)]
        if missing := [series.size(shape) for shape in series.shapes if shape not in shapes]:
            left_out.append(f"{series}: KV memory does not hold {_listed(missing)}")
        if shapes:
            fitted.append(Series(series.axis, shapes))
    if not fitted:
        raise ConfigError("KV memory holds none of the shapes", "give --kv-cache-memory, or smaller --contexts")
    return fitted, left_out


def all_series(
    batches: Sequence[int], context: int, contexts: Sequence[int], context_batches: Sequence[int], drafts: bool
) -> list[Series]:
    """Return plain steps and, with a draft, whole blocks: against batch, and against context at some batches."""
    kinds = (False, True) if drafts else (False,)
    found = [Series("batch", [Shape(batch, context, kind) for batch in batches]) for kind in kinds]
    for batch in context_batches:
        found += [Series("context", [Shape(batch, length, kind) for length in contexts]) for kind in kinds]
    return [series for series in found if series.shapes]


def tables(
    series: Sequence[Series], found: Found, *, is_asynchronous: bool, acceptance_length: float | None
) -> list[Table]:
    """Return a table for each axis and held size, plain steps before whole blocks.

    `acceptance_length` is the tokens of a sequence in a whole block, None if they are unknown.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for some in series:
        rows = groups.setdefault((some.axis, some.held), [])
        rows += [
            _row(some, before, shape, found, is_asynchronous, acceptance_length)
            for before, shape in pairwise([None, *some.shapes])
            if shape
        ]
    return [
        Table(
            f"{axis}-{held.replace(' ', '-')}",
            f"Cost against {axis}, {held}",
            _meaning(axis, is_asynchronous),
            rows,
        )
        for (axis, held), rows in groups.items()
    ]


def _meaning(axis: str, is_asynchronous: bool) -> str:
    more = "sequence" if axis == "batch" else "1000 tokens of context, each sequence,"
    computed = (
        "`dispatch` is launching until the device has all work, `wait` until its result is read; `device` is a step of "
        "several that are queued, which the device never waits for, or dispatch where that is more."
        if is_asynchronous
        else "On a CPU the operators are computed as they are launched: `compute` is both, and cannot be told apart."
    )
    return (
        f"Milliseconds. `+` is what each {more} costs beyond the row before. `build` makes the step's arrays. "
        f"{computed} "
        "`tok/s` is of all sequences together, of whole blocks where the acceptance length is known. "
        "`DFlash / plain` is the ratio of both within rounds."
    )


def _row(
    series: Series, before: Shape | None, shape: Shape, found: Found, is_asynchronous: bool, length: float | None
) -> Row:
    measured = found[shape]
    computed, read = ("dispatch", "wait") if is_asynchronous else ("compute", "read")
    length = length if shape.drafts else 1.0
    return {
        "step": series.kind,
        series.axis: series.size(shape),
        "ms": _ms(measured.ms),
        "+": _ms(_added(series, before, shape, found)) if before else "",
        "schedule": _ms(measured.middle(lambda split: split.schedule)),
        "build": _ms(measured.middle(lambda split: split.build)),
        computed: _ms(measured.middle(lambda split: split.launch - split.build)),
        read: _ms(measured.middle(lambda split: split.read)),
        **({"device": _ms(median(measured.queued))} if is_asynchronous else {}),
        "commit": _ms(measured.middle(lambda split: split.commit)),
        "tok/s": f"{1000 * shape.batch * length / measured.ms:.0f}" if length else "",
        "DFlash / plain": _speedup(shape, found, length) if length and shape.drafts else "",
    }


def _speedup(shape: Shape, found: Found, length: float) -> str:
    """Return the ratio of tokens per second, whole blocks over plain steps, within rounds."""
    faster = ratio(found[replace(shape, drafts=False)].totals, found[shape].totals)
    return str(Ratio(length * faster.middle, length * faster.low, length * faster.high))


def _added(series: Series, before: Shape, shape: Shape, found: Found) -> float:
    """Return milliseconds for each further sequence, or for 1000 further tokens of context of every sequence."""
    more = (found[shape].ms - found[before].ms) / (series.size(shape) - series.size(before))
    return more if series.axis == "batch" else 1000 * more / shape.batch


def _ms(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def verdicts(series: Sequence[Series], found: Found) -> list[Verdict]:
    """Return the verdicts about series of two sizes or more."""
    long = [some for some in series if len(some.shapes) > 1]
    return [linear(some, found) for some in long] + [flat_host(some, found) for some in long if some.axis == "context"]


def linear(series: Series, found: Found) -> Verdict:
    """Claim that no size costs more than any smaller one in proportion."""

    def judged(small: Shape, large: Shape) -> tuple[int, float, str]:
        grown = ratio(found[large].totals, found[small].totals)
        times = series.size(large) / series.size(small)
        text = f"at worst {grown} x from {series.size(small)} to {series.size(large)}, in proportion {times:.3g} x"
        return _FROM_GOOD_TO_BAD.index(grown.at_most(times * (1 + LINEAR_ALLOWANCE))), grown.middle / times, text

    worst, _, text = max(judged(small, large) for small, large in combinations(series.shapes, 2))
    claim = f"{series}: grows no faster than linearly, {100 * LINEAR_ALLOWANCE:.0f} % allowed for noise"
    return Verdict(claim, _FROM_GOOD_TO_BAD[worst], text)


def flat_host(series: Series, found: Found) -> Verdict:
    """Claim that schedule, build and commit take as long at the longest context as at the shortest."""
    small, large = found[series.shapes[0]].hosts, found[series.shapes[-1]].hosts
    grown, shorter, longer = ratio(large, small), median(small), median(large)
    sizes = f"from {series.shapes[0].context} to {series.shapes[-1].context}"
    claim = (
        f"{series}: the host part, run by itself, does not grow, {100 * HOST_ALLOWANCE:.0f} % or "
        f"{1000 * HOST_ALLOWANCE_MS:.0f} us allowed for noise"
    )
    text = f"{grown} x {sizes}, {1000 * shorter:.0f} to {1000 * longer:.0f} us"
    return Verdict(claim, grown.at_most(1 + max(HOST_ALLOWANCE, HOST_ALLOWANCE_MS / shorter)), text)


def as_json(found: Found) -> list[Row]:
    """Return every shape with the milliseconds of every round."""
    return [
        {"batch": shape.batch, "context": shape.context, "drafts": shape.drafts}
        | {part: [round(getattr(split, part), 4) for split in measured.splits] for part in (*Split._fields, "total")}
        | {part: [round(ms, 4) for ms in getattr(measured, part)] for part in ("hosts", "queued")}
        for shape, measured in found.items()
    ]


def describe(engine: Engine) -> str:
    """Return the models in one line."""
    target, draft = engine.target, engine.draft
    text = f"target of {target.num_layers} layers, hidden {target.hidden_size}, vocabulary {target.vocab_size}"
    if draft:
        text += f"; draft of {draft.decoder.num_layers} layers, block {draft.block_size}"
    device = torch.cuda.get_device_name(engine.device) if engine.device.startswith("cuda") else engine.device
    tokens = engine.core.scheduler.pool.num_usable * engine.sizes.page_size
    return f"{text}; {engine.dtype} on {device}, KV memory for {tokens} tokens in pages of {engine.sizes.page_size}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def parser() -> argparse.ArgumentParser:
    made = part_parser("step", __doc__)
    add = made.add_argument_group("the models").add_argument
    add("--model", metavar="NAME", help="demo, a folder or a Hugging Face id")
    add("--draft-model", metavar="NAME", help="[default: that of a pair, else none]")
    about = (
        f"random weights instead, in the sizes of {', '.join(random_weights.NAMES)} or PATH/config.json, with a draft "
        f"to match; the demo's shape gets {random_weights.DEMO_POSITIONS} positions [default: demo]"
    )
    add("--random-weights", metavar="NAME", help=about)
    about = "draw the number of accepted drafts: the mean acceptance length, bonus included"
    add("--simulate-acceptance", type=amount, metavar="X", help=about)
    add("--seed", type=int, default=0, metavar="N", help="of what is drawn [default: 0]")
    add = made.add_argument_group("their device").add_argument
    add("--device", default="auto", help="auto | cpu | cuda[:N] | npu[:N] [default: auto]")
    add("--dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto")
    add("--quantization", choices=("auto", "int8"), default="auto", help="as of `serve` [default: auto]")
    add("--threads", type=count, default=torch.get_num_threads(), metavar="N", help="of a CPU")
    about = "sizes that it does not hold are left out [default: like `serve`, on a CPU the sizes' own, at most 4]"
    add("--kv-cache-memory", type=float, metavar="GIB", help=about)
    add("--enforce-eager", action="store_true", help="no graphs")
    add = made.add_argument_group("the sizes").add_argument
    add("--batches", type=_sizes, default=[1, 2, 4, 8, 16, 32], metavar="N,N", help="[default: 1,2,4,8,16,32]")
    add("--context", type=_length, default=512, metavar="N", help="of these [default: 512]")
    add("--contexts", type=_lengths, default=CONTEXTS, metavar="N,N", help="[default: 256 ... 8192]")
    add("--context-batches", type=_sizes, default=[1, 8], metavar="N,N", help="sequences of these [default: 1,8]")
    add("--rounds", type=count, default=9, metavar="N", help="[default: 9]")
    return made


def _sizes(text: str) -> list[int]:
    return sorted(set(counts(text)))


def _length(text: str) -> int:
    if (value := count(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: a decoding sequence has 2 tokens at least")
    return value


def _lengths(text: str) -> list[int]:
    return sorted({_length(part) for part in text.split(",")})
