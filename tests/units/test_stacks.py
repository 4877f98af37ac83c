"""Which parameters stack layers: those that transforms of Flax have stacked, whatever their shapes.

Models are traced for their shapes, and one step is planned; nothing is compiled.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax.lora import with_lora
from fsdp_jax.sharding.param_leaves import added_dims

LAYERS, EXPERTS, D, F = 3, 8, 8, 16
PARTS = {"up": (EXPERTS, D, F), "down": (EXPERTS, F, D), "scale": (D,)}
normal = nnx.initializers.normal()


class Experts(nnx.Module):
    """A block of parameters of its own, most of which have one leading dim."""

    def __init__(self, rngs):
        for name, shape in PARTS.items():
            setattr(self, name, nnx.Param(normal(rngs.params(), shape)))

    def __call__(self, x):
        hidden = jnp.einsum("bd,d,edf->bef", x, self.scale[...], self.up[...])
        return x + jnp.einsum("bef,efd->bd", hidden, self.down[...])


class OnlyExperts(nnx.Module):
    """All parameters have one leading dim."""

    def __init__(self, rngs):
        self.up = nnx.Param(normal(rngs.params(), PARTS["up"]))
        self.down = nnx.Param(normal(rngs.params(), PARTS["down"]))


class Model(nnx.Module):
    def __init__(self, make_blocks, rngs):
        self.blocks = make_blocks(rngs)

    def __call__(self, x):
        return self.blocks[1](self.blocks[0](x))


def made_by_scan(rngs):
    make = nnx.scan(lambda _, rngs: (None, Experts(rngs)), in_axes=(nnx.Carry, 0))
    return make(None, rngs.split(LAYERS))[1]


def stacked_by_hand(rngs):
    """Layers that were made one by one, then stacked: a transform adds no dim."""
    layers = [Experts(rngs) for _ in range(LAYERS)]
    states = [nnx.state(layer) for layer in layers]
    return nnx.merge(nnx.graphdef(layers[0]), jax.tree.map(lambda *x: jnp.stack(x), *states))


class LinenExperts(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        for name, shape in PARTS.items():
            x += self.param(name, normal, shape).sum()
        return x, None


LIFTED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}


class LinenGroup(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.scan(LinenExperts, length=LAYERS, **LIFTED)(name="inner")(x, None)


class LinenModel(nn.Module):
    make: object

    @nn.compact
    def __call__(self, x):
        return self.make()(x, None)[0]


# (what makes the blocks, dims that stack layers)
NNX = [
    (lambda rngs: nnx.List([Experts(rngs), Experts(rngs)]), 0),
    (OnlyExperts, 0),
    (lambda rngs: nnx.vmap(Experts)(rngs.split(LAYERS)), 1),
    (lambda rngs: nnx.vmap(OnlyExperts)(rngs.split(LAYERS)), 1),
    (lambda rngs: nnx.vmap(nnx.vmap(Experts))(rngs.split((2, LAYERS))), 2),
    (made_by_scan, 1),
    (stacked_by_hand, 1),
    (lambda rngs: nnx.vmap(Experts, out_axes=1)(rngs.split(LAYERS)), 0),  # no leading dim
]
LINEN = [
    (lambda: LinenExperts(name="blocks"), 0),
    (lambda: nn.scan(LinenExperts, length=LAYERS, **LIFTED)(name="blocks"), 1),
    (lambda: nn.scan(LinenGroup, length=2, **LIFTED)(name="blocks"), 2),
]


def shard(model, **settings):
    return fsdp.fully_shard(model, optax.sgd(0.1), fsdp.make_mesh(), min_size=512, **settings)


def test_layers_are_what_a_transform_stacks():
    inputs = (jax.ShapeDtypeStruct((1, D), jnp.float32),)
    models = [(lambda rngs, make=make: Model(make, rngs), {}, dims) for make, dims in NNX]
    models += [(LinenModel(make), {"inputs": inputs}, dims) for make, dims in LINEN]
    for number, (model, settings, dims) in enumerate(models):
        leaves = shard(model, **settings).layout.by_path.values()
        assert {leaf.stacked for leaf in leaves} == {dims}, number


def test_a_stack_that_is_named_is_one():
    sharded = shard(lambda rngs: Model(OnlyExperts, rngs), stacked=["blocks/up"])
    assert {p: leaf.stacked for p, leaf in sharded.layout.by_path.items()} == {
        "blocks/down": 0,
        "blocks/up": 1,
    }
    nested = shard(lambda rngs: Model(NNX[4][0], rngs), stacked=["blocks/up"])
    assert nested.layout.by_path["blocks/up"].stacked == 2


def loss(model, batch):
    return (model(batch) ** 2).sum(), batch.shape[0]


@pytest.mark.parametrize("local_batch", [False, True])
def test_experts_are_sharded_by_a_rule(local_batch):
    """Also where each device runs on its own rows; and `min_size` counts all experts."""
    make = lambda rngs: Model(NNX[0][0], rngs)  # noqa: E731
    sharded = shard(make, rules=[("blocks/./up", ("data",))], units=[Experts])
    specs = {path: leaf.spec for path, leaf in sharded.layout.by_path.items()}
    assert specs["blocks/0/up"] == P("data")
    assert specs["blocks/0/down"] == P(None, "data")  # 1024 elements, 128 of an expert
    step = sharded.make_train_step(loss, local_batch=local_batch)
    step.trace(jax.ShapeDtypeStruct((16, D), jnp.float32))


def test_a_scan_over_an_array_that_was_made_whole_says_what_to_name():
    class Layer(OnlyExperts):
        def __call__(self, x):
            return x @ self.up[...] @ self.down[...]

    class Called(nnx.Module):
        def __init__(self, rngs):
            self.layers = Layer(rngs)

        def __call__(self, x):
            scan = nnx.scan(lambda m, x: m(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return scan(self.layers, x)

    rows = jax.ShapeDtypeStruct((16, D), jnp.float32)
    shard(lambda rngs: Called(rngs), units=[Layer]).make_train_step(loss).trace(rows)
    sharded = shard(lambda rngs: Called(rngs), units=[Layer], rules=[("layers/up", ("data",))])
    with refused("slices a sharded dim", where="layers/up", fix="stacked=('path',)"):
        sharded.make_train_step(loss).trace(rows)


def test_adapters_of_stacked_layers_are_stacked():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(D, F, rngs=rngs)

    for stack, dims in ((lambda rngs: nnx.vmap(Layer)(rngs.split(LAYERS)), 1), (Layer, 0)):
        make = lambda rngs, stack=stack: Model(stack, rngs)  # noqa: E731
        adapted = with_lora(make, rank=2, targets=["up"])
        leaves = shard(adapted, frozen=adapted.frozen).layout.by_path.values()
        assert {leaf.stacked for leaf in leaves} == {dims}
        assert len(leaves) == 4


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.scan(LinenDense, length=LAYERS, **LIFTED)(name="layers")(x, None)[0]


class LinenDense(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.Dense(D)(nn.Dense(F)(x)), None


class Dense(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(D, F, rngs=rngs), nnx.Linear(F, D, rngs=rngs)

    def __call__(self, x):
        return self.down(self.up(x))


class ScannedDense(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.vmap(Dense)(rngs.split(LAYERS))

    def __call__(self, x):
        scan = nnx.scan(lambda m, x: m(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return scan(self.layers, x)


class InLinen(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nnx.bridge.to_linen(ScannedDense, name="blocks")(x)


def in_nnx(rngs):
    return nnx.bridge.ToNNX(Stack(), rngs=rngs).lazy_init(jnp.zeros((1, D)))


def replaced(rngs):
    """A parameter of a stack is made again, outside of the transform."""
    model = ScannedDense(rngs)
    model.layers.up.kernel = nnx.Param(2 * model.layers.up.kernel[...])
    return model


def test_layers_within_a_bridge_and_parameters_made_again_are_stacked():
    inputs = (jax.ShapeDtypeStruct((1, D), jnp.float32),)
    for model, settings in (
        (lambda rngs: Model(in_nnx, rngs), {}),
        (InLinen(), {"inputs": inputs}),
        (replaced, {}),
    ):
        leaves = shard(model, **settings).layout.by_path.values()
        assert {leaf.stacked for leaf in leaves} == {1}, model


def test_dims_are_counted_against_the_shapes_that_were_made():
    shapes = {"b/kernel": (4, 8, 16), "b/again": (4, 16), "b/own": (8, 4), "head": (4, 8)}
    made = {"b/kernel": (8, 16), "b/again": (4, 16), "b/own": (8, 4), "head": (4, 8)}
    assert added_dims(made, shapes) == {"b/kernel": 1, "b/again": 1}
    # Of what no transform was seen to make, shapes decide.
    unseen = {"b/up": (4, 8, 16), "b/down": (4, 16, 8)}
    assert added_dims({}, unseen) == {"b/up": 1, "b/down": 1}


def test_layers_that_a_graphdef_from_elsewhere_merges_are_stacked():
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: ScannedDense(nnx.Rngs(0))))

    def make(rngs):
        return nnx.merge(graphdef, nnx.state(ScannedDense(rngs)))

    assert {leaf.stacked for leaf in shard(make).layout.by_path.values()} == {1}
