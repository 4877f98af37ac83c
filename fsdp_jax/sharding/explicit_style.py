"""Models that are written for Explicit mesh axes, JAX's sharding-in-types style.

Such a model says how its arrays are sharded by `jax.sharding.reshard(x, P("data"))` and
`jnp.einsum(..., out_sharding=P("data"))`. JAX takes these along Explicit axes only, and the mesh of
a step has Auto axes: along them XLA chooses how activations are sharded, and units gather and
reduce by `with_sharding_constraint`, which JAX takes along Auto axes only.

[Note: the model's view of the mesh] So the model sees another mesh of the same devices. Each axis
that it names in this style is there twice: under a name of ours, Auto and with its devices; and
under its own name, Explicit and of size one. Along an axis of one device `reshard` moves nothing,
every spec fits, and `axis_index`, `psum` and `mesh.shape` are those of one device: the model
computes on the global batch what one device computes, and XLA partitions it as any other model.
JAX leaves axes of size one out of the types of arrays here, so nothing that the model does is
refused for a sharding which gathered parameters do not have.

|  | the step's mesh | the model's view of it |
|---|---|---|
| axes | data (8, Auto) | data (1, Explicit), data_devices (8, Auto) |
| constraints of units | P("data") | P("data_devices"), see `constrain` |
| constraints of the model | P("data") | refused: reshard in their place |

Which axes a model names in this style is learned: JAX refuses the first one in a trace, which is
abandoned, and made again with that axis Explicit. A model that names none is traced on the step's
own mesh, and its `with_sharding_constraint`s hold.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import jax
from jax import lax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    reshard,
    use_abstract_mesh,
)

from fsdp_jax.compat import error_texts
from fsdp_jax.errors import ArgumentError, SlowerWarning, place_in_model
from fsdp_jax.sharding.mesh import MeshAxes, axes_of, entry_of
from fsdp_jax.tree import PyTree

T = TypeVar("T")
_DEVICES = "{}_devices"  # the axis of the model's view that has the devices of this axis


def trace_as_asked(
    axes: MeshAxes, trace: Callable[[MeshAxes], T], *, local_batch: bool = False
) -> T:
    """Calls `trace(axes)`, again while the model asks for another Explicit axis.

    `trace` runs the model in the view of the axes that it is given; `local_batch`: on each device's
    own rows. Raises ValueError for annotations that cannot be traced, with their place in the
    model.
    """
    while True:
        try:
            with refusals(axes, local_batch=local_batch), axes.ambient():
                return trace(axes)
        except ValueError as error:
            asked = () if local_batch else _axes_asked_for(error, axes)
            if not asked:
                raise
            _warn_of_model_axes(asked, axes, place_in_model(error))
        axes = replace(axes, explicit_axes=(*axes.explicit_axes, *asked))


def _axes_asked_for(error: Exception, axes: MeshAxes) -> tuple[str, ...]:
    """Finds the axes that must be Explicit for the model, by jax's error; none for others."""
    if error_texts.RESHARD_WITHOUT_MESH.found_in(error):
        # No ambient mesh is set, so the model has no constraints along Auto axes.
        return tuple(a for a in axes.shape if a not in (*axes.explicit_axes, *axes.model))
    found = error_texts.NOT_EXPLICIT.found_in(error)
    if found is None or found[1] not in axes.shape or found[1] in axes.explicit_axes:
        return ()
    return (found[1],)


def _warn_of_model_axes(asked: tuple[str, ...], axes: MeshAxes, where: str) -> None:
    """Warns of axes of the model's own, along which its activations are not sharded as it says.

    `where`: the place in the model that names the first one.
    """
    for axis in asked:
        if axis in axes.model and axes.mesh.shape[axis] > 1:
            warnings.warn(
                f"reshard and out_sharding along the model's own axis '{axis}' are not kept: XLA "
                "shards activations along it by the annotations of the parameters, which are; "
                f"with_sharding_constraint in their place is kept too ({where})",
                SlowerWarning,
                stacklevel=4,
            )


# The model's view of the mesh


@contextmanager
def model_view(axes: MeshAxes) -> Iterator[None]:
    """Sets the mesh that the model sees, if it has asked for Explicit axes; see the note."""
    if not axes.explicit_axes:
        yield
        return
    hidden = axes.named_by_user(axes.explicit_axes)
    sizes = dict.fromkeys(axes.explicit_axes, 1)
    for axis, size in axes.mesh.shape.items():
        sizes[_DEVICES.format(axis) if axis in hidden else axis] = size
    types = (AxisType.Explicit,) * len(axes.explicit_axes) + (AxisType.Auto,) * len(axes.mesh.shape)
    devices = axes.mesh.devices.reshape(tuple(sizes.values()))
    view = Mesh(devices, tuple(sizes), axis_types=types)
    with use_abstract_mesh(view.abstract_mesh), jax.remove_size_one_mesh_axis_from_type(True):
        yield


def in_model_view(axes: MeshAxes, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fn`, a function of trees of arrays, so that it is traced in the model's view."""
    if not axes.explicit_axes:
        return fn

    def run(*args: Any) -> Any:
        with model_view(axes):
            out = fn(*_cross(args, jax.sharding.get_abstract_mesh()))
        return _cross(out, axes.mesh.abstract_mesh)

    return run


def _cross(tree: PyTree, mesh: AbstractMesh) -> PyTree:
    """Puts this mesh into the types of arrays; nothing is moved."""
    unsharded = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: reshard(x, unsharded) if isinstance(x, jax.Array) else x, tree)


def constrain(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Constrains an array to a sharding of the step's mesh, also in the model's view of it."""
    return lax.with_sharding_constraint(x, as_seen(sharding))


def as_seen(sharding: NamedSharding) -> NamedSharding:
    """Converts a sharding of the step's mesh to the model's view, in a trace of the model.

    It is returned as it is where the two are the same.
    """
    view = jax.sharding.get_abstract_mesh()
    names = {axis: _DEVICES.format(axis) for axis in sharding.mesh.axis_names}
    names = {axis: name for axis, name in names.items() if name in view.axis_names}
    if not names:
        return sharding

    def seen(entry: Any) -> Any:
        """Replaces the names in one entry of the spec by those of the view."""
        if entry is PartitionSpec.UNCONSTRAINED:
            return entry
        return entry_of([names.get(axis, axis) for axis in axes_of(entry)])

    return NamedSharding(view, PartitionSpec(*map(seen, sharding.spec)))


# Refusals


@contextmanager
def refusals(axes: MeshAxes, *, local_batch: bool) -> Iterator[None]:
    """Raises ValueError, with the place in the model, for jax's errors about a model's operations.

    They are about annotations, and about side effects.
    """
    try:
        yield
    except Exception as error:
        refusal = _refusal(error, axes, local_batch=local_batch)
        if refusal is None:
            raise
        what, expected, fix = refusal
        raise ArgumentError(
            what,
            where=place_in_model(error) or "model",
            expected=expected,
            got=error_texts.first_line(error),
            fix=fix,
        ) from error


def _refusal(error: Exception, axes: MeshAxes, *, local_batch: bool) -> tuple[str, str, str] | None:
    """Explains jax's error: (the mistake, what was expected, fix); None for other errors."""
    # With local batches each device runs on its own rows: no annotation has a meaning there.
    named = error_texts.NOT_EXPLICIT.found_in(error)
    if local_batch and (named or error_texts.RESHARD_WITHOUT_MESH.found_in(error)):
        what = "the model names mesh axes by reshard or out_sharding, with local batches"
        expected = "no annotations along mesh axes: each device runs on its own rows"
        fix = "leave local_batch out (of a plan: analytic), or switch the model's annotations off"
        return what, expected, fix
    # Annotations in the wrong place or of the wrong style.
    if named and named[2] == "Manual":
        what = f"reshard or out_sharding along '{named[1]}' inside a shard_map over it"
        return what, "an array of one device there", "leave the annotation out"
    if error_texts.NOT_AUTO.found_in(error):
        what = "with_sharding_constraint along an Explicit axis"
        expected = "one style for an axis: reshard and out_sharding, or with_sharding_constraint"
        return what, expected, "jax.sharding.reshard(x, PartitionSpec(...)) in its place"
    # What neither a unit's checkpoint nor the mapped axis around a Linen model holds.
    is_array = isinstance(error, KeyError) and error_texts.LOST_VARIABLE.found_in(error)
    if is_array or error_texts.MAPPED_RESULT.found_in(error):
        what = "the model makes a mutable array (jax.new_ref)"
        expected = "arrays: a unit runs under jax.checkpoint, a Linen model under jax.vmap"
        return what, expected, "x.at[...].set(...) or jax.lax.scan in its place"
    if error_texts.EFFECTS.found_in(error):
        what = "a unit has a side effect, and jax.checkpoint, which a unit runs under, takes none"
        expected = "no io_callback in units; jax.debug.callback and jax.debug.print work there"
        return what, expected, "return the array, and call io_callback in the loss"
    # Names and meshes that are not those of the step.
    if error_texts.OTHER_MESH.found_in(error):
        what = "the model or the loss computes with an array or a NamedSharding of another mesh"
        expected = "PartitionSpecs alone; arrays that are made inside, or NumPy's"
        fix = "PartitionSpec(...) in place of NamedSharding(mesh, PartitionSpec(...)); "
        return what, expected, fix + "np.asarray(x) of a jax.Array that was made outside"
    if missing := error_texts.NO_AXIS.found_in(error):
        name = missing[1]
        what = f"the model names the mesh axis '{name}', which the mesh lacks"
        fix = "leave it out in the model's configuration, or make a mesh that has it too, "
        fix += f"{(*axes.shape, name)}, of size 1 if it shall not shard"
        return what, f"the mesh axes {tuple(axes.shape)}", fix
    # Last the widest: any operation may lack a sharding rule under Explicit axes.
    if axes.explicit_axes and error_texts.NOT_TYPED.found_in(error):
        what = "the model is written for Explicit axes, and jax has no rule for an operation there"
        expected = "operations that jax can type with a sharding"
        fix = "jax.sharding.auto_axes(f, out_sharding=PartitionSpec()) around the operation, or "
        return what, expected, fix + "switch the model's annotations off"
    return None
