"""Random small programs: whatever is proven a sum over examples is one, by running it whole and in parts."""

import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fsdp_jax.examples import sums_over_examples

pytestmark = pytest.mark.core

# Sizes that collide, so that a mistaken dim is not saved by its size: a part has T rows, the batch has D.
PARTS, B, T, D = 2, 4, 2, 4
TABLE = np.arange(-3, 5, dtype=np.float32).reshape(2, D) % 5
LARGEST = 2.0**22  # the programs compute with integers, which float32 adds without rounding up to here


def dim(pick: random.Random, x: jax.Array) -> int:
    return pick.randrange(x.ndim)


def whole(x: jax.Array, limit: int) -> jax.Array:
    return jnp.int32(jnp.abs(x)) % limit


def merge(pick, x, y):
    i = pick.randrange(x.ndim - 1)
    return x.reshape(*x.shape[:i], x.shape[i] * x.shape[i + 1], *x.shape[i + 2 :])


def split(pick, x, y):
    i = dim(pick, x)
    halves = pick.choice([(2, -1), (-1, 2), (-1, T), (-1, 1), (1, -1)])
    return x.reshape(*x.shape[:i], *halves, *x.shape[i + 1 :])


def contract(pick, x, y):
    return jnp.tensordot(x, y, axes=(dim(pick, x), dim(pick, y)))


def batched(pick, x, y):
    i, j = dim(pick, x), dim(pick, y)
    return lax.dot_general(x, y, (((i,), (j,)), ((k := (i + 1) % x.ndim,), (min(k, y.ndim - 1),))))


def running(pick, x, y):
    last, seen = lax.scan(lambda c, a: (c + a, c), jnp.zeros_like(jnp.take(x, 0, 0)), jnp.moveaxis(x, dim(pick, x), 0))
    return pick.choice([last, seen])


def written(pick, x, y):
    at = jnp.zeros_like(x).at[whole(y.reshape(-1)[: x.shape[0]], x.shape[0])]
    return pick.choice([at.add, at.set, at.max])(x)


def own(pick, x, y):
    i = jnp.arange(x.shape[0])
    return pick.choice([lambda: x[i, 0], lambda: x[i, whole(x[:, 0], 2)], lambda: x.at[i, 1].set(y.reshape(-1)[0])])()


def segments(pick, x, y):
    return jax.ops.segment_sum(x, whole(y.reshape(x.shape[0], -1)[:, 0], 3), 3)


# Each takes the random choices and two values; choices must not depend on the number of rows.
KEEPING: list[Callable] = [
    lambda pick, x, y: x + y,
    lambda pick, x, y: x * y,
    lambda pick, x, y: jnp.maximum(x, y),
    lambda pick, x, y: jnp.where(y > 0, x, -1),
    lambda pick, x, y: x - 1,
    lambda pick, x, y: lax.rem(x, jnp.full_like(x, 3)),
    lambda pick, x, y: x @ TABLE.T if pick.random() < 0.5 else x @ TABLE[:, :T],
    lambda pick, x, y: jnp.take(TABLE, whole(x, 2), axis=pick.randrange(2)),
    lambda pick, x, y: jnp.swapaxes(x, dim(pick, x), dim(pick, x)),
    lambda pick, x, y: x.sum(pick.randrange(1, x.ndim)),
    lambda pick, x, y: x[:, None] * x[..., :, None] if x.ndim == 1 else x[:, :1] + x,
    own,
    merge,
    split,
]  # fmt: skip
MIXING: list[Callable] = [
    lambda pick, x, y: pick.choice([jnp.sum, jnp.max, jnp.min, jnp.prod, jnp.argmax])(x, dim(pick, x)) * 1.0,
    lambda pick, x, y: x - x.sum(dim(pick, x), keepdims=True),
    lambda pick, x, y: pick.choice([jnp.cumsum, jnp.sort, jnp.flip])(x, axis=dim(pick, x)),
    lambda pick, x, y: jnp.roll(x, 1, dim(pick, x)),
    lambda pick, x, y: jnp.concatenate([x, y], dim(pick, x)),
    lambda pick, x, y: jnp.stack([x, y], dim(pick, x)),
    lambda pick, x, y: jnp.take(x, pick.randrange(2), dim(pick, x)),
    lambda pick, x, y: lax.slice_in_dim(x, pick.choice([0, 1]), None, pick.choice([1, 2]), dim(pick, x)),
    lambda pick, x, y: x[: y.shape[0]] * y,
    lambda pick, x, y: jnp.take(x, whole(y, 2), dim(pick, x)),
    lambda pick, x, y: jnp.take_along_axis(x, whole(y, 2), dim(pick, x)),
    lambda pick, x, y: x * x.shape[dim(pick, x)],
    lambda pick, x, y: x * jnp.arange(x.shape[-1]),
    lambda pick, x, y: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 0)], constant_values=pick.randrange(2)),
    lambda pick, x, y: lax.cond(pick.choice([x.sum(), TABLE.sum()]) > 0, lambda: x, lambda: x * 2),
    lambda pick, x, y: lax.reduce_window(x, 0.0, lax.add, (1,) * (x.ndim - 1) + (2,), (1,) * x.ndim, "SAME"),
    lambda pick, x, y: lax.top_k(x, 1)[0],
    lambda pick, x, y: jnp.ones_like(x),
    batched,
    contract,
    running,
    segments,
    written,
]  # fmt: skip


def program(seed: int) -> Callable:
    """A function of the batch: steps that grow a pool of values, and a sum of some of them."""

    def run(batch):
        pick = random.Random(seed)
        pool = [batch["x"], batch["v"], batch["v"] + 1]
        for _ in range(pick.randrange(1, 6)):
            step = pick.choice(KEEPING if pick.random() < 0.6 else MIXING)
            inner, (x, y) = random.Random(pick.random()), pick.choices(pool[-4:], k=2)
            pool.append(step(inner, x, y))
        total = pool[-1].sum() + pick.choice([0.0, pool[-2].sum(), pool[-1].sum() * 3])
        return total, pick.choice([1.0 * len(batch["v"]), jnp.ones_like(batch["x"]).sum()])

    return run


def rows(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {name: draw.integers(-2, 4, shape).astype(np.float32) for name, shape in
            {"x": (B, T, D), "v": (B, D)}.items()}  # fmt: skip


def contradicted(run: Callable, seed: int) -> bool:
    """Whether the sums of the parts are not the whole's, on two batches."""
    for batch in (rows(seed), rows(seed + 1)):
        parts = [jax.tree.map(lambda leaf, i=i: np.split(leaf, PARTS)[i], batch) for i in range(PARTS)]
        found = [[float(out) for out in jax.jit(run)(given)] for given in (batch, *parts)]
        if max(map(abs, np.ravel(found))) < LARGEST and not np.array_equal(found[0], np.sum(found[1:], axis=0)):
            return True
    return False


def examine(seed: int) -> bool | None:
    """Whether a program is proven, None where it has no meaning; fails where a proof is wrong."""
    run = program(seed)
    try:
        verdict = sums_over_examples(lambda batch: (run(batch), ()), rows(seed), parts=PARTS)
    except (TypeError, ValueError, IndexError):
        return None
    assert not (verdict.proven and contradicted(run, seed)), jax.make_jaxpr(run)(rows(seed))
    return verdict.proven


@pytest.mark.long
def test_no_proof_is_wrong():
    with jax.numpy_rank_promotion("allow"):
        found = [examine(seed) for seed in range(400)]
    assert found.count(True) > 40, "too few proofs to have tried anything"
    assert found.count(False) > 40
