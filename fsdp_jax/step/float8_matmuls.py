"""Runs the matmuls of an unmodified model in float8, where they take a kernel of a unit.

[Note: which matmuls] The model is traced, and evaluated again with other matmuls. In the trace the
gathered kernels are named (`units.unit`); a `dot_general` that takes one, as it is or rearranged or
cast, with anything that is no kernel, becomes `units.float8.dot`. So `nn.Dense`, `nnx.Linear`,
`einsum` and `@` are alike, and attention, which multiplies activations, stays. Of the program only
what has kernels inside is taken apart: calls, checkpoints and scans.

[Note: as it was sent] The gather of a kernel in float8 returns three arrays: the kernel in the
compute dtype, its float8 values, and their scale. A float8 matmul takes the values and the scale,
so it need not find the largest element and cast again. Operations that rearrange the kernel
(reshape, transpose, slice, split) are applied to the values too. Where a scan or a computed index
slices the kernel, a `jax.checkpoint` returns it, or a `vmap` maps over it, only the kernel in the
compute dtype is followed, and the matmul casts it again. Scales are powers of two, so this rounds
nothing more, except under a `vmap`, where all kernels get one scale.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.extend.core as jex
import jax.numpy as jnp

from fsdp_jax.errors import ArgumentError, SlowerWarning
from fsdp_jax.program.equations import (
    array_name,
    bind,
    dot_dimensions,
    eqns_inside,
    inputs_of,
    is_transparent,
    notes_of,
    out_sharding,
    split_scan,
)
from fsdp_jax.program.evaluate import evaluate_inside, evaluate_replaced, reevaluated
from fsdp_jax.program.primitives import CAST, CHECKPOINT, CONSTRAINT, DOT, SCAN, primitive_of
from fsdp_jax.units import float8
from fsdp_jax.units.collectives import FLOAT8, is_multiplied_as_sent, path_of_gather


class Kernel(NamedTuple):
    """The kernel that a variable holds, as it is or rearranged."""

    path: str
    sent: float8.Sent | None = None  # its float8 values and their scale, rearranged alike


Kernels = dict[Any, Kernel]
"""Variable -> the kernel that it holds."""
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
        if left := sorted(rewriter.named - rewriter.replaced):
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
        named: paths of the kernels that are named in the trace.
        replaced: of these, paths that some matmul in float8 takes.

    """

    named: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)

    def evaluate(
        self, jaxpr: jex.Jaxpr, args: Sequence[Any], held: Sequence[Kernel | None]
    ) -> tuple[list[Any], list[Kernel | None]]:
        """Evaluates a jaxpr: its outputs, and the kernels that they hold.

        `args`: its constants and arguments; `held`: the kernel that each of them holds.
        """
        kernels = {v: kernel for v, kernel in zip(inputs_of(jaxpr), held, strict=True) if kernel}

        def must_change(eqn: jex.JaxprEqn, _: list[Any]) -> bool:
            return self._must_change(eqn, kernels)

        def replacement(eqn: jex.JaxprEqn, args: list[Any]) -> Sequence[Any]:
            values, made = self._evaluate_in_float8(eqn, args, notes_of(kernels, eqn.invars))
            pairs = zip(eqn.outvars, made, strict=False)
            kernels.update({v: kernel for v, kernel in pairs if kernel})
            return values

        outputs = evaluate_replaced(jaxpr, args, must_change, replacement)
        return outputs, notes_of(kernels, jaxpr.outvars)

    def _must_change(self, eqn: jex.JaxprEqn, kernels: Kernels) -> bool:
        """Tells whether an equation must be replaced, or has one inside that must.

        Adds the kernel that it names to `self.named`, and results that hold one to `kernels`.
        """
        if (name := _kernel_named_by(eqn)) is not None:
            self.named.add(name)
            return True
        held = notes_of(kernels, eqn.invars)
        if is_multiplied_as_sent(eqn):
            return True
        if held and held[0] is not None and primitive_of(eqn).rearranges:
            kernels.update(dict.fromkeys(eqn.outvars, Kernel(held[0].path)))
            return held[0].sent is not None
        if primitive_of(eqn) is DOT:
            avals: list[Any] = [v.aval for v in eqn.invars]
            floats = all(jnp.issubdtype(aval.dtype, jnp.floating) for aval in avals)
            one = sum(kernel is not None for kernel in held) == 1
            empty = any(aval.size == 0 for aval in avals)  # which has no largest element
            return one and floats and not empty and out_sharding(eqn) is None
        inside = {path for path in map(_kernel_named_by, eqns_inside(eqn)) if path is not None}
        if not any(held) and not inside:
            return False
        if is_transparent(eqn) or primitive_of(eqn) is SCAN:
            return True
        self.named.update(inside)
        return False

    def _evaluate_in_float8(
        self, eqn: jex.JaxprEqn, args: list[Any], held: list[Kernel | None]
    ) -> tuple[Sequence[Any], Sequence[Kernel | None]]:
        """Evaluates an equation that `_must_change` chose.

        It is a gather, name or rearrangement of a kernel, a matmul, or a call or scan with one.
        Returns (results, the kernel that each of them holds, or None). `held`: the same of the
        operands.
        """
        # A kernel's gather, its name, and what rearranges it.
        if is_multiplied_as_sent(eqn):
            results = bind(eqn, *args)
            _, values, scale = results
            path = str(path_of_gather(eqn))
            # Under `vmap` each kernel has its own scale, but a matmul takes one.
            return results, [Kernel(path, None if scale.ndim else (values, scale))]
        if (name := _kernel_named_by(eqn)) is not None:
            return args, [Kernel(name, held[0] and held[0].sent)]
        primitive = primitive_of(eqn)
        if primitive.rearranges:
            assert held[0] is not None, eqn
            return _rearrange(eqn, args, held[0])
        # A matmul, and a program with one inside.
        if primitive is DOT:
            self.replaced.update(kernel.path for kernel in held if kernel)
            left, right = args
            out: Any = eqn.outvars[0].aval
            sent = [kernel and kernel.sent for kernel in held]
            return [float8.dot(left, right, dot_dimensions(eqn), out.dtype, sent)], []
        if primitive is SCAN:  # a kernel among what it carries is none of a unit's
            consts, carry, xs = split_scan(eqn, held)
            held = [*consts, *[None] * len(carry), *map(_without_sent, xs)]
        made: list[Kernel | None] = []

        def evaluate(jaxpr: jex.Jaxpr, inputs: list[Any]) -> list[Any]:
            own = [*[None] * (len(inputs) - len(held)), *held]  # its constants come first
            outputs, made[:] = self.evaluate(jaxpr, inputs, own)
            return outputs

        results = evaluate_inside(eqn, args, evaluate)
        if primitive is CHECKPOINT:
            made = [*map(_without_sent, made)]
        return results, [] if primitive is SCAN else made


def _rearrange(
    eqn: jex.JaxprEqn, args: list[Any], kernel: Kernel
) -> tuple[Sequence[Any], Sequence[Kernel | None]]:
    """Evaluates an equation that rearranges or casts a kernel, on its values in float8 too."""
    assert kernel.sent is not None, kernel.path
    primitive, (values, scale) = primitive_of(eqn), kernel.sent
    results = bind(eqn, *args)
    if primitive is CAST and results[0].dtype.name in float8.HOLD_SCALED:
        return results, [kernel]
    if not (primitive.linear or primitive is CONSTRAINT):
        return results, [_without_sent(kernel)] * len(results)
    rearranged = bind(eqn, values, *args[1:])
    return results, [Kernel(kernel.path, (each, scale)) for each in rearranged]


def _without_sent(kernel: Kernel | None) -> Kernel | None:
    """Returns the kernel without its float8 values, so that the next matmul casts it again."""
    return kernel and Kernel(kernel.path)


def _kernel_named_by(eqn: jex.JaxprEqn) -> str | None:
    """Reads the path of the kernel that an equation names; None for any other equation."""
    name = array_name(eqn) or ""
    return name.removeprefix(FLOAT8).removesuffix("]") if name.startswith(FLOAT8) else None
