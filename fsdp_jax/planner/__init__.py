"""Hardware that need not be there: what it can do, compilers for it, and plans of what a step takes on it."""

from fsdp_jax.planner.hardware import HARDWARE, Hardware, hardware_of, peak_flops
from fsdp_jax.planner.plan import Fix, Plan, Time, plans_table
from fsdp_jax.planner.planning import Work, analytic_plan, compiled_plan
from fsdp_jax.planner.plugins import choose_platforms
from fsdp_jax.planner.program import cache_folder
from fsdp_jax.planner.stand_ins import stand_ins
from fsdp_jax.planner.topology import Topology, parse_topology

__all__ = [
    "HARDWARE",
    "Fix",
    "Hardware",
    "Plan",
    "Time",
    "Topology",
    "Work",
    "analytic_plan",
    "cache_folder",
    "choose_platforms",
    "compiled_plan",
    "hardware_of",
    "parse_topology",
    "peak_flops",
    "plans_table",
    "stand_ins",
]
