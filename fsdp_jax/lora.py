"""LoRA: low-rank matrices beside frozen kernels, for any NNX model (Hu et al., arXiv:2106.09685).

In use::

    make_model = with_lora(
        lambda rngs: Llama(config, rngs=rngs), rank=8, alpha=16, targets=("attn/(q|v)$",)
    )
    sharded = fully_shard(
        make_model, optax.adamw(1e-4), mesh, units=[LlamaBlock], frozen=make_model.frozen
    )

Shapes: L layers stacked in front (none, one or more dims), I inputs, O outputs, R rank.

A matched `nnx.Linear` with kernel [L, I, O] gets `lora_a` [L, I, R] and `lora_b` [L, R, O], both
float32, and adds (scale * (x @ lora_a)) @ lora_b to its output, in its compute dtype; scale is
alpha / rank. lora_b starts at zero, so that the model starts with its own outputs; lora_a is
uniform in +-1/sqrt(I), as in the paper's code and in PEFT (the paper's text says Gaussian). Paths
and values of all other parameters, random streams, and the classes of all other modules stay the
same.

[Note: small matrices are replicated] The rules shard parameters with at least `min_size` elements
in a layer, 2^14 by default; LoRA's matrices often have fewer (4096 x 8 are sharded, 512 x 8 are
not) and are then replicated, their gradients all-reduced. That is right: at such sizes a gather in
each layer costs more time than the bytes are worth.
"""

import functools
import math
import re
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fsdp_jax.compat.flax_nnx import set_class
from fsdp_jax.errors import ConfigError, did_you_mean
from fsdp_jax.limits import Positive, check_fields
from fsdp_jax.sharding.padding import Padded, pad, stored_array, unpad
from fsdp_jax.sharding.patterns import check_regexes, matched, search, search_any
from fsdp_jax.sharding.quantized import BaseFormat, QuantizedBase, ScaleDtype
from fsdp_jax.tree import SEPARATOR, PyTree, flatten, nest_like, suffixes

A, B, KERNEL = "lora_a", "lora_b", "kernel"
_LORA_PATH = r"(?:^|/)lora_[ab]$"


def frozen_but(trainable: Sequence[str] = ()) -> tuple[str, ...]:
    """Makes `frozen` of `fully_shard`: all parameters but LoRA's and those of these patterns."""
    patterns = [_LORA_PATH, *(f"(?:{pattern})" for pattern in trainable)]
    return (f"^(?!.*(?:{'|'.join(patterns)}))",)


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters of frozen weights (arXiv:2106.09685).

    Raises:
        ConfigError: a rank or alpha out of range.

    """

    rank: Positive | None = None  # Rank of the adapters; default: no adapters.
    # The adapter's output is scaled by alpha / rank; default: alpha = rank.
    alpha: float | None = None
    # Regular expressions of the paths of adapted linear layers; default: those of attention.
    targets: tuple[str, ...] = ()
    # Regular expressions of other parameters that are trained as well.
    trainable: tuple[str, ...] = ()
    # Stores the frozen kernels of units as nf4, int4, int8 or float8 (QLoRA, arXiv:2305.14314).
    base: BaseFormat | None = None
    # Dtype of the scales of their blocks; uint8 quantizes them again.
    base_scales: ScaleDtype = "float32"
    # Folder in PEFT's format with the adapters to start from; rank, alpha and targets are its own.
    weights: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "lora", ConfigError)
        rank, alpha = self.rank, self.alpha
        if alpha is not None and not 0 < alpha < math.inf:
            raise ConfigError(
                "alpha is above 0 and finite", where="lora.alpha", got=alpha, fix=f"alpha={rank}"
            )
        if self.base is None and self.base_scales != "float32":
            raise ConfigError(
                "scales without a quantized base",
                where="lora.base_scales",
                got=self.base_scales,
                fix="set lora.base, nf4 for example, or leave lora.base_scales out",
            )
        others = alpha, self.targets, self.trainable, self.base
        if rank is None and self.weights is None and others != (None, (), (), None):
            raise ConfigError(
                "adapters without a rank",
                where="lora",
                got=self,
                fix="set lora.rank or lora.weights, or leave the others out",
            )

    @property
    def quantized(self) -> QuantizedBase | None:
        """The argument `base` of `fully_shard`."""
        return None if self.base is None else QuantizedBase(self.base, scales=self.base_scales)

    @property
    def scale(self) -> float | None:
        """The argument of `merge`: alpha / rank; None without adapters."""
        if self.rank is None:
            return None
        return 1.0 if self.alpha is None else self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class LoRA(Adapters):
    """`make_model(rngs)` of a model with LoRA, as `with_lora` checks and returns it."""

    make_model: Callable[[nnx.Rngs], nnx.Module]

    @property
    def frozen(self) -> tuple[str, ...]:
        """The argument of `fully_shard(..., frozen=)`."""
        return frozen_but(self.trainable)

    def __call__(self, rngs: nnx.Rngs) -> nnx.Module:
        """Makes the model. Raises ConfigError where the patterns, or the rank, do not fit it."""
        model = self.make_model(rngs)
        if not isinstance(model, nnx.Module):
            raise ConfigError(
                "not an NNX model", where="with_lora", expected="nnx.Module", got=type(model)
            )
        # Find the targets; patterns that match nothing are errors.
        modules = {
            SEPARATOR.join(map(str, path)): module for path, module in nnx.iter_modules(model)
        }
        assert self.rank is not None, "`with_lora` was given one"
        assert self.scale is not None
        targets = _matched_linears(modules, self.targets)
        matched(self.trainable, flatten(nnx.state(model, nnx.Param)), "trainable")
        # Draw each A from the path of its Linear: other targets do not change it.
        stream = rngs.params  # the model's own: nothing is drawn from it
        key = jax.random.fold_in(stream.key[...], zlib.crc32(b"lora"))
        key = jax.random.fold_in(key, stream.count[...])
        for path, linear in targets.items():
            _check_linear(path, linear, modules, self.rank)
            path_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
            _add_lora(linear, self.rank, self.scale, path_key)
        return model


def with_lora(
    make_model: Callable[[nnx.Rngs], nnx.Module],
    *,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str],
    trainable: Sequence[str] = (),
) -> LoRA:
    """Wraps `make_model(rngs)`, so that matched `nnx.Linear`s carry `lora_a` and `lora_b`.

    Args:
        make_model: of any NNX model; its Linears may be stacked by `nnx.vmap`, in lists, or fused
            projections.
        rank: at least 1, and below inputs and outputs of every matched Linear: at the smaller of
            them the product can be any matrix, so that nothing is saved and training the kernel
            itself is cheaper. That is an error.
        alpha: scale is alpha / rank; by default the rank, for a scale of 1.
        targets: patterns searched in the paths of modules (`blocks/attn/qkv`); each must match a
            Linear. One that is used in two places has the path that its parameters have.
        trainable: patterns searched in the paths of parameters (`blocks/attn_norm/scale`) that are
            to be trained too; the result's `frozen` leaves them out.

    Raises:
        ConfigError: an argument out of range. When the model is made (by `fully_shard`): a pattern
            that matches nothing; a Linear whose arithmetic is not known (a subclass with methods of
            its own, `LinearGeneral`, `Einsum`), whose kernel another module uses too, or that has
            LoRA already; a rank that is too large. Undetected is a model that reads a Linear's
            `kernel` itself: it computes without LoRA.
    """
    if isinstance(make_model, type | nnx.Module | nn.Module) or not callable(make_model):
        raise ConfigError(
            "not a function that makes a model",
            where="with_lora",
            got=make_model if isinstance(make_model, type) else type(make_model),
            fix="a function that makes an NNX model, lambda rngs: Model(..., rngs=rngs)",
        )
    check_regexes(targets, "targets")
    check_regexes(trainable, "trainable")
    if not targets:
        raise ConfigError("no targets", where="targets", fix='targets=("attn/",)')
    return LoRA(
        make_model=make_model,
        rank=rank,
        alpha=alpha,
        targets=tuple(targets),
        trainable=tuple(trainable),
    )


class AdaptedLinear(nnx.Linear):
    """A Linear with LoRA; of a subclass of `nnx.Linear`, also a subclass of that class."""

    lora_a: nnx.LoRAParam[jax.Array]
    lora_b: nnx.LoRAParam[jax.Array]
    lora_scale: float

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Computes `nnx.Linear`'s [..., I] -> [..., O] plus the low-rank product in its dtype."""
        out: jax.Array = super().__call__(inputs, out_sharding=out_sharding)
        bias = None if self.bias is None else self.bias[...]
        x, *_ = self.promote_dtype((inputs, self.kernel[...], bias), dtype=self.dtype)
        a = self.lora_a[...].astype(x.dtype)
        b = self.lora_b[...].astype(x.dtype)
        low_rank = self.lora_scale * jnp.matmul(x, a, precision=self.precision)
        update = jnp.matmul(low_rank, b, precision=self.precision, out_sharding=out_sharding)
        return out + update.astype(out.dtype)


@functools.cache
def _adapted_class(kind: Hashable) -> type:
    """Makes AdaptedLinear, or for a subclass of `nnx.Linear` a subclass of both; one for each."""
    assert isinstance(kind, type)
    if kind is nnx.Linear:
        return AdaptedLinear
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (AdaptedLinear, kind), names)


def _add_lora(linear: Any, rank: int, scale: float, key: jax.Array) -> None:
    """Makes a Linear an AdaptedLinear in place, with A [..., I, R] and B [..., R, O], float32.

    `key`: A is drawn from it; B is zero.
    """
    *layers, inputs, outputs = linear.kernel.shape
    bound = inputs**-0.5
    a = jax.random.uniform(key, (*layers, inputs, rank), jnp.float32, -bound, bound)
    kind: Any = type(linear)
    set_class(linear, _adapted_class(kind))
    b = jnp.zeros((*layers, rank, outputs), jnp.float32)
    linear.lora_a, linear.lora_b = _stacked_params(a, b, dims=len(layers))
    linear.lora_scale = scale


def _stacked_params(*arrays: jax.Array, dims: int) -> Any:
    """Makes parameters whose leading `dims` dims stack layers.

    They are made inside `nnx.vmap`, as the layers were: that is what tells `fully_shard` the dims.
    """

    def make(*arrays: jax.Array) -> tuple[nnx.LoRAParam, ...]:
        return tuple(map(nnx.LoRAParam, arrays))

    for _ in range(dims):
        make = nnx.vmap(make)
    return make(*arrays)


def _matched_linears(modules: Mapping[str, Any], patterns: Sequence[str]) -> dict[str, Any]:
    """Finds the Linears that the patterns match, whether LoRA supports them or not: by path.

    `modules`: of the model, by path. Raises ConfigError for a pattern that matches none.
    """
    kinds = nnx.Linear | nnx.LinearGeneral | nnx.Einsum
    linears = {path: module for path, module in modules.items() if isinstance(module, kinds)}
    for pattern in patterns:
        if not any(search(pattern, path) for path in linears):
            what = f"pattern '{pattern}' matches no Linear"
            # List the elements of a list once, and propose the ends of paths too.
            names = {re.sub(r"(^|/)\d+(?=/|$)", r"\1\\d+", path) for path in linears}
            ends = {end for name in names for end in suffixes(name)} - {"\\d+"}
            listed = ", ".join(sorted(names))
            expected = f"a part of {listed}" if names else "a model with Linears"
            fix = did_you_mean(pattern, ends)
            raise ConfigError(what, where="targets", expected=expected, fix=fix)
    return {p: m for p, m in linears.items() if search_any(patterns, p)}


def _check_linear(path: str, linear: Any, modules: Mapping[str, Any], rank: int) -> None:
    """Raises ConfigError for a Linear whose output `merge` could not reproduce."""
    what, expected, got, fix = "", "", "", "leave it out of targets"
    # A subclass with methods of its own may use the kernel in another way; so may another module
    # that shares the kernel.
    own = _overridden_methods(type(linear)) if isinstance(linear, nnx.Linear) else ["arithmetic"]
    sharing = [
        other
        for other, module in modules.items()
        if module is not linear and any(value is linear.kernel for value in vars(module).values())
    ]
    # The first reason that holds, with a fix of its own.
    limit = min(linear.kernel.shape[-2:])
    if hasattr(linear, A) or isinstance(linear, nnx.LoRALinear):
        what = "it has LoRA already"
    elif own:
        what = "its arithmetic is not known"
        expected = "an nnx.Linear, or one that differs in its __init__ alone"
        got = f"{', '.join(own)} of its own"
        fix += "; it can be trained whole (trainable)"
    elif sharing:
        what = "its kernel is another's too"
        got = ", ".join(sharing)
        fix += ": merged, the other would change too"
    elif rank >= limit:
        what = "the rank is as large as the kernel's"
        expected = f"rank below {limit}"
        got = str(rank)
        fix = "a lower rank; or leave it out of targets, and train it whole (trainable)"
    if what:
        raise ConfigError(
            what,
            where=f"{path or 'the model'}, a {type(linear).__name__}",
            expected=expected,
            got=got,
            fix=fix,
        )


def _overridden_methods(kind: type) -> list[str]:
    """Lists the methods and properties that a subclass of `nnx.Linear` defines itself.

    `__call__`, and those without an underscore: any of them may use the kernel without LoRA.
    """
    names = {
        name
        for base in kind.__mro__[: kind.__mro__.index(nnx.Linear)]
        for name, value in vars(base).items()
        if callable(value) or hasattr(value, "fget")
    }
    return sorted(name for name in names if name == "__call__" or not name.startswith("_"))


def split_lora(params: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits into (parameters of the model itself, LoRA's), two nested dicts.

    `params`: a tree of parameters, or of targets of a load.
    """
    flat = flatten(params)
    lora = {path: leaf for path, leaf in flat.items() if re.search(_LORA_PATH, path)}
    base = {path: leaf for path, leaf in flat.items() if path not in lora}
    return nest_like(params, base), nest_like(params, lora)


def join_lora(base: Mapping[str, Any], lora: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the two nested dicts of `split_lora`, or others with their paths."""
    joined = dict(base)
    for key, value in lora.items():
        both_nest = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        joined[key] = join_lora(base[key], value) if both_nest else value
    return joined


def merged_paths(paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Maps each path in the merged model to the paths that it is made from.

    These are the path itself, or (kernel, lora_a, lora_b) for `merge`. So an exporter reads and
    writes a tensor at a time:

        for path, parts in merged_paths(tensors).items():
            tensor = read(*parts) if len(parts) == 1 else merge(*map(read, parts), scale=scale)

    Raises ConfigError where one of the three is missing.
    """
    known = dict.fromkeys(paths)
    lora = {path for path in known if re.search(_LORA_PATH, path)}
    parts: dict[str, tuple[str, ...]] = {path: (path,) for path in known if path not in lora}
    for module in sorted({path.rpartition(SEPARATOR)[0] for path in lora}):
        three = tuple(SEPARATOR.join(filter(None, (module, name))) for name in (KERNEL, A, B))
        missing = [path for path in three if path not in known]
        if missing:
            names = [name for name, path in zip((A, B), three[1:], strict=True) if path in known]
            raise ConfigError(
                "not all of LoRA's tensors are there",
                where=module,
                expected=", ".join(three),
                got=f"{', '.join(names)} alone; missing: {', '.join(missing)}",
            )
        parts[three[0]] = three
    return parts


def merge(kernel: Any, lora_a: Any, lora_b: Any, *, scale: float) -> Any:
    """Computes kernel + scale * lora_a @ lora_b, in float32, rounded once to the kernel's dtype.

    Args:
        kernel: [L, I, O], NumPy, jax, or a `Padded` one of `sharded.to_checkpoint(state).params`;
            the result is of its kind, and sharded as it is. In bfloat16 the result loses what is
            below 1/512 of an element: pass it in float32 to avoid that.
        lora_a: [L, I, R].
        lora_b: [L, R, O].
        scale: alpha / rank, as it was trained with: `with_lora(...).scale`.

    Raises ConfigError for shapes that do not fit together, and for a quantized kernel.
    """
    if not jnp.issubdtype(kernel.dtype, jnp.floating):
        raise ConfigError(
            "codes, and no kernel in floating point",
            where="merge",
            got=f"{kernel.dtype} {getattr(kernel, 'stored_as', '')}",
            fix="weights.from_arrays(params, scale=scale), which dequantizes and merges a tensor "
            "at a time; or a kernel of sharded.model(state)",
        )
    shapes = [tuple(x.shape) for x in (kernel, lora_a, lora_b)]
    *layers, inputs, outputs = shapes[0]
    rank = shapes[1][-1:]
    if shapes[1:] != [(*layers, inputs, *rank), (*layers, *rank, outputs)]:
        raise ConfigError(
            "shapes that do not fit together",
            where="merge",
            expected="kernel [..., I, O], lora_a [..., I, R], lora_b [..., R, O]",
            got=shapes,
        )
    # On the devices: jitted, sharded as the kernel is.
    if isinstance(kernel, jax.Array | Padded):
        arrays = [stored_array(x) for x in (kernel, lora_a, lora_b)]
        sharding = None if isinstance(kernel, jax.core.Tracer) else arrays[0].sharding
        run = jax.jit(_merge_jax, static_argnums=4, out_shardings=sharding)
        merged = run(*arrays, scale, tuple(shapes))
        return Padded(merged, shapes[0]) if isinstance(kernel, Padded) else merged
    # On the host: a layer at a time.
    kernel, lora_a, lora_b = (np.asarray(x) for x in (kernel, lora_a, lora_b))
    out = np.empty_like(kernel)
    for layer in np.ndindex(*layers):  # float32 of a whole stack may not fit
        merged_IO = lora_a[layer].astype(np.float32) @ lora_b[layer].astype(np.float32)
        merged_IO *= np.float32(scale)
        merged_IO += kernel[layer]
        out[layer] = merged_IO
    return out


def _merge_jax(
    kernel: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    scale: float,
    shapes: Sequence[tuple[int, ...]],
) -> jax.Array:
    """Computes `merge` of jax arrays whose `shapes` fit, padded if the kernel is."""
    own, a, b = map(unpad, (kernel, lora_a, lora_b), shapes)
    update = jnp.matmul(
        a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    merged = (own.astype(jnp.float32) + scale * update).astype(kernel.dtype)
    return pad(merged, kernel.shape)
