"""Right calls of the operators on "npu:0", for tests to run as they are or to spoil in one place."""

from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch_npu
from torch import Tensor

BLOCK = 128


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def causal_mask() -> Tensor:
    """int8 [2048, 2048], 1 strictly above the diagonal, for sparse_mode 3."""
    return torch.ones(2048, 2048, dtype=torch.int8).triu_(1).to("npu:0")


@dataclass
class Sequences:
    """S sequences of `host_seq_lens` tokens whose last (causal) or newest `query_lens` rows query, over shuffled
    blocks.

    Everything that no token owns, block 0 among it, is `garbage`.
    """

    query_lens: list[int]
    host_seq_lens: list[int]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    garbage: float = 1e4
    q: Tensor = field(init=False)
    k: list[Tensor] = field(init=False)
    v: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        width = (self.kv_heads, self.dim)
        self.q = normal(sum(self.query_lens), self.heads, self.dim, seed=1, dtype=self.dtype)
        self.k, self.v = ([normal(n, *width, seed=s, dtype=self.dtype) for n in self.host_seq_lens] for s in (2, 3))
        counts = [-(-n // BLOCK) for n in self.host_seq_lens]
        shuffled = (1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(4))).tolist()
        self.blocks = [[shuffled.pop() for _ in range(n)] for n in counts]

    def pool(self, tokens: list[Tensor]) -> Tensor:
        """[blocks, 128, kv_heads * D] on the CPU."""
        pool = torch.full(
            (1 + sum(map(len, self.blocks)), BLOCK, self.kv_heads * self.dim), self.garbage, dtype=self.dtype
        )
        for rows, blocks in zip(tokens, self.blocks, strict=True):
            for part, block in zip(rows.flatten(1).split(BLOCK), blocks, strict=True):
                pool[block, : len(part)] = part
        return pool

    def table(self) -> Tensor:
        """int32 [S, P] on the CPU; columns that no sequence needs lead to block 0."""
        rows = [torch.tensor(blocks) for blocks in self.blocks]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).int()

    def arguments(self, *, causal: bool, window: int | None = None) -> dict[str, object]:
        """Return the arguments of `npu_fused_infer_attention_score`."""
        mask = {"atten_mask": causal_mask(), "sparse_mode": 3} if causal else {"sparse_mode": 0}
        if window:
            tokens = {"pre_tokens": window - 1, "next_tokens": 0 if causal else window - 1}
            mask = {"atten_mask": causal_mask(), "sparse_mode": 4, **tokens}
        return {
            "query": self.q.to("npu:0"),
            "key": self.pool(self.k).to("npu:0"),
            "value": self.pool(self.v).to("npu:0"),
            "actual_seq_lengths": list(accumulate(self.query_lens)),
            "actual_seq_lengths_kv": list(self.host_seq_lens),
            "block_table": self.table().to("npu:0"),
            "num_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "scale": self.dim**-0.5,
            "input_layout": "TND",
            "block_size": BLOCK,
            **mask,
        }

    def attend(self, *, causal: bool, window: int | None = None, **spoiled: object) -> Tensor:
        """o [T, heads, D] on the device."""
        return torch_npu.npu_fused_infer_attention_score(**self.arguments(causal=causal, window=window) | spoiled)[0]

    def dense(self, *, causal: bool, window: int | None = None) -> Tensor:
        """The same in float64, row by row and head by head, from the definition."""
        out, row = torch.zeros(self.q.shape, dtype=torch.float64), 0
        for s, (q_len, kv_len) in enumerate(zip(self.query_lens, self.host_seq_lens, strict=True)):
            for i in range(q_len):
                own = kv_len - q_len + i
                after = own + 1 if causal else kv_len
                seen = [t for t in range(after) if window is None or abs(t - own) < window]
                for head in range(self.heads):
                    kv_head = head * self.kv_heads // self.heads
                    k, v = (tokens[s][seen, kv_head].double() for tokens in (self.k, self.v))
                    weights = (k @ self.q[row, head].double() * self.dim**-0.5).softmax(0)
                    out[row, head] = weights @ v
                row += 1
        return out
