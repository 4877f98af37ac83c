"""Which variables of a program may have a cotangent, as jax differentiates it."""

import jax
import jax.numpy as jnp
import pytest
from for_each import for_each
from jax import lax

from fsdp_jax.program.equations import without_cotangent

pytestmark = pytest.mark.releases

X = jnp.ones(3)


@jax.custom_vjp
def first(a, b):
    return a + b


first.defvjp(lambda a, b: (a + b, None), lambda _, cotangent: (cotangent, None))


def stopped(a, b):
    return a * lax.stop_gradient(b)


def write(ref, value):
    ref[...] = value


def written(call):
    """Makes a function whose result is what a call has written into a mutable array."""

    def run(a, b):
        ref = jax.new_ref(jnp.zeros(3))
        call(ref, a, lax.stop_gradient(b))
        return ref[...]

    return run


def scanned(ref, a, b):
    lax.scan(lambda _, x: (write(ref, ref[...] + x), None), None, a[:, None] * b[None])


def chosen(ref, a, b):
    lax.cond(b[0] > 0, lambda: write(ref, a), lambda: write(ref, 2 * b))


def metric(a, b):
    """A scan whose carry has a sum that nothing differentiable reads."""
    return lax.scan(lambda c, _: ((c[0] * 2, c[1] + c[0] * b), None), (a, b), length=2)[0][0]


# Functions of sin(x) and cos(x) -> those of the two that may have a cotangent.
FUNCTIONS = {
    "a product": (lambda a, b: a * b, "sin cos"),
    "a constant": (stopped, "sin"),
    "a call": (jax.jit(stopped), "sin"),
    "a checkpoint": (jax.checkpoint(stopped), "sin"),
    "a scan": (metric, "sin"),
    "a scan without trips": (
        lambda a, b: lax.scan(lambda c, _: (b, None), a, None, length=0)[0],
        "sin cos",  # any operand, as far as is known
    ),
    "a branch": (lambda a, b: lax.cond(b[0] > 0, stopped, lambda a, b: 2 * a, a, b), "sin"),
    "one branch of two": (
        lambda a, b: lax.cond(b[0] > 0, stopped, lambda a, b: a - b, a, b),
        "sin cos",
    ),
    "a branch that closes over it": (
        lambda a, b: lax.switch(jnp.argmax(b), [lambda: a * X, lambda: X, lambda: stopped(X, b)]),
        "sin",
    ),
    "a branch by the platform": (
        lambda a, b: lax.platform_dependent(a, b, cpu=stopped, default=lambda a, b: 2 * a),
        "sin",
    ),
    "a call in a branch in a scan": (
        lambda a, b: lax.scan(
            lambda c, _: (lax.cond(c[0] > 0, jax.jit(stopped), lambda c, b: c, c, b), None),
            a,
            length=2,
        )[0],
        "sin",
    ),
    "a custom derivative": (first, "sin cos"),
    "a write": (written(lambda ref, a, b: write(ref, a)), "sin"),
    "a write in a call": (written(lambda ref, a, b: jax.jit(write)(ref, a)), "sin"),
    "a write in a scan": (written(scanned), "sin"),
    "a write in a branch": (written(chosen), "sin"),
}


@for_each("name", FUNCTIONS)
def test_what_may_have_a_cotangent(name):
    function, expected = FUNCTIONS[name]
    jaxpr = jax.make_jaxpr(lambda x: function(jnp.sin(x), jnp.cos(x)))(X).jaxpr
    without = without_cotangent(jaxpr, [True])
    has = [eqn for eqn in jaxpr.eqns if without.isdisjoint(eqn.outvars)]
    assert [name for name in ("sin", "cos") if name in {str(e.primitive) for e in has}] == (
        expected.split()
    )
