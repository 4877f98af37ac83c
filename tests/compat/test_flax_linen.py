"""What Linen's modules ask of their scopes: each method that is replaced is one they call.

Flax's own `init` and `apply` run op by op on modules of a layer, as they do for users; jax compiles
each op.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import core
from mend import relied_on

from fsdp_jax.compat.flax_linen import (
    FLAGS,
    flags_of_run,
    hook_scope,
    in_scope,
    original_method,
    params_of_root,
    run_of,
    sow_nothing,
    unbox_tree,
)

pytestmark = pytest.mark.releases

X = jnp.ones((2, 4))


class Hooks:
    """Records what is asked."""

    def __init__(self, missing=()):
        self.asked = []
        self.missing = dict(missing)

    def asks_stream(self, name):
        self.asked.append(("stream", name))

    def asks_mutable(self, name, path):
        self.asked.append(("mutable", name, "/".join(path)))

    def reads(self, name):
        self.asked.append(("reads", name))


class Asking(nn.Module):
    """Asks its scope in each way that a module can."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "no axis")))(
            x
        )
        x = nn.Dropout(0.5, deterministic=False)(x)
        self.sow("sown", "x", x)
        self.make_rng("noise")
        return x


def run(module, fn, hooks, **settings):
    """The result of a function of a module in a scope of ours, whose modules are all hooked."""

    def intercept(next_fun, args, kwargs, context):
        if context.module.scope is not None:
            hook_scope(context.module.scope, hooks)
        return next_fun(*args, **kwargs)

    def in_our_scope(scope):
        hook_scope(scope, hooks)
        return fn(in_scope(module, scope))

    rngs = {name: jax.random.key(0) for name in ("params", "dropout", "noise")}
    variables = module.init(rngs, X)
    variables = {"params": unbox_tree(variables.get("params", {}))}
    with nn.intercept_methods(intercept):
        return core.apply(in_our_scope, flags=FLAGS, **settings)(variables, rngs=rngs)


def asked(module, fn, **settings):
    hooks = Hooks()
    run(module, fn, hooks, **settings)
    return hooks.asked


@pytest.mark.parametrize(
    ("method", "question"),
    [
        ("has_rng", ("stream", "noise")),
        ("has_rng", ("stream", "dropout")),
        ("is_mutable_collection", ("mutable", "sown", "")),
    ],
)
def test_hook_scope_is_asked(method, question):
    with relied_on("flax", "flax_linen.hook_scope", f"a module asks its Scope by `{method}`"):
        assert question in asked(Asking(), lambda module: module(X))


@pytest.mark.parametrize("method", ["get_variable", "has_variable"])
def test_hook_scope_is_asked_as_a_variable_is_read(method):
    def read(module):
        return getattr(module, method)("sown", "x")

    with relied_on("flax", "flax_linen.hook_scope", f"a module asks its Scope by `{method}`"):
        assert ("reads", "sown") in asked(Asking(), read)


def test_hook_scope_adds_to_variables():
    with relied_on("flax", "flax_linen.hook_scope", "`model.variables` is its Scope's `variables`"):
        found = run(Asking(), lambda module: dict(module.variables), Hooks({"sown": "there"}))
        assert found["sown"] == "there"
        assert "params" in found


def test_hook_scope_holds_in_a_second_call():
    """After a call a module has another scope, by `rewound`."""

    def twice(module):
        return module(module.has_rng("first") or X), module.has_rng("second")

    with relied_on("flax", "flax_linen.hook_scope", "a module's Scope after its call is `rewound`"):
        questions = asked(Asking(), twice)
        assert ("stream", "first") in questions
        assert ("stream", "second") in questions


def test_hook_scope_reads_parameters_without_a_constraint():
    """A box constrains its value to an axis that the ambient mesh lacks."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    module, boxes = Asking(), {}

    def intercept(next_fun, args, kwargs, context):
        hook_scope(context.module.scope, Hooks())
        return next_fun(*args, **kwargs)

    def init(key):
        keys = dict.fromkeys(("params", "dropout", "noise"), key)
        call = lambda scope: in_scope(module, scope)(X)  # noqa: E731
        with nn.intercept_methods(intercept):
            return core.init(call, flags=FLAGS)(keys)[1]

    with (
        relied_on(
            "flax", "flax_linen.hook_scope", "a module reads its parameters by `Scope.param`"
        ),
        jax.set_mesh(mesh),
    ):
        boxes = jax.jit(init)(jax.random.key(0))
        assert isinstance(boxes["params"]["Dense_0"]["kernel"], nn.Partitioned)


def test_hook_scope_replaces_methods_that_there_are():
    with relied_on("flax", "flax_linen.hook_scope", "these methods of flax.core.Scope"):
        scope = core.scope.bind({}, flags=FLAGS)
        hook_scope(scope, Hooks())
        replaced = vars(scope).keys() & set(dir(core.Scope))
        own = {"has_rng", "param", "is_mutable_collection", "variables"}
        assert replaced == own | {"get_variable", "has_variable", "rewound"}


def test_flags():
    """Scopes of a user's own `apply` have none; and `nn.jit` reuses no trace."""
    scope = core.scope.bind({})
    hook_scope(scope, Hooks())
    assert "has_rng" not in vars(scope)
    traces = []

    class Jitted(nn.Module):
        @nn.jit
        @nn.compact
        def __call__(self, x):
            traces.append(True)
            return x

    with relied_on("flax", "flax_linen.FLAGS", "nn.jit compares the flags of a module's Scope"):
        for _ in range(2):
            run(Jitted(), lambda module: module(X), Hooks())
        assert len(traces) >= 2 + 1, "beside those of init, one for each run"
        assert len({hash(flag) for _ in range(3) for flag in FLAGS.values()}) == 3


def test_in_scope():
    """A submodule that is an attribute, and used twice, is one in the copy too."""

    class Twice(nn.Module):
        inner: nn.Module

        def __call__(self, x):
            return self.inner(self.inner(x))

    inner = nn.Dense(4)
    with relied_on("flax", "flax_linen.in_scope", "the argument `_deep_clone` of Module.clone"):
        run(Twice(inner), lambda module: module(X), Hooks())
        assert inner.scope is None, "the user's own module stays unbound"


def test_sow_nothing():
    def init(key):
        def intercept(next_fun, args, kwargs, context):
            sow_nothing(context.module)
            return next_fun(*args, **kwargs)

        with nn.intercept_methods(intercept):
            return Asking().init(dict.fromkeys(("params", "dropout", "noise"), key), X)

    with relied_on("flax", "flax_linen.sow_nothing", "a module sows by its attribute `sow`"):
        assert set(init(jax.random.key(0))) == {"params"}


def test_unbox_tree():
    boxes = Asking().init({name: jax.random.key(0) for name in ("params", "dropout", "noise")}, X)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with (
        relied_on("flax", "flax_linen.unbox_tree", "the argument `apply_constraint` of a box"),
        jax.set_mesh(mesh),
    ):
        values = jax.jit(unbox_tree)(boxes["params"])
        assert values["Dense_0"]["kernel"].shape == (4, 3)


def test_original_method():
    """What a user wraps the method in is not run again."""
    calls = []

    class Wrapped(nn.Module):
        @nn.remat
        @nn.compact
        def __call__(self, x):
            calls.append("method")
            return nn.Dense(4)(x)

    def intercept(next_fun, args, kwargs, context):
        if isinstance(context.module, Wrapped) and context.method_name == "__call__":
            calls.append(original_method(context))
        return next_fun(*args, **kwargs)

    with (
        relied_on("flax", "flax_linen.original_method", "`orig_method.func` of an interceptor"),
        nn.intercept_methods(intercept),
    ):
        Wrapped().init(jax.random.key(0), X)
        methods = [call for call in calls if call != "method"]
        assert methods
        assert all(callable(method) for method in methods)
        assert all(method.__name__ == "__call__" for method in methods)


class Lifting(nn.Module):
    """Calls a module in the scopes that a lifted transform makes."""

    @nn.compact
    def __call__(self, x):
        return nn.remat(nn.Dense)(3)(x)


def scopes_of_calls(call):
    """The scopes that modules are called in, hooked as those of a run are."""
    found = []

    def intercept(next_fun, args, kwargs, context):
        hook_scope(context.module.scope, Hooks())
        if context.method_name == "__call__":  # not a lifted class's own, in an empty scope
            found.append(context.module.scope)
        return next_fun(*args, **kwargs)

    with nn.intercept_methods(intercept):
        call()
    assert len(found) >= 2
    return found


def test_the_run_of_a_scope():
    module = Lifting()
    variables = module.init(jax.random.key(0), X)
    run = core.apply(lambda scope: in_scope(module, scope)(X), flags=flags_of_run(7))
    with relied_on("flax", "flax_linen.flags_of_run", "lifted scopes have the flags of their own"):
        assert {run_of(scope) for scope in scopes_of_calls(lambda: run(variables))} == {7}
    applied = scopes_of_calls(lambda: module.apply(variables, X))
    assert {run_of(scope) for scope in applied} == {None}


def test_params_of_root():
    module = nn.Sequential([nn.Dense(3), nn.Dense(2)])
    variables = module.init(jax.random.key(0), X)
    given = {id(x) for x in jax.tree.leaves(variables)}
    what = "the variables of a scope's root are the arrays that `apply` is given"
    with relied_on("flax", "flax_linen.params_of_root", what):
        for scope in scopes_of_calls(lambda: module.apply(variables, X)):
            assert {id(x) for x in params_of_root(scope)} == given
