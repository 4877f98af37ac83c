"""Muon on whole matrices: optax's numbers, and nothing sent by its iterations.

Steps are compiled to train, and where a contract is a verdict on what XLA sends; what a step
declares is read from its trace.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers as Dims
from reference import CASES, check, gpt, on_eight, train, train_unsharded
from refusals import refused

import fsdp_jax as fsdp
from fsdp_jax import optim
from fsdp_jax.contract import check_contract
from fsdp_jax.contract.expected import expected_traffic
from fsdp_jax.models import next_token_loss
from fsdp_jax.models.gpt import Block
from fsdp_jax.planner import fake_devices, parse_topology
from fsdp_jax.tree import flatten

SHAPES = {
    "blocks": {"a": {"kernel": (3, 16, 32)}, "b": {"kernel": (3, 32, 16), "bias": (3, 16)}},
    "embed": {"embedding": (10, 16)},
    "query": {"kernel": (16, 2, 8)},
    "out": {"kernel": (2, 8, 16)},
}


def given_dims(_):
    """Of SHAPES, as a user writes them."""
    return {
        "blocks": {"a": {"kernel": Dims(1, 2)}, "b": {"kernel": Dims(-2, -1), "bias": None}},
        "embed": None,
        "query": {"kernel": Dims(0, (1, 2))},
        "out": {"kernel": Dims((0, 1), 2)},
    }


def some_params(seed):
    paths = flatten(SHAPES, is_leaf=lambda leaf: isinstance(leaf, tuple))
    random = np.random.default_rng(seed)
    arrays = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in paths.values()]
    structure = jax.tree.structure(SHAPES, is_leaf=lambda leaf: isinstance(leaf, tuple))
    return jax.tree.unflatten(structure, arrays)


@pytest.mark.parametrize(
    ("dims", "settings"),
    [(None, {}), (given_dims, {"consistent_rms": 0.2, "weight_decay": 0.1, "nesterov": False})],
    ids=["default", "given"],
)
def test_the_numbers_and_the_state_are_those_of_optax(settings, dims):
    ours = optim.muon(0.1, muon_weight_dimension_numbers=dims, **settings)
    theirs = optax.contrib.muon(0.1, muon_weight_dimension_numbers=given_dims, **settings)
    params = some_params(0)
    states = [ours.init(params), theirs.init(params)]
    for step in range(3):
        gradients = some_params(step + 1)
        updates, states = zip(
            *(
                tx.update(gradients, state, params)
                for tx, state in zip((ours, theirs), states, strict=True)
            ),
            strict=True,
        )
        jax.tree.map(np.testing.assert_array_equal, *updates)
        assert float(optax.tree.norm(updates[0])) > 0.1
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    jax.tree.map(np.testing.assert_array_equal, *states)


LOCAL = {"local_batch": True}
ON_HOST = {"offload": fsdp.Offload(optimizer=True)}


def muon():
    return optim.muon(0.01, eps=1e-6)


def optax_muon():
    return optax.contrib.muon(0.01, eps=1e-6, muon_weight_dimension_numbers=optim.hidden_matrices)


@pytest.mark.parametrize(
    ("case", "strategy", "settings"),
    [
        ("nnx-gpt-scanned", "full_shard", {}),
        pytest.param("nnx-gpt-unrolled", "hybrid_shard", LOCAL, marks=pytest.mark.long),
        pytest.param("linen-transformer", "zero1", {"accumulation": 2}, marks=pytest.mark.long),
        pytest.param("nnx-gpt-scanned", "hybrid_shard_optimizer", LOCAL, marks=pytest.mark.long),
        pytest.param(
            "nnx-gpt-scanned",
            "full_shard",
            ON_HOST,
            marks=[pytest.mark.long, pytest.mark.filterwarnings("ignore:optim.muon")],
        ),
    ],
)
def test_training_equals_an_unsharded_run_with_optax(case, strategy, settings):
    replica = 2 if strategy.startswith("hybrid") else 1
    mesh = fsdp.make_mesh(data=8 // replica, replica=replica)
    found, step = train(CASES[case], mesh, strategy, steps=5, make_optimizer=muon, **settings)
    accumulation = settings.get("accumulation", 1)
    wanted = train_unsharded(CASES[case], accumulation, None, 5, optax_muon)
    check(found, wanted, params=2e-4)
    sent = {each["op"] for each in collectives(step, CASES[case].batch(0))}
    assert ("all-to-all" in sent) == (settings != ON_HOST)


def test_state_in_host_memory_is_not_spread_and_warned_of():
    case = CASES["nnx-gpt-scanned"]
    shapes = jax.eval_shape(lambda: case.batch(0))

    def lower(make_optimizer):
        sharded = on_eight(case.model, make_optimizer(), **ON_HOST)
        sharded.make_eval_step(case.loss).lower(shapes)
        sharded.make_train_step(case.loss).lower(shapes)

    with pytest.warns(
        fsdp.SlowerWarning, match=r"muon: \d+ matrices .* each .* leave offload\.opt"
    ) as told:
        lower(muon)
    assert len(told) == 1  # of the step that trains
    lower(optax_muon)  # which never spreads them


def collectives(step, batch):
    return check_contract(step, jax.eval_shape(lambda: batch)).rows()


def step_on(devices, tx, *, strategy="full_shard", rules=(), scan=True, replica=1, layers=3):
    """(step, batch) of a small GPT."""
    replica = 2 if strategy.startswith("hybrid") else replica
    model = gpt(scan, vocab_size=384, sequence_length=64, width=128, layers=layers)
    mesh = fsdp.make_mesh(-1, replica, devices=devices)
    sharded = fsdp.fully_shard(
        model, tx, mesh, strategy, [Block], min_size=64, rules=rules,
        precision=fsdp.Precision(compute="bfloat16"),
    )  # fmt: skip
    step = sharded.make_train_step(next_token_loss, local_batch=True)
    return step, {"tokens": jax.ShapeDtypeStruct((mesh.size, 65), jnp.int32)}


def contract_of(topology, tx, **settings):
    return check_contract(*step_on(parse_topology(topology).devices(), tx, **settings))


def declared(tx, topology="cpu:8", **settings):
    """{matrices: bytes} that a step declares to send by all-to-alls, whatever XLA makes of it."""
    step, batch = step_on(fake_devices(parse_topology(topology)), tx, **settings)
    step.trace(batch)
    return all_to_alls(expected_traffic(step.plan))


def all_to_alls(expected):
    return {each.path: each.bytes for each in expected if each.op == "all-to-all"}


@pytest.mark.parametrize(
    ("topology", "strategy", "scan"),
    [
        ("cpu:8", "full_shard", True),
        pytest.param(
            "h100:8", "hybrid_shard", True, marks=[pytest.mark.needs_plugin, pytest.mark.long]
        ),
        pytest.param("h100:8", "hybrid_shard_optimizer", True, marks=[pytest.mark.needs_plugin]),
    ],
)
def test_matrices_are_sent_once_and_back(topology, strategy, scan):
    contract = contract_of(topology, optim.muon(1e-3), strategy=strategy, scan=scan)
    assert contract.holds, contract
    found = [row for row in contract.rows() if row["op"] == "all-to-all"]
    # 3 layers on n devices: n matrices, of zeros but for three, of which a device has one.
    n = 4 if strategy == "hybrid_shard" else 8
    sizes = {
        "128x384": 128 * 384,
        "128x128": 128 * 128,
        "128x512": 4 * 128**2,
        "512x128": 4 * 128**2,
    }
    expected = all_to_alls(contract.expected)
    assert expected == {
        f"3 matrices {name}": 2 * 4 * size * (n - 1) // n for name, size in sizes.items()
    }
    assert sum(row["bytes"] for row in found) == sum(expected.values())
    assert str(contract.by_parameter()).count("3 matrices") == len(sizes)


@pytest.mark.long
@pytest.mark.needs_plugin
def test_the_sum_is_sent_and_not_what_it_is_the_sum_of():
    """With as many matrices as devices nothing pads them: XLA sent momentum and gradient."""
    contract = contract_of("h100:8", optim.muon(1e-3), layers=8)
    assert contract.holds, contract
    found = sum(row["bytes"] for row in contract.rows() if row["op"] == "all-to-all")
    assert found == sum(all_to_alls(contract.expected).values())


def test_an_update_that_is_traced_twice_is_declared_once():
    tx = optim.muon(1e-3)
    once = declared(tx)
    assert declared(optax.MultiSteps(tx, 2).gradient_transformation()) == once
    cached = optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))
    assert [declared(cached) for _ in range(2)] == [once, once]


UNEVEN = {"rules": [("mlp/up/kernel", (None, None, "data"))], "replica": 2}


def test_a_matrix_is_spread_over_the_axes_of_its_shards():
    step, batch = step_on(fake_devices(parse_topology("cpu:8")), optim.muon(1e-3), **UNEVEN)
    step.trace(batch)
    rows = expected_traffic(step.plan)
    axes = {each.path: each.axis for each in rows if each.op == "all-to-all"}
    assert axes["3 matrices 128x512"] == "data"
    assert axes["3 matrices 512x128"] == "replica+data"


@pytest.mark.long
def test_matrices_of_several_axes_are_sent_as_declared():
    contract = contract_of("cpu:8", optim.muon(1e-3), **UNEVEN)
    assert contract.holds, contract


def test_hidden_matrices_go_by_names_of_modules():
    hidden = (
        "MultiHeadDotProductAttention_0/query",
        "mlp/up",
        "token_mixing/Dense_0",
        "encoder/out",
    )
    others = ("lm_head", "Embed_0", "token_embedding/project", "decoder", "head/Dense_0")
    params = {}
    for path in (*hidden, *others):
        params[path] = {"kernel": jnp.zeros((4, 4)), "bias": jnp.zeros(4)}
    numbers = optim.hidden_matrices(params)
    assert {path for path, each in numbers.items() if each["kernel"] is not None} == {*hidden}
    assert all(each["bias"] is None for each in numbers.values())


def test_half_the_bytes_in_bfloat16():
    whole = declared(optim.muon(1e-3))
    half = declared(optim.muon(1e-3, dtype=jnp.bfloat16), "h100:8")  # XLA:CPU widens bfloat16
    assert 2 * sum(half.values()) == sum(whole.values()) > 0


def test_matrices_whose_dims_do_not_divide_stay_where_they_are():
    paths = declared(optim.muon(1e-3), rules=[("mlp/up/kernel", (None, None, None))])
    assert "3 matrices 128x512" not in paths
    assert len(paths) == 3


def test_dims_that_are_no_matrix_are_refused():
    params = some_params(0)
    with refused(where="muon_weight_dimension_numbers", got="2"):
        optim.muon(0.1, muon_weight_dimension_numbers=lambda _: 2).init(params)
    with refused(where="muon_weight_dimension_numbers", got="w"):
        optim.muon(0.1).init({"w": jnp.zeros((4, 4))})
    both = lambda tree: jax.tree.map(lambda _: Dims(0, 0), tree)  # noqa: E731
    tx = optim.muon(0.1, muon_weight_dimension_numbers=both)
    with refused(where="muon_weight_dimension_numbers", got="for shape"):
        tx.update(params, tx.init(params), params)
