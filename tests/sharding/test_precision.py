"""Precision: the dtypes of storage, compute and reduction, and what stays in float32."""

import jax.numpy as jnp
import numpy as np
import pytest
from for_each import for_each
from refusals import refused

from fsdp_jax.sharding.precision import Precision

pytestmark = pytest.mark.releases

MIXED = Precision(compute="bfloat16")


def test_float32_throughout_by_default():
    precision = Precision()
    assert precision.cast_dtype is None
    assert precision.output_dtype is None
    assert precision.comm_dtypes(False, "float32") == ("float32", "float32")
    assert precision.output is None


@for_each("field", ["param", "compute", "reduce", "output"])
@for_each(
    ("name", "meant"),
    [("bfloat61", "bfloat16"), ("bf16", "bfloat16"), ("fp32", "float32"), ("Float32", "float32")],
)
def test_unknown_dtypes_name_their_field_and_the_nearest(field, name, meant):
    with refused(f"unknown dtype '{name}'", where=f"precision.{field}", fix=f"'{meant}'"):
        Precision(**{field: name})


@for_each("name", ["float64", "int8", "float8_e4m3fn"])
def test_dtypes_that_exist_and_are_not_for_training(name):
    with refused("unknown dtype", where="precision.param"):
        Precision(param=name)


@for_each(
    ("precision", "keep", "expected"),
    [
        (MIXED, False, ("bfloat16", "bfloat16")),
        (MIXED, True, ("float32", "float32")),
        (Precision(compute="bfloat16", reduce="float32"), False, ("bfloat16", "float32")),
        (Precision(compute="bfloat16", reduce="bfloat16"), False, ("bfloat16", "bfloat16")),
        # parameters kept in float32 are reduced in float32
        (Precision(compute="bfloat16", reduce="bfloat16"), True, ("float32", "float32")),
        (Precision(param="bfloat16", compute="bfloat16"), True, ("float32", "float32")),
    ],
)
def test_compute_and_reduce_dtypes(precision, keep, expected):
    assert precision.comm_dtypes(keep, "float32") == tuple(map(jnp.dtype, expected))


@for_each("dtype", ["int32", "uint8", "bool"])
def test_other_dtypes_than_floats_are_not_cast(dtype):
    precision = Precision(param="bfloat16", compute="bfloat16", reduce="float32")
    assert precision.comm_dtypes(False, dtype) == (np.dtype(dtype), np.dtype(dtype))
    assert precision.storage_dtype(dtype) == np.dtype(dtype)


def test_floats_are_stored_in_the_parameter_dtype():
    for dtype in ("float32", "float16", "bfloat16"):
        assert Precision(param="bfloat16").storage_dtype(dtype) == jnp.bfloat16
        assert Precision().storage_dtype(dtype) == jnp.float32


def test_dtypes_of_inputs_and_outputs():
    for precision in (
        MIXED,
        Precision(param="bfloat16", compute="bfloat16"),
    ):  # norms stay in float32
        assert precision.cast_dtype == jnp.bfloat16
        assert precision.output_dtype == jnp.float32
    assert Precision(param=None, compute=None).cast_dtype is None
    assert Precision(compute="bfloat16", output="bfloat16").output_dtype == jnp.bfloat16


@for_each(
    ("names", "keep"),
    [
        (("blocks/0/norm/scale",), True),
        (("LayerNorm", "Module"), True),
        (("RMSNorm",), True),
        (("blocks/0/ln_1/scale",), False),
        (("Linear",), False),
        ((), False),
    ],
)
def test_norms_are_kept_by_path_or_by_class(names, keep):
    assert MIXED.keeps(names) is keep


def test_keep_float32_is_the_users_choice():
    precision = Precision(compute="bfloat16", keep_float32=("^head/", "Router"))
    assert precision.keeps(("head/kernel",))
    assert precision.keeps(("MoERouter",))
    assert not precision.keeps(("blocks/head/kernel", "LayerNorm"))
    assert not Precision(keep_float32=()).keeps(("LayerNorm",))


def test_one_pattern_is_not_a_sequence_of_letters():
    with refused(where="precision.keep_float32", fix="('Norm',)"):
        Precision(keep_float32="Norm")


def test_a_policy_is_a_value():
    assert Precision(compute="bfloat16") == MIXED
    assert len({MIXED, Precision(compute="bfloat16"), Precision()}) == 2


def test_patterns_must_be_regular_expressions():
    with pytest.raises(ValueError, match=r"not a regular expression(?s:.*)keep_float32"):
        Precision(keep_float32=("(Norm",))
