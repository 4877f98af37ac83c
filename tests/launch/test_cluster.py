"""Virtual devices, and two processes that join, reduce together and train on their own rows."""

import os
import re

import jax
import optax
import pytest
from flax import nnx
from processes import PATIENCE, finish, free_port, run_cluster, start

import fsdp_jax
from fsdp_jax.errors import ConfigError
from fsdp_jax.launch import (
    barrier,
    cluster,
    is_lead,
    join_cluster,
    leave_cluster,
    use_virtual_devices,
)

pytestmark = pytest.mark.releases

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
rows = jax.NamedSharding(jax.make_mesh((5,), ("data",)), jax.P("data"))
print(jax.jit(lambda x: x.sum())(jax.device_put(jax.numpy.ones(5), rows)))
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


def test_virtual_devices_are_fixed_once_jax_has_started(monkeypatch):
    flags = os.environ["XLA_FLAGS"]
    use_virtual_devices(jax.device_count())
    with pytest.raises(ValueError, match=r"started already[^$]*train\.devices[^$]*fix:"):
        use_virtual_devices(jax.device_count() + 1)
    assert os.environ["XLA_FLAGS"] == flags
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    use_virtual_devices(jax.device_count() + 1)  # nothing to do with an accelerator there


def test_a_process_of_several_that_has_not_asked_to_join_is_warned_of(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setattr("fsdp_jax.processes._asked_to_join", False)
    sharded = fsdp_jax.fully_shard(
        lambda rngs: nnx.Linear(2, 2, rngs=rngs), optax.sgd(0.1), fsdp_jax.make_mesh()
    )
    with pytest.warns(UserWarning, match=r"started as one of 2 .*join_cluster\(\)"):
        sharded.init()
    join_cluster(detect=False)  # a run of one process, on purpose
    sharded.init()


STARTED = """
import jax
from fsdp_jax.launch import join_cluster
jax.devices()
join_cluster("127.0.0.1:PORT", 1, 0)
"""


def test_joining_after_the_devices_have_started_is_refused():
    program = STARTED.replace("PORT", str(free_port()))
    process = start(program, JAX_PLATFORMS="cpu")
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, error
    assert "jax has started already, with the devices of this process alone" in error
    assert "fix:      call it before anything that touches a device" in error


def test_zero_devices_are_refused():
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
def test_an_unusable_cluster_is_refused(arguments, where):
    with pytest.raises(ConfigError, match=rf"where: +{where}\n"):
        join_cluster(*arguments)


def test_a_process_joins_once(monkeypatch):
    monkeypatch.setattr(cluster, "_watch", object())
    with pytest.raises(ConfigError, match=r"has joined already\n[^$]*fix: +call leave_cluster"):
        join_cluster("localhost:1234", 2, 0)


def test_a_single_process_needs_no_cluster():
    join_cluster(None, None, None)
    assert is_lead()
    barrier("alone")
    leave_cluster()


TWO = """
import jax, numpy as np, optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
import fsdp_jax as fsdp
assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 8, 4)
assert is_lead() == (process == 0)

# One reduction over all eight devices.
by_rows = NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec("data"))
values = np.arange(64, dtype=np.float32).reshape(16, 4)
x = jax.make_array_from_callback(values.shape, by_rows, lambda index: values[index])
psum = jax.shard_map(
    lambda x: jax.lax.psum(x.sum(), "data"),
    mesh=by_rows.mesh, in_specs=by_rows.spec, out_specs=PartitionSpec(),
)
assert float(jax.jit(psum)(x)) == values.sum()
barrier("reduced")

# Batches that the processes must not pass.
sharded = fsdp.fully_shard(
    lambda rngs: nnx.Linear(4, 8, rngs=rngs), optax.sgd(0.1), fsdp.make_mesh(), min_size=1
)
loss = lambda model, batch: ((model(batch["x"]) * batch["w"][:, None]).sum(), batch["x"].shape[0])
everything = {"x": values, "w": np.arange(16, dtype=np.float32)}
part = lambda first, count: {name: x[first : first + count] for name, x in everything.items()}
for wrong in (part(8 * process, 4 + 4 * process), part(0, 8)):
    try:
        sharded.make_train_step(loss)(sharded.init(0), wrong)
    except ValueError as error:
        print("refused:", str(error).replace("\\n", " "))

# The same batch in every way to pass it: numpy, local arrays, global arrays, a mixture.
global_batch = {
    name: jax.make_array_from_callback(x.shape, by_rows, lambda index, x=x: x[index])
    for name, x in everything.items()
}
own = part(8 * process, 8)
for k in (1, 2):
    step = sharded.make_train_step(loss, accumulation=k)
    mixed = own | {"w": global_batch["w"]} if k == 1 else global_batch
    batches = [own, jax.tree.map(jax.numpy.asarray, own), global_batch, mixed]
    losses = [float(step(sharded.init(0), batch)[1]["loss"]) for batch in batches]
    print(k, bool(np.allclose(losses, losses[0], rtol=1e-5)))
leave_cluster()
leave_cluster()
print("left")
"""


def test_two_processes_reduce_together_and_train_on_their_own_rows():
    """Each passes its own rows, on the host or its devices, or both the same global arrays."""
    for out in run_cluster(TWO):
        reported = re.compile("refused: |[12] (True|False)$|left$")  # Gloo prints lines of its own
        counts, same_rows, *rest = filter(reported.match, out.splitlines())
        assert "different numbers of rows" in counts
        assert "4 in process 0, 8 in process 1" in counts
        assert "all processes passed the same rows" in same_rows
        assert "jax.process_index()" in same_rows
        assert rest == ["1 True", "2 True", "left"]
