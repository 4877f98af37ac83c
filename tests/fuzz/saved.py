"""Checkpoints and metrics of a run."""

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_jax.checkpoint import CheckpointStore, Lease
from fsdp_jax.cli.main import main
from fsdp_jax.errors import ConfigError
from fsdp_jax.train.config import CheckpointConfig
from fsdp_jax.train.metrics import JsonLines
from fsdp_jax.train.resume import Resumer
from fuzz import mutations
from fuzz.harness import Case, ExitCode, RefusedError, Running, Target

STEPS = (3, 12)


class CheckpointTarget(Target):
    """The folder of a run through `verify`, and through a resume as far as the restored arrays."""

    name = "checkpoint"
    may_write = ("run/lease.json",)

    def start(self) -> None:
        self._restored: dict[Any, Any] = {}

    def prepare(self, seeds: Path) -> None:
        import jax

        (seeds / "run").mkdir()
        with CheckpointStore(seeds / "run" / "checkpoints") as store:
            for step in STEPS:
                arrays = {name: jax.numpy.asarray(each) for name, each in _arrays(step).items()}
                metadata = {"config": "", "strategy": "full_shard"}
                store.save(step, arrays, data={"position": step}, metadata=metadata)

    def make(self, case: Case) -> None:
        rng = case.rng
        run = shutil.copytree(case.seeds / "run", case.folder / "run", symlinks=True)
        (case.folder / "damaged").write_text(rng.choice(["stop", "previous"]))
        if rng.random() < 0.05:
            return
        steps = [run / "checkpoints" / str(step) for step in STEPS]
        files = [path for step in steps for path in sorted(step.rglob("*")) if path.is_file()]
        manifests = [path for path in files if path.name == "manifest.json"]
        for _ in range(rng.choice([1, 1, 1, 2])):
            way = rng.random()
            files = [path for path in files if path.is_file() and not path.is_symlink()]
            manifests = [path for path in manifests if path in files]
            if not manifests:
                continue
            if way < 0.35:
                done = mutations.mutate_file(rng, rng.choice(files), mutations.IN_BYTES)
            elif way < 0.6:
                done = mutations.mutate_json(rng, rng.choice(manifests))
            elif way < 0.75:
                done = mutations.replace_file(rng, rng.choice(files))
            elif way < 0.8:
                done = mutations.swap_files(rng, files)
            else:
                done = self._change_folders(case, run)
            case.done.append(done)

    @staticmethod
    def _change_folders(case: Case, run: Path) -> str:
        """Renames, copies, links and removes steps, or puts other things beside them."""
        rng, folder = case.rng, run / "checkpoints"
        step = folder / rng.choice(["3", "12"])
        name = rng.choice(
            ["0", "4", "12", "13", "007", "-1", "1e3", "\uff12", "9" * 30, "a", "12.damaged", "[1]"]
        )
        if step.is_symlink() or not step.is_dir():
            return "nothing more"
        if rng.random() < 0.4 and not (folder / name).exists():
            if rng.random() < 0.5:
                step.rename(folder / name)
                return f"{step.name} renamed to {name}"
            shutil.copytree(step, folder / name, symlinks=True, ignore=_special)
            return f"{step.name} copied to {name}"
        ways = ["link", "file", "folder", "pipe", "lease", "lease folder", "replace", "all"]
        way = "file" if os.path.lexists(run / "lease.json") else rng.choice(ways)
        names = ["20", "0", "x.unsealed", "12.deleting", "notes"]
        free = [name for name in names if not os.path.lexists(folder / name)]
        beside = folder / rng.choice(free)
        if way == "link":
            beside.symlink_to(step.name)
        elif way == "file":
            beside.write_text("x")
        elif way == "folder":
            beside.mkdir()
        elif way == "pipe":
            os.mkfifo(beside)
        elif way == "lease":
            (run / "lease.json").symlink_to("../../sentinel/file")
        elif way == "lease folder":
            (run / "lease.json").mkdir()
        elif way == "replace":
            return mutations.replace_file(rng, step)
        else:
            return mutations.replace_file(rng, folder)
        return f"{way}: {beside.name}"

    def read(self, case: Case) -> Any:
        run = case.folder / "run"
        code = main(["verify", str(run)])
        if code not in (0, 3):
            return ExitCode(code)
        policy = (case.folder / "damaged").read_text()
        settings = CheckpointConfig(damaged="stop" if policy == "stop" else "previous")
        lease = Lease(run)
        try:
            lease.__enter__()
        except OSError as error:  # as `train.main` turns it
            raise ConfigError(str(error)) from error
        with ExitStack() as stack:
            stack.push(lease)
            store = stack.enter_context(CheckpointStore(run / "checkpoints"))
            point = Resumer(store, settings, print).choose()
            if point is None:
                return ExitCode(0)
            # The same bytes under the same name are read from disk once.
            files = sorted(path for path in store.path(point.step).rglob("*") if path.is_file())
            key = (point.step, *((str(path), path.read_bytes()) for path in files))
            if key not in self._restored:
                self._restored[key] = self._restore(store, point.step)
        return self._restored[key]

    @staticmethod
    def _restore(store: CheckpointStore, step: int) -> Any:
        record = store.record(step)
        arrays, data, _ = store.restore(step, _target(), verify=False)
        read = {name: np.asarray(each) for name, each in arrays.items()}
        return {"step": record["step"], "data": data, "arrays": read}

    def reference(self, case: Case) -> Any:
        """Returns the newest step that is as it was written."""
        if not isinstance(Running.result, dict):
            raise RefusedError("a run with checkpoints starts from step 0")
        folder = case.folder / "run" / "checkpoints"
        intact = [step for step in STEPS if self._is_intact(case, folder, step)]
        if not intact:
            raise RefusedError("no step is as it was written")
        step = max(intact)
        return {"step": step, "data": {"position": step}, "arrays": _arrays(step)}

    @staticmethod
    def _is_intact(case: Case, folder: Path, step: int) -> bool:
        seed, copy = case.seeds / "run" / "checkpoints" / str(step), folder / str(step)
        names = [path.relative_to(seed) for path in seed.rglob("*") if path.is_file()]
        return not copy.is_symlink() and all(
            (copy / name).is_file()
            and not (copy / name).is_symlink()
            and (copy / name).read_bytes() == (seed / name).read_bytes()
            for name in names
        )


def _special(folder: str, names: list[str]) -> list[str]:
    """Returns what cannot be copied: pipes and sockets."""
    paths = [Path(folder, name) for name in names]
    return [path.name for path in paths if path.is_fifo() or path.is_socket()]


def _arrays(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    weights = random.standard_normal((16, 8)).astype(np.float32)
    return {"w": weights, "b": weights[0] * step, "count": np.array(step, np.int32)}


def _target() -> Any:
    import jax

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=device)
        for name, each in _arrays(0).items()
    }


class MetricsTarget(Target):
    """metrics.jsonl as a resume continues it: no good line is lost, whatever stands between."""

    name = "metrics"
    may_write = ("run",)

    def make(self, case: Case) -> None:
        rng = case.rng
        run = case.folder / "run"
        run.mkdir()
        path = run / "metrics.jsonl"
        records = [
            {
                "step": step,
                "loss": 4.0 - step / 10,
                "mfu": None,
                "time": "2026-01-01",
                "tokens": step * 64,
            }
            for step in range(1, 9)
        ]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        (case.folder / "after").write_text(str(rng.choice([0, 4, 8, 100])))
        way = rng.random()
        if way < 0.05:
            return
        if way < 0.5:
            case.done.append(mutations.mutate_file(rng, path, mutations.IN_TEXT))
        elif way < 0.8:
            lines = path.read_text().split("\n")
            number = rng.choice([7, rng.randrange(8)])
            tree, name = mutations.mutate_tree(rng, json.loads(lines[number]))
            lines[number] = mutations.dumps(tree)
            path.write_text("\n".join(lines))
            case.done.append(f"line {number + 1}: {name}")
        elif way < 0.9:
            with path.open("ab") as file:  # as a killed writer leaves it
                file.write(json.dumps(records[-1] | {"step": 9}).encode()[: rng.randrange(90)])
            case.done.append("a line cut short")
        else:
            case.done.append(mutations.replace_file(rng, path))
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20:
            shutil.copy(path, case.folder / "before")  # what must not be lost

    def read(self, case: Case) -> Any:
        path = case.folder / "run" / "metrics.jsonl"
        after = int((case.folder / "after").read_text())
        lines = JsonLines(path, after=after, say=print)
        lines.write({"step": 1000, "loss": 1.5})
        lines.close()
        # Records beyond `after` that stand before others may stay where they are.
        records = _records(path.read_bytes()) if self._is_own(path) else []
        return [each for each in records if each["step"] <= after or each == records[-1]]

    def reference(self, case: Case) -> Any:
        after = int((case.folder / "after").read_text())
        if not self._is_own(case.folder / "run" / "metrics.jsonl"):
            return []  # a pipe, a folder or a link: the run goes on without metrics
        before = case.folder / "before"
        content = before.read_bytes() if before.exists() else b""
        if not case.done:
            content = (case.folder / "run" / "metrics.jsonl").read_bytes()
        kept = [record for record in _records(content) if record["step"] <= after]
        return [*kept, {"step": 1000, "loss": 1.5}]

    @staticmethod
    def _is_own(path: Path) -> bool:
        return path.is_file() and not path.is_symlink()


def _records(content: bytes) -> list[Any]:
    """Returns the complete lines that are records: objects with a number of a step."""
    records = []
    for line in content.split(b"\n")[:-1]:
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and type(record.get("step")) is int:
            records.append(record)
    return records
