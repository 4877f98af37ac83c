"""Muon on sharded state: each matrix is orthogonalized whole, on one device.

`optax.contrib.muon` multiplies the sharded momentum by itself, five times over, so that XLA sends
it in each iteration. Here matrices of the same shape are stacked, and the stack is sharded along
its own dim for that time: an all-to-all makes whole matrices of the shards, the iterations send
nothing, and a second all-to-all makes shards of the result. The arithmetic is optax's.

[Note: where it applies] The train step says how the parameters are sharded (`spread_matrices`). A
matrix that is not sharded, one whose sharded dims do not divide, and any outside a train step, is
orthogonalized where it is, as by optax. So is state in host memory, which is updated in groups.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers, MuonState

from fsdp_jax.errors import ArgumentError
from fsdp_jax.sharding.mesh import Entry, axes_of, shards_of
from fsdp_jax.sharding.param_leaves import stacked_dims
from fsdp_jax.tree import PyTree, flatten, map_with_path

Numbers = PyTree | Callable[[PyTree], PyTree]
"""`MuonDimensionNumbers` for each matrix and None for other parameters, or a function to them."""
Orthogonalize = Callable[[jax.Array], jax.Array]

# Modules whose kernels are not hidden: any part of a path, such as `lm_head`, `token_embedding` and
# `Embed_0`, but not `MultiHeadAttention_0`; or the last one alone.
_NOT_HIDDEN = re.compile(
    r"(?:^|/)(?:\w*embed\w*|\w*vocab\w*|(?!multi)(?:\w+_)?heads?|positions?|patch(?:es)?|class)"
    r"(?:_\d+)?/|(?:^|/)(?:logits|output|decoder)(?:_\d+)?/kernel$",
    re.IGNORECASE,
)
# Kernels of Flax's attention: [features, heads, features of a head], and the other way round.
_TO_HEADS, _FROM_HEADS = ("query", "key", "value"), "out"
# (dims of a kernel, whether it makes heads, whether it joins heads) -> its rows and its columns.
_MATRIX_DIMS = {
    (2, False, False): ((0,), (1,)),
    (2, True, False): ((0,), (1,)),
    (2, False, True): ((0,), (1,)),
    (3, True, False): ((0,), (1, 2)),
    (3, False, True): ((0, 1), (2,)),
}
_STACK = MuonDimensionNumbers(1, 2)  # [matrices, reduction, output]


@dataclass(frozen=True)
class MatrixStack:
    """Matrices of one shape that are orthogonalized together, as a step sends them."""

    name: str
    count: int  # of matrices; some of zeros are added, for a whole number on each device
    shape: tuple[int, int]
    dtype: jnp.dtype
    shards: int
    axes: tuple[str, ...]  # of the mesh, that it is spread over

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """The shape of a device's part."""
        return (-(-self.count // self.shards), *self.shape)


@dataclass(frozen=True, eq=False)
class _Spread:
    """How the parameters of the step that is being traced are sharded."""

    mesh: Mesh
    axes: tuple[str, ...]  # that matrices may be spread over
    specs: Mapping[str, PartitionSpec]  # of the parameters' updates, by path
    # By the paths of the matrices: an update that is traced twice runs once.
    stacks: dict[tuple[str, ...], MatrixStack]


# jax traces what it has cached again where this changes, such as an update inside a `jit`.
_SPREAD = jax.make_user_context(None)


@contextmanager
def spread_matrices(
    mesh: Mesh, axes: tuple[str, ...], specs: Mapping[str, PartitionSpec]
) -> Iterator[dict[tuple[str, ...], MatrixStack]]:
    """Lets the optimizers of this module spread matrices over devices, while an update is traced.

    Yields the stacks that are made meanwhile, by the paths of their parameters.

    Args:
        mesh: that of the specs.
        axes: the mesh axes that state may be sharded along; each matrix is spread over those of
            its own spec.
        specs: of the parameters as the optimizer updates them, by path.
    """
    stacks: dict[tuple[str, ...], MatrixStack] = {}
    with _SPREAD(_Spread(mesh, axes, specs, stacks)):
        yield stacks


def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    consistent_rms: float | None = None,
    muon_weight_dimension_numbers: Numbers | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_weight_decay: float = 0.0,
    dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes `optax.contrib.muon`, whose iterations send nothing between devices.

    State and results are optax's, with its default coefficients and preconditioning; arguments are
    named as there, but for `dtype`.

    Args:
        learning_rate: of matrices; of the others too, unless `adam_learning_rate` is given.
        ns_steps: Newton-Schulz iterations.
        beta: decay of the momentum.
        eps: added to denominators.
        nesterov: Nesterov momentum, for Adam too.
        weight_decay: of matrices, times the learning rate.
        weight_decay_mask: as for `optax.add_decayed_weights`.
        consistent_rms: root mean square of an update, times the learning rate: 0.2 is Adam's, so
            that its learning rates may be kept (arXiv:2502.16982). Default: times
            sqrt(max(1, outputs / inputs)).
        muon_weight_dimension_numbers: which dims of a parameter are its matrices; None, and it is
            updated by AdamW. Default: `hidden_matrices`.
        adam_learning_rate: of the parameters that are no matrices.
        adam_b1: decay of Adam's first moment.
        adam_b2: decay of its second.
        adam_weight_decay: of the parameters that are no matrices.
        dtype: that matrices are sent and orthogonalized in, such as bfloat16, which halves the
            bytes. Default: the momentum's.
    """
    given = muon_weight_dimension_numbers
    if given is None:
        given = hidden_matrices

    def transformation(tree: PyTree) -> optax.GradientTransformationExtraArgs:
        """Makes the transformation of parameters like `tree`."""
        numbers = _numbers_by_path(given, tree)
        matrices = optax.chain(
            _scale_by_muon(
                numbers, ns_steps=ns_steps, beta=beta, eps=eps, nesterov=nesterov, dtype=dtype
            ),
            _scale_by_shape(numbers, consistent_rms),
            optax.add_decayed_weights(weight_decay, weight_decay_mask),
            optax.scale_by_learning_rate(learning_rate),
        )
        others = optax.adamw(
            learning_rate if adam_learning_rate is None else adam_learning_rate,
            adam_b1,
            adam_b2,
            eps,
            weight_decay=adam_weight_decay,
            nesterov=nesterov,
        )
        labels = map_with_path(lambda path, _: "muon" if path in numbers else "adam", tree)
        return optax.partition({"muon": matrices, "adam": others}, labels)

    def init(params: PyTree) -> PyTree:
        return transformation(params).init(params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Any:
        return transformation(updates).update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _scale_by_muon(
    numbers: Mapping[str, MuonDimensionNumbers],
    *,
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    nesterov: bool = True,
    dtype: Any = None,
) -> optax.GradientTransformation:
    """Makes `optax.contrib.scale_by_muon`, with whole matrices on each device.

    `numbers`: which dims of a parameter are its matrices, by path; of all parameters that it
    updates. Others: as for `muon`.
    """
    # Optax's own iterations, on the momentum of a stack: no momentum is added to it.
    inner = optax.contrib.scale_by_muon(
        ns_steps=ns_steps, beta=0.0, eps=eps, nesterov=False, weight_dimension_numbers=_STACK
    )

    def init(params: PyTree) -> MuonState:
        mu = jax.tree.map(jnp.zeros_like, params)
        return inner.init(params)._replace(mu=mu)

    def update(
        updates: PyTree, state: MuonState, params: PyTree = None
    ) -> tuple[PyTree, MuonState]:
        # The momentum, as in optax.
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        if nesterov:
            mu_hat = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
            g_hat = optax.tree.bias_correction(updates, beta, count)
            momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, mu_hat, g_hat)
        else:
            momentum = optax.tree.bias_correction(mu, beta, count)

        def orthogonalize(stack: jax.Array) -> jax.Array:
            """Orthogonalizes matrices [n, reduction, output]."""
            without_momentum = MuonState(
                jnp.zeros((), jnp.int32), jnp.zeros_like(stack), state.ns_coeffs
            )
            return inner.update(stack, without_momentum)[0]

        new = _orthogonalize_all(momentum, numbers, orthogonalize, dtype)
        return new, MuonState(count=count, mu=mu, ns_coeffs=state.ns_coeffs)

    return optax.GradientTransformation(init, update)


def hidden_matrices(params: PyTree) -> PyTree:
    """Finds the kernels of hidden layers: `MuonDimensionNumbers` for each, None for the others.

    They are the parameters named `kernel` with two dims, and those with three of Flax's attention
    (`query`, `key`, `value`, `out`), where the heads count as one dim with their features. A dim
    before these may stack layers for a scan. Those in a module named `*embed*`, `*vocab*`, `head`,
    `*_head`, `positions`, `patch` or `class`, or directly in `logits`, `output` or `decoder`, are
    not hidden. Other names: give `muon_weight_dimension_numbers`.
    """
    shapes = {path: tuple(leaf.shape) for path, leaf in flatten(params).items()}
    stacked = stacked_dims(shapes)

    def number(path: str, _: Any) -> MuonDimensionNumbers | None:
        layers = stacked.get(path, 0)
        _, module, name = f"//{path}".rsplit("/", 2)
        kind = len(shapes[path]) - layers, module in _TO_HEADS, module == _FROM_HEADS
        dims = _MATRIX_DIMS.get(kind)
        if name != "kernel" or dims is None or _NOT_HIDDEN.search(path):
            return None
        rows, columns = (tuple(layers + dim for dim in own) for own in dims)
        return MuonDimensionNumbers(rows, columns)

    return map_with_path(number, params)


def _numbers_by_path(given: Numbers, tree: PyTree) -> dict[str, MuonDimensionNumbers]:
    """Finds the numbers of each parameter that has some: {path: numbers}.

    Raises ValueError for numbers that are not optax's, and where no parameter has any.
    """
    numbers = given(tree) if callable(given) else given

    def is_number(leaf: Any) -> bool:
        return leaf is None or isinstance(leaf, MuonDimensionNumbers)

    def spread(number: Any, below: PyTree) -> PyTree:
        if not is_number(number):
            raise ArgumentError(
                "not the dims of a matrix",
                where="muon_weight_dimension_numbers",
                expected="optax.contrib.MuonDimensionNumbers, or None for AdamW",
                got=repr(number),
            )
        return jax.tree.map(lambda _: _Number(number), below)

    whole = jax.tree.map(spread, numbers, tree, is_leaf=is_number)
    boxes = flatten(whole, is_leaf=lambda leaf: isinstance(leaf, _Number))
    found = {path: box.number for path, box in boxes.items() if box.number is not None}
    if boxes and not found:
        raise ArgumentError(
            "no parameter is taken for a matrix, so that AdamW would update all of them",
            where="muon_weight_dimension_numbers",
            expected="by default kernels of Flax's layers, see optim.hidden_matrices",
            got=", ".join([*boxes][:3]),
            fix="a function from the parameters to optax.contrib.MuonDimensionNumbers or None each",
        )
    return found


@dataclass(frozen=True)
class _Number:
    """Holds numbers in a tree, in which None and a tuple would not be leaves."""

    number: MuonDimensionNumbers | None


def _scale_by_shape(
    numbers: Mapping[str, MuonDimensionNumbers], consistent_rms: float | None
) -> optax.GradientTransformation:
    """Makes optax's scaling of updates by the sizes of their matrices."""

    def scale(path: str, update: jax.Array) -> jax.Array:
        _, inputs, outputs = (_sizes(update.shape, dims) for dims in _dims(update, numbers[path]))
        factor = sqrt(max(1, outputs / inputs))
        if consistent_rms is not None:
            factor = sqrt(max(inputs, outputs)) * consistent_rms
        return factor * update

    return optax.stateless(lambda updates, _: map_with_path(scale, updates))


def _sizes(shape: Sequence[int], dims: Sequence[int]) -> int:
    return prod(shape[dim] for dim in dims)


def _dims(
    leaf: jax.Array, number: MuonDimensionNumbers
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Lists the dims of a parameter that number its matrices, their rows, and their columns.

    Raises ValueError where there are none of the last two, or a dim is both.
    """

    def positive(dims: int | Sequence[int]) -> tuple[int, ...]:
        several = (dims,) if isinstance(dims, int) else tuple(dims)
        return tuple(dim % leaf.ndim for dim in several)

    rows, columns = positive(number.reduction_axis), positive(number.output_axis)
    if not rows or not columns or set(rows) & set(columns):
        raise ArgumentError(
            "a matrix has dims of its own for rows and for columns",
            where="muon_weight_dimension_numbers",
            got=f"{number} for shape {leaf.shape}",
        )
    batch = tuple(dim for dim in range(leaf.ndim) if dim not in (*rows, *columns))
    return batch, rows, columns


class _Stackable(NamedTuple):
    """The matrices [n, rows, columns] of a parameter, and how they are sharded."""

    path: str
    stack: jax.Array
    spec: tuple[Entry, Entry] | None  # of rows and columns; None: orthogonalized where they are


def _orthogonalize_all(
    momentum: PyTree,
    numbers: Mapping[str, MuonDimensionNumbers],
    orthogonalize: Orthogonalize,
    dtype: Any,
) -> PyTree:
    """Orthogonalizes every matrix of a tree; those of equal shape and spec together, spread."""
    leaves = flatten(momentum)
    groups: dict[Any, list[_Stackable]] = {}
    done: dict[str, jax.Array] = {}
    for path, leaf in leaves.items():
        batch, rows, columns = _dims(leaf, numbers[path])
        sizes = [_sizes(leaf.shape, dims) for dims in (batch, rows, columns)]
        stack = leaf.transpose(*batch, *rows, *columns).reshape(sizes)
        spec = _matrix_spec(path, (batch, rows, columns), sizes)
        if dtype is not None:
            stack = stack.astype(dtype)
        if spec is None:
            done[path] = orthogonalize(stack)
        else:
            key = (*stack.shape[1:], stack.dtype, spec)
            groups.setdefault(key, []).append(_Stackable(path, stack, spec))
    for group in groups.values():
        done |= _orthogonalize_spread(group, orthogonalize)

    def unstacked(path: str, leaf: jax.Array) -> jax.Array:
        order = [dim for dims in _dims(leaf, numbers[path]) for dim in dims]
        whole = done[path].astype(leaf.dtype).reshape([leaf.shape[dim] for dim in order])
        return whole.transpose([order.index(dim) for dim in range(leaf.ndim)])

    return map_with_path(unstacked, momentum)


def _matrix_spec(
    path: str, dims: Sequence[Sequence[int]], sizes: Sequence[int]
) -> tuple[Entry, Entry] | None:
    """Finds the spec of a parameter's rows and columns; None where it is not to be spread.

    `dims`: those that number its matrices, their rows, and their columns; `sizes`: of each.
    """
    spread: _Spread | None = _SPREAD.value
    if spread is None or path not in spread.specs:
        return None
    spec = spread.specs[path]
    entries: list[Entry] = []
    for own, size in zip(dims, sizes, strict=True):
        first, *rest = [spec[dim] if dim < len(spec) else None for dim in own] or [None]
        # Of dims that are joined, the first alone may be sharded, and evenly.
        if any(rest) or size % shards_of(spread.mesh, first):
            return None
        entries.append(first)
    batch, row, column = entries
    is_sharded = any(axis in spread.axes for axis in (*axes_of(row), *axes_of(column)))
    return (row, column) if is_sharded and batch is None else None


def _orthogonalize_spread(
    group: Sequence[_Stackable], orthogonalize: Orthogonalize
) -> dict[str, jax.Array]:
    """Orthogonalizes matrices of one shape and spec, each on one device: {path: matrices}."""
    spread: _Spread | None = _SPREAD.value
    spec = group[0].spec
    assert spread is not None
    assert spec is not None
    mesh = spread.mesh
    # In the order of the spec, by which whole shards go from device to device.
    own = (*axes_of(spec[0]), *axes_of(spec[1]))
    axes = tuple(axis for axis in own if axis in spread.axes)
    counts = [each.stack.shape[0] for each in group]
    stack = _describe_stack(group, spread, axes)
    spread.stacks[tuple(each.path for each in group)] = stack
    scope = f"fsdp.update[{stack.name}]"
    # Stacked, and with zeros for a whole number on each device: the spec asks for an all-to-all.
    whole = NamedSharding(mesh, PartitionSpec(axes))
    sharded = NamedSharding(mesh, PartitionSpec(None, *spec))
    with jax.named_scope(scope):
        stacked = jnp.concatenate([each.stack for each in group])
        # As it came: XLA would send both of the arrays that the momentum is the sum of.
        stacked = lax.with_sharding_constraint(stacked, sharded)
        missing = -sum(counts) % stack.shards
        stacked = jnp.pad(stacked, ((0, missing), (0, 0), (0, 0)))
        stacked = lax.with_sharding_constraint(stacked, whole)
    new = jax.shard_map(
        orthogonalize,
        mesh=mesh,
        in_specs=whole.spec,
        out_specs=whole.spec,
        axis_names=set(axes),
        check_vma=False,
    )(stacked)
    # Back, sharded as they came.
    with jax.named_scope(scope):
        new = lax.with_sharding_constraint(new, whole)
        new = lax.with_sharding_constraint(new, sharded)
        ends = [sum(counts[: n + 1]) for n in range(len(counts))]
        parts = [new[end - count : end] for count, end in zip(counts, ends, strict=True)]
    return {each.path: part for each, part in zip(group, parts, strict=True)}


def _describe_stack(
    group: Sequence[_Stackable], spread: _Spread, axes: tuple[str, ...]
) -> MatrixStack:
    """Describes matrices that are spread over these axes; stacks that differ have other names."""
    count = sum(each.stack.shape[0] for each in group)
    _, rows, columns = group[0].stack.shape
    name = f"{count} matrices {rows}x{columns}"
    if count == 1:
        name = f"1 matrix {rows}x{columns}"
    paths = tuple(each.path for each in group)
    if any(each.name == name for own, each in spread.stacks.items() if own != paths):
        name += f" ({paths[0]})"
    in_order = tuple(axis for axis in spread.mesh.axis_names if axis in axes)
    shards = shards_of(spread.mesh, axes)
    return MatrixStack(name, count, (rows, columns), group[0].stack.dtype, shards, in_order)
