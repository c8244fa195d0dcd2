"""--batch-invariant: targets and ways to run them whose bits would depend on the batch after all."""

from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.errors import UnsupportedError
from app.engine_config import EngineConfig


def check_batch_invariant(config: EngineConfig, target: DecoderConfig) -> None:
    """Raise UnsupportedError for a target, or a split of it, that has sums in an order of the batch."""
    reasons = {
        "its experts are computed in groups of rows": target.moe is not None,
        "its recurrent layers commit rows in groups": target.gated_delta is not None,
    }
    for reason, given in reasons.items():
        if given:
            raise UnsupportedError(f"--batch-invariant: not for this target, because {reason} ({config.target})")
    if config.tensor_parallel_size > 1:
        raise UnsupportedError(
            f"--batch-invariant: not with --tensor-parallel-size {config.tensor_parallel_size}, because the library "
            "chooses the order of a sum over ranks"
        )
