"""Sums over examples are proven so, and what mixes examples is refused by name."""

from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from fsdp_jax.examples import Verdict, sums_over_examples
from fsdp_jax.examples_rules import CHECKS, Kind

pytestmark = pytest.mark.core

B, T, D, PARTS = 12, 4, 6, 3


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def batch_of(rows=B, seed=0):
    random = np.random.default_rng(seed)
    return {
        "x": random.integers(-2, 3, (rows, T, D)).astype(np.float32),
        "v": random.integers(-2, 3, (rows, D)).astype(np.float32),
        "t": random.integers(0, D, rows).astype(np.int32),
        "image": random.integers(-2, 3, (rows, 4, 4, 2)).astype(np.float32),
    }


def weights_of():
    random = np.random.default_rng(1)
    shapes = {"w": (D, D), "q": (D, 3 * D), "table": (D, D), "conv": (3, 3, 2, 4), "deep": (3, 3, 1, 4)}
    return {name: random.integers(-2, 3, shape).astype(np.float32) for name, shape in shapes.items()}


def judged(loss, weights=None, batch=None, *, gradients=True, parts=PARTS) -> Verdict:
    """The verdict on `loss(weights, batch) -> (sum, count)`, with its gradients."""

    def fn(batch, weights):
        if not gradients:
            return loss(weights, batch), ()
        (total, count), slope = jax.value_and_grad(loss, has_aux=True, allow_int=True)(weights, batch)
        return (total, jnp.asarray(count, jnp.float32), slope), ()

    return sums_over_examples(fn, abstract(batch or batch_of()), weights or weights_of(), parts=parts)


def holds(loss, weights, batch, parts=PARTS):
    """Whether it is true, by running it."""
    pieces = [jax.tree.map(lambda x, i=i: np.split(x, parts)[i], batch) for i in range(parts)]
    whole = jax.tree.map(np.float64, jax.jit(loss)(weights, batch))
    added = jax.tree.map(lambda *xs: sum(map(np.float64, xs)), *[jax.jit(loss)(weights, piece) for piece in pieces])
    return all(np.allclose(a, b, rtol=1e-4, atol=1e-3) for a, b in zip(whole, added, strict=True))


def attention(w, b):
    q, k, v = (part.reshape(-1, T, 2, D // 2) for part in jnp.split(b["x"] @ w["q"], 3, axis=-1))
    mask = jnp.arange(T)[None] <= b["t"][:, None]
    out = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None, :])
    return jnp.where(mask[..., None, None], out, 0).sum(), mask.sum()


def patches(w, b):
    x = b["image"].reshape(-1, 2, 2, 2, 2, 2).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 4, 8)
    x = x + jnp.concatenate([w["table"], w["table"]], 1)[:4, :8][None]
    return jnp.square(jax.nn.softmax(x)).sum(), 1.0 * x.shape[0] * x.shape[1]


def flat_cross_entropy(w, b):
    logits = (b["x"] @ w["w"]).reshape(-1, D)
    labels = jnp.repeat(b["t"], T)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.sum(), losses.size


def convolved(w, b, kernel="conv", groups=1):
    x = lax.conv_general_dilated(
        b["image"], w[kernel], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )
    x = nn.max_pool(jax.nn.relu(x), (2, 2), (2, 2)) + nn.avg_pool(x, (2, 2), (2, 2))
    return (x**2).sum(), x.shape[0]


def looped(w, b):
    def body(carry, layer):
        h, total = carry
        h = jnp.tanh(h @ layer)
        return (h, total + h.sum()), h

    layers = jnp.stack([w["w"], w["table"]])
    (h, total), hs = lax.scan(jax.checkpoint(body), (b["v"], 0.0), layers)
    h = lax.fori_loop(0, 3, lambda i, h: jnp.where(i > 1, h, 2 * h), h)
    return total + lax.cond(w["w"][0, 0] > 0, jnp.sum, lambda h: 3 * jnp.sum(h), h) + hs.sum(), float(h.shape[0])


def dropped(w, b):
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, b["v"].shape)
    return jnp.where(keep, b["v"] @ w["w"], 0).sum(), keep.sum()


def picked(w, b):
    logp = jax.nn.log_softmax(b["v"] @ w["w"])
    return -logp[jnp.arange(logp.shape[0]), b["t"]].sum(), logp.shape[0]


def placed(w, b):
    hot = jnp.zeros_like(b["v"]).at[jnp.arange(b["v"].shape[0]), b["t"]].set(1.0)
    return (hot * (b["v"] @ w["w"])).sum(), hot.sum()


def sorted_within(w, b):
    x = jnp.sort(b["x"], axis=1) + jnp.cumsum(b["x"], axis=1) + jnp.roll(b["x"], 1, axis=1) + b["x"][:, ::-1]
    best, at = lax.top_k(x @ w["w"], 2)
    return best.sum() + x.max(1).sum() + x[:, jnp.array([0, 2]), :].sum(), (at >= 0).sum()


def updated(w, b):
    x = lax.dynamic_update_slice(b["x"], b["v"][:, None, :] @ w["w"], (0, 1, 0))
    x = lax.dynamic_slice_in_dim(x, 1, 2, axis=1)
    return (jnp.pad(x, ((0, 0), (1, 1), (0, 0)), constant_values=3.0) ** 2).sum(), x.size


PROVEN = {
    "linear": lambda w, b: ((b["v"] @ w["w"]).sum(), b["v"].shape[0]),
    "mlp": lambda w, b: ((jax.nn.gelu(b["x"] @ w["w"]) @ w["table"]).sum(), float(b["x"].shape[0] * T)),
    "attention with padding": attention,
    "patchify": patches,
    "labels flattened with the batch": flat_cross_entropy,
    "one-hot": lambda w, b: (
        optax.softmax_cross_entropy(b["v"] @ w["w"], jax.nn.one_hot(b["t"], D)).sum(), b["t"].size),
    "convolution": convolved,
    "depthwise convolution": lambda w, b: convolved(w, b, "deep", 2),
    "loops and branches": looped,
    "embedding": lambda w, b: ((w["table"][b["t"]] ** 2).sum(), jnp.ones_like(b["t"]).sum()),
    "rows by their position": picked,
    "rows written at their position": placed,
    "segment sum": lambda w, b: ((jax.ops.segment_sum(b["v"] @ w["w"], b["t"], D) * w["table"]).sum(), b["t"].size),
    "vmap of a loss for one example": lambda w, b: (
        jax.vmap(lambda v, t: (v @ w["w"])[t] + lax.dynamic_index_in_dim(v, t, keepdims=False))(b["v"], b["t"]).sum(),
        b["t"].size),
    "sorts and scans within an example": sorted_within,
    "writes within an example": updated,
    "sums of sums": lambda w, b: (((b["x"].sum(0) @ w["w"]).sum(0)[None] @ w["table"] / 2).sum() * 3, b["t"].size),
    "per-example statistics": lambda w, b: (
        (jax.nn.standardize(b["x"] @ w["w"], axis=(1, 2)) ** 3).sum(), b["x"].shape[0]),
    "einsum": lambda w, b: (jnp.einsum("btd,bsd,de->bts", b["x"], b["x"], w["w"]).sum(), b["x"].shape[0]),
    "printed": lambda w, b: (jax.debug.print("{}", b["t"].sum()) or (b["v"] @ w["w"]).sum(), b["t"].size),
}  # fmt: skip

BARE = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
NOT_TRUE = {
    "centred": (lambda w, b: (((b["v"] - b["v"].mean(0)[None]) ** 2 @ w["w"]).sum(), 1.0 * len(b["v"])), "divides by"),
    "meets the sum": (lambda w, b: ((b["v"] * b["v"].sum()).sum(), len(b["v"])), "together with a sum"),
    "given back": (lambda w, b: ((b["v"] ** jnp.broadcast_to(jnp.sum(b["v"]), b["v"].shape)).sum(), 1.0 * len(b["v"])),
                   "back to each"),
    "mean": (lambda w, b: ((b["v"] @ w["w"]).mean(), 1.0 * len(b["v"])), "divides by the number of examples"),
    "weighted by 1/B": (lambda w, b: ((b["v"] @ w["w"] * (1 / len(b["v"]))).sum(), len(b["v"])), "divides by"),
    "weighted by log B": (lambda w, b: ((b["v"] * np.log(len(b["v"]))).sum(), len(b["v"])), "computes with"),
    "power B": (lambda w, b: (lax.integer_pow(b["v"], len(b["v"])).sum(), len(b["v"])), "depends on the number"),
    "contrastive": (lambda w, b: (jax.nn.logsumexp(b["v"] @ b["v"].T, axis=1).sum(), len(b["v"])), "every other"),
    "max": (lambda w, b: (b["v"].max(0).sum(), len(b["v"])), "reduce_max over the examples"),
    "squared sum": (lambda w, b: ((b["v"] @ w["w"]).sum() ** 2, len(b["v"])), "not the sum of its parts"),
    "penalty": (lambda w, b: ((b["v"] @ w["w"]).sum() + 0.01 * jnp.sum(w["w"] ** 2), len(b["v"])), "every device"),
    "only a penalty": (lambda w, b: (jnp.sum(w["w"] ** 2), len(b["v"])), "does not depend on the batch"),
    "constant count": (lambda w, b: ((b["v"] @ w["w"]).sum(), 1.0), "does not depend on the batch"),
    "penalty in a loop": (lambda w, b: (lax.fori_loop(0, 3, lambda i, s: s + b["v"].sum(), 1.0), len(b["v"])),
                          "every device"),
    "sort": (lambda w, b: ((jnp.sort(b["v"], 0) * b["v"]).sum(), len(b["v"])), "sort over the examples"),
    "roll": (lambda w, b: ((jnp.roll(b["v"], 1, 0) * b["v"]).sum(), len(b["v"])), "number of examples"),
    "flip": (lambda w, b: ((b["v"][::-1] * b["v"]).sum(), len(b["v"])), "rev over the examples"),
    "cumsum": (lambda w, b: (jnp.cumsum(b["v"], 0).sum(), len(b["v"])), "cumsum over the examples"),
    "first": (lambda w, b: (b["v"][0].sum(), len(b["v"])), "some of the examples"),
    "first by an index": (lambda w, b: (b["v"][jnp.int32(w["w"][0]) % 2].sum(), len(b["v"])), "number of examples"),
    "first, dynamically": (lambda w, b: (lax.dynamic_slice_in_dim(b["v"], 0, 2).sum(), len(b["v"])), "some of the"),
    "every second": (lambda w, b: (b["v"][:, None][::3].sum(), len(b["v"])), "of the"),
    "overwritten": (lambda w, b: (lax.dynamic_update_slice(b["v"], jnp.ones((1, D)), (0, 0)).sum(), len(b["v"])),
                    "some of the examples"),
    "set": (lambda w, b: (b["v"].at[0].set(9.0).sum(), len(b["v"])), "some of the examples"),
    "first by a bare index": (lambda w, b: (b["v"].at[jnp.int32(w["w"][0]) % 2].get(**BARE).sum(), len(b["v"])),
                              "some of the examples"),
    "permuted": (lambda w, b: ((b["v"].at[b["t"] % 4].get(**BARE) * b["v"]).sum(), len(b["v"])), "some examples by"),
    "scattered": (lambda w, b: ((jnp.zeros_like(b["v"]).at[b["t"] % 4].add(b["v"], **BARE) * b["v"]).sum(),
                                len(b["v"])), "some examples by others"),
    "last one wins": (lambda w, b: (jnp.zeros((D, D)).at[b["t"]].set(b["v"]).sum(), len(b["v"])), "one another"),
    "segment max": (lambda w, b: (jnp.zeros((D, D)).at[b["t"]].max(b["v"]).sum(), len(b["v"])), "one another"),
    "first places": (lambda w, b: (
        (jnp.zeros((40, D)).at[: len(b["v"])].add(b["v"]) * jnp.arange(40.0)[:, None]).sum(), len(b["v"])), "one ano"),
    "table by position": (lambda w, b: ((b["v"] * jnp.tile(w["w"], (4, 1))[: len(b["v"])]).sum(), len(b["v"])),
                          "by the position"),
    "position": (lambda w, b: ((b["v"] * jnp.arange(len(b["v"]))[:, None]).sum(), len(b["v"])), "take_along_axis"),
    "position in a constant": (lambda w, b: ((b["v"] * np.arange(len(b["v"]))[:, None]).sum(), len(b["v"])),
                               "by the position"),
    "position into a table": (lambda w, b: (jnp.tile(w["w"], (4, 1))[jnp.arange(len(b["v"])), b["t"]].sum(),
                                            len(b["v"])), "by the position"),
    "position into other rows": (lambda w, b: (
        b["x"].reshape(-1, D)[jnp.arange(len(b["v"])), b["t"]].sum(), len(b["v"])), "by the position"),
    "written to other rows": (lambda w, b: (
        (jnp.zeros((len(b["v"]) * T, D)).at[jnp.arange(len(b["v"])), b["t"]].set(1.0) * b["x"].reshape(-1, D)).sum(),
        len(b["v"])), "some of the examples"),
    "minor part of a dim": (lambda w, b: (
        (jnp.cumsum(b["x"].transpose(1, 0, 2).reshape(-1, D).reshape(2, -1, D), 1)).sum(), len(b["v"])), "reshapes"),
    "halves": (lambda w, b: (b["v"].reshape(2, -1, D).prod(0).sum(), len(b["v"])), "reshapes"),
    "padded": (lambda w, b: (jnp.pad(b["v"], ((1, 1), (0, 0)), constant_values=2.0).sum(), len(b["v"])), "the example"),
    "doubled": (lambda w, b: ((jnp.concatenate([b["v"], b["v"][::-1]]) ** 3 * 2).max(0).sum(), len(b["v"])),
                "the examples"),
    "smoothed": (lambda w, b: (
        lax.reduce_window(b["v"], -jnp.inf, lax.max, (2, 1), (1, 1), "SAME").sum(), len(b["v"])), "window"),
    "convolved over": (lambda w, b: (
        lax.conv_general_dilated(b["x"].transpose(1, 2, 0), jnp.ones((2, D, 3)), (1,), "SAME").max(0).sum(),
        len(b["v"])), "convolves over the examples"),
    "examples as kernels": (lambda w, b: (
        (lax.conv_general_dilated(jnp.ones((2, D, 8)), b["x"].transpose(0, 2, 1), (1,), "VALID").max(1)).sum(),
        len(b["v"])), "convolves over the examples"),
    "best examples": (lambda w, b: (lax.top_k(b["v"].T, 2)[0].sum(), len(b["v"])), "top_k over the examples"),
    "four copies": (lambda w, b: (
        (jnp.concatenate([b["v"]] * T) * b["x"].reshape(-1, D)).sum(), len(b["v"])), "concatenate over the examples"),
    "the first of many": (lambda w, b: (
        (b["x"].reshape(-1, D)[: len(b["v"])] * b["v"]).sum(), len(b["v"])), "some of the examples"),
    "the third of many": (lambda w, b: (
        (lax.dynamic_slice_in_dim(b["x"].reshape(-1, D), 3, len(b["v"])) * b["v"]).sum(), len(b["v"])), "some of the"),
    "balance": (lambda w, b: (
        (jax.nn.softmax(b["v"] @ w["w"]).mean(0) ** 2).sum(), len(b["v"])), "divides by the number of examples"),
    "decides": (lambda w, b: (lax.cond(b["v"].sum() > 0, jnp.sum, jnp.max, b["v"]), len(b["v"])), "not the sum"),
    "loops until": (lambda w, b: (
        lax.while_loop(lambda s: s < 50, lambda s: s + jnp.abs(b["v"]).sum(), 0.0), len(b["v"])), "not the sum"),
    "another function": (lambda w, b: (
        (b["v"] if len(b["v"]) == B else jnp.abs(b["v"])).sum(), len(b["v"])), "another number"),
    "rounded": (lambda w, b: ((b["v"] / 3).sum().astype(int), len(b["v"])), "not the sum"),
    "count squared": (lambda w, b: (b["v"].sum(), len(b["v"]) ** 2), "computes with the number of examples"),
    "filled in": (lambda w, b: (b["v"].sum(0).at[jnp.array([99])].get(mode="fill", fill_value=1.0).sum(), len(b["v"])),
                  "not the sum"),
    "squared in place": (lambda w, b: (b["v"].sum(0).at[0].apply(jnp.square).sum(), len(b["v"])), "not the sum"),
    "loss per example": (lambda w, b: ((b["v"] @ w["w"]).sum(1).sum() * 0 + 1, len(b["v"])), "every device"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROVEN)
def test_sums_over_examples_are_proven_with_their_gradients(name):
    assert judged(PROVEN[name]) == Verdict(True)
    assert judged(PROVEN[name], gradients=False) == Verdict(True)
    assert holds(PROVEN[name], weights_of(), batch_of())


def test_random_numbers_per_example_are_as_good_drawn_part_by_part():
    assert judged(dropped) == Verdict(True)


@pytest.mark.parametrize("name", NOT_TRUE)
def test_what_is_no_sum_is_refused_by_name(name):
    loss, words = NOT_TRUE[name]
    verdict = judged(loss, gradients=False)
    assert not verdict.proven
    assert words in verdict.reason, verdict.reason
    assert "\n" not in verdict.reason
    assert not holds(loss, weights_of(), batch_of()), "the refusal would be for nothing"


def test_the_line_of_the_culprit_is_named():
    def loss(w, b):
        best = (b["v"] @ w["w"]).max(axis=0)  # culprit
        return best.sum(), 1.0 * len(b["v"])

    source = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if text.endswith("# culprit"))
    expected = f"takes reduce_max over the examples (reduce_max at test_examples.py:{line})"
    assert judged(loss, gradients=False) == Verdict(False, expected)


def test_a_backward_that_mixes_examples_is_seen_where_gradients_are_returned():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.linalg.norm(g),))

    def loss(w, b):
        return clipped(b["v"] @ w["w"]).sum(), len(b["v"])

    assert judged(loss, gradients=False).proven
    assert "sqrt of a sum over the batch" in judged(loss).reason


def test_state_may_not_depend_on_the_batch():
    def fn(batch):
        return (batch.sum(), 1.0 * batch.shape[0]), {"mean": 0.9 + 0.1 * batch.sum(0)}

    batch = jax.ShapeDtypeStruct((B, D), jnp.float32)
    assert "every device would add it" in sums_over_examples(fn, batch, parts=PARTS).reason
    kept = sums_over_examples(lambda b: (b.sum(), {"seen": b.sum(0)}), batch, parts=PARTS)
    assert kept == Verdict(False, "'seen' depends on the batch and is no sum that is returned")
    per_row = sums_over_examples(lambda b: ({"loss": b.sum(1)}, ()), batch, parts=PARTS)
    assert per_row == Verdict(False, "'loss' is not summed over the batch")


def test_what_is_unknown_is_refused():
    def loss(w, b):
        return jnp.abs(jnp.fft.fft(b["v"])).sum(), len(b["v"])

    assert judged(loss, gradients=False).reason.startswith("fft is unknown to the proof (fft at ")
    assert "loops over the examples" in judged(lambda w, b: (lax.map(jnp.sum, b["v"]).sum(), len(b["v"]))).reason


def test_constants_that_follow_the_batch_are_refused():
    table = np.arange(7.0, dtype=np.float32)

    def loss(w, b):
        total = (b["v"] @ w["w"]).sum()
        return total + jnp.asarray(table)[:1].sum() if len(b["v"]) == B else total, len(b["v"])

    assert judged(loss, gradients=False).reason.startswith("does something else with another number of examples")


def test_state_behind_a_reference_is_refused():
    def loss(w, b):
        ref = jax.new_ref(jnp.zeros(()))
        ref[...] = b["v"].max()
        return b["v"].sum() * ref[...], len(b["v"])

    assert "side effect" in judged(loss, gradients=False).reason


def test_a_function_of_one_batch_size_is_refused():
    def loss(w, b):
        return b["v"].reshape(B, D).sum(), B

    assert judged(loss).reason.startswith("cannot be traced with 4 examples: ")
    with pytest.raises(TypeError, match="reshape"):  # the user's own mistake is not a verdict
        judged(lambda w, b: (b["v"].reshape(B + 1, -1).sum(), B))


def test_one_part_needs_no_proof_and_unequal_parts_have_none():
    assert judged(NOT_TRUE["contrastive"][0], parts=1) == Verdict(True)
    with pytest.raises(ValueError, match="5 parts"):
        judged(PROVEN["mlp"], parts=5)
    with pytest.raises(ValueError, match="dim 0"):
        judged(PROVEN["mlp"], batch={**batch_of(), "step": np.float32(0)})


NEEDED = [
    *("concatenate", "conv_general_dilated", "cumsum", "dynamic_slice", "dynamic_update_slice", "gather", "reshape"),
    *("reduce_window_max", "rev", "scatter", "scatter-add", "slice", "sort"),
]  # of the other checks the shapes alone would tell, in fewer words


@pytest.mark.parametrize("name", NEEDED)
def test_a_check_left_out_would_prove_what_is_false(name, monkeypatch):
    monkeypatch.setitem(CHECKS, name, lambda op: Kind.ROWS)
    assert any(judged(loss, gradients=False).proven for loss, _ in NOT_TRUE.values())
