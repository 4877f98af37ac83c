"""Boxes of Flax, told by their attributes: those of both libraries, and what is none."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from mend import relied_on

from fsdp_jax.compat.flax_boxes import array_in_box, is_box, names_in_box, rules_in_box

pytestmark = pytest.mark.releases

RULES = (("embed", "data"),)
zeros = nn.initializers.zeros


def linen_box():
    boxed = nn.with_logical_partitioning(zeros, ("embed", None), rules=RULES)
    return boxed(jax.random.key(0), (4, 2))


def variable(**metadata):
    with nnx.use_eager_sharding(False):
        return nnx.Param(jnp.zeros((4, 2)), **metadata)


def test_is_box():
    with relied_on("flax", "flax_boxes.is_box", "`names` of Linen's, `get_metadata` of NNX's"):
        assert is_box(linen_box())
        assert is_box(nn.with_partitioning(zeros, ("data",))(jax.random.key(0), (4,)))
        assert is_box(variable())
    assert not is_box(jnp.zeros(3))
    assert not is_box(jax.ShapeDtypeStruct((3,), jnp.float32))


def test_array_in_box():
    with relied_on("flax", "flax_boxes.array_in_box", "`value` of Linen's; a Variable's shape"):
        assert array_in_box(linen_box()).shape == (4, 2)
        assert array_in_box(variable()).shape == (4, 2)
        assert array_in_box(jnp.zeros(3)).shape == (3,)


@pytest.mark.parametrize("make", ["constructor", "with_partitioning", "set_metadata"])
def test_names_in_box_of_nnx(make):
    with relied_on("flax", "flax_boxes.names_in_box", "the metadata `out_sharding` of Variables"):
        if make == "constructor":
            box = variable(out_sharding=("embed", None))
        elif make == "set_metadata":
            box = variable()
            box.set_metadata(out_sharding=("embed", None))
        else:
            init = nnx.with_partitioning(nnx.initializers.zeros_init(), ("embed", None))
            with nnx.use_eager_sharding(False):
                box = nnx.Param(init(jax.random.key(0), (4, 2)))
        assert names_in_box(box) == ("embed", None)
        assert names_in_box(variable()) is None


def test_names_in_box_of_linen():
    with relied_on("flax", "flax_boxes.names_in_box", "`names` of Linen's boxes"):
        assert names_in_box(linen_box()) == ("embed", None)
    assert names_in_box(jnp.zeros(3)) is None


def test_rules_in_box():
    with relied_on("flax", "flax_boxes.rules_in_box", "`rules`, and the metadata `sharding_rules`"):
        assert rules_in_box(linen_box()) == RULES
        assert rules_in_box(variable(out_sharding=("embed",), sharding_rules=RULES)) == RULES
    assert rules_in_box(variable()) is None
    assert rules_in_box(jnp.zeros(3)) is None
