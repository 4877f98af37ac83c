"""Hardware that need not be there: what it can do, compilers for it, and plans of what a step takes
on it.
"""

from fsdp_jax.planner.compiled.program import cache_folder
from fsdp_jax.planner.figures import Fix, Time, plans_table
from fsdp_jax.planner.html import compare_html, plan_html
from fsdp_jax.planner.machines.fake_devices import stand_ins
from fsdp_jax.planner.machines.hardware import HARDWARE, Hardware, hardware_of, peak_flops
from fsdp_jax.planner.machines.pjrt_plugins import choose_platforms
from fsdp_jax.planner.machines.topology import Topology, parse_topology
from fsdp_jax.planner.plan import Plan
from fsdp_jax.planner.planner import Work, analytic_plan, compiled_plan

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
    "compare_html",
    "compiled_plan",
    "hardware_of",
    "parse_topology",
    "peak_flops",
    "plan_html",
    "plans_table",
    "stand_ins",
]
