"""The result of `certify`: a table of differences, and failures with their likely causes."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_jax.sharding.precision import FLOAT8_TOLERANCE, GATHER_FORMATS, Precision
from fsdp_jax.tables import text_table

INITIAL = "initial values"  # of parameters and the model's other state
COMPARED = (
    INITIAL,
    "loss",
    "count",
    "metrics",
    "gradient norm",
    "gradients",
    "parameters",
    "average",
    "model state",
)
# Columns that only some certificates have.
SOMETIMES = ("metrics", "average", INITIAL)


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences that are allowed; see the note in `comparison`.

    Attributes:
        loss: also of the count and of metrics of the user's own.
        grad_norm: of the reported gradient norm.
        gradient: of each gradient, of the model's other state, and of initial values.
        parameter: of each parameter and its average, over its change.

    """

    loss: float = 1e-5
    grad_norm: float = 1e-4
    gradient: float = 1e-4
    parameter: float = 1e-4


def tolerance_of(precision: Precision, stored: Collection[str] = ()) -> Tolerance:
    """Chooses a tolerance for the rounding of these dtypes.

    Float16 keeps 11 bits, bfloat16 8, float8 4 and 3. The control computes in float32 on parameters
    rounded to the compute dtype, so that these are compared loosely. `stored`: dtypes of the stored
    parameters.
    """
    tolerance = Tolerance()
    narrow = "bfloat16" in stored
    # The dtype of the computation; without one, Flax computes in the stored dtype.
    if precision.compute == "float16":
        tolerance = replace(tolerance, loss=1e-3, grad_norm=5e-3, gradient=2e-2)
    if precision.compute == "bfloat16" or (precision.compute is None and narrow):
        tolerance = replace(tolerance, loss=2e-2, grad_norm=5e-2, gradient=2e-1)
    if precision.matmul is not None:
        tolerance = replace(tolerance, **FLOAT8_TOLERANCE)
    if precision.gather is not None:
        tolerance = replace(tolerance, **GATHER_FORMATS[precision.gather].tolerance)
    if precision.scatter is not None:  # by 1/254 of the largest of a block, on each device
        tolerance = replace(
            tolerance,
            loss=max(tolerance.loss, 1e-3),
            grad_norm=max(tolerance.grad_norm, 1e-2),
            gradient=max(tolerance.gradient, 5e-2),
        )
    # The dtype that parameters are stored in rounds their small changes.
    if precision.param == "bfloat16" or narrow:
        gradient = max(tolerance.gradient, 2e-1)
        tolerance = replace(tolerance, gradient=gradient, parameter=0.5)
    return tolerance


@dataclass(frozen=True)
class Setting:
    """One way to run the step.

    Attributes:
        rows: of the global batch.
        one_row: it has one a device.
        offload: state or activations are in host memory.

    """

    strategy: str
    accumulation: int
    rows: int
    local_batch: bool = False
    deferred_reduction: bool = False
    one_row: bool = False
    offload: bool = False

    def __str__(self) -> str:
        options = {
            "offload": self.offload,
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
        what: one of `COMPARED`, or error.
        path: of the array that differs most; empty for numbers.
        others: how many other arrays differ too.
        difference: relative; infinite where there is no number.
        batch: that it was largest on; empty where it is of no single one.

    """

    setting: Setting
    what: str
    path: str
    others: int
    difference: float
    tolerance: float
    cause: str
    batch: str = ""

    def __str__(self) -> str:
        text = f"{self.setting}: {self.what}"
        if self.path:
            text += f" of {self.path}"
        if self.others:
            text += f" (and {self.others} more)"
        if math.isfinite(self.difference):
            text += f": off by {self.difference:.1e}, tolerance {self.tolerance:.0e}"
        if self.batch:
            text += f", on {self.batch}"
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
        """Formats the row of the table: setting, a difference for each column, verdict."""
        cells = [str(self.setting)]
        for name in compared:
            text = "-"
            if name in self.differences:
                difference, path = self.differences[name]
                text = f"{difference:.1e} {path}".rstrip()
            cells.append(text)
        return [*cells, "holds" if self.holds else "DOES NOT HOLD"]


@dataclass(frozen=True)
class Certificate:
    """The result of `certify`: a row for each setting.

    Attributes:
        steps: that each setting was trained for.
        batches: names of the different batches of these steps.
        left_out: lines that name what was not compared, and why.

    """

    rows: tuple[Row, ...]
    devices: int
    steps: int
    tolerance: Tolerance
    batches: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failures of all settings."""
        return tuple(failure for row in self.rows for failure in row.failures)

    @property
    def holds(self) -> bool:
        """Whether every setting computes what one device does."""
        return not self.failures

    def __str__(self) -> str:
        # Columns of `SOMETIMES` that no row has are left out.
        head = f"{self.devices} devices against one, {self.steps} steps; "
        head += "largest relative differences"
        present = {name for row in self.rows for name in row.differences}
        compared = [name for name in COMPARED if name in present or name not in SOMETIMES]
        rows = [row.cells(compared) for row in self.rows]
        lines = [head, text_table(["setting", *compared, ""], rows), self.verdict]
        return "\n".join([*lines, *(f"not compared: {what}" for what in self.left_out)])

    @property
    def verdict(self) -> str:
        """The result, and the batches that it holds for; on others nothing is known."""
        failed = sum(not row.holds for row in self.rows)
        found = f"{failed} of {len(self.rows)} settings DIFFER from one device"
        if self.holds:
            found = f"all {len(self.rows)} settings equal one device"
        if len(self.batches) == 1:
            return f"{found} on this batch: {self.batches[0]}"
        return f"{found} on these {len(self.batches)} batches: {'; '.join(self.batches)}"

    def to_json(self) -> dict[str, Any]:
        """Converts the certificate to JSON values; a difference that is not finite is null."""

        def finite(value: float) -> float | None:  # JSON has no infinity
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
            "batches": list(self.batches),
            "left_out": list(self.left_out),
            "rows": rows,
            "failures": failures,
        }


class CertifyError(AssertionError):
    """A setting does not compute what one device does; `certificate` has all differences."""

    def __init__(self, certificate: Certificate) -> None:
        self.certificate = certificate
        lines = ["the model differs from a run on one device", *map(str, certificate.failures)]
        super().__init__("\n".join([*lines, "", str(certificate)]))
