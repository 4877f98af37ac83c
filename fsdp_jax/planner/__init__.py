"""Plans training steps for hardware that may be absent: memory, communication and time."""

from fsdp_jax.compat.pjrt_plugins import choose_platforms
from fsdp_jax.planner.compiled.program import cache_folder
from fsdp_jax.planner.estimates import Work, analytic_plan, check_plan, compiled_plan
from fsdp_jax.planner.machines.chips import (
    HARDWARE,
    hardware_of,
    peak_flops,
)
from fsdp_jax.planner.machines.fake_devices import fake_devices
from fsdp_jax.planner.machines.hardware import Hardware
from fsdp_jax.planner.machines.topology import Topology, parse_topology
from fsdp_jax.planner.plan import Fix, Plan, Speedup, Time, compare_html, plan_html, plans_table

__all__ = [
    "HARDWARE",
    "Fix",
    "Hardware",
    "Plan",
    "Speedup",
    "Time",
    "Topology",
    "Work",
    "analytic_plan",
    "cache_folder",
    "check_plan",
    "choose_platforms",
    "compare_html",
    "compiled_plan",
    "fake_devices",
    "hardware_of",
    "parse_topology",
    "peak_flops",
    "plan_html",
    "plans_table",
]
