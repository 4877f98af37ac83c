"""The contract: it holds for the library's steps on CPUs, GPUs and a torus; faults are named.

Steps are compiled, since a contract is a verdict on what XLA makes of them. Those for GPUs and TPUs
need their compilers; `test_stored_steps.py` judges stored programs without any.
"""

import functools
import gzip
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from bars import bars_have_every_byte
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from reference import LinenTransformer, gpt, linen_loss, on_eight
from stored_steps import Net, net_step, pinned

import fsdp_jax as fsdp
from fsdp_jax.contract.contract import check_contract, check_program
from fsdp_jax.contract.expected import ExpectedTraffic
from fsdp_jax.contract.violations import traffic_violations, undeclared_axis_violations
from fsdp_jax.hlo.collectives import Collective
from fsdp_jax.models import llama, next_token_loss
from fsdp_jax.models.gpt import Block
from fsdp_jax.sharding.precision import GATHER_FORMATS
from fsdp_jax.testing import mesh_of

PROGRAMS = Path(__file__).parent.parent / "hlo" / "programs"
SIZES = {"vocab_size": 384, "sequence_length": 64}


def model_of(name, width, layers):
    """(model, units, inputs, loss, columns of a batch)"""
    if name == "linen":
        inputs = {"inputs": (jax.ShapeDtypeStruct((1, 8), jnp.int32),)}
        return LinenTransformer(), ["LinenBlock"], inputs, linen_loss, 9
    if name == "llama":
        config = llama.preset(
            "llama-tiny", **SIZES, layers=layers, width=width, heads=2, kv_heads=1, hidden=3 * width
        )
        return (
            lambda rngs: llama.Llama(config, rngs=rngs),
            [llama.LlamaBlock],
            {},
            next_token_loss,
            65,
        )
    return gpt(name == "gpt", **SIZES, layers=layers, width=width), [Block], {}, next_token_loss, 65


def checked(
    name,
    topology,
    *,
    replica=1,
    reduce=None,
    accumulation=1,
    deferred=False,
    local_batch=True,
    loss=None,
    width=64,
    layers=2,
    float8=None,
    tx=None,
    **kw,
):
    """The contract of one of the models."""
    model, units, inputs, its_loss, columns = model_of(name, width, layers)
    mesh = mesh_of(topology, replica=replica)
    precision = fsdp.Precision(compute="bfloat16", reduce=reduce, **float8 or {})
    settings = {"min_size": 64, "precision": precision} | inputs | kw
    tx = tx or optax.adamw(1e-3)
    sharded = fsdp.fully_shard(model, tx, mesh, units=units, **settings)
    step = sharded.make_train_step(
        loss or its_loss,
        accumulation=accumulation,
        deferred_reduction=deferred,
        local_batch=local_batch,
    )
    return check_contract(
        step, {"tokens": jax.ShapeDtypeStruct((mesh.size * accumulation, columns), jnp.int32)}
    )


# Every strategy, model, accumulation, prefetch mode, remat and reduce dtype, about pairwise.
HOLD = [
    ("gpt-unrolled", {"prefetch": "pre"}),
    ("linen", {"prefetch": "post"}),
    ("gpt", {"strategy": "no_shard", "accumulation": 2}),
    ("llama", {"strategy": "zero1", "accumulation": 2, "reduce": "float32"}),
    ("gpt", {"strategy": "shard_grad_op", "accumulation": 2, "deferred": True, "remat": "full"}),
    ("llama", {"strategy": "hybrid_shard", "replica": 2, "accumulation": 2, "reduce": "float32"}),
    ("gpt", {"prefetch": "pre", "remat": "full", "accumulation": 2, "deferred": True}),
    ("llama", {"prefetch": "pre", "float8": {"gather": "float8_e4m3fn"}}),
    ("gpt", {"strategy": "hybrid_shard_optimizer", "replica": 2, "accumulation": 2}),
    (
        "gpt",
        {
            "strategy": "hybrid_shard",
            "replica": 2,
            "prefetch": "pre",
            "float8": {"scatter": "int8"},
        },
    ),
    *(
        ("llama", {"prefetch": "pre", "float8": {"gather": name}})
        for name in GATHER_FORMATS
        if name != "float8_e4m3fn"
    ),
]
IDS = ["-".join([name, *map(str, settings.values())]) for name, settings in HOLD]
# In `make test`: each framework, unrolled layers, reductions in two stages and deferred, updates
# gathered along the replicas. Stored programs have the rest (`test_stored_steps.py`).
ON_CPUS = (0, 1, 4, 5, 8, 9)
# Of the others a stored program, or another case, shows what GPUs do.
ON_GPUS = (0, 1, 3, 4, 5, 8, 9)


def held(number):
    marks = [pytest.mark.long] * (number not in ON_CPUS)
    return pytest.param(*HOLD[number], marks=marks, id=IDS[number])


@pytest.mark.releases
@pytest.mark.parametrize(("name", "settings"), [held(n) for n in range(len(HOLD))])
def test_the_contract_holds_on_virtual_devices(name, settings):
    contract = checked(name, "cpu:8", **settings)
    assert str(contract).count("the contract holds") == 1
    # Whether bytes are hidden is not known of a program for CPUs.
    axes = {row["axis"] for row in contract.rows()}
    assert {kind.name for kind in bars_have_every_byte(contract).used_kinds} == {
        f"along {axis}" for axis in axes
    }


@pytest.mark.needs_plugin
@pytest.mark.parametrize(("name", "settings"), [held(n) for n in ON_GPUS])
def test_the_contract_holds_on_gpus(name, settings):
    contract = checked(name, "h100:8", **settings)
    assert contract.holds, contract
    assert contract.wire_bytes <= 1.02 * contract.wire_bytes_limit
    bars_have_every_byte(contract)


@pytest.mark.needs_plugin
@pytest.mark.parametrize(
    ("name", "strategy"), [("linen", "hybrid_shard"), ("llama", "hybrid_shard_optimizer")]
)
def test_the_contract_holds_on_gpus_by_annotations(name, strategy):
    contract = checked(name, "h100:8", local_batch=False, strategy=strategy, replica=2, width=128)
    assert contract.holds, contract
    assert contract.wire_bytes <= 1.02 * contract.wire_bytes_limit


def towards(model, batch, teacher):
    wanted = jax.nn.softmax(teacher(batch["tokens"][:, :-1]))
    losses = -(wanted * jax.nn.log_softmax(model(batch["tokens"][:, :-1]))).sum(-1)
    return losses.sum(), losses.size


def through(model, batch, teacher):
    out = teacher(jax.nn.softmax(model(batch["tokens"][:, :-1])))
    return out.sum(), out.size


class Layer(nnx.Module):
    def __init__(self, rngs, width=192):
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Critic(nnx.Module):
    """A model of distributions over tokens."""

    def __init__(self, rngs, width=192):
        self.enter = nnx.Linear(SIZES["vocab_size"], width, rngs=rngs)
        self.layers = nnx.List([Layer(rngs, width) for _ in range(2)])

    def __call__(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.needs_plugin
@pytest.mark.parametrize(
    ("loss", "settings"), [(towards, {"accumulation": 2}), (through, {"local_batch": True})]
)
def test_the_contract_with_another_model_holds_on_gpus(loss, settings):
    mesh, precision = mesh_of("h100:8"), fsdp.Precision(compute="bfloat16")
    shard = functools.partial(fsdp.fully_shard, mesh=mesh, precision=precision)
    student = shard(gpt(True, **SIZES, layers=2, width=128), optax.sgd(0.1), units=[Block])
    make, units = gpt(True, **SIZES, layers=3, width=192), [Block]
    if loss is through:
        make, units = (lambda rngs: Critic(rngs)), [Layer]
    teacher = shard(make, optax.identity(), units=units)
    step = student.make_train_step(loss, others={"teacher": teacher}, **settings)
    contract = check_contract(step, {"tokens": jax.ShapeDtypeStruct((256, 65), jnp.int32)})
    assert contract.holds, contract
    assert contract.wire_bytes <= 1.02 * contract.wire_bytes_limit
    # Two microbatches gather in forward; through the critic, units gather in backward too.
    sharded = {p: x for p, x in teacher.layout.by_path.items() if any(x.spec)}
    times = {path: 2 if loss is towards or teacher.units[path] else 1 for path in sharded}
    sent = sum(times[path] * leaf.bytes // 2 * 7 // 8 for path, leaf in sharded.items())
    declared = [row.bytes for row in contract.expected if row.path.startswith("teacher/")]
    assert sum(declared) == sent
    bars_have_every_byte(contract)


def test_a_computation_that_is_not_followed_breaks_the_contract():
    """A stored program of a TPU; its calls of SparseCores get a name that is invented here."""
    text = gzip.decompress((PROGRAMS / "v6e_sparse_core.txt.gz").read_bytes()).decode()
    renamed = text.replace(" call-start(", " offload-begin(").replace("call-done(", "offload-end(")
    sharded = on_eight(gpt(True), units=[Block])
    plan = sharded.make_train_step(next_token_loss).plan
    # The program is not of this step: apart from that, one is judged and the other is not.
    known, unknown = (replace(check_program(plan, each), violations=()) for each in (text, renamed))
    assert known.holds
    assert not unknown.holds
    assert "not judged: what offload-begin 'reduce-scatter." in str(unknown)


def test_a_program_that_gathers_wider_than_float8_is_a_violation():
    def step(**float8):
        settings = {"precision": fsdp.Precision(**float8), "units": [Block], "min_size": 64}
        model = gpt(True, **SIZES, layers=2, width=64)
        mesh = fsdp.make_mesh(data=8)
        sharded = fsdp.fully_shard(model, optax.sgd(0.1), mesh, **settings)
        return sharded.make_train_step(next_token_loss)

    batch = {"tokens": jax.ShapeDtypeStruct((8, 65), jnp.int32)}
    text = step().compile(batch).as_text()
    contract = check_program(step(gather="float8_e4m3fn").plan, text)
    what = "gathered in float32, declared float16"  # as XLA:CPU sends float8
    assert {v.path for v in contract.violations if v.what == what} == {
        f"blocks/{path}/kernel" for path in ("attn/qkv", "attn/out", "mlp/up", "mlp/down")
    }


ENDS, UNIT = 32 * 64 + 256 * 16, 64 * 256  # elements
ALL = ENDS + UNIT
RING8, RING4 = 4 * 7 / 8, 4 * 3 / 4  # bytes of float32 that a device sends per element of an array
ARITHMETIC = {
    "no_shard": {"all-reduce": 2 * 2 * ALL * RING8},
    "zero1": {"all-gather": ALL * RING8, "reduce-scatter": 2 * ALL * RING8},
    "shard_grad_op": {"all-gather": ALL * RING8, "reduce-scatter": 2 * ALL * RING8},
    "full_shard": {"all-gather": 2 * (ENDS + 2 * UNIT) * RING8, "reduce-scatter": 2 * ALL * RING8},
    "hybrid_shard": {
        "all-gather": 2 * (ENDS + 2 * UNIT) * RING4,
        "reduce-scatter": 2 * ALL * RING4,
        "all-reduce": 2 * 2 * ALL / 4 * 4 * 1 / 2,
    },
    "hybrid_shard_zero2": {
        "all-gather": ALL * RING4,
        "reduce-scatter": 2 * ALL * RING4,
        "all-reduce": 2 * 2 * ALL / 4 * 4 * 1 / 2,
    },
    # As hybrid_shard, and the updated parameters are gathered along `replica`, once per step.
    "hybrid_shard_optimizer": {
        ("all-gather", "data"): 2 * (ENDS + 2 * UNIT) * RING4,
        ("reduce-scatter", "data"): 2 * ALL * RING4,
        ("all-reduce", "replica"): 2 * 2 * ALL / 4 * 4 * 1 / 2,
        ("all-gather", "replica"): ALL / 4 * 4 * 1 / 2,
    },
}


BATCH = {"x": jax.ShapeDtypeStruct((16, 32), jnp.float32)}


@pytest.mark.parametrize("strategy", fsdp.STRATEGIES)
def test_the_declared_traffic_is_the_strategys_arithmetic(strategy):
    mesh = fsdp.make_mesh(replica=2 if fsdp.STRATEGIES[strategy].hybrid else 1)
    contract = check_contract(net_step(mesh, strategy=strategy, accumulation=2), BATCH)
    assert contract.holds, contract
    said = json.loads(json.dumps(contract.to_json()))
    assert set(said) == {"collectives", "contract", "wire_bytes", "wire_bytes_limit"}
    assert set(said["contract"]) == {"holds", "expected", "found", "violations", "choices"}
    row = {"op", "dtype", "axis", "count", "bytes", "overlapped_bytes", "where"}
    assert all(set(each) == row for each in said["collectives"])
    expected = said["contract"]["expected"]
    by_op = {each["op"]: each["bytes"] for each in expected}
    by_axis = {(each["op"], each["axis"]): each["bytes"] for each in expected}
    assert ARITHMETIC[strategy] in (by_op, by_axis)
    assert len(expected) == len(ARITHMETIC[strategy])
    assert said["wire_bytes_limit"] == sum(ARITHMETIC[strategy].values())
    assert {each["dtype"] for each in expected} == {"float32"}
    axes = {each["op"]: each["axis"] for each in expected}
    if not fsdp.STRATEGIES[strategy].updates_over_replicas:
        assert axes["all-reduce" if "all-reduce" in axes else "all-gather"] == (
            "replica" if fsdp.STRATEGIES[strategy].hybrid else "data"
        )


# Faults, each named


def one_line(contract, start):
    [line] = [line for line in map(str, contract.violations) if line.startswith(start)]
    return line


@pytest.mark.needs_plugin
@pytest.mark.filterwarnings("ignore:compute=:fsdp_jax.SlowerWarning")
def test_local_batches_reduce_a_float32_module_in_bfloat16():
    contract = check_contract(*pinned(mesh_of("h100:8"), jnp.float32, local_batch=True))
    assert contract.holds, contract


def contrastive(model, batch):
    y = model(batch["x"])
    with jax.named_scope("pairs"):
        return jax.nn.logsumexp(y @ y.T, axis=1).sum(), y.shape[0]


def test_a_loss_that_mixes_the_examples_sends_activations():
    contract = check_contract(
        net_step(fsdp.make_mesh(), loss=contrastive, local_batch=False),
        {"x": jax.ShapeDtypeStruct((512, 32), "f4")},
    )
    line = next(str(violation) for violation in contract.violations if not violation.path)
    assert "an activation is sent, float32[" in line
    assert "pairs" in line
    assert "mixes the examples of a batch" in line


def advised_rules(line):
    """The rules that a violation gives to the user, as they are written in it."""
    return eval(line.partition("rules=")[2])


def annotated_middle(rngs):
    """`Net` with names for the dims of its unit's kernel."""
    model = Net(rngs)
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
    model.middle.linear = nnx.Linear(64, 256, use_bias=False, kernel_init=init, rngs=rngs)
    return model


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"rules": [("middle/linear", PartitionSpec())]}, "by rule 'middle/linear'"),
        (
            {"model": annotated_middle, "logical_axes": {"embed": None, "mlp": None}},
            "by logical axes ('embed', 'mlp')",
        ),
        ({"min_size": 2**20}, "16384 elements, below min_size 1048576"),
    ],
)
def test_a_large_replicated_parameter_names_the_rule_that_shards_it(settings, why):
    contract = check_contract(net_step(fsdp.make_mesh(), **settings), BATCH)
    line = one_line(contract, "middle/linear/kernel")
    assert f"replicated on every device, {why}; its gradient is all-reduced" in line
    rules = advised_rules(line)
    assert rules == [("^middle/linear/kernel$", (None, "data"))]
    mended = settings | {"rules": rules + settings.get("rules", [])[1:]}
    after = check_contract(net_step(fsdp.make_mesh(), **mended), BATCH)
    assert not [each for each in after.violations if "replicated" in each.what]


def test_an_array_that_xla_replicates_is_a_violation(capfd):
    mesh = fsdp.make_mesh(replica=2)

    def loss(model, batch):
        y = model(batch["x"]).reshape(8, 16, 32)
        with jax.named_scope("elsewhere"):
            y = jax.lax.with_sharding_constraint(
                y, NamedSharding(mesh, PartitionSpec(None, "replica", "data"))
            )
            y = jax.lax.with_sharding_constraint(
                y, NamedSharding(mesh, PartitionSpec(("replica", "data")))
            )
        return jnp.sum(y**2), batch["x"].shape[0]

    contract = check_contract(
        net_step(mesh, loss=loss, local_batch=False),
        {"x": jax.ShapeDtypeStruct((256, 32), jnp.float32)},
    )
    assert "Involuntary full rematerialization" in capfd.readouterr().err
    assert any(
        "elsewhere" in each.path and "is replicated" in each.what for each in contract.violations
    ), contract


# Attribution of collectives written here


def declared(path, role, op, size, *shapes, dtype="bfloat16", axis="data"):
    return ExpectedTraffic(path, role, op, dtype, axis, size, 1, shapes)


def sent(op, size, shapes, paths, dtype="bfloat16", *, axis="data", sliced=False):
    return Collective(op, dtype, axis, 1, size, True, sliced, 0, tuple(shapes), tuple(paths), 0, op)


def judged(expected, collectives, paths):
    return traffic_violations(expected, collectives, paths, annotated=False)[0]


def judged_annotated(expected, *collectives):
    return traffic_violations(expected, collectives, {"a", "b", "c"}, annotated=True)


def violations(expected, *collectives):
    return [str(each) for each in judged(expected, collectives, {each.path for each in expected})]


BIG, SMALL = (64, 256), (64,)
PAIR = [
    declared("a", "reduce", "reduce-scatter", 28672, BIG),
    declared("b", "reduce", "reduce-scatter", 112, SMALL),
    declared("c", "reduce", "reduce-scatter", 224, SMALL, dtype="float32"),
]


def test_a_nameless_collective_is_attributed_by_shape_and_dtype():
    together = sent("reduce-scatter", 28784, [(256, 64), SMALL], ["", ""])
    assert violations(PAIR, together, sent("reduce-scatter", 224, [SMALL], ["b"], "float32")) == []


def test_small_arrays_that_are_sent_as_one_are_shared_out():
    expected = [declared(path, "reduce", "all-reduce", 8000, BIG) for path in "abc"]
    assert violations(expected, sent("all-reduce", 24000, [(1000,)], ["b+a"])) == []
    two_microbatches = sent("all-reduce", 12000, [(1000,)], ["b"])
    assert violations(expected, two_microbatches) == []
    [line] = violations(expected, sent("all-reduce", 48000, [(1000,)], ["b"]))
    assert line.startswith(
        "no parameter: an activation is sent, bfloat16[1000] by all-reduce (b): +23.4 KiB"
    )


def test_a_joined_collective_goes_to_the_parameters_it_names():
    """Also where another array has as many elements: the parts reduced across `replica`."""
    expected = [
        part
        for path, size in (("qkv", 3), ("out", 1), ("up", 4), ("down", 4))
        for part in (
            declared(path, "reduce", "reduce-scatter", 3000 * size, (size, 64, 256)),
            declared(path, "reduce", "all-reduce", 1000 * size, (size * 16, 256)),
        )
    ]
    shapes = [(3, 64, 256), (1, 64, 256), (4, 64, 256), (4, 64, 256)]
    scattered = sent("reduce-scatter", 36000, shapes, ["qkv", "out", "up", "down"])
    as_qkv = [(3 * 64 * 256,)]  # as many elements as qkv
    joined = sent("all-reduce", 12000, as_qkv, ["qkv+out+up+down"])
    assert violations(expected, scattered, joined) == []
    assert violations(expected, scattered, joined, joined) != []
    expected.append(declared("norm", "reduce", "all-reduce", 200, (100,)))  # not named
    with_norm = sent("all-reduce", 12200, [(50_000,)], joined.paths)
    assert violations(expected, scattered, with_norm) == []


@pytest.mark.parametrize("name", ["w", "2 matrices+w", "select_n"])
def test_an_update_along_another_axis_is_not_taken_for_a_gather(name):
    """Also where fewer gathers are sent than declared: XLA makes one of two in a row."""
    expected = [
        declared("w", "gather", "all-gather", 48_000, BIG),
        declared("w", "update", "all-gather", 8000, (16, 256), dtype="float32", axis="replica"),
        declared("2 matrices", "update", "all-to-all", 64_000, (1, *BIG), dtype="float32"),
    ]
    matrices = sent("all-to-all", 64_000, [(8, 1, 64, 32)], ["2 matrices"], "float32")
    update = sent("all-gather", 8000, [(16, 256)], [name], "float32", axis="replica")
    gather = sent("all-gather", 24_000, [BIG], ["w"])
    assert violations(expected, matrices, gather, update) == []
    wide = sent("all-gather", 48_000, [BIG], [name], "float32")
    for others in ((), (update,), (gather,), (update, gather)):
        found = violations(expected, matrices, *others, wide)
        assert found[0].startswith("w: gathered in float32, declared bfloat16: +23.4 KiB"), others
    [line] = violations(expected, matrices, gather, gather, update, wide)
    assert "in float32" in line or "one more array of its shape is sent, float32" in line


def test_a_wide_array_of_either_of_two_parameters_is_a_violation():
    expected = [
        declared("a", "gather", "all-gather", 48_000, BIG),
        declared("b", "gather", "all-gather", 96_000, BIG, dtype="float32"),
    ]
    half = sent("all-gather", 24_000, [BIG], ["a"])
    once, unknown = (sent("all-gather", 48_000, [BIG], [name], "float32") for name in ("b", ""))
    assert violations(expected, half, once) == []
    assert violations(expected, half, half, once, unknown) == []
    [line] = violations(expected, half, once, unknown)
    assert line.startswith("a: gathered in float32, declared bfloat16: +23.4 KiB per step; ")


def test_a_wide_array_is_not_taken_for_a_parameter_of_another_shape():
    expected = [
        declared("a", "gather", "all-gather", 48_000, BIG),
        declared("b", "gather", "all-gather", 96_000, (32, 1024), dtype="float32"),
    ]
    of_b = sent("all-gather", 96_000, [(32, 1024)], [""], "float32")
    assert violations(expected, of_b) == violations(expected[:1])


def test_a_matrix_without_a_name_is_not_shared_out_as_small_arrays_are():
    expected = [declared("a", "gather", "all-gather", 28_672, BIG)]
    found = violations(expected, sent("all-gather", 28_672, [(100, 143)], [""]))
    assert any(line.startswith("no parameter: an activation is sent") for line in found), found


def test_scalars_joined_to_small_arrays_are_not_activations():
    expected = [declared("norm", "reduce", "all-reduce", 40_000, (10_000,), dtype="float32")]
    two_more = sent("all-reduce", 40_014, [(10_002,)], ["reduce_sum"], "float32")
    many_more = sent("all-reduce", 42_000, [(10_500,)], ["reduce_sum"], "float32")
    assert violations(expected, two_more) == []
    assert violations(expected, many_more) != []


def test_a_stack_may_be_sent_layer_by_layer_or_at_once():
    expected = [declared("a", "gather", "all-gather", 1000, BIG, (2, *BIG))]
    assert violations(expected, sent("all-gather", 1000, [(2, 256, 64)], [""])) == []
    assert violations(expected, *[sent("all-gather", 500, [(1, *BIG)], [""])] * 2) == []
    [line] = violations(expected, *[sent("all-gather", 500, [BIG], ["a"])] * 3)
    assert line.startswith("a: gathered more often than declared: +500 B per step; ")


def test_a_tied_table_reduced_twice_is_named():
    once = sent("reduce-scatter", 28672, [BIG], ["dot_general"])
    [line] = violations(PAIR[:1], once, sent("reduce-scatter", 28672, [BIG], ["scatter-add"]))
    assert line.startswith(
        "a: one more array of its shape is sent, bfloat16[64, 256] by reduce-scatter ("
    )
    assert "a tied head" in line


def test_an_all_reduce_for_a_reduce_scatter_is_a_violation():
    [line] = violations(PAIR[:1], sent("all-reduce", 57344, [BIG], [""]))
    assert line.startswith(
        "a: reduced by an all-reduce, declared a reduce-scatter: +28 KiB per step; "
    )


def test_many_small_excesses_are_one_violation():
    expected = [declared(str(i), "gather", "all-gather", 1000, BIG) for i in range(1000)]
    found = [sent("all-gather", 1030, [BIG], [str(i)]) for i in range(1000)]
    assert violations(expected, *found)[0].startswith(
        "no parameter: more is sent than declared: +29.3 KiB per step; "
    )


def test_token_ids_are_activations_and_scalars_are_not():
    loss = sent("all-reduce", 14, [(), (2,)], ["psum", "psum"], "float32")
    weights = sent("reduce-scatter", 28672, [BIG], ["a"])
    assert violations(PAIR[:1], weights, loss) == []
    [line] = violations(
        PAIR[:1], weights, loss, sent("all-gather", 3584, [(16, 64)], ["embed/take"], "int32")
    )
    assert line.startswith(
        "no parameter: an activation is sent, int32[16, 64] by all-gather (embed/take): +3.5 KiB"
    )


def test_an_all_reduce_that_is_sliced_is_offset_by_itself():
    """By annotations each is then offset by itself; equal ones are added up."""
    gradient = sent("reduce-scatter", 28672, [BIG], ["a"])
    kept, sliced = (
        sent("all-reduce", 20_000, [(8, 32, 64)], ["f"], sliced=each) for each in (False, True)
    )
    said = "no parameter: an activation is sent, bfloat16[8, 32, 64] by all-reduce (f): +"
    assert [line.split(" KiB")[0] for line in violations(PAIR[:1], gradient, kept, kept)] == [
        said + "39.1"
    ]
    found = violations(PAIR[:1], gradient, kept, sliced)
    assert [line.split(" KiB")[0] for line in found] == [said + "19.5"] * 2
    # the bytes saved on the gradient pay for one of them
    [line], choices = judged_annotated(PAIR[:1], kept, sliced)
    assert "+19.5 KiB" in str(line)
    assert "moved 19.5 KiB of activations" in choices[0]


def test_a_gather_that_is_missing_or_undeclared_is_a_violation():
    expected = [declared("a", "gather", "all-gather", 28672, BIG)]
    assert violations(expected)[0].startswith("a: never gathered; XLA computes on its shards")
    found = judged(expected, [sent("all-gather", 28672, [BIG], ["frozen"])], {"a", "frozen"})
    assert any(
        str(each).startswith("frozen: gathered, which is not declared: +28 KiB") for each in found
    )


def test_annotations_may_send_activations_for_a_gradient():
    """Bytes saved on a parameter offset activations, the smallest first; never a wrong dtype."""
    activations = sent("all-gather", 20_000, [(8, 32, 64)], ["jit(_take)/scatter-add"])
    more = sent("all-gather", 30_000, [(8, 48, 64)], ["mha/pallas_call"])
    gradient = sent("reduce-scatter", 28672, [BIG], ["a"])
    wide = sent("reduce-scatter", 57344, [BIG], [""], "float32")

    assert judged_annotated(PAIR[:1], gradient) == ([], [])
    found, choices = judged_annotated(PAIR[:1], activations)
    assert found == []
    assert choices == [
        "a: its gradient not reduced; XLA computed with its shards and moved 19.5 KiB of "
        "activations per step in place of 28 KiB"
    ]
    [line], choices = judged_annotated(PAIR[:1], activations, more)
    assert str(line).startswith(
        "no parameter: an activation is sent, bfloat16[8, 48, 64] by all-gather (mha/pallas_call)"
    )
    assert "wrap it in fsdp_jax.local_rows.on_local_rows" in str(line)
    assert "19.5 KiB of activations" in choices[0]
    [line], choices = judged_annotated(PAIR[:1], gradient, activations)
    assert "the gradient of a lookup" in str(line)
    assert choices == []
    [line], _ = judged_annotated(PAIR[:1], wide)
    assert str(line).startswith(
        "a: reduced in float32, declared bfloat16: +28 KiB per step; 'a' computes in float32"
    )


def many(op, dtype, *, declared=None, axis="data", times=1.0, count=300):
    """(expected, collectives, paths) of many parameters, none of which matters alone."""
    expected, collectives = [], []
    shape, size = (1000, 1024), 1000 * 1024
    role = "gather" if op == "all-gather" else "reduce"
    for number in range(count):
        path, (declared_op, declared_dtype) = f"l{number}/k", declared or (op, dtype)
        declared_bytes = size * jnp.dtype(declared_dtype).itemsize
        expected.append(
            ExpectedTraffic(
                path, role, declared_op, declared_dtype, "data", declared_bytes, 1, (shape,)
            )
        )
        sent = int(times * size * jnp.dtype(dtype).itemsize)
        if sent:
            collectives.append(
                Collective(op, dtype, axis, 1, sent, False, False, 0, (shape,), (path,), 0, "x")
            )
    return expected, collectives, {f"l{number}/k" for number in range(count)}


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (many("all-gather", "bfloat16"), None),
        (
            many("all-gather", "float32", declared=("all-gather", "bfloat16")),
            "gathered in float32, declared bfloat16",
        ),
        (
            many("reduce-scatter", "bfloat16", declared=("reduce-scatter", "float32")),
            "reduced in bfloat16, declared float32",
        ),
        (
            many("all-reduce", "float32", declared=("reduce-scatter", "float32"), times=2),
            "reduced by an all-reduce",
        ),
        (many("all-gather", "bfloat16", times=0), "never gathered"),
    ],
)
def test_small_differences_in_many_parameters_count_in_their_sum(case, said):
    found = [str(violation) for violation in judged(*case)]
    assert [text for text in found if said and f"299 more: {said}" in text] == found
    assert bool(found) == bool(said)


def test_traffic_along_an_undeclared_axis_is_a_violation():
    expected, collectives, _ = many("all-gather", "bfloat16", axis="replica", count=4)
    (violation,) = undeclared_axis_violations(expected, collectives)
    assert "more is sent along 'replica' than declared: +7.81 MiB per step" in str(violation)
    assert not undeclared_axis_violations(*many("all-gather", "bfloat16", count=4)[:2])
