"""What `certify` found: a table of differences, and failures with their likely causes."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdp_jax.sharding.precision import Precision
from fsdp_jax.tables import text_table

COLUMNS = (
    "setting",
    "loss",
    "count",
    "gradient norm",
    "gradients",
    "parameters",
    "model state",
    "",
)


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences that hold; see the note.

    Attributes:
        loss: also of the count.
        grad_norm: of the reported gradient norm.
        gradient: of each gradient, and of the model's other state.
        parameter: of each parameter, over its change.

    """

    loss: float = 1e-5
    grad_norm: float = 1e-4
    gradient: float = 1e-4
    parameter: float = 1e-4


def tolerance_of(precision: Precision, stored: Collection[str] = ()) -> Tolerance:
    """What rounding makes with this precision, and parameters stored in these dtypes: bfloat16
    keeps 8 bits.

    The control computes in float32 on parameters rounded to the compute dtype, so that bfloat16 is
    compared loosely.
    """
    found = Tolerance()
    narrow = "bfloat16" in stored
    if precision.compute == "bfloat16" or (precision.compute is None and narrow):
        found = replace(found, loss=2e-2, grad_norm=5e-2, gradient=2e-1)
    if precision.param == "bfloat16" or narrow:
        found = replace(found, gradient=2e-1, parameter=0.5)
    return found


@dataclass(frozen=True)
class Setting:
    """One way to run the step. `rows`: of the global batch."""

    strategy: str
    accumulation: int
    rows: int
    local_batch: bool = False
    deferred_reduction: bool = False
    one_row: bool = False

    def __str__(self) -> str:
        words = [self.strategy, f"accumulation {self.accumulation}"]
        words += ["local_batch"] if self.local_batch else []
        words += ["deferred_reduction"] if self.deferred_reduction else []
        words += ["one row a device"] if self.one_row else []
        return ", ".join(words)


@dataclass(frozen=True)
class Failure:
    """A difference above the tolerance, or an error in place of a number.

    Attributes:
        what: loss, count, gradient norm, gradients, parameters, model state, or error.
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
        at = f" of {self.path}" if self.path else ""
        at += f" (and {self.others} more)" if self.others else ""
        size = f": off by {self.difference:.1e}, tolerance {self.tolerance:.0e}"
        size = size if math.isfinite(self.difference) else ""
        return f"{self.setting}: {self.what}{at}{size}; likely cause: {self.cause}"


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

    def cells(self) -> list[str]:
        """As the table shows them."""
        shown = [
            _shown(*self.differences[name]) if name in self.differences else "-"
            for name in COLUMNS[1:-1]
        ]
        return [str(self.setting), *shown, "holds" if self.holds else "DOES NOT HOLD"]


def _shown(difference: float, path: str) -> str:
    return f"{difference:.1e} {path}".rstrip()


@dataclass(frozen=True)
class Certificate:
    """What `certify` found: a row for each setting, and what does not hold."""

    rows: tuple[Row, ...]
    devices: int
    steps: int
    tolerance: Tolerance

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Of all settings."""
        return tuple(failure for row in self.rows for failure in row.failures)

    @property
    def holds(self) -> bool:
        """Whether every setting does what one device does."""
        return not self.failures

    def __str__(self) -> str:
        head = (
            f"{self.devices} devices against one, {self.steps} steps; largest relative differences"
        )
        return f"{head}\n{text_table(COLUMNS, [row.cells() for row in self.rows])}"

    def to_json(self) -> dict[str, Any]:
        """For programs; a difference that is no finite number is null."""
        rows = []
        for row in self.rows:
            differences = {
                name: {"difference": _finite(difference), "path": path}
                for name, (difference, path) in row.differences.items()
            }
            rows.append({**vars(row.setting), "holds": row.holds, "differences": differences})
        failures = [
            {
                **vars(failure),
                "setting": str(failure.setting),
                "difference": _finite(failure.difference),
            }
            for failure in self.failures
        ]
        found = {"holds": self.holds, "devices": self.devices, "steps": self.steps}
        return {**found, "tolerance": vars(self.tolerance), "rows": rows, "failures": failures}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class CertifyError(AssertionError):
    """A setting does not do what one device does.

    Attributes:
        certificate: all that was found.

    """

    def __init__(self, certificate: Certificate) -> None:
        self.certificate = certificate
        lines = [
            "the model differs from a run on one device",
            *map(str, certificate.failures),
            "",
            str(certificate),
        ]
        super().__init__("\n".join(lines))
