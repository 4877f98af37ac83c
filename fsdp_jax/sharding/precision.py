"""Which dtype a number has where: at rest, in compute, while gradients are reduced, and in the
model's output.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fsdp_jax.errors import did_you_mean, message

_FLOATS = ("float32", "bfloat16")  # float16 needs loss scaling


def _name(dtype: str | DTypeLike | None) -> str | None:
    """`jnp.bfloat16` as `bfloat16`."""
    return dtype if dtype is None or isinstance(dtype, str) else jnp.dtype(dtype).name


@dataclass(frozen=True)
class Precision:
    """A mixed-precision policy; PyTorch's `MixedPrecision` with a parameter dtype of its own.

    Attributes:
        param: parameters at rest; gradients come back in it, and the optimizer works in it. None
            keeps the dtype that the model made each of them in.
        compute: gathered parameters and the model's float inputs. None gathers each parameter in
            the dtype it is stored in, and casts nothing.
        reduce: gradients while they are reduced; the compute dtype where absent.
        output: float outputs of the whole model. Where absent: float32 with a narrower compute
            dtype, so that losses are summed in float32, and else as the model made them.
        keep_float32: regular expressions searched in parameter paths and in the class names of
            modules. What matches is gathered in float32, and its outputs return to the compute
            dtype. Norms by default.
        frozen: parameters at rest that are not trained, which needs no master copy in float32; as
            `param` where absent.
        cast_inputs: float inputs of the model and of its units take the compute dtype. Turn it off
            where they carry what bfloat16 cannot, such as positions or time steps.

    """

    param: str | None = "float32"
    compute: str | None = "float32"
    reduce: str | None = None
    output: str | None = None
    keep_float32: tuple[str, ...] = ("[Nn]orm",)
    cast_inputs: bool = True
    frozen: str | None = None

    def __post_init__(self) -> None:
        for field in ("param", "compute", "reduce", "output", "frozen"):
            name = _name(getattr(self, field))
            object.__setattr__(self, field, name)
            if name is not None and name not in _FLOATS:
                fix = did_you_mean(str(name), _FLOATS)
                raise ValueError(
                    message(
                        f"unknown dtype '{name}'",
                        where=f"precision.{field}",
                        expected=_FLOATS,
                        fix=fix,
                    )
                )
        if isinstance(self.keep_float32, str):  # its letters would each be a pattern
            fix = f"({self.keep_float32!r},)"
            raise ValueError(
                message("not a sequence of patterns", where="precision.keep_float32", fix=fix)
            )

    @property
    def cast_dtype(self) -> np.dtype | None:
        """What float inputs and the outputs of float32 modules are cast to; None where a model
        meets one dtype only.
        """
        if self.compute is None or {self.param, self.compute, self.frozen or self.param} == {
            "float32"
        }:
            return None
        return jnp.dtype(self.compute)

    @property
    def output_dtype(self) -> np.dtype | None:
        """What float outputs of the model are cast to; None leaves them."""
        if self.output is not None:
            return jnp.dtype(self.output)
        return jnp.dtype("float32") if self.compute == "bfloat16" else None

    def kept(self, names: Iterable[str]) -> bool:
        """Whether any of these names (a path, or a module's class names) asks for float32."""
        return any(re.search(pattern, name) for pattern in self.keep_float32 for name in names)

    def comm_dtypes(self, kept: bool, stored: DTypeLike) -> tuple[np.dtype, np.dtype]:
        """(compute, reduce) dtypes of a parameter; what is not a float keeps the dtype it is stored
        in.
        """
        stored = jnp.dtype(stored)
        if not jnp.issubdtype(stored, jnp.floating):
            return stored, stored
        if kept and self.compute is not None:
            return jnp.dtype("float32"), jnp.dtype("float32")
        compute = jnp.dtype(self.compute or stored)
        return compute, jnp.dtype(self.reduce or compute)

    def storage_dtype(self, dtype: DTypeLike, trained: bool = True) -> np.dtype:
        """The dtype that a parameter made in `dtype` is stored in."""
        wanted = self.param if trained else self.frozen or self.param
        return jnp.dtype(wanted if wanted and jnp.issubdtype(dtype, jnp.floating) else dtype)


AS_MADE = Precision(param=None, compute=None)
"""Every parameter is stored, gathered and reduced in the dtype that the model made it in."""
