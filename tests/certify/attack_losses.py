"""Losses to test whether `certify` tells sums over examples from all others.

Each is `loss(model, batch) -> (sum, count)` on a small model. `is_sum`: whether sum and count are
sums over examples, as `local_batch=True` requires, for any number of rows that a device has. B
rows, C classes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

ROWS, FEATURES, CLASSES = 8, 4, 4


class Tiny(nnx.Module):
    """A random stream, for the losses that draw from it."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(FEATURES, 6, rngs=rngs)
        self.head = nnx.Linear(6, CLASSES, rngs=rngs)
        self.streams = nnx.Rngs(noise=0)

    def __call__(self, x):
        return self.head(jnp.tanh(self.up(x)))


def make_model(rngs):
    return Tiny(rngs=rngs)


def make_batch(rows=ROWS):
    random = np.random.default_rng(0)
    labels = np.array([2, 0, 1, 3, 0, 2, 2, 1] * (rows // 8), np.int32)
    mask = np.array([1, 1, 0, 1, 1, 1, 0, 1] * (rows // 8), np.float32)
    x = random.normal(size=(rows, FEATURES)).astype(np.float32)
    return {"x": x, "y": labels, "mask": mask}


def cross_entropy(h, y):
    return optax.softmax_cross_entropy_with_integer_labels(h, y)


def of_outputs(f):
    """f(h [B, C], y [B]) -> any array, added up; the count is B."""

    def loss(model, batch):
        return f(model(batch["x"]), batch["y"]).sum(), len(batch["x"])

    return loss


def of_rows(f):
    """f(losses [B], h [B, C], y [B]) -> any array, added up; the count is B."""
    return of_outputs(lambda h, y: f(cross_entropy(h, y), h, y))


def of_batch(f):
    """f(model, x, y) -> any array, added up; the count is B."""
    return lambda model, batch: (f(model, batch["x"], batch["y"]).sum(), len(batch["x"]))


def normed(h):
    return h / jnp.linalg.norm(h, axis=-1, keepdims=True)


def standardized(h):
    return (h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + 1e-3)


def key():
    return jax.random.key(7)


@jax.custom_vjp
def clipped_backward(x):
    """The identity, whose cotangent is divided by its norm."""
    return x


clipped_backward.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.linalg.norm(g),))


def penalty(model):
    return jnp.square(model.up.kernel[...]).sum() + jnp.square(model.head.kernel[...]).sum()


def squared_gradient(model, x, y):
    """Of the whole batch's loss, by the inputs of the head: what a gradient penalty takes."""
    h = model(x)
    return jnp.square(jax.grad(lambda h: jnp.square(cross_entropy(h, y).sum()))(h))


def gradient_of_each(model, x, y):
    h = model(x)
    return jnp.square(jax.vmap(jax.grad(lambda h, y: cross_entropy(h, y)))(h, y))


def carried(combine):
    """A scan over the batch whose carry meets every row."""

    def loss(h, y):
        return lax.scan(lambda c, row: (combine(c, row), c), jnp.zeros(h.shape[1]), h)[0]

    return of_outputs(loss)


def class_centres(h, y):
    rows = jnp.bincount(y, length=CLASSES)[:, None]
    return jax.ops.segment_sum(h, y, CLASSES) / (1.0 + rows)


def masked_sum(model, batch):
    losses = cross_entropy(model(batch["x"]), batch["y"])
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


SUMS = {
    "cross-entropy": of_rows(lambda r, h, y: r),
    "masked": masked_sum,
    "sorted in each": of_outputs(lambda h, y: jnp.sort(h, 1) * jnp.arange(1.0, CLASSES + 1)[None]),
    "scan that adds": carried(lambda c, row: c + jnp.square(row)),
    "gradient of each": of_batch(gradient_of_each),
    "fft in each": of_outputs(lambda h, y: jnp.abs(jnp.fft.fft(h, axis=1))),
    "constant numbers for all": of_outputs(lambda h, y: h * jax.random.normal(key(), (1, CLASSES))),
}

NOT_SUMS = {
    # one number of the whole batch
    "min over the batch": of_outputs(lambda h, y: h.min(0)),
    "norm over the batch": of_outputs(lambda h, y: jnp.linalg.norm(h, axis=0)),
    "squared sum over the batch": of_outputs(lambda h, y: jnp.square(h.sum(0))),
    # along the batch
    "cumsum along the batch": of_outputs(lambda h, y: jnp.square(jnp.cumsum(h, 0))),
    "difference along the batch": of_outputs(lambda h, y: jnp.square(jnp.diff(h, axis=0))),
    # rows meet rows
    "in-batch negatives": of_outputs(
        lambda h, y: cross_entropy(normed(h) @ normed(h).T * 5, jnp.arange(len(h)))
    ),
    "all pairs": of_outputs(lambda h, y: jnp.square(h @ h.T)),
    "pairs of neighbours": of_outputs(lambda h, y: h[::2] * h[1::2]),
    "largest singular value": of_outputs(lambda h, y: jnp.linalg.svd(h, compute_uv=False)[:1]),
    # normalised by the batch
    "batch normalisation": of_outputs(lambda h, y: cross_entropy(standardized(h), y)),
    "balance of experts": of_rows(
        lambda r, h, y: r + CLASSES * (jax.nn.softmax(h).mean(0) ** 2).sum()
    ),
    "class centres": of_outputs(lambda h, y: jnp.square(h - class_centres(h, y)[y])),
    # the layout of the rows
    "lax.reshape with dimensions": of_outputs(
        lambda h, y: jnp.square(jax.nn.softmax(lax.reshape(h, h.shape, dimensions=(1, 0))))
    ),
    "squeezed away": of_outputs(
        lambda h, y: (
            jnp.square(cross_entropy(h, y).squeeze()).mean(-1)
            if len(h) > 1
            else cross_entropy(h, y)
        )
    ),
    "if more than one row": of_outputs(lambda h, y: jnp.square(h) if len(h) > 1 else h),
    # the place of a row, and how many there are
    "first three": of_rows(lambda r, h, y: r[:3]),
    "dot with a constant": of_rows(lambda r, h, y: jnp.dot(np.arange(ROWS, dtype=np.float32), r)),
    "over the rows": of_rows(lambda r, h, y: r / r.shape[0]),
    "temperature by the rows": of_outputs(lambda h, y: cross_entropy(h * (1 + 1 / len(h)), y)),
    "mean for one": lambda model, batch: (cross_entropy(model(batch["x"]), batch["y"]).mean(), 1),
    # derivatives
    "backward clipped by the batch": of_outputs(lambda h, y: jnp.square(clipped_backward(h))),
    "gradient penalty": of_batch(squared_gradient),
    "penalty on parameters": of_batch(
        lambda m, x, y: cross_entropy(m(x), y).sum() + 0.1 * penalty(m)
    ),
    "norm of parameters": of_batch(
        lambda m, x, y: cross_entropy(m(x), y).sum() + jnp.sqrt(penalty(m))
    ),
    # control flow
    "scan with a carry": carried(lambda c, row: jnp.tanh(c + row)),
    "cond on the batch": of_outputs(
        lambda h, y: lax.cond(h.sum() > 0, jnp.square, jnp.abs, h - 0.1 * h.mean())
    ),
    # named axes over rows
    "mean by a named axis": of_outputs(
        lambda h, y: jax.vmap(
            lambda row: jnp.square(row - lax.pmean(row, "rows")), axis_name="rows"
        )(h)
    ),
    # random numbers
    "dropout from a constant key": of_outputs(
        lambda h, y: jnp.where(jax.random.bernoulli(key(), 0.5, h.shape), h, 0)
    ),
    "dropout from the model": of_batch(
        lambda m, x, y: m(x) * jax.random.normal(m.streams.noise(), (len(x), CLASSES))
    ),
}
