"""Virtual devices; two processes that join, reduce together and checkpoint together."""

import os
import socket

import jax
import pytest
from processes import finish, start

from fsdp_jax.errors import ConfigError
from fsdp_jax.launch import barrier, is_lead, join_cluster, leave_cluster, use_virtual_devices

pytestmark = pytest.mark.core

VIRTUAL = """
import os
from fsdp_jax.launch import use_virtual_devices
use_virtual_devices(3)
use_virtual_devices(5)
import jax
print(jax.device_count(), jax.default_backend())
print(os.environ["XLA_FLAGS"])
use_virtual_devices(5)
try:
    use_virtual_devices(4)
except ValueError as error:
    print(error)
x = jax.device_put(jax.numpy.ones(5), jax.NamedSharding(jax.make_mesh((5,), ("data",)), jax.P("data")))
print(jax.jit(lambda x: x.sum())(x))
"""


def test_virtual_devices():
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false"
    ((out, _),) = finish(start(VIRTUAL, JAX_PLATFORMS="cpu", XLA_FLAGS=flags))
    devices, environment, *error, total = out.splitlines()
    assert devices == "5 cpu"
    assert environment.split() == [
        "--xla_cpu_enable_fast_math=false",
        "--xla_force_host_platform_device_count=5",
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    ]
    assert "expected: 4" in "\n".join(error)
    assert "got:      5" in "\n".join(error)
    assert total == "5.0"


def test_virtual_devices_once_jax_has_started(monkeypatch):
    flags = os.environ["XLA_FLAGS"]
    use_virtual_devices(jax.device_count())
    with pytest.raises(ValueError, match=r"started already[^$]*train\.devices[^$]*fix:"):
        use_virtual_devices(jax.device_count() + 1)
    assert os.environ["XLA_FLAGS"] == flags
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    use_virtual_devices(jax.device_count() + 1)  # nothing to do with an accelerator there


def test_no_devices():
    with pytest.raises(ConfigError, match=r"train\.devices"):
        use_virtual_devices(0)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (("10.0.0.1:1234", 2, None), "cluster"),
        ((None, 2, 0), "cluster"),
        (("10.0.0.1", 2, 0), r"cluster\.coordinator"),
        ((":1234", 2, 0), r"cluster\.coordinator"),
        (("host:port", 2, 0), r"cluster\.coordinator"),
        (("host:65536", 2, 0), r"cluster\.coordinator"),
        (("host:1234", 0, 0), r"cluster\.processes"),
        (("host:1234", 2, 2), r"cluster\.process"),
        (("host:1234", 2, -1), r"cluster\.process"),
    ],
)
def test_unusable_cluster(arguments, where):
    with pytest.raises(ConfigError, match=rf"where: +{where}\n"):
        join_cluster(*arguments)


def test_a_process_alone():
    join_cluster(None, None, None)
    assert is_lead()
    barrier("alone")
    leave_cluster()


TWO = """
import sys
from fsdp_jax.launch import barrier, is_lead, join_cluster, leave_cluster, use_virtual_devices
port, process, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
use_virtual_devices(4)
join_cluster(f"127.0.0.1:{port}", 2, process)
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from fsdp_jax.checkpoint import CheckpointStore
assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 8, 4)
assert is_lead() == (process == 0)

mesh = jax.make_mesh((8,), ("data",))
rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
values = np.arange(64, dtype=np.float32).reshape(16, 4)
w = jax.make_array_from_callback(values.shape, rows, lambda index: values[index])
psum = jax.shard_map(lambda x: jax.lax.psum(x.sum(), "data"), mesh=mesh, in_specs=rows.spec, out_specs=whole.spec)
assert float(jax.jit(psum)(w)) == values.sum()
barrier("reduced")

state = jax.jit(lambda w: {"w": w, "key": jax.random.key(3)}, out_shardings={"w": rows, "key": whole})(w)
target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
with CheckpointStore(directory, keep=1) as store:
    for step in (1, 2):
        store.save(step, state, data={"position": step}, metadata={})
    store.wait()
    barrier("saved")
    assert store.latest() == 2
    restored, data, _ = store.restore(2, target)
    assert data == {"position": 2}
    for shard in restored["w"].addressable_shards:
        assert (np.asarray(shard.data) == values[shard.index]).all()
    assert (jax.random.key_data(restored["key"]).addressable_data(0) == jax.random.key_data(jax.random.key(3))).all()
    try:
        store.restore(2, {**target, "w": jax.ShapeDtypeStruct((16, 4), jnp.bfloat16, sharding=rows)})
    except ValueError as error:
        assert "w: expected bfloat16[16,4], got float32[16,4]" in str(error)
    else:
        raise AssertionError("cast")
barrier("done")
leave_cluster()
leave_cluster()
print("left")
"""


BATCHES = """
import sys
from fsdp_jax.launch import join_cluster, leave_cluster, use_virtual_devices
port, process = int(sys.argv[1]), int(sys.argv[2])
use_virtual_devices(4)
join_cluster(f"127.0.0.1:{port}", 2, process)
import jax, numpy as np, optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
import fsdp_jax as fsdp
mesh = fsdp.make_mesh()
sharded = fsdp.fully_shard(lambda rngs: nnx.Linear(4, 8, rngs=rngs), optax.sgd(0.1), mesh, min_size=1)
loss = lambda model, batch: ((model(batch["x"]) * batch["w"][:, None]).sum(), batch["x"].shape[0])
everything = {"x": np.arange(64, dtype=np.float32).reshape(16, 4), "w": np.arange(16, dtype=np.float32)}
part = lambda start, count: {name: rows[start : start + count] for name, rows in everything.items()}
for wrong in (part(8 * process, 4 + 4 * process), part(0, 8)):
    try:
        sharded.train_step(loss)(sharded.init(0), wrong)
    except ValueError as error:
        print("refused:", str(error).replace("\\n", " "))
rows = NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec("data"))
whole = {name: jax.make_array_from_callback(x.shape, rows, lambda i, x=x: x[i]) for name, x in everything.items()}
own = part(8 * process, 8)
for k in (1, 2):
    losses = []
    for batch in (own, jax.tree.map(jax.numpy.asarray, own), whole, own | {"w": whole["w"]} if k == 1 else whole):
        losses.append(float(sharded.train_step(loss, accumulation=k)(sharded.init(0), batch)[1]["loss"]))
    print(k, bool(np.allclose(losses, losses[0], rtol=1e-5)))
leave_cluster()
"""


def test_batches_of_two_processes():
    """Each passes its own rows, on the host or its devices, or both the same global arrays; else it
    is refused.
    """
    port = free_port()
    outputs = finish(*(start(BATCHES, port, process, JAX_PLATFORMS="cpu") for process in range(2)))
    for out, _ in outputs:
        counts, same, *rest = [
            line for line in out.splitlines() if line.startswith(("refused", "1 ", "2 "))
        ]
        assert "different numbers of rows" in counts
        assert "4 in process 0, 8 in process 1" in counts
        assert "all processes passed the same rows" in same
        assert "jax.process_index()" in same
        assert rest == ["1 True", "2 True"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_processes(tmp_path):
    """Two of four devices each: one reduction over all eight, and a checkpoint that both write and
    both read.
    """
    port = free_port()
    outputs = finish(
        *(start(TWO, port, process, tmp_path, JAX_PLATFORMS="cpu") for process in range(2))
    )
    assert [out.splitlines()[-1] for out, _ in outputs] == [
        "left",
        "left",
    ]  # after what Gloo has to say
    assert sorted(os.listdir(tmp_path)) == ["2"]
