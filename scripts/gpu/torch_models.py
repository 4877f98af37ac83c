"""GPT-2 and Llama 3 in PyTorch, of the shapes of `fsdp_jax.models`: what scripts compare with.

A model maps tokens, int64 [B, T+1], to the mean cross-entropy of the next token in nats. `stream`
is the dtype of the residual stream; without one it is that of the embedding. Matrices begin as
normal(0, 0.02).
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class _LanguageModel(nn.Module):
    """Base of the models: an embedding that is also the head, `blocks` and a `last_norm`."""

    def __init__(self, vocab: int, width: int, stream: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.stream = stream

    def initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Any) -> Any:
        x = self.first(tokens[:, :-1])
        if self.stream is not None:
            x = x.to(self.stream)
        tables = self.tables(x.shape[1])
        for block in self.blocks:
            x = block(x, *tables)
        return self.loss(x, tokens[:, 1:])

    def first(self, tokens: Any) -> Any:
        return self.embed(tokens)

    def tables(self, length: int) -> tuple[Any, ...]:
        return ()

    def loss(self, x: Any, targets: Any) -> Any:
        logits = functional.linear(self.last_norm(x), self.embed.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class GPTBlock(nn.Module):
    """A pre-norm block with biases and the tanh approximation of gelu."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        """Maps [B, T, D] to [B, T, D]."""
        rows, length, width = x.shape
        parts = self.qkv(self.ln_1(x)).split(width, dim=-1)
        query, key, value = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT(_LanguageModel):
    """GPT-2 with learned positions for `length` tokens."""

    def __init__(
        self, vocab: int, length: int, layers: int, width: int, heads: int, stream: Any = None
    ) -> None:
        super().__init__(vocab, width, stream)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.last_norm = nn.LayerNorm(width)
        self.initialize()

    def first(self, tokens: Any) -> Any:
        """Maps int64 [B, T] to the input of the blocks, [B, T, D]."""
        return self.embed(tokens) + self.positions.weight[None, : tokens.shape[1]]


class LlamaBlock(nn.Module):
    """A pre-norm block with rotary positions, grouped queries and SwiGLU, without biases."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.head_dim = config.width, config.head_dim
        narrow = config.kv_heads * config.head_dim
        self.attn_norm = nn.RMSNorm(width, eps=config.norm_epsilon)
        self.mlp_norm = nn.RMSNorm(width, eps=config.norm_epsilon)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, narrow, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, config.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(config.hidden, width, bias=False)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        """Maps [B, T, D] to [B, T, D]; cosines and sines of the rotary angles are [T, K/2]."""
        rows, length, _ = x.shape
        y = self.attn_norm(x)
        query, key, value = (
            project(y).view(rows, length, -1, self.head_dim).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        attended = functional.scaled_dot_product_attention(
            rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True, enable_gqa=True
        )
        x = x + self.o(attended.transpose(1, 2).reshape(x.shape))
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    """Rotates the pairs (x[i], x[i + K/2]) of [B, H, T, K] in float32; keeps the dtype."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


class Llama(_LanguageModel):
    """Llama 3 of a `LlamaConfig` with a tied head; `frequency`: of the rotary pairs, [K/2]."""

    def __init__(self, config: Any, frequency: Any, stream: Any = None) -> None:
        super().__init__(config.vocab_size, config.width, stream)
        angle = torch.arange(config.sequence_length)[:, None] * torch.tensor(frequency)[None]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.last_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.initialize()

    def tables(self, length: int) -> tuple[Any, ...]:
        """Returns the cosines and sines for so many positions."""
        return self.cos[:length], self.sin[:length]
