"""Hardware that need not be there: what it can do, and compilers for it."""

from fsdp_jax.planner.hardware import HARDWARE, Hardware, hardware_of, peak_flops
from fsdp_jax.planner.plugins import choose_platforms
from fsdp_jax.planner.topology import Topology, parse_topology

__all__ = ["HARDWARE", "Hardware", "Topology", "choose_platforms", "hardware_of", "parse_topology", "peak_flops"]
