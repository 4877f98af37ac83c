"""One small model of every family, laid out over 8 devices, and random weights for it under foreign
names.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from family_cases import CASES, wider_config_of
from safetensors.numpy import save_file

import fsdp_jax
from fsdp_jax.tree import flatten
from fsdp_jax.weights import config_json, table_of

FAMILIES = {}
for name in CASES:
    family, config = wider_config_of(name)
    FAMILIES[name] = (family.model, config)
# Each family, and both ways to hold layers, in each run; all of both in long ones.
SCANNED_OR_NOT = [
    pytest.param(name, scanned, marks=[] if scanned == bool(number % 2) else pytest.mark.long)
    for number, name in enumerate(FAMILIES)
    for scanned in (True, False)
]


@functools.cache
def laid_out(name, scan_layers=True):
    """(config, layout) over 8 devices under full_shard."""
    model, config = FAMILIES[name]
    config = dataclasses.replace(config, scan_layers=scan_layers)
    sharded = fsdp_jax.fully_shard(
        lambda rngs: model(config, rngs=rngs),
        optax.sgd(0.1),
        fsdp_jax.make_mesh(data=8),
        "full_shard",
        "model",
        min_size=1,
    )
    return config, sharded


def target_of(name, dtype="float32", **more):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding),
        laid_out(name, **more)[1].checkpoint_target().params,
    )


def theirs(config, leaves, seed=0, dtype="float32"):
    """{name: random tensor} that the table wants for leaves."""
    draw = np.random.default_rng(seed)
    mappings = [mapping for each in table_of(config).mappings(leaves).values() for mapping in each]
    return {
        mapping.name: draw.normal(size=mapping.shape).astype(jnp.dtype(dtype))
        for mapping in mappings
    }


def saved(folder, config, tensors):
    """The folder with these tensors in one file, as others write it."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    return folder


def folder_of(name, folder, *, dtype="float32", change=lambda tensors: tensors):
    """(folder, its tensors) of a family."""
    config, sharded = laid_out(name)
    tensors = change(theirs(config, flatten(sharded.checkpoint_target().params), dtype=dtype))
    return saved(folder, config, tensors), tensors


def expected(config, leaves, tensors):
    """{path: whole array}: the table's meaning, written without it being read slice by slice."""
    found = {}
    for path, mappings in table_of(config).mappings(leaves).items():
        whole = np.zeros(leaves[path].shape, next(iter(tensors.values())).dtype)
        for mapping in mappings:
            value = tensors[mapping.name]
            order = [dim for dim in mapping.dims if dim is not None]
            rest = [dim for dim in range(value.ndim) if dim not in order]
            whole[tuple(slice(*each) for each in mapping.box)] = value.transpose(
                *order, *rest
            ).reshape(mapping.size)
        found[path] = whole
    return found


def assert_bits(found, wanted):
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        got = np.asarray(found[path])
        assert (got.dtype, got.shape) == (value.dtype, value.shape), path
        assert got.tobytes() == value.tobytes(), path


def spec(shape, dtype, axes, mesh=None):
    """A leaf of a target."""
    mesh = mesh or jax.make_mesh((2, 4), ("a", "b"))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P(*axes)))
