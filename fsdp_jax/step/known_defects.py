"""Defects of compiler releases that hit sharded training, from `known_defects.toml`."""

import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version

from fsdp_jax.compat.xla_flags import WITHOUT_PASS, environment_flags
from fsdp_jax.step.step_plan import StepPlan
from fsdp_jax.step.xla_options import offload_options


@dataclass(frozen=True)
class KnownDefect:
    """A defect of some releases of jaxlib.

    Attributes:
        source: the thread that reports it, on GitHub.
        platform: gpu, tpu or cpu.
        first: the first release that is known to have it.
        last: the last one.
        symptom: as a user sees it.
        fix: an option or a release that helps.
        needs: features of a step without which it does not occur, as `step_features` names them.
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
        """Tells whether a step with these features, on this platform, is affected."""
        affected = _release_order(self.first) <= _release_order(jaxlib) <= _release_order(self.last)
        here = self.platform == platform and self.device_kind in ("", device_kind)
        return affected and here and self.needs <= set(step)

    def avoided(self, flags: str) -> bool:
        """Tells whether these flags of XLA disable the compiler pass that has the defect."""
        disabled = re.search(rf"--{WITHOUT_PASS}=(\S+)", self.fix)
        return disabled is not None and disabled[1] in flags

    def __str__(self) -> str:
        return f"known defect of this jaxlib: {self.symptom} ({self.source}); {self.fix}"


_TABLE = resources.files("fsdp_jax.step").joinpath("known_defects.toml").read_text("utf-8")
KNOWN_DEFECTS = tuple(
    KnownDefect(source, **entry | {"needs": frozenset(entry.get("needs", ()))})
    for source, entry in tomllib.loads(_TABLE).items()
)


def known_defects(plan: StepPlan, processes: int = 1) -> list[KnownDefect]:
    """Finds the defects of the installed jaxlib that hit a step, and that no flag avoids."""
    device = plan.layout.mesh.devices.flat[0]
    flags = " ".join(environment_flags().values())
    flags += f" {offload_options(plan)}"  # by which the step is compiled
    platform = "gpu" if device.platform == "cuda" else device.platform
    step = step_features(plan, processes)
    jaxlib = version("jaxlib")
    return [
        each
        for each in KNOWN_DEFECTS
        if each.hits(jaxlib, platform, device.device_kind, step) and not each.avoided(flags)
    ]


def step_features(plan: StepPlan, processes: int = 1) -> set[str]:
    """Lists the names of a step's features that defects depend on, as `KnownDefect.needs`."""
    present = {
        "accumulation": plan.accumulation > 1,
        "annotations": not plan.local_batch,
        "offload": plan.offloads,
        "processes": processes > 1,
    }
    return {name for name, there in present.items() if there}


def _release_order(release: str) -> tuple[float, ...]:
    """Converts a release to numbers to sort by; a development version precedes its release."""
    numbers = [int(number) for number in re.findall(r"\d+", release.partition(".dev")[0])[:3]]
    dev = re.search(r"\.dev(\d+)", release)
    return (*numbers, *[0] * (3 - len(numbers)), int(dev.group(1)) if dev else float("inf"))
