"""What `fsdp-jax verify` and `fsdp-jax export` do with the output directory of a run."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_jax.checkpoint.export import export_params
from fsdp_jax.checkpoint.manifest import Checked, check_files, numbered
from fsdp_jax.checkpoint.store import CheckpointStore
from fsdp_jax.errors import ConfigError, human_bytes, message
from fsdp_jax.io.safetensors_writer import Exported
from fsdp_jax.tables import text_table


@dataclass(frozen=True)
class Verified:
    """Every checkpoint of a run, held against its manifest.

    Attributes:
        steps: step -> what was found.
        others: names beside them that are no checkpoint: unfinished, set aside, foreign.

    """

    directory: Path
    steps: dict[int, Checked]
    others: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether all are as they were written."""
        return all(checked.good for checked in self.steps.values())

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        steps = [
            {"step": step, "good": checked.good, **asdict(checked)}
            for step, checked in self.steps.items()
        ]
        return {
            "directory": str(self.directory),
            "good": self.good,
            "steps": steps,
            "others": list(self.others),
        }

    def __str__(self) -> str:
        rows = [
            [
                str(step),
                "good" if checked.good else "DAMAGED",
                str(checked.files),
                human_bytes(checked.size),
                f"{checked.seconds:.2f} s",
            ]
            for step, checked in self.steps.items()
        ]
        problems = [
            f"step {step}: {problem}"
            for step, checked in self.steps.items()
            for problem in checked.problems
        ]
        others = [f"not a checkpoint: {name}" for name in self.others]
        return "\n".join(
            [
                str(self.directory),
                text_table(["step", "verdict", "files", "size", "read in"], rows),
                *problems,
                *others,
            ]
        )


def verify_run(output: str | os.PathLike[str]) -> Verified:
    """Reads every checkpoint of a run, which may go on meanwhile. Raises ConfigError where there is
    none to read.
    """
    directory, found = steps_of(output)
    steps = {
        step: checked for step in found if (checked := _check(directory / str(step))) is not None
    }
    others = sorted({path.name for path in directory.iterdir()} - {str(step) for step in found})
    return Verified(directory, steps, tuple(others))


def export_run(
    output: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    step: int | None,
    dtype: str | None,
) -> str:
    """Verifies a step, the newest if None, and exports it; returns what to print. Raises as
    `export_params`.
    """
    directory, found = steps_of(output)
    chosen = max(found) if step is None else step
    if chosen not in found:
        raise ConfigError(
            message("no such step", where="--step", expected=f"one of {found}", got=chosen)
        )
    with CheckpointStore(directory) as store:
        store.require_good(chosen)
        done: Exported = export_params(store, chosen, to, dtype=dtype)
    return (
        f"{done.tensors} tensors of step {chosen}, {human_bytes(done.size)} in {len(done.files)} files, in "
        f"{done.directory}"
    )


def steps_of(output: str | os.PathLike[str]) -> tuple[Path, list[int]]:
    """(where the checkpoints of a run lie, their steps). Raises ConfigError where there are none."""
    directory = Path(output).absolute() / "checkpoints"
    found = [step for step, ours in numbered(directory) if ours]
    if not found:
        expected = "a run's output directory, with checkpoints/STEP in it"
        above = next(
            (
                str(up)
                for up in Path(output).parents
                if any(ours for _, ours in numbered(up / "checkpoints"))
            ),
            "",
        )
        fix = f"pass {above}" if above else "wait for the first save, if the run goes on"
        raise ConfigError(
            message("no checkpoint there", where=str(output), expected=expected, fix=fix)
        )
    return directory, found


def _check(path: Path) -> Checked | None:
    """None if the run that is writing there has deleted it since it was listed, or while it was
    read.
    """
    try:
        before = path.stat()
        checked = check_files(path)
        return checked if checked.good or os.path.samestat(before, path.stat()) else None
    except FileNotFoundError:
        return None
