"""Runs of two and four processes, of two devices each, are those of one with the same devices.

Their steps are compiled and run: losses and checkpoints are compared.
"""

import hashlib
import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from processes import run_cluster
from reference import CASES, make_model

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import CheckpointStore

CASE = CASES["nnx-gpt-scanned"]
STEPS = 3
# The arguments are the folders of tests, of this file and of the checkpoints.
PROGRAM = """
import json
sys.path[:0] = sys.argv[4:6]
import test_like_one_process as test
found = test.train_all(process, processes)
if processes == 4:
    found["restored"] = test.restore(sys.argv[6] + "/of one")
    found["saved"] = test.save(sys.argv[6] + "/of four")
print("found", json.dumps(found))
leave_cluster()
"""


def shard(strategy, count=None):
    """The object that trains, on the first `count` devices: a pair of groups where it is hybrid."""
    devices = jax.devices()[:count]
    replica = 1 + (strategy == "hybrid_shard")
    mesh = fsdp.make_mesh(-1, replica, devices=devices)
    model = make_model(CASE)
    return fsdp.fully_shard(model, optax.adam(1e-3), mesh, strategy, CASE.units, min_size=8)


def train_all(process=0, processes=1, count=None):
    """{strategy and kind of batch: losses}, where each process passes its own rows."""
    found = {}
    for strategy in ("full_shard", "hybrid_shard"):
        sharded = shard(strategy, count)
        for local_batch in (False, True):
            step = sharded.make_train_step(CASE.loss, local_batch=local_batch)
            state, losses = sharded.init(seed=0), []
            for number in range(STEPS):
                rows = {
                    name: np.split(value, processes)[process]
                    for name, value in CASE.batch(number).items()
                }
                state, metrics = step(state, rows)
                losses.append(float(metrics["loss"]))
            found[f"{strategy} {local_batch}"] = losses
    return found


def digest(saved):
    """A digest of all arrays of a state, whole."""
    whole = jax.tree.map(lambda leaf: jax.device_get(gathered(leaf)), saved)
    leaves = jax.tree.leaves(whole)
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


def gathered(leaf):
    """An array that every process has whole."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.is_fully_addressable:
        return leaf
    return jax.experimental.multihost_utils.process_allgather(leaf, tiled=True)


def save(directory):
    """Saves a state after a step; returns its digest."""
    sharded = shard("full_shard")
    processes = jax.process_count()
    rows = {
        name: np.split(value, processes)[jax.process_index()]
        for name, value in CASE.batch(7).items()
    }
    state, _ = sharded.make_train_step(CASE.loss)(sharded.init(seed=processes), rows)
    saved = sharded.to_checkpoint(state)
    with CheckpointStore(directory) as store:
        store.save(1, saved, data={}, metadata={})
    return digest(saved)


def restore(directory):
    """Restores what others have saved; returns its digest."""
    with CheckpointStore(directory) as store:
        restored, _, _ = store.restore(1, shard("full_shard").checkpoint_target())
    return digest(restored)


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [2, 4])
def test_losses_and_checkpoints_are_those_of_one_process(tmp_path, processes):
    saved = save(tmp_path / "of one")
    tests = Path(__file__).parents[1]
    outputs = run_cluster(PROGRAM, tests, tests / "launch", tmp_path, count=processes, devices=2)
    expected = train_all(count=2 * processes)
    for out in outputs:
        (line,) = [line for line in out.splitlines() if line.startswith("found ")]
        found = json.loads(line.removeprefix("found "))
        for name, losses in expected.items():
            np.testing.assert_allclose(found[name], losses, rtol=1e-5, err_msg=name)
        if processes == 4:
            # From one process to four and back, bit for bit.
            assert found["restored"] == saved
            assert restore(tmp_path / "of four") == found["saved"]
