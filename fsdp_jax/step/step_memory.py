"""The memory of a compiled step, as XLA reports it: `fsdp_jax.step_memory`."""

import jax

from fsdp_jax.errors import ArgumentError, human_bytes
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.views.bars import BarRow, Bars, Kind

KINDS = (
    *(Kind("donated arguments", 0), Kind("other arguments", 1), Kind("new results", 3)),
    *(Kind("temporaries", 2), Kind("program", None)),
)
PREFIXES = {"on the device": "", "in host memory": "host_"}  # of XLA's figures


def step_memory(step: jax.stages.Compiled | CompiledStep) -> Bars:
    """Shows the memory of a compiled program, of a device, and host memory where it uses some.

    `print` it, or let a notebook show it. Donated arguments, as the state of a training step, are
    overwritten by its results, which take no more memory then. Temporaries, such as activations and
    gathered parameters, are those of the program's peak. A plan tells the purpose of each.

    Args:
        step: `jax.jit(f).lower(...).compile()`, or a step of this library that was called once.

    Raises:
        ValueError: anything else, or a step that is not compiled yet.

    Example:
        >>> compiled = jax.jit(jnp.sum).lower(jnp.ones(8)).compile()
        >>> print(fsdp.step_memory(compiled))  # doctest: +ELLIPSIS
        a compiled program takes 36 B of a device
        ...

    """
    compiled = step.compiled if isinstance(step, CompiledStep) else step
    if not isinstance(compiled, jax.stages.Compiled):
        raise ArgumentError(
            "there is no compiled program to show",
            where="step_memory",
            expected="jax.jit(f).lower(...).compile(), or a step that was called once",
            got=type(step).__name__,
        )
    stats = compiled.memory_analysis()
    if stats is None:
        raise ArgumentError("this platform does not report a program's memory", where="step_memory")
    bars = []
    for name, prefix in PREFIXES.items():
        sizes = [
            getattr(stats, f"{prefix}{what}_size_in_bytes")
            for what in ("alias", "argument", "output", "temp", "generated_code")
        ]
        donated, arguments, results, temporaries, code = sizes
        if any(sizes) or not prefix:
            parts = (donated, arguments - donated, results - donated, temporaries, code)
            kinds = (kind.name for kind in KINDS)
            bars.append(BarRow(name, dict(zip(kinds, parts, strict=True))))
    return Bars(
        summary=f"a compiled program takes {human_bytes(bars[0].total)} of a device",
        kinds=KINDS,
        bars=bars,
        size="in all",
    )
