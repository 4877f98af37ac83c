"""Units: how parameters are grouped, when gathered copies are dropped, and the model itself.

What is gathered, when and in which dtype is read in traces and lowered text. In
`make test-long` an initialization is compiled, for the values that are drawn.
"""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from reference import CASES, CNN, gpt, traffic
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import GPT, Block, preset
from fsdp_jax.tree import flatten
from fsdp_jax.units.auto_wrap import choose_units
from fsdp_jax.units.nnx import NnxModel

pytestmark = pytest.mark.releases

TOKENS = {"tokens": jax.ShapeDtypeStruct((16, 9), jnp.int32)}


@pytest.fixture(scope="module")
def mesh():
    return fsdp.make_mesh(data=8)


def shard(mesh, model=None, strategy="full_shard", units=(Block,), **settings):
    return fsdp.fully_shard(
        model or gpt(False), optax.adam(1e-3), mesh, strategy, units, min_size=8, **settings
    )


def owners(model, units, stacked=None):
    adapter = NnxModel(model)
    shapes = {path: leaf.shape for path, leaf in flatten(adapter.params).items()}
    return choose_units(adapter.modules, units, shapes, stacked or {})


# Choosing


def test_by_class_the_innermost_unit_owns():
    units = owners(gpt(False), [Block, "MLP"])
    assert units["blocks/0/mlp/up/kernel"] == "blocks/0/mlp"
    assert units["blocks/0/attn/qkv/kernel"] == "blocks/0"
    assert units["embed/embedding"] is None


def test_by_base_class_and_by_name_are_the_same():
    class Mine(Block):
        pass

    assert owners(gpt(False), [nnx.Linear]) == owners(gpt(False), ["Linear"])
    assert owners(gpt(False), [Block]) == owners(gpt(False), "Block")


def test_by_size_small_modules_join_the_one_around():
    small, large = owners(gpt(False), 400), owners(gpt(False), 2100)
    assert small["blocks/0/mlp/up/kernel"] == "blocks/0/mlp/up"
    assert small["embed/embedding"] == "embed"
    assert large["blocks/0/mlp/up/kernel"] == "blocks/0/mlp"
    assert large["embed/embedding"] is None


def test_scan_takes_the_stack_and_model_takes_all():
    stacked = {path: 1 for path in owners(gpt(True), "model") if path.startswith("blocks")}
    assert owners(gpt(True), "scan", stacked)["blocks/mlp/up/kernel"] == "blocks"
    assert owners(gpt(True), "scan", stacked)["ln_f/scale"] is None
    assert set(owners(gpt(True), "model").values()) == {""}


def test_parameters_that_units_share_are_gathered_on_entry():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.one, self.two = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
            self.two.kernel = self.one.kernel

        def __call__(self, x):
            return self.two(self.one(x))

    units = owners(lambda rngs: Tied(rngs), [nnx.Linear])
    assert units == {"one/kernel": None, "one/bias": "one", "two/bias": "two"}


def test_units_that_match_nothing():
    for units, fields in (
        (["Blok"], {"what": "no module of class 'Blok'", "fix": "did you mean 'Block'"}),
        (10**9, {"where": "units.min_params", "got": "1000000000", "fix": "at most"}),
        ("scan", {"what": "no stacked layers in the model", "where": "units='scan'"}),
    ):
        with refused(**fields):
            owners(gpt(False), units)


# Gathering, dropping, gathering again


def gathers(sharded, **settings):
    """{kernel or table: times a step} that it is gathered. (No gradient needs a bias again.)"""
    counts = traffic(sharded, sharded.make_train_step(next_token_loss, **settings), TOKENS)
    one = "all_gather" if settings.get("local_batch") else "optimization_barrier"
    return {
        path: times
        for (operation, path), times in counts.items()
        if operation == one and re.search("kernel|embedding", path)
    }


@pytest.mark.parametrize(
    ("scan", "remat", "local_batch"),
    [
        (True, "none", True),
        (False, "full", False),
        pytest.param(True, "full", False, marks=pytest.mark.long),
        pytest.param(False, "none", False, marks=pytest.mark.long),
        pytest.param(False, "full", True, marks=pytest.mark.long),
    ],
)
def test_full_shard_gathers_in_forward_and_again_in_backward(mesh, scan, remat, local_batch):
    """The control is the strategy that gathers once."""
    model = gpt(scan, layers=3)
    per_unit = gathers(shard(mesh, model, remat=remat), local_batch=local_batch)
    once = gathers(shard(mesh, model, "shard_grad_op", remat=remat), local_batch=local_batch)
    assert set(once.values()) == {1}
    layers = 3 if scan else 1  # a stack is gathered whole, or layer by layer
    assert per_unit == {path: 2 * layers if "blocks" in path else 1 for path in once}


def test_a_sharded_layer_dim_is_refused_where_the_scan_slices_it(mesh):
    rules = [("blocks/mlp/up/kernel", ("data",))]
    config = preset("tiny", vocab_size=32, sequence_length=8, layers=8, width=16, heads=2)
    sharded = shard(mesh, lambda rngs: GPT(config, rngs=rngs), rules=rules)
    for local_batch, what in (
        (True, "a stack of layers is sharded along its layers"),
        (False, "a scan or vmap over layers slices a sharded dim"),
    ):
        with refused(what) as caught:
            sharded.make_train_step(next_token_loss, local_batch=local_batch).lower(TOKENS)
        assert "blocks/mlp/up/kernel" in str(caught.value)


# The model's own view


def test_the_users_classes_are_not_touched(mesh):
    before = dict(vars(Block))
    sharded = shard(mesh)
    sharded.make_train_step(next_token_loss).lower(TOKENS)
    assert dict(vars(Block)) == before
    assert type(sharded.model(sharded.init(0)).blocks[0]) is Block


def test_the_cost_of_laying_out_a_layer_does_not_grow(mesh):
    def calls(layers):
        counted = [0]

        def count(*_):
            counted[0] += 1

        sys.setprofile(count)
        try:
            shard(mesh, gpt(False, layers=layers))
        finally:
            sys.setprofile(None)
        return counted[0]

    calls(2)  # what happens once in a process
    four, eight, sixteen = (calls(layers) for layers in (4, 8, 16))
    assert sixteen - eight < 2.1 * (eight - four)


@pytest.mark.long
def test_random_streams_and_values_are_of_the_plain_model(mesh):
    make_model = gpt(True, dropout=0.5)
    sharded = shard(mesh, make_model)
    model = sharded.model(sharded.init(3))
    plain = make_model(nnx.Rngs(jax.random.split(jax.random.key(3))[0]))
    assert type(model.dropout.rngs) is nnx.RngStream
    drawn, expected = (
        {path: leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(m))}
        for m in (model, plain)
    )
    assert drawn.keys() == expected.keys()
    for path, leaf in drawn.items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, expected[path] = jax.random.key_data(leaf), jax.random.key_data(expected[path])
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-6, err_msg=str(path))


def test_paths_are_the_models_own(mesh):
    nnx_paths = set(shard(mesh).layout.by_path)
    assert {"blocks/0/attn/qkv/kernel", "embed/embedding", "ln_f/scale"} <= nnx_paths
    case = CASES["linen-transformer"]
    linen_paths = set(shard(mesh, case.model, units=case.units, **case.inputs).layout.by_path)
    assert {"Embed_0/embedding", "ScanLinenBlock_0/Dense_0/kernel"} <= linen_paths


def test_frozen_parameters_are_sharded_without_moments(mesh):
    case = CASES["nnx-gpt-scanned"]
    sharded = shard(mesh, case.model, frozen=["embed", "blocks/mlp"])
    assert (
        sharded.layout.by_path["embed/embedding"].bytes_per_device
        < sharded.layout.by_path["embed/embedding"].bytes
    )
    assert not any(
        "mlp" in leaf.path or "embed/" in leaf.path
        for leaf in jax.tree.leaves(sharded.layout.optimizer)
    )


def test_a_model_runs_in_bfloat16_and_its_norms_in_float32(mesh):
    seen = {}

    class Watched(CNN):
        def __call__(self, images):
            seen["in"] = images.dtype
            seen["norm"], seen["conv"] = self.norm.scale.dtype, self.conv.kernel.dtype
            hidden = self.norm(self.conv(images))
            seen["hidden"] = hidden.dtype
            return self.head(nnx.relu(self.wide(nnx.relu(hidden))).mean((1, 2)))

    case = CASES["nnx-cnn-batchnorm"]
    precision = fsdp.Precision(compute="bfloat16", output="float32")
    sharded = shard(mesh, lambda rngs: Watched(rngs=rngs), units="model", precision=precision)

    def loss(model, batch):
        out = model(batch["x"])
        seen["out"] = out.dtype
        return out.sum(), 1

    sharded.make_train_step(loss).trace(case.batch(0))
    names = {key: str(dtype) for key, dtype in seen.items()}
    narrow = dict.fromkeys(("in", "conv", "hidden"), "bfloat16")
    assert names == narrow | {"norm": "float32", "out": "float32"}


KERNELS = ("16x48", "16x64", "64x16")


@pytest.fixture
def mixed(mesh):
    config = preset("tiny", vocab_size=40, sequence_length=8, layers=2, width=16, heads=2)
    return shard(
        mesh, lambda rngs: GPT(config, rngs=rngs), precision=fsdp.Precision(compute="bfloat16")
    )


def test_the_cast_is_of_the_shard_and_fenced_before_the_gather(mixed):
    """With sharding annotations, every weight crosses the barrier in bfloat16 in XLA's program."""
    text = mixed.make_train_step(next_token_loss).lower(TOKENS).as_text()
    fenced = re.findall(r"stablehlo.optimization_barrier %\S+ : tensor<(\S+)x(bf16|f32)>", text)
    kernels = [dtype for shape, dtype in fenced if shape in KERNELS]
    assert kernels
    assert set(kernels) == {"bf16"}


@pytest.mark.parametrize(
    "prefetch",
    ["pre", *(pytest.param(name, marks=pytest.mark.long) for name in ("none", "post"))],
)
def test_an_explicit_gather_sends_the_shard_in_bfloat16(mixed, prefetch):
    sharded = mixed.on(mixed.layout.mesh, prefetch=prefetch)
    lowered = sharded.make_train_step(next_token_loss, local_batch=True).lower(TOKENS)
    gathered = re.findall(r"stablehlo.all_gather.*-> tensor<(\S+)x(bf16|f32)>", lowered.as_text())
    kernels = {shape: dtype for shape, dtype in gathered if shape in KERNELS}
    assert kernels == dict.fromkeys(KERNELS, "bf16")
    # In a profile the matmuls of a unit bear its path, forward and backward.
    named = set(re.findall(r'"([^"]*dot_general)"', lowered.as_text(debug_info=True)))
    of_unit = {name for name in named if "blocks" in name}
    assert {"checkpoint" in name for name in of_unit} == {True, False}
