"""Assertions for tests and notebooks: a model's numbers on one device, and what its step sends.

    certify(make_model, loss_fn, batch, tx=tx, units=[Block], local_batch=True)

    mesh = fsdp.make_mesh(devices=parse_topology("h100:8").devices())
    sharded = fsdp.fully_shard(make_model, tx, mesh, units=[Block])
    assert_contract(sharded.make_train_step(loss_fn), batch)

With `pytest_plugins = ["fsdp_jax.testing"]` in a `conftest.py`, tests also have the fixture
`topology_mesh`.
"""

from collections.abc import Callable
from importlib.util import find_spec

from jax.sharding import Mesh

from fsdp_jax.certify.certificate import Certificate, CertifyError, Tolerance
from fsdp_jax.certify.comparison import certify
from fsdp_jax.contract.contract import Contract, check_contract
from fsdp_jax.planner import parse_topology
from fsdp_jax.sharding.mesh import make_mesh
from fsdp_jax.step.compiled_step import CompiledStep
from fsdp_jax.tree import PyTree

__all__ = ["Certificate", "CertifyError", "Tolerance", "assert_contract", "certify", "mesh_of"]


def assert_contract(step: CompiledStep, batch: PyTree) -> Contract:
    """Compiles a step for its mesh and asserts that it sends what the layout declares.

    `step` is from `Sharded.make_train_step`, and `batch` has arrays or shapes [global rows, ...].
    Nothing is allocated, and the mesh's devices need not exist. The AssertionError has the
    violations, the most bytes first, and what is sent.
    """
    contract = check_contract(step, batch)
    if not contract.holds:
        unread = [f"not judged: {line}" for line in contract.unread]
        lines = ["the contract does not hold", *map(str, contract.violations), *unread]
        raise AssertionError("\n".join([*lines, "", str(contract)]))
    return contract


def mesh_of(topology: str, *, data: int = -1, replica: int = 1) -> Mesh:
    """Returns a mesh to compile for, of a machine by name: `h100:8`, `v5p:2x2x2` or `cpu:8`.

    Raises ConfigError for an unknown name, or a compiler that is not installed (no test is skipped
    instead), and ValueError for sizes that do not fit the machine.
    """
    return make_mesh(data, replica, devices=parse_topology(topology).devices())


if find_spec("pytest"):  # not needed in a notebook
    import pytest

    @pytest.fixture(scope="session")
    def topology_mesh() -> Callable[..., Mesh]:
        """Returns `mesh_of`: `topology_mesh("h100:8", replica=2)`."""
        return mesh_of
