"""Real models are proven sums over examples, with their gradients; batch statistics are refused."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from reference import CASES, Case, LinenTransformer, _start, gpt, image_loss, linen_loss

from fsdp_jax.examples import Verdict, sums_over_examples
from fsdp_jax.models import next_token_loss

pytestmark = pytest.mark.core


def model_verdict(case, batch):
    """The verdict on a model's training step: its sums, its gradients and the state that it keeps."""
    params, rest, apply = _start(case)

    def fn(batch, params, rest):
        def loss(params):
            (total, count), after = apply(params, rest, batch)
            return total, (count, after)

        (total, (count, after)), slope = jax.value_and_grad(loss, has_aux=True)(params)
        return (total, jnp.asarray(count, jnp.float32), slope), after

    return sums_over_examples(fn, batch, params, rest, parts=8)


class PlainCNN(nnx.Module):
    def __init__(self, *, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.head = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, images):
        return self.head(nnx.max_pool(nnx.relu(self.norm(self.conv(images))), (2, 2)).mean((1, 2)))


train_loss = partial(next_token_loss, train=True)
MODELS = {
    "scanned": CASES["nnx-gpt-scanned"],
    "unrolled": CASES["nnx-gpt-unrolled"],
    "dropout": Case(gpt(True, dropout=0.1), train_loss, ()),
    "dropout, unrolled, untied": Case(gpt(False, dropout=0.1, tie_head=False), train_loss, ()),
    "bfloat16": Case(gpt(True, dtype="bfloat16"), next_token_loss, ()),
    "linen": CASES["linen-transformer"],
    "linen, unrolled": Case(LinenTransformer(scan=False), linen_loss, ()),
    "cnn": Case(lambda rngs: PlainCNN(rngs=rngs), image_loss, (), image=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_real_models_are_proven(name):
    case = MODELS[name]
    assert model_verdict(case, case.batch(0, rows=32)) == Verdict(True)


def test_one_row_each_is_judged_by_two():
    case = MODELS["scanned"]
    assert model_verdict(case, case.batch(0, rows=8)) == Verdict(True)


def test_batch_norm_is_refused_at_its_own_line():
    case = CASES["nnx-cnn-batchnorm"]
    verdict = model_verdict(case, case.batch(0))
    assert not verdict.proven
    assert verdict.reason.startswith("divides by the number of examples (div at reference.py:")


def test_linen_batch_norm_is_refused():
    norm = nn.BatchNorm(use_running_average=False)
    variables = norm.init(jax.random.key(0), jnp.ones((12, 6)))

    def fn(batch, variables):
        out, after = norm.apply(variables, batch, mutable="batch_stats")
        return (out.sum(), float(out.shape[0])), after

    verdict = sums_over_examples(fn, jax.ShapeDtypeStruct((12, 6), jnp.float32), variables, parts=3)
    assert "divides by the number of examples (div at test_examples_models.py:" in verdict.reason
