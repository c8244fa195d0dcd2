"""Greedy text from the saved target, by Transformers: an implementation that is not ours."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from app.demo.model import Shape


class Greedy:
    """The saved target in fp32. `folder` is the one with config.json and model.safetensors."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._ends: list[int] = self._model.generation_config.eos_token_id
        self._pad: int = self._model.generation_config.pad_token_id

    @torch.inference_mode()
    def __call__(self, prompts: list[list[int]], max_new: int, batch: int = 64) -> list[list[int]]:
        """The answers' ids, in the order of `prompts`, with their end mark if it came within `max_new`."""
        answers: list[list[int]] = [[]] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            width = max(len(prompts[i]) for i in chosen)
            ids = torch.tensor([[self._pad] * (width - len(prompts[i])) + prompts[i] for i in chosen])
            seen = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen])
            config = GenerationConfig(
                max_new_tokens=min(max_new, Shape().max_positions - width),
                do_sample=False,
                eos_token_id=self._ends,
                pad_token_id=self._pad,
            )
            written = self._model.generate(ids, attention_mask=seen, generation_config=config)[:, width:].tolist()
            for i, answer in zip(chosen, written, strict=True):
                answers[i] = self._up_to_end(answer)
        return answers

    def _up_to_end(self, answer: list[int]) -> list[int]:
        end = next((i + 1 for i, token in enumerate(answer) if token in self._ends), len(answer))
        return answer[:end]
