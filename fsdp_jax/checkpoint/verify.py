"""What `fsdp-jax verify` and `fsdp-jax export` do with the output directory of a run."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_jax.checkpoint.export import Exported, export_params
from fsdp_jax.checkpoint.manifest import Checked
from fsdp_jax.checkpoint.store import CheckpointStore
from fsdp_jax.errors import ConfigError, human_bytes, message
from fsdp_jax.table import text_table


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
        steps = [{"step": step, "good": checked.good, **asdict(checked)} for step, checked in self.steps.items()]
        return {"directory": str(self.directory), "good": self.good, "steps": steps, "others": list(self.others)}

    def __str__(self) -> str:
        rows = [
            [str(step), "good" if checked.good else "DAMAGED", str(checked.files), human_bytes(checked.size),
             f"{checked.seconds:.2f} s"]
            for step, checked in self.steps.items()
        ]  # fmt: skip
        problems = [
            f"step {step}: {problem}" for step, checked in self.steps.items() for problem in checked.problems
        ]  # fmt: skip
        others = [f"no checkpoint: {name}" for name in self.others]
        return "\n".join(
            [str(self.directory), text_table(["step", "verdict", "files", "size", "read in"], rows), *problems, *others]
        )


def verify_run(output: str | os.PathLike[str]) -> Verified:
    """Reads every checkpoint of a run. Raises ConfigError where there is none to read."""
    with _open(output) as store:
        steps = {step: store.check(step) for step in store.steps()}
        others = sorted({path.name for path in store.directory.iterdir()} - {str(step) for step in steps})
    return Verified(store.directory, steps, tuple(others))


def export_run(
    output: str | os.PathLike[str], to: str | os.PathLike[str], *, step: int | None, dtype: str | None
) -> str:  # fmt: skip
    """Verifies a step, the newest if None, and exports it; returns what to print. Raises as `export_params`."""
    with _open(output) as store:
        latest = store.latest()
        assert latest is not None
        chosen = latest if step is None else step
        if chosen not in store.steps():
            raise ConfigError(message("no such step", where="--step", expected=f"one of {store.steps()}", got=chosen))
        store.require_good(chosen)
        done: Exported = export_params(store, chosen, to, dtype=dtype)
    return (
        f"{done.tensors} tensors of step {chosen}, {human_bytes(done.size)} in {len(done.files)} files, in "
        f"{done.directory}"
    )  # fmt: skip


def _open(output: str | os.PathLike[str]) -> CheckpointStore:
    directory = Path(output) / "checkpoints"
    store = CheckpointStore(directory)
    if not store.steps():
        expected = "a run's output directory, with checkpoints/STEP in it"
        raise ConfigError(message("no checkpoint there", where=str(output), expected=expected))
    return store
