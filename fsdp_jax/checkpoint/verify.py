"""Implements `fsdp-jax verify` and `fsdp-jax export` for the output directory of a run."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_jax.checkpoint.export import export_params
from fsdp_jax.checkpoint.manifest import Checked, check_files, list_steps
from fsdp_jax.checkpoint.store import CheckpointStore
from fsdp_jax.errors import ConfigError, human_bytes
from fsdp_jax.io.folder_kinds import FIXES, kind_of_folder
from fsdp_jax.io.safetensors_writer import Exported
from fsdp_jax.step.average import Weights
from fsdp_jax.tables import text_table


@dataclass(frozen=True)
class Verified:
    """The result of checking every checkpoint of a run against its manifest; `print` it.

    Attributes:
        directory: of the checkpoints.
        steps: each step's `Checked`.
        others: names of what is no checkpoint: unfinished steps, steps set aside, foreign files.

    """

    directory: Path
    steps: dict[int, Checked]
    others: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether every checkpoint is as it was written."""
        return all(checked.good for checked in self.steps.values())

    def to_json(self) -> dict[str, Any]:
        """Converts the result to the output of `verify --json`."""
        steps = [
            {"step": step, "good": checked.good, **asdict(checked)}
            for step, checked in self.steps.items()
        ]
        where = str(self.directory)
        return {"directory": where, "good": self.good, "steps": steps, "others": list(self.others)}

    def __str__(self) -> str:
        rows = []
        problems = []
        for step, checked in self.steps.items():
            verdict = "good" if checked.good else "DAMAGED"
            size, seconds = human_bytes(checked.size), f"{checked.seconds:.2f} s"
            rows.append([str(step), verdict, str(checked.files), size, seconds])
            problems += [f"step {step}: {problem}" for problem in checked.problems]
        table = text_table(["step", "verdict", "files", "size", "read in"], rows)
        others = [f"not a checkpoint: {name}" for name in self.others]
        return "\n".join([str(self.directory), table, *problems, *others])


def verify_run(output: str | os.PathLike[str]) -> Verified:
    """Checks every checkpoint of a run against its manifest; the run may be writing more.

    `output`: the run's directory, with `checkpoints/STEP` in it. Raises ConfigError if there is
    none.
    """
    # A run deletes old steps as it saves new ones: those that are gone are left out.
    directory, steps = find_checkpoints(output)
    results = {step: _check_unless_deleted(directory / str(step)) for step in steps}
    others = {path.name for path in directory.iterdir()} - {str(step) for step in steps}
    existing = {step: checked for step, checked in results.items() if checked is not None}
    return Verified(directory, existing, tuple(sorted(others)))


def export_run(
    output: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    step: int | None,
    dtype: str | None,
    weights: Weights = "params",
) -> str:
    """Verifies a step (None: the newest), exports it, and returns a summary to print."""
    directory, chosen = choose_step(output, step)
    with CheckpointStore(directory) as store:
        store.require_good(chosen)
        return describe_export(
            chosen, export_params(store, chosen, to, dtype=dtype, weights=weights)
        )


def describe_export(step: int, exported: Exported) -> str:
    """Formats the summary that `fsdp-jax export` prints."""
    size = f"{human_bytes(exported.size)} in {len(exported.files)} files"
    return f"{exported.tensors} tensors of step {step}, {size}, in {exported.directory}"


def choose_step(output: str | os.PathLike[str], step: int | None) -> tuple[Path, int]:
    """Finds a run's directory of checkpoints, and checks `step`; None is the newest.

    Raises ConfigError as `find_checkpoints`, and if there is no such step.
    """
    directory, steps = find_checkpoints(output)
    if step is None:
        step = max(steps)
    if step not in steps:
        raise ConfigError("no such step", where="--step", expected=f"one of {steps}", got=step)
    return directory, step


def find_checkpoints(output: str | os.PathLike[str]) -> tuple[Path, list[int]]:
    """Finds (a run's directory of checkpoints, their steps).

    Raises ConfigError if there are none, naming a parent directory that has some.
    """
    directory = Path(output).absolute() / "checkpoints"
    steps, _ = list_steps(directory)
    if not steps:
        fix = "wait for the first save, if the run is still training"
        # The user may have passed a folder inside the run's.
        for parent in Path(output).parents:
            if list_steps(parent / "checkpoints")[0]:
                fix = f"pass {parent}"
                break
        kind = kind_of_folder(Path(output))
        raise ConfigError(
            "no checkpoint there",
            where=str(output),
            expected="a run's output directory, with checkpoints/STEP in it",
            got=kind,
            fix=FIXES.get(kind, fix),
        )
    return directory, steps


def _check_unless_deleted(path: Path) -> Checked | None:
    """Checks a step's files; None if the run has deleted the step meanwhile."""
    try:
        before = path.stat()
        checked = check_files(path)
        is_there = checked.good or os.path.samestat(before, path.stat())
    except FileNotFoundError:
        return None
    if not is_there:
        return None
    return checked
