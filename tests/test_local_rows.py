"""Rows stay on their devices with annotations: kernels on local rows, pinned activations.

Compiles small functions for their gradients, and one step for its numbers; the rest is traced.
"""

import dataclasses

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import CASES, check, control, on_eight, train
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.local_rows import batch_split, pin_rows
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import GPT, Block, preset

pytestmark = pytest.mark.releases

TOKENS = {"tokens": jax.ShapeDtypeStruct((16, 9), "int32")}


def kernel(x, table):
    """Computes each row of the result from the same row of `x`."""
    return jnp.cumsum(x, axis=1) @ table


@pytest.fixture
def mesh():
    return fsdp.make_mesh(data=4, replica=2)


def grads(fn, x, table):
    return jax.jit(jax.value_and_grad(lambda x, table: (fn(x, table) ** 2).sum(), (0, 1)))(x, table)


def test_results_and_gradients_are_the_same_on_local_rows(mesh):
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    table = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    plain = grads(kernel, x, table)
    wrapped = fsdp.on_local_rows(kernel, replicated=(1,))
    jax.tree.map(
        np.testing.assert_array_equal, grads(wrapped, x, table), plain
    )  # outside a step: the function itself
    with batch_split(mesh, mesh.axis_names, 16):
        local = grads(fsdp.on_local_rows(kernel, replicated=(1,)), x, table)
        traced = jax.make_jaxpr(wrapped)(x, table)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), local, plain)
    (eqn,) = [eqn for eqn in traced.eqns if eqn.primitive.name == "shard_map"]
    assert [v.aval.shape for v in eqn.params["jaxpr"].invars] == [(2, 4), (4, 3)]


def test_rows_that_do_not_divide(mesh):
    x, table = np.ones((3, 4), np.float32), np.ones((4, 3), np.float32)
    wrapped = fsdp.on_local_rows(kernel, replicated=(1,))
    with (
        batch_split(mesh, mesh.axis_names, 16),
        pytest.warns(fsdp.SlowerWarning, match=r"kernel\): .*for 3 rows are not divisible by 8"),
    ):
        np.testing.assert_array_equal(wrapped(x, table), kernel(x, table))
    with batch_split(mesh, mesh.axis_names, None):  # of `Sharded.apply`: no batch was promised
        np.testing.assert_array_equal(wrapped(x, table), kernel(x, table))


def test_functions_that_do_not_keep_rows_are_refused(mesh):
    x, table = np.ones((32, 4), np.float32), np.ones((4, 3), np.float32)
    with batch_split(mesh, mesh.axis_names, 16):
        with refused("no such argument", where="on_local_rows(kernel)", expected="below 2"):
            fsdp.on_local_rows(kernel, replicated=(2,))(x, table)
        for fn in (
            lambda x, table: x.sum(0) @ table,
            lambda x, table: (x @ table).sum(),
            # One device's sum over all rows; eight would return eight.
            lambda x, table: (x @ table).sum(0, keepdims=True),
        ):
            with refused("a result without the rows", expected="dim 0 of 4"):
                fsdp.on_local_rows(fn, replicated=(1,))(x, table)


def test_a_result_may_have_a_row_per_device(mesh):
    x, table = np.ones((16, 4), np.float32), np.ones((4, 3), np.float32)
    same_for_all = fsdp.on_local_rows(
        lambda x, table: table[None], replicated=(1,), row_per_device=True
    )
    with batch_split(mesh, mesh.axis_names, 16):
        assert same_for_all(x, table).shape == (8, 4, 3)
    assert same_for_all(x, table).shape == (1, 4, 3)


def test_replicated_takes_numbers_of_arguments():
    for replicated in (1, ("table",)):
        where = "on_local_rows(kernel)"
        with refused("not positions of arguments", where=where, fix="replicated=(1,)"):
            fsdp.on_local_rows(kernel, replicated=replicated)


def test_only_activations_are_pinned(mesh):
    tree = {"x": jnp.ones((16, 4)), "rows": jnp.ones(16), "table": jnp.ones((4, 4)), "flag": True}
    assert pin_rows(tree) is tree

    def constraints(rows):
        with batch_split(mesh, mesh.axis_names, rows):
            arrays = {name: leaf for name, leaf in tree.items() if name != "flag"}
            traced = jax.make_jaxpr(
                lambda arrays: pin_rows(arrays | {"flag": True})["x"] + 0 * arrays["x"]
            )(arrays)
        return [eqn for eqn in traced.eqns if eqn.primitive.name == "sharding_constraint"]

    (only,) = constraints(16)
    assert only.params["sharding"].spec[0] == mesh.axis_names
    assert constraints(None) == []


def primitives(jaxpr, inside=()):
    """Yields (primitive, primitives around it) of every operation of a traced program."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name, inside
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from primitives(inner, (*inside, eqn.primitive.name))


def rows_kernel(q, k, v, *, is_causal):
    def local(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)

    return fsdp.on_local_rows(local)(q, k, v)


@pytest.mark.parametrize(
    ("scan", "tied", "attention", "some"),
    [(True, False, None, False), (False, True, None, True), (True, False, rows_kernel, True)],
)
def test_a_shard_map_is_around_what_xla_cannot_partition(scan, tied, attention, some):
    """In a GPT that is a wrapped attention kernel, and the lookup in a tied table."""
    config = preset(
        "tiny", vocab_size=40, sequence_length=8, layers=2, width=16, heads=2, scan_layers=scan
    )
    config = dataclasses.replace(config, tie_head=tied)
    given = {} if attention is None else {"attention": attention}
    sharded = on_eight(
        lambda rngs: GPT(config, rngs=rngs, **given), optax.adam(1e-3), units=[Block]
    )
    operations = list(primitives(sharded.make_train_step(next_token_loss).trace(TOKENS).jaxpr))
    mapped = {name for name, inside in operations if "shard_map" in inside}
    assert bool(mapped - {"layout_constraint"}) == some  # a shard's layout is pinned by its device
    outside = {name for name, inside in operations if "shard_map" not in inside}
    assert outside.isdisjoint({"all_gather", "reduce_scatter", "psum_scatter", "psum"})


def test_a_tied_table_trains_as_one_device_does():
    mesh = fsdp.make_mesh(data=4, replica=2)
    run, _ = train(CASES["nnx-gpt-scanned"], mesh, "hybrid_shard")
    check(run, control("nnx-gpt-scanned", 1))
