"""Checkpoints of a run."""

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_jax.checkpoint import CheckpointStore, Lease
from fsdp_jax.cli.main import main
from fsdp_jax.data import Loader, make_loader
from fsdp_jax.data.windows import Windows
from fsdp_jax.errors import ConfigError
from fsdp_jax.train.config import CheckpointConfig
from fsdp_jax.train.resume import Resumer
from fuzz import mutations
from fuzz.harness import Case, ExitCode, RefusedError, Running, Target, cannot_be_copied

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
                arrays["rng"] = jax.random.wrap_key_data(arrays["rng"])
                metadata = {"config": "", "strategy": "full_shard", "returns": {"3": 1}}
                store.save(step, arrays, data=_position(step), metadata=metadata)

    def make(self, case: Case) -> None:
        run = shutil.copytree(case.seeds / "run", case.folder / "run", symlinks=True)
        (case.folder / "damaged").write_text(case.pick(["stop", "previous"]))
        if case.chance(95):
            for _ in range(case.pick([1, 1, 1, 2])):
                self._damage(case, run)

    def _damage(self, case: Case, run: Path) -> None:
        steps = [run / "checkpoints" / str(step) for step in STEPS]
        paths = [path for step in steps for path in sorted(step.rglob("*"))]
        files = [path for path in paths if path.is_file() and not path.is_symlink()]
        manifests = [path for path in files if path.name == "manifest.json"]
        if manifests:
            case.change(
                (7, lambda: mutations.damage_file(case, case.pick(files))),
                (5, lambda: mutations.damage_json(case, case.pick(manifests))),
                (5, lambda: mutations.reseal_json(case, case.pick(manifests))),
                (3, lambda: mutations.replace_file(case, case.pick(files))),
                (1, lambda: mutations.swap_files(case, files)),
                (4, lambda: self._change_folders(case, run)),
            )

    @staticmethod
    def _change_folders(case: Case, run: Path) -> str:
        """Renames, copies, links and removes steps, or puts other things beside them."""
        folder = run / "checkpoints"
        step = folder / case.pick(["3", "12"])
        if step.is_symlink() or not step.is_dir():
            return "nothing more"
        name = case.pick(
            ["0", "4", "12", "13", "007", "-1", "1e3", "\uff12", "9" * 30, "a", "12.damaged", "[1]"]
        )
        ways = {
            "rename": lambda: step.rename(folder / name),
            "copy": lambda: shutil.copytree(
                step, folder / name, symlinks=True, ignore=cannot_be_copied
            ),
            "link": lambda: beside.symlink_to(step.name),
            "file": lambda: beside.write_text("x"),
            "folder": lambda: beside.mkdir(),
            "pipe": lambda: os.mkfifo(beside),
            "lease": lambda: (run / "lease.json").symlink_to("../../sentinel/file"),
            "lease folder": lambda: (run / "lease.json").mkdir(),
            "replace": lambda: mutations.replace_file(case, step),
            "all": lambda: mutations.replace_file(case, folder),
        }
        if os.path.lexists(folder / name):
            ways = {way: ways[way] for way in list(ways)[2:]}
        if os.path.lexists(run / "lease.json"):
            ways = {way: change for way, change in ways.items() if "lease" not in way}
        names = ["20", "0", "x.unsealed", "12.deleting", "notes"]
        beside = folder / case.pick([n for n in names if not os.path.lexists(folder / n)])
        way = case.pick(list(ways))
        ways[way]()
        return f"{way}: {step.name} {name} {beside.name}"

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
            resumer = Resumer(store, settings, print)
            point = resumer.choose()
            if point is None:
                return ExitCode(0)
            # The same bytes under the same name are read from disk once.
            files = sorted(path for path in store.path(point.step).rglob("*") if path.is_file())
            key = (point.step, *((str(path), path.read_bytes()) for path in files))
            if key not in self._restored:
                self._restored[key] = self._restore(resumer, point.step)
        return self._restored[key]

    @staticmethod
    def _restore(resumer: Resumer, step: int) -> Any:
        import jax

        arrays, data, _ = resumer.store.restore(step, _target(), verify=False)
        arrays["rng"] = jax.random.key_data(arrays["rng"])
        read = {name: np.asarray(each) for name, each in arrays.items()}
        loader = _loader()
        loader.set_state(data)
        position = loader.get_state()
        with loader:
            next(loader)
        return {"position": position, "returns": resumer.returns(step), "arrays": read}

    def reference(self, case: Case) -> Any:
        """Returns the newest step that is as it was written."""
        if not isinstance(Running.result, dict):
            raise RefusedError("a run with checkpoints starts from step 0")
        folder = case.folder / "run" / "checkpoints"
        if any(mutations.RESEALED in done for done in case.done):
            return Running.result  # what another program has written may be of use
        intact = [step for step in STEPS if self._is_intact(case, folder, step)]
        if not intact:
            raise RefusedError("no step is as it was written")
        step = max(intact)
        return {"position": _position(step), "returns": {3: 1}, "arrays": _arrays(step)}

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


def _arrays(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    weights = random.standard_normal((16, 8)).astype(np.float32)
    return {
        "w": weights,
        "b": weights[0] * step,
        "count": np.array(step, np.int32),
        "rng": np.array([0, step], np.uint32),
    }


def _loader() -> Loader:
    windows = Windows(np.arange(200, dtype=np.uint8), sequence_length=4)
    return make_loader(windows, global_batch_size=8, seed=0, ahead=0)


def _position(step: int) -> dict[str, Any]:
    """The state of the loader after as many batches."""
    state = _loader().get_state()
    return state | {"position": {"next_index": step}}


def _target() -> Any:
    import jax

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {
        name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=device)
        for name, each in _arrays(0).items()
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    return target | {"rng": jax.ShapeDtypeStruct((), key.dtype, sharding=device)}
