"""Warnings where prefetch moves nothing, and the XLA options that overlap needs.

All of it follows from the plan and the trace of a step; nothing is compiled.
"""

import contextlib
import dataclasses
from functools import cache
from math import prod
from types import SimpleNamespace

import jax
import optax
import pytest
from reference import CASES, gpt, on_eight
from refusals import refused
from small import SMALL

import fsdp_jax as fsdp
from fsdp_jax.step import xla_options
from fsdp_jax.step.step_plan import NOTHING_MOVED
from fsdp_jax.step.xla_options import (
    compiled_by_caller,
    compiler_options,
    with_sparse_cores,
)

pytestmark = pytest.mark.releases

MIXED = fsdp.Precision(compute="bfloat16", reduce="float32")
BF16 = fsdp.Precision(compute="bfloat16")


def gpt_case(scan=True, **sizes):
    return dataclasses.replace(CASES["nnx-gpt-scanned"], model=gpt(scan, **sizes))


def step_of(case=SMALL, units=None, *, strategy="full_shard", prefetch="pre", **settings):
    sharded = on_eight(
        case.model,
        optax.adam(1e-3),
        strategy=strategy,
        units=units or case.units,
        prefetch=prefetch,
        **settings,
    )
    return sharded.make_train_step(case.loss, local_batch=True)


@cache
def traced(case=SMALL, *, warns=None, **settings):
    """The plan of a traced step, and what was prefetched; unexpected warnings are errors."""
    step = step_of(case, **settings)
    with pytest.warns(fsdp.SlowerWarning, match=warns) if warns else contextlib.nullcontext():
        step.lower(case.batch(0))
    return step.plan, step.report.prefetch


def test_a_single_unit_warns_that_nothing_is_prefetched():
    _, report = traced(
        units="model", warns="no unit follows another, so none is gathered ahead; two units"
    )
    assert not report.prefetched


def test_parameters_gathered_once_a_step_are_not_prefetched():
    with pytest.warns(fsdp.SlowerWarning, match="'pre' has no effect: 'shard_grad_op' does not"):
        _, report = traced(strategy="shard_grad_op")
    assert not report.prefetched
    assert not report.not_prefetched


@dataclasses.dataclass(frozen=True)
class Gpu:
    platform: str = "gpu"
    process_index: int = 0
    device_kind: str = "NVIDIA H100 80GB HBM3"


def options_on_gpu(plan, report):
    """The options of a traced step, as if its mesh were of GPUs."""
    return compiler_options(on_gpu(plan), report)


def on_gpu(plan, device=Gpu()):
    """The plan, as if its mesh were of GPUs, or of another device."""

    class Mesh:
        devices = fsdp.make_mesh(data=8).devices.astype(object)

    Mesh.devices.fill(device)
    layout = dataclasses.replace(plan.layout)
    object.__setattr__(layout, "axes", SimpleNamespace(mesh=Mesh))
    return dataclasses.replace(plan, layout=layout)


def test_gathers_of_padded_parameters_are_combined_too():
    """One byte less, and XLA leaves the last of them out: its gather is exposed."""
    plan, report = traced(gpt_case(layers=3, width=22), precision=BF16)
    blocks = [leaf for leaf in plan.layout.by_path.values() if leaf.stacked]
    norms = [leaf for leaf in blocks if "ln_" in leaf.path]
    elements = sum(prod(leaf.stored_shape[1:]) for leaf in blocks)
    in_float32 = sum(prod(leaf.stored_shape[1:]) for leaf in norms)
    options = options_on_gpu(plan, report)
    assert any(leaf.is_padded for leaf in blocks)
    found = options["xla_gpu_all_gather_combine_threshold_bytes"]
    assert found == 2 * elements + 2 * in_float32


@pytest.mark.parametrize(("scan", "layers"), [(True, 3), (False, 2)])
def test_on_a_gpu_the_gathers_of_a_layer_are_combined(scan, layers):
    """A layer of GPT has 12 D^2 + 13 D parameters."""
    plan, report = traced(gpt_case(scan, layers=layers), precision=BF16)
    norms, width = 4 * 16, 2
    layer = (12 * 16**2 + 13 * 16 - norms) * width + norms * 4
    assert options_on_gpu(plan, report) == {
        "xla_gpu_all_gather_combine_threshold_bytes": layer,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": layer // 8,  # XLA counts the results
        "xla_gpu_enable_latency_hiding_scheduler": True,
    }
    assert compiler_options(plan, report) == {}, "the CPU knows no such option"


def test_wider_gradients_are_combined_by_their_own_bytes():
    options = options_on_gpu(*traced(gpt_case(), precision=MIXED))
    elements, in_float32 = 12 * 16**2 + 13 * 16, 4 * 16  # the norms
    found = [
        options[f"xla_gpu_{op}_combine_threshold_bytes"] for op in ("all_gather", "reduce_scatter")
    ]
    assert found == [2 * elements + 2 * in_float32, 4 * elements // 8]


def test_without_prefetch_no_options_are_set():
    assert options_on_gpu(*traced(prefetch="none")) == {}


@pytest.mark.parametrize(
    ("kind", "prefetch", "local_batch", "some"),
    [
        ("TPU v5", "pre", True, {"xla_tpu_enable_sparse_core_collective_offload_all_gather": True}),
        ("TPU v6 lite", "post", True, {"xla_sc_enable_instruction_fusion": False}),
        ("TPU v5", "none", False, {"xla_sc_enable_instruction_fusion": False}),  # by annotations
        ("TPU v5", "none", True, {"xla_max_concurrent_async_all_gathers": 3}),
        ("TPU v5 lite", "pre", True, {}),  # it has no SparseCores
        (
            "TPU v5 lite",
            "none",
            False,
            {"xla_tpu_enable_windowed_einsum_for_reduce_scatter": False},
        ),
    ],
)
def test_a_tpu_has_options_of_its_kind(kind, prefetch, local_batch, some):
    plan, report = step_of(prefetch=prefetch).plan, traced()[1]
    plan = dataclasses.replace(plan, local_batch=local_batch)
    plan = with_sparse_cores(on_gpu(plan, Gpu("tpu", 0, kind)))
    options = compiler_options(plan, report)
    assert some.items() <= options.items()
    assert bool(options) == bool(some)


def test_an_option_that_xla_lacks_is_named(monkeypatch):
    monkeypatch.setattr(xla_options, "offload_options", lambda plan: {"xla_tpu_gone": True})
    lowered = jax.jit(lambda x: (x + 1, NOTHING_MOVED)).lower(1.0)
    with refused("XLA does not know", where="make_train_step", got="xla_tpu_gone"):
        xla_options.compile_overlapped(lowered, step_of().plan)


@pytest.mark.parametrize("what", ["activations", "params", "optimizer"])
def test_what_is_offloaded_is_read_in_order_on_a_gpu(monkeypatch, what):
    offload = fsdp.Offload(**{what: True})
    step = step_of(prefetch="none", remat="full", offload=offload)
    plan, moved = step.plan, traced()[1]
    options = options_on_gpu(plan, step.report.prefetch)
    assert options == {"xla_disable_hlo_passes": "dynamic-slice-annotator"}
    with_prefetch = step_of(remat="full", offload=offload).plan
    assert options.items() < options_on_gpu(with_prefetch, moved).items()
    monkeypatch.setenv("XLA_FLAGS", "")
    with refused("gradients are wrong", where="offload", fix="XLA_FLAGS=--xla_disable"):
        compiled_by_caller(on_gpu(plan))
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=dynamic-slice-annotator")
    compiled_by_caller(plan)
