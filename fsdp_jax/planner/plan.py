"""A plan: the figures of a step, which a terminal shows as text and a notebook as a page."""

from dataclasses import dataclass

from fsdp_jax.planner.figures import Figures
from fsdp_jax.planner.html import plan_fragment


@dataclass(frozen=True, repr=False)
class Plan(Figures):
    """What a step takes on hardware that need not be there. `print(plan)` shows it, and so does a
    notebook.
    """

    def _repr_html_(self) -> str:
        return plan_fragment(self)
