"""Ways in which a model or a loss reads a parameter outside the unit that it belongs to.

Each is `way(model, x) -> a number` that depends on parameters of units, on what Python finds out
about them, or on both. `x`: [rows, WIDTH]. In an NNX model `first(model)` is the first block, or
the stack of all; in a Linen model, `params_of(model)` are its parameters.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax.flatten_util import ravel_pytree

WIDTH = 8


# Models


class Dense(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(0.3 * jax.random.normal(rngs.params(), (WIDTH, WIDTH)))
        self.bias = nnx.Param(0.1 * jnp.arange(WIDTH, dtype=jnp.float32))

    def __call__(self, x):
        return x @ self.kernel[...] + self.bias[...]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.gain = Dense(rngs), nnx.Param(jnp.linspace(0.5, 1.5, WIDTH))

    def __call__(self, x):
        return x + jnp.tanh(self.dense(x)) * self.gain[...]

    def variable(self):
        return self.dense.kernel

    def times(self, x, kernel):
        return x @ kernel * self.gain[...]

    def append(self, x, outputs):
        outputs.append(jnp.sum(jnp.square(self(x))))
        return x

    def put(self, x, outputs):
        outputs["size"] = jnp.sum(jnp.square(self(x)))


class Net(nnx.Module):
    """Blocks one after another, or the stack of them in a scan."""

    def __init__(self, rngs, scanned=False, layers=3, block=Block):
        self.scanned, self.layers = scanned, layers
        if scanned:
            stack = nnx.vmap(block, in_axes=0, out_axes=0)
            keys = jax.random.split(rngs.params(), layers)
            self.blocks = stack(nnx.Rngs(params=keys))
        else:
            self.blocks = nnx.List([block(rngs) for _ in range(layers)])
        self.head = Dense(rngs)

    def __call__(self, x):
        if self.scanned:
            run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return self.head(run(x, self.blocks))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        gain = self.param("gain", lambda _: jnp.linspace(0.5, 1.5, WIDTH))
        return x + jnp.tanh(nn.Dense(WIDTH, name="dense")(x)) * gain, None


class LinenNet(nn.Module):
    scanned: bool = False
    reads: bool = False  # a penalty on the parameters of its blocks, in its own method

    @nn.compact
    def __call__(self, x):
        if self.scanned:
            lifted = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(LinenBlock, length=3, **lifted)(name="blocks")(x, None)
        else:
            for number in range(3):
                x, _ = LinenBlock(name=f"block_{number}")(x)
        if self.reads:
            own = self.variables["params"]
            arrays = [p for p in jax.tree.leaves(own) if isinstance(p, jax.Array) and p.ndim > 1]
            x = x * (1 + 1e-2 * sum(jnp.sum(jnp.square(p)) for p in arrays))
        return nn.Dense(WIDTH, name="head")(x)


# What the ways have in common


def squares(arrays):
    return sum((jnp.sum(jnp.square(x)) for x in arrays), jnp.zeros(()))


def arrays_of(model):
    return jax.tree.leaves(nnx.state(model, nnx.Param))


def first(model):
    return model.blocks if model.scanned else model.blocks[0]


def kernel_of(model):
    return model.blocks.dense.kernel[...][0] if model.scanned else first(model).dense.kernel[...]


def works(test):
    try:
        return bool(test())
    except (AttributeError, TypeError, ValueError):
        return False


def second_output(model, params, x):
    graphdef, _, rest = nnx.split(model, nnx.Param, ...)
    return jnp.sum(jnp.square(nnx.merge(graphdef, params, rest, copy=True)(x)))


# Filters over the leaves of the model's state, as a penalty has them


FILTERS = {
    "isinstance": lambda p: isinstance(p, jax.Array),
    "issubdtype": lambda p: jnp.issubdtype(getattr(p, "dtype", np.int32), jnp.floating),
    "np.ndim": lambda p: works(lambda: np.ndim(p) > 1),
    "try": lambda p: works(lambda: (p + 0, True)[1]),
}


def filtered_penalty(keep):
    return lambda model, x: squares(p for p in arrays_of(model) if keep(p))


def all_variables(model, x):
    variables = [v for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Param)]
    return squares(v[...] for v in variables)


def gradient_penalty(model, x):
    grads = nnx.grad(lambda m: jnp.sum(jnp.square(m(x))))(model)
    return 1e-3 * squares(jax.tree.leaves(grads))


def directional_derivative(model, x):
    params = nnx.state(model, nnx.Param)
    kernel = kernel_of(model)
    del params
    return jax.jvp(lambda w: jnp.sum(jnp.square(x @ w)), (kernel,), (jnp.ones_like(kernel),))[1]


def swapped_kernel(model, x):
    copy = nnx.clone(model)
    first(copy).gain[...] = model.head.bias[...] * jnp.ones_like(first(copy).gain[...])
    return jnp.sum(jnp.square(copy(x)))


def in_a_scan(model, x):
    kernel = kernel_of(model)
    return jnp.sum(jax.lax.scan(lambda c, row: (c + row @ kernel, None), x[0] * 0, x)[0])


def in_a_branch(model, x):
    kernel = kernel_of(model)
    return jax.lax.cond(x.shape[0] > 4, lambda: jnp.sum(kernel**2), lambda: jnp.zeros(()))


def in_a_custom_derivative(model, x):
    @jax.custom_vjp
    def doubled(w):
        return 2 * w

    doubled.defvjp(lambda w: (2 * w, None), lambda _, g: (2 * g,))
    return jnp.sum(jnp.square(x @ doubled(kernel_of(model))))


NNX_WAYS = {
    **{f"penalty behind {name}": filtered_penalty(keep) for name, keep in FILTERS.items()},
    "penalty": lambda model, x: squares(arrays_of(model)),
    "iter_graph": all_variables,
    "elements": lambda model, x: jnp.float32(sum(p.size for p in arrays_of(model))),
    "largest dim": lambda model, x: jnp.float32(max(max(p.shape) for p in arrays_of(model))),
    "less": lambda model, x: jnp.mean(first(model).gain[...] < 1) * jnp.sum(x**2),
    "another's kernel": lambda model, x: jnp.sum(jnp.square(x @ kernel_of(model))),
    "tied head": lambda model, x: jnp.sum(jnp.square(model(x) @ kernel_of(model).T)),
    "matmul with the variable": lambda model, x: jnp.sum(jnp.square(x @ first(model).dense.kernel)),
    "tree.map": lambda model, x: squares(
        jax.tree.leaves(jax.tree.map(jnp.sin, nnx.state(model, nnx.Param)))
    ),
    "ravel": lambda model, x: jnp.sum(jnp.square(ravel_pytree(nnx.state(model, nnx.Param))[0])),
    "asarray": lambda model, x: jnp.sum(jnp.abs(jnp.asarray(first(model).dense.kernel))),
    "gradient by the model": gradient_penalty,
    "directional derivative": directional_derivative,
    "merged": lambda model, x: second_output(model, nnx.state(model, nnx.Param), x),
    "written": swapped_kernel,
    "scan": in_a_scan,
    "branch": in_a_branch,
    "custom derivative": in_a_custom_derivative,
}
# Of a block that is not in a stack.
UNROLLED_WAYS = {
    "getter of a Variable": lambda model, x: jnp.sum(jnp.square(model.blocks[0].variable()[...])),
    "argument of another": lambda model, x: jnp.sum(
        model.blocks[1].times(x, model.blocks[0].dense.kernel[...])
    ),
    "inner module": lambda model, x: jnp.sum(jnp.square(model.blocks[0].dense(x))),
}


def appended(model, x):
    """A block that puts what it computes into a list of the caller's: no pure function."""
    outputs = []
    for block in model.blocks:
        x = block.append(x, outputs)
    return sum(outputs)


def put(model, x):
    outputs = {}
    model.blocks[0].put(x, outputs)
    return outputs["size"]


REFUSED_WAYS = {"list of the caller": appended, "dict of the caller": put}


def params_of(model):
    return model.variables["params"]


def linen_leaves(model):
    return jax.tree.leaves(params_of(model))


def linen_kernel(model):
    params = params_of(model)
    return (
        params["blocks"]["dense"]["kernel"][0]
        if model.scanned
        else (params["block_0"]["dense"]["kernel"])
    )


def applied(model, params, x):
    return jnp.sum(jnp.square(LinenNet(model.scanned).apply({"params": params}, x)))


LINEN_WAYS = {
    **{
        f"penalty behind {name}": lambda model, x, keep=keep: squares(
            p for p in linen_leaves(model) if keep(p)
        )
        for name, keep in FILTERS.items()
    },
    "flatten_dict": lambda model, x: squares(
        p for path, p in traverse_util.flatten_dict(params_of(model)).items() if "kernel" in path
    ),
    "another's kernel": lambda model, x: jnp.sum(jnp.square(x @ linen_kernel(model))),
    "tied head": lambda model, x: jnp.sum(jnp.square(model(x) @ linen_kernel(model).T)),
    "elements": lambda model, x: jnp.float32(sum(p.size for p in linen_leaves(model))),
    "apply": lambda model, x: applied(model, params_of(model), x),
    "gradient": lambda model, x: (
        1e-3
        * squares(
            jax.tree.leaves(jax.grad(lambda params: applied(model, params, x))(params_of(model)))
        )
    ),
    "tree.map": lambda model, x: squares(jax.tree.leaves(jax.tree.map(jnp.sin, params_of(model)))),
    "ravel": lambda model, x: jnp.sum(jnp.square(ravel_pytree(params_of(model))[0])),
    "get_variable": lambda model, x: jnp.sum(
        jnp.square(model.get_variable("params", "head")["kernel"])
    ),
    "directional derivative": lambda model, x: jax.jvp(
        lambda w: jnp.sum(jnp.square(x @ w)), (linen_kernel(model),), (jnp.ones((WIDTH, WIDTH)),)
    )[1],
}
