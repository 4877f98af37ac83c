"""The values that differ between devices, in the traces of small programs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from refusals import not_refused, refused

import fsdp_jax as fsdp
from fsdp_jax.errors import ArgumentError
from fsdp_jax.step.device_varying import check_local_program

pytestmark = pytest.mark.releases

BOTH = ("replica", "data")
ROWS, SHARDS, SAME = PartitionSpec(BOTH), PartitionSpec("data"), PartitionSpec()


def check(fn, *, state=("state",)):
    """Checks `fn(rows, shards, same)`, arrays [8], [4] and [].

    A device has 1 element of rows and of shards, and all of `same`.
    """
    mesh = fsdp.make_mesh(data=4, replica=2)
    local = jax.shard_map(
        fn, mesh=mesh, in_specs=(ROWS, SHARDS, SAME), out_specs=SAME, check_vma=False
    )
    arguments = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8,), (4,), ()))
    check_local_program(jax.make_jaxpr(local)(*arguments).jaxpr, state)


def repeated(length, body):
    """A scan of `body` on the state and another carried value."""
    return lambda rows, shards, same: lax.scan(
        lambda carry, _: (body(*carry, rows[0]), None), (same, same), length=length
    )[0][0]


def counted(bound, *, gathers=True):
    """A while loop of `bound(rows, shards, same)` turns; with `gathers` each turn gathers."""

    def body(rows, shards, same):
        def turn(carry):
            count, x = carry
            more = lax.all_gather(shards, "data", tiled=True).sum() if gathers else 1.0
            return count + 1, x + more

        return lax.while_loop(
            lambda carry: carry[0] < bound(rows, shards, same), turn, (0.0, same)
        )[1]

    return body


def chosen(decides, inside):
    """A branch on `decides(rows, shards, same)`; one side has a collective."""

    def body(rows, shards, same):
        return lax.cond(decides(rows, shards, same) > 0, lambda: inside(shards), lambda: same)

    return body


def gather(shards):
    return lax.all_gather(shards, "data", tiled=True).sum()


SAME_ON_ALL = {
    "what all have": lambda rows, shards, same: same * 2 + 1,
    "a sum over all": lambda rows, shards, same: lax.psum(rows[0], BOTH),
    "one axis after the other": lambda rows, shards, same: lax.pmax(
        lax.psum(rows[0], "data"), "replica"
    ),
    "a gathered parameter": lambda rows, shards, same: gather(shards),
    "inside a call": lambda rows, shards, same: jax.jit(lambda x: lax.psum(x, BOTH))(rows[0]),
    "selected by what all have": lambda rows, shards, same: lax.cond(
        same > 0, lambda: same, lambda: -same
    ),
    "a collective in a branch that all take": chosen(lambda rows, shards, same: same, gather),
    "chosen by a sum": chosen(lambda rows, shards, same: lax.psum(rows[0], BOTH), gather),
    "a collective along the axis on which all agree": lambda rows, shards, same: lax.psum(
        lax.cond(lax.psum(rows[0], "data") > 0, lambda: gather(shards), lambda: same), "replica"
    ),
    "a collective in a loop of as many turns on all": counted(lambda rows, shards, same: same),
    "a constant that a scan goes over": lambda rows, shards, same: lax.scan(
        lambda carry, x: (carry + x, carry), same, jnp.arange(3.0)
    )[0],
    "what a scan brings in is not kept": repeated(
        3, lambda state, other, row: (state + 1, other + row)
    ),
}

DIFFERENT = {
    "rows": lambda rows, shards, same: rows[0] + same,
    "shards": lambda rows, shards, same: shards[0],
    "the device's number": lambda rows, shards, same: lax.axis_index("data") * 1.0,
    "one axis of two": lambda rows, shards, same: lax.psum(rows[0], "data"),
    "scattered again": lambda rows, shards, same: lax.psum_scatter(jnp.ones(4) * same, "data")[
        None
    ].sum(),
    "random numbers of a device": lambda rows, shards, same: jax.random.normal(
        jax.random.fold_in(jax.random.key(0), lax.axis_index(BOTH))
    ),
    "inside a call": lambda rows, shards, same: jax.jit(lambda x, y: x + y)(same, rows[0]),
    "chosen by rows": lambda rows, shards, same: lax.cond(rows[0] > 0, lambda: same, lambda: -same),
    "summed in groups of devices": lambda rows, shards, same: lax.psum(
        rows[0], BOTH, axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]
    ),
    "one side of a branch": lambda rows, shards, same: lax.cond(
        same > 0, lambda: rows[0], lambda: same
    ),
    "as many turns as a row says": counted(lambda rows, shards, same: rows[0], gathers=False),
    "what a scan stacks": lambda rows, shards, same: lax.scan(
        lambda carry, _: (carry, rows[0]), same, length=2
    )[1].sum(),
    "a carry that varies from its second turn on": repeated(
        3, lambda state, other, row: (other, row)
    ),
}

WAITS = {
    "a branch chosen by rows": chosen(lambda rows, shards, same: rows[0], gather),
    "a branch chosen by random numbers": chosen(
        lambda rows, shards, same: jax.random.normal(
            jax.random.fold_in(jax.random.key(0), lax.axis_index(BOTH))
        ),
        gather,
    ),
    "a branch chosen along the axis of its collective": chosen(
        lambda rows, shards, same: lax.psum(rows[0], "replica"), gather
    ),
    "a collective deep inside": chosen(
        lambda rows, shards, same: rows[0],
        lambda shards: lax.scan(
            lambda carry, _: (carry + jax.jit(gather)(shards), None), 0.0, length=2
        )[0],
    ),
    "a loop of as many turns as a row says": counted(lambda rows, shards, same: rows[0]),
    "a branch chosen by what a scan carries": lambda rows, shards, same: lax.scan(
        lambda carry, _: (
            rows[0] + lax.cond(carry > 0, lambda: gather(shards), lambda: same),
            None,
        ),
        same,
        length=2,
    )[0],
}


def test_state_that_is_the_same_on_all_devices_is_accepted():
    for name, fn in SAME_ON_ALL.items():
        try:
            check(fn)
        except ArgumentError as error:
            error.add_note(name)
            raise


def test_state_that_differs_between_devices_is_refused():
    fields = {
        "what": "computed from the batch",
        "where": "norm/mean",
        "fix": "leave local_batch out",
    }
    calls = {
        name: (lambda fn=fn: check(fn, state=["norm/mean"]), fields)
        for name, fn in DIFFERENT.items()
    }
    assert not_refused(calls) == {}
    for fn in DIFFERENT.values():
        check(fn, state=[])


def test_a_collective_that_some_devices_may_skip_is_refused():
    calls = {
        name: (
            lambda fn=fn: check(fn, state=[]),
            {
                "what": f"devices may take this {'loop' if 'turns' in name else 'branch'} differ",
                "fix": "jnp.where",
            },
        )
        for name, fn in WAITS.items()
    }
    assert not_refused(calls) == {}


def test_the_error_names_the_axes():
    with refused("computed from the batch", got="differs along replica"):
        check(lambda rows, shards, same: lax.psum(rows[0], "data"))


def test_nothing_varies_along_an_axis_of_one_device():
    mesh = fsdp.make_mesh(data=8)
    assert mesh.shape == {"replica": 1, "data": 8}
    local = jax.shard_map(
        lambda rows: lax.psum(rows[0], "data"),
        mesh=mesh,
        in_specs=(ROWS,),
        out_specs=SAME,
        check_vma=False,
    )
    check_local_program(
        jax.make_jaxpr(local)(jax.ShapeDtypeStruct((8,), jnp.float32)).jaxpr, ("state",)
    )
