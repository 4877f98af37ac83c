"""The interface of loss functions: a sum, a count, metrics of the user's own, and a key.

[Note: metrics] Sums add up over microbatches, devices and batches, and means do not. So a loss
returns sums, and the step divides them once, at the end:

| `metrics[name]` of the loss | reported by the step |
|---|---|
| `value` | the sum of the values, over the count of the loss |
| `(value, count)` | the sum of the values, over the sum of these counts; NaN where that is zero |
| `(value, None)` | the sum of the values |

A value is a number, or an array whose elements are summed one by one. Rows are of one microbatch
and one device, so a first dim of their number is refused: other rows would be added to these. A
nested dict is named by its paths: `{"moe": {"dropped": x}}` is reported as `moe/dropped`.
"""

import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fsdp_jax.compat import error_texts
from fsdp_jax.errors import ArgumentError
from fsdp_jax.tree import SEPARATOR, array_text

Metrics = dict[str, tuple[jax.Array, jax.Array | None]]
"""name -> (sum, the count that it is divided by or None), float32 or wider"""

OWN = ("loss", "grad_norm", "count", "skipped", "skipped_in_a_row")
"""The step's own metrics."""

RESERVED = (*OWN, "loss_scale", "loss_z_score")
"""These, and the metrics that only some steps have."""

KEY_NOTE = (
    "loss_fn is called as loss_fn(model, batch, key): its third argument is a random key. A batch "
    "of several arrays is one argument: `def loss_fn(model, batch): x, y = batch`"
)
EXPECTED = "(sum, count) or (sum, count, metrics)"


class LossSums(NamedTuple):
    """The results of a loss for a microbatch, or their sums over several."""

    total: jax.Array
    counted: jax.Array  # what the total is divided by
    metrics: Metrics


def as_loss(loss_fn: Callable[..., Any], *, trains: bool = True) -> Callable[..., LossSums]:
    """Wraps the user's loss to check its result.

    All are float32, or the dtype of the sum where that is wider: float64, under `jax_enable_x64`.
    `trains`: it is differentiated, so that its sum is no integer.
    """

    def loss(model: Any, batch: Any, /, *key: jax.Array, **others: Any) -> Any:
        try:
            out = loss_fn(model, batch, *key, **others)
        except Exception as error:
            if key and error_texts.OF_ARRAYS.found_in(error):
                _refuse_key_as_model(loss_fn, error)
            # taken for `loss_fn(model, x, y)`, as other trainers call it
            if key and isinstance(batch, tuple | list):
                error.add_note(KEY_NOTE)
            raise
        leaves = jax.tree.leaves(batch)
        sums = _checked_result(out, jnp.shape(leaves[0])[:1] if leaves else ())
        if trains and not jnp.issubdtype(jnp.result_type(out[0]), jnp.floating):
            raise ArgumentError(
                "the loss is a sum of integers, which has no gradient",
                where="loss_fn",
                expected="a sum of floats that the parameters change",
                got=_type_of(out),
                fix=(
                    "a loss, such as optax's cross-entropy; numbers of hits are metrics: return "
                    'losses.sum(), losses.size, {"accuracy": hits.sum()}'
                ),
            )
        return sums

    return loss


def _refuse_key_as_model(loss_fn: Callable[..., Any], error: Exception) -> None:
    """Raises ValueError, from an error of the loss, if it has no name of a key for its key."""
    name = [*inspect.signature(loss_fn).parameters][2]
    if any(part in name for part in ("key", "rng", "seed")):
        return
    raise ArgumentError(
        f"the loss takes its third argument, '{name}', for something else than a random key",
        where="loss_fn",
        expected="another model by its name, or labels in the batch: the third argument is a key",
        got=error_texts.first_line(error),
        fix=(
            f"others={{'{name}': sharded_{name}}} beside the loss, and at each call "
            f"step(state, batch, {name}={name}_state); or {{'x': x, '{name}': {name}}} as the batch"
        ),
    ) from error


def takes_key(loss_fn: Callable[..., Any], others: Collection[str] = ()) -> bool:
    """Tells whether a loss has a third required positional parameter, for a random key.

    Warns of a third parameter with the name of a key and a default. `others`: names of other
    models, which it has parameters for.

    Raises:
        ValueError: not a function, or one that cannot be called as `loss_fn(model, batch)` or
            `loss_fn(model, batch, key)`, with other models by their names.

    """
    expected = "loss_fn(model, batch) or loss_fn(model, batch, key)"
    if others:
        models = ", ".join(f"{name}={name}" for name in others)
        expected = f"loss_fn(model, batch, {models}) or loss_fn(model, batch, key, {models})"
    if not callable(loss_fn):
        raise ArgumentError("not a function", where="loss_fn", expected=expected, got=loss_fn)
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # of a function that is not written in Python
        return False
    in_order = [*signature.parameters]
    if others:
        signature = _without_others(signature, others, expected)
    # The signature must accept two or three positional arguments, and require no others.
    parameters = signature.parameters.values()
    kinds = [parameter.kind for parameter in parameters]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    by_name = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    too_few = len(positional) < 2 and inspect.Parameter.VAR_POSITIONAL not in kinds
    if too_few or by_name or len(required) > 3:
        raise ArgumentError(
            "the loss takes other arguments",
            where="loss_fn",
            expected=expected,
            got=f"loss_fn{signature}",
            fix="bind the others with functools.partial, or put them into the batch",
        )
    if len(required) == 3 and required[2].name != in_order[2]:
        raise ArgumentError(
            "a random key comes after another model, and keys are passed by position",
            where="loss_fn",
            expected=expected,
            got=f"loss_fn({', '.join(in_order)})",
            fix="the key third, before other models, which are passed by their names",
        )
    # A key with a default is likely a mistake: the step passes none.
    third = positional[2:3]
    if len(required) < 3 and any(p.name in {"key", "rng", "rngs"} for p in third):
        what = f"loss_fn{signature} gets no random key: its third parameter has a default"
        warnings.warn(f"{what}; leave the default out to get one", stacklevel=2)
    return len(required) == 3


def _without_others(
    signature: inspect.Signature, others: Collection[str], expected: str
) -> inspect.Signature:
    """Takes the parameters for other models out of the signature of a loss.

    Raises ValueError if it has none for one of them, or one of the first two.
    """
    parameters = signature.parameters
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in others:
        missing = name not in parameters and not takes_any
        is_first = name in [*parameters][:2]
        if missing or is_first or (name in parameters and parameters[name].kind not in by_name):
            raise ArgumentError(
                "the loss has no parameter for another model",
                where="loss_fn",
                expected=expected,
                got=f"loss_fn{signature}",
                fix=f"def loss_fn(model, batch, {name}); others are passed by their names",
            )
    rest = [parameter for name, parameter in parameters.items() if name not in others]
    return signature.replace(parameters=rest)


def averaged(metrics: Metrics) -> dict[str, jax.Array]:
    """Divides sums by their counts: {name: metric} as a step reports it; see the note."""
    return {
        name: total if count is None else total / count for name, (total, count) in metrics.items()
    }


def _checked_result(out: Any, rows: tuple[int, ...]) -> LossSums:
    """Converts a loss's result to the dtypes of `as_loss`.

    `rows`: the first dim of the batch, if it has one. Raises ValueError for any other result.
    """
    if isinstance(out, tuple) and len(out) in (2, 3) and all(map(_is_scalar, out[:2])):
        _check_count(out[1])
        total = _widened(out[0])
        count = _widened(out[1], total.dtype)
        metrics = _checked_metrics(out[2], count, rows) if len(out) == 3 else {}
        return LossSums(total, count, metrics)
    what = "loss_fn returned something else"
    fix = "return the summed loss and the number of tokens (or examples) in it; "
    fix += "the step divides, over all microbatches"
    if any(map(_is_key, jax.tree.leaves(out))):
        what = "loss_fn returned a random key"
        fix = "the third argument of a loss is a key, to draw from with jax.random; weights and "
        fix += "labels belong in the batch, {'x': x, 'weight': weight}"
    elif _is_scalar(out):
        what = "loss_fn returned a number alone"
        fix = "return losses.sum(), losses.size; or mean * n, n for the mean over n examples"
    elif isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Mapping):
        what = "loss_fn returned metrics and no count"
        fix = 'return losses.sum(), losses.size, {"accuracy": hits.sum()}; or, for means over n '
        fix += 'examples, mean * n, n, {"accuracy": (accuracy * n, n)}'
    raise ArgumentError(what, where="loss_fn", expected=EXPECTED, got=_type_of(out), fix=fix)


def _check_count(count: Any) -> None:
    """Raises ValueError for a count that counts nothing: a bool, or a known negative number.

    A traced one that is negative makes the loss NaN, so that its step is skipped.
    """
    is_bool = jnp.issubdtype(jnp.result_type(count), jnp.bool_)
    if is_bool or (not isinstance(count, jax.core.Tracer) and count < 0):
        raise ArgumentError(
            "the count of the loss is no number of examples",
            where="loss_fn",
            expected="how many tokens or examples are in the sum, 0 or more",
            got=_type_of(count) if is_bool else count,
            fix="return losses.sum(), losses.size; or with a mask, mask.sum()",
        )


def _checked_metrics(tree: Any, count: jax.Array, rows: tuple[int, ...]) -> Metrics:
    """Checks the user's metrics, and returns each by name as a pair (sum, count or None).

    `tree`: what the loss returned for them; `count`, `rows`: of the loss. Raises ValueError for
    anything but a dict of sums.
    """
    if not isinstance(tree, Mapping):
        raise ArgumentError(
            "the metrics of the loss are not a dict",
            where="loss_fn",
            expected="a dict",
            got=_type_of(tree),
            fix='return losses.sum(), losses.size, {"accuracy": hits.sum()}',
        )
    metrics: Metrics = {}
    for name, value in _flat_metrics(tree):
        # Names are unique.
        if name in RESERVED or name in metrics:
            of_step = name in RESERVED
            raise ArgumentError(
                f"two metrics are called '{name}'",
                where="loss_fn",
                got="one of the step's own metrics" if of_step else "another one of the loss",
                fix=f"another name, such as 'my_{name}'",
            )
        # A sum and its divisor: the count of the loss, a count of its own, or none.
        where = f"metrics['{name}'] of loss_fn"
        total, own = value if isinstance(value, tuple) and len(value) == 2 else (value, count)
        fits = _is_number(total) and (own is None or _is_number(own))
        if not fits or (own is not None and jnp.shape(own) not in ((), jnp.shape(total))):
            raise ArgumentError(
                "a metric is not a number",
                where=where,
                expected="a sum, (sum, count) or (sum, None), of numbers or arrays of one shape",
                got=_type_of(value),
                fix="add it up: hits.sum(), or (hits.sum(), hits.size) for a mean of its own",
            )
        shape = jnp.shape(total)
        # Of one row, [1, ...] is what the fix makes of another array.
        if shape[:1] == rows != () and (rows != (1,) or len(shape) == 1):
            raise ArgumentError(
                f"a metric has {rows[0]} values, as many as the microbatch has rows",
                where=where,
                expected="a sum over the rows: microbatches and devices are added up",
                got=_type_of(total),
                fix=(
                    "add it up, x.sum(0); or if its values are of something else, such as the bins "
                    "of a histogram, put a dim before them, x[None]"
                ),
            )
        total = _widened(total, count.dtype)
        metrics[name] = total, None if own is None else _widened(own, total.dtype)
    return metrics


def _flat_metrics(tree: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (slash-joined path, leaf) of nested mappings; anything else is a leaf."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}{SEPARATOR}{path}", leaf) for path, leaf in _flat_metrics(value))
        else:
            yield str(name), value


def _is_number(x: Any) -> bool:
    if not isinstance(x, jax.Array | np.ndarray | np.generic | int | float):
        return False
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    return any(jnp.issubdtype(jnp.result_type(x), kind) for kind in kinds)


def _is_scalar(x: Any) -> bool:
    return _is_number(x) and jnp.ndim(x) == 0


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _widened(x: Any, least: Any = jnp.float32) -> jax.Array:
    """Converts a number or an array to a float array, of its own dtype or of `least` if wider."""
    return jnp.asarray(x, jnp.promote_types(getattr(x, "dtype", least), least))


def _type_of(out: Any) -> str:
    """Describes the type of each part of a loss's result: `(float32[8], dict)`."""
    if isinstance(out, tuple):
        return f"({', '.join(map(_type_of, out))})"
    if _is_key(out):
        return "a random key"
    if isinstance(out, jax.Array | np.ndarray):
        return array_text(out)
    return type(out).__name__
