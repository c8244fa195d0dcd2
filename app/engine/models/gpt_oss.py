"""gpt-oss (arXiv 2508.10925): gpt-oss-20b, gpt-oss-120b."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.engine.device.base import AttentionMask
from app.engine.device.moe import SWIGLU_ALPHA
from app.engine.errors import UnsupportedError
from app.engine.models.config import DecoderConfig
from app.engine.models.target import Target
from app.engine.models.weights import ExpertLayout


class GptOss(Target):
    """Decoder with a sink for each head, sliding and full layers by turns, and experts with biases and clipped SwiGLU.

    Experts are stored in mxfp4, or as [E, in, out] in 16 bits. Rows of gate and up alternate.
    """

    expert_layout = ExpertLayout("router", interleaved=True, input_first=True)
    supports = frozenset({"sliding_window", "layer_types", "num_experts", "quantization_config"})

    @classmethod
    def refine(cls, config: DecoderConfig, raw: Mapping[str, Any]) -> DecoderConfig:
        quantization = raw.get("quantization_config") or {}
        by_mapping = isinstance(quantization, Mapping)
        known = {
            "quant_method": (quantization.get("quant_method", "mxfp4") if by_mapping else quantization, "mxfp4"),
            "swiglu_alpha": (raw.get("swiglu_alpha", SWIGLU_ALPHA), SWIGLU_ALPHA),
        }
        for field, (found, wanted) in known.items():
            if found != wanted:
                raise UnsupportedError(f"target: {field} = {found!r} is not supported for gpt_oss; only {wanted!r} is")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling")
        given = {**raw, **rope} if isinstance(rope, Mapping) else raw
        missing = [name for name in ("rms_norm_eps", "attention_bias", "rope_theta") if given.get(name) is None]
        missing += [] if rope else ["rope_scaling"]
        if missing or config.moe is None:  # defaults of gpt_oss are not those of other families
            raise UnsupportedError(f"target: {(missing or ['num_local_experts'])[0]} is missing, which gpt_oss needs")
        moe = replace(
            config.moe,
            norm_topk_prob=True,  # a softmax over the chosen experts alone
            has_bias=True,
            swiglu_limit=_swiglu_limit(raw.get("swiglu_limit", 7.0)),
        )
        masks = config.masks
        if raw.get("layer_types") is None:
            window = raw.get("sliding_window", 128)
            masks = tuple(AttentionMask(True, None if i % 2 else window) for i in range(config.num_layers))
        return replace(config, moe=moe, masks=masks, sinks=True)


def _swiglu_limit(found: Any) -> float:
    """Return the limit, which is infinite for null. Raises UnsupportedError unless it is a positive number."""
    if found is None:
        return math.inf
    if type(found) not in (int, float) or not found > 0:
        raise UnsupportedError(f"target: swiglu_limit must be a positive number or null, found {found!r}")
    return float(found)
