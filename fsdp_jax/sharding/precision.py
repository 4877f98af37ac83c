"""Mixed precision: the dtype of parameters, compute, gradient reduction and the model's output."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fsdp_jax.errors import ArgumentError, did_you_mean, first_lines, join_fixes
from fsdp_jax.limits import check_fields
from fsdp_jax.sharding.patterns import check_regexes, search_any


@dataclass(frozen=True)
class GatherFormat:
    """A format that kernels are gathered in, whose operations `units.gather_transform` has."""

    on_cpu: str  # the dtype that XLA:CPU sends in its place, where it has no narrow one
    tolerance: Mapping[str, float]  # for its rounding, fields of `certify.Tolerance`


FLOAT8_TOLERANCE = {"loss": 2e-2, "grad_norm": 5e-2, "gradient": 3e-1}
GATHER_FORMATS = {"float8_e4m3fn": GatherFormat("float16", FLOAT8_TOLERANCE)}
"""The values of `Precision.gather`, each named as the dtype that is sent."""
FormatName = Literal[*GATHER_FORMATS]  # type: ignore[valid-type]

_SHOWN = 10  # parameters that an error lists before it counts the others
_FLOATS = ("float32", "bfloat16", "float16")
_DTYPES = {
    **dict.fromkeys(("param", "compute", "reduce", "output", "frozen"), _FLOATS),
    "gather": tuple(GATHER_FORMATS),
    "matmul": ("float8",),
    "scatter": ("int8",),
}


@dataclass(frozen=True)
class LossScale:
    """How the loss is scaled, so that gradients in float16 neither vanish nor overflow.

    A step whose loss or gradients are not finite is skipped, and the scale multiplied by `backoff`;
    after `growth_interval` good steps in a row it is multiplied by `growth`.

    Attributes:
        initial: the scale of the first step, for the mean over the rows of the batch.
        growth_interval: good steps in a row after which the scale grows.
        growth: 1 or more; 1 never grows.
        backoff: above 0 and at most 1; 1 keeps the scale.
        minimum: below which the scale does not fall. Only steps that are skipped there count
            towards `abort_after`, and all of them where `backoff` is 1.

    Raises:
        ValueError: a number out of these limits.

    """

    initial: float = 2.0**16
    growth_interval: int = 2000
    growth: float = 2.0
    backoff: float = 0.5
    minimum: float = 1.0

    def __post_init__(self) -> None:
        largest = float(np.finfo(np.float32).max)
        limits: dict[str, tuple[str, Callable[[float], bool]]] = {
            "growth_interval": ("1 or more", lambda n: n >= 1),
            "growth": ("1 or more", lambda n: 1 <= n < math.inf),
            "backoff": ("above 0 and at most 1", lambda n: 0 < n <= 1),
            "minimum": ("above 0", lambda n: n > 0),
            "initial": ("at least `minimum`, a float32", lambda n: self.minimum <= n <= largest),
        }
        for name, (expected, holds) in limits.items():
            got = getattr(self, name)
            is_number = isinstance(got, int | float) and not isinstance(got, bool)
            if not is_number or not holds(got):
                raise ArgumentError(
                    "a loss scale out of its limits" if is_number else "not a number",
                    where=f"precision.loss_scale.{name}",
                    expected=expected,
                    got=got,
                )


@dataclass(frozen=True)
class Precision:
    """A mixed-precision policy; PyTorch's `MixedPrecision` with a parameter dtype of its own.

    Dtypes are names or jax's own, `jnp.bfloat16`. Gradients are returned in the dtype of the
    parameters, and the optimizer computes in it. `param=None` keeps the dtype that the model made
    each parameter in; `compute=None` gathers each in the dtype it is stored in, and casts nothing.
    Kernels that are gathered in float8 are rounded to it, with a scale for each; matmuls in float8
    are e4m3 forward and e5m2 for gradients, with a scale for each array as it is cast
    ("tensorwise", dynamic). With stochastic rounding the optimizer gets parameters and gradients,
    and makes its state, in float32.

    Raises:
        ValueError: an unknown dtype, or values that do not go together.

    """

    # Sharded parameters (the master weights) and optimizer state.
    param: str | None = "float32"
    # Gathered parameters and activations. float16 scales the loss.
    compute: str | None = "float32"
    reduce: str | None = None  # Gradient reduction; default: the compute dtype.
    output: str | None = None  # Output of the model; default: float32 if `compute` is narrower.
    # Regular expressions of parameter paths and of class names of modules: those parameters are
    # gathered in float32, and outputs of those modules are cast to the compute dtype.
    keep_float32: tuple[str, ...] = ("[Nn]orm",)
    # Cast float inputs of the model and of its units to the compute dtype; not where they carry
    # what bfloat16 cannot, such as positions or time steps.
    cast_inputs: bool = True
    frozen: str | None = None  # Sharded parameters that are not trained; default: as `param`.
    # The units' kernels as they are gathered: float8_e4m3fn, for half of the bytes; default: as
    # `compute`.
    gather: FormatName | None = None
    # Matmuls that take the units' kernels: float8 (H100, Ada and newer); default: as `compute`.
    matmul: Literal["float8"] | None = None
    # The gradients of the units' kernels as they are scattered: int8, in blocks with a scale each,
    # summed in float32 and rounded to `reduce`; needs local batches. Default: as `reduce`.
    scatter: Literal["int8"] | None = None
    # Loss scale, a number that stays; default: dynamic with float16, and none otherwise.
    loss_scale: LossScale | float | None = None
    # Update bfloat16 parameters in float32 and round them at random, so that small updates count.
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        # Dtypes, also given as `jnp.bfloat16`: each must be one that the field knows.
        for field, known in _DTYPES.items():
            name = getattr(self, field)
            if name is not None and not isinstance(name, str):
                with suppress(TypeError):  # `jnp.bfloat16` as `bfloat16`
                    name = jnp.dtype(name).name
                    object.__setattr__(self, field, name)
            if name is not None and name not in known:
                raise ArgumentError(
                    f"unknown dtype '{name}'",
                    where=f"precision.{field}",
                    expected=known,
                    fix=join_fixes(did_you_mean(str(name), known), "leave it out"),
                )
        check_fields(self, "precision")
        check_regexes(self.keep_float32, where="precision.keep_float32")
        # Settings that do not go together.
        if self.param == "float16":
            raise ArgumentError(
                "the optimizer would compute in float16, where squares of gradients vanish",
                where="precision.param",
                got="float16",
                fix='param="float32"; frozen="float16" stores what is not trained',
            )
        if self.stochastic_rounding and self.param != "bfloat16":
            raise ArgumentError(
                "only parameters in bfloat16 are rounded stochastically",
                where="precision.stochastic_rounding",
                got=f"param={self.param!r}",
                fix='param="bfloat16"',
            )
        # The loss scale: a LossScale, or a number that stays.
        scale = self.loss_scale
        if isinstance(scale, int | float) and not isinstance(scale, bool):
            if not 0 < scale < math.inf:
                raise ArgumentError(
                    "a loss scale out of its limits",
                    where="precision.loss_scale",
                    expected="above 0, finite",
                    got=scale,
                )
        elif scale is not None and not isinstance(scale, LossScale):
            raise ArgumentError(
                "not a loss scale",
                where="precision.loss_scale",
                got=scale,
                fix="LossScale(initial=2.0**12), or a number that stays",
            )

    @property
    def scaling(self) -> LossScale | None:
        """The loss scale in use: the user's, the dynamic one for float16, None for no scaling."""
        scale = self.loss_scale
        if scale is None and "float16" in (self.compute, self.reduce):
            return LossScale()
        if isinstance(scale, int | float):
            return LossScale(float(scale), growth=1.0, backoff=1.0, minimum=float(scale))
        return scale

    @property
    def cast_dtype(self) -> np.dtype | None:
        """The dtype of float inputs and of outputs of float32 modules; None if all is float32."""
        dtypes = {self.param, self.compute, self.frozen or self.param}
        if self.compute is None or dtypes == {"float32"}:
            return None
        return jnp.dtype(self.compute)

    @property
    def eight_bit(self) -> bool:
        """Whether kernels, or their gradients, are sent or multiplied in 8 bits."""
        return any(each is not None for each in (self.gather, self.matmul, self.scatter))

    @property
    def output_dtype(self) -> np.dtype | None:
        """The dtype that float outputs of the model are cast to; None leaves them."""
        if self.output is not None:
            return jnp.dtype(self.output)
        return jnp.dtype("float32") if self.compute in ("bfloat16", "float16") else None

    def keeps(self, names: Iterable[str]) -> bool:
        """Tells whether any of these names (a path, or class names) matches `keep_float32`."""
        return any(search_any(self.keep_float32, name) for name in names)

    def comm_dtypes(self, keep: bool, stored: DTypeLike) -> tuple[np.dtype, np.dtype]:
        """Chooses the (compute, reduce) dtypes of a parameter; others than floats keep theirs.

        `keep`: it is gathered in float32. `stored`: the dtype it is stored in.
        """
        stored = jnp.dtype(stored)
        if not jnp.issubdtype(stored, jnp.floating):
            return stored, stored
        if keep and self.compute is not None:
            return jnp.dtype("float32"), jnp.dtype("float32")
        compute = jnp.dtype(self.compute or stored)
        return compute, jnp.dtype(self.reduce or compute)

    def storage_dtype(self, dtype: DTypeLike, trained: bool = True) -> np.dtype:
        """Chooses the dtype that a parameter made in `dtype` is stored in."""
        wanted = self.param if trained else self.frozen or self.param
        return jnp.dtype(wanted if wanted and jnp.issubdtype(dtype, jnp.floating) else dtype)


AS_MADE = Precision(param=None, compute=None)
"""Every parameter is stored, gathered and reduced in the dtype that the model made it in."""


def check_trained(params: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises ValueError if trained parameters have a dtype that cannot be trained in.

    `params`: the trained ones, by path. In integers and complex numbers there are no gradients of
    ours; in float16, or a narrower format, the optimizer would compute.
    """
    dtypes = {path: leaf.dtype for path, leaf in params.items()}
    others = [path for path, dtype in dtypes.items() if not jnp.issubdtype(dtype, jnp.floating)]
    if others:
        raise _not_trained_error(
            "only parameters of real floating-point numbers can be trained",
            {path: dtypes[path] for path in others},
            expected="a float dtype; a complex number as two real ones",
            fix=f"frozen={others} in fully_shard; or make them nnx.Variable, not nnx.Param",
        )
    narrow = [
        path for path, dtype in dtypes.items() if dtype.itemsize < 4 and dtype != jnp.bfloat16
    ]
    if narrow:
        raise _not_trained_error(
            f"the optimizer would compute in {dtypes[narrow[0]]}, where small gradients vanish",
            {path: dtypes[path] for path in narrow},
            expected="float32 or bfloat16; param=None keeps what the model makes",
            fix='precision=Precision(param="float32", compute="float16")',
        )


def _not_trained_error(
    what: str, dtypes: Mapping[str, np.dtype], *, expected: str, fix: str
) -> ArgumentError:
    """Makes the error for parameters of these dtypes, by path."""
    got = first_lines([f"{path}: {dtype}" for path, dtype in dtypes.items()], _SHOWN)
    return ArgumentError(what, where=next(iter(dtypes)), expected=expected, got=got, fix=fix)
