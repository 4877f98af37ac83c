"""Whether the new state stays finite, without a second copy of the state in memory.

[Note: computed twice] The new state is written only after all of it is known to be finite. XLA
would compute it once, for both, and keep it beside the old state meanwhile: 1.1 GiB more at the
peak of Llama 2 7B on 8 H100s. So an array whose update is element-wise is computed twice: XLA fuses
one computation with the check and the other with the write. XLA would merge the two as common
subexpressions, so each reads the scalars, such as bias corrections, from its own result of an
optimization barrier. Both are the same program otherwise, and XLA simplifies them alike, so what is
checked is what is written; as before, fused otherwise the last bit may differ. Constants pass no
barrier, since XLA folds them.

Left to XLA are updates that are not element-wise, such as Muon's, MultiSteps' and those with
Adafactor's factored moments; those with transcendental functions of arrays; those that read arrays
of different shardings, which XLA may gather; and arrays that no scalar tells apart, such as plain
SGD's and Adam's moments, which XLA computes once or twice as it likes.

Not seen on TPUs: a float32 or float16 that is made of a computed bfloat16 and is within 0.4% of the
largest of its dtype. XLA:TPU may round it, to infinity, in the write alone. What is saved is
checked again.

[Note: bits of small floats] XLA:GPU has no `is_finite` of bfloat16 and float8. It asks a wider
number, and takes the one from before the rounding: 3.4e38 is finite, and infinite as a bfloat16.
So those are checked by the bits that are written.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from fsdp_jax.program.equations import (
    constraint_of,
    equations_for,
    free_and_defined,
    inputs_of,
    reads,
    values_of,
    without_literals,
)
from fsdp_jax.program.evaluate import evaluate_unchanged
from fsdp_jax.program.primitives import BROADCAST, CONSTRAINT, IOTA, primitive_of
from fsdp_jax.sharding.layout import Leaf
from fsdp_jax.step.traced_update import Update, is_scalar, trace_without_calls
from fsdp_jax.tree import PyTree


def stays_finite(old: PyTree, new: PyTree) -> jax.Array:
    """Returns whether every number that was finite still is, bool [].

    What was not finite before may stay so: a mask of -inf, a best loss that starts at infinity.
    """
    spoiled = [
        _any_spoiled(before, after)
        for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        if _is_inexact(after)
    ]
    if not spoiled:
        return jnp.bool_(True)
    return ~jnp.any(lax.concatenate([lax.expand_dims(x, (0,)) for x in spoiled], 0))


def _any_spoiled(before: jax.Array, after: jax.Array) -> jax.Array:
    """Returns whether any number was finite and is not any more, bool [].

    By operations of lax: those of jax.numpy take several times as long to trace, for every array.
    """
    before, after = jnp.asarray(before), jnp.asarray(after)
    lost = lax.bitwise_and(_is_finite(before), lax.bitwise_not(_is_finite(after)))
    return lax.reduce_or(lost, range(lost.ndim))


def _is_finite(x: jax.Array) -> jax.Array:
    """Returns of each number whether it is finite, bool; see the note on small floats."""
    dtype = x.dtype
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 2:
        return lax.is_finite(x)
    if not _is_inexact(x) or dtype.itemsize > 2 or jnp.finfo(dtype).bits < 8:
        return jnp.isfinite(x)
    bits = lax.bitcast_convert_type(x, f"uint{8 * dtype.itemsize}")
    # All ones in the exponent; where there is no infinity, NaN.
    infinite = np.array(np.inf).astype(dtype).view(bits.dtype)
    if dtype.name.endswith("fnuz"):  # NaN takes the bits of -0
        return bits != infinite
    return (bits & infinite) != infinite


def checked_update(
    update: Update, state: PyTree, gradients: PyTree, scalars: PyTree, leaves: Sequence[Leaf]
) -> tuple[PyTree, jax.Array]:
    """Returns `update(state, gradients, scalars)`, and whether it stays finite, bool [].

    Args:
        update: a pure function.
        state: the parameters that are updated, and the optimizer's state.
        gradients: of these parameters.
        scalars: other inputs of the update, such as the loss.
        leaves: how each array of the state is sharded.

    """
    args = state, gradients, scalars
    closed, shapes = trace_without_calls(update, *args)
    jaxpr = closed.jaxpr
    env = dict(zip(inputs_of(jaxpr), [*closed.consts, *jax.tree.leaves(args)], strict=True))
    eqns = _element_wise_updates(jaxpr, leaves, len(jax.tree.leaves(gradients)))
    computed = {v for eqn in eqns for v in eqn.outvars}
    # Once: all other results, and what the element-wise updates read, such as bias corrections.
    read, _ = free_and_defined(eqns)
    others = [v for v in without_literals(jaxpr.outvars) if v not in computed]
    evaluate_unchanged(jaxpr, equations_for(jaxpr, [*read, *others], env.__contains__), env)
    # Twice: the element-wise updates. One jitted function, since each trace of them takes time.
    used = set(_scalars_of(jaxpr, eqns))
    arrays = [v for v in read if v not in used]
    numbers = [v for v in read if v in used]
    new = [v for v in without_literals(jaxpr.outvars) if v in computed]

    @jax.jit
    def update_element_wise(values: list[Any], numbers_again: list[Any]) -> list[Any]:
        again = dict(zip([*arrays, *numbers], [*values, *numbers_again], strict=True))
        evaluate_unchanged(jaxpr, eqns, again)
        return values_of(again, new)

    def evaluate(numbers_again: list[Any]) -> list[Any]:
        updated = update_element_wise(values_of(env, arrays), numbers_again)
        return values_of(env | dict(zip(new, updated, strict=True)), jaxpr.outvars)

    known = values_of(env, numbers)
    written, checked = map(evaluate, lax.optimization_barrier((known, known)))
    finite = stays_finite(jax.tree.leaves(state), checked)
    return jax.tree.unflatten(jax.tree.structure(shapes), written), finite


def _element_wise_updates(
    jaxpr: jex.Jaxpr, leaves: Sequence[Leaf], n_gradients: int
) -> list[jex.JaxprEqn]:
    """Returns the equations of arrays that compute the floats of element-wise updates, in order.

    Args:
        jaxpr: the update. Its inputs begin with the state and the gradients.
        leaves: how each array of the state is sharded. The first are those of the parameters.
        n_gradients: how many gradients there are.

    """
    updated = [leaf.update_sharding for leaf in leaves]  # how they are sharded as they are updated
    shardings = _local_shardings(jaxpr, [*updated, *updated[:n_gradients]])
    wanted = {
        v
        for v, sharding in zip(jaxpr.outvars, updated, strict=True)
        if not isinstance(v, jex.Literal) and shardings.get(v) == sharding and _is_inexact(v.aval)
    }
    return equations_for(jaxpr, wanted, is_scalar)


def _local_shardings(
    jaxpr: jex.Jaxpr, inputs: Sequence[NamedSharding]
) -> dict[Any, NamedSharding | None]:
    """Returns the shardings of arrays that are computed element by element from the inputs.

    All arrays that such an equation reads are sharded alike, so no device needs another's. Scalars
    may be computed in any way. None: an array of one number, which may be sharded in any way.

    Args:
        jaxpr: a program.
        inputs: how the first of its inputs are sharded.

    """
    shardings: dict[Any, NamedSharding | None] = {}
    shardings |= zip(jaxpr.invars, inputs, strict=False)
    for eqn in jaxpr.eqns:
        primitive = primitive_of(eqn)
        arrays = [v for v in reads(eqn) if not is_scalar(v)]
        if any(v not in shardings for v in arrays):
            continue
        found = {shardings[v] for v in arrays} - {None}
        if primitive is CONSTRAINT:
            found.add(constraint_of(eqn))
        # Transcendental functions are left to XLA, with what depends on them: they cost more than
        # reading their operands again, and how XLA approximates them may depend on what they are
        # fused with.
        is_element_wise = primitive.elementwise and not primitive.transcendental
        is_element_wise |= primitive is CONSTRAINT
        is_uniform = primitive in (BROADCAST, IOTA) and not arrays
        if len(found) <= 1 and (is_element_wise or is_uniform):
            shardings |= dict.fromkeys(eqn.outvars, next(iter(found), None))
    return shardings


def _scalars_of(jaxpr: jex.Jaxpr, eqns: Sequence[jex.JaxprEqn]) -> list[Any]:
    """Returns the scalars that some equations read and that depend on the program's inputs."""
    depends = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if not depends.isdisjoint(reads(eqn)):
            depends.update(eqn.outvars)
    return list({v: None for eqn in eqns for v in reads(eqn) if is_scalar(v) and v in depends})


def _is_inexact(x: Any) -> bool:
    """Returns whether an array, or what stands for one, is of floats; it may be a number, `0.0`."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
