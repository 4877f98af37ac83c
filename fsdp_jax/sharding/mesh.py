"""Device meshes: axes that shard state, axes that may replicate it, and the model's own axes.

`make_mesh` makes two, `data` and `replica`; for the user's own mesh, arguments say which of its
axes these are. The batch is sharded along both. The sharding factor of PyTorch FSDP is the size of
`data`.

[Note: the mesh axes that `data` is split into] XLA:TPU has a true reduce-scatter only along one
physical dim of the torus: along several at once it all-reduces, which sends twice the bytes. Also,
a dim that is not divisible by the number of all devices may be divisible by the number of hosts,
and another dim by the number of devices of a host. So inside the library `data` may be several mesh
axes, `data_0`, `data_1`, ..., one per physical dim in the order of the devices. `split_data` makes
them; in rules and reports the user sees only `data`.
"""

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import combinations, count
from math import prod
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

from fsdp_jax.compat import error_texts
from fsdp_jax.compat.jax_devices import slice_index, torus_coordinates
from fsdp_jax.errors import ArgumentError, did_you_mean, join_fixes

REPLICA = "replica"
DATA = "data"
AXES = (REPLICA, DATA)  # of `make_mesh`, in order
FSDP = "fsdp"  # in rules, the axes that the strategy shards along
Entry = str | tuple[str, ...] | None  # of a PartitionSpec


def make_mesh(
    data: int = -1,
    replica: int = 1,
    *,
    devices: Sequence[jax.Device] | None = None,
    allow_fewer: bool = False,
    hosts: Mapping[int, int] | None = None,
) -> Mesh:
    """Makes a mesh of `replica` x `data` devices with Auto axes, `data` on the fast links.

    Args:
        data: size of the axis that state is sharded along; -1 for what `replica` leaves.
        replica: size of the axis that hybrid strategies replicate state along; -1 for what `data`
            leaves.
        devices: all of the run's devices by default; compile-only devices are welcome.
        allow_fewer: permit a mesh that leaves devices idle.
        hosts: {process: number of its host}, where hosts have several processes; by default each
            process is a host.

    Raises ValueError for sizes that do not fit the devices, and for more devices than there are.

    Example:
        >>> dict(fsdp.make_mesh(replica=2).shape)  # of 8 devices
        {'replica': 2, 'data': 4}
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = _resolve_sizes(replica, data, len(devices), allow_fewer)
    return _auto_mesh(_arrange_devices(devices[: prod(shape)], shape, hosts), AXES)


def count_hosts(devices: Sequence[jax.Device], hosts: Mapping[int, int] | None = None) -> int:
    """Counts the hosts of devices; on several TPU slices, the slices, which have fast links inside.

    `hosts`: as in `make_mesh`.
    """
    slices = {slice_index(device) for device in devices}
    if len(slices) > 1:
        return len(slices)
    processes = {device.process_index for device in devices}
    return len({_host_of(process, hosts) for process in processes})


def _host_of(process: int, hosts: Mapping[int, int] | None) -> int:
    """Finds the number of the host of a process: its own number where `hosts` is None."""
    if hosts is None:
        return process
    if process not in hosts:
        raise ArgumentError(
            f"no host of process {process}",
            where="hosts",
            got=dict(hosts),
            fix="{process: number of its host}, for all processes",
        )
    return hosts[process]


def _resolve_sizes(replica: int, data: int, available: int, allow_fewer: bool) -> tuple[int, int]:
    """Checks the sizes against the devices, and fills in the -1: (replica, data)."""
    # Sizes are integers, of Python or NumPy.
    try:
        sizes = [operator.index(replica), operator.index(data)]
    except TypeError as error:
        raise ArgumentError(
            "mesh sizes are whole numbers",
            where="mesh",
            got=f"replica={replica!r}, data={data!r}",
            fix="make_mesh(data=8), or make_mesh(data=4, replica=2)",
        ) from error
    # Raise the first mistake that applies; every message has the sizes and the number of devices.
    what = expected = fix = ""
    if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        what = "mesh sizes are positive, and at most one is -1"
        fix = "data=-1 takes all devices that the other axis leaves"
    elif -1 in sizes:
        known = max(sizes)
        sizes[sizes.index(-1)] = available // known
        if available % known:
            what = "the number of devices is not divisible by the mesh"
            divisors = [n for n in range(1, available + 1) if available % n == 0]
            fix = f"use a divisor, one of {divisors}"
    elif prod(sizes) > available:
        what = "the mesh has more devices than there are"
        expected = f"{prod(sizes)} devices"
        fix = "ask for fewer; or, before jax starts, fsdp_jax.launch.use_virtual_devices(n) "
        fix += "(train.devices in a config)"
    elif prod(sizes) < available and not allow_fewer:
        what = "the mesh would leave devices idle"
        expected = f"{available} devices"
        fix = "set one size to -1, which takes all devices; "
        fix += "make_mesh(allow_fewer=True) leaves devices idle on purpose"
    if what:
        raise ArgumentError(
            what,
            where="mesh",
            expected=expected,
            got=f"replica={replica}, data={data} on {available} devices",
            fix=fix,
        )
    return sizes[0], sizes[1]


def _arrange_devices(
    devices: list[jax.Device], shape: tuple[int, int], hosts: Mapping[int, int] | None = None
) -> np.ndarray:
    """Arranges devices in an array [replica, data] of this shape, `data` on the fastest links.

    Neighbors along `data` share a slice first, then a host.

    On a TPU each of the two axes runs through whole dims of the torus where the sizes allow it,
    `data` through the last of them. Where they do not, or devices are left out of the torus, the
    order is by slice, host, process and id.
    """

    def place(device: jax.Device) -> tuple[int, ...]:
        process = device.process_index
        return slice_index(device), _host_of(process, hosts), process, device.id

    devices = sorted(devices, key=place)
    if devices[0].platform == "tpu":
        dims = _torus_dims([torus_coordinates(device) for device in devices], shape[1])
        if dims is not None:
            others = [dim for dim in range(len(torus_coordinates(devices[0]))) if dim not in dims]
            devices.sort(key=lambda d: [torus_coordinates(d)[dim] for dim in (*others, *dims)])
    return np.array(devices).reshape(shape)


def _torus_dims(coordinates: Sequence[tuple[int, ...]], size: int) -> tuple[int, ...] | None:
    """Finds the dims of a TPU's torus that the axis `data`, of this size, runs through.

    These are the last dims whose sizes multiply to it; None if there are none, or if devices are
    missing. `coordinates`: of all devices.
    """
    sizes = [len(set(values)) for values in zip(*coordinates, strict=True)]
    if prod(sizes) != len(coordinates):  # a box with holes
        return None
    dims = [dim for dim, length in enumerate(sizes) if length > 1]
    subsets = [subset for count in range(len(dims) + 1) for subset in combinations(dims, count)]
    fitting = (subset for subset in subsets if prod(sizes[dim] for dim in subset) == size)
    return max(fitting, default=None)


@dataclass(frozen=True)
class MeshAxes:
    """A mesh, and what each of its axes is for.

    The batch is sharded along `data` and `replica`. See the note on the axes that `data` is split
    into.
    """

    mesh: Mesh  # with Auto axes
    data: tuple[str, ...] = (DATA,)  # axes that state is sharded along
    replica: tuple[str, ...] = ()  # axes that hybrid strategies replicate state along
    unsplit: str = ""  # the axis that `data` was before it was split; empty if it was not
    explicit_axes: tuple[str, ...] = ()  # that the model names so; see `explicit_style`

    @property
    def batch(self) -> tuple[str, ...]:
        """The mesh axes that shard the batch, in the mesh's order."""
        return tuple(axis for axis in self.mesh.axis_names if axis in (*self.data, *self.replica))

    @property
    def model(self) -> tuple[str, ...]:
        """The model's own mesh axes, such as one of tensor parallelism."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.batch)

    @property
    def batch_shards(self) -> int:
        """The number of shards of the batch."""
        return shards_of(self.mesh, self.batch)

    @property
    def model_shards(self) -> int:
        """The number of devices along the model's own axes."""
        return shards_of(self.mesh, self.model)

    @property
    def user_data(self) -> tuple[str, ...]:
        """The data axes under the user's names."""
        return (self.unsplit,) if self.unsplit else self.data

    @property
    def shape(self) -> dict[str, int]:
        """{axis: size} under the user's names."""
        names = dict.fromkeys(map(self._name_of_axis, self.mesh.axis_names))
        return {name: shards_of(self.mesh, self.named_by_user([name])) for name in names}

    def _name_of_axis(self, axis: str) -> str:
        """Finds the user's name of a mesh axis: `data` for the axes that `data` is split into."""
        return self.unsplit if self.unsplit and axis in self.data else axis

    def user_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Converts a spec to the user's names: `data` for all its parts, `data_1` for one part."""
        entries = []
        for axes in map(axes_of, spec):
            is_whole = set(self.data) <= set(axes)
            entries.append(dict.fromkeys(map(self._name_of_axis, axes)) if is_whole else axes)
        return PartitionSpec(*(entry_of(tuple(entry)) for entry in entries))

    def user_name(self, axes: Iterable[str]) -> str:
        """Formats mesh axes as one text with the user's names: `replica+data`."""
        return "+".join(dict.fromkeys(map(self._name_of_axis, axes)))

    def named_by_user(self, names: Collection[str]) -> tuple[str, ...]:
        """Lists the mesh axes that the user's names stand for, in the mesh's order."""
        return tuple(axis for axis in self.mesh.axis_names if self._name_of_axis(axis) in names)

    def model_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Drops the batch axes from a spec: a gathered array has only the model's own axes."""
        model = self.model
        return spec_of(entry_of([a for a in axes_of(entry) if a in model]) for entry in spec)

    def batch_spec_axes(self, spec: PartitionSpec) -> tuple[str, ...]:
        """Selects the axes of a spec that an array is gathered along, dim by dim."""
        batch = self.batch
        return tuple(axis for axis in spec_axes(spec) if axis in batch)

    @contextmanager
    def ambient(self) -> Iterator[None]:
        """Sets the ambient mesh under which the model is created and traced.

        A bare PartitionSpec in the model needs one. It is this mesh if the user has set one, or if
        the model has its own axes. A spec in the model without a mesh, or for an axis that was
        split, is a ValueError, and so is `jax.disable_jit()`.
        """
        is_set = self.model or not jax.sharding.get_abstract_mesh().empty
        _check_jit_is_enabled()
        _check_ambient_mesh(self)
        try:
            with use_abstract_mesh(self.mesh.abstract_mesh) if is_set else nullcontext():
                yield
        # Errors of jax, with the call of jax.set_mesh that avoids them.
        except RuntimeError as error:
            if not error_texts.CONSTRAINT_WITHOUT_MESH.found_in(error):
                raise
            raise ArgumentError(
                "the model constrains arrays by names of mesh axes, and no mesh is set",
                where="model",
                fix="call jax.set_mesh(mesh) before fully_shard",
            ) from error
        except ValueError as error:
            missing = error_texts.NO_AXIS.found_in(error)
            if not self.unsplit or missing is None or missing[1] != self.unsplit:
                raise
            raise ArgumentError(
                f"the model names the mesh axis '{self.unsplit}', which was split by hosts",
                where="model",
                fix="call jax.set_mesh(mesh) before fully_shard: the axis then stays one",
            ) from error


def _ambient_mesh() -> Mesh | None:
    """Finds the mesh that the user has set by `jax.set_mesh`; None without one, or in a trace."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # inside a trace
        return None
    return None if mesh.empty else mesh


def _check_jit_is_enabled() -> None:
    """Raises ValueError under `jax.disable_jit()`: a step over several devices is one program."""
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise ArgumentError(
            "jax.disable_jit() is set, and a sharded step exists only as a compiled program",
            where="jax",
            fix=(
                "leave it out: breakpoint() in the model works while the step is traced, and "
                "jax.debug.print shows values; or run the plain model under it, on one device"
            ),
        )


def _check_ambient_mesh(axes: MeshAxes) -> None:
    """Raises ValueError if the ambient mesh has the same devices but other axes."""
    ambient = _ambient_mesh()
    if ambient is None or set(ambient.devices.flat) != set(axes.mesh.devices.flat):
        return
    if dict(ambient.shape) not in (axes.shape, dict(axes.mesh.shape)):
        raise ArgumentError(
            "another mesh is set than the model is sharded over",
            where="mesh",
            expected=axes.shape,
            got=dict(ambient.shape),
            fix="call jax.set_mesh with the mesh that fully_shard got",
        )


def as_ambient(results: Any) -> Any:
    """Moves replicated results to the user's ambient mesh, if it has Explicit axes.

    Under such a mesh jax computes only with arrays whose type names that mesh.
    """
    mesh = _ambient_mesh()
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return results
    return jax.device_put(results, replicated(mesh))


def _auto_mesh(devices: np.ndarray, names: Sequence[str]) -> Mesh:
    """Makes a mesh with Auto axes, one for each dim of an array of devices."""
    return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def mesh_axes(
    mesh: Mesh | MeshAxes,
    data: str | Sequence[str] | None = None,
    replica: str | Sequence[str] | None = None,
) -> MeshAxes:
    """Assigns roles to the axes of a mesh; axes that are not named are the model's own.

    The axes become Auto; MeshAxes are returned unchanged. `data` and `replica` are those of
    `fully_shard`. Raises ValueError for axes that the mesh lacks, or if the roles are ambiguous and
    not named.
    """
    if isinstance(mesh, MeshAxes):
        if (data, replica) != (None, None):
            raise ArgumentError(
                "the roles of the mesh axes are given twice",
                where="mesh",
                got=f"{type(mesh).__name__} beside data={data}, replica={replica}",
                fix="the mesh itself: of a Sharded, sharded.arguments.mesh",
            )
        return mesh
    names = tuple(mesh.axis_names)
    if len(set(names)) < len(names):
        raise ArgumentError(
            "axis names repeat", where="mesh", got=names, fix="give every axis a name of its own"
        )
    # Find the axes that shard state and that replicate it: as named, or else by their usual names.
    replica_axes: tuple[str, ...] = (REPLICA,) if REPLICA in names else ()
    if replica is not None:
        replica_axes = named_axes("replica", replica, names)
    if data is None:
        data_axes = default_data_axes(mesh, replica_axes)
    else:
        data_axes = named_axes("data", data, names)
    if both := set(data_axes) & set(replica_axes):
        raise ArgumentError(
            f"mesh axis '{both.pop()}' is in both data and replica",
            where="mesh",
            got=f"data={data_axes}, replica={replica_axes}",
            fix="name it once",
        )
    axes = MeshAxes(_auto_mesh(mesh.devices, names), data_axes, replica_axes)
    if FSDP in axes.model:  # in rules the name stands for the axes that state is sharded along
        raise ArgumentError(
            f"the mesh axis '{FSDP}' neither shards nor replicates state",
            where="mesh",
            got=dict(mesh.shape),
            fix=f"data={(*data_axes, FSDP)} to shard along both, data='{FSDP}', or "
            f"replica='{FSDP}'",
        )
    # Under an ambient mesh the model uses its names too.
    stays = axes.model or not jax.sharding.get_abstract_mesh().empty
    return axes if stays else split_data(axes)


def named_axes(argument: str, given: str | Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Reads the value of an argument that names mesh axes, as a tuple.

    `argument`: its name, for the ValueError if the mesh lacks an axis, or an axis is named twice.
    """
    axes = (given,) if isinstance(given, str) else given
    is_ordered = isinstance(axes, list | tuple)
    likely = next((axis for axis in (FSDP, DATA, *names) if axis in names), DATA)
    fix = f'{argument}=("{likely}",)'
    for axis in axes if is_ordered else ():
        if axis not in names:
            fix = join_fixes(did_you_mean(str(axis), map(str, names)), f"for instance {fix}")
            raise ArgumentError(
                f"the mesh has no axis '{axis}'", where=argument, expected=names, got=given, fix=fix
            )
    least = 0 if argument == "replica" else 1
    if not is_ordered or len(axes) < least or len(set(axes)) < len(axes):
        fix = f"name each axis once, such as {fix}"
        raise ArgumentError("not mesh axes", where=argument, got=repr(given), fix=fix)
    return tuple(axes)


def default_data_axes(
    mesh: Mesh | AbstractMesh, replica: Sequence[str], where: Literal["data", "axes"] = "data"
) -> tuple[str, ...]:
    """Finds the axis to shard state along if the user names none.

    It is called `data` or `fsdp`, or is the only one of size above 1. Raises ValueError if that is
    ambiguous; `where` is the argument that would name it.
    """
    others = [axis for axis in mesh.axis_names if axis not in replica]
    named = [axis for axis in (FSDP, DATA) if axis in others]
    likely = named or [axis for axis in others if mesh.shape[axis] > 1] or others
    if len(likely) == 1:
        return (likely[0],)
    first = next(iter(likely or mesh.axis_names), DATA)
    if where == "axes":
        fix = f'axes=("{first}",)'
    elif named:
        fix = f"data='{first}', replica={entry_of((*replica, DATA))!r}"
    elif likely:
        fix = f"name it, data='{first}'; and replica='...' for an axis of replicas. "
        fix += "Axes that are not named are the model's own, such as one of tensor parallelism"
    else:
        fix = f"name it, data='{first}', replica=(); or make another axis, "
        fix += "as make_mesh(data=..., replica=...) does"
    raise ArgumentError(
        "which mesh axis shards the state?", where=where, got=list(mesh.axis_names), fix=fix
    )


def shard_axes(
    mesh: Mesh | AbstractMesh, data: tuple[str, ...], replica: Sequence[str]
) -> tuple[str, ...]:
    """Selects the axes to shard state along: those of `replica` and `data` of size above one.

    If there is none, `data`.
    """
    return tuple(axis for axis in (*replica, *data) if mesh.shape.get(axis, 1) > 1) or data


def mesh_like(axes: MeshAxes, devices: Sequence[jax.Device], replica: int) -> Mesh:
    """Makes a mesh of other devices with the same axes; the first data axis takes the rest.

    The model's own axes keep their sizes and get neighboring devices; `replica` is the number of
    replicas. Raises ValueError for sizes that do not fit the devices.
    """
    first, *others = axes.user_data
    inner = {axis: axes.shape[axis] for axis in (*others, *axes.model)}
    outer, rest = _resolve_sizes(replica, -1, len(devices), allow_fewer=False)
    if rest % prod(inner.values()):
        raise ArgumentError(
            "the number of devices is not divisible by the mesh",
            where="mesh",
            got=f"{replica} replicas x {inner} on {len(devices)} devices",
            fix="take a larger machine",
        )
    replicas = axes.replica or (REPLICA,) * (outer > 1)
    sizes = dict.fromkeys(replicas, 1) | dict.fromkeys(replicas[:1], outer)
    sizes |= {first: rest // prod(inner.values())} | inner
    ordered = _arrange_devices(list(devices), (outer, rest)).reshape(tuple(sizes.values()))
    names = [axis for axis in sizes if axis not in axes.shape] + [*axes.shape]
    return _auto_mesh(ordered.transpose([list(sizes).index(axis) for axis in names]), names)


# The mesh axes that `data` is split into; see the note.


def split_data(axes: MeshAxes, sizes: Sequence[int] | None = None) -> MeshAxes:
    """Splits the axis `data` of a mesh into `data_0`, `data_1`, ...; see the note.

    `sizes`: of these axes; by default those of the machine's physical dims. A mesh that cannot be
    split is returned unchanged.
    """
    mesh, name = axes.mesh, axes.data[0]
    dim = mesh.axis_names.index(name)
    sizes = sizes or _physical_sizes(np.moveaxis(mesh.devices, dim, -1))
    parts = tuple(f"{name}_{number}" for number in range(len(sizes)))
    if len(axes.data) > 1 or len(sizes) < 2 or set(parts) & set(mesh.axis_names):
        return axes
    assert prod(sizes) == mesh.shape[name], (sizes, mesh.shape)
    shape = (*mesh.devices.shape[:dim], *sizes, *mesh.devices.shape[dim + 1 :])
    names = (*mesh.axis_names[:dim], *parts, *mesh.axis_names[dim + 1 :])
    return MeshAxes(_auto_mesh(mesh.devices.reshape(shape), names), parts, axes.replica, name)


def _physical_sizes(devices: np.ndarray) -> tuple[int, ...]:
    """Finds the sizes of the physical dims along the last dim of `devices`, slowest first.

    On a TPU these are the slice, the dims of the torus and the cores of a chip; on other machines
    the hosts and their devices. Returns one size if the devices are not in such an order.
    """
    sizes = {_box_sizes(list(row)) for row in devices.reshape(-1, devices.shape[-1])}
    return sizes.pop() if len(sizes) == 1 else (devices.shape[-1],)


def _box_sizes(row: Sequence[jax.Device]) -> tuple[int, ...]:
    """Finds the sizes of the physical dims that a row of devices runs through, slowest first.

    They are those of a TPU's torus, elsewhere (process, device in it). If the devices fill no box
    of these dims, or not in order, returns only the length of the row.
    """
    if row[0].platform == "tpu":
        places = [torus_coordinates(device) for device in row]
    else:
        numbers: defaultdict[int, Iterator[int]] = defaultdict(count)
        places = [(device.process_index, next(numbers[device.process_index])) for device in row]
    sizes = [len(set(values)) for values in zip(*places, strict=True)]

    # A dim that changes slowly comes first.
    first_change = {
        dim: next(i for i, place in enumerate(places) if place[dim] != places[0][dim])
        for dim, size in enumerate(sizes)
        if size > 1
    }
    dims = sorted(first_change, key=lambda dim: -first_change[dim])

    # The devices must fill a box, and run through it in that order.
    ordered = [tuple(place[dim] for dim in dims) for place in places]
    fits = prod(sizes) == len(row) and ordered == sorted(ordered)
    return tuple(sizes[dim] for dim in dims) if fits and dims else (len(row),)


# Specs


def replicated(mesh: Mesh) -> NamedSharding:
    """Makes the sharding of an array that every device holds in full."""
    return NamedSharding(mesh, PartitionSpec())


def axes_of(entry: Entry) -> tuple[str, ...]:
    """Converts one entry of a PartitionSpec to a tuple of mesh axes."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def spec_axes(spec: Iterable[Entry]) -> tuple[str, ...]:
    """Lists all mesh axes of a PartitionSpec, in the order of its dims."""
    return tuple(axis for entry in spec for axis in axes_of(entry))


def entry_of(axes: Sequence[str]) -> Entry:
    """Converts mesh axes to an entry of a PartitionSpec; the inverse of `axes_of`."""
    if not axes:
        return None
    return axes[0] if len(axes) == 1 else tuple(axes)


def spec_of(entries: Iterable[Entry]) -> PartitionSpec:
    """Makes a PartitionSpec without trailing entries of None."""
    entries = list(entries)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def shards_of(mesh: Mesh | AbstractMesh, entry: Entry) -> int:
    """Counts the shards that one entry of a PartitionSpec cuts a dim into."""
    return prod(mesh.shape[axis] for axis in axes_of(entry))
