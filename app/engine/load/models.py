"""Both models with their weights, from their checkpoints."""

import logging
from collections.abc import Callable
from functools import partial

import torch

from app.engine.checkpoint.draft import refuse_foreign_tensors
from app.engine.checkpoint.files import Checkpoint
from app.engine.checkpoint.read import Models
from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.comm.comm import ALONE, Comm
from app.engine.device.base import Backend
from app.engine.dflash.conv import ConvolvedLayer
from app.engine.dflash.model import DFlashModel, read_mask_row
from app.engine.dflash.rotation import read_rotation, turned_back, turned_fc
from app.engine.load.loader import OpenWeights, target_class
from app.engine.load.memory import check_weights
from app.engine.load.plan import Plan, name_of
from app.engine.models.layers import Attention
from app.engine.models.target import Target
from app.engine.models.weights import RoundedWeights, Weights
from app.engine.quantised import QuantisedWeight

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total): stage "compiling for this CPU, once" in sources, "target" and "draft" in bytes,
"graphs" in graphs, "warm-up" in steps, "timing steps" in seconds."""


def read_models(
    plan: Plan, models: Models, backend: Backend, comm: Comm, open_weights: OpenWeights, on_progress: Progress
) -> tuple[Target, DFlashModel | None]:
    """Read both models. The draft's files are opened, and refused if need be, before the target's are read."""
    config, shape = plan.config, plan.draft
    draft_weights = None

    def opened(checkpoint: Checkpoint, on_read: Callable[[int, int], None] = lambda *_: None) -> Weights:
        return open_weights(checkpoint, backend.device, plan.dtype, on_read, backend.quantised_dtypes)

    stored = opened(models.target_files, partial(on_progress, "target"))
    if models.draft_files and shape:
        draft_weights = opened(models.draft_files, partial(on_progress, "draft"))
        refuse_foreign_tensors(draft_weights.names, shape)
    rotation = read_rotation(models.target_files, backend, plan.target.hidden_size) if config.draft else None
    check_weights(plan, stored, draft_weights, backend, comm)
    family = target_class(plan.target.model_type)
    target_layer_ids = shape.target_layer_ids if shape else ()
    weights = RoundedWeights(stored, torch.int8) if config.quantization == "int8" else stored
    target = family(plan.target, weights, backend, target_layer_ids, comm)
    stored.close()
    if any(sizes := (backend.quantised_bytes >> 20, backend.widened_bytes >> 20)):
        told = "target: %d MiB of weights stay quantised; others that are became %d MiB of the engine's dtype"
        logger.info(told, *sizes)
    use_operator(target, plan.target, backend, comm, target_layer_ids)
    if shape is None or draft_weights is None or config.draft is None:
        return target, None
    shared = target.embedding, target.lm_head
    if rotation is not None:

        def original(checkpoint: Checkpoint) -> Weights:
            return family.adapt(opened(checkpoint), plan.target)

        shared = turned_back(config, shape, draft_weights, rotation, *shared, original, backend)
    before, layers_comm = backend.quantised_bytes, ALONE if plan.whole_draft else comm
    draft = DFlashModel(shape, draft_weights, backend, *shared, comm, layers_comm, kind=plan.draft_kind)
    if plan.draft_kind:
        _tell_rounded(draft, plan.draft_kind, backend.quantised_bytes - before)
    if rotation is not None:
        draft.fc = turned_fc(draft.fc, rotation, backend)
    draft.mask_row = read_mask_row(config.draft, shape, draft.norm)
    draft_weights.close()
    use_operator(draft, shape.decoder, backend, comm)
    return target, draft


def _tell_rounded(draft: DFlashModel, kind: torch.dtype, num_bytes: int) -> None:
    head = "with a copy of its head" if isinstance(draft.lm_head, QuantisedWeight) else "but not its head"
    text = "draft: %d MiB of weights in %s, %s; --draft-quantization none keeps them"
    logger.info(text, num_bytes >> 20, name_of(kind), head)


def use_operator(
    model: Target | DFlashModel, config: DecoderConfig, backend: Backend, comm: Comm, taps: tuple[int, ...] = ()
) -> None:
    """Make one operator run all layers of the model, if they are dense, on one rank, and the device has one."""
    layers = []
    for layer in model.layers:
        at = layer.attention
        if type(at) is not Attention or layer.mixture or comm.size > 1 or isinstance(layer, ConvolvedLayer):
            return
        attention = at.qkv, at.qkv_bias, at.q_norm, at.k_norm, at.sinks, at.o, at.o_bias
        layers.append((layer.input_norm, *attention, layer.post_attention_norm, layer.gate_up, layer.down))
    model.whole = backend.decoder(layers, model.norm, config, taps)
