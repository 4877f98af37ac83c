"""Runs the matmuls of an unmodified model in float8, where they take a kernel of a unit.

[Note: which matmuls] The model is traced, and evaluated again with other matmuls. In the trace the
gathered kernels are named (`units.unit`); a `dot_general` that takes one, as it is or rearranged or
cast, with anything that is no kernel, becomes `units.float8.dot`. So `nn.Dense`, `nnx.Linear`,
`einsum` and `@` are alike, and attention, which multiplies activations, stays. Of the program only
what has kernels inside is taken apart: calls, checkpoints and scans.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from fsdp_jax.errors import ArgumentError, SlowerWarning
from fsdp_jax.program.equations import (
    array_name,
    dot_dimensions,
    eqns_inside,
    inputs_of,
    is_transparent,
    notes_of,
    out_sharding,
    split_scan,
)
from fsdp_jax.program.evaluate import evaluate_inside, evaluate_replaced, reevaluated
from fsdp_jax.program.primitives import DOT, SCAN, primitive_of
from fsdp_jax.units import float8
from fsdp_jax.units.collectives import FLOAT8

Paths = dict[Any, str]
"""Variable -> path of the kernel that it holds."""
_ADA = 8.9  # the first compute capability with float8, NVIDIA Ada GPU Architecture white paper
_IRONWOOD = 7  # TPU7x: 4614 TFLOP/s in float8, 2307 in bfloat16, Cloud TPU documentation


def check_float8_matmuls(device: Any) -> None:
    """Raises ValueError for a chip that multiplies float8 no faster than bfloat16.

    `device`: live, or of a topology. Virtual CPU devices pass: they compute the same numbers.
    """
    capability = str(getattr(device, "compute_capability", ""))
    generation = re.match(r"TPU ?v?(\d+)", device.device_kind)
    if device.platform == "cpu":
        return
    if re.fullmatch(r"\d+\.\d+", capability) and float(capability) >= _ADA:  # AMD's is a name
        return
    if generation and int(generation[1]) >= _IRONWOOD:
        return
    raise ArgumentError(
        f"{device.device_kind} has no matrix units for float8",
        where="precision.matmul",
        expected=f"a GPU of compute capability {_ADA} (Ada) or above, or TPU7x",
        got=capability and f"compute capability {capability}",
        fix="leave matmul out; gather='float8_e4m3fn' alone sends half of the bytes",
    )


def with_float8_matmuls(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fn` so that matmuls with a named kernel run in float8; see the note.

    `fn`: a pure function of pytrees of arrays.

    Warns:
        SlowerWarning: kernels that no matmul takes that could be replaced, when it is traced.
    """

    def evaluate(jaxpr: jex.Jaxpr, args: list[Any]) -> list[Any]:
        """Evaluates with matmuls replaced; warns of kernels that none of them takes."""
        rewriter = _MatmulReplacer()
        outputs, _ = rewriter.evaluate(jaxpr, args, [None] * len(args))
        if left := sorted(rewriter.kernels - rewriter.replaced):
            warnings.warn(
                f"{len(left)} kernels are not multiplied with in float8: {', '.join(left)}; no "
                "matmul takes them outside of `cond`, `while` and custom derivatives (a "
                "convolution and a lookup are none)",
                SlowerWarning,
                stacklevel=2,
            )
        return outputs

    return reevaluated(fn, evaluate)


@dataclass
class _MatmulReplacer:
    """Evaluates a jaxpr with its matmuls replaced.

    Attributes:
        kernels: paths that are named in the trace.
        replaced: of these, paths that some matmul in float8 takes.

    """

    kernels: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)

    def evaluate(
        self, jaxpr: jex.Jaxpr, args: Sequence[Any], held: Sequence[str | None]
    ) -> tuple[list[Any], list[str | None]]:
        """Evaluates a jaxpr: its outputs, and the paths of the kernels that they hold.

        `args`: its constants and arguments; `held`: the path of the kernel that each of them holds.
        """
        paths = {v: path for v, path in zip(inputs_of(jaxpr), held, strict=True) if path}

        def must_change(eqn: jex.JaxprEqn, _: list[Any]) -> bool:
            return self._must_change(eqn, paths)

        def replacement(eqn: jex.JaxprEqn, args: list[Any]) -> Sequence[Any]:
            values, made = self._evaluate_in_float8(eqn, args, notes_of(paths, eqn.invars))
            paths.update({v: path for v, path in zip(eqn.outvars, made, strict=False) if path})
            return values

        outputs = evaluate_replaced(jaxpr, args, must_change, replacement)
        return outputs, notes_of(paths, jaxpr.outvars)

    def _must_change(self, eqn: jex.JaxprEqn, paths: Paths) -> bool:
        """Tells whether an equation must be replaced, or has one inside that must.

        Notes the kernels that it names or passes on, in `paths` and `kernels`.
        """
        name, held = _kernel_named_by(eqn), notes_of(paths, eqn.invars)
        path = held[0] if name is None and primitive_of(eqn).rearranges else name
        if path is not None:
            paths.update(dict.fromkeys(eqn.outvars, path))
            self.kernels.add(path)
            return name is not None
        if primitive_of(eqn) is DOT:
            avals: list[Any] = [v.aval for v in eqn.invars]
            floats = all(jnp.issubdtype(aval.dtype, jnp.floating) for aval in avals)
            one = sum(path is not None for path in held) == 1
            return one and floats and out_sharding(eqn) is None
        inside = {path for path in map(_kernel_named_by, eqns_inside(eqn)) if path is not None}
        if not any(held) and not inside:
            return False
        if is_transparent(eqn) or primitive_of(eqn) is SCAN:
            return True
        self.kernels.update(inside)
        return False

    def _evaluate_in_float8(
        self, eqn: jex.JaxprEqn, args: list[Any], held: list[str | None]
    ) -> tuple[Sequence[Any], Sequence[str | None]]:
        """Evaluates the naming of a kernel, a `dot_general`, a call or a scan, in float8.

        Returns (results, path of the kernel that each of them holds, or None). `held`: the same of
        the operands.
        """
        if (name := _kernel_named_by(eqn)) is not None:
            return args, [name]
        if primitive_of(eqn) is DOT:
            self.replaced.update(path for path in held if path)
            out: Any = eqn.outvars[0].aval
            return [float8.dot(*args, dot_dimensions(eqn), out.dtype)], []
        is_scan = primitive_of(eqn) is SCAN
        if is_scan:  # a kernel among what it carries is none of a unit's
            consts, carry, xs = split_scan(eqn, held)
            held = [*consts, *[None] * len(carry), *xs]
        made: list[str | None] = []

        def evaluate(jaxpr: jex.Jaxpr, inputs: list[Any]) -> list[Any]:
            own = [*[None] * (len(inputs) - len(held)), *held]  # its constants come first
            outputs, made[:] = self.evaluate(jaxpr, inputs, own)
            return outputs

        results = evaluate_inside(eqn, args, evaluate)
        return results, [] if is_scan else made


def _kernel_named_by(eqn: jex.JaxprEqn) -> str | None:
    """Reads the path of the kernel that an equation names; None for any other equation."""
    name = array_name(eqn) or ""
    return name.removeprefix(FLOAT8).removesuffix("]") if name.startswith(FLOAT8) else None
