"""Acceptance of drafts that share the target's noise: `python -m tests.fast.engine.coupling`.

It prints the table in tools/lab/NOTES.md. The target samples argmax(logits / T + noise), and the noise depends on the
seed and the token's index alone. So a draft can be sampled with the same noise at a temperature of r * T, as
argmax(draft logits + r * T * noise). r = 0 is the engine's own argmax. With "chosen" every sequence chooses its r, by
the drafts of each r that the verified tokens would have accepted. The text is the same for all of them.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.checkpoint.files import DEMO
from app.engine.core import EngineCore
from app.engine.device.base import AttentionMetadata
from app.engine.dflash.drafter import DFlashDrafter
from app.engine.sampling.noise import noise_states
from app.messages import Request, TokenDelta
from tools.bench.table import markdown
from tools.lab import in_process, loads

RATIOS = (0.0, 0.5, 0.8, 1.0, 1.2)
MEMORY = 0.9
"""Weight of a score after the next step of its sequence."""
AT_ONCE = 16


class Coupled:
    """In the place of a DFlashDrafter. `ratio` is one of RATIOS, or None where each sequence chooses."""

    def __init__(self, real: DFlashDrafter, requests: list[Request], ratio: float | None) -> None:
        self._real = real
        self.decoder, self.rotary = real.decoder, real.rotary
        self.write_context = real.write_context
        self._requests = {request.request_id: request for request in requests}
        self._ratio = ratio
        self._scores = {request.request_id: np.zeros(len(RATIOS)) for request in requests}
        self._proposed: dict[str, np.ndarray] = {}

    def propose(
        self, request_ids: list[str], anchors: Tensor, positions: Tensor, slot_mapping: Tensor, meta: AttentionMetadata
    ) -> Tensor:
        model, block = self._real.model, self._real.model.config.block_size
        hidden = self._real.predicting(anchors, positions, slot_mapping, meta)
        logits = F.linear(hidden, model.lm_head).view(len(anchors), block - 1, -1)
        requests = [self._requests[request_id] for request_id in request_ids]
        firsts = (positions.view(-1, block)[:, 0] + 1).tolist()
        states = [noise_states(r.seed, first, block - 1) for r, first in zip(requests, firsts, strict=True)]
        noise = self._real._sampler.gumbel(torch.from_numpy(np.concatenate(states))).view_as(logits)
        scaled = noise * torch.tensor([request.sampling.temperature for request in requests])[:, None, None]
        drafts = torch.stack([(logits + ratio * scaled).argmax(dim=-1) for ratio in RATIOS], dim=1)
        self._proposed = dict(zip(request_ids, drafts.numpy(), strict=True))
        return torch.stack([drafts[i, self._choice(name)] for i, name in enumerate(request_ids)])

    def _choice(self, request_id: str) -> int:
        return int(self._scores[request_id].argmax()) if self._ratio is None else RATIOS.index(self._ratio)

    def learn(self, delta: TokenDelta) -> None:
        """Return the number of accepted drafts of each ratio, by the tokens that are known now."""
        said = np.array(delta.token_ids[: self._proposed[delta.request_id].shape[1]])
        right = self._proposed[delta.request_id][:, : len(said)] == said
        self._scores[delta.request_id] = MEMORY * self._scores[delta.request_id] + right.cumprod(axis=1).sum(axis=1)


def acceptance(core: EngineCore, requests: list[Request], ratio: float | None) -> tuple[float, dict[str, list[int]]]:
    """Tokens of a step that verified drafts; and the texts."""
    drafter = core.runner.forward.drafter
    coupled = Coupled(drafter, requests, ratio)
    core.runner.forward.drafter = coupled
    tokens = steps = 0

    def count(step) -> None:
        nonlocal tokens, steps
        for delta in step.deltas:
            if delta.num_verified:
                tokens, steps = tokens + len(delta.token_ids), steps + 1
                coupled.learn(delta)

    texts = core.run(requests, count)
    core.runner.forward.drafter = drafter
    return tokens / steps, texts


def row(core: EngineCore, domain: str, temperature: float, samples: int) -> dict[str, str]:
    requests = loads.requests(domain, samples, temperature)
    found, texts = zip(*(acceptance(core, requests, ratio) for ratio in (*RATIOS, None)), strict=True)
    assert all(text == texts[0] for text in texts), "drafts have changed a text"
    names = [*(f"r = {ratio:g}" for ratio in RATIOS), "chosen"]
    return {"text": f"{domain}, T = {temperature:g}"} | {name: f"{x:.2f}" for name, x in zip(names, found, strict=True)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.fast.engine.coupling", description=__doc__)
    parser.add_argument("--samples", type=int, default=200)
    options = parser.parse_args()
    engine = in_process.engine("full", DEMO / "target", DEMO / "draft", max_num_seqs=AT_ONCE)
    cells = [("prose", 0.7), ("prose", 1.0), ("prose", 1.5), ("prose", 3.0), ("talk", 1.0), ("math", 1.0)]
    print(markdown([row(engine, domain, temperature, options.samples) for domain, temperature in cells]))
