"""Validates plans against step times of published runs, and against a real GPU's allocator.

    python scripts/validate_plan.py [--rows NAME ...] [--json FILE]      published runs
    python scripts/validate_plan.py --analytic [--json FILE]             the same without compilers
    python scripts/validate_plan.py --fit [CHIP ...]                     fits the constants
    python scripts/validate_plan.py --estimates [--json FILE]            analytic and compiled peaks
    python scripts/validate_plan.py --allocator [--json FILE]            on an NVIDIA GPU, 8 minutes

All but the last need no device; scipy comes with jax.

Conventions
- Published: tokens per second and device of the plan over the published ones; above 1 the plan is
  too fast. Each run's model, sequence, devices and recomputation are built from our own families,
  compiled for its topology and simulated by the planner; MFU is proportional to tokens per second,
  so the ratio is that of MFU too.
- `recomputed` is the share of full recomputation's FLOPs that the run computes twice. Between 0 and
  1 the plan is the mean of no and full recomputation, so weighted; where the plan without it does
  not fit, and on TPUs, the full plan less the forward loop's time so weighted.
- `batch` is rows of a device at once. Where the published one does not fit ours (no chunked loss,
  no selective recomputation in between), or XLA would compute results again to make it fit, it is
  smaller, which the row states; a token then costs as much, but more is sent for it.
- A row of which XLA computes results again all the same is marked.
- A row of which a program does not fit the chip's usable memory is marked, and counts in no mean.
- `kernel` names the run's own attention kernel; `KERNELS` has the shares of the peak rate.
- The constants are fitted on the rows marked `fit`, each publisher with the same weight: the
  efficiency `matmul` of the chips in `FITTED`, and the rates of MosaicML's Triton kernel. The rows
  marked `out of sample` were never used. Exit code 3 if fewer than 90% of these are within 15%, one
  is beyond 20%, or the mean of a chip is off by more than 3%.
- Allocator: `peak_bytes_in_use` of jax's allocator over the plan's peak, for one of eight mocked
  H100s or for one GPU.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
from bench_results import save
from scipy.optimize import least_squares

CONFIG = Path(__file__).parent.parent / "configs" / "llama2_7b.yaml"
WITHIN, BEYOND, MEAN, SHARE = 0.15, 0.20, 0.03, 0.90

SOURCES = {
    "MosaicML": "github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md, 061f2c7",
    "fms-fsdp": "pytorch.org/blog/maximizing-training-throughput, May 2024",
    "fms-fsdp, eager": "github.com/foundation-model-stack/fms-fsdp, README.md, 0d31998, 2024",
    "torchtitan": "github.com/pytorch/torchtitan, docs/performance.md, 0413364, June 2024",
    "JAX-Toolbox": "docs.nvidia.com/jax-toolbox, frameworks/max-text/overview, 2024",
    "MaxText": "github.com/AI-Hypercomputer/maxtext, configs/a3/llama_2_7b/README.md, d2aa7f2",
    "DGX Cloud": "github.com/NVIDIA/dgxc-benchmarking, maxtext, Llama 2 and 3 70B, December 2024",
    "TinyLlama": "github.com/jzhang38/TinyLlama, README.md, 026587c, September 2023",
    "MaxText, TPU": "github.com/AI-Hypercomputer/maxtext, README.md, v5p; bdc4d8d6d, August 2024",
    "Trillium recipes": "github.com/AI-Hypercomputer/tpu-recipes, training/trillium",
    "Ironwood recipes": "github.com/AI-Hypercomputer/tpu-recipes, training/ironwood, bc90a99",
    "Megatron Bridge": "github.com/NVIDIA-NeMo/Megatron-Bridge, performance-summary-archive.md",
}
"""Where each publisher's figures are, with the commit or date."""

KERNELS = {
    "cudnn": {"h100": 0.51},
    "fa2": {"h100": 0.33, "a100-80gb": 0.58, "a100-40gb": 0.58},
    "triton": {"h100": 0.172, "a100-80gb": 0.58, "a100-40gb": 0.58},
    "tpu": {},
}
"""Of the peak rate on long sequences: cuDNN and FlashAttention-2 as measured alone (`chips.toml`;
FlashAttention-3's figures for FlashAttention-2 on an H100), MosaicML's Triton kernel fitted (to its
bound on an A100)."""


@dataclass(frozen=True)
class Row:
    """A published run.

    Attributes:
        name: of the row.
        source: who published it, a key of `SOURCES`.
        topology: ours for it.
        model: overrides of configs/llama2_7b.yaml.
        batch: rows of a device at once.
        recomputed: see above.
        kernel: see above.
        tokens: per second and device, as published.
        note: in what ours differs.
        fit: whether constants are fitted on it.

    """

    name: str
    source: str
    topology: str
    model: str
    batch: int
    recomputed: float
    kernel: str
    tokens: float
    note: str = ""
    fit: bool = False

    @property
    def chip(self) -> str:
        """The chip's name."""
        return self.topology.partition(":")[0]

    @property
    def role(self) -> str:
        """Whether constants are fitted on it."""
        return "fit" if self.fit else "out of sample"

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return self._setting("--train.accumulation", 1)

    @property
    def tokens_of_step(self) -> int:
        """Tokens of a device in a step."""
        return self.batch * self.microbatches * self._setting("--data.sequence_length", 0)

    def _setting(self, key: str, default: int) -> int:
        """The value of an integer override of the model."""
        words = self.model.split()
        return int(words[words.index(key) + 1]) if key in words else default


_FLOAT32 = " --precision.reduce float32 --train.local_batch True"
_HYBRID = " --strategy hybrid_shard --mesh.replica "


def _llama(preset: str, sequence: int) -> str:
    return f"--model.preset {preset} --data.sequence_length {sequence}"


_7B, _13B, _70B = (_llama(f"llama2-{size}", 4096) for size in ("7b", "13b", "70b"))
_34B = _llama("code-llama-34b", 4096)
_L3_8B, _L3_70B = (_llama(f"llama3-{size}", 8192) for size in ("8b", "70b"))
_405B = _llama("llama3-405b", 8192) + " --offload.activations True"
_TINY = _llama("tiny-llama", 2048)
_SAVE_QKV = 0.87  # save_qkv_proj: all but 84 of 621 M multiply-adds of a block of width 8192
_SAVE_CONTEXT = 0.78  # that, and what attention returns
# On TPUs gathers are hidden, and gathers in float8 plan a slower step.
_FLOAT8 = " --precision.matmul float8"
# On GPUs no matmul waits for the scales of other devices, and every published run gathers kernels
# in float8: Megatron Bridge says so (fp8_param_gather, perf_recipes/llama/gb300/llama3.py there);
# where scales are delayed (DGX Cloud), XLA casts a kernel before its gather.
_OWN = " --train.local_batch True"
_F8_OWN = _FLOAT8 + " --precision.gather float8_e4m3fn" + _OWN
# Megatron Core without FSDP: a distributed optimizer, 8 microbatches. Gradients are reduced in each
# of them here, behind compute, and once there, behind the last: one reduction of ours after the
# last (--train.deferred_reduction) would be exposed.
_DDP = _FLOAT8 + _OWN + " --strategy zero1 --train.accumulation 8"
_QKV = " --remat_save qkv"  # save_qkv_proj
_464 = "464 GPUs there, which divide no dim"
# MaxText's global_parameter_scale 32, and its remat_policy minimal. In its runs 4 or 8 chips share
# each matmul. At 32B the plan hides what FSDP sends instead; of the larger models it would not.
_V5P = _llama("maxtext", 2048) + " --remat dots"
_MPT = {
    "760M": (24, 1536, 12),
    "1B": (24, 2048, 16),
    "3B": (32, 2560, 20),
    "7B": (32, 4096, 32),
    "13B": (40, 5120, 40),
    "30B": (48, 7168, 56),
    "70B": (80, 8192, 64),
}
"""(layers, width, heads) of MosaicML's models."""


def _mpt(
    topology: str,
    size: str,
    sequence: int,
    batch: int,
    recomputed: float,
    tokens: float,
    *,
    fit: bool = False,
    note: str = "",
) -> Row:
    """Returns a run of MosaicML's."""
    layers, width, heads = _MPT[size]
    model = "--model.family gpt --model.preset gpt2 --units.classes Block"
    model += f" --model.layers {layers} --model.width {width} --model.heads {heads}"
    model += f" --data.sequence_length {sequence}{_FLOAT32}"
    name = f"MPT {size} {sequence}"
    return Row(name, "MosaicML", topology, model, batch, recomputed, "triton", tokens, note, fit)


def _rows(fit: bool, *rows: Sequence[Any]) -> tuple[Row, ...]:
    """Returns rows of one role; each is (name, source, topology, model, batch, ..., note)."""
    return tuple(replace(Row(*each), fit=fit) for each in rows)


_A80, _A40 = "a100-80gb", "a100-40gb"
ROWS = (
    _mpt("h100:8", "760M", 2048, 24, 0, 63147, fit=True),
    _mpt("h100:8", "1B", 2048, 14, 0, 45455, fit=True),
    _mpt("h100:8", "3B", 4096, 5, 0, 20964, fit=True),
    _mpt("h100:8", "3B", 512, 40, 0, 27965, fit=True),
    _mpt("h100:8", "7B", 2048, 4, 0, 10643, fit=True, note="batch 6 there"),
    _mpt("h100:8", "7B", 4096, 16, 1, 8611, fit=True),
    _mpt("h100:8", "7B", 8192, 8, 1, 6935, fit=True),
    _mpt("h100:8", "13B", 4096, 10, 1, 4717, fit=True),
    _mpt(f"{_A80}:8", "1B", 2048, 14, 0, 20513, fit=True),
    _mpt(f"{_A80}:8", "3B", 2048, 10, 0, 10811, fit=True),
    _mpt(f"{_A80}:8", "3B", 512, 40, 0, 12127, fit=True),
    _mpt(f"{_A80}:8", "7B", 2048, 4, 0, 4641, fit=True, note="batch 6 there"),
    _mpt(f"{_A80}:8", "7B", 4096, 16, 1, 3684, fit=True),
    _mpt(f"{_A80}:8", "7B", 8192, 8, 1, 3206, fit=True),
    _mpt(f"{_A80}:8", "13B", 4096, 10, 1, 2060, fit=True),
    # name, source, topology, model, batch, recomputed, kernel, tokens, note
    *_rows(
        True,
        ("Llama 3 70B", "DGX Cloud", "h100:16x8", _L3_70B + _QKV, 1, 1, "cudnn", 1052.8,
         "batch 2 there"),
        ("Llama 2 13B, every second layer recomputed", "torchtitan", f"{_A80}:8x8",
         _13B + _FLOAT32, 2, 0.5, "fa2", 1914),
        ("Llama 3 8B, every second layer recomputed", "torchtitan", f"{_A80}:8x8",
         _L3_8B + _FLOAT32, 1, 0.5, "fa2", 2904),
        ("Code Llama 34B", "fms-fsdp, eager", f"{_A80}:16x8", _34B, 8, 1, "fa2", 772),
        ("Llama 3.1 8B", "Trillium recipes", "v6e:2x4", _llama("llama3-8b", 8192), 2, 0.85, "tpu",
         7138.9, "batch 3 there"),
        ("Llama 3.1 70B", "Ironwood recipes", "tpu7x:4x4x4", _L3_70B, 2, _SAVE_CONTEXT, "tpu",
         2687 / 2),
        ("Llama 3 8B, float8", "Megatron Bridge", "b200:8",
         _L3_8B + _DDP, 2, 0, "cudnn", 30624),
        ("Llama 3 70B, float8", "Megatron Bridge", "gb300:16x4", _L3_70B + _F8_OWN, 1, 0,
         "cudnn", 5248, "batch 2 there, activations of 20 layers in host memory"),
        ("Llama 32B", "MaxText, TPU", "v5p:4x4x4", _V5P + " --model.layers 32", 6, 1, "tpu", 1683,
         "4 chips share each matmul there"),
    ),
    _mpt("h100:8", "3B", 8192, 2, 0, 16578, note="batch 3 there"),
    _mpt("h100:8", "7B", 1024, 64, 1, 10203),
    # Every H100 run of theirs on more than one host.
    _mpt("h100:2x8", "760M", 2048, 20, 0, 68551, note="batch 24 there"),
    _mpt("h100:4x8", "760M", 2048, 20, 0, 67971, note="batch 24 there"),
    _mpt("h100:2x8", "1B", 2048, 14, 0, 46037, note="batch 20 there"),
    _mpt("h100:4x8", "1B", 2048, 14, 0, 45130, note="batch 20 there"),
    _mpt("h100:8x8", "1B", 2048, 14, 0, 44402, note="batch 20 there"),
    _mpt("h100:2x8", "3B", 2048, 10, 0, 24142),
    _mpt("h100:4x8", "3B", 2048, 6, 0, 23021),
    _mpt("h100:8x8", "3B", 2048, 6, 0, 22525),
    _mpt("h100:2x8", "13B", 2048, 2, 0, 4767),
    _mpt("h100:4x8", "13B", 2048, 2, 0, 4811),
    _mpt("h100:8x8", "13B", 2048, 2, 0, 4800),
    _mpt("h100:2x8", "30B", 2048, 10, 1, 2263),
    _mpt("h100:4x8", "30B", 2048, 14, 1, 2308),
    _mpt("h100:4x8", "70B", 2048, 2, 1, 882),
    _mpt("h100:8x8", "70B", 2048, 8, 1, 1039),
    _mpt(f"{_A80}:8", "1B", 512, 56, 0, 23148),
    _mpt(f"{_A80}:8", "3B", 8192, 2, 0, 7695, note="batch 3 there"),
    _mpt(f"{_A80}:8", "7B", 16384, 4, 1, 2453),
    *_rows(
        False,
        ("Llama 2 7B", "JAX-Toolbox", "h100:8", _7B, 2, 0, "cudnn", 11361),
        ("Llama 2 7B", "MaxText", "h100:8", _7B, 2, 0, "cudnn", 10677, "batch 4 there"),
        ("Llama 2 7B", "fms-fsdp", "h100:64x8", _7B + _HYBRID + "64", 2, 0, "fa2", 9500, _464),
        ("Llama 2 13B", "fms-fsdp", "h100:64x8", _13B, 2, 0.47, "fa2", 4820, _464),
        ("Llama 2 70B", "fms-fsdp", "h100:64x8", _70B, 2, 1, "fa2", 890, _464),
        # Every run of theirs on at most 512 GPUs, but for the one above.
        ("Llama 2 70B", "DGX Cloud", "h100:8x8", _70B + _QKV, 2, 1, "cudnn", 1170.5),
        ("Llama 2 70B", "DGX Cloud", "h100:16x8", _70B + _QKV, 2, 1, "cudnn", 1158.4),
        ("Llama 2 70B", "DGX Cloud", "h100:32x8", _70B + _QKV, 2, 1, "cudnn", 1145.3),
        ("Llama 2 70B", "DGX Cloud", "h100:64x8", _70B + _QKV + _HYBRID + "4", 2, 1, "cudnn",
         1155.3),
        ("Llama 3 70B", "DGX Cloud", "h100:32x8", _L3_70B + _QKV, 1, 1, "cudnn", 1060.9,
         "batch 2 there"),
        ("Llama 3 70B", "DGX Cloud", "h100:64x8", _L3_70B + _QKV + _HYBRID + "4", 1, 1, "cudnn",
         1055.7, "batch 2 there"),
        ("Llama 2 70B, float8", "DGX Cloud", "h100:8x8", _70B + _QKV + _F8_OWN, 2, 1, "cudnn",
         1894.5),
        ("Llama 2 70B, float8", "DGX Cloud", "h100:16x8", _70B + _QKV + _F8_OWN, 2, 1, "cudnn",
         1798.1),
        ("Llama 2 70B, float8", "DGX Cloud", "h100:32x8", _70B + _QKV + _F8_OWN, 2, 1, "cudnn",
         1651.9),
        ("Llama 2 70B, float8", "DGX Cloud", "h100:64x8",
         _70B + _QKV + _F8_OWN + _HYBRID + "4", 2, 1, "cudnn", 1624.4),
        ("Llama 3 70B, float8", "DGX Cloud", "h100:16x8", _L3_70B + _QKV + _F8_OWN, 1, 1, "cudnn",
         1805.6, "batch 2 there"),
        ("Llama 3 70B, float8", "DGX Cloud", "h100:32x8", _L3_70B + _QKV + _F8_OWN, 1, 1, "cudnn",
         1726.8, "batch 2 there"),
        ("Llama 3 70B, float8", "DGX Cloud", "h100:64x8",
         _L3_70B + _QKV + _F8_OWN + _HYBRID + "4", 1, 1, "cudnn", 1772.4, "batch 2 there"),
        ("Llama 2 13B", "fms-fsdp", f"{_A80}:16x8", _13B, 2, 0.47, "fa2", 2120),
        ("Llama 2 70B", "fms-fsdp", f"{_A80}:16x8", _70B, 2, 1, "fa2", 407),
        ("Llama 2 7B", "fms-fsdp, eager", f"{_A80}:16x8", _7B + _HYBRID + "16", 2, 0, "fa2", 3760),
        ("Llama 2 13B", "torchtitan", f"{_A80}:8x8", _13B + _FLOAT32, 2, 0, "fa2", 2162),
        ("Llama 2 70B", "torchtitan", f"{_A80}:8x8", _70B + _FLOAT32, 2, 1, "fa2", 353),
        ("Llama 3 70B", "torchtitan", f"{_A80}:8x8", _L3_70B + _FLOAT32, 1, 1, "fa2", 331),
        ("TinyLlama 1.1B", "TinyLlama", f"{_A40}:2x8", _TINY, 8, 0, "fa2", 24000),
        ("Llama 2 70B", "MaxText, TPU", "v5p:4x8x8", _70B, 4, 0.58, "tpu", 692),
        ("Llama 3.1 8B", "Trillium recipes", "v6e:16x16", _llama("llama3-8b", 8192), 3, 0.85,
         "tpu", 7207.3, "batch 4 there"),
        ("Llama 3.1 70B", "Trillium recipes", "v6e:16x16", _L3_70B, 1, 0.90, "tpu", 960.2,
         "batch 5 there"),
        ("Llama 3.1 70B", "Ironwood recipes", "tpu7x:4x8x8", _L3_70B, 2, _SAVE_CONTEXT, "tpu",
         2671 / 2),
        ("Llama 3.1 405B", "Ironwood recipes", "tpu7x:4x8x8", _405B, 3, 1, "tpu", 499.8 / 2,
         "inputs of blocks in host memory; keys and values are saved there"),
        ("Llama 3.1 70B, float8", "Ironwood recipes", "tpu7x:4x4x4", _L3_70B + _FLOAT8, 2,
         _SAVE_CONTEXT, "tpu", 4127.6 / 2, "scales are constants there"),
        ("Llama 3.1 70B, float8", "Ironwood recipes", "tpu7x:4x8x8", _L3_70B + _FLOAT8, 2,
         _SAVE_CONTEXT, "tpu", 4121.0 / 2, "scales are constants there"),
        ("Llama 3.1 405B, float8", "Ironwood recipes", "tpu7x:4x8x8", _405B + _FLOAT8, 3, 1, "tpu",
         763.5 / 2, "inputs of blocks in host memory; scales are constants there"),
        # With those above, each float8 run of theirs with one scale for a tensor and without tensor
        # or pipeline parallelism, as its newest release has it: 26.04.01 for 70B, 25.11 for 8B.
        ("Llama 3 8B, float8", "Megatron Bridge", "h100:8",
         _L3_8B + _F8_OWN + " --train.accumulation 16", 1, 5 / 32, "cudnn", 14451),
        ("Llama 3 8B, float8", "Megatron Bridge", "gb200:2x4",
         _L3_8B + _DDP, 2, 0, "cudnn", 31508),
        ("Llama 3 8B, float8", "Megatron Bridge", "gb300:2x4",
         _L3_8B + _DDP, 2, 0, "cudnn", 37556),
        ("Llama 3 70B, float8", "Megatron Bridge", "gb200:16x4",
         _L3_70B + _F8_OWN + " --offload.activation_names mlp", 1, 0, "cudnn", 4224,
         "batch 2 there, all activations of 40 layers in host memory"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Simulated:
    """The simulated step of a row.

    Attributes:
        seconds: of a step.
        peak_bytes: of a device, of the larger program where two are averaged.
        usable_bytes: of the chip.
        again: instructions by which XLA computes results again for want of memory.

    """

    seconds: float
    peak_bytes: int
    usable_bytes: int
    again: int = 0

    @property
    def fits(self) -> bool:
        """Whether every program fits into the chip's usable memory."""
        return self.peak_bytes <= self.usable_bytes


FITTED = {
    "h100": ("matmul", "triton"),
    "a100-80gb": ("matmul", "triton"),
    "v5p": ("matmul",),
    "v6e": ("matmul",),
    "tpu7x": ("matmul",),
    "b200": ("matmul",),
    "gb300": ("matmul",),
}
"""The rates that are fitted, by chip: of matmuls, and of MosaicML's Triton kernel."""

Constants = dict[str, float]
"""Constants of `Efficiency` by name, in place of those of the table."""


def simulate(row: Row, constants: Constants | None = None) -> Simulated:
    """Simulates a row's step."""
    from fsdp_jax.planner import parse_topology

    chip = parse_topology(row.topology).hardware
    assert chip.efficiency is not None
    kernel = KERNELS[row.kernel].get(chip.name, chip.efficiency.attention)
    changed: dict[str, Any] = {"attention": kernel, **(constants or {})}
    efficiency = replace(chip.efficiency, **changed)
    chip = replace(chip, efficiency=efficiency)
    usable = chip.usable_bytes
    if not row.recomputed:
        step, _, peak, again = _simulate_program(row, "none", chip)
        return Simulated(step, peak, usable, again)
    step, forward, peak, again = _simulate_program(row, "full", chip)
    saved = (1 - row.recomputed) * forward
    if row.recomputed < 1 and chip.platform != "tpu" and _fits_without(row):
        step_without, _, peak_without, again_without = _simulate_program(row, "none", chip)
        if peak_without <= usable:
            saved, peak = (1 - row.recomputed) * (step - step_without), peak_without
            again += again_without
    return Simulated(step - saved, peak, usable, again)


@cache
def _fits_without(row: Row) -> bool:
    """Tells whether a row's step without recomputation fits, by an analytic plan."""
    return estimate(replace(row, recomputed=0)).fits


def _simulate_program(row: Row, remat: str, chip: Any) -> tuple[float, float, int, int]:
    """Simulates one program of a row.

    Returns the seconds of a step and of its forward loop, the peak bytes of a device, and the
    instructions that compute results again.
    """
    from fsdp_jax.planner.compiled.timeline import ScheduleSimulator
    from fsdp_jax.planner.memory_cliff import memory_cliff, scheduler_memory_limit

    module, collectives, mesh, peak = _program(row, remat)
    simulator = ScheduleSimulator(module, collectives, mesh, chip)
    step = simulator.simulate_step()
    loops = [trips * body.seconds for trips, body in simulator.loops.values() if trips > 8]
    cliff = memory_cliff(module, collectives, peak, scheduler_memory_limit(chip, module))
    again = cliff.rematerialized if cliff else 0
    return step.seconds, min(loops, default=0.0), peak, again


def _config(row: Row, remat: str, devices: int) -> Any:
    """Returns the configuration of a row's step."""
    from fsdp_jax.models import llama
    from fsdp_jax.train.config_file import load_config

    llama.PRESETS["code-llama-34b"] = replace(llama.PRESETS["llama2-70b"], layers=48, hidden=22016)
    llama.PRESETS["maxtext"] = replace(llama.PRESETS["llama2-70b"], kv_heads=64)
    llama.PRESETS["llama3-405b"] = replace(
        llama.PRESETS["llama3-70b"], layers=126, width=16384, heads=128, hidden=53248
    )
    llama.PRESETS["tiny-llama"] = replace(
        llama.PRESETS["llama2-7b"], layers=22, width=2048, heads=32, kv_heads=4, hidden=5632
    )
    overrides = [*row.model.split(), "--model.attention", "flash"]
    if "--remat" not in overrides:
        overrides += ["--remat", remat]
    overrides += ["--train.global_batch_size", str(row.batch * row.microbatches * devices)]
    return load_config(CONFIG, overrides)


@cache
def _program(row: Row, remat: str) -> tuple[Any, Any, Any, int]:
    """Compiles a row's step once; returns (module, collectives, mesh, peak bytes)."""
    from fsdp_jax.hlo.collectives import read_collectives
    from fsdp_jax.hlo.parser import parse_program
    from fsdp_jax.planner import cache_folder, parse_topology
    from fsdp_jax.planner.compiled.buffer_assignment import DEFAULT
    from fsdp_jax.planner.compiled.program import compile_step
    from fsdp_jax.train.build import build, topology_devices

    topology = parse_topology(row.topology)
    config = _config(row, remat, topology.size)
    run = build(config, topology_devices(row.topology))
    program = compile_step(run.step, run.batch, topology, cache_folder())
    if not program.text:
        needs = f"{program.refused_bytes} bytes"
        raise SystemExit(f"{row.name} on {row.topology} does not fit: {needs}")
    assert program.report is not None
    mesh = run.step.plan.layout.mesh
    collectives = read_collectives(program.text, mesh.shape).collectives
    return parse_program(program.text), collectives, mesh, program.report.spaces[DEFAULT]


def estimate(row: Row) -> Simulated:
    """Estimates a row's step without a compiler."""
    from fsdp_jax.planner import parse_topology
    from fsdp_jax.train.planning import plan_of

    topology = parse_topology(row.topology)
    seconds, peaks = 0.0, []
    usable = topology.hardware.usable_bytes
    for remat, share in (("full", row.recomputed), ("none", 1 - row.recomputed)):
        if share:
            plan = plan_of(_config(row, remat, topology.size), topology, analytic=True)
            assert plan.time is not None
            seconds += share * plan.time.step_s
            peaks.append(plan.peak_bytes)
    # as compiled: what saves a part fits where the plan with full recomputation does
    peak = peaks[0] if peaks[-1] > usable else max(peaks)
    return Simulated(seconds, peak, usable)


def ratio_of(row: Row, seconds: float) -> float:
    """Returns the plan's tokens per second over the published ones."""
    return row.tokens_of_step / seconds / row.tokens


def fitted(chip: str) -> dict[str, float]:
    """Fits the rates of `FITTED` for a chip, by least squares of logs.

    On all rows of the chip that are marked `fit` and fit into memory, each publisher with the same
    weight. MosaicML's Triton kernel is held to be no faster than FlashAttention-2: publishers'
    matmuls differ, and an unbounded fit explains that by the kernel of one of them.
    """
    rows = [row for row in ROWS if row.fit and row.chip == chip and simulate(row).fits]
    counts = Counter(row.source for row in rows)
    weights = np.sqrt([1 / counts[row.source] for row in rows])

    def errors(rates: Any) -> Any:
        by_name = dict(zip(FITTED[chip], rates, strict=True))
        ratios = []
        for row in rows:
            constants = {"matmul": by_name["matmul"]}
            if row.kernel == "triton":
                constants["attention"] = by_name["triton"]
            ratios.append(log(ratio_of(row, simulate(row, constants).seconds)))
        return weights * ratios

    start, low = {"matmul": 0.7, "triton": 0.25}, {"matmul": 0.1, "triton": 0.05}
    high = {"matmul": 1.0, "triton": KERNELS["fa2"].get(chip, 1.0)}
    names = FITTED[chip]
    bounds = [low[name] for name in names], [high[name] for name in names]
    found = least_squares(
        errors, [start[name] for name in names], bounds=bounds, diff_step=0.02, xtol=1e-3
    )
    return dict(zip(names, map(float, found.x), strict=True))


def published(names: list[str], analytic: bool = False) -> list[dict[str, Any]]:
    """Returns a record for each run; those that match a name, if any are given."""
    records = []
    for row in ROWS:
        label = f"{row.name} {row.source} {row.topology}".lower()
        if names and not any(name.lower() in label for name in names):
            continue
        planned = estimate(row) if analytic else simulate(row)
        ratio = ratio_of(row, planned.seconds)
        record = {
            "run": row.name,
            "source": row.source,
            "address": SOURCES[row.source],
            "topology": row.topology,
            "chip": row.chip,
            "batch": row.batch,
            "recomputed": row.recomputed,
            "role": row.role,
            "published": row.tokens,
            "plan": ratio * row.tokens,
            "ratio": ratio,
            "peak_bytes": planned.peak_bytes,
            "fits": planned.fits,
            "again": planned.again,
            "note": row.note,
        }
        records.append(record)
        print(markdown([record]).splitlines()[-1], file=sys.stderr, flush=True)
    return records


def markdown(records: list[dict[str, Any]]) -> str:
    """Returns the table of docs/evidence.md."""
    lines = [
        "| run | by | topology | published | plan | ratio | |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in records:
        notes = [r["note"]]
        if not r["fits"]:
            notes.append(f"does not fit: {r['peak_bytes'] / 2**30:.1f} GiB, not counted")
        if r["again"]:
            notes.append(f"XLA computes {r['again']} results again")
        note = "; ".join(filter(None, notes))
        lines.append(
            f"| {r['run']} | {r['source']} | {r['topology']} | {r['published']:.0f} "
            f"| {r['plan']:.0f} | {r['ratio']:.2f} | {note} |"
        )
    return "\n".join(lines)


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how far the counted rows of one role are from the published ones."""
    counted = [r for r in records if r["fits"]]
    chips: defaultdict[str, list[float]] = defaultdict(list)
    for r in counted:
        chips[r["chip"].partition("-")[0]].append(log(r["ratio"]))
    far = [abs(log(r["ratio"])) for r in counted]
    within = sum(each < log(1 + WITHIN) for each in far)
    return {
        "rows": len(records),
        "counted": len(counted),
        "within": within,
        "share": within / len(far) if far else 1.0,
        "beyond": sum(each > log(1 + BEYOND) for each in far),
        "worst": exp(max(far, default=0.0)) - 1,
        "means": {chip: exp(sum(logs) / len(logs)) for chip, logs in chips.items()},
    }


def holds(result: dict[str, Any]) -> bool:
    """Tells whether a role's rows are as near as the planner promises."""
    means = all(abs(mean - 1) <= MEAN for mean in result["means"].values())
    return result["share"] >= SHARE and not result["beyond"] and means


def goal_table(results: dict[str, dict[str, Any]]) -> str:
    """Returns the goal, and how far each role's rows are from it, as a table."""
    lines = [
        f"| rows | within {WITHIN:.0%} | beyond {BEYOND:.0%} | worst | mean of each chip | goal |",
        "|---|---|---|---|---|---|",
        f"| *goal* | {SHARE:.0%} | 0 | {BEYOND:.0%} | 1 ± {MEAN:.0%} | |",
    ]
    for role, r in results.items():
        means = ", ".join(f"{chip} {mean:.3f}" for chip, mean in r["means"].items())
        within = f"{r['within']} of {r['counted']} ({r['share']:.0%})"
        verdict = "met" if r["met"] else "missed"
        lines.append(
            f"| {role} | {within} | {r['beyond']} | {r['worst']:.1%} | {means} | {verdict} |"
        )
    return "\n".join(lines)


def estimates() -> list[dict[str, Any]]:
    """Compares analytic and compiled peaks of the models of scripts/bench_contract.py on H100s."""
    from fsdp_jax.planner import cache_folder, parse_topology
    from fsdp_jax.sharding.strategy import STRATEGIES
    from fsdp_jax.train.config_file import load_config
    from fsdp_jax.train.planning import plan_of

    gib = 2**30
    records = []
    machines = (("h100:8", 2), ("h100:64x8", 64))
    for model, (name, replica), strategy in product(("llama2_7b", "gpt2_xl"), machines, STRATEGIES):
        topology = parse_topology(name)
        overrides = ["--strategy", strategy, "--train.global_batch_size", str(topology.size)]
        overrides += ["--mesh.replica", str(replica)] if STRATEGIES[strategy].hybrid else []
        config = load_config(CONFIG.with_name(f"{model}.yaml"), overrides)
        analytic = plan_of(config, topology, analytic=True).peak_bytes
        compiled = plan_of(config, topology, cache=cache_folder()).peak_bytes
        ratio = analytic / compiled
        records.append(
            {
                "model": model,
                "topology": name,
                "strategy": strategy,
                "analytic": analytic,
                "compiled": compiled,
                "ratio": ratio,
            }
        )
        peaks = f"{analytic / gib:.2f} | {compiled / gib:.2f}"
        print(f"| {model} | {name} | {strategy} | {peaks} | {ratio:.3f} |", flush=True)
    return records


ALLOCATED = (
    "--model.layers 4 --remat full",
    "--model.layers 4 --remat none",
    "--model.layers 8 --remat full",
    "--model.layers 4 --remat full --strategy shard_grad_op --prefetch none",
    "--model.layers 4 --remat full --train.accumulation 2",
    "--model.layers 2 --remat none --strategy no_shard",
)
"""Overrides of configs/llama2_7b.yaml."""
_GPU = {
    "JAX_PLATFORMS": "cuda,cpu",
    "JAX_MOCK_GPU_TOPOLOGY": "1x1x8",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


def allocator() -> list[dict[str, Any]]:
    """Runs each configuration in a process of its own, with a fresh allocator."""
    records = []
    for overrides in ALLOCATED:
        command = [sys.executable, __file__, "--one", overrides]
        env = os.environ | _GPU
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        if done.returncode:
            raise SystemExit(f"{overrides}\n{done.stderr[-3000:]}")
        records.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{overrides}: {records[-1]['ratio']:.3f}", file=sys.stderr, flush=True)
    return records


def one_allocation(overrides: str) -> dict[str, Any]:
    """Compares the peak of this process's GPU, mocked to be one of eight, with the plan."""
    import jax

    from fsdp_jax.planner import compiled_plan, hardware_of, parse_topology
    from fsdp_jax.train.build import build
    from fsdp_jax.train.config_file import load_config

    device = jax.local_devices()[0]
    chip = hardware_of(device.device_kind)
    assert chip is not None, f"{device.device_kind} is not in the table of chips"
    devices = jax.device_count()
    topology = parse_topology(f"{chip.name}:{devices}")
    config = load_config(
        CONFIG, [*overrides.split(), "--train.global_batch_size", str(2 * devices)]
    )
    # the plan, for devices that are absent
    planned = build(config, topology.devices())
    plan = compiled_plan(planned.step, planned.batch, topology, planned.work, None)
    # two real steps
    run = build(config, jax.devices())
    state = run.sharded.init(0)
    rows = 2 * len(jax.local_devices())
    batch = {
        name: jax.numpy.zeros((rows, *leaf.shape[1:]), leaf.dtype)
        for name, leaf in run.batch.items()
    }
    for _ in range(2):
        state, metrics = run.step(state, batch)
    jax.block_until_ready(metrics)
    real = device.memory_stats()["peak_bytes_in_use"]
    return {
        "config": overrides,
        "devices": devices,
        "real": real,
        "plan": plan.peak_bytes,
        "ratio": plan.peak_bytes / real,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="*", default=[], help="part of a name, source or topology")
    parser.add_argument("--analytic", action="store_true", help="without compilers")
    parser.add_argument("--fit", nargs="*", metavar="CHIP", help="fit the constants, print them")
    parser.add_argument("--estimates", action="store_true", help="analytic and compiled peaks")
    parser.add_argument("--allocator", action="store_true", help="on a GPU: the allocator's peak")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(one_allocation(options.one)))
        return 0
    if options.fit is not None:
        for chip in options.fit or FITTED:
            constants = ", ".join(f"{name} {each:.3f}" for name, each in fitted(chip).items())
            print(f"{chip}: {constants}", flush=True)
        return 0
    results: dict[str, Any] = {}
    if options.estimates:
        records = estimates()
        near = all(abs(r["ratio"] - 1) < 0.10 for r in records)
    elif options.allocator:
        records = allocator()
        for r in records:
            print(f"| {r['config']} | {r['real']} | {r['plan']} | {r['ratio']:.3f} |")
        near = all(abs(r["ratio"] - 1) < 0.05 for r in records)
    else:
        records = published(options.rows, options.analytic)
        for role in ("fit", "out of sample"):
            rows = [r for r in records if r["role"] == role]
            results[role] = summary(rows)
            results[role]["met"] = holds(results[role])
            print(f"{role}\n\n{markdown(rows)}\n")
        # Float8 programs differ more: ours reads an array once more for its scale.
        others = [r for r in rows if "float8" not in r["run"]]
        results[f"{role}, bfloat16"] = summary(others)
        results[f"{role}, bfloat16"]["met"] = holds(results[f"{role}, bfloat16"])
        print(goal_table(results))
        near = results["out of sample"]["met"]
    if options.json:
        goal = {"share": SHARE, "within": WITHIN, "beyond": BEYOND, "mean": MEAN}
        save(options.json, records, **({"goal": goal, "summary": results} if results else {}))
    return 0 if near else 3


if __name__ == "__main__":
    sys.exit(main())
