"""Two processes save and restore together; if one is slow or fails, both get to know, and soon."""

import os

import pytest
from processes import run_cluster

pytestmark = pytest.mark.releases

PROGRAM = """
import time
import jax, jax.numpy as jnp, numpy as np
from fsdp_jax.checkpoint import CheckpointError, CheckpointStore, store as module
directory = sys.argv[4]
mesh = jax.make_mesh((8,), ("data",))
rows, replicated = (jax.NamedSharding(mesh, jax.P(*spec)) for spec in (["data"], []))
values = np.arange(64, dtype=np.float32).reshape(16, 4)
w = jax.make_array_from_callback(values.shape, rows, lambda index: values[index])
state = jax.jit(
    lambda w: {"w": w, "key": jax.random.key(3)}, out_shardings={"w": rows, "key": replicated}
)(w)
spec = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
target = jax.tree.map(spec, state)
save = lambda step: store.save(step, state, data={"position": step}, metadata={})
real_list, real_digest = module.list_files, module.digest_files

def slow(root):
    time.sleep(1.0)
    return real_list(root)

def full(*_, **__):
    raise OSError(28, "No space left on device")

with CheckpointStore(directory, keep=2) as store:
    # One is late: each waits for the other.
    for late in (0, 1):
        module.list_files = slow if process == late else real_list
        save(late)
        assert store.check(late).good
    module.list_files = real_list

    # One fails while it writes: the other fails too, without waiting for long.
    for broken in (0, 1):
        module.digest_files = full if process == broken else real_digest
        save(2)
        began = time.monotonic()
        try:
            store.wait()
        except CheckpointError as error:
            print(("No space left" if process == broken else "failed-%d" % broken) in str(error))
        assert time.monotonic() - began < 60
        barrier(f"failed {broken}")
    module.digest_files = real_digest
    save(2)

    # One cannot even begin: the other does not begin either.
    try:
        store.save(3, {"w": 1.0} if process == 0 else state, data={}, metadata={})
    except (CheckpointError, ValueError) as error:
        print(type(error).__name__)
    barrier("deleted")
    print(store.steps(), store.check(2).good)

    # Both restore what both have written.
    restored, data, _ = store.restore(2, target)
    assert data == {"position": 2}
    for shard in restored["w"].addressable_shards:
        assert (np.asarray(shard.data) == values[shard.index]).all()
    key = jax.random.key_data(restored["key"]).addressable_data(0)
    assert (key == jax.random.key_data(jax.random.key(3))).all()
    narrow = jax.ShapeDtypeStruct((16, 4), jnp.bfloat16, sharding=rows)
    try:
        store.restore(2, {**target, "w": narrow})
    except ValueError as error:
        print("w: expected bfloat16[16,4], got float32[16,4]" in str(error))
barrier("done")
leave_cluster()
"""


def test_two_processes_save_and_restore_though_one_is_slow_or_fails(tmp_path):
    outputs = run_cluster(PROGRAM, tmp_path)
    for out, refusal in zip(outputs, ["ValueError", "CheckpointError"], strict=True):
        lines = out.splitlines()[-5:]  # Gloo prints lines of its own before
        assert lines == ["True", "True", refusal, "[1, 2] True", "True"], out
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]
