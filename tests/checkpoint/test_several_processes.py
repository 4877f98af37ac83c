"""Two processes save together: whoever is slow or fails, both come to the same end, and soon."""

import os
import socket

import pytest
from processes import finish, start

pytestmark = pytest.mark.core

PROGRAM = """
import sys, time
from fsdp_jax.launch import barrier, join_cluster, leave_cluster, use_virtual_devices
port, process, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
use_virtual_devices(4)
join_cluster(f"127.0.0.1:{port}", 2, process)
import jax, numpy as np
from fsdp_jax.checkpoint import CheckpointError, CheckpointStore, store as module
rows = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P("data"))
values = np.arange(64, dtype=np.float32).reshape(16, 4)
state = {"w": jax.make_array_from_callback(values.shape, rows, lambda index: values[index])}
save = lambda step: store.save(step, state, data={}, metadata={})
real_list, real_digest = module.list_files, module.digest_files

def slow(root):
    time.sleep(1.0)
    return real_list(root)

def full(*_, **__):
    raise OSError(28, "No space left on device")

with CheckpointStore(directory) as store:
    for late in (0, 1):  # each waits for the other
        module.list_files = slow if process == late else real_list
        save(late)
        assert store.check(late).good
    module.list_files = real_list
    for broken in (0, 1):
        module.digest_files = full if process == broken else real_digest
        save(2)
        began = time.monotonic()
        try:
            store.wait()
        except CheckpointError as error:
            print(("No space left" if process == broken else "failed-%d" % broken) in str(error))
        assert time.monotonic() - began < 60
        barrier(f"told {broken}")
    module.digest_files = real_digest
    save(2)
    try:  # one that cannot even begin keeps the other from beginning
        store.save(3, {"w": 1.0} if process == 0 else state, data={}, metadata={})
    except (CheckpointError, ValueError) as error:
        print(type(error).__name__)
    print(store.steps(), store.check(2).good)
barrier("done")
leave_cluster()
"""


def test_slow_and_failing(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outputs = finish(
        *(start(PROGRAM, port, process, tmp_path, JAX_PLATFORMS="cpu") for process in range(2))
    )
    for (out, _), refusal in zip(outputs, ["ValueError", "CheckpointError"], strict=True):
        assert out.splitlines()[-4:] == ["True", "True", refusal, "[0, 1, 2] True"], out
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]
