"""Linen modules as units, whatever their methods and classes are wrapped in; and what is passed for a Linen model."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from reference import Case, alone, check, linen_loss, train, traffic

import fsdp_jax as fsdp

pytestmark = pytest.mark.core

TOKENS = jax.ShapeDtypeStruct((1, 8), jnp.int32)
STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
SHARED = {"variable_axes": {"params": None}, "split_rngs": {"params": False}}


def layer(module, x):
    """With a parameter of its own, modules inside, and another method of the same module's."""
    scale = module.param("scale", nn.initializers.ones, (x.shape[-1],))
    h = nn.gelu(nn.Dense(module.widened(x))(nn.LayerNorm()(x)))
    return x + jnp.einsum("...d,d->...d", nn.Dense(x.shape[-1])(h), scale)


class Plain(nn.Module):
    def widened(self, x):
        return 2 * x.shape[-1]

    @nn.compact
    def __call__(self, x):
        return layer(self, x)


class Rematted(Plain):
    @nn.remat
    @nn.compact
    def __call__(self, x):
        return layer(self, x)


class Jitted(Plain):
    @nn.jit
    @nn.compact
    def __call__(self, x):
        return layer(self, x)


class MappedOverRows(Plain):
    @functools.partial(nn.vmap, **SHARED)
    @nn.compact
    def __call__(self, x):
        return layer(self, x)


class Ensemble(Plain):
    """Three layers side by side."""

    @functools.partial(nn.vmap, in_axes=None, out_axes=-1, axis_size=3, **STACKED)
    @nn.compact
    def members(self, x):
        return layer(self, x)

    def __call__(self, x):
        return self.members(x).mean(-1)


class Scanned(Plain):
    """Three layers in a row."""

    @functools.partial(nn.scan, length=3, **STACKED)
    @nn.compact
    def layers(self, x, _):
        return layer(self, x), None

    def __call__(self, x):
        return self.layers(x, None)[0]


class ScannedOverTime(Plain):
    @functools.partial(nn.scan, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
    @nn.compact
    def steps(self, carry, x):
        return carry + layer(self, x), carry

    def __call__(self, x):
        return self.steps(jnp.zeros_like(x[:, 0]), x)[1]


METHODS = [Plain, Rematted, Jitted, MappedOverRows, Ensemble, Scanned, ScannedOverTime]
CLASSES = {
    "remat": lambda kind: nn.remat(kind),
    "jit": lambda kind: nn.jit(kind),
    "vmap": lambda kind: nn.vmap(kind, **SHARED),
    "ensemble": lambda kind: nn.vmap(kind, in_axes=None, axis_size=3, **STACKED),
    "jit of remat": lambda kind: nn.jit(nn.remat(kind)),
}


class Model(nn.Module):
    """`wrap` makes of the kind of its layers what is called."""

    kind: type[nn.Module]
    wrap: str = ""
    scan: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16)(tokens)
        kind = CLASSES[self.wrap](self.kind) if self.wrap else self.kind
        if self.scan:
            body = nn.scan(lambda module, x, _: (module(x), None), length=2, **STACKED)
            x, _ = body(kind(name="layers"), x, None)
        else:
            for i in range(2):
                x = kind(name=f"layer_{i}")(x)
                x = x.mean(0) if x.ndim == 4 else x
        return nn.Dense(32)(nn.LayerNorm()(x))


def case(model: nn.Module, units: Any = (Plain,)) -> Case:
    return Case(model, linen_loss, units)


@pytest.fixture(scope="module")
def mesh():
    return fsdp.make_mesh(data=8)


def as_alone(mesh, case, **settings):
    run, step = train(case, mesh, steps=2, **settings)
    check(run, alone(case, steps=2))
    return step


@pytest.mark.parametrize("local_batch", [False, True])
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("kind", METHODS)
def test_a_unit_whose_method_is_wrapped_runs_once(mesh, kind, scan, local_batch):
    as_alone(mesh, case(Model(kind, scan=scan)), local_batch=local_batch, remat="full" if scan else "none")
