"""Models of real sizes with random weights, made on the device. The cost of a step does not depend on them.

Their tokens mean nothing. Each target has a draft like the published Qwen3 ones of block 16; the demo pair has the
demo's.
"""

import gc
import json
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable
from math import gcd
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from app.config.engine import EngineConfig
from app.config.error import ConfigError
from app.engine.checkpoint.draft import draft_config
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import DEMO, Checkpoint
from app.engine.checkpoint.quantised import block_size
from app.engine.device.factory import make_backend
from app.engine.dflash.model import DFlashModel
from app.engine.errors import UnsupportedError
from app.engine.load.engine import Engine, build_engine
from app.engine.load.loader import target_class
from app.engine.models.weights import Part
from app.engine.quantised import QuantisedWeight, Weight

BANNER = "RANDOM WEIGHTS: the tokens are meaningless; the sizes, and so the times, are those of the real model."

BLOCK_SIZE = 16
DRAFT_LAYERS = 5
MASK_TOKEN_ID = 151669

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "use_sliding_window": False,
}


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return _QWEN3 | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


_QWEN3_5 = {key: value for key, value in _QWEN3.items() if not key.startswith(("rope", "use_sliding"))} | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}

_HYBRID_LAYERS = ["linear_attention"] * 3 + ["full_attention"]
_FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
_QWEN3_8B = _qwen3(4096, 12288, 36, 32, tied=False)

TARGETS = {
    "qwen3-8b": _QWEN3_8B,
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3.5-0.8b": _QWEN3_5
    | {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
        "layer_types": _HYBRID_LAYERS * 6,
    },
    "qwen3-8b-fp8": _QWEN3_8B | _FP8,
    "qwen3.8-27b-fp8": _QWEN3_5
    | _FP8
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "tie_word_embeddings": False,
        "layer_types": _HYBRID_LAYERS * 16,
        "draft_block_size": 8,
    },
    "qwen3-30b-a3b-fp8": _qwen3(2048, 6144, 48, 32, tied=False)
    | _FP8
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "dtype": "bfloat16",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}
"""Name -> contents of the published config.json; `draft_block_size` is of the published draft, BLOCK_SIZE without."""

_SHARED = (
    "dtype hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size hidden_act "
    "rms_norm_eps max_position_embeddings"
).split()
"""Fields of a target that its draft has too."""
DEMO_PAIR = "demo"
DEMO_POSITIONS = 16384
"""More than the 1,024 that the demo pair was trained for."""
NAMES = (DEMO_PAIR, *TARGETS)


class RandomWeights:
    """Weights that are made on the device when a model asks for them.

    Norms are ones. Other tensors are normal, scaled to keep the size of a projection's input. A tensor depends on
    the names of the folder and the tensor; kinds of device may differ. Optional tensors are missing, so a draft shares
    the target's embedding and lm_head. Weights of products are quantised as the `quantization_config` says.
    """

    names: Iterable[str] = ()

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        on_progress: Callable[[int, int], None],
        kept: Collection[str] = (),  # stored dtypes, which all devices of these weights have
    ) -> None:
        self._model = checkpoint.folder.name
        self._config = checkpoint.config
        self._method: dict[str, Any] = self._config.get("quantization_config", {})
        self._device = device
        self._dtype = dtype
        self._on_progress = on_progress
        self._made = 0

    def __contains__(self, name: str) -> bool:
        return self._method.get("quant_method") == "mxfp4" and name.endswith("_proj_blocks")

    def num_bytes(self, multiplies: object, *, to: torch.dtype | None) -> int:
        return 0  # unknown, so a model that does not fit is found out while it is made

    def get(self, name: str, *shape: int, part: Part | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if dtype == torch.int64:
            raise UnsupportedError(f"{name}: no random whole numbers are made")
        dtype = dtype or self._dtype
        tensor = torch.empty(shape, dtype=dtype if dtype == torch.uint8 else self._dtype, device=self._device)
        if dtype == torch.uint8:
            # Scales of mxfp4 from 2^-9 to 2^-7 keep the size of an input of some thousand numbers.
            low, high = (118, 121) if name.endswith("_scales") else (0, 256)
            tensor.random_(low, high, generator=self._noise(name))
        elif len(shape) == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(std=shape[-1] ** -0.5, generator=self._noise(name))
        return self._counted(part.of(tensor) if part else tensor).to(dtype)

    def get_linear(self, name: str, *shape: int, part: Part | None = None) -> Weight:
        method = self._method.get("quant_method")
        if method not in ("fp8", "compressed-tensors"):
            return self.get(name, *shape, part=part)
        is_fp8 = method == "fp8" or self._method.get("format") != "int-quantized"
        rows, columns = block_size(self._config) if method == "fp8" else (1, shape[1])
        kind, largest = (torch.float8_e4m3fn, 448) if is_fp8 else (torch.int8, 127)
        std, noise = largest / 6, self._noise(name)  # six deviations are as rare as a number of a large model
        data = torch.empty(shape, dtype=self._dtype, device=self._device).normal_(std=std, generator=noise)
        data = data.clamp_(-largest, largest).to(kind).view(torch.int8)
        scales = torch.empty(-(-shape[0] // rows), shape[1] // gcd(shape[1], columns), device=self._device)
        scales.uniform_(0.5, 1.5, generator=noise).mul_(shape[1] ** -0.5 / std)
        scales = scales.repeat_interleave(rows, 0)[: shape[0]]
        if part:
            data = part.of(data)
            scales = part.of(scales) if part.axis == 0 else scales[:, : data.shape[1] // gcd(shape[1], columns)]
        return QuantisedWeight(self._counted(data).view(kind), scales.contiguous(), self._dtype)

    def _noise(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._model} {name}".encode()))

    def _counted(self, tensor: Tensor) -> Tensor:
        self._made += tensor.nbytes
        self._on_progress(self._made, self._made)
        return tensor

    def skip(self, name: str) -> None:
        return

    def close(self) -> None:
        return


def write_configs(wanted: str | dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write the config.json of a target and of a draft for it, and return their folders.

    `wanted` is one of NAMES, a path to a target's config.json, or its contents. Raises ConfigError for what is neither.
    """
    for name, config in zip(("target", "draft"), pair_of(wanted), strict=True):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config, indent=2))
    return folder / "target", folder / "draft"


def free_memory(device: str) -> None:
    """Give the memory of engines that nothing refers to back to the device: two of an 8B do not fit.

    An engine is a cycle of references, and torch's allocator keeps what it has reserved.
    """
    gc.collect()
    runtime = getattr(torch, device.partition(":")[0], None)  # there is no torch.npu before torch_npu, and no memory
    if empty_cache := getattr(runtime, "empty_cache", None):
        empty_cache()


def random_engine(wanted: str | dict[str, Any], *, draft: bool, device: str, **config: Any) -> Engine:
    """Build an engine of random weights in the sizes of `wanted`, like in `write_configs`, in the memory of an earlier
    one."""
    free_memory(device)
    with TemporaryDirectory() as folder:
        target, draft_folder = write_configs(wanted, Path(folder))
        wishes: dict[str, Any] = {"device": device, "prefix_caching": False, "verify": "full"} | config
        pair = EngineConfig(target, draft_folder if draft else None, **wishes)
        return build_engine(pair, open_weights=RandomWeights)


class WrittenWeights(RandomWeights):
    """Random weights whose tensors are each written to a file in `to`."""

    def __init__(self, folder: Path, to: Path) -> None:
        super().__init__(Checkpoint(folder), torch.device("cpu"), torch.bfloat16, lambda *_: None)
        self._to, self._homes = to, dict[str, str]()

    def get(self, name: str, *shape: int, part: Part | None = None, dtype: torch.dtype | None = None) -> Tensor:
        tensor = super().get(name, *shape, part=part)
        self._homes[name] = f"model-{name}.safetensors"
        save_file({name: tensor}, self._to / self._homes[name])
        return tensor if dtype is None else tensor.to(dtype)

    def close(self) -> None:
        (self._to / "model.safetensors.index.json").write_text(json.dumps({"weight_map": self._homes}))


def write_checkpoints(wanted: str, folder: Path) -> tuple[Path, Path]:
    """Write a target and a draft in bfloat16, and return their folders. `wanted` is like in `write_configs`."""
    target, draft = write_configs(wanted, folder)
    raw, backend = _read(target / "config.json"), make_backend("cpu")
    config, weights = target_config(raw), WrittenWeights(target, target)
    model = target_class(raw["model_type"])(config, weights, backend)
    weights.close()
    weights = WrittenWeights(draft, draft)
    DFlashModel(draft_config(_read(draft / "config.json"), config), weights, backend, model.embedding, model.lm_head)
    weights.close()
    write_tokenizer(target, raw["vocab_size"])
    return target, draft


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write the demo's tokenizer with more tokens, each with a different text, so that texts tell what was answered."""
    tokenizer = json.loads((DEMO / "target" / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"Ġ{token}": token for token in range(len(vocab), vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    shutil.copy(DEMO / "target" / "tokenizer_config.json", folder)


def pair_of(wanted: str | dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configs of a target and of a draft for it, like `write_configs` writes them."""
    if isinstance(wanted, dict):
        return wanted, draft_for(wanted)
    if wanted == DEMO_PAIR:
        longer = {"max_position_embeddings": DEMO_POSITIONS}
        return _read(DEMO / "target" / "config.json") | longer, _read(DEMO / "draft" / "config.json") | longer
    target = TARGETS.get(wanted) or _read(Path(wanted).expanduser())
    return target, draft_for(target)


def in_16_bits(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a model whose weights are not quantised."""
    return {key: value for key, value in config.items() if key != "quantization_config"}


def draft_for(target: dict[str, Any]) -> dict[str, Any]:
    """Return a draft's config: the target's sizes, but few layers, and default taps."""
    num_layers, vocab_size = target["num_hidden_layers"], target["vocab_size"]
    layers = max(1, min(DRAFT_LAYERS, num_layers - 3))
    # By default a draft of one layer taps the middle one, which of two is the last, and no tap.
    taps = {"target_layer_ids": [0]} if num_layers == 2 else {}
    return {key: target[key] for key in _SHARED if key in target} | {
        "model_type": "qwen3",
        "rope_theta": target.get("rope_theta", 1e6),
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": layers,
        "num_target_layers": num_layers,
        "block_size": target.get("draft_block_size", BLOCK_SIZE),
        "dflash_config": {"mask_token_id": min(MASK_TOKEN_ID, vocab_size - 1)} | taps,
    }


def _read(path: Path) -> dict[str, Any]:
    hint = f"{', '.join(NAMES)}, or the path of a dense Qwen3's config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--random-weights {path}: {error}", hint) from None
    if not isinstance(config, dict) or not all(
        type(config.get(key)) is int for key in ("num_hidden_layers", "vocab_size")
    ):
        raise ConfigError(f"--random-weights {path}: no model's config.json, for it names no sizes", hint)
    return config
