"""Two processes save and restore together; if one is slow or fails, both get to know, and soon.

The example of the page compiles an `init`, since it saves and restores what that returns.
"""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from processes import JOIN, PATIENCE, free_port, run_cluster, start

from fsdp_jax.checkpoint import CheckpointStore

pytestmark = pytest.mark.releases

PROGRAM = """
import time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from fsdp_jax.checkpoint import CheckpointError, CheckpointStore, arrays, store as module
from fsdp_jax.sharding.padding import Padded
arrays.SHARED_BYTES = 1  # each process writes its part of what is replicated
directory = sys.argv[4]
mesh = jax.make_mesh((8,), ("data",))
rows, replicated = (jax.NamedSharding(mesh, jax.P(*spec)) for spec in (["data"], []))
values = np.arange(64, dtype=np.float32).reshape(16, 4)
w = jax.make_array_from_callback(values.shape, rows, lambda index: values[index])
odd = np.arange(27, dtype=np.float32).reshape(9, 3)  # 7 rows of zeros behind: 3 shards of them
stored = np.pad(odd, ((0, 7), (0, 0)))
stored = jax.make_array_from_callback(stored.shape, rows, lambda index: stored[index])
state = jax.jit(
    lambda w: {"w": w, "same": jax.random.normal(jax.random.key(1), (64, 256)),
               "key": jax.random.key(3)},
    out_shardings={"w": rows, "same": replicated, "key": replicated},
)(w)
state["odd"] = Padded(stored, odd.shape)
spec = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
target = jax.tree.map(spec, {**state, "odd": stored})
target["odd"] = jax.ShapeDtypeStruct(odd.shape, odd.dtype, sharding=rows)
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
    assert (np.asarray(restored["same"]) == np.asarray(state["same"])).all()
    assert store.record(2)["leaves"]["odd"] == "float32[9,3]"
    for shard in restored["odd"].array.addressable_shards:
        assert (np.asarray(shard.data) == np.pad(odd, ((0, 7), (0, 0)))[shard.index]).all()
    own = Path(directory, "2").rglob(f"*process_{process}/d/*")
    print(1.1 > sum(path.stat().st_size for path in own) / (state["same"].nbytes / 2) > 0.8)
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


@pytest.mark.long
def test_two_processes_save_though_one_is_slow_or_fails(tmp_path):
    outputs = run_cluster(PROGRAM, tmp_path)
    for out, refusal in zip(outputs, ["ArgumentError", "CheckpointError"], strict=True):
        lines = out.splitlines()[-6:]  # Gloo prints lines of its own before
        assert lines == ["True", "True", refusal, "[1, 2] True", "True", "True"], out
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]
    # One process has what two have saved.
    rows = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P("data"))
    shapes = {"w": (16, 4), "odd": (9, 3)}
    wanted = {n: jax.ShapeDtypeStruct(s, "float32", sharding=rows) for n, s in shapes.items()}
    with CheckpointStore(tmp_path) as store:
        for leaf in store.read(2, wanted).values():
            found = np.asarray(leaf)
            np.testing.assert_array_equal(found, np.arange(found.size).reshape(found.shape))


# What the example of docs/checkpoints.md begins with.
BEFORE = """
import os
import optax
from flax import nnx
import fsdp_jax as fsdp

def make(strategy):
    model = lambda rngs: nnx.Linear(8, 8, rngs=rngs)
    mesh = fsdp.make_mesh()
    return fsdp.fully_shard(model, optax.adam(0.1), mesh, strategy=strategy, min_size=1)

sharded, other = make("full_shard"), make("no_shard")
state = sharded.init(seed=0)
"""


@pytest.fixture
def example():
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    (found,) = [block for block in page.split("```python\n") if 'Lease("run")' in block]
    return found.partition("```")[0]


def test_the_example_of_the_page_runs(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(BEFORE, names)
    exec(example, names)
    assert [path.name for path in Path("run", "checkpoints").iterdir()] == ["100"]
    assert (int(names["state"].step), names["data"]) == (0, {"position": 3200})


SNIPPET = """
os.chdir(sys.argv[4])
from fsdp_jax.checkpoint import Lease, lease as module
from fsdp_jax.errors import ConfigError
open_files = [os.open(os.devnull, os.O_RDONLY) for _ in range(7 * process)]  # other numbers
exec(sys.argv[5])
print("steps", os.listdir("run/checkpoints"), int(state.step), data, metadata)

# Another run holds the lease: every process is refused.
barrier("restored")
alone = Lease("held", process=0)
if process == 0:
    alone.__enter__()
barrier("held")
try:
    Lease("held").__enter__()
except ConfigError as error:
    print("refused:", str(error).replace("\\n", " "))
barrier("refused")

# Not every process sees the directory: nobody writes there.
module.LAG = 0.1
os.makedirs(str(process))
os.chdir(str(process))
try:
    Lease("run").__enter__()
except ConfigError as error:
    print("refused:", str(error).replace("\\n", " "))
print("left", os.listdir("run") if process == 0 else [])
leave_cluster()
"""


@pytest.mark.long
def test_the_example_of_the_page_runs_in_every_process(example, tmp_path):
    outputs = run_cluster(BEFORE + SNIPPET, tmp_path, example)
    reasons = ["another run is writing to this directory", "the lease was not taken"]
    for out, reason in zip(outputs, reasons, strict=True):
        reported = ("steps", "refused:", "left")
        steps, held, unseen, left = [li for li in out.splitlines() if li.startswith(reported)]
        assert steps == "steps ['100'] 0 {'position': 3200} {}"
        assert held.startswith(f"refused: {reason}")
        assert unseen.startswith("refused: not every process sees this directory")
        assert left == "left []"


ALONE = (
    JOIN
    + """
from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.launch import fail_together
with fail_together(), CheckpointStore(sys.argv[4]) as store:
    if is_lead():  # as other trainers do
        store.save(7, {}, data={}, metadata={})
leave_cluster()
"""
)


@pytest.mark.long
def test_a_save_that_one_process_alone_calls_ends_both(tmp_path):
    port = free_port()
    started = [start(ALONE, port, k, 2, tmp_path, JAX_PLATFORMS="cpu") for k in range(2)]
    for process in started:
        _, error = process.communicate(timeout=PATIENCE)
        assert process.returncode == 2, error
        assert "store.save of step 7, which every process calls" in error
        assert "the end of the run" in error
