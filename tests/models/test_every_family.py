"""What every family guarantees: blocks, gradients, dtypes, dropout, losses, FLOPs, sharding.

What is special to one is in its own file; weights under Hugging Face's names are in `weights/`.
Compiles small models for their numbers, once each (`family_cases.small`).
"""

import re
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import (
    BFLOAT16_EACH,
    BFLOAT16_MEAN,
    CASES,
    FIRST,
    cases_of,
    config_of,
    draw_batch,
    logits_of,
    small,
    training_case,
)
from flax import nnx
from reference import check, train, train_unsharded

import fsdp_jax as fsdp
from fsdp_jax.models import FAMILIES
from fsdp_jax.models.attention import AttentionKind

# tied and untied heads differ in the loss and the dtypes alone
BLOCKS = [name for name in CASES if not name.endswith(("tied", "untied"))]
TEXT = cases_of("text", "text to text")
EVERY = pytest.mark.parametrize("name", CASES)


def quick(names, *each_run):
    """Parametrizes by names; those not in `each_run` are `long`."""
    marks = {name: [pytest.mark.long] * (name not in each_run) for name in names}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=marks[n]) for n in names])


ATTENTION = r"(attn|cross)/(qkv|q|k|v|o|out)$"


def flat(params: Any) -> dict[str, np.ndarray]:
    leaves = nnx.to_flat_state(params)
    return {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in leaves}


@quick(BLOCKS, "gpt2")
def test_unrolled_blocks_compute_what_scanned_blocks_do(name):
    """The logits, the loss and every gradient, of which none is zero."""
    scanned, unrolled = small(name), small(name, scan_layers=False)
    batch = scanned.batch
    expected, got = (model.logits(model.params, batch) for model in (scanned, unrolled))
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    (loss, gradients), (same_loss, other) = (
        model.loss_and_gradients(model.params, batch) for model in (scanned, unrolled)
    )
    np.testing.assert_allclose(same_loss, loss, rtol=1e-5)
    unrolled_gradients = flat(other)
    for path, leaf in flat(gradients).items():
        stack = re.search(r"(?:^|/)(?:class_)?blocks/", path)
        layers = leaf if stack else leaf[None]
        for i, layer in enumerate(layers):
            same = f"{path[: stack.end()]}{i}/{path[stack.end() :]}" if stack else path
            scale = np.abs(layer).max()
            np.testing.assert_allclose(
                unrolled_gradients[same], layer, rtol=1e-3, atol=1e-4 * scale + 1e-6, err_msg=same
            )
            # adding to every key or score changes no weight: these gradients are rounding alone
            if not re.search(r"attn/(k|proj_l)/bias$", path):
                assert scale > 1e-6, same


@quick([name for name in TEXT if name in FIRST.values()], "gpt2", "t5")
def test_a_future_token_does_not_change_past_logits(name):
    """And every input token of an encoder changes all of them."""
    model = small(name)
    key = "targets" if "targets" in model.batch else "tokens"
    before = model.logits(model.params, model.batch)

    def changed(key, column):
        tokens = model.batch[key].copy()
        tokens[:, column] = (tokens[:, column] + 1) % model.config.vocab_size
        return model.logits(model.params, model.batch | {key: tokens})

    after = changed(key, 5)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.all(np.any(before[:, 5:] != after[:, 5:], axis=-1))
    if key == "targets":
        assert np.all(np.any(before != changed("inputs", 2), axis=-1))


@quick([name for name in cases_of("text") if name in FIRST.values()], "gpt2")
def test_packed_documents_are_as_if_alone(name):
    model = small(name)
    tokens = model.batch["tokens"]
    packed = np.concatenate([tokens[0, :5], tokens[1, :3]])[None].repeat(2, 0)
    settings = {
        "segments": jnp.asarray([[1] * 5 + [2] * 3] * 2, jnp.int32),
        "positions": jnp.asarray([[*range(5), *range(3)]] * 2, jnp.int32),
    }
    together = jax.jit(lambda params: model.model(params)(packed, **settings))(model.params)[0]
    apart = model.logits(model.params, model.batch)
    np.testing.assert_allclose(together[:5], apart[0, :5], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(together[5:], apart[1, :3], rtol=1e-4, atol=1e-4)
    joined = model.batch | {"tokens": np.pad(packed, ((0, 0), (0, 1)))}
    assert np.abs(together - model.logits(model.params, joined)[0])[5:].max() > 1e-2


@quick(BLOCKS, "gpt2")
@pytest.mark.parametrize("keep_norms", [True, pytest.param(False, marks=pytest.mark.long)])
def test_bfloat16_weights_give_a_bfloat16_stream(name, keep_norms):
    """The scan of the blocks checks that none of them widens it, float32 norms neither."""
    model = small(name)
    expected = model.logits(model.params, model.batch)

    def cast(path, leaf):
        is_norm = any("norm" in str(key) or "ln_" in str(key) for key in path)
        return leaf if is_norm and keep_norms else leaf.astype(jnp.bfloat16)

    params = jax.tree_util.tree_map_with_path(cast, model.params)
    logits = model.logits(params, model.batch)
    assert keep_norms or logits.dtype == jnp.bfloat16
    error = np.abs(logits.astype(jnp.float32) - expected)
    assert np.mean(error) < BFLOAT16_MEAN[name] * np.std(expected)
    assert np.max(error) < BFLOAT16_EACH.get(name, np.inf)


@EVERY
def test_a_compute_dtype_in_the_config_keeps_the_parameters(name):
    family, config = config_of(name, dtype="bfloat16")
    model = nnx.eval_shape(lambda: family.model(config, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(model)
    batch = draw_batch(family, config)
    out = jax.eval_shape(lambda params: logits_of(nnx.merge(graph, params), batch), params)
    assert out.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


DROPPING = [name for name in FIRST.values() if hasattr(small(name).config, "dropout")]


@pytest.mark.parametrize(
    ("name", "scan_layers"),
    [
        ("gpt2", True),
        pytest.param("gpt2", False, marks=pytest.mark.long),
        pytest.param("t5", True, marks=pytest.mark.long),
        *(
            pytest.param(name, True, marks=pytest.mark.exhaustive)
            for name in DROPPING
            if name not in ("gpt2", "t5")
        ),
    ],
)
def test_dropout_differs_across_calls_and_deterministic_repeats(name, scan_layers):
    family, config = config_of(name, scan_layers=scan_layers, dropout=0.5)
    batch = small(name).batch
    graph, state = nnx.split(family.model(config, rngs=nnx.Rngs(params=0, dropout=1)))

    @jax.jit
    def run(state):
        model = nnx.merge(graph, state)
        dropped, plain = (logits_of(model, batch, deterministic=each) for each in (False, True))
        losses = [family.loss(model, batch, train=train)[0] for train in (True, False)]
        return (dropped, plain, losses), nnx.state(model)

    (dropped, plain, losses), after = run(state)
    assert losses[0] != losses[1]
    (dropped_again, plain_again, _), _ = run(after)
    assert not np.array_equal(dropped, dropped_again), "the state has advanced"
    np.testing.assert_array_equal(plain, plain_again)
    np.testing.assert_array_equal(dropped, run(state)[0][0])


@EVERY
def test_a_model_without_dropout_has_no_state_but_its_parameters(name):
    assert not jax.tree.leaves(small(name).rest)


@quick(TEXT, "gpt2")
def test_a_chunked_loss_is_the_loss(name):
    """With its gradients, for chunks of which the vocabulary is no multiple."""
    model = small(name)

    def loss(params, batch):
        return model.family.loss(model.model(params), batch, chunk=5)[0]

    chunked = jax.jit(jax.value_and_grad(loss))(model.params, model.batch)
    expected = model.loss_and_gradients(model.params, model.batch)
    for got, value in zip(jax.tree.leaves(chunked), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-4)


@quick(list(CASES), "gpt2", "t5")
def test_flops_are_three_times_what_the_forward_pass_does(name):
    family, config = config_of(name)
    variant = {key: getattr(config, key) for key in ("tie_head", "gated") if hasattr(config, key)}
    preset = next(iter(family.presets))
    config = family.preset(preset, scan_layers=False, **variant)
    if hasattr(config, "targets_length"):
        config = family.preset(preset, scan_layers=False, targets_length=64, **variant)
    graph, params = nnx.split(nnx.eval_shape(lambda: family.model(config, rngs=nnx.Rngs(0))))
    inputs = {
        "text to text": [jax.ShapeDtypeStruct((1, length), jnp.int32) for length in (128, 64)],
        "images": [jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)],
        "text": [jax.ShapeDtypeStruct((1, 128), jnp.int32)],
    }[family.task.name]
    lowered = jax.jit(lambda params, *inputs: nnx.merge(graph, params)(*inputs)).lower(
        params, *inputs
    )
    # the compiler also counts softmax, activations and norms, a few per cent at this width
    assert lowered.cost_analysis()["flops"] == pytest.approx(family.flops(config) / 3, rel=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_adapts_all_projections_of_attention(family):
    paths = {
        "/".join(map(str, path[:-1]))
        for path, leaf in nnx.to_flat_state(small(FIRST[family]).params)
        if path[-1] == "kernel"
    }
    patterns = FAMILIES[family].lora_targets
    adapted = {path for path in paths if any(re.search(pattern, path) for pattern in patterns)}
    assert adapted == {path for path in paths if re.search(ATTENTION, path)} != set()


def test_a_family_names_attention_that_there_is():
    for family in FAMILIES.values():
        assert set(family.unsupported_attention) <= set(get_args(AttentionKind)) - {"blockwise"}


def test_the_documentation_has_a_row_for_every_family():
    page = (Path(__file__).parents[2] / "docs" / "models-and-data.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|.*?\|(.*?)\|", page, re.M))
    for name, family in FAMILIES.items():
        blocks = re.findall(r"`(\w+)`", rows.get(name, ""))
        assert blocks == [block.__name__ for block in family.blocks], name


# Sharded: gpt and llama are trained so by the other tests

OTHERS = [name for family, name in FIRST.items() if family not in ("gpt", "llama")]


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    ("scan_layers", "prefetch", "local_batch"),
    [
        (True, "pre", True),
        *(
            pytest.param(*each, False, marks=pytest.mark.exhaustive)
            for each in ((True, "none"), (False, "pre"))
        ),
    ],
)
def test_sharded_training_is_training(name, scan_layers, prefetch, local_batch):
    case = training_case(name if scan_layers or name != "t5" else "t5-v1_1", scan_layers)
    mesh = fsdp.make_mesh(data=8)
    got, step = train(case, mesh, steps=2, local_batch=local_batch, prefetch=prefetch)
    check(got, train_unsharded(case, steps=2))
    gathered = {path for path, comm in step.plan.comms.items() if comm.unit is not None}
    stacks = {re.search(r".*?blocks/|$", path)[0] for path in got[1]} - {""}
    assert {re.search(r".*?blocks/|$", path)[0] for path in gathered} == stacks
    report = step.report.prefetch
    assert prefetch == "none" or (report.prefetched == gathered and not report.not_prefetched)


@pytest.mark.long
def test_sharded_training_in_bfloat16_stays_near():
    case = training_case("vit")
    precision = fsdp.Precision(compute="bfloat16")
    got, _ = train(case, fsdp.make_mesh(data=8), steps=2, precision=precision)
    np.testing.assert_allclose(got[0], train_unsharded(case, steps=2)[0], rtol=2e-2)


@pytest.mark.long
def test_sharded_training_with_recomputation():
    settings = {"accumulation": 2, "local_batch": True, "prefetch": "pre", "remat": "full"}
    case = training_case("t5")
    got, _ = train(case, fsdp.make_mesh(data=8), steps=2, **settings)
    check(got, train_unsharded(case, 2, steps=2))
