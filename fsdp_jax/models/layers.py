"""Layers that the model families share, in plain Flax NNX.

Shapes: B batch, T sequence, S keys, D width, H heads, G key and value heads, K head dim, F hidden
width of the MLP, V vocab, L layers.

Dtypes: with `dtype=None` a layer computes in the dtype that its inputs and parameters promote to,
so whoever casts the parameters chooses the compute dtype. Parameters are created in float32.

Names for `jax.checkpoint`: every block gives the name `qkv` to its queries, keys and values,
`attention` to what attention returns (a fused kernel's results have no name of their own),
`attention_out` to their projection back to D, and `mlp` to its projections to F.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from fsdp_jax.local_rows import on_local_rows, traced_with_model_axes
from fsdp_jax.models.chunked_loss import chunked_losses
from fsdp_jax.models.config import BaseConfig

INIT_STD = 0.02
QUERY_BLOCK = 512  # queries of a block in `blockwise_attention`

Segments = tuple[jax.Array, jax.Array]


class Attention(Protocol):
    """`dense_attention`, or any callable like it. A model passes only keywords that it needs."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        is_causal: bool,
        segments: Segments | None = None,
        bias: jax.Array | None = None,
        scale: float | None = None,
    ) -> jax.Array:
        """Maps queries [B, T, H, K], keys and values [B, S, G, K] to [B, T, H, K].

        H is a multiple of G. `segments`: int32 [B, T] and [B, S]; a query attends to keys of its
        own segment only. `bias`: [1 or B, H, T, S], added to the scores. `scale`: of the scores,
        K^-0.5 if absent.
        """


def recomputed(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Makes the backward pass of `fn` save only its arguments and recompute the rest.

    For elementwise operations between matmuls: by default jax saves every intermediate array, two
    thirds of all that a GPT block saves. `jax.checkpoint` would not help: inside another one, whose
    policy saves activations as a unit's does, it saves what that policy saves. Reverse mode only:
    jax refuses `jax.jvp` of it.
    """

    @jax.custom_vjp
    def run(*args: Any) -> jax.Array:
        return fn(*args)

    def forward(*args: Any) -> tuple[jax.Array, Any]:
        return fn(*args), args

    def backward(args: Any, cotangent: jax.Array) -> Any:
        # without the barrier XLA merges this with the forward pass and saves the result after all
        args = jax.lax.optimization_barrier(args)
        return jax.vjp(fn, *args)[1](cotangent)

    run.defvjp(forward, backward)
    return run


def dense_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool,
    segments: Segments | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> jax.Array:
    """Computes `jax.nn.dot_product_attention`, within segments if any; arguments: `Attention`."""
    mask: jax.Array | None = None
    if segments is not None:
        mask = _same_segment(*segments)
    options: dict[str, Any] = {"scale": scale, "implementation": implementation}
    out = _dot_product_attention(query, key, value, bias, mask, is_causal=is_causal, **options)
    # a kernel's output is saved by its own backward pass: under a name it would be saved twice
    if implementation == "cudnn":
        return out
    return checkpoint_name(out, "attention")


def _dot_product_attention(*arrays: jax.Array | None, **options: Any) -> jax.Array:
    """Computes `jax.nn.dot_product_attention(*arrays, **options)`, in float16 on any platform.

    jax has it in float16 on GPUs alone; elsewhere it is computed in float32. `arrays`: query, key,
    value, bias, mask.
    """

    def attend(*arrays: Any) -> jax.Array:
        return jax.nn.dot_product_attention(*arrays, **options)

    def attend_in_float32(*arrays: Any) -> jax.Array:
        return attend(*jax.tree.map(_floats_to_float32, arrays)).astype(jnp.float16)

    if arrays[0] is None or arrays[0].dtype != jnp.float16:
        return attend(*arrays)
    # the platform is known only when the program is compiled, so both ways are traced
    out: jax.Array = jax.lax.platform_dependent(
        *arrays, cuda=attend, rocm=attend, default=attend_in_float32
    )
    return out


def _floats_to_float32(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.float32)
    return x  # a mask


def _same_segment(query_segments: jax.Array, key_segments: jax.Array) -> jax.Array:
    """Computes the mask of attention within segments, bool [B, 1, T, S]."""
    return (query_segments[:, :, None] == key_segments[:, None])[:, None]


def blockwise_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool,
    segments: Segments | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Computes `dense_attention`, block by block of queries where there are more than two blocks.

    At T 2048 and H 32 the scores and weights [H, T, T] take 1.5 GiB per example; one block at a
    time, recomputed in the backward pass, a quarter of it (Rabe and Staats, 2021). Fused kernels
    take less still: see `attention.py`.
    """
    B, T, H, K = query.shape
    # short sequences have few scores, and others would leave a smaller block at the end
    if T <= 2 * QUERY_BLOCK or T % QUERY_BLOCK:
        more: dict[str, Any] = {"segments": segments, "bias": bias, "scale": scale}
        return dense_attention(query, key, value, is_causal=is_causal, **more)
    query_segments, key_segments = segments or (None, None)

    def attend(
        block: Any, key: jax.Array, value: jax.Array, key_segments: jax.Array | None
    ) -> jax.Array:
        """Computes one block's attention. `block`: first position, queries, segments, bias."""
        first, query, query_segments, bias = block
        S = key.shape[1]
        # `is_causal` of jax's function would count the positions of each block from 0
        mask = jnp.ones((QUERY_BLOCK, S), bool)
        if is_causal:
            mask = (first + jnp.arange(QUERY_BLOCK))[:, None] >= jnp.arange(S)[None]
        mask = mask[None, None]
        if key_segments is not None:
            mask &= _same_segment(query_segments, key_segments)
        return _dot_product_attention(query, key, value, bias, mask, scale=scale)

    def to_blocks(x: jax.Array | None, dim: int) -> jax.Array | None:
        """Splits `dim`, of size T, into a leading dim of blocks and QUERY_BLOCK in its place."""
        if x is None:
            return None
        shape = (*x.shape[:dim], T // QUERY_BLOCK, QUERY_BLOCK, *x.shape[dim + 1 :])
        return jnp.moveaxis(x.reshape(shape), dim, 0)

    # one block after another: `map` holds the scores of one, `recomputed` none for the backward
    starts = jnp.arange(0, T, QUERY_BLOCK)
    blocks = (starts, to_blocks(query, 1), to_blocks(query_segments, 1), to_blocks(bias, 2))
    out = jax.lax.map(lambda block: recomputed(attend)(block, key, value, key_segments), blocks)
    return checkpoint_name(jnp.moveaxis(out, 0, 1).reshape(B, T, H, K), "attention")


def split_qkv(qkv: jax.Array, head_dim: int) -> list[jax.Array]:
    """Splits one projection, [B, T, 3 H K], into queries, keys and values [B, T, H, K]."""
    parts = jnp.split(checkpoint_name(qkv, "qkv"), 3, axis=-1)
    return [split_heads(part, head_dim) for part in parts]


def split_heads(x_BTD: jax.Array, head_dim: int) -> jax.Array:
    """Reshapes [B, T, H K] to [B, T, H, K]."""
    return x_BTD.reshape(*x_BTD.shape[:2], -1, head_dim)


def segments_keyword(segments_BT: jax.Array | None) -> dict[str, Any]:
    """Returns {"segments": a pair} for the `Attention` of a self-attention; {} for None."""
    if segments_BT is None:
        return {}
    return {"segments": (segments_BT, segments_BT)}


def residual_std(config: BaseConfig) -> float:
    """Computes the standard deviation of the kernels that project to the residual stream.

    Each block adds to it twice; GPT-2 scales what it adds so that the sum stays of order one.
    """
    return INIT_STD / math.sqrt(2 * config.layers)


def linear(
    inputs: int,
    outputs: int,
    *,
    std: float = INIT_STD,
    bias: bool = True,
    dtype: str | None,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """Makes a Linear: kernel [inputs, outputs] from normal(0, std), bias zero or absent."""
    init = nnx.initializers.normal(std)
    return nnx.Linear(inputs, outputs, use_bias=bias, kernel_init=init, dtype=dtype, rngs=rngs)


class RecomputedNorm:
    """Mixin that makes the call of the flax norm after it among the bases `recomputed`."""

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Maps [..., D] to [..., D]."""
        # a function of arrays alone, as `custom_vjp` requires: the module is made again inside
        structure, params = nnx.split(self)

        def normalize(params: Any, x: jax.Array, mask: jax.Array | None) -> jax.Array:
            norm: Any = super(RecomputedNorm, nnx.merge(structure, params))
            out: jax.Array = norm.__call__(x, mask=mask)
            return out

        return recomputed(normalize)(params, x, mask)


class LayerNorm(RecomputedNorm, nnx.LayerNorm):
    """A `recomputed` LayerNorm."""


class RMSNorm(RecomputedNorm, nnx.RMSNorm):
    """A `recomputed` RMSNorm."""


def layer_norm(config: Any, *, rngs: nnx.Rngs) -> LayerNorm:
    """Makes a LayerNorm over D with scale and bias; its statistics are always float32."""
    return LayerNorm(config.width, epsilon=config.norm_epsilon, dtype=config.dtype, rngs=rngs)


def rms_norm(config: Any, *, rngs: nnx.Rngs) -> RMSNorm:
    """Makes an RMSNorm over D (arXiv:1910.07467); its statistics are always float32."""
    return RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=config.dtype, rngs=rngs)


gelu = recomputed(partial(jax.nn.gelu, approximate=True))  # the tanh approximation of gelu
exact_gelu = recomputed(partial(jax.nn.gelu, approximate=False))  # gelu by the error function
gated_gelu = recomputed(lambda gate, up: jax.nn.gelu(gate, approximate=True) * up)
gated_silu = recomputed(lambda gate, up: jax.nn.silu(gate) * up)


class Embedding(nnx.Embed):
    """A table [count, width] from normal(0, std); a `tied` one is also the output head.

    dtype None outputs the table's dtype.
    """

    def __init__(
        self,
        count: int,
        width: int,
        *,
        std: float = INIT_STD,
        tied: bool = False,
        dtype: str | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(count, width, embedding_init=nnx.initializers.normal(std), rngs=rngs)
        # nnx.Embed stores the dtype that its table is created with; after a cast of the table to
        # bfloat16 lookups would be promoted back to it.
        self.dtype = dtype
        self.tied = tied

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Maps int [B, T] to [B, T, D] in `dtype`, or else the table's."""
        # A tied table has two gradients. By default XLA reduces each separately, or gathers the
        # activations of one. With the lookup's gradient summed on each device, XLA adds the two
        # and reduces their sum. Beside an axis of tensor parallelism XLA shards the scatter of the
        # gradient along all axes, and sends it between them.
        if not (self.tied or traced_with_model_axes()):
            return super().__call__(inputs, out_sharding)
        return on_local_rows(_look_up, replicated=(1,))(inputs, self.table())

    def table(self) -> jax.Array:
        """Reads the table [V, D] in the dtype of a lookup."""
        table_VD: jax.Array = self.embedding[...]
        if self.dtype is None:
            return table_VD
        return table_VD.astype(self.dtype)

    def losses(self, x_BTD: jax.Array, targets_BT: jax.Array, **chunks: int) -> jax.Array:
        """Computes `chunked_losses` of the table as output head; `chunks`: vocab_size and chunk."""
        table_VD = self.embedding[...]
        return chunked_losses(x_BTD, table_VD, targets_BT, dim=0, dtype=self.dtype, **chunks)


def _look_up(tokens: jax.Array, table_VD: jax.Array) -> jax.Array:
    return jnp.take(table_VD, tokens, axis=0)


class Head(nnx.Linear):
    """The Linear from the residual stream to logits, without bias: kernel [width, vocab_size]."""

    def __init__(self, width: int, vocab_size: int, *, std: float = INIT_STD, **more: Any):
        init = nnx.initializers.normal(std)
        super().__init__(width, vocab_size, use_bias=False, kernel_init=init, **more)

    def losses(self, x_BTD: jax.Array, targets_BT: jax.Array, **chunks: int) -> jax.Array:
        """Computes `chunked_losses` of the kernel; `chunks`: vocab_size and chunk."""
        kernel_DV = self.kernel[...]
        return chunked_losses(x_BTD, kernel_DV, targets_BT, dim=1, dtype=self.dtype, **chunks)


class MultiHeadAttention(nnx.Module):
    """Base of attention with a Linear each to queries, keys and values, and one back to D.

    `std`: of the kernels of q, of k and v, and of o. K is D / H and G is H where not given.
    """

    def __init__(
        self,
        config: BaseConfig,
        *,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        bias: bool = True,
        std: tuple[float, float, float] = (INIT_STD, INIT_STD, INIT_STD),
        attention: Attention,
        rngs: nnx.Rngs,
    ):
        D = config.width
        self.head_dim = head_dim or D // config.heads
        self.attention = attention
        inner = config.heads * self.head_dim
        kv_width = (kv_heads or config.heads) * self.head_dim
        make = partial(linear, bias=bias, dtype=config.dtype, rngs=rngs)
        q_std, kv_std, o_std = std
        self.q = make(D, inner, std=q_std)
        self.k = make(D, kv_width, std=kv_std)
        self.v = make(D, kv_width, std=kv_std)
        self.o = make(inner, D, std=o_std)

    def project(self, x_BTD: jax.Array, source_BSD: jax.Array | None = None) -> list[jax.Array]:
        """Projects `x_BTD` to queries [B, T, H, K], and the source to keys and values [B, S, G, K].

        The source is `x_BTD` itself where there is no other.
        """
        if source_BSD is None:
            source_BSD = x_BTD
        return [
            split_heads(checkpoint_name(project(x), "qkv"), self.head_dim)
            for project, x in ((self.q, x_BTD), (self.k, source_BSD), (self.v, source_BSD))
        ]

    def project_out(self, attended: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """Projects what attention returned to the shape of its input, [B, T, D].

        `attended`: [B, T, H, K], or [n, B/n, T, H, K] where the batch is in n parts.
        """
        return checkpoint_name(self.o(attended.reshape(*x_BTD.shape[:2], -1)), "attention_out")


class MLP(nnx.Module):
    """Two Linears, D to F and back, with an activation between them; `std` of each one's kernel."""

    def __init__(
        self,
        config: BaseConfig,
        hidden: int,
        *,
        std: tuple[float, float] = (INIT_STD, INIT_STD),
        bias: bool = True,
        activation: Callable[[jax.Array], jax.Array] = gelu,
        rngs: nnx.Rngs,
    ):
        make = partial(linear, bias=bias, dtype=config.dtype, rngs=rngs)
        self.activation = activation
        self.up = make(config.width, hidden, std=std[0])
        self.down = make(hidden, config.width, std=std[1])

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]."""
        return self.down(self.activation(checkpoint_name(self.up(x_BTD), "mlp")))


class GatedMLP(nnx.Module):
    """down(activation(gate(x), up(x))), D to F and back, without biases (arXiv:2002.05202).

    `names`: of the Linears that are gate and up. `std`: of the kernels of both, and of down.
    """

    def __init__(
        self,
        config: BaseConfig,
        hidden: int,
        *,
        std: tuple[float, float],
        activation: Callable[[jax.Array, jax.Array], jax.Array],
        names: tuple[str, str] = ("gate", "up"),
        rngs: nnx.Rngs,
    ):
        make = partial(linear, bias=False, dtype=config.dtype, rngs=rngs)
        self.activation = activation
        self.names = names
        for name in names:
            setattr(self, name, make(config.width, hidden, std=std[0]))
        self.down = make(hidden, config.width, std=std[1])

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]."""
        gate, up = (checkpoint_name(getattr(self, name)(x_BTD), "mlp") for name in self.names)
        return self.down(self.activation(gate, up))


class ResidualDropout(nnx.Dropout):
    """Adds a branch, with dropout, to the residual stream."""

    def __init__(self, rate: float, *, rngs: nnx.Rngs):
        # at rate 0 it takes no random stream, so that the model has no random state
        super().__init__(rate, rngs=rngs if rate > 0 else None)

    def add(self, x: jax.Array, branch: jax.Array, deterministic: bool) -> jax.Array:
        """Adds dropout(branch) to x in the dtype of x, also where a float32 norm widens it."""
        return x + self(branch, deterministic=deterministic).astype(x.dtype)


class ResidualBlock(nnx.Module):
    """Base of the blocks with attention, then an MLP, each after a norm and added to the stream.

    `norm`, `attn` and `mlp` make the parts, (config, *, rngs) -> module.
    """

    def __init__(
        self, config: Any, norm: Any, attn: Any, mlp: Any, *, dropout: float = 0.0, rngs: nnx.Rngs
    ):
        self.attn_norm = norm(config, rngs=rngs)
        self.attn = attn(config, rngs=rngs)
        self.mlp_norm = norm(config, rngs=rngs)
        self.mlp = mlp(config, rngs=rngs)
        self.dropout = ResidualDropout(dropout, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, *, deterministic: bool = True, **settings: Any
    ) -> jax.Array:
        """Maps [B, T, D] to [B, T, D] in the dtype of the input; `settings` are those of `attn`."""
        attended = self.attn(self.attn_norm(x_BTD), **settings)
        x_BTD = self.dropout.add(x_BTD, attended, deterministic)
        return self.dropout.add(x_BTD, self.mlp(self.mlp_norm(x_BTD)), deterministic)


M = TypeVar("M", bound=nnx.Module)


def make_blocks(
    make: Callable[..., M], count: int, scan_layers: bool, rngs: nnx.Rngs
) -> "M | nnx.List[M]":
    """Makes `count` blocks for `run_blocks`, each by `make(rngs=...)` with its own random streams.

    With `scan_layers` the result is one module whose leaves have a leading dim L, else a list.
    """
    if not scan_layers:
        return nnx.List([make(rngs=rngs) for _ in range(count)])

    # each block draws from streams of its own: one stream for all would make them equal
    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make_all(rngs: nnx.Rngs) -> M:
        return make(rngs=rngs)

    return make_all(rngs)


def run_blocks(blocks: nnx.Module, x: jax.Array, **settings: Any) -> jax.Array:
    """Passes `x` through the blocks of `make_blocks` in order, each called with `settings` too.

    Blocks keep the shape and the dtype of `x`.
    """
    if isinstance(blocks, nnx.List):
        for block in blocks:
            x = block(x, **settings)
        return x

    # Layers change their state (dropout counters), never their structure. With graph updates off, a
    # model that is closed over can be called inside other transformations, such as the loop of a
    # sampler.
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, graph_updates=False)
    def run(block: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        return block(x, **settings)

    return run(blocks, x)


class LanguageModel(nnx.Module):
    """Base of the models with a vocabulary: the output head on top of `hidden_states`.

    Subclasses set `config` (with `tie_head` and `vocab_size`), `embed` and, unless the head is
    tied, `head`.
    """

    config: Any
    embed: Embedding
    head: Head

    @abstractmethod
    def hidden_states(self, *tokens: Any, **settings: Any) -> jax.Array:
        """Maps int32 tokens to the input of the head, [B, T, D]."""

    def __call__(self, *tokens: jax.Array, **settings: Any) -> jax.Array:
        """Maps the arguments of `hidden_states` to logits [B, T, V] in the compute dtype."""
        x_BTD = self.hidden_states(*tokens, **settings)
        logits = self.embed.attend(x_BTD) if self.config.tie_head else self.head(x_BTD)
        return logits[..., : self.config.vocab_size]  # without rows that pad the vocabulary

    def losses(self, *tokens: jax.Array, chunk: int, **settings: Any) -> jax.Array:
        """Computes the cross-entropy of each target, float32 [B, T], without all logits at once.

        `tokens` and `settings` are those of `hidden_states`, and the targets, int32 [B, T], last;
        `chunk`: see `chunked_losses`.
        """
        *inputs, targets_BT = tokens
        x_BTD = self.hidden_states(*inputs, **settings)
        head = self.embed if self.config.tie_head else self.head
        vocab_size = self.config.vocab_size
        return head.losses(x_BTD, targets_BT, vocab_size=vocab_size, chunk=chunk)


def check_length(tokens_BT: jax.Array, longest: int, name: str, what: str = "tokens") -> None:
    """Raises ValueError for more tokens, or `what`, than `longest`, the config's field `name`."""
    T = tokens_BT.shape[1]
    if longest < T:
        raise ValueError(f"expected at most {longest} {what} ({name}), got {T}")
