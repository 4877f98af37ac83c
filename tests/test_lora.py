"""LoRA against training written out by hand, what it leaves unchanged, and merged weights.

Compiles a step to compare its numbers with one device, and one for its contract.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import (
    CASES,
    LinenTransformer,
    by_path,
    check,
    gpt,
    image_loss,
    losses_of,
    on_eight,
    optimizer,
)
from refusals import refused
from safetensors.numpy import save_file

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import CheckpointStore, import_params
from fsdp_jax.errors import ConfigError
from fsdp_jax.lora import AdaptedLinear, frozen_but, merge, merged_paths, split_lora, with_lora
from fsdp_jax.models import llama, next_token_loss
from fsdp_jax.models.gpt import Block
from fsdp_jax.sharding.padding import Padded
from fsdp_jax.sharding.rules import MIN_SIZE
from fsdp_jax.step import streaming
from fsdp_jax.testing import assert_contract, mesh_of
from fsdp_jax.tree import flatten, nest_like, unflatten

STEPS = 4
GPT_TARGETS = ("attn/", "mlp/up$")  # among them the fused projection to queries, keys and values


def small_llama(scan=True, **overrides):
    sizes = {"vocab_size": 32, "sequence_length": 8, "layers": 2, "width": 16, "hidden": 48}
    sizes |= {"heads": 2, "kv_heads": 1} | overrides
    config = llama.preset("llama-tiny", scan_layers=scan, **sizes)
    return lambda rngs: llama.Llama(config, rngs=rngs)


class Wide(nnx.Linear):
    """A Linear of the user's own that computes as one does."""

    def __init__(self, width, *, rngs):
        super().__init__(width, 3 * width, rngs=rngs)


class Own(nnx.Module):
    """A user's model: a batch norm, Linears in a list, one that is used twice, one in bfloat16."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.inner = nnx.List([Wide(16, rngs=rngs), nnx.Linear(48, 16, use_bias=False, rngs=rngs)])
        self.twice = self.again = nnx.Linear(16, 16, rngs=rngs)
        self.head = nnx.Linear(16, 8, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        for layer in self.inner:
            x = jnp.tanh(layer(self.norm(x) if layer is self.inner[0] else x))
        return self.head(self.again(jnp.tanh(self.twice(x))))


def own(rngs):
    return Own(rngs)


def own_batch(rows=32):
    random = np.random.default_rng(0)
    labels = random.integers(0, 8, rows).astype(np.int32)
    x = random.normal(size=(rows, 16)) + np.eye(8, 16)[labels]
    return {"x": x.astype(np.float32), "y": labels}


OWN = {"rank": 4, "alpha": 16, "targets": ("inner", "again", "head")}
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 9)).astype(np.int32)
BATCH = {"tokens": TOKENS}


def shard(make, tx=None, units=(llama.LlamaBlock,), mesh=None, **settings):
    """A model with LoRA, of which the rest is frozen."""
    settings = {"min_size": 8, "frozen": make.frozen} | settings
    mesh = mesh or fsdp.make_mesh(data=8)
    return fsdp.fully_shard(make, tx or optax.adam(1e-2), mesh, units=units, **settings)


def all_merged(tensors, scale):
    """{path: tensor} of the model without, as `merged_paths` says."""
    return {
        path: tensors[path]
        if len(parts) == 1
        else merge(*(tensors[part] for part in parts), scale=scale)
        for path, parts in merged_paths(tensors).items()
    }


def params_of(model):
    return by_path(nnx.state(model, nnx.Param))


MODELS = {
    "gpt-scanned": (gpt(True), GPT_TARGETS),
    "gpt-unrolled": (gpt(False), GPT_TARGETS),
    "gpt-dropout": (gpt(True, dropout=0.5), GPT_TARGETS),
    "llama-scanned": (small_llama(), ("blocks/",)),
    "llama-unrolled": (small_llama(False, tie_head=True), ("attn/(q|v)$",)),
}


# Initial values


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name != "gpt-dropout")) for name in MODELS],
)
def test_a_model_starts_with_the_outputs_of_the_plain_model(name):
    make, targets = MODELS[name]
    streams = [nnx.Rngs(params=1, dropout=2) for _ in range(2)]
    plain, adapted = make(streams[0]), with_lora(make, rank=3, targets=targets)(streams[1])
    next_keys = [jax.random.key_data(stream.params()) for stream in streams]
    np.testing.assert_array_equal(*next_keys)
    was, now = params_of(plain), params_of(adapted)
    added = now.keys() - was.keys()
    assert was.keys() <= now.keys()
    assert added
    assert all(path.rsplit("/", 1)[1] in ("lora_a", "lora_b") for path in added)
    for path, value in was.items():
        np.testing.assert_array_equal(now[path], value)
    for deterministic in (True, False):
        out = plain(TOKENS[:, :8], deterministic=deterministic)
        np.testing.assert_array_equal(adapted(TOKENS[:, :8], deterministic=deterministic), out)
    kinds = dict(nnx.iter_modules(plain))
    changed = {
        path: module
        for path, module in nnx.iter_modules(adapted)
        if type(module) is not type(kinds[path])
    }
    assert {"/".join(map(str, path)) for path in changed} == {
        path.rsplit("/", 1)[0] for path in added
    }
    assert all(
        isinstance(module, AdaptedLinear) and isinstance(module, type(kinds[path]))
        for path, module in changed.items()
    )


def test_each_layer_and_each_kernel_draws_numbers_of_its_own():
    params = params_of(with_lora(gpt(True), rank=3, targets=("attn/",))(nnx.Rngs(0)))
    qkv, out = params["blocks/attn/qkv/lora_a"], params["blocks/attn/out/lora_a"]
    assert qkv.shape == out.shape == (2, 16, 3)
    assert len({qkv[0].tobytes(), qkv[1].tobytes(), out[0].tobytes(), out[1].tobytes()}) == 4
    assert np.abs(qkv).max() <= 16**-0.5
    assert np.abs(qkv).max() > 0.8 * 16**-0.5
    assert not params["blocks/attn/qkv/lora_b"].any()
    make, rngs = with_lora(gpt(True), rank=3, targets=("attn/",)), nnx.Rngs(0)
    for other in (
        make(nnx.Rngs(1)),
        (make(rngs), make(rngs))[1],
    ):  # another seed; the second of one seed
        assert (params_of(other)["blocks/attn/qkv/lora_a"] != qkv).all()


def test_an_adapted_linear_computes_the_formula_of_the_paper():
    make = with_lora(lambda rngs: nnx.Linear(6, 5, rngs=rngs), rank=2, alpha=6, targets=("^$",))
    linear = make(nnx.Rngs(0))
    assert type(linear) is AdaptedLinear
    linear.lora_b[...] = jnp.ones((2, 5))
    x = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    low = x @ np.asarray(linear.lora_a[...]) @ np.ones((2, 5), np.float32)
    np.testing.assert_allclose(
        linear(x), x @ linear.kernel[...] + linear.bias[...][None] + 3 * low, atol=1e-5
    )
    assert make.scale == 3
    assert with_lora(make.make_model, rank=2, targets=("^$",)).scale == 1


def test_the_product_has_the_dtype_that_the_linear_computes_in():
    model = with_lora(own, **OWN)(nnx.Rngs(0))
    assert model.head.lora_a[...].dtype == jnp.float32
    traced = jax.make_jaxpr(lambda x: model.head(x))(jnp.ones((2, 16)))
    assert str(traced).count("dot_general") == 3
    assert not re.findall(r"f32\S* = dot_general", str(traced))
    assert (
        model.head(jnp.ones((2, 16))).dtype
        == Own(nnx.Rngs(0)).head(jnp.ones((2, 16))).dtype
        == jnp.bfloat16
    )


# Training


def train_unsharded(make, loss, batches):
    """LoRA's parameters trained on one device, in plain JAX and optax."""
    key, _ = jax.random.split(jax.random.key(0))
    graphdef, *_ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(key))), nnx.LoRAParam, ...)
    lora, rest = jax.jit(lambda: nnx.split(make(nnx.Rngs(key)), nnx.LoRAParam, ...)[1:])()
    tx = optimizer()
    opt_state = jax.jit(tx.init)(lora)

    @jax.jit
    def step(lora, opt_state, batch):
        def mean(lora):
            total, count = loss(nnx.merge(graphdef, lora, rest, copy=True), batch)
            return total / count

        value, grads = jax.value_and_grad(mean)(lora)
        updates, opt_state = tx.update(grads, opt_state, lora)
        return optax.apply_updates(lora, updates), opt_state, value

    losses = []
    for batch in batches:
        lora, opt_state, value = step(lora, opt_state, batch)
        losses.append(float(value))
    return losses, by_path(lora) | by_path(nnx.filter_state(rest, nnx.Param))


@functools.cache
def control(make):
    return train_unsharded(
        make, next_token_loss, [CASES["nnx-gpt-scanned"].batch(i) for i in range(STEPS)]
    )


def check_against_the_control(make, units, mesh, strategy="full_shard", *, step=None, **settings):
    sharded = shard(make, optimizer(), units, mesh, strategy=strategy, **settings)
    train = sharded.make_train_step(next_token_loss, **step or {})
    state = sharded.init(0)
    start = by_path(state.params)
    losses, state = losses_of(train, state, map(CASES["nnx-gpt-scanned"].batch, range(STEPS)))
    end = by_path(state.params)
    check((losses, end), control(make))
    for path, value in end.items():
        if "lora_" in path:
            assert (value != start[path]).any(), path
        else:
            np.testing.assert_array_equal(value, start[path], err_msg=path)
    return train


GPT_LORA = {
    scan: with_lora(gpt(scan), rank=4, alpha=8, targets=GPT_TARGETS) for scan in (True, False)
}
DEFERRED = {"accumulation": 4, "deferred_reduction": True, "local_batch": True}
LLAMA_LORA = with_lora(small_llama(), rank=4, targets=("attn/(q|v)$", "mlp/"))


@pytest.mark.parametrize(
    ("scan", "prefetch"),
    [
        pytest.param(True, "none", marks=pytest.mark.long),
        (True, "pre"),
        pytest.param(False, "pre", marks=pytest.mark.long),
    ],
)
def test_lora_trains_as_one_device_does(scan, prefetch):
    step = check_against_the_control(
        GPT_LORA[scan],
        (Block,),
        fsdp.make_mesh(data=8),
        step={"local_batch": prefetch != "none"},
        prefetch=prefetch,
    )
    moved = step.report.prefetch.prefetched
    assert (
        any("lora_a" in path for path in moved)
        == any("mlp/down" in path for path in moved)
        == (prefetch == "pre")
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("hybrid_shard", {"step": DEFERRED}),
        ("zero1", {"units": ("Linear",)}),
        ("hybrid_shard", {"offload": fsdp.Offload(params=True, optimizer=True)}),
    ],
)
def test_lora_trains_as_one_device_does_with_other_strategies(strategy, settings, monkeypatch):
    monkeypatch.setattr(streaming, "GROUP_BYTES", 256)  # several groups
    mesh = fsdp.make_mesh(data=4, replica=2)
    check_against_the_control(
        LLAMA_LORA, strategy=strategy, mesh=mesh, **{"units": ("LlamaBlock",)} | settings
    )


@pytest.mark.long
def test_a_model_of_the_users_own_learns_and_is_merged():
    make = with_lora(own, **OWN, trainable=("norm/",))
    sharded = shard(make, units=[nnx.Linear])
    trained = {path for path, leaf in sharded.layout.by_path.items() if leaf.trainable}
    ours = {
        f"{at}/{name}"
        for at in ("inner/0", "inner/1", "again", "head")
        for name in ("lora_a", "lora_b")
    }
    assert trained == ours | {"norm/scale", "norm/bias"}
    step = sharded.make_train_step(image_loss)
    losses, state = losses_of(step, sharded.init(0), [own_batch()] * 30)
    assert losses[-1] < 0.8 * losses[0]

    x = own_batch()["x"]
    logits = sharded.apply(lambda model, x: model(x))(state, x)
    plain = on_eight(own, optax.adam(1e-2), units=[nnx.Linear])
    merged = all_merged(flatten(state.params), scale=make.scale)
    assert {path: leaf.sharding for path, leaf in merged.items()} == {
        path: leaf.sharding for path, leaf in plain.layout.by_path.items()
    }
    plain_state = plain.init(0)
    params = nest_like(plain_state.params, merged)
    plain_state = dataclasses.replace(plain_state, params=params, model_state=state.model_state)
    merged_logits = plain.apply(lambda model, x: model(x))(plain_state, x)
    np.testing.assert_allclose(
        np.float32(merged_logits), np.float32(logits), rtol=2e-2, atol=0.1
    )  # its head is in bfloat16


# Costs


def test_only_what_is_trained_has_optimizer_state():
    config = llama.preset("llama-tiny")
    make = with_lora(
        lambda rngs: llama.Llama(config, rngs=rngs), rank=8, targets=("attn/(q|k|v|o)$",)
    )
    sharded = shard(make, optax.adamw(1e-4), min_size=MIN_SIZE, frozen=frozen_but())
    D, shared, R, L = config.width, config.kv_heads * config.head_dim, 8, config.layers
    elements = L * R * (2 * (D + D) + 2 * (D + shared))
    counter = 4
    assert sharded.layout.total("optimizer") == 2 * 4 * elements + counter
    assert (
        sharded.layout.by_path["blocks/mlp/up/kernel"].bytes_per_device * 8
        == L * D * config.hidden * 4
    )
    assert sharded.layout.by_path["blocks/attn/q/lora_a"].is_replicated  # 128 x 8, below min_size


def test_the_contract_holds_and_nothing_frozen_is_reduced():
    check_the_contract(fsdp.make_mesh(data=8), prefetch="none")


@pytest.mark.long
@pytest.mark.needs_plugin
@pytest.mark.parametrize("prefetch", ["none", "pre"])
def test_the_contract_holds_on_gpus(prefetch):
    check_the_contract(mesh_of("h100:8"), prefetch=prefetch)


def check_the_contract(mesh, **settings):
    make = with_lora(small_llama(width=64, hidden=192), rank=4, targets=("attn/(q|v)$",))
    settings |= {"min_size": 64, "precision": fsdp.Precision(compute="bfloat16")}
    sharded = shard(make, optax.adamw(1e-4), mesh=mesh, **settings)
    contract = assert_contract(sharded.make_train_step(next_token_loss, local_batch=True), BATCH)
    declared = {each.path for each in contract.expected if each.role == "reduce"}
    assert declared == {f"blocks/attn/{at}/{name}" for at in "qv" for name in ("lora_a", "lora_b")}
    reduced = {
        path for each in contract.collectives if each.op != "all-gather" for path in each.paths
    }
    assert reduced & sharded.layout.by_path.keys() == declared


def test_a_tied_embedding_is_sharded_as_without_lora():
    make = with_lora(gpt(True), rank=4, targets=GPT_TARGETS)
    with_it, without = (
        on_eight(m, units=[Block], frozen=frozen)
        for m, frozen in ((make, make.frozen), (gpt(True), ()))
    )
    assert {p: u for p, u in with_it.units.items() if "lora_" not in p} == without.units
    assert with_it.units["embed/embedding"] is None
    assert (
        with_it.layout.by_path["embed/embedding"].spec
        == without.layout.by_path["embed/embedding"].spec
    )


# Which parameters are frozen


def test_parameters_may_be_trained_beside_lora():
    make = with_lora(small_llama(), rank=4, targets=("attn/q",), trainable=("^head/", "norm/scale"))
    sharded = fsdp.fully_shard(make, optax.sgd(0.1), fsdp.make_mesh(data=8), frozen=make.frozen)
    lora = {"blocks/attn/q/lora_a", "blocks/attn/q/lora_b"}
    beside = {"head/kernel", "norm/scale", "blocks/attn_norm/scale", "blocks/mlp_norm/scale"}
    trained = {path for path, leaf in sharded.layout.by_path.items() if leaf.trainable}
    assert trained == lora | beside
    assert frozen_but() == with_lora(gpt(True), rank=1, targets=(".",)).frozen
    with refused("pattern 'haed' matches no parameter", error=ConfigError, where="trainable"):
        with_lora(small_llama(), rank=4, targets=("attn/q",), trainable=("haed",))(nnx.Rngs(0))


# Errors


class Scaled(nnx.Linear):
    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs, out_sharding=out_sharding)


class Past(nnx.Linear):
    def losses(self, x):
        return x @ self.kernel[...]


class Odd(nnx.Module):
    def __init__(self, rngs):
        self.past = Past(4, 4, rngs=rngs)
        self.scaled = Scaled(4, 4, rngs=rngs)
        self.general = nnx.LinearGeneral(4, (2, 2), rngs=rngs)
        self.einsum = nnx.Einsum("ab,bc->ac", (4, 4), rngs=rngs)
        self.flax = nnx.LoRALinear(4, 4, lora_rank=1, rngs=rngs)
        self.one, self.other = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.other.kernel = self.one.kernel
        self.conv = nnx.Conv(4, 4, (1, 1), rngs=rngs)


def odd(rngs):
    return Odd(rngs)


def test_models_that_do_not_fit_are_refused():
    unknown = {"what": "its arithmetic is not known"}
    has_lora = {"what": "it has LoRA already"}
    suffix = {"expected": r"blocks/\d+/attn/qkv", "fix": "'attn/qkv'"}
    for make, wrong, found in (
        (odd, {"targets": ("scaled",)}, unknown | {"where": "scaled, a Scaled", "got": "__call__"}),
        (odd, {"targets": ("past",)}, unknown | {"where": "past, a Past", "got": "losses of its"}),
        (small_llama(), {"targets": ("head",)}, unknown | {"where": "head, a Head"}),
        (odd, {"targets": ("general",)}, unknown | {"where": "general, a LinearGeneral"}),
        (odd, {"targets": ("einsum",)}, unknown | {"where": "einsum, a Einsum"}),
        (odd, {"targets": ("flax",)}, has_lora),
        (with_lora(own, **OWN), {"targets": ("head",)}, has_lora),
        (odd, {"targets": ("one",)}, {"what": "its kernel is another's too", "got": "other"}),
        (odd, {"targets": ("conv",)}, {"what": "pattern 'conv' matches no Linear"}),
        (gpt(False), {"targets": ("attn/", "atn/qkv")}, {"what": "matches no Linear"} | suffix),
        (gpt(True), {"targets": ("attn/",), "rank": 16}, {"expected": "rank below 16"}),
        (lambda rngs: {}, {"targets": ("a",)}, {"what": "not an NNX model"}),
    ):
        with refused(error=ConfigError, **found):
            with_lora(make, **{"rank": 1} | wrong)(nnx.Rngs(0))


def test_arguments_out_of_range_are_refused():
    no_function = {"what": "not a function that makes a model", "where": "with_lora"}
    rank = {"where": "lora.rank"}
    for wrong, found in (
        ({"make_model": Own}, no_function | {"fix": "lambda rngs"}),
        ({"make_model": Own(nnx.Rngs(0))}, no_function),
        ({"make_model": LinenTransformer()}, no_function | {"fix": "an NNX model"}),
        ({"rank": 0}, rank | {"expected": "1 or more"}),
        ({"rank": True}, rank | {"expected": "a whole number"}),
        ({"rank": 2.0}, rank | {"expected": "a whole number"}),
        ({"alpha": 0}, {"what": "alpha is above 0"}),
        ({"alpha": float("nan")}, {"what": "alpha is above 0"}),
        ({"targets": "attn"}, {"what": "not a sequence of patterns", "fix": "('attn',)"}),
        ({"targets": ()}, {"what": "no targets"}),
        ({"targets": ("(",)}, {"what": "not a regular expression", "where": "targets"}),
        ({"trainable": "head"}, {"what": "not a sequence of patterns", "where": "trainable"}),
        ({"trainable": ("[",)}, {"what": "not a regular expression", "where": "trainable"}),
    ):
        with refused(error=ConfigError, **found):
            with_lora(**{"make_model": gpt(True), "rank": 2, "targets": ("attn",)} | wrong)


# Merged


@settings(deadline=None)
@given(
    stack=st.lists(st.integers(0, 3), max_size=2),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)),
    scale=st.floats(0.01, 100),
    dtypes=st.tuples(*[st.sampled_from(["float32", "bfloat16"])] * 2),
    seed=st.integers(0, 99),
)
def test_a_merge_is_rounded_once(stack, sizes, scale, dtypes, seed):
    (inputs, outputs, rank), random = sizes, np.random.default_rng(seed)
    kernel = random.normal(size=(*stack, inputs, outputs)).astype(dtypes[0])
    a, b = (
        random.normal(size=(*stack, *shape)).astype(dtypes[1])
        for shape in ((inputs, rank), (rank, outputs))
    )
    merged = merge(kernel, a, b, scale=scale)
    exact = kernel.astype(np.float64) + scale * (a.astype(np.float64) @ b.astype(np.float64))
    size = np.abs(kernel.astype(np.float64)) + scale * (
        np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    )
    unit = float(ml_dtypes.finfo(kernel.dtype).eps) / 2
    assert merged.dtype == kernel.dtype
    assert (np.abs(merged.astype(np.float64) - exact) <= unit * np.abs(exact) + 1e-6 * size).all()


def test_jax_arrays_are_merged_in_their_own_sharding():
    random = np.random.default_rng(0)
    kernel, a, b = (
        random.normal(size=shape).astype(np.float32)
        for shape in ((2, 16, 8), (2, 16, 3), (2, 3, 8))
    )
    sharding = jax.NamedSharding(fsdp.make_mesh(data=8), jax.P(None, "data"))
    placed = jax.device_put(kernel.astype(jnp.bfloat16), sharding)
    merged = merge(placed, jnp.asarray(a), jnp.asarray(b), scale=0.5)
    assert merged.sharding == sharding
    np.testing.assert_array_equal(np.asarray(merged), merge(np.asarray(placed), a, b, scale=0.5))
    traced = jax.jit(lambda *parts: merge(*parts, scale=0.5))(kernel, a, b)
    np.testing.assert_allclose(traced, merge(kernel, a, b, scale=0.5), rtol=1e-6, atol=1e-6)
    with refused("shapes that do not fit", error=ConfigError, where="merge"):
        merge(kernel, a, b[:1], scale=0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padded_kernels_are_merged_in_their_own_shape(dtype):
    random = np.random.default_rng(0)
    shapes = (2, 16, 9), (2, 16, 3), (2, 3, 9)
    kernel, a, b = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    kernel = kernel.astype(dtype)
    sharding = jax.NamedSharding(
        fsdp.make_mesh(data=7, devices=jax.devices()[:7]), jax.P(None, None, "data")
    )

    def padded(array):
        stored = np.pad(array, [(0, 0), (0, 0), (0, 5)])
        return Padded(jax.device_put(stored, sharding), array.shape)

    expected = merge(kernel, a, b, scale=0.5)
    merged = merge(padded(kernel), jnp.asarray(a), padded(b), scale=0.5)
    assert isinstance(merged, Padded)
    assert (merged.shape, merged.array.shape) == ((2, 16, 9), (2, 16, 14))
    assert merged.array.sharding.is_equivalent_to(sharding, 3)
    np.testing.assert_allclose(
        np.asarray(merged, np.float32), np.asarray(expected, np.float32), rtol=1e-6, atol=1e-6
    )
    assert not np.asarray(merged.array[..., 9:]).any()
    with refused(
        "shapes that do not fit", error=ConfigError, where="merge"
    ):  # stored arrays as they are
        merge(padded(kernel).array, jnp.asarray(a), jnp.asarray(b), scale=0.5)


def test_merged_paths_name_the_parts_of_each_tensor():
    paths = ["a/bias", "a/kernel", "a/lora_a", "a/lora_b", "b/kernel", "my_lora_a"]
    assert merged_paths(paths) == {
        "a/bias": ("a/bias",),
        "a/kernel": ("a/kernel", "a/lora_a", "a/lora_b"),
        "b/kernel": ("b/kernel",),
        "my_lora_a": ("my_lora_a",),
    }
    assert merged_paths(["kernel", "lora_a", "lora_b"]) == {
        "kernel": ("kernel", "lora_a", "lora_b")
    }
    for missing in ("a/kernel", "a/lora_a", "a/lora_b"):
        with refused(error=ConfigError, got=f"missing: {missing}"):
            merged_paths([path for path in paths if path != missing])


# Saved and loaded


@pytest.mark.long
def test_a_restored_state_goes_on_with_the_same_bits(tmp_path):
    sharded = shard(with_lora(small_llama(), rank=4, targets=("attn/",)))
    step = sharded.make_train_step(next_token_loss)
    state, _ = step(sharded.init(0), BATCH)
    with CheckpointStore(tmp_path) as store:
        store.save(1, sharded.to_checkpoint(state), data={}, metadata={})
        saved, *_ = store.restore(1, sharded.checkpoint_target())
    runs = step(state, BATCH)[0], step(sharded.from_checkpoint(saved), BATCH)[0]
    ends = (jax.device_get((end.params, end.opt_state)) for end in runs)
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_weights_of_the_plain_model_are_loaded_by_path(tmp_path):
    weights = {path: np.asarray(x) for path, x in params_of(small_llama()(nnx.Rngs(7))).items()}
    save_file(weights, tmp_path / "model.safetensors")
    make = with_lora(small_llama(), rank=4, targets=("attn/",))
    sharded = shard(make)
    state = sharded.init(0)
    _, lora = split_lora(state.params)
    wanted, _ = split_lora(sharded.checkpoint_target().params)
    state = dataclasses.replace(
        state, params=unflatten(flatten(import_params(tmp_path, wanted)) | flatten(lora))
    )
    assert jax.tree.structure(state) == jax.tree.structure(sharded.abstract_state())
    logits = sharded.apply(lambda model, tokens: model(tokens))(state, TOKENS[:, :8])
    np.testing.assert_allclose(logits, small_llama()(nnx.Rngs(7))(TOKENS[:, :8]), atol=1e-5)
