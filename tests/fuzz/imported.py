"""Checkpoints that other programs wrote: orbax, PyTorch and Levanter."""

import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore
from dcp_files import write_dcp
from levanter_files import write_levanter

from fsdp_jax.checkpoint.import_foreign import Program, open_checkpoint
from fsdp_jax.checkpoint.saved_array import SavedArray
from fuzz import mutations
from fuzz.harness import Case, RefusedError, Running, Target
from fuzz.stored import copy_of

FSDP2 = Path(__file__).parents[1] / "checkpoint" / "fsdp2.tar.xz"
Values = tuple[str, list[int], bytes]


def arrays() -> dict[str, Any]:
    """A tree as programs save it."""
    numbers = np.arange(12, dtype=np.float32)
    params = {"embed": {"weight": numbers.reshape(3, 4)}, "norm": {"weight": numbers[:5]}}
    return {"model": params, "opt_state": {"0": {"mu": params, "count": 3}}, "step": 3}


class ForeignTarget(Target):
    """A checkpoint of another program, as far as the values of its arrays."""

    program: Program
    metadata: tuple[str, ...] = ()  # names of files of JSON

    def make(self, case: Case) -> None:
        names = sorted(path.name for path in case.seeds.iterdir())
        folder = copy_of(case, case.pick(names))
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        of_json = [path for path in files if path.name in self.metadata] or files
        small = sorted(files, key=lambda path: path.stat().st_size)[-3:]
        case.damage(
            (6, lambda: mutations.damage_file(case, case.pick(files))),
            (3, lambda: mutations.damage_file(case, case.pick(small))),
            (6, lambda: mutations.damage_json(case, case.pick(of_json))),
            (2, lambda: mutations.replace_file(case, case.pick(files))),
            (1, lambda: mutations.swap_files(case, files)),
        )

    def read(self, case: Case) -> Any:
        with open_checkpoint(case.folder / "folder", self.program) as parts:
            parts.require_readable(True, ())
            found = {}
            for head in ("params", "opt_state/0/mu"):
                for name, array in parts.of(head).items():
                    found[f"{head}/{name}"] = values_of(np.asarray(parts.opened(array, 1 << 20)))
            count = parts.same("step", None)
            if isinstance(count, SavedArray) and "step" in parts.names:
                found["step"] = values_of(np.asarray(count))
            return found


def values_of(array: np.ndarray) -> Values:
    return array.dtype.name, list(array.shape), array.tobytes()


class ChunkedTarget(ForeignTarget):
    """The reference is tensorstore, with the names that the files have."""

    def reference(self, case: Case) -> Any:
        folder = case.folder / "folder"
        found = {}
        for name in Running.result:
            path = {"params/": "model/", "step": "step"}.get(name[:7], "")
            path = name.replace("params/", path) if path else name
            try:
                found[name] = values_of(self.stored(folder, path))
            except Exception as error:
                raise RefusedError(f"{name}: {error}") from error
        return found

    def stored(self, folder: Path, path: str) -> np.ndarray:
        """Reads one array by tensorstore."""
        raise NotImplementedError


def opened(folder: Path, name: str, driver: str, **more: Any) -> np.ndarray:
    base = {"driver": "file", "path": f"{folder}/"}
    kvstore: dict[str, Any] = {"driver": "file", "path": f"{folder}/{name}/"}
    if (folder / "manifest.ocdbt").exists():
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    spec = {"driver": driver, "kvstore": kvstore, **more}
    return np.asarray(tensorstore.open(spec, open=True, read=True).result().read().result())


class OrbaxTarget(ChunkedTarget):
    """Checkpoints of orbax, with a database and with a folder for each array."""

    name = "orbax"
    program: Program = "orbax"
    metadata = ("_METADATA", ".zarray")

    def prepare(self, seeds: Path) -> None:
        import jax
        import orbax.checkpoint as ocp

        tree = arrays()
        tree["params"] = tree.pop("model")
        for number, database in enumerate((True, False)):
            handler = ocp.PyTreeCheckpointHandler(use_ocdbt=database)
            placed = jax.tree.map(jax.numpy.asarray, tree)
            ocp.Checkpointer(handler).save(seeds / str(number), placed)

    def stored(self, folder: Path, path: str) -> np.ndarray:
        metadata = json.loads((folder / "_METADATA").read_text())
        path = path.replace("model/", "params/")
        written = {
            ".".join(each["key"] for each in entry["key_metadata"])
            for entry in metadata["tree_metadata"].values()
        }
        # A tree whose `params` is of another name is one of parameters.
        names = [path, path.removeprefix("params/")]
        name = next(each.replace("/", ".") for each in names if each.replace("/", ".") in written)
        more = {}
        if metadata.get("store_array_data_equal_to_fill_value") is True:
            more["fill_missing_data_reads"] = False
        driver = "zarr3" if metadata.get("use_zarr3") is True else "zarr"
        return opened(folder, name, driver, **more)


class LevanterTarget(ChunkedTarget):
    """Checkpoints of Levanter, with a database and with a folder for each array."""

    name = "levanter"
    program: Program = "levanter"
    metadata = (".zarray",)

    def prepare(self, seeds: Path) -> None:
        for number, database in enumerate((True, False)):
            write_levanter(seeds / str(number), arrays(), database=database)

    def stored(self, folder: Path, path: str) -> np.ndarray:
        is_database = (folder / "manifest.ocdbt").exists()
        return opened(folder, path, "zarr3" if is_database else "zarr")


class Stub:
    """Stands for what a pickle makes."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__ |= state if isinstance(state, dict) else {"state": state}


class Unpickler(pickle.Unpickler):
    """Python's own unpickler, with classes that do nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        return type(name, (Stub,), {})

    def persistent_load(self, pid: Any) -> Any:
        return pid


class DcpTarget(ForeignTarget):
    """Checkpoints of PyTorch; the reference reads pickles and archives by Python's own modules."""

    name = "dcp"
    program: Program = "dcp"

    def prepare(self, seeds: Path) -> None:
        with tarfile.open(FSDP2) as archive:
            members = [each for each in archive if each.name.startswith("checkpoint")]
            archive.extractall(seeds, members, filter="data")
        tensors = {f"model.{number}": np.arange(12.0, dtype=np.float32) for number in range(3)}
        moments = {f"optim.state.{number}.exp_avg": tensors["model.0"] for number in range(3)}
        write_dcp(seeds / "ours", tensors | moments, ranks=3)

    def reference(self, case: Case) -> Any:
        folder = case.folder / "folder"
        try:
            found = read_by_python(folder)
        except Exception:
            # Python needs more of a pickle than what is read of it.
            return Running.result
        return {
            name: found.get(self.stated(name), values) for name, values in Running.result.items()
        }

    @staticmethod
    def stated(name: str) -> str:
        """Finds the name in the checkpoint."""
        if name.startswith("opt_state/0/mu/"):
            return f"optim.state.{name.removeprefix('opt_state/0/mu/')}.exp_avg"
        return "model." + name.removeprefix("params/")


def read_by_python(folder: Path) -> dict[str, Values]:
    metadata = Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
    places = {}
    for index, info in metadata.storage_data.items():
        if getattr(index, "offset", None) is not None:
            places[index.fqn, tuple(index.offset)] = info
    found = {}
    for name, stored in metadata.state_dict_metadata.items():
        if type(stored).__name__ != "TensorStorageMetadata":
            continue
        dtype = np.dtype(stored.properties.state[0].__name__)
        values = np.zeros(stored.size, dtype)
        for chunk in stored.chunks:
            info = places[name, tuple(chunk.offsets)]
            with (folder / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                content = file.read(info.length)
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                files = {each.partition("/")[2]: each for each in archive.namelist()}
                tensor = Unpickler(io.BytesIO(archive.read(files["data.pkl"]))).load()
                raw = np.frombuffer(archive.read(files["data/0"]), dtype)
            part = raw[tensor.args[1] :][: int(np.prod(chunk.sizes))].reshape(chunk.sizes)
            at = zip(chunk.offsets, chunk.sizes, strict=True)
            values[tuple(slice(lo, lo + size) for lo, size in at)] = part
        found[name] = values_of(values)
    return found
