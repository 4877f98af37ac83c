"""The examples of README and docs run as they are printed, and are as short as stated.

Their steps are compiled and run, of a model with few operations: that they train is what the pages
promise.
"""

import ast
import re
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from reference import CASES, gpt, linen_loss
from safetensors.numpy import load_file
from test_model_axes import SMALL, annotated
from test_trackers import scalars

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import CheckpointStore, export_params
from fsdp_jax.models import llama, next_token_loss
from fsdp_jax.models.gpt import Block as GPTBlock
from fsdp_jax.testing import assert_contract, certify, topology_mesh  # noqa: F401, a fixture
from fsdp_jax.weights import export_weights, from_arrays

ROOT = Path(__file__).parents[1]


class Block(nnx.Module):
    """What the examples call their model's repeated block."""

    def __init__(self, width, *, rngs):
        self.up = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return x + nnx.relu(self.up(x))


class Small(nnx.Module):
    """A model of tokens with two blocks."""

    def __init__(self, width=16, *, rngs):
        self.embed = nnx.Embed(32, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(width, 32, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_small(rngs):
    return Small(rngs=rngs)


def rows_of_tokens(number):
    """A batch of the small model, without a mask."""
    return {"tokens": CASES["nnx-gpt-scanned"].batch(number)["tokens"]}


README = (ROOT / "README.md").read_text()
PAGES = [README, *(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")))]


def blocks():
    """Returns the Python examples of README, then of the chapters in docs/."""
    python = re.compile(r"```python\n(.*?)```", re.S)
    return [block for page in PAGES for block in python.findall(page)]


def test_readme_is_short_and_its_links_lead_somewhere():
    assert len(README.splitlines()) <= 160
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
        assert [link for link in links if not (page.parent / link).exists()] == [], page


def test_the_first_example_trains(capsys):
    example, loss, *_ = blocks()
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    names = {"optax": optax, "Block": Block, "MyTransformer": Small}
    exec(loss, names)
    names["batches"] = [rows_of_tokens(i) for i in range(3)]
    exec(example, names)
    assert np.isfinite(float(names["metrics"]["loss"]))
    assert int(names["state"].step) == 3
    assert "full_shard on replica=1 x data=8" in capsys.readouterr().out


def test_the_example_of_the_first_page_trains(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.S)
    assert len(example.splitlines()) <= 10
    names = {"fsdp": fsdp, "optax": optax, "make_model": make_small, "loss_fn": linen_loss}
    exec(example, names | {"batches": [rows_of_tokens(0)]})
    assert "full_shard on replica=1 x data=8" in capsys.readouterr().out


def test_the_example_of_units_that_stay_gathered(capsys):
    (example,) = [block for block in blocks() if "keep_gathered=1" in block]
    make_model = lambda rngs: Small(128, rngs=rngs)  # noqa: E731
    names = {"fsdp_jax": fsdp, "make_model": make_model, "Block": Block, "loss_fn": linen_loss}
    exec(example, names | {"tx": optax.adam(1e-3), "mesh": fsdp.make_mesh(data=8)})
    printed = re.search(r"# \.\.\. (.*)", example).group(1)
    assert printed in capsys.readouterr().out


@pytest.mark.long
def test_the_example_of_a_quantized_base_trains():
    (example,) = [block for block in blocks() if "make_train_step" in block and "nf4" in block]
    names = {}
    exec(example, names)
    assert np.isfinite(float(names["metrics"]["loss"]))
    assert names["state"].base == "nf4:64:float32"


@pytest.mark.long
def test_the_tutorial_trains_and_resumes(tmp_path, monkeypatch, capsys):
    (script,) = [block for block in blocks() if "store.latest()" in block]
    monkeypatch.chdir(tmp_path)
    script = script.replace("SAVE_EVERY = 50", "SAVE_EVERY = 2")
    for steps in (2, 4):
        exec(script.replace("STEPS = 200", f"STEPS = {steps}"), {})
    printed = capsys.readouterr().out
    assert "resumed after step 2" in printed
    assert re.search("step 4: loss .*, saved", printed)
    assert printed.count("nats per byte") == 2


@pytest.mark.usefixtures("without_cache")
def test_the_pure_step_runs_in_a_jit_of_ones_own():
    (example,) = [block for block in blocks() if "pure_step" in block]
    mesh = fsdp.make_mesh(data=8)
    names = {
        "jax": jax,
        "partial": partial,
        "NamedSharding": NamedSharding,
        "P": PartitionSpec,
        "mesh": mesh,
        "loss_fn": linen_loss,
        "sharded": fsdp.fully_shard(make_small, optax.adamw(1e-3), mesh),
        "batches": jax.tree.map(lambda *rows: np.stack(rows), *map(rows_of_tokens, range(5))),
    }
    exec(example, names)
    assert names["metrics"]["loss"].shape == (5,)
    assert np.isfinite(np.asarray(names["metrics"]["loss"])).all()


def test_the_example_of_trackers_writes_what_the_step_measures(tmp_path, monkeypatch):
    (example,) = [block for block in blocks() if "fsdp_jax.trackers" in block]
    sharded = fsdp.fully_shard(make_small, optax.sgd(0.1), fsdp.make_mesh(data=8))
    names = {"step": sharded.make_train_step(linen_loss), "state": sharded.init(seed=0)}
    monkeypatch.chdir(tmp_path)
    exec(example, names | {"batches": [rows_of_tokens(0), rows_of_tokens(1)]})
    assert scalars(tmp_path / "output" / "mine" / "tensorboard", "loss").keys() == {1, 2}


def test_the_first_screen_says_what_it_is():
    screen = README.splitlines()[:15]
    assert any("Fully Sharded Data Parallel for JAX and Flax" in line for line in screen)
    assert any(line.startswith("make quickstart") for line in screen)
    assert any(line.startswith("make test") for line in screen)
    assert "@@" not in README


@pytest.mark.long
def test_the_certify_examples_certify_model_and_object(monkeypatch, capsys):
    function, method = [block for block in blocks() if "certify(" in block]
    few = {"strategies": ["full_shard"], "accumulation": [1]}
    monkeypatch.setattr("fsdp_jax.testing.certify", partial(certify, **few))
    names = {
        "optax": optax,
        "fsdp": fsdp,
        "mesh": fsdp.make_mesh(),
        "Block": Block,
        "make_model": make_small,
        "loss_fn": linen_loss,
        "batch": rows_of_tokens(0),
        "another": rows_of_tokens(1),
    }
    exec(function, names)
    assert capsys.readouterr().out.count("holds") == 4
    certify_object, certificates = fsdp.Sharded.certify, []

    def quickly(*args, **settings):
        certificates.append(certify_object(*args, **settings, **few))

    monkeypatch.setattr(fsdp.Sharded, "certify", quickly)
    exec(method, names)
    assert certificates[0].batches[:2] == ("the given one", "batches[0]")


def test_the_examples_of_losses_train():
    (example,) = [block for block in blocks() if "word_dropout_loss" in block]
    mesh, batches = fsdp.make_mesh(data=8), [rows_of_tokens(i) for i in range(2)]
    sharded = fsdp.fully_shard(make_small, optax.sgd(0.1), mesh, units=[Block])
    names = {"jax": jax, "jnp": jnp, "optax": optax, "sharded": sharded, "state": sharded.init(0)}
    names |= {"batch": batches[0], "batches": batches}
    exec(example, names)
    assert 0 < names["accuracy"] < 1
    assert 0 < float(names["metrics"]["dropped"]) < 0.2

    (example,) = [block for block in blocks() if "balanced_loss" in block]
    exec(example, names)
    tokens = jax.ShapeDtypeStruct((1, 8), "int32")
    sharded = fsdp.fully_shard(Balanced(), optax.sgd(0.1), mesh, inputs=(tokens,))
    step = sharded.make_train_step(names["balanced_loss"], accumulation=2)
    _, metrics = step(sharded.init(0), batches[0])
    assert float(metrics["balance"]) > 0


def test_the_example_of_a_step_that_runs_out_of_memory(capsys, monkeypatch):
    (example,) = [block for block in blocks() if "explain_memory" in block]
    sharded = fsdp.fully_shard(make_small, optax.sgd(0.1), fsdp.make_mesh(data=8), min_size=0)
    step = sharded.make_train_step(linen_loss)
    refusal = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
    names = {"jax": jax, "fsdp": fsdp, "step": step, "batch": rows_of_tokens(0)}

    def refuse(*_):
        raise refusal

    with monkeypatch.context() as patched:
        patched.setattr(type(step), "__call__", refuse)
        with pytest.raises(jax.errors.JaxRuntimeError):
            exec(example, names | {"state": sharded.init(0)})
    assert "out of memory: the step takes" in capsys.readouterr().out


def test_the_example_of_a_teacher_trains():
    (example,) = [block for block in blocks() if "def distill(" in block]
    mesh = fsdp.make_mesh(data=8)
    student, teacher = (
        fsdp.fully_shard(make, optax.sgd(0.1), mesh, units=[Block])
        for make in (make_small, lambda rngs: Small(32, rngs=rngs))
    )
    names = {"jax": jax, "optax": optax, "fsdp_jax": fsdp, "mesh": mesh, "sharded": student}
    names |= {"make_teacher": teacher.arguments.model, "batch": rows_of_tokens(0)}
    weights = teacher.to_checkpoint(teacher.init(1)).params
    exec(example, names | {"state": student.init(0), "weights": weights})


class Balanced(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16)(tokens)
        self.sow("losses", "balance", (x**2).mean())
        return nn.Dense(32)(x)


class LinenUnit(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(256)(nn.gelu(x))


LinenUnit.__name__ = "Block"  # as the README calls it


class Wide(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(128, 256)(tokens)
        return nn.Dense(128)(LinenUnit(name="block")(x))


def test_the_checkpoint_example_goes_to_another_mesh(tmp_path, monkeypatch, capsys):
    (example,) = [block for block in blocks() if "other.checkpoint_target()" in block]
    (weights,) = [block for block in blocks() if "import_params" in block]
    monkeypatch.chdir(tmp_path)
    layouts = [
        fsdp.fully_shard(
            make_small, optax.adamw(3e-4), fsdp.make_mesh(data=8, devices=jax.devices()), strategy
        )
        for strategy in ("full_shard", "zero1")
    ]
    names = {"sharded": layouts[0], "state": layouts[0].init(), "other": layouts[1]}
    exec(example, names)
    assert names["data"] == {"position": 3200}
    with CheckpointStore("run/checkpoints") as store:
        export_params(store, 100, "weights")
    trained = names["state"].params
    exec("import dataclasses\n" + weights, names)
    equal = jax.tree.map(np.array_equal, *jax.device_get((names["state"].params, trained)))
    assert all(jax.tree.leaves(equal))
    assert "of host memory at a time" in capsys.readouterr().out


def test_the_example_of_a_mesh_of_ones_own_trains():
    (example,) = [block for block in blocks() if "own_mesh" in block]
    names = {"fsdp": fsdp, "jax": jax, "np": np, "optax": optax, "make_model": annotated(SMALL)}
    exec(example, names)
    assert "fsdp=4 x tensor=2" in names["sharded"].layout.summary()


def test_the_views_are_printed_as_the_page_shows_them(capsys):
    page = (ROOT / "docs" / "sharding.md").read_text()
    make_model = gpt(True, sequence_length=128, width=128)
    sharded = fsdp.fully_shard(make_model, optax.adamw(3e-4), fsdp.make_mesh(data=8))
    for call in ("print(sharded.layout.tree())", "print(fsdp.show("):
        (example,) = [block for block in blocks() if call in block]
        exec(example, {"sharded": sharded, "fsdp": fsdp, "jax": jax})
        printed = capsys.readouterr().out.splitlines()
        text = page.partition(example)[2].partition("```text\n")[2].partition("```")[0]
        shown = [line for line in text.splitlines() if line.strip() != "…"]
        assert len(shown) > 8
        assert [line for line in shown if line not in printed] == []


TESTS = Path(__file__).parent


def test_every_test_that_the_table_of_faults_names_is_there():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS / "README.md").read_text())
    assert len(named) > 40
    assert [name for file, name in named if f"def {name}(" not in (TESTS / file).read_text()] == []


CONTRACTS = [block for block in blocks() if "assert_contract(" in block]


def names_for_contracts(**more):
    names = {"fsdp": fsdp, "jax": jax, "optax": optax, "Block": GPTBlock}
    names |= {"make_model": gpt(True, sequence_length=128, width=128), "loss_fn": next_token_loss}
    return names | more


@pytest.mark.needs_plugin
def test_an_nnx_model_is_held_to_the_contract():
    example, _ = CONTRACTS
    assert len(ast.parse(example).body) <= 6
    exec(example, names_for_contracts())


@pytest.mark.needs_plugin
def test_a_linen_model_is_held_to_the_contract(topology_mesh):  # noqa: F811
    _, example = CONTRACTS
    assert len(ast.parse(example).body[0].body) <= 6
    held = []
    names = {
        "assert_contract": lambda *args: held.append(assert_contract(*args)),
        "module": Wide(),
        "loss_fn": linen_loss,
    }
    names = names_for_contracts(**names)
    exec(example, names)
    names["test_communication"](topology_mesh)
    assert {row["op"] for row in held[0].rows()} >= {"all-gather", "reduce-scatter"}


def test_the_weights_example_goes_there_and_back(tmp_path, monkeypatch):
    (example,) = [block for block in blocks() if "export_weights(" in block]
    monkeypatch.chdir(tmp_path)
    mesh = fsdp.make_mesh(data=8)
    config = llama.preset("llama-tiny", layers=1, width=64, heads=4, hidden=96)
    sharded = fsdp.fully_shard(lambda rngs: llama.Llama(config, rngs=rngs), optax.adamw(1e-5), mesh)
    export_weights(from_arrays(sharded.init(seed=3).params), config, "llama")
    names = {"fsdp": fsdp, "optax": optax, "mesh": mesh}
    exec(example, names)
    read, written = (tmp_path / name / "model.safetensors" for name in ("llama", "out"))
    assert written.read_bytes() == read.read_bytes()
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    before = load_file(read)
    assert merged.keys() == before.keys()
    for name, value in merged.items():  # adapters begin at zero, over the weights in nf4
        quantized = re.search("(self_attn|mlp).*weight", name)
        np.testing.assert_allclose(value, before[name], atol=0.1 if quantized else 0)
    optimized = [leaf.path for leaf in jax.tree.leaves(names["sharded"].layout.optimizer)]
    assert [path for path in optimized if "kernel" in path] == []


class WithMLP(Small):
    """The small model with the path that the example's rule names."""

    def __init__(self, *, rngs):
        super().__init__(512, rngs=rngs)
        self.mlp = Block(512, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.mlp(self.embed(tokens)))


def test_the_rules_serve_a_loop_of_plain_jax(capsys):
    (example,) = [block for block in blocks() if "fsdp.lint(" in block]
    names = {"fsdp": fsdp, "jax": jax, "nnx": nnx, "optax": optax}
    names["MyTransformer"] = WithMLP
    names["batches"] = [rows_of_tokens(i)["tokens"] for i in range(2)]

    def mean_loss(model, tokens):
        total, count = linen_loss(model, {"tokens": tokens})
        return total / count

    names["mean_loss"] = mean_loss
    exec(example, names)
    assert capsys.readouterr().out == "[]\n"
    assert np.isfinite(float(names["loss"]))
    for tree in (names["params"], names["opt_state"]):
        arrays = jax.tree.leaves(tree)
        held = sum(array.addressable_shards[0].data.nbytes for array in arrays)
        assert held < 0.2 * sum(array.nbytes for array in arrays)


def test_the_rules_serve_a_train_state_of_linen():
    (example,) = [block for block in blocks() if "TrainState.create" in block]
    module, tokens = nn.Sequential([nn.Embed(512, 128), nn.Dense(512)]), jnp.zeros((8, 4), int)

    def mean_loss(params, apply_fn, tokens):
        return apply_fn({"params": params}, tokens).mean()

    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    names = {"fsdp": fsdp, "jax": jax, "tx": optax.adamw(3e-4), "TrainState": TrainState}
    names |= {"module": module, "tokens": tokens, "mean_loss": mean_loss, "mesh": mesh}
    names |= {"partial": partial, "NamedSharding": NamedSharding, "P": PartitionSpec}
    exec(example, names)
    state, _ = names["step"](names["state"], tokens)
    arrays = jax.tree.leaves((state.params, state.opt_state))
    held = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    assert held < 0.3 * sum(array.nbytes for array in arrays)


class LinenAnnotated(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        def named(*names):
            return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)

        x = nn.Embed(512, 128, embedding_init=named("vocab", "embed"), name="embed")(tokens)
        h = nn.Dense(512, False, kernel_init=named("embed", "mlp"), name="up")(x)
        h = nn.Dense(128, False, kernel_init=named("mlp", "embd"), name="down")(h)
        x = nn.LayerNorm(use_bias=False, name="norm")(x + h)
        return nn.Dense(512, False, name="head")(x)


def test_the_table_of_matches_is_the_one_that_is_printed(capsys):
    (example,) = [block for block in blocks() if "match_table" in block]
    tokens = jax.ShapeDtypeStruct((1, 8), "int32")
    variables = jax.eval_shape(LinenAnnotated().init, jax.random.key(0), tokens)
    exec(example, {"jax": jax, "variables": variables})
    assert f"```text\n{capsys.readouterr().out}```" in (ROOT / "docs" / "sharding.md").read_text()
