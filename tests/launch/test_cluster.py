"""Virtual devices, and two processes that join, reduce together and train as one does.

The programs of the two processes are compiled and run: nothing else joins processes of jax. So is
the step of one process that they are compared with.
"""

import os
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from processes import JOIN, PATIENCE, free_port, run_cluster, start
from reference import losses_of
from refusals import refused
from test_hub import ThreadWatch

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

FLAGS = "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false"
FLAGS_OF_FIVE = [
    "--xla_cpu_enable_fast_math=false",
    "--xla_force_host_platform_device_count=5",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
]


def test_virtual_devices_are_set_before_jax_starts(monkeypatch):
    counts = []
    update = lambda name, count: counts.append((name, count))  # noqa: E731
    monkeypatch.setattr(cluster.jax.config, "update", update)
    monkeypatch.setenv("XLA_FLAGS", FLAGS)
    for count in (3, 5):
        use_virtual_devices(count)
    assert counts == [("jax_num_cpu_devices", 3), ("jax_num_cpu_devices", 5)]
    assert os.environ["XLA_FLAGS"].split() == FLAGS_OF_FIVE


def test_virtual_devices_are_fixed_once_jax_has_started(monkeypatch):
    flags = os.environ["XLA_FLAGS"]
    use_virtual_devices(jax.device_count())
    with refused("started already", where="train.devices", fix="before anything"):
        use_virtual_devices(jax.device_count() + 1)
    assert os.environ["XLA_FLAGS"] == flags
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    use_virtual_devices(jax.device_count() + 1)  # nothing to do with an accelerator there


def test_a_process_that_has_not_asked_to_join_is_warned_of(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setattr("fsdp_jax.processes._asked_to_join", False)
    sharded = fsdp_jax.fully_shard(
        lambda rngs: nnx.Linear(2, 2, rngs=rngs), optax.sgd(0.1), fsdp_jax.make_mesh()
    )
    with pytest.warns(UserWarning, match=r"started as one of 2 .*join_cluster\(\)"):
        sharded.init()
    join_cluster(detect=False)  # a run of one process, on purpose
    sharded.init()


def test_joining_after_the_devices_have_started_is_refused(monkeypatch, capsys):
    """By an error of the run, which ends all its processes; here there is one."""
    monkeypatch.setattr(cluster, "Watch", ThreadWatch)
    monkeypatch.setattr(cluster, "_watch", None)
    for name in ("_install_exit_hooks", "compare_facts_by", "set_hosts"):
        monkeypatch.setattr(cluster, name, lambda *_: None)
    join_cluster(f"127.0.0.1:{free_port()}", 1, 0)
    assert cluster._watch.code == 2
    error = capsys.readouterr().err
    assert "jax has started already, with the devices of this process alone" in error
    assert "fix:      call it before anything that touches a device" in error
    cluster._watch.leave()


def test_zero_devices_are_refused():
    with refused(error=ConfigError, where="train.devices"):
        use_virtual_devices(0)


UNUSABLE = {
    ("10.0.0.1:1234", 2, None): "cluster",
    (None, 2, 0): "cluster",
    ("10.0.0.1", 2, 0): "cluster.coordinator",
    (":1234", 2, 0): "cluster.coordinator",
    ("host:port", 2, 0): "cluster.coordinator",
    ("host:65536", 2, 0): "cluster.coordinator",
    ("host:1234", 0, 0): "cluster.processes",
    ("host:1234", 2, 2): "cluster.process",
    ("host:1234", 2, -1): "cluster.process",
}


def test_unusable_clusters_are_refused():
    for arguments, where in UNUSABLE.items():
        with refused(error=ConfigError, where=where):
            join_cluster(*arguments)


def test_a_worker_of_multiprocessing_does_not_join_in_its_parents_place(monkeypatch):
    """Its own program may: one that a process outside of any run has started."""
    monkeypatch.setattr(cluster.multiprocessing.current_process(), "name", "SpawnProcess-1")
    monkeypatch.setattr(cluster, "choose_platforms", lambda: pytest.fail("it goes on"))
    monkeypatch.setenv(cluster.JOINED, "123")
    with refused("would join the run once more", error=ConfigError, got="of process 123"):
        join_cluster("127.0.0.1:1234", 2, 1)
    monkeypatch.delenv(cluster.JOINED)
    with pytest.raises(pytest.fail.Exception):
        join_cluster("127.0.0.1:1234", 2, 1)


def test_a_process_joins_once(monkeypatch):
    monkeypatch.setattr(cluster, "_watch", object())
    with refused("has joined already", error=ConfigError, fix="call leave_cluster"):
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
state = sharded.init(0)
for wrong in (part(8 * process, 4 + 4 * process), part(0, 8)):
    try:
        sharded.make_train_step(loss)(state, wrong)
    except ValueError as error:
        print("refused:", str(error).replace("\\n", " "))

# The same batch in every way to pass it: numpy, local arrays, global arrays, a mixture.
global_batch = {
    name: jax.make_array_from_callback(x.shape, by_rows, lambda index, x=x: x[index])
    for name, x in everything.items()
}
own = part(8 * process, 8)
mixed = own | {"w": global_batch["w"]}
evaluate = sharded.make_eval_step(loss)
for batch in (own, jax.tree.map(jax.numpy.asarray, own), global_batch, mixed):
    total, count, *_ = evaluate(state, batch)
    print("loss", float(total) / float(count))
step = sharded.make_train_step(loss, accumulation=2)
for batch in (own, global_batch, own):
    state, metrics = step(state, batch)
    print("loss", float(metrics["loss"]))
for replica, strategy, local in ((1, "full_shard", True), (2, "hybrid_shard", False),
                                 (2, "hybrid_shard", True)):
    sharded = sharded.on(fsdp.make_mesh(-1, replica), strategy=strategy)
    step, state = sharded.make_train_step(loss, local_batch=local), sharded.init(0)
    for _ in range(3):
        state, metrics = step(state, own)
        print("loss", float(metrics["loss"]))
leave_cluster()
leave_cluster()
print("left")
"""


def test_two_processes_train_as_one():
    """Each passes its own rows, on the host or its devices, or both the same global arrays."""
    sharded = fsdp_jax.fully_shard(
        lambda rngs: nnx.Linear(4, 8, rngs=rngs), optax.sgd(0.1), fsdp_jax.make_mesh(), min_size=1
    )

    def loss(model, batch):
        return (model(batch["x"]) * batch["w"][:, None]).sum(), batch["x"].shape[0]

    values = np.arange(64, dtype=np.float32).reshape(16, 4)
    batch = {"x": values, "w": np.arange(16, dtype=np.float32)}
    step = sharded.make_train_step(loss, accumulation=2)
    expected, _ = losses_of(step, sharded.init(0), [batch] * 3)
    for out in run_cluster(TWO):
        reported = re.compile("refused: |loss |left$")  # Gloo prints lines of its own
        counts, same_rows, *rest = filter(reported.match, out.splitlines())
        assert "different numbers of rows" in counts
        assert "4 in process 0, 8 in process 1" in counts
        assert "all processes passed the same rows" in same_rows
        assert "jax.process_index()" in same_rows
        assert rest.pop() == "left"
        found = [float(line.removeprefix("loss ")) for line in rest]
        np.testing.assert_allclose(found, expected[:1] * 4 + expected * 4, rtol=1e-5)


UNEQUAL = """
import numpy as np, optax
from flax import nnx
import fsdp_jax as fsdp
sharded = fsdp.fully_shard(
    lambda rngs: nnx.Linear(2, 2, rngs=rngs), optax.sgd(0.1), fsdp.make_mesh(), min_size=1
)
loss = lambda model, batch: ((model(batch) ** 2).sum(), batch.shape[0])
rows = np.full((4, 2), process + 1.0, np.float32)
state, step = sharded.init(0), sharded.make_train_step(loss)
evaluate = sharded.make_eval_step(loss)
evaluate(state, rows)
for _ in range(2 + process):
    state, metrics = step(state, rows)
    float(metrics["loss"])
float(evaluate(state, rows)[0])
"""


@pytest.mark.long
def test_a_process_whose_data_end_before_those_of_others_is_named():
    """It evaluates then, and its devices wait for those that train on."""
    program = "from fsdp_jax.launch import hub; hub.SAY_SECONDS = 1\n" + JOIN + UNEQUAL
    port = free_port()
    processes = [start(program, port, k, 2, JAX_PLATFORMS="cpu") for k in range(2)]
    for process in processes:
        _, error = process.communicate(timeout=PATIENCE)
        assert process.returncode == 2, error
        assert "error: the processes have unequal numbers of batches\n" in error
        assert "process 0: 2 for the eval step and 2 for the train step\n" in error
        assert "process 1: 1 for the eval step and 3 for the train step\n" in error
