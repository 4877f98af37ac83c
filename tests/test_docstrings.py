"""The examples of docstrings run, and each public function and method has one."""

import doctest
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fsdp_jax as fsdp
from fsdp_jax import public

# the names that examples use without an import
NAMES = {"fsdp": fsdp, "jax": jax, "jnp": jnp, "np": np, "nnx": nnx, "optax": optax}


def public_functions():
    """Lists the functions of `import fsdp_jax`, and the methods of what `fully_shard` returns."""
    functions = {name: getattr(public, name) for name in public.__all__}
    methods = {f"Sharded.{name}": fn for name, fn in vars(fsdp.Sharded).items()}
    named = {name: fn for name, fn in (functions | methods).items() if inspect.isfunction(fn)}
    return {name: fn for name, fn in named.items() if not name.rpartition(".")[2].startswith("_")}


def run_examples(fn, name, names):
    """Runs the examples of a docstring with these names; returns how many there are."""
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(fn), names, name, None, None)
    report = []
    results = doctest.DocTestRunner().run(example, out=report.append, clear_globs=False)
    assert not results.failed, "".join(report)
    names.update(example.globs)
    return results.attempted


@pytest.fixture(scope="module")
def names_of_the_first_example():
    names = dict(NAMES)
    assert run_examples(fsdp.fully_shard, "fully_shard", names)
    return names


@pytest.mark.parametrize("name", public_functions())
def test_the_example_of_a_public_function_runs(name, names_of_the_first_example):
    names = dict(names_of_the_first_example)
    names["state"] = names["sharded"].init(seed=0)  # other examples donate theirs
    assert run_examples(public_functions()[name], name, names), "the docstring has no example"
