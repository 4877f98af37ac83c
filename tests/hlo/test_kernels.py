"""Kernels are named by parameter and pass, in stored programs of GPUs and TPUs."""

import gzip
from pathlib import Path

import pytest

from fsdp_jax.hlo.kernels import kernel_label, pass_of
from fsdp_jax.hlo.parser import parse_program

PROGRAMS = Path(__file__).parent / "programs"
STEP = "jit(step)/shard_map/"


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        (f"{STEP}jvp()/while/body/closed_call/dot_general", "forward"),
        (f"{STEP}transpose(jvp())/while/body/checkpoint/dot_general", "backward"),
        (f"{STEP}transpose(jvp())/checkpoint/rematted_computation/dot_general", "recomputed"),
        (f"{STEP}mul", ""),
    ],
)
def test_the_pass_of_an_operation(op_name, expected):
    assert pass_of(op_name) == expected


def read(program):
    return parse_program(gzip.decompress((PROGRAMS / f"{program}.txt.gz").read_bytes()).decode())


def labels(program, loops):
    """The names of matmuls in the bodies of loops, whose names begin so."""
    module = read(program)
    return [
        kernel_label(module, within, one, matmul=True)
        for within in module.computations.values()
        if within.name.startswith(loops)
        for one in within.instructions
        if one.opcode == "fusion"
        and any(each.opcode in ("dot", "convolution") for each in module[one.calls[0]].instructions)
    ]


def test_matmuls_on_gpus_are_named_by_parameter_and_pass():
    up, down = "blocks/mlp/up/kernel", "blocks/mlp/down/kernel"
    assert labels("h100_mapped", "region_0.1") == [f"{up}, forward", f"{down}, forward"]
    backward = labels("h100_mapped", "region_4.7")
    # the gradients of both inputs and of both parameters, and what is computed again
    assert sorted(backward) == sorted(
        [f"{up}, recomputed", *[f"{path}, backward" for path in (up, up, down, down)]]
    )


def test_matmuls_of_a_tpus_program():
    # XLA runs both matmuls in one fusion: it is named after the module that has both
    assert labels("v5p_mapped", "wide.region_0.1") == ["blocks/mlp, forward"]
    named = [label for label in labels("v5p_mapped", "wide.region_4.7") if "mlp" in label]
    assert len(named) == 4


def test_what_names_no_parameter_is_the_traced_operation():
    module = read("h100_mapped")
    body = module.computations["region_0.1_spmd"]
    (matmul, *_) = [one for one in body.instructions if "gemm_fusion" in one.name]
    assert kernel_label(module, body, matmul, matmul=False) == "dot_general, forward"
