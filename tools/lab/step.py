"""What a decode step costs and where the time goes, in this process: `python -m tools.lab step`.

Against the number of sequences and against their context, for plain steps and for whole blocks; a plain step keeps the
draft's context as well, as it does in serving. Where no model is named it is one of the demo pair's shape, which has
random weights and positions for every context. Exits with 1 if for certain a cost grows faster than linearly, or the
host's part grows with context, which takes 6 rounds to tell; with 2 for a mistake in what was asked for.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from app.bench.command import guarded, out_folder, progress, save
from app.bench.flags import add_out_flag, count, counts
from app.bench.machine import describe
from app.bench.report import Table
from app.config.checkpoint import CheckpointError, resolve
from app.config.settings import ConfigError
from app.doctor.report import random_weights, simulated
from app.engine.backend.factory import make_backend
from app.engine.build.config import EngineConfig
from app.engine.build.engine import CPU_KV_BYTES, Engine, build_engine
from app.engine.dflash.config import DFlashConfig
from app.engine.errors import UnsupportedError
from app.engine.models.config import read_config
from app.engine.models.kv_pool import bytes_per_token
from app.engine.models.loader import SafetensorsWeights
from app.engine.models.qwen3 import qwen3_config
from tools.lab import step_report
from tools.lab.step_timing import Bench, measure, room
from tools.lab.step_timing import describe as describe_engine

BATCHES = [1, 2, 4, 8, 16, 32]
CONTEXTS = [256, 512, 1024, 2048, 4096, 8192]
CONTEXT = 512
ROUNDS = 9
KV_HELP = "what it does not hold is left out, and told [default: as `serve`, on a CPU what the sizes fill, 4 at most]"


def main(arguments: Sequence[str]) -> int:
    options = settled(arguments)
    return guarded(lambda: bench(options, shlex.join(["python", "-m", "tools.lab", "step", *arguments])))


def settled(arguments: Sequence[str]) -> argparse.Namespace:
    """What was asked for, with random weights where no model was."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not (options.model or options.draft_model):
        options.random_weights = options.random_weights or random_weights.DEMO_PAIR
    elif options.random_weights:
        parser.error("--random-weights and --model or --draft-model exclude each other")
    return options


def bench(options: argparse.Namespace, command: str) -> int:
    folder = out_folder(options)
    torch.set_num_threads(options.threads)
    banners = _banners(options)
    print("".join(f"*** {banner} ***\n" for banner in banners), end="")
    engine, acceptance_length = load(options)
    timed = Bench(engine)
    all_series, left_out = fitting(options, timed, drafts=engine.draft is not None)
    shapes = list(dict.fromkeys(shape for some in all_series for shape in some.shapes))
    with progress(Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(shapes) * (options.rounds + 1))
        found = measure(timed, shapes, options.rounds, lambda text: bar.update(task, advance=1, description=text))
    tables = step_report.tables(
        all_series, found, is_asynchronous=timed.is_asynchronous, acceptance_length=acceptance_length
    )
    verdicts = step_report.verdicts(all_series, found)
    rounds = f"medians of {options.rounds} rounds, each of which ran every shape"
    about = [*banners, describe_engine(engine), rounds, *left_out]
    print(f"{describe()}\n\n" + "".join(f"- {line}\n" for line in about) + "\n" + "\n".join(map(str, tables)))
    print("\n".join(f"- {verdict}" for verdict in verdicts))
    if folder:
        results = {
            "command": command,
            "machine": describe(),
            "about": about,
            "verdicts": [{"claim": v.claim, "holds": v.holds, "found": v.found} for v in verdicts],
            "shapes": step_report.as_json(found),
        }
        save(folder, "step", results, lambda: _draw(folder, tables, all_series, found))
    return int(any(verdict.holds is False for verdict in verdicts))


def _draw(
    folder: Path, tables: Sequence[Table], all_series: Sequence[step_report.Series], found: step_report.Found
) -> None:
    from tools.lab import step_plots

    for table, group in zip(tables, step_report.groups(all_series).values(), strict=True):
        step_plots.write(folder / f"{table.name}.png", table.title, group, found)


def load(options: argparse.Namespace) -> tuple[Engine, float | None]:
    """The engine, and its mean acceptance length if that is simulated. Raises ConfigError for what cannot be loaded."""
    try:
        with TemporaryDirectory() as folder:
            config = _engine_config(options, *_checkpoints(options, Path(folder)))
            weights = random_weights.RandomWeights if options.random_weights else SafetensorsWeights
            engine = build_engine(config, open_weights=weights)
    except (CheckpointError, UnsupportedError) as error:
        raise ConfigError(str(error)) from None
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the models do not fit on --device {options.device}: {error}") from None
    if not options.simulate_acceptance:
        return engine, None
    if engine.draft is None:
        raise ConfigError(f"{simulated.FLAG}: without a draft nothing is accepted", "give --draft-model")
    rates = simulated.survival(options.simulate_acceptance, engine.draft.block_size)
    simulated.simulate(engine.core, rates, options.seed)
    return engine, simulated.mean_length(rates)


def fitting(options: argparse.Namespace, timed: Bench, *, drafts: bool) -> tuple[list[step_report.Series], list[str]]:
    """The series as far as the model and its KV memory go, and what was left out, in words."""
    longest = timed.longest
    contexts = [length for length in options.contexts if length <= longest]
    left_out = []
    if too_long := sorted(set(options.contexts) - set(contexts)):
        contexts.append(longest)
        left_out.append(f"contexts {_listed(too_long)} are more than the model has room for: {longest} instead")
    context = min(options.context, longest)
    wanted = step_report.series(options.batches, context, sorted(set(contexts)), options.context_batches, drafts)
    fitted = []
    for some in wanted:
        shapes = [shape for shape in some.shapes if timed.fits(shape)]
        if missing := [some.size(shape) for shape in some.shapes if shape not in shapes]:
            left_out.append(f"{some}: KV memory does not hold {_listed(missing)}")
        if shapes:
            fitted.append(step_report.Series(some.axis, shapes))
    if not fitted:
        raise ConfigError("KV memory holds none of the shapes", "give --kv-cache-memory, or smaller --contexts")
    return fitted, left_out


def _checkpoints(options: argparse.Namespace, folder: Path) -> tuple[Path, Path | None]:
    """The folders of target and draft; those of random weights are made in `folder`."""
    if options.random_weights:
        return random_weights.write_configs(options.random_weights, folder)
    target = options.model or "demo"
    draft = options.draft_model or ("demo" if target == "demo" else None)
    return resolve(target, "target"), resolve(draft, "draft") if draft else None


def _engine_config(options: argparse.Namespace, target: Path, draft: Path | None) -> EngineConfig:
    """With room for the longest context, as far as the model knows positions."""
    config: dict[str, Any] = read_config(target)
    block_size = read_config(draft).get("block_size", random_weights.BLOCK_SIZE) if draft else 1
    longest = max(options.context, *options.contexts) + room(block_size)
    memory = options.kv_cache_memory
    return EngineConfig(
        target,
        draft,
        device=options.device,
        dtype=options.dtype,
        max_model_len=min(longest, config.get("max_position_embeddings") or longest),
        max_num_seqs=max(*options.batches, *options.context_batches),
        kv_cache_memory=_kv_memory(options, target, draft) if memory is None else int(memory * 2**30),
        enforce_eager=True if options.enforce_eager else None,
        compile=options.compile,
    )


def _kv_memory(options: argparse.Namespace, target: Path, draft: Path | None) -> int | None:
    """Bytes: on a CPU what the largest shape fills, as far as serving would have it; elsewhere as in serving."""
    backend = make_backend(options.device)
    if backend.device.type != "cpu":
        return None
    decoders = [qwen3_config(read_config(target))]
    block_size = 1
    if draft:
        draft_config = DFlashConfig.from_json(read_config(draft), decoders[0])
        decoders.append(draft_config.decoder)
        block_size = draft_config.block_size
    dtype = torch.float32 if options.dtype == "auto" else getattr(torch, options.dtype)
    more = room(block_size) + 2 * block_size + 2 * backend.defaults.page_size
    sizes = [(options.batches, [options.context]), (options.context_batches, options.contexts)]
    tokens = max(max(batches) * (max(contexts) + more) for batches, contexts in sizes)
    free, _ = backend.memory()
    return min(tokens * sum(bytes_per_token(decoder, dtype) for decoder in decoders), CPU_KV_BYTES, free // 2)


def _banners(options: argparse.Namespace) -> list[str]:
    return [random_weights.BANNER] * bool(options.random_weights) + [simulated.BANNER] * bool(
        options.simulate_acceptance
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.lab step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_argument_group("the models")
    group.add_argument("--model", metavar="NAME", help="demo, a folder or a Hugging Face id")
    group.add_argument("--draft-model", metavar="NAME", help="[default: demo for the demo, else none]")
    group.add_argument(
        "--random-weights",
        metavar="NAME",
        help=f"weights of no meaning instead, in the sizes of {', '.join(random_weights.NAMES)} or PATH/config.json, "
        f"with a draft to match; the demo's shape gets {random_weights.DEMO_POSITIONS} positions [default: demo]",
    )
    group.add_argument(
        simulated.FLAG,
        type=simulated.wish,
        metavar="X",
        help="draw how many drafts are accepted: a mean acceptance length, bonus included, or a rate for each position",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn [default: 0]")
    group = parser.add_argument_group("where they run")
    group.add_argument("--device", default="auto", help="auto | cpu | cuda[:N] | npu[:N] [default: auto]")
    group.add_argument("--dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto")
    group.add_argument("--threads", type=count, default=torch.get_num_threads(), metavar="N", help="of a CPU")
    group.add_argument("--kv-cache-memory", type=float, metavar="GIB", help=KV_HELP)
    group.add_argument("--enforce-eager", action="store_true", help="no graphs")
    group.add_argument("--compile", action="store_true", help="what `serve --compile` runs")
    group = parser.add_argument_group("what is measured")
    group.add_argument("--batches", type=_sizes, default=BATCHES, metavar="N,N", help="[default: 1,2,4,8,16,32]")
    group.add_argument("--context", type=_length, default=CONTEXT, metavar="N", help=f"of these [default: {CONTEXT}]")
    group.add_argument("--contexts", type=_lengths, default=CONTEXTS, metavar="N,N", help="[default: 256 ... 8192]")
    group.add_argument(
        "--context-batches", type=_sizes, default=[1, 8], metavar="N,N", help="sequences of these [default: 1,8]"
    )
    group.add_argument("--rounds", type=count, default=ROUNDS, metavar="N", help=f"[default: {ROUNDS}]")
    add_out_flag(parser, "step.json and a PNG of each table")
    return parser


def _sizes(text: str) -> list[int]:
    return sorted(set(counts(text)))


def _length(text: str) -> int:
    if (value := count(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: a decoding sequence has 2 tokens at least")
    return value


def _lengths(text: str) -> list[int]:
    return sorted({_length(part) for part in text.split(",")})
