"""Two processes import together: each reads what its own devices hold, and no more; neither exports
what it lacks.
"""

import dataclasses
import re
from pathlib import Path

import pytest
from processes import run_cluster
from safetensors.numpy import save_file
from tiny import FAMILIES, theirs

from fsdp_jax.tree import flatten
from fsdp_jax.units.nnx import NnxModel

PROGRAM = """
folder = sys.argv[4]
import dataclasses, os, warnings
import jax, numpy as np, optax, fsdp_jax
from fsdp_jax.errors import ConfigError
from fsdp_jax.tree import flatten
from fsdp_jax.weights import from_arrays, import_weights
from tiny import FAMILIES, expected
from safetensors.numpy import load_file
warnings.simplefilter("ignore", fsdp_jax.ReplicationWarning)
model, config = FAMILIES["gpt2"]
config = dataclasses.replace(config, width=256)
sharded = fsdp_jax.fully_shard(
    lambda rngs: model(config, rngs=rngs), optax.sgd(0.1), fsdp_jax.make_mesh(data=8),
    "full_shard", "model"
)
read, preadv = [], os.preadv
os.preadv = lambda *given: (done := preadv(*given), read.append(done))[0]
params = flatten(import_weights(folder, sharded.checkpoint_target().params, config))
wanted = expected(config, params, load_file(folder + "/model.safetensors"))
for path, leaf in params.items():
    assert len(leaf.addressable_shards) == 4
    for shard in leaf.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), wanted[path][shard.index]), path
try:
    from_arrays(params)
except ConfigError as error:
    refused = "other processes hold" in str(error)
barrier("done")
leave_cluster()
print("read", refused, sum(read), flush=True)
"""


@pytest.mark.long
def test_each_process_reads_the_shards_of_its_devices(tmp_path):
    model, config = FAMILIES["gpt2"]
    config = dataclasses.replace(config, width=256)
    leaves = flatten(NnxModel(lambda rngs: model(config, rngs=rngs)).params)
    tensors = theirs(config, leaves)
    save_file(tensors, tmp_path / "model.safetensors")
    here = f"{Path(__file__).parents[1]}:{Path(__file__).parent}"
    outputs = run_cluster(PROGRAM, tmp_path, PYTHONPATH=here)
    whole = sum(value.nbytes for value in tensors.values())
    # Gloo prints lines of its own, before or after.
    told = [re.findall(r"^read (\w+) (\d+)$", out, re.MULTILINE) for out in outputs]
    assert [refused for [(refused, _)] in told] == ["True", "True"]
    read = [int(count) for [(_, count)] in told]
    assert max(read) < 0.85 * whole, "rows are read alone, columns of short rows are not"
    assert sum(read) >= whole
