"""One array on the devices: the slices are jax's own, on any mesh and in any rank."""

import re
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from for_each import for_each
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pages import LOADS, Outline
from refusals import refused
from test_layout_tree import of_class

import fsdp_jax as fsdp
from fsdp_jax.compat.jax_devices import FakeDevice
from fsdp_jax.models import GPT, preset
from fsdp_jax.views.page import number_ranges

MESHES = [(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (2, 1, 4)]
NAMES = ("a", "b", "c")


@st.composite
def sharded_shapes(draw):
    """(shape, spec, sizes of the mesh): of rank 0 to 5, each dim along any of the axes."""
    sizes = draw(st.sampled_from(MESHES))
    free = draw(st.permutations(NAMES[: len(sizes)]))
    shape, entries = [], []
    for _ in range(draw(st.integers(0, 5))):
        count = draw(st.integers(0, len(free)))
        chosen, free = tuple(free[:count]), free[count:]
        parts = prod(sizes[NAMES.index(axis)] for axis in chosen)
        shape.append(parts * draw(st.integers(1, 3)))
        entries.append(chosen or None)
    kept = draw(st.integers(0, len(entries)))
    if not any(entries[kept:]):  # a spec may leave out dims that are whole
        entries = entries[:kept]
    return tuple(shape), P(*entries), sizes


def expected(shape, sharding):
    """{slice: devices} by jax."""
    held = {}
    for device, index in sharding.devices_indices_map(shape).items():
        ranges = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        held.setdefault(ranges, set()).add(device.id)
    return held


@pytest.mark.releases
@settings(max_examples=60)
@given(sharded_shapes())
def test_slices_are_those_of_jax(case):
    shape, spec, sizes = case
    names = NAMES[: len(sizes)]
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    sharding = NamedSharding(mesh, spec)
    shown = fsdp.show((shape, sharding))
    assert {index: set(ids) for index, ids in shown.slices.items()} == expected(shape, sharding)
    # A mesh without devices numbers its places.
    places = {device.id: place for place, device in enumerate(mesh.devices.flat)}
    abstract = fsdp.show((shape, NamedSharding(AbstractMesh(sizes, names), spec)))
    assert abstract.slices == {
        index: tuple(sorted(places[device] for device in ids))
        for index, ids in shown.slices.items()
    }
    # Text and page have each slice once, with all of its devices.
    lines = shown.text().splitlines()[-len(shown.slices) :]
    assert [re.split("  +", line)[1] for line in lines] == [
        number_ranges(ids) for ids in shown.slices.values()
    ]
    cells = [cell for grid in shown.grids() for row in grid.cells for cell in row]
    assert sorted(cells) == sorted(shown.slices.items())
    Outline(shown.page())


def test_text_of_an_array_with_replicas():
    mesh = jax.make_mesh((2, 2, 2), ("replica", "data", "tensor"), axis_types=(AxisType.Auto,) * 3)
    array = jax.device_put(
        np.ones((4, 3, 8), "float32"), NamedSharding(mesh, P("data", None, "tensor"))
    )
    shown = fsdp.show(array)
    first, *notes = str(shown).splitlines()
    assert first == "float32[4,3,8], P('data', None, 'tensor') on replica=2 x data=2 x tensor=2"
    assert notes[:4] == [
        "4 slices of [2,3,4] on 8 devices, each slice on 2; 96 B a device",
        "dim 0: 2 parts of 2 along 'data'",
        "dim 2: 2 parts of 4 along 'tensor'",
        "replicated along 'replica'",
    ]
    assert len(notes) == 4 + 2 + 4
    assert notes[6].split("  ")[0] == "[0:2, :, 0:4]"
    assert repr(shown) == str(shown)
    struct = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
    assert fsdp.show(struct) == shown == fsdp.show(nnx.Param(array))


def test_a_tree_of_specs_has_the_bytes_of_each_device():
    mesh = fsdp.make_mesh(data=8)
    shapes = jax.eval_shape(lambda: {"a": {"w": jnp.ones((64, 256)), "b": jnp.ones(3)}})
    specs = fsdp.partition_specs(shapes, mesh)
    shown = fsdp.show(shapes, specs, mesh)
    assert shown.title == (
        "2 arrays on replica=1 x data=8: 8.01 KiB per device (64 KiB replicated, 7.99x)"
    )
    lines = [re.split(r"  +", line.strip()) for line in str(shown).splitlines()]
    assert lines[1] == ["per device", "bytes", "share", "spec", "array"]
    assert lines[-1][1:] == ["8 KiB", "█" * 10, "P(None, 'data')", "float32[64,256]"]
    assert [value for _, value, _ in shown.cards] == ["8.01 KiB", "8 KiB", "12 B"]
    assert any("[64,32], 1 of 8 slices" in text for text in Outline(shown.page()).of("div"))
    # arrays have shardings of their own
    arrays = jax.tree.map(
        lambda x, spec: jax.device_put(jnp.zeros(x.shape), NamedSharding(mesh, spec)), shapes, specs
    )
    assert fsdp.show(arrays) == shown
    # and one array its slices
    assert fsdp.show(shapes["a"]["w"], specs["a"]["w"], mesh) == fsdp.show(arrays["a"]["w"])


def test_trees_that_cannot_be_shown_are_refused():
    mesh = fsdp.make_mesh(data=8)
    shapes = {"a": jax.ShapeDtypeStruct((9,), "float32")}
    for arguments, what, where in (
        ((shapes,), "no sharding to show", "show, a"),
        ((shapes, {"a": P()}), "without a mesh", "show, a"),
        ((shapes, {"b": P()}, mesh), "another tree than the arrays", "show, a"),
        ((shapes, {"a": P("data")}, mesh), "does not divide the shape", "show, a"),
        (({},), "no arrays to show", None),
    ):
        with refused(what, where=where):
            fsdp.show(*arguments)


def test_leaves_of_a_layout_have_the_names_that_the_user_knows():
    mesh = fsdp.make_mesh(data=6, devices=jax.devices()[:6])
    layout = fsdp.fully_shard(
        lambda rngs: GPT(preset("tiny", layers=2), rngs=rngs), optax.adamw(1e-3), mesh
    ).layout
    padded = next(leaf for leaf in layout if leaf.is_padded and leaf.part == "params")
    shown = fsdp.show(padded)
    assert shown.shape == padded.stored_shape
    assert shown.title.startswith(f"{padded.path} float32[")
    assert "more; no dim is divisible by 6" in str(shown)
    assert {index: set(ids) for index, ids in shown.slices.items()} == expected(
        padded.stored_shape, padded.sharding
    )


def test_arrays_on_one_device_and_scalars():
    text = str(fsdp.show(jnp.ones(())))
    assert "float32[], SingleDeviceSharding\n1 slice of [] on 1 device" in text
    assert text.splitlines()[-1].split() == ["[...]", "0"]
    Outline(fsdp.show(jnp.ones((2, 3))).page())


def test_512_devices_stay_readable():
    mesh = AbstractMesh((2, 32, 8), ("replica", "data", "tensor"))
    for spec in (P("data", None, "tensor"), P(("replica", "data", "tensor")), P("tensor"), P()):
        shown = fsdp.show(((4096, 16, 64, 8), NamedSharding(mesh, spec)))
        assert len(str(shown).splitlines()) <= 40
        assert max(map(len, str(shown).splitlines())) <= 100
        assert sum(map(len, shown.slices.values())) == 512
        page = shown.page()
        assert len(page) < 100_000
        Outline(page)
    # files have all of it
    cut = fsdp.show(((512,), NamedSharding(mesh, P(("data", "tensor")))))
    assert "… 224 more" in str(cut)
    assert "more" not in cut.text()
    assert "[40:42]" in cut.text()


def test_processes_are_shown_where_there_are_several():
    devices = np.array([FakeDevice(i, i // 4, "gpu", "fake") for i in range(8)]).reshape(2, 4)
    shown = fsdp.show(((8, 8), NamedSharding(Mesh(devices, ("data", "tensor")), P(None, "data"))))
    *_, header, _, first, second = str(shown).splitlines()
    assert header.split() == ["slice", "devices", "processes"]
    assert first.split("  ")[-1] == "0"
    assert second.split("  ")[-1] == "1"
    page = shown.page()
    assert "process 0" in page
    assert "process 1" in page
    assert len(of_class(Outline(page), "process")) == 2


@for_each(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([1, 0], "0-1"),
        ([0, 4], "0, 4"),
        (range(0, 64, 8), "0-56 by 8"),
        ([0, 1, 2, 8, 9, 11], "0-2, 8-9, 11"),
    ],
)
def test_number_ranges(numbers, text):
    assert number_ranges(numbers) == text


def test_names_are_escaped_and_nothing_is_loaded():
    name = "<script>'\"&"
    mesh = AbstractMesh((4,), (name,))
    page = fsdp.show(((8,), NamedSharding(mesh, P(name))))._repr_html_()
    elements = Outline(page)
    assert "script" not in {tag for tag, _ in elements.tags}
    assert any(name in text for _, text in elements.text)
    assert not re.search(LOADS, page)


def test_what_cannot_be_shown_is_refused():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with refused("no sharding to show"):
        fsdp.show(np.ones(3))
    with refused("does not divide the shape"):
        fsdp.show(((9,), NamedSharding(mesh, P("data"))))
    for spec in (P(None, "data"), P("data", None)):
        with refused("more dims than the shape"):
            fsdp.show(((8,), NamedSharding(mesh, spec)))
    with pytest.raises(ValueError, match="a traced array is not on devices"):
        jax.jit(lambda x: fsdp.show(x) and x)(jnp.ones(8))
