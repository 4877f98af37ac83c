"""The calls of an optimizer: the tree that it is handed, and the arguments that its update takes.

A mask, a label or a rate by path is written for the tree that Flax shows. That is a dict as of
`sharded.abstract_state().params`, with integers for the layers of a list; an `nnx.State`, with
which `nnx.Optimizer` calls it; Linen's variables around the parameters; or a `FrozenDict` of these.
optax compares trees by their types too, so that an optimizer made for one raises for the others.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from flax.core import FrozenDict

from fsdp_jax.compat import error_texts
from fsdp_jax.errors import ArgumentError, ReadableError
from fsdp_jax.optim.params_ema import require_average_last
from fsdp_jax.tree import PyTree

_FORMS: tuple[Callable[[PyTree], PyTree], ...] = (
    lambda params: params,
    nnx.State,
    lambda params: {"params": params},
    FrozenDict,
    lambda params: FrozenDict({"params": params}),
)


def fit_optimizer(
    tx: optax.GradientTransformation, params: PyTree
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer that is called with nested dicts, like `params`, whatever `tx` expects.

    Its update passes on of its additional arguments what that of `tx` takes.

    Args:
        tx: any optax transformation.
        params: arrays or shapes of those that are trained, with a dtype and a shape.

    Raises:
        ValueError: `tx` can be initialized with no form of the parameters, or has `params_ema`
            before the end of a chain.

    """
    tx = optax.with_extra_args_support(tx)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    errors: list[Exception] = []
    for form in _FORMS:
        try:
            state = jax.eval_shape(lambda tree, form=form: tx.init(form(tree)), shapes)
        except Exception as error:
            errors.append(error)
        else:
            require_average_last(state)
            return _with_form(tx, form)
    # The first is of the form that the library documents.
    if isinstance(errors[0], ReadableError):
        raise errors[0]
    # The keys of nested dicts, of a few characters: {'blocks': {0: {'kernel': ...}}}.
    outline = str(jax.tree.map(lambda _: ..., params)).replace("Ellipsis", "...")
    if len(outline) > _OUTLINE:
        outline = f"{outline[:_OUTLINE]}…"
    raise ArgumentError(
        "the optimizer cannot be initialized with the model's parameters",
        where="tx",
        expected=(
            "masks and labels in the tree of sharded.abstract_state().params, without frozen "
            f"parameters: {outline}"
        ),
        got=f"{type(errors[0]).__name__}: {error_texts.first_line(errors[0])}",
        fix="functions of the parameters, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, "
        "params), get the tree itself",
    ) from errors[0]


def _with_form(
    tx: optax.GradientTransformationExtraArgs, form: Callable[[PyTree], PyTree]
) -> optax.GradientTransformationExtraArgs:
    """Makes the optimizer that calls `tx` with trees of this form."""

    def init(params: PyTree) -> PyTree:
        return tx.init(form(params))

    def update(
        gradients: PyTree, state: PyTree, params: PyTree = None, *, grad: PyTree, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        # `grad` is another tree of parameters; the others are numbers.
        extra["grad"] = form(grad)
        updates, new = _update(tx, form(gradients), state, form(params), extra)
        return jax.tree.unflatten(jax.tree.structure(gradients), jax.tree.leaves(updates)), new

    return optax.GradientTransformationExtraArgs(init, update)


def _update(
    tx: optax.GradientTransformationExtraArgs,
    gradients: PyTree,
    state: PyTree,
    params: PyTree,
    extra: dict[str, Any],
) -> tuple[PyTree, PyTree]:
    """Calls an update with those of the additional arguments that it takes, inner ones too.

    Raises ValueError for an optimizer that no step of this kind can call.
    """
    try:
        return tx.update(gradients, state, params, **extra)
    except (TypeError, ValueError) as error:
        # `optax.chain` passes all on, and its signature does not tell what is refused inside.
        refused = error_texts.UNEXPECTED_ARGUMENT.found_in(error)
        if refused and refused[1] in extra:
            taken = {name: value for name, value in extra.items() if name != refused[1]}
            return _update(tx, gradients, state, params, taken)
        if not error_texts.EVALUATES_AGAIN.found_in(error):
            raise
        raise ArgumentError(
            "the optimizer wants to evaluate the loss again",
            where="optimizer",
            fix=(
                "a variant that needs gradients alone: optax.lbfgs(..., linesearch=None), "
                "optax.contrib.sam(..., opaque_mode=False)"
            ),
        ) from error
    except AttributeError as error:
        if not error_texts.OF_PAIRS.found_in(error):
            raise
        raise ArgumentError(
            "the optimizer updates pairs of parameters, which a model has not",
            where="optimizer",
            got="optax.lookahead, of fast and slow parameters",
            fix="pass the optimizer that it wraps; optax.contrib.schedule_free averages parameters",
        ) from error


_OUTLINE = 300  # characters of an outline
