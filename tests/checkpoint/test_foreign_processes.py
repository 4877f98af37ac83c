"""Two processes import together: each reads the files of its own devices, and no others."""

import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from dcp_files import write_dcp
from jax.sharding import NamedSharding, PartitionSpec
from processes import run_cluster

VALUES = np.arange(16.0 * 6, dtype=np.float32).reshape(16, 6)
PROGRAM = """
import jax, numpy as np, fsdp_jax
from fsdp_jax.checkpoint import import_dcp, import_orbax
folder, values = sys.argv[4], np.arange(16.0 * 6, dtype=np.float32).reshape(16, 6)
mesh = fsdp_jax.make_mesh(data=8)
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
for read in (import_orbax, import_dcp):
    theirs = f"{folder}/{read.__name__}-{process}"
    for sharding, view in ((rows, None), (columns, lambda _, saved: saved["a"].transpose())):
        expected = values if view is None else values.T
        target = {"a": jax.ShapeDtypeStruct(expected.shape, "float32", sharding=sharding)}
        for shard in read(theirs, target, rename=view)["a"].addressable_shards:
            assert np.array_equal(np.asarray(shard.data), expected[shard.index])
barrier("done")
leave_cluster()
print("read", flush=True)
"""


@pytest.mark.long
def test_each_process_reads_the_files_of_its_shards(tmp_path):
    """Each has a copy of the checkpoint that lacks what the other one reads."""
    mesh = jax.make_mesh((8,), ("x",))
    placed = jax.device_put(VALUES, NamedSharding(mesh, PartitionSpec("x")))
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    ocp.Checkpointer(handler).save(tmp_path / "import_orbax", {"a": placed})
    write_dcp(tmp_path / "import_dcp", {"a": VALUES}, ranks=8)
    for process, others in enumerate((range(4, 8), range(4))):
        for name in ("import_orbax", "import_dcp"):
            shutil.copytree(tmp_path / name, tmp_path / f"{name}-{process}")
        for other in others:
            (tmp_path / f"import_orbax-{process}" / "a" / f"{other}.0").unlink()
            (tmp_path / f"import_dcp-{process}" / f"__{other}_0.distcp").write_bytes(b"")
    here = str(Path(__file__).parents[2])
    outputs = run_cluster(PROGRAM, tmp_path, PYTHONPATH=here)
    assert all("read" in out for out in outputs)
