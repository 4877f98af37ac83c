"""The result of `certify`: a table of differences, and failures with their likely causes."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_jax.sharding.precision import Precision
from fsdp_jax.tables import text_table

COMPARED = ("loss", "count", "metrics", "gradient norm", "gradients", "parameters", "model state")


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences that are allowed; see the note in `comparison`.

    Attributes:
        loss: also of the count and of metrics of the user's own.
        grad_norm: of the reported gradient norm.
        gradient: of each gradient, and of the model's other state.
        parameter: of each parameter, over its change.

    """

    loss: float = 1e-5
    grad_norm: float = 1e-4
    gradient: float = 1e-4
    parameter: float = 1e-4


def tolerance_of(precision: Precision, stored: Collection[str] = ()) -> Tolerance:
    """Returns a tolerance for the rounding of these dtypes.

    Float16 keeps 11 bits, bfloat16 8, float8 4 and 3. The control computes in float32 on parameters
    rounded to the compute dtype, so that these are compared loosely. `stored`: dtypes of the stored
    parameters.
    """
    tolerance = Tolerance()
    narrow = "bfloat16" in stored
    if precision.compute == "float16":
        tolerance = replace(tolerance, loss=1e-3, grad_norm=5e-3, gradient=2e-2)
    if precision.compute == "bfloat16" or (precision.compute is None and narrow):
        tolerance = replace(tolerance, loss=2e-2, grad_norm=5e-2, gradient=2e-1)
    if precision.float8:
        tolerance = replace(tolerance, loss=2e-2, grad_norm=5e-2, gradient=3e-1)
    if precision.param == "bfloat16" or narrow:
        gradient = max(tolerance.gradient, 2e-1)
        tolerance = replace(tolerance, gradient=gradient, parameter=0.5)
    return tolerance


@dataclass(frozen=True)
class Setting:
    """One way to run the step; `rows`: of the global batch; `one_row`: it has one a device."""

    strategy: str
    accumulation: int
    rows: int
    local_batch: bool = False
    deferred_reduction: bool = False
    one_row: bool = False

    def __str__(self) -> str:
        options = {
            "local_batch": self.local_batch,
            "deferred_reduction": self.deferred_reduction,
            "one row per device": self.one_row,
        }
        return ", ".join(
            [self.strategy, f"accumulation {self.accumulation}", *filter(options.get, options)]
        )


@dataclass(frozen=True)
class Failure:
    """A difference above the tolerance, or an error in place of a number.

    Attributes:
        what: loss, count, metrics, gradient norm, gradients, parameters, model state, or error.
        path: of the array that differs most; empty for numbers.
        others: how many other arrays differ too.
        difference: relative; infinite where there is no number.

    """

    setting: Setting
    what: str
    path: str
    others: int
    difference: float
    tolerance: float
    cause: str

    def __str__(self) -> str:
        text = f"{self.setting}: {self.what}"
        text += f" of {self.path}" if self.path else ""
        text += f" (and {self.others} more)" if self.others else ""
        if math.isfinite(self.difference):
            text += f": off by {self.difference:.1e}, tolerance {self.tolerance:.0e}"
        return f"{text}; likely cause: {self.cause}"


@dataclass(frozen=True)
class Row:
    """A setting's largest relative differences over all steps, each with the path of its array."""

    setting: Setting
    differences: Mapping[str, tuple[float, str]]
    failures: tuple[Failure, ...]

    @property
    def holds(self) -> bool:
        """Whether all differences are within the tolerance."""
        return not self.failures

    def cells(self, compared: Sequence[str]) -> list[str]:
        """Returns the row's texts in the table: setting, a difference for each column, verdict."""
        cells = [str(self.setting)]
        for name in compared:
            difference, path = self.differences.get(name, (None, ""))
            cells.append("-" if difference is None else f"{difference:.1e} {path}".rstrip())
        return [*cells, "holds" if self.holds else "DOES NOT HOLD"]


@dataclass(frozen=True)
class Certificate:
    """The result of `certify`: a row for each setting."""

    rows: tuple[Row, ...]
    devices: int
    steps: int
    tolerance: Tolerance

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failures of all settings."""
        return tuple(failure for row in self.rows for failure in row.failures)

    @property
    def holds(self) -> bool:
        """Whether every setting computes what one device does."""
        return not self.failures

    def __str__(self) -> str:
        head = f"{self.devices} devices against one, {self.steps} steps; "
        head += "largest relative differences"
        has_metrics = any("metrics" in row.differences for row in self.rows)
        compared = [name for name in COMPARED if name != "metrics" or has_metrics]
        rows = [row.cells(compared) for row in self.rows]
        return f"{head}\n{text_table(['setting', *compared, ''], rows)}"

    def to_json(self) -> dict[str, Any]:
        """Returns the certificate for programs; a difference that is not finite is null."""

        def finite(value: float) -> float | None:
            return value if math.isfinite(value) else None

        rows = []
        for row in self.rows:
            differences = {
                name: {"difference": finite(difference), "path": path}
                for name, (difference, path) in row.differences.items()
            }
            rows.append({**vars(row.setting), "holds": row.holds, "differences": differences})
        failures = [
            vars(each) | {"setting": str(each.setting), "difference": finite(each.difference)}
            for each in self.failures
        ]
        return {
            "holds": self.holds,
            "devices": self.devices,
            "steps": self.steps,
            "tolerance": vars(self.tolerance),
            "rows": rows,
            "failures": failures,
        }


class CertifyError(AssertionError):
    """A setting does not compute what one device does; `certificate` has all differences."""

    def __init__(self, certificate: Certificate) -> None:
        self.certificate = certificate
        lines = ["the model differs from a run on one device", *map(str, certificate.failures)]
        super().__init__("\n".join([*lines, "", str(certificate)]))
