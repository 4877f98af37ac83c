"""LoRA: low-rank matrices beside frozen kernels, for any NNX model, scanned or not (Hu et al.,
arXiv:2106.09685).

    make_model = with_lora(lambda rngs: Llama(config, rngs=rngs), rank=8, alpha=16,
    targets=("attn/(q|v)$",)) sharded = fully_shard(make_model, optax.adamw(1e-4), mesh,
    units=[LlamaBlock], frozen=make_model.frozen)

Shapes: L layers stacked in front (none, one or more dims), I inputs, O outputs, R rank.

A matched `nnx.Linear` with kernel [L, I, O] gets `lora_a` [L, I, R] and `lora_b` [L, R, O], both
float32, and adds (scale * (x @ lora_a)) @ lora_b to what it computes, in its compute dtype; scale
is alpha / rank. lora_b starts at zero, so that the model starts by computing what it did; lora_a is
uniform in +-1/sqrt(I), as in the paper's code and in PEFT (the paper's text says Gaussian). Paths
and values of all other parameters, random streams, and the classes of all other modules stay what
they were.

[Note: small matrices stay whole] The rules shard what has at least `min_size` elements in a layer,
2^14 if not said otherwise; LoRA's matrices often have fewer (4096 x 8 are sharded, 512 x 8 are not)
and are then whole on every device, their gradients all-reduced. That is right: at such sizes a
gather in each layer costs more time than the bytes are worth.
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

from fsdp_jax.errors import ConfigError, did_you_mean, message
from fsdp_jax.tree import SEPARATOR, PyTree, flatten, unflatten

A, B, KERNEL = "lora_a", "lora_b", "kernel"
_OURS = r"(?:^|/)lora_[ab]$"


def frozen_but(trainable: Sequence[str] = ()) -> tuple[str, ...]:
    """`frozen` of `fully_shard`: every parameter but LoRA's and those whose path one of these
    patterns is found in.
    """
    return (f"^(?!.*(?:{'|'.join([_OURS, *(f'(?:{pattern})' for pattern in trainable)])}))",)


@dataclass(frozen=True)
class LoRA:
    """`make_model(rngs)` of a model with LoRA; what `with_lora` returns, checked there.

    Attributes:
        make_model: of the model without.
        rank: R.
        alpha: scale is alpha / rank.
        targets: patterns of paths of `nnx.Linear`s.
        trainable: patterns of paths of parameters that are trained beside LoRA's.

    """

    make_model: Callable[[nnx.Rngs], nnx.Module]
    rank: int
    alpha: float
    targets: tuple[str, ...]
    trainable: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """What `merge` wants: alpha / rank."""
        return self.alpha / self.rank

    @property
    def frozen(self) -> tuple[str, ...]:
        """For `fully_shard(..., frozen=)`."""
        return frozen_but(self.trainable)

    def __call__(self, rngs: nnx.Rngs) -> nnx.Module:
        """The model. Raises ConfigError where the patterns, or the rank, do not fit it."""
        model = self.make_model(rngs)
        if not isinstance(model, nnx.Module):
            raise ConfigError(
                message(
                    "not an NNX model", where="with_lora", expected="nnx.Module", got=type(model)
                )
            )
        modules = {
            SEPARATOR.join(map(str, path)): module for path, module in nnx.iter_modules(model)
        }
        chosen = _chosen(modules, self.targets)
        _check_trainable(model, self.trainable)
        key = _key(rngs)
        for path, linear in chosen.items():
            _check_linear(path, linear, modules, self.rank)
            _add(linear, self.rank, self.scale, jax.random.fold_in(key, zlib.crc32(path.encode())))
        return model


def with_lora(
    make_model: Callable[[nnx.Rngs], nnx.Module],
    *,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str],
    trainable: Sequence[str] = (),
) -> LoRA:
    """Another `make_model(rngs)`, whose matched `nnx.Linear`s carry `lora_a` and `lora_b` beside
    their `kernel`.

    Args:
        make_model: of any NNX model; its Linears may be stacked by `nnx.vmap`, in lists, or fused
            projections.
        rank: at least 1, and below inputs and outputs of every matched Linear: at the smaller of
            them the product can be any matrix, so that nothing is saved and training the kernel
            itself is cheaper. That is an error.
        alpha: scale is alpha / rank; absent, it is the rank and the scale 1.
        targets: patterns searched in the paths of modules (`blocks/attn/qkv`); each must match a
            Linear. One that is used in two places has the path that its parameters have.
        trainable: patterns searched in the paths of parameters (`blocks/attn_norm/scale`) that are
            to be trained too; the result's `frozen` leaves them out.

    Raises:
        ConfigError: an argument that cannot be. When the model is made (by `fully_shard`): a
            pattern that matches nothing; a Linear whose arithmetic is not known (a subclass with
            methods of its own, `LinearGeneral`, `Einsum`), whose kernel another module uses too, or
            that has LoRA already; a rank that is too large. What cannot be seen is a model that
            reads a Linear's `kernel` itself: it computes without LoRA.

    """
    if isinstance(make_model, type | nnx.Module | nn.Module) or not callable(make_model):
        fix = "a function that makes an NNX model, lambda rngs: Model(..., rngs=rngs)"
        what = "not a function that makes a model"
        raise ConfigError(message(what, where="with_lora", got=_kind(make_model), fix=fix))
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ConfigError(
            message("rank is a whole number, at least 1", where="with_lora", got=rank, fix="rank=8")
        )
    scaled = float(rank if alpha is None else alpha)
    if not 0 < scaled < math.inf:
        raise ConfigError(
            message(
                "alpha is above 0 and finite", where="with_lora", got=alpha, fix=f"alpha={rank}"
            )
        )
    for name, patterns in (("targets", targets), ("trainable", trainable)):
        if isinstance(patterns, str):  # its letters would each be a pattern
            raise ConfigError(
                message(
                    "not a sequence of patterns", where=name, got=patterns, fix=f"({patterns!r},)"
                )
            )
        for pattern in patterns:
            _check_pattern(pattern, name)
    if not targets:
        raise ConfigError(message("no targets", where="targets", fix='targets=("attn/",)'))
    return LoRA(make_model, rank, scaled, tuple(targets), tuple(trainable))


def _kind(thing: Any) -> type:
    return thing if isinstance(thing, type) else type(thing)


class AdaptedLinear(nnx.Linear):
    """What a matched Linear becomes; a subclass of the class that it had, if that is not
    `nnx.Linear` itself.
    """

    lora_a: nnx.LoRAParam[jax.Array]
    lora_b: nnx.LoRAParam[jax.Array]
    lora_scale: float

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """[..., I] to [..., O]: `nnx.Linear`'s, and the low-rank product in the dtype that it
        computes in.
        """
        out: jax.Array = super().__call__(inputs, out_sharding=out_sharding)
        bias = None if self.bias is None else self.bias[...]
        x, *_ = self.promote_dtype((inputs, self.kernel[...], bias), dtype=self.dtype)
        a, b = self.lora_a[...].astype(x.dtype), self.lora_b[...].astype(x.dtype)
        low = self.lora_scale * jnp.matmul(x, a, precision=self.precision)
        more = jnp.matmul(low, b, precision=self.precision, out_sharding=out_sharding)
        return out + more.astype(out.dtype)


@functools.cache
def _adapted(kind: Hashable) -> type:
    """One class for each, so that models made twice have the same structure."""
    assert isinstance(kind, type)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return (
        AdaptedLinear if kind is nnx.Linear else type(kind.__name__, (AdaptedLinear, kind), named)
    )


def _add(linear: Any, rank: int, scale: float, key: jax.Array) -> None:
    *stack, inputs, outputs = linear.kernel.shape
    bound = inputs**-0.5
    a = jax.random.uniform(key, (*stack, inputs, rank), jnp.float32, -bound, bound)
    # Past NNX's own check: a class is no state.
    object.__setattr__(linear, "__class__", _adapted(linear.__class__))
    linear.lora_a = nnx.LoRAParam(a)
    linear.lora_b = nnx.LoRAParam(jnp.zeros((*stack, rank, outputs), jnp.float32))
    linear.lora_scale = scale


def _key(rngs: nnx.Rngs) -> jax.Array:
    """Of LoRA's own. Nothing is drawn from the stream: a model that kept it goes on as it would
    have.
    """
    stream = rngs.params
    key: jax.Array = jax.random.fold_in(stream.key[...], zlib.crc32(b"lora"))
    return jax.random.fold_in(key, stream.count[...])


def _chosen(modules: Mapping[str, Any], targets: Sequence[str]) -> dict[str, Any]:
    """The Linears that the patterns match, known or not."""
    linears = {
        p: m
        for p, m in modules.items()
        if isinstance(m, nnx.Linear | nnx.LinearGeneral | nnx.Einsum)
    }
    for pattern in targets:
        if not any(re.search(pattern, path) for path in linears):
            names = {
                re.sub(r"(^|/)\d+(?=/|$)", r"\1\\d+", path) for path in linears
            }  # of a list's elements once
            ends = {
                name.split(SEPARATOR, at)[at]
                for name in names
                for at in range(name.count(SEPARATOR) + 1)
            } - {"\\d+"}
            what, fix = f"pattern '{pattern}' matches no Linear", did_you_mean(pattern, ends)
            raise ConfigError(message(what, where="targets", expected=_listed(names), fix=fix))
    return {
        path: m
        for path, m in linears.items()
        if any(re.search(pattern, path) for pattern in targets)
    }


def _listed(names: Iterable[str]) -> str:
    return "a part of " + ", ".join(sorted(names)) if names else "a model with Linears"


def _check_trainable(model: nnx.Module, trainable: Sequence[str]) -> None:
    paths = [
        SEPARATOR.join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))
    ]
    for pattern in trainable:
        if not any(re.search(pattern, path) for path in paths):
            what = f"pattern '{pattern}' matches no parameter"
            raise ConfigError(message(what, where="trainable", fix=did_you_mean(pattern, paths)))


def _check_pattern(pattern: str, where: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            message(f"not a regular expression: {error}", where=where, got=pattern)
        ) from None


def _check_linear(path: str, linear: Any, modules: Mapping[str, Any], rank: int) -> None:
    """Raises ConfigError where LoRA beside this kernel would not be what `merge` takes it for."""
    where = f"{path or 'the model'}, a {type(linear).__name__}"
    if hasattr(linear, A) or isinstance(linear, nnx.LoRALinear):
        raise ConfigError(
            message("it has LoRA already", where=where, fix="leave it out of targets")
        )
    own = _own_methods(type(linear)) if isinstance(linear, nnx.Linear) else ["arithmetic"]
    if own:
        expected, got = (
            "an nnx.Linear, or one that differs in its __init__ alone",
            f"{', '.join(own)} of its own",
        )
        fix = "leave it out of targets; it can be trained whole (trainable)"
        raise ConfigError(
            message("its arithmetic is not known", where=where, expected=expected, got=got, fix=fix)
        )
    others = [
        other
        for other, module in modules.items()
        if module is not linear and any(value is linear.kernel for value in vars(module).values())
    ]
    if others:
        fix = "leave it out of targets: merged, the other would change too"
        raise ConfigError(
            message("its kernel is another's too", where=where, got=", ".join(others), fix=fix)
        )
    inputs, outputs = linear.kernel.shape[-2:]
    if rank >= min(inputs, outputs):
        what, expected = (
            "the rank is as large as the kernel's",
            f"rank below {min(inputs, outputs)}",
        )
        fix = "a lower rank; or leave it out of targets, and train it whole (trainable)"
        raise ConfigError(message(what, where=where, expected=expected, got=rank, fix=fix))


def _own_methods(kind: type) -> list[str]:
    """Of a subclass of `nnx.Linear`, what may use its kernel without LoRA."""
    above = kind.__mro__[: kind.__mro__.index(nnx.Linear)]
    named = {
        name
        for each in above
        for name, value in vars(each).items()
        if callable(value) or hasattr(value, "fget")
    }
    return sorted(name for name in named if name == "__call__" or not name.startswith("_"))


def split_lora(params: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
    """(all but LoRA's, LoRA's alone) of a tree of parameters, or of what stands for them, such as
    targets of a load.
    """
    flat = flatten(params)
    ours = {path for path in flat if re.search(_OURS, path)}
    base, lora = (
        {p: x for p, x in flat.items() if (p in ours) == which} for which in (False, True)
    )
    return unflatten(base), unflatten(lora)


def merged_paths(paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """{path in the merged model: the paths that it is made from}: itself, or (kernel, lora_a,
    lora_b) for `merge`.

    Raises ConfigError where one of the three is missing. So an exporter reads and writes a tensor
    at a time:

        for path, parts in merged_paths(tensors).items():
            tensor = read(*parts) if len(parts) == 1 else merge(*map(read, parts), scale=scale)
    """
    known = dict.fromkeys(paths)
    ours: dict[str, set[str]] = {}
    for path in known:
        if re.search(_OURS, path):
            module, _, name = path.rpartition(SEPARATOR)
            ours.setdefault(module, set()).add(name)
    parts = {}
    for module, found in ours.items():
        three = tuple(f"{module}{SEPARATOR}{name}" if module else name for name in (KERNEL, A, B))
        missing = [path for path in three if path not in known]
        if missing:
            raise ConfigError(
                message(
                    "not all of LoRA's tensors are there",
                    where=module,
                    expected=", ".join(three),
                    got=f"{', '.join(sorted(found))} alone; missing: {', '.join(missing)}",
                )
            )
        parts[three[0]] = three
    return {path: parts.get(path, (path,)) for path in known if not re.search(_OURS, path)}


def merge(kernel: Any, lora_a: Any, lora_b: Any, *, scale: float) -> Any:
    """The kernel plus scale * lora_a @ lora_b, computed in float32 and rounded to the kernel's
    dtype once.

    Args:
        kernel: [L, I, O], NumPy or jax; the result is of its kind, and sharded as it is. In
            bfloat16 the result loses what is below 1/512 of an element: give it in float32 to keep
            that.
        lora_a: [L, I, R].
        lora_b: [L, R, O].
        scale: alpha / rank, as it was trained with: `with_lora(...).scale`.

    Raises:
        ConfigError: shapes that do not fit together.

    """
    shapes = [tuple(x.shape) for x in (kernel, lora_a, lora_b)]
    stack, (inputs, outputs), rank = shapes[0][:-2], shapes[0][-2:], shapes[1][-1:]
    if shapes[1:] != [(*stack, inputs, *rank), (*stack, *rank, outputs)]:
        expected = "kernel [..., I, O], lora_a [..., I, R], lora_b [..., R, O]"
        raise ConfigError(
            message("shapes that do not fit together", where="merge", expected=expected, got=shapes)
        )
    if isinstance(kernel, jax.Array):
        merged: jax.Array = jax.jit(_merge_one, out_shardings=_sharding(kernel))(
            kernel, lora_a, lora_b, scale
        )
        return merged
    kernel, lora_a, lora_b = (np.asarray(x) for x in (kernel, lora_a, lora_b))
    out = np.empty_like(kernel)
    for at in np.ndindex(stack):  # a layer at a time: float32 of a whole stack may not fit
        merged_IO = lora_a[at].astype(np.float32) @ lora_b[at].astype(np.float32)
        merged_IO *= np.float32(scale)
        merged_IO += kernel[at]
        out[at] = merged_IO
    return out


def _merge_one(kernel: jax.Array, lora_a: jax.Array, lora_b: jax.Array, scale: float) -> jax.Array:
    a, b = lora_a.astype(jnp.float32), lora_b.astype(jnp.float32)
    more = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return (kernel.astype(jnp.float32) + scale * more).astype(kernel.dtype)


def _sharding(kernel: jax.Array) -> Any:
    return None if isinstance(kernel, jax.core.Tracer) else kernel.sharding
