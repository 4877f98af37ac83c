"""Losses to test whether `certify` tells sums over examples from all others.

Each is `loss(model, batch) -> (sum, count)` on a small model. `is_sum`: whether sum and count are
sums over examples, as `local_batch=True` requires, for any number of rows that a device has. B
rows, C classes.
"""

from collections.abc import Callable
from typing import NamedTuple

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


class Attack(NamedTuple):
    name: str
    loss: Callable
    is_sum: bool


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


def counted(f):
    """f(losses [B]) -> (sum, count)."""
    return lambda model, batch: f(cross_entropy(model(batch["x"]), batch["y"]))


def normed(h):
    return h / jnp.linalg.norm(h, axis=-1, keepdims=True)


def standardized(h):
    return (h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + 1e-3)


def softmax(h, axis=-1):
    return jax.nn.softmax(h, axis=axis)


def position(h):
    return jnp.arange(1.0, len(h) + 1)


def key():
    return jax.random.key(7)


def with_backward(backward):
    """The identity whose derivative rule is `backward` of the cotangent."""

    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (backward(g),))
    return same


def kernels(model):
    return model.up.kernel[...], model.head.kernel[...]


def penalty(model):
    return sum(jnp.square(kernel).sum() for kernel in kernels(model))


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


def in_unit_of_rows(f):
    """f inside a vmap over rows whose axis has a name."""
    return of_outputs(lambda h, y: jax.vmap(lambda row: f(row), axis_name="rows")(h))


def stochastic_depth(key_of):
    """The head is passed by, or not, by a random scalar."""

    def loss(model, batch):
        h = model(batch["x"])
        keep = jax.random.bernoulli(key_of(model), 0.5)
        h = lax.cond(keep, lambda h: h * 2.0, lambda h: h * 0.5, h)
        return cross_entropy(h, batch["y"]).sum(), len(batch["x"])

    return loss


def class_weights(r, h, y):
    """Rows weigh less the more of their class there are in the batch."""
    return r / jnp.bincount(y, length=CLASSES)[y]


def class_centres(h, y):
    rows = jnp.bincount(y, length=CLASSES)[:, None]
    return jax.ops.segment_sum(h, y, CLASSES) / (1.0 + rows)


def masked_mean(model, batch):
    losses = cross_entropy(model(batch["x"]), batch["y"])
    return (losses * batch["mask"]).sum() / batch["mask"].sum(), 1


def masked_sum(model, batch):
    losses = cross_entropy(model(batch["x"]), batch["y"])
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


SUMS = {
    "cross-entropy": of_rows(lambda r, h, y: r),
    "masked": masked_sum,
    "squared error": of_outputs(lambda h, y: jnp.square(h - jax.nn.one_hot(y, CLASSES))),
    "reshaped in order C": of_outputs(lambda h, y: jnp.abs(h.reshape(-1, 2)).max(1)),
    "transposed and back": of_outputs(lambda h, y: jnp.square(h.T.T)),
    "softmax of each": of_outputs(lambda h, y: jnp.square(softmax(h))),
    "sorted in each": of_outputs(lambda h, y: jnp.sort(h, 1) * jnp.arange(1.0, CLASSES + 1)[None]),
    "cumsum in each": of_outputs(lambda h, y: jnp.square(jnp.cumsum(h, 1))),
    "top-k of each": of_outputs(lambda h, y: lax.top_k(h, 2)[0]),
    "argmax of each": of_outputs(lambda h, y: jnp.take_along_axis(h, h.argmax(1)[:, None], 1)),
    "layer norm": of_outputs(lambda h, y: jnp.tanh(jax.nn.standardize(h) * 2.0)),
    "map over rows": of_outputs(lambda h, y: lax.map(jnp.linalg.norm, h)),
    "scan that adds": carried(lambda c, row: c + jnp.square(row)),
    "vmap": of_outputs(lambda h, y: jax.vmap(lambda row: jnp.outer(row, row).max())(h)),
    "gradient of each": of_batch(gradient_of_each),
    "penalty for each": of_batch(lambda m, x, y: cross_entropy(m(x), y) + penalty(m)),
    "backward of each": of_outputs(lambda h, y: jnp.square(with_backward(lambda g: 2.0 * g)(h))),
    "tiled in each": of_outputs(lambda h, y: jnp.square(jnp.tile(h, (1, 2)))),
    "fft in each": of_outputs(lambda h, y: jnp.abs(jnp.fft.fft(h, axis=1))),
    "checkpointed": of_outputs(jax.checkpoint(lambda h, y: cross_entropy(h, y))),
    "constant numbers for all": of_outputs(lambda h, y: h * jax.random.normal(key(), (1, CLASSES))),
    "constant depth": stochastic_depth(lambda model: key()),
    "added by class, then summed": of_outputs(lambda h, y: jax.ops.segment_sum(h**2, y, CLASSES)),
}

NOT_SUMS = {
    # one number of the whole batch
    **{
        f"{name} over the batch": of_outputs(f)
        for name, f in {
            "max": lambda h, y: h.max(0),
            "min": lambda h, y: h.min(0),
            "mean": lambda h, y: h.mean(0),
            "logsumexp": lambda h, y: jax.nn.logsumexp(h, 0),
            "softmax": lambda h, y: jnp.square(softmax(h, 0)),
            "variance": lambda h, y: h.var(0),
            "deviation": lambda h, y: h.std(0),
            "norm": lambda h, y: jnp.linalg.norm(h, axis=0),
            "norm of all": lambda h, y: jnp.sqrt(jnp.square(h).sum()),
            "product": lambda h, y: h.prod(0),
            "median": lambda h, y: jnp.median(h, 0),
            "quantile": lambda h, y: jnp.quantile(h, 0.3, axis=0),
            "squared mean": lambda h, y: jnp.square(h.mean(0)),
            "squared sum": lambda h, y: jnp.square(h.sum(0)),
            "entropy of the mean": lambda h, y: jax.scipy.special.entr(softmax(h).mean(0)),
        }.items()
    },
    # along the batch
    **{
        f"{name} along the batch": of_outputs(f)
        for name, f in {
            "sort": lambda h, y: jnp.sort(h, 0) * position(h)[:, None],
            "argsort": lambda h, y: h[jnp.argsort(h[:, 0])] * position(h)[:, None],
            "top-k": lambda h, y: lax.top_k(h.T, 1)[0],
            "argmax": lambda h, y: h[h[:, 0].argmax()],
            "cumsum": lambda h, y: jnp.square(jnp.cumsum(h, 0)),
            "cumprod": lambda h, y: jnp.cumprod(jnp.tanh(h) + 1.5, 0),
            "cummax": lambda h, y: lax.cummax(h, 0),
            "associative scan": lambda h, y: lax.associative_scan(jnp.multiply, jnp.tanh(h) + 1),
            "roll": lambda h, y: h * jnp.roll(h, 1, 0),
            "flip": lambda h, y: h * jnp.flip(h, 0),
            "difference": lambda h, y: jnp.square(jnp.diff(h, axis=0)),
            "gradient": lambda h, y: jnp.square(h - jnp.roll(h, 2, 0)),
            "fft": lambda h, y: jnp.abs(jnp.fft.fft(h, axis=0)),
            "convolution": lambda h, y: jnp.square(jnp.convolve(h[:, 0], jnp.array([1.0, 2.0]))),
            "window": lambda h, y: lax.reduce_window(h, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME"),
            "tile": lambda h, y: h * jnp.tile(h, (2, 1))[1 : len(h) + 1],
            "stack": lambda h, y: jnp.stack([h, h[::-1]]).max(0),
            "concatenate": lambda h, y: jnp.square(jnp.concatenate([h[-1:], h[:-1]]) - h),
            "pad": lambda h, y: h * jnp.pad(h, ((1, 0), (0, 0)))[:-1],
            "search": lambda h, y: jnp.searchsorted(jnp.sort(h[:, 0]), h[:, 1]) * h[:, 2],
        }.items()
    },
    # rows meet rows
    **{
        name: of_outputs(f)
        for name, f in {
            "in-batch negatives": lambda h, y: cross_entropy(
                normed(h) @ normed(h).T * 5, jnp.arange(len(h))
            ),
            "supervised contrastive": lambda h, y: (
                (y[:, None] == y[None]) * jnp.exp(normed(h) @ normed(h).T)
            ),
            "all pairs": lambda h, y: jnp.square(h @ h.T),
            "hardest negative": lambda h, y: (h @ h.T - 1e3 * jnp.eye(len(h))).max(1),
            "covariance": lambda h, y: jnp.square(jnp.einsum("bi,bj->ij", h, h)),
            "Barlow twins": lambda h, y: jnp.square(
                standardized(h).T @ standardized(h) / len(h) - jnp.eye(CLASSES)
            ),
            "rank of each": lambda h, y: (h[:, :1] < h[None, :, 0]).sum(1) * h[:, 1],
            "soft rank": lambda h, y: jax.nn.sigmoid(h[:, :1] - h[None, :, 0]) * h[:, 1:2],
            "pairs of neighbours": lambda h, y: h[::2] * h[1::2],
            "two halves": lambda h, y: h[: len(h) // 2] * h[len(h) // 2 :],
            "mixed up": lambda h, y: jnp.square(0.7 * h + 0.3 * h[::-1]),
            "rows by label": lambda h, y: h * h[y],
            "rows by a permutation": lambda h, y: h * h[np.random.default_rng(0).permutation(ROWS)],
            "distance of distributions": lambda h, y: jnp.exp(
                -jnp.square(h[:, None] - h[None]).sum(2)
            ),
            "largest singular value": lambda h, y: jnp.linalg.svd(h, compute_uv=False)[:1],
            "determinant": lambda h, y: jnp.linalg.slogdet(h.T @ h + jnp.eye(CLASSES))[1],
        }.items()
    },
    # normalised by the batch
    **{
        name: of_rows(f)
        for name, f in {
            "batch normalisation": lambda r, h, y: cross_entropy(standardized(h), y),
            "centred": lambda r, h, y: jnp.square(h - h.mean(0, keepdims=True)),
            "scaled by the largest": lambda r, h, y: jnp.square(h / jnp.abs(h).max()),
            "weights that add to one": lambda r, h, y: r * softmax(h[:, 0], 0),
            "weights over their sum": lambda r, h, y: r * jnp.exp(h[:, 1]) / jnp.exp(h[:, 1]).sum(),
            "weights by class": class_weights,
            "hard examples": lambda r, h, y: jnp.where(r > r.mean(), r, 0.0),
            "largest losses": lambda r, h, y: lax.top_k(r, max(1, len(r) // 2))[0] * 2.0 + r.max(),
            "largest loss": lambda r, h, y: r.max(),
            "clipped by the batch": lambda r, h, y: jnp.minimum(r, 1.1 * r.min()),
            "balance of experts": lambda r, h, y: r + CLASSES * (softmax(h).mean(0) ** 2).sum(),
            "load of experts": lambda r, h, y: (
                jax.nn.one_hot(h.argmax(1), CLASSES).mean(0) * softmax(h).mean(0)
            ),
            "dice": lambda r, h, y: (
                1 - (softmax(h) * jax.nn.one_hot(y, CLASSES)).sum() / (softmax(h) + 1).sum()
            ),
            "correlation": lambda r, h, y: jnp.corrcoef(h[:, 0], h[:, 1])[0, 1],
            "cosine of columns": lambda r, h, y: h[:, 0] @ h[:, 1] / jnp.linalg.norm(h[:, 0]),
            "explained variance": lambda r, h, y: jnp.square(h[:, 0]).sum() / (h[:, 1].var() + 1.0),
            "class centres": lambda r, h, y: jnp.square(h - class_centres(h, y)[y]),
            "sums of classes": lambda r, h, y: jnp.square(jax.ops.segment_sum(r, y, CLASSES)),
            "largest of a class": lambda r, h, y: jnp.zeros((CLASSES, CLASSES)).at[y].max(h),
            "written by label": lambda r, h, y: jnp.zeros((CLASSES,)).at[y].add(r).max(),
        }.items()
    },
    # the layout of the rows
    **{
        name: of_outputs(f)
        for name, f in {
            "reshaped in order F": lambda h, y: h.reshape(2, -1, order="F").prod(0),
            "raveled in order F": lambda h, y: h.ravel(order="F") * position(h.ravel()),
            "lax.reshape with dimensions": lambda h, y: jnp.square(
                softmax(lax.reshape(h, h.shape, dimensions=(1, 0)))
            ),
            "transposed and reshaped": lambda h, y: jnp.square(softmax(h.T.reshape(h.shape))),
            "rows from columns": lambda h, y: jnp.abs(h.T.reshape(-1, 2).prod(1)),
            "groups of rows": lambda h, y: h.reshape(2, -1).prod(0),
            "squeezed": lambda h, y: jnp.square(h.squeeze()) * (len(h) / h.squeeze().shape[0]),
            "squeezed columns": lambda h, y: h.squeeze()[..., :2].max(-1) * h.squeeze()[0].mean(),
            "squeezed away": lambda h, y: (
                jnp.square(cross_entropy(h, y).squeeze()).mean(-1) * 1.0
                if len(h) > 1
                else cross_entropy(h, y)
            ),
            "if more than one row": lambda h, y: jnp.square(h) if len(h) > 1 else h,
            "if eight rows": lambda h, y: jnp.square(h) if len(h) == ROWS else jnp.abs(h),
        }.items()
    },
    # the place of a row, and how many there are
    **{
        name: of_rows(f)
        for name, f in {
            "first row": lambda r, h, y: h[0],
            "last row": lambda r, h, y: h[-1],
            "from the first row": lambda r, h, y: jnp.square(h - h[:1]),
            "first three": lambda r, h, y: r[:3],
            "slice in the middle": lambda r, h, y: lax.dynamic_slice_in_dim(r, len(r) // 2, 1),
            "first row set": lambda r, h, y: lax.dynamic_update_slice_in_dim(h, h[:1] * 2, 0, 0),
            "weights by position": lambda r, h, y: r * position(r),
            "weights by a table": lambda r, h, y: (
                r * jnp.asarray(np.linspace(1, 2, ROWS, dtype=np.float32))
            ),
            "dot with a constant": lambda r, h, y: jnp.dot(np.arange(ROWS, dtype=np.float32), r),
            "even rows": lambda r, h, y: jnp.where(jnp.arange(len(r)) % 2 == 0, r, 0.0),
            "groups by position": lambda r, h, y: lax.ragged_dot(
                h,
                jnp.stack([jnp.eye(CLASSES), 3 * jnp.eye(CLASSES)]),
                jnp.array([len(h) - 1, 1], jnp.int32),
            ),
            "over the rows": lambda r, h, y: r / r.shape[0],
            "times the rows": lambda r, h, y: r * len(r),
            "over the root of the rows": lambda r, h, y: r / np.sqrt(len(r)),
            "plus the log of the rows": lambda r, h, y: r + h[:, 0] * np.log(len(r)),
            "temperature by the rows": lambda r, h, y: cross_entropy(h * (1 + 1 / len(r)), y),
        }.items()
    },
    "mean for one": counted(lambda r: (r.mean(), 1)),
    "sum for one": counted(lambda r: (r.sum(), 1)),
    "sum for eight": counted(lambda r: (r.sum(), ROWS)),
    "count squared": counted(lambda r: (r.sum(), len(r) ** 2)),
    "masked mean for one": masked_mean,
    # derivatives
    **{
        name: of_outputs(lambda h, y, backward=backward: jnp.square(with_backward(backward)(h)))
        for name, backward in {
            "backward clipped by the batch": lambda g: g / jnp.linalg.norm(g),
            "backward centred": lambda g: g - g.mean(0, keepdims=True),
            "backward rolled": lambda g: jnp.roll(g, 1, 0),
            "backward over the rows": lambda g: g / len(g),
        }.items()
    },
    "gradient penalty": of_batch(squared_gradient),
    "penalty on parameters": of_batch(
        lambda m, x, y: cross_entropy(m(x), y).sum() + 0.1 * penalty(m)
    ),
    "norm of parameters": of_batch(
        lambda m, x, y: cross_entropy(m(x), y).sum() + jnp.sqrt(penalty(m))
    ),
    # control flow
    "scan with a carry": carried(lambda c, row: jnp.tanh(c + row)),
    "scan that averages": carried(lambda c, row: 0.9 * c + 0.1 * jnp.square(row)),
    "cond on the batch": of_outputs(
        lambda h, y: lax.cond(h.sum() > 0, jnp.square, jnp.abs, h - 0.1 * h.mean())
    ),
    "where on the batch": of_outputs(lambda h, y: jnp.where(h > h.mean(), h, jnp.square(h))),
    "loop as long as the batch": of_outputs(
        lambda h, y: lax.fori_loop(0, len(h), lambda i, c: jnp.sin(c) + 0.1, h)
    ),
    # named axes over rows
    "mean by a named axis": in_unit_of_rows(lambda row: jnp.square(row - lax.pmean(row, "rows"))),
    "index of a named axis": in_unit_of_rows(lambda row: row * lax.axis_index("rows")),
    # random numbers
    "noise from a constant key": of_outputs(lambda h, y: h * jax.random.normal(key(), h.shape)),
    "dropout from a constant key": of_outputs(
        lambda h, y: jnp.where(jax.random.bernoulli(key(), 0.5, h.shape), h, 0)
    ),
    "rows drawn by a constant key": of_rows(lambda r, h, y: jax.random.choice(key(), r, (len(r),))),
    "shuffled by a constant key": of_outputs(lambda h, y: h * jax.random.permutation(key(), h)),
    "labels drawn by a constant key": of_outputs(
        lambda h, y: cross_entropy(h, jax.random.randint(key(), (len(h),), 0, CLASSES))
    ),
    "stochastic depth": stochastic_depth(lambda model: model.streams.noise()),
    "dropout from the model": of_batch(
        lambda m, x, y: m(x) * jax.random.normal(m.streams.noise(), (len(x), CLASSES))
    ),
}

ATTACKS = [Attack(name, loss, True) for name, loss in SUMS.items()]
ATTACKS += [Attack(name, loss, False) for name, loss in NOT_SUMS.items()]
