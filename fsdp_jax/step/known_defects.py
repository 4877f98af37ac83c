"""Defects of compiler releases that hit sharded training, with the threads that report them.

A version stands here only where the thread names it, or where a compiled program shows the defect;
a release that is not listed is not known to be free of it.
"""

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import version

from fsdp_jax.step.train_step import StepPlan
from fsdp_jax.step.xla_options import offload_options

GPU, TPU, CPU = "gpu", "tpu", "cpu"


@dataclass(frozen=True)
class KnownDefect:
    """A defect of some releases of jaxlib.

    Attributes:
        source: the thread that reports it, on GitHub.
        platform: gpu, tpu or cpu.
        first: the first release that is known to have it.
        last: the last one.
        symptom: what a user sees.
        fix: an option or a release that helps.
        needs: features of a step without which it does not occur, as `features` names them.
        device_kind: of the devices that it was seen on; "" for all of the platform.

    """

    source: str
    platform: str
    first: str
    last: str
    symptom: str
    fix: str
    needs: frozenset[str] = frozenset()
    device_kind: str = ""

    def hits(self, jaxlib: str, platform: str, device_kind: str, step: Collection[str]) -> bool:
        """Returns whether a step with these features, on this platform, is affected."""
        affected = _ordered(self.first) <= _ordered(jaxlib) <= _ordered(self.last)
        here = self.platform == platform and self.device_kind in ("", device_kind)
        return affected and here and self.needs <= set(step)

    def avoided(self, flags: str) -> bool:
        """Returns whether these flags of XLA disable the pass that has the defect."""
        disabled = re.search(r"--xla_disable_hlo_passes=(\S+)", self.fix)
        return disabled is not None and disabled[1] in flags

    def __str__(self) -> str:
        return f"known defect of this jaxlib: {self.symptom} ({self.source}); {self.fix}"


KNOWN_DEFECTS = (
    KnownDefect(
        "openxla/xla#46231",
        GPU,
        "0.10.2",  # read in the compiled program; the thread reproduces it on 0.11.0
        "0.11.0",
        "activations and parameters of scanned layers in host memory are read in the wrong order in"
        " the backward pass, so that gradients are wrong without an error",
        "XLA_FLAGS=--xla_disable_hlo_passes=dynamic-slice-annotator",
        needs=frozenset({"offload"}),
    ),
    KnownDefect(
        "openxla/xla#49143",
        TPU,
        "0.11.2",
        "0.11.2",
        "gradients of an embedding may be wrong where microbatches are accumulated in a loop",
        "--train.local_batch True, or LIBTPU_INIT_ARGS="
        "--xla_disable_hlo_passes=while-loop-all-reduce-code-motion",
        needs=frozenset({"accumulation", "annotations"}),
    ),
    KnownDefect(
        "jax-ml/jax#40633",
        GPU,
        "0.11.0",
        "0.11.1",
        "kernels return wrong values with CUDA 13",
        "use jaxlib 0.10.2",
        device_kind="NVIDIA RTX A6000",
    ),
    KnownDefect(
        "openxla/xla#17922",
        GPU,
        "0.4.33",
        "0.4.34",
        "gradients of large scanned models with hybrid sharding explode",
        "use jaxlib 0.4.30, or layers that are not scanned",
        needs=frozenset({"hybrid"}),
    ),
    KnownDefect(
        "jax-ml/jax#25404",
        GPU,
        "0.4.35",
        "0.4.35",
        "the latency-hiding scheduler, which prefetch asks for, aborts the process",
        "use another release, or --prefetch none",
        needs=frozenset({"prefetch"}),
    ),
    KnownDefect(
        "jax-ml/jax#20763",
        GPU,
        "0.4.25",
        "0.4.35",
        "the latency-hiding scheduler takes several times the memory where layers are not scanned",
        "scan the layers, or --prefetch none",
        needs=frozenset({"prefetch", "unrolled"}),
    ),
    KnownDefect(
        "jax-ml/jax#19035",
        GPU,
        "0.4.23",
        "0.4.23",
        "XLA_PYTHON_CLIENT_MEM_FRACTION and XLA_PYTHON_CLIENT_PREALLOCATE are ignored",
        "use jaxlib 0.4.21",
    ),
    KnownDefect(
        "openxla/xla#14397",
        GPU,
        "0.4.30",
        "0.4.30",
        "with a rematerialization policy that saves some results no collective is hidden",
        "use another release, or --remat full",
        needs=frozenset({"remat policy"}),
    ),
    KnownDefect(
        "jax-ml/jax#40830",
        CPU,
        "0.12.0.dev0",
        "0.12.0.dev20260920",
        "reduce-scatters between processes return wrong values",
        "use a release",
        needs=frozenset({"processes"}),
    ),
    KnownDefect(
        "jax-ml/jax#40101",
        CPU,
        "0.11.1",
        "0.11.1",
        "a loop that stacks small results takes time quadratic in its length",
        "use jaxlib 0.11.0",
    ),
)


def known_defects(plan: StepPlan, processes: int = 1) -> list[KnownDefect]:
    """Returns the defects of the installed jaxlib that hit a step, and that no flag avoids."""
    device = plan.layout.mesh.devices.flat[0]
    flags = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    flags += f" {offload_options(plan)}"  # by which the step is compiled
    platform = GPU if device.platform in (GPU, "cuda") else device.platform
    step = features(plan, processes)
    jaxlib = version("jaxlib")
    return [
        each
        for each in KNOWN_DEFECTS
        if each.hits(jaxlib, platform, device.device_kind, step) and not each.avoided(flags)
    ]


def features(plan: StepPlan, processes: int = 1) -> set[str]:
    """Returns the features of a step that defects depend on."""
    of_units = [boundary.activations for boundary in plan.boundaries.values()]
    policies = [each.policy for each in (plan.activations, *of_units)]
    stacked = any(leaf.stacked for leaf in plan.layout.by_path.values())
    present = {
        "accumulation": plan.accumulation > 1,
        "annotations": not plan.local_batch,
        "hybrid": plan.layout.strategy.hybrid,
        "offload": plan.offloads,
        "prefetch": plan.prefetch != "none",
        "processes": processes > 1,
        "remat policy": any(policy not in ("none", "full") for policy in policies),
        "unrolled": not stacked,
    }
    return {name for name, there in present.items() if there}


def _ordered(release: str) -> tuple[float, ...]:
    """Returns what releases are ordered by; a development version comes before its release."""
    numbers = [int(number) for number in re.findall(r"\d+", release.partition(".dev")[0])[:3]]
    dev = re.search(r"\.dev(\d+)", release)
    return (*numbers, *[0] * (3 - len(numbers)), int(dev.group(1)) if dev else float("inf"))
