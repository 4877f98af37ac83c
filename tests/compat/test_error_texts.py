"""Texts of errors: each is provoked in the library that raises it, or recorded where that is long.

Recorded are a refusal of another TPU compiler, and two of the texts of `NOT_TYPED`. One program is
compiled, for a TPU, whose compiler refuses it.
"""

import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import tensorstore
from collected import collected
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, Mesh, NamedSharding, reshard, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from mend import in_gpu_compiler, relied_on

from fsdp_jax.compat import error_texts
from fsdp_jax.planner import parse_topology
from fsdp_jax.planner.compiled.buffer_assignment import read_memory_report
from fsdp_jax.planner.compiled.program import REFUSED_PROGRAM

pytestmark = pytest.mark.releases

X = jnp.ones((8, 8))
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh_of(*types, names=("data", "devices"), sizes=(1, 8)):
    """A mesh with an axis for each type: of 8 devices, or of 1 and 8."""
    return jax.make_mesh(sizes[-len(types) :], names[: len(types)], axis_types=types)


def error_of(fn, mesh=None):
    """The error of tracing a function of an array, under a mesh."""
    with pytest.raises(Exception) as caught:  # noqa: PT011, PT012
        if mesh is None:
            jax.jit(fn).trace(X)
        else:
            with use_abstract_mesh(mesh.abstract_mesh):
                jax.jit(fn).trace(X)
    return caught.value


def elsewhere():
    return jax.device_put(np.ones((8, 8)), NamedSharding(mesh_of(EXPLICIT), P("data")))


def inside_shard_map(x):
    inner = jax.shard_map(
        lambda x: reshard(x, P("data")),
        in_specs=P("data"),
        out_specs=P("data"),
        mesh=mesh_of(AUTO),
    )
    return inner(x)


def called(x):
    io_callback(np.sum, None, lax.stop_gradient(x))
    return x


def in_a_ref(x):
    ref = jax.new_ref(jnp.zeros_like(X))
    ref[...] = x
    return ref[...]


def gradient_of_checkpoint(fn):
    return jax.grad(lambda x: jnp.sum(jax.checkpoint(fn)(x)))


PROVOKED = {
    "CONSTRAINT_WITHOUT_MESH": [(lambda x: lax.with_sharding_constraint(x, P("data")), None, ())],
    "RESHARD_WITHOUT_MESH": [
        (lambda x: reshard(x, P("data")), None, ()),
        (lambda x: jnp.einsum("ij->ji", x, out_sharding=P("data")), None, ()),
    ],
    "NOT_EXPLICIT": [
        (lambda x: reshard(x, P("data")), mesh_of(AUTO), ("data", "Auto")),
        (
            lambda x: jnp.einsum("ij,jk->ik", x, x, out_sharding=P("data")),
            mesh_of(AUTO),
            ("data", "Auto"),
        ),
        (inside_shard_map, None, ("data", "Manual")),
    ],
    "NOT_AUTO": [
        (lambda x: lax.with_sharding_constraint(x, P("data")), mesh_of(EXPLICIT, AUTO), ())
    ],
    "NO_AXIS": [
        (lambda x: lax.with_sharding_constraint(x, P("tp")), mesh_of(AUTO), ("tp",)),
        (lambda x: reshard(x, P("tp")), mesh_of(EXPLICIT), ("tp",)),
        (lambda x: reshard(x, P(unreduced={"tp"})), mesh_of(EXPLICIT), ("tp",)),
    ],
    "OTHER_MESH": [(lambda x: x + elsewhere(), mesh_of(AUTO), ("should",))],
    "NOT_TYPED": [
        (
            lambda x: lax.ragged_dot(reshard(x, P("data")), jnp.ones((2, 8, 4)), jnp.full(2, 4)),
            mesh_of(EXPLICIT),
            (),
        ),
        (lambda x: jnp.sin(reshard(x, P(unreduced={"data"}))), mesh_of(EXPLICIT), ()),
    ],
    "UNBOUND_AXIS": [(lambda x: lax.pmean(x, "batch"), None, ("batch",))],
    "STARTED_ALREADY": [(lambda x: jax.distributed.initialize("127.0.0.1:1", 1, 0), None, ())],
    "EFFECTS": [(gradient_of_checkpoint(called), None, ())],
    "LOST_VARIABLE": [(gradient_of_checkpoint(in_a_ref), None, ())],
    "MAPPED_RESULT": [
        (lambda x: jax.vmap(lambda: in_a_ref(x), (), None, axis_name="a", axis_size=1)(), None, ()),
    ],
    "OF_KEYS": [
        (lambda x: x + jax.random.key(0), None, ()),
        (lambda x: jnp.mean(jax.random.key(0)), None, ()),
    ],
    "OF_ARRAYS": [
        (lambda x: x(1), None, ()),
        (lambda x: x.apply({}), None, ()),
        (lambda x: jax.random.key(0)(1), None, ()),
        (lambda x: jax.random.key(0).apply({}), None, ()),
        (lambda x: jax.vmap(lambda x: x(1))(x), None, ()),
    ],
}
if jax.__version_info__ > (0, 10, 2):  # which differentiates such a checkpoint
    del PROVOKED["LOST_VARIABLE"]


@pytest.mark.parametrize("name", PROVOKED)
def test_texts_of_jax(name):
    """Each text is found in its own error, with what it names, and in no error of the others."""
    text = getattr(error_texts, name)
    for fn, mesh, groups in PROVOKED[name]:
        with relied_on("jax", f"error_texts.{name}", "the text of this error"):
            found = text.found_in(error_of(fn, mesh))
            assert found is not None, error_of(fn, mesh)
            assert found.groups() == groups
    assert text.found_in(ValueError("shapes (3,) and (4,) do not broadcast")) is None


def test_recorded_texts_of_jax():
    for text in (
        "sharding rule for sort is not implemented. Please file an issue",
        "mesh should be the same across the entire program. Got mesh AbstractMesh('data': 8)",
    ):
        assert error_texts.NOT_TYPED.found_in(NotImplementedError(text))


def test_first_line_of_jax():
    error = error_of(lambda x: x + elsewhere(), mesh_of(AUTO))
    with relied_on("jax", "error_texts.first_line", "how devices and source lines are named"):
        assert "device_kind" in str(error)
        assert "This error occurs at source" in str(error)
        line = error_texts.first_line(error)
        assert line.startswith("For primitive add, context mesh AbstractMesh('data': 8")
        assert "device_kind" not in line
        assert "source" not in line


def test_in_one_line_of_jax():
    """Below the message of a leak jax shows the stack, after a line of hyphens."""
    leaked = []
    jax.jit(lambda x: leaked.append(x))(X)
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        jnp.sin(leaked[0])
    with relied_on("jax", "error_texts.in_one_line", "the line of hyphens above a stack"):
        line = error_texts.in_one_line(caught.value)
        assert line.startswith("Encountered an unexpected tracer")
        assert "-----" in str(caught.value)
        assert "-----" not in line
        assert "\n" not in line
    assert error_texts.in_one_line(ValueError()) == "ValueError"


def test_evaluates_again_of_optax():
    tx = optax.with_extra_args_support(optax.lbfgs())

    def update(params):
        return tx.update(params, tx.init(params), params, value=jnp.float32(0), grad=params)

    with (
        relied_on("optax", "error_texts.EVALUATES_AGAIN", "the argument of a line search"),
        pytest.raises(TypeError) as caught,
    ):
        jax.eval_shape(update, jnp.ones(3))
    with relied_on("optax", "error_texts.EVALUATES_AGAIN", "the name of this argument"):
        assert error_texts.EVALUATES_AGAIN.found_in(caught.value)


def test_texts_of_what_an_optimizer_is_called_with():
    params = jnp.ones(3)

    def update(tx, **extra):
        return tx.update(params, tx.init(params), params, **extra)

    with pytest.raises(AttributeError) as caught:
        update(optax.lookahead(optax.sgd(0.1), 2, 0.5))
    with relied_on("optax", "error_texts.OF_PAIRS", "the pair that lookahead asks for"):
        assert error_texts.OF_PAIRS.found_in(caught.value)
    with pytest.raises(TypeError) as caught:
        update(optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)), value=1.0)
    with relied_on("Python", "error_texts.UNEXPECTED_ARGUMENT", "the name of the argument"):
        assert error_texts.UNEXPECTED_ARGUMENT.found_in(caught.value)[1] == "value"


def test_is_disk_full_of_tensorstore(tmp_path):
    """The system's limit on the size of a file stands for a full disk: tensorstore has a text."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = tensorstore.KvStore.open({"driver": "file", "path": f"{tmp_path}/"}).result()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            store.write("file", b"a" * 2000).result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with relied_on("tensorstore", "error_texts.is_disk_full", "the text of the system's error"):
        assert error_texts.is_disk_full(caught.value), caught.value
    assert error_texts.is_disk_full(OSError(28, "whatever the system calls it"))
    assert not error_texts.is_disk_full(OSError(13, "Permission denied"))


def test_first_line_of_tensorstore(tmp_path):
    base = {"driver": "file", "path": f"{tmp_path}/missing/"}
    with pytest.raises(Exception) as caught:  # noqa: PT011
        tensorstore.open({"driver": "zarr3", "kvstore": base}).result()
    with relied_on("tensorstore", "error_texts.first_line", "the mark before its own details"):
        assert " [tensorstore_spec" in str(caught.value)
        assert "[" not in error_texts.first_line(caught.value)


@pytest.mark.needs_plugin
def test_refused_bytes_of_a_tpu(tmp_path):
    (device, *_) = parse_topology("v5e:2x2").devices()
    whole = NamedSharding(Mesh([device], "data"), P())
    array = jax.ShapeDtypeStruct((1 << 33,), jnp.float32, sharding=whole)
    lowered = jax.jit(lambda x: x + 1).lower(array)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        lowered.compile(compiler_options={"xla_dump_to": str(tmp_path)})
    with relied_on("libtpu", "error_texts.refused_bytes", "how a program is refused"):
        assert error_texts.refused_bytes(caught.value) == 64 << 30, caught.value
        assert error_texts.is_out_of_memory(caught.value)
    with relied_on("libtpu", "program.REFUSED_PROGRAM", "the reports of a refused program"):
        assert len(list(tmp_path.glob(REFUSED_PROGRAM))) == 1
        assert read_memory_report(tmp_path).spaces["default"] == 64 << 30


def test_recorded_refusals():
    cases = [
        (
            "RESOURCE_EXHAUSTED: ... in memory space hbm. Used 23.54G of 15.75G hbm. Exceeded",
            int(23.54 * 2**30),
        ),
        (
            "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 327680,"
            " available: 232448",
            None,
        ),
        ("INTERNAL: no", None),
    ]
    with collected() as case:
        for text, expected in cases:
            with case(text):
                assert error_texts.refused_bytes(RuntimeError(text)) == expected


def test_recorded_exhaustions_while_a_program_runs():
    cases = [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 34359738496 bytes.", 2**35),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.00GiB.", 2**31),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 34359738496 bytes.", 2**35),
        ("RESOURCE_EXHAUSTED: Attempting to allocate 2.00G. That was not possible.", 2**31),
        ("RESOURCE_EXHAUSTED: Attempting to reserve 2.00G at the bottom of memory.", 2**31),
        ("RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB (2147483648B)", 2**31),
    ]
    with collected() as case:
        for text, expected in cases:
            with case(text):
                error = RuntimeError(text)
                assert error_texts.is_out_of_memory(error)
                assert abs(error_texts.requested_bytes(error) - expected) < 200
    others = (
        "INTERNAL: no",
        "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 3",
        # of file servers and gRPC, as a save meets them: a restart may help
        "RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Write requests' [http='429']",
        "RESOURCE_EXHAUSTED: Received message larger than max (5368709 vs. 4194304)",
    )
    for text in others:
        assert not error_texts.is_out_of_memory(RuntimeError(text))
    text = "RESOURCE_EXHAUSTED: Failed to allocate ... of memory"
    assert error_texts.requested_bytes(RuntimeError(text)) is None
    assert error_texts.requested_bytes(RuntimeError("RESOURCE_EXHAUSTED: no")) is None


@pytest.mark.needs_plugin
def test_no_tiles_is_a_text_of_the_gpu_compiler():
    """That a program has no tile sizes depends on its fusions: the text is looked for as it is."""
    assert error_texts.NO_TILES.found_in(
        RuntimeError("Couldn't find output tile sizes that satisfy")
    )
    with relied_on("jax-cuda13-plugin", "error_texts.NO_TILES", "the text of this error"):
        assert in_gpu_compiler("find output tile sizes")
