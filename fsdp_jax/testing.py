"""Assertions for tests and notebooks: a model's numbers on one device, and its step's traffic.

In use::

    certify(make_model, loss_fn, batch, tx=tx, units=[Block], local_batch=True)
    sharded.certify(loss_fn, batch)  # the object that trains

    mesh = fsdp.make_mesh(devices=parse_topology("h100:8").devices())
    sharded = fsdp.fully_shard(make_model, tx, mesh, units=[Block])
    assert_contract(sharded.make_train_step(loss_fn), batch)

With `pytest_plugins = ["fsdp_jax.testing"]` in a `conftest.py`, tests also have the fixture
`topology_mesh`.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from fsdp_jax.api import fully_shard
from fsdp_jax.certify.certificate import Certificate, CertifyError, Tolerance
from fsdp_jax.certify.certify_sharded import CertifySettings
from fsdp_jax.contract.contract import Contract, check_contract
from fsdp_jax.errors import SlowerWarning
from fsdp_jax.planner import parse_topology
from fsdp_jax.sharding.mesh import MeshAxes, make_mesh
from fsdp_jax.sharding.rules import ReplicationWarning
from fsdp_jax.sharding.strategy import STRATEGIES
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.tree import PyTree

ON_CPU = (
    "compiled for CPUs, whose XLA sends more than that of GPUs and TPUs (it widens bfloat16, and "
    "all-reduces annotated gradients): make the step on mesh_of('h100:8') to judge theirs"
)

__all__ = [
    "Certificate",
    "CertifyError",
    "Tolerance",
    "assert_contract",
    "certify",
    "mesh_of",
]


def certify(
    model: Any,
    loss_fn: Callable[..., Any],
    batch: PyTree,
    *,
    tx: optax.GradientTransformation | None = None,
    mesh: Mesh | MeshAxes | None = None,
    strategies: Sequence[str] = tuple(STRATEGIES),
    min_size: int = 1,
    **settings: Any,
) -> Certificate:
    """Asserts that a model, sharded as `fully_shard` does, trains as on one device.

    The comparison is that of `Sharded.certify`.

    To certify the very object that trains, call its method. `settings` are arguments of
    `Sharded.certify` (accumulation, local_batch, trials, ...) and of `fully_shard` (units, inputs,
    precision, remat, offload, rules, frozen, ...), with their defaults. What differs:

    - `tx` is `optax.sgd(0.1)` if None.
    - `mesh` is of all this process's devices if None.
    - `strategies` are all.
    - `min_size` is 1, so that a small model is sharded at all.

    Raises:
        CertifyError: an AssertionError that names setting, array, difference, batch and likely
            cause. Its `certificate` has everything.
        ValueError: as `fully_shard` and `Sharded.certify` raise it.

    """
    if tx is None:
        tx = optax.sgd(0.1)
    if mesh is None:
        mesh = make_mesh(devices=jax.local_devices())
    names = {field.name for field in fields(CertifySettings)}
    of_certify = {name: settings.pop(name) for name in names & settings.keys()}
    with warnings.catch_warnings():
        for category in (ReplicationWarning, SlowerWarning):  # of bytes and time; numbers count
            warnings.simplefilter("ignore", category)
        sharded = fully_shard(model, tx, mesh, strategies[0], min_size=min_size, **settings)
    return sharded.certify(loss_fn, batch, strategies=strategies, **of_certify)


def assert_contract(step: CompiledStep, batch: PyTree) -> Contract:
    """Compiles a step for its mesh and asserts that it sends the traffic that the layout declares.

    `step` is from `Sharded.make_train_step`, and `batch` has arrays or shapes [global rows, ...].
    Nothing is allocated, and the mesh's devices need not exist. The AssertionError has the
    violations, the most bytes first, and the traffic.
    """
    contract = check_contract(step, batch)
    if not contract.holds:
        unread = [f"not judged: {line}" for line in contract.unread]
        lines = ["the contract does not hold", *map(str, contract.violations), *unread]
        if step.plan.layout.axes.mesh.devices.flat[0].platform == "cpu":
            lines.insert(1, ON_CPU)
        raise AssertionError("\n".join([*lines, "", str(contract)]))
    return contract


def mesh_of(topology: str, *, data: int = -1, replica: int = 1) -> Mesh:
    """Makes a mesh to compile for, of a machine by name: `h100:8`, `v5p:2x2x2` or `cpu:8`.

    Raises ConfigError for an unknown name, or a compiler that is not installed (no test is skipped
    instead), and ValueError for sizes that do not fit the machine.
    """
    return make_mesh(data, replica, devices=parse_topology(topology).devices())


if find_spec("pytest"):  # not needed in a notebook
    import pytest

    @pytest.fixture(scope="session")
    def topology_mesh() -> Callable[..., Mesh]:
        """Gives `mesh_of`: `topology_mesh("h100:8", replica=2)`."""
        return mesh_of
