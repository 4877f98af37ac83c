"""Units: which parameters are gathered together, when the copy is dropped, and what the model is left to know of it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from reference import CASES, CNN, LinenTransformer, gpt, linen_loss

import fsdp_jax as fsdp
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import GPT, Block, preset
from fsdp_jax.nnx import NnxModel
from fsdp_jax.units import choose_units

pytestmark = pytest.mark.core

TOKENS = {"tokens": jax.ShapeDtypeStruct((16, 9), jnp.int32)}


@pytest.fixture(scope="module")
def mesh():
    return fsdp.make_mesh(data=8)


def shard(mesh, model=None, strategy="full_shard", units=(Block,), **settings):
    return fsdp.fully_shard(model or gpt(False), optax.adam(1e-3), mesh, strategy, units, min_size=8, **settings)


def owners(model, units, stacked=None):
    adapter = NnxModel(model)
    sizes = {path: int(np.prod(leaf.shape)) for path, leaf in _flat(adapter.params).items()}
    return choose_units(adapter.modules, units, sizes, stacked or {})


def _flat(tree):
    from fsdp_jax.tree import flatten

    return flatten(tree)


# Choosing


def test_by_class_the_innermost_unit_owns():
    found = owners(gpt(False), [Block, "MLP"])
    assert found["blocks/0/mlp/up/kernel"] == "blocks/0/mlp"
    assert found["blocks/0/attn/qkv/kernel"] == "blocks/0"
    assert found["embed/embedding"] is None


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


def test_what_two_units_share_is_gathered_once_on_entry():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.one, self.two = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
            self.two.kernel = self.one.kernel

        def __call__(self, x):
            return self.two(self.one(x))

    found = owners(lambda rngs: Tied(rngs), [nnx.Linear])
    assert found == {"one/kernel": None, "one/bias": "one", "two/bias": "two"}


@pytest.mark.parametrize(
    ("units", "said"),
    [
        (["Blok"], "no module of class 'Blok' in the model\n.*units\n.*did you mean 'Block'"),
        (10**9, "no module has that many parameters\n.*units.min_params\n.*1000000000\n.*at most"),
        ("scan", "no stacked layers in the model\n.*units='scan'"),
    ],
)
def test_units_that_fit_nothing(units, said):
    with pytest.raises(ValueError, match=said):
        owners(gpt(False), units)


# Gathering, dropping, gathering again


def gathers(sharded, loss, batch):
    """{shape of the result: how many all-gathers make it} in the compiled step."""
    text = sharded.train_step(loss).compile(batch).as_text()
    found = re.findall(r"= \(?\w+\[([\d,]+)\][^=]* all-gather(?:-start)?\(", text)
    return {shape: found.count(shape) for shape in found}


@pytest.mark.parametrize("remat", ["none", "full"])
def test_full_shard_gathers_in_forward_and_again_in_backward(mesh, remat):
    """The control is the strategy that gathers once."""
    config = preset("tiny", vocab_size=40, sequence_length=8, layers=2, width=16, heads=2, scan_layers=False)

    def model(rngs):
        return GPT(config, rngs=rngs)

    per_unit = gathers(shard(mesh, model, remat=remat), next_token_loss, TOKENS)
    once = gathers(shard(mesh, model, "shard_grad_op", remat=remat), next_token_loss, TOKENS)
    for kernel in ("16,48", "48,16"):  # XLA picks the layout
        assert per_unit.get(kernel, 0) == 2 * once.get(kernel, 0)
    assert once.get("16,48", 0) + once.get("48,16", 0) == 2, "one qkv kernel a layer"


def test_a_parameter_read_outside_its_unit_is_an_error(mesh):
    def peeking(model, batch):
        return jnp.sum(model.blocks[0].mlp.up.kernel[...] * 1.0), 1

    with pytest.raises(ValueError, match=r"read outside its unit\n.*blocks/0/mlp/up/kernel\n.*blocks/0"):
        shard(mesh).train_step(peeking).lower(TOKENS)


def test_a_sharded_layer_dim_is_refused_where_the_scan_slices_it(mesh):
    rules = [("blocks/mlp/up/kernel", ("data",))]
    config = preset("tiny", vocab_size=32, sequence_length=8, layers=8, width=16, heads=2)
    sharded = shard(mesh, lambda rngs: GPT(config, rngs=rngs), rules=rules)
    with pytest.raises(ValueError, match=r"a layer scan slices a sharded dim\n.*blocks/mlp/up/kernel"):
        sharded.train_step(next_token_loss).lower(TOKENS)


# What the model is left to know


def test_the_users_classes_are_not_touched(mesh):
    before = dict(vars(Block))
    sharded = shard(mesh)
    sharded.train_step(next_token_loss).lower(TOKENS)
    assert dict(vars(Block)) == before
    assert type(sharded.model(sharded.init(0)).blocks[0]) is Block


def test_paths_are_the_models_own(mesh):
    nnx_paths = set(shard(mesh).layout.by_path)
    assert {"blocks/0/attn/qkv/kernel", "embed/embedding", "ln_f/scale"} <= nnx_paths
    case = CASES["linen-transformer"]
    linen_paths = set(shard(mesh, case.model, units=case.units, **case.inputs).layout.by_path)
    assert {"Embed_0/embedding", "ScanLinenBlock_0/Dense_0/kernel"} <= linen_paths


def test_unrolled_linen_layers_are_units_too(mesh):
    sharded = shard(
        mesh, LinenTransformer(scan=False), units=["LinenBlock"], inputs=CASES["linen-transformer"].inputs["inputs"]
    )
    assert sharded.units["layer_0/Dense_0/kernel"] == "layer_0"
    step = sharded.train_step(linen_loss)
    _, metrics = step(sharded.init(0), CASES["linen-transformer"].batch(0))
    assert np.isfinite(float(metrics["loss"]))


def test_frozen_parameters_are_sharded_and_stay(mesh):
    case = CASES["nnx-gpt-scanned"]
    sharded = shard(mesh, case.model, frozen=["embed", "blocks/mlp"])
    assert sharded.layout.by_path["embed/embedding"].bytes_per_device < sharded.layout.by_path["embed/embedding"].bytes
    assert not any("mlp" in leaf.path or "embed/" in leaf.path for leaf in jax.tree.leaves(sharded.layout.optimizer))
    state = sharded.init(0)
    before = jax.device_get(state.params)
    state, _ = sharded.train_step(case.loss)(state, case.batch(0))
    after = jax.device_get(state.params)
    np.testing.assert_array_equal(before["blocks"]["mlp"]["up"]["kernel"], after["blocks"]["mlp"]["up"]["kernel"])
    assert (before["blocks"]["attn"]["qkv"]["kernel"] != after["blocks"]["attn"]["qkv"]["kernel"]).any()


def test_an_unmodified_model_runs_in_bfloat16_and_its_norms_in_float32(mesh):
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

    sharded.train_step(loss).lower(case.batch(0))
    names = {key: str(dtype) for key, dtype in seen.items()}
    assert names == {
        "in": "bfloat16", "norm": "float32", "conv": "bfloat16", "hidden": "bfloat16", "out": "float32"
    }  # fmt: skip


def test_dropout_differs_between_devices_where_each_sees_its_own_batch():
    case = CASES["nnx-gpt-scanned"]
    sharded = shard(fsdp.make_mesh(data=8), gpt(True, dropout=0.5))

    def loss(model, batch):
        return next_token_loss(model, batch, train=True)

    step = sharded.train_step(loss, accumulation=2, deferred_reduction=True)
    same = {key: np.repeat(value[:1], 32, axis=0) for key, value in case.batch(0).items()}
    state, first = step(sharded.init(0), same)
    _, second = step(state, same)
    assert np.isfinite(float(first["loss"]))
    assert float(first["loss"]) != float(second["loss"])


def test_the_cast_is_pinned_to_the_shard_and_fenced_before_the_gather(mesh):
    """In the program that XLA is given: every weight crosses the barrier in bfloat16."""
    precision = fsdp.Precision(compute="bfloat16")
    config = preset("tiny", vocab_size=40, sequence_length=8, layers=2, width=16, heads=2)
    sharded = shard(mesh, lambda rngs: GPT(config, rngs=rngs), precision=precision)
    text = sharded.train_step(next_token_loss).lower(TOKENS).as_text()
    fenced = re.findall(r"stablehlo.optimization_barrier %\S+ : tensor<(\S+)x(bf16|f32)>", text)
    kernels = [dtype for shape, dtype in fenced if shape in ("16x48", "16x64", "64x16", "40x16")]
    assert kernels
    assert set(kernels) == {"bf16"}
