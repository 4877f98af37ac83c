"""XLA's warnings of arrays that it replicates, provoked on 8 virtual devices."""

import os
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax.hlo.partitioner_log import (
    Rematerialization,
    collect_rematerializations,
    find_rematerializations,
)
from fsdp_jax.sharding.mesh import make_mesh

pytestmark = pytest.mark.releases

OLD = (  # the wording of XLA in 2023
    "[spmd] Involuntary full rematerialization. The compiler was not able to go from sharding "
    "{devices=[8,1]<=[8]} to {devices=[2,4]<=[8]} without doing a full rematerialization of the "
    "tensor for HLO operation: "
    '%copy.3 = f32[4,2]{1,0} copy(%x), metadata={op_name="jit(f)/mlp/mul"}. '
    "You want to enrich the annotations."
)


def compile_reshard(name: str, after: PartitionSpec, scale: float) -> None:
    """Reshards [8, 16, 32] from two mesh axes; another `scale` is another program."""
    mesh = make_mesh(data=4, replica=2)

    def f(x):
        with jax.named_scope(name):
            x = jax.lax.with_sharding_constraint(
                x * scale, NamedSharding(mesh, PartitionSpec(None, "replica", "data"))
            )
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, after)) + 1

    jax.jit(f).lower(jax.ShapeDtypeStruct((8, 16, 32), jnp.float32)).compile()


def test_a_reshard_that_replicates_is_found_with_its_path(capfd):
    with collect_rematerializations() as found:
        compile_reshard("fsdp.gather[blocks/mlp/up]", PartitionSpec(("replica", "data")), 2.0)
    shape = "f32[8,8,8]"  # 16/2 and 32/4
    assert [(one.shape, one.path) for one in found] == [(shape, "blocks/mlp/up")]
    assert "fsdp.gather[blocks/mlp/up]" in found[0].op_name
    assert "Involuntary full rematerialization" in capfd.readouterr().err, "written out afterwards"


def test_a_cached_program_is_reported_all_the_same():
    assert jax.config.jax_enable_compilation_cache
    for _ in range(2):
        compile_reshard("cached", PartitionSpec(("replica", "data")), 5.0)
    with collect_rematerializations() as found:
        compile_reshard("cached", PartitionSpec(("replica", "data")), 5.0)
    assert [one.shape for one in found] == ["f32[8,8,8]"]
    assert jax.config.jax_enable_compilation_cache


def test_a_reshard_by_an_exchange_is_not_reported():
    with collect_rematerializations() as found:
        compile_reshard("f", PartitionSpec("replica", None, "data"), 3.0)
    assert found == []


def test_other_output_on_stderr_is_kept_in_order(capfd):
    with collect_rematerializations() as outer:
        os.write(2, b"one\n")
        with collect_rematerializations() as inner:
            print("two", file=sys.__stderr__)
            os.write(2, f"{OLD}\n".encode())
        os.write(2, b"three\n")
        assert outer == []
    assert inner == outer == [Rematerialization("jit(f)/mlp/mul", "f32[4,2]")]
    assert inner[0].path == "mlp/mul"
    assert capfd.readouterr().err == f"one\ntwo\n{OLD}\nthree\n"


def test_an_exception_restores_the_descriptor(capfd):
    seen = []

    def fails():
        with collect_rematerializations() as found:
            seen.append(found)
            os.write(2, f"{OLD}\n".encode())
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        fails()
    assert len(seen[0]) == 1
    os.write(2, b"after\n")
    assert capfd.readouterr().err == f"{OLD}\nafter\n"


def test_no_descriptor_is_left_open():
    before = os.dup(2)
    os.close(before)
    for _ in range(3):
        with collect_rematerializations():
            pass
    after = os.dup(2)
    os.close(after)
    assert after == before  # the lowest free number is what it was


def test_the_same_warning_twice_counts_once():
    assert len(find_rematerializations(f"W1121 07:41:14 x.cc:1] {OLD}\nnoise\n{OLD}\n")) == 1
    assert find_rematerializations("[SPMD] all is well") == []
