"""Makes sure that all processes run one program: they compare its digest before its first run.

Processes whose programs differ, as where one has another `b2` of Adam in its source, would train on
without an error, each its own shards by its own rule.
"""

import hashlib
from typing import Any

from jax.sharding import Mesh

from fsdp_jax.compat.lowered_texts import comparable_text
from fsdp_jax.processes import comparison_over
from fsdp_jax.step.kept_programs import compile_kept, keeps_programs


def require_same_program(name: str, lowered: Any, mesh: Mesh) -> None:
    """Waits until all processes have lowered this program; ends all of them if it differs.

    Does nothing in a process that has joined no others, or where the mesh is not of all of them.
    `name`: such as `the train step`; `lowered`: a `jax.stages.Lowered`. The text that is digested
    takes a twentieth of the time of lowering.
    """
    compare = comparison_over(mesh)
    if compare is not None:
        digest = hashlib.sha256(comparable_text(lowered).encode()).hexdigest()
        # without a limit: others may still trace and lower it
        compare(f"the program of {name}", {"digest of its StableHLO": digest}, None)


def run_same_program(name: str, jitted: Any, mesh: Mesh, *args: Any) -> Any:
    """Runs `jitted(*args)`, once all processes are known to have lowered the same for it.

    Its loops have no collectives.
    """
    if comparison_over(mesh) is None and not keeps_programs():
        return jitted(*args)
    lowered = jitted.lower(*args)
    require_same_program(name, lowered, mesh)
    if keeps_programs():
        return compile_kept(name, lowered, mesh, {}, is_step=False)(*args)
    return jitted(*args)
