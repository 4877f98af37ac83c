"""The FSDP unit: gathers its parameters, runs and drops them, in the forward and backward passes.

[Note: where a parameter is read] Outside its unit a parameter is the stored array: one `jax.Array`
of full shape, in its storage dtype, sharded. Whatever a model or a loss does with it there (a
penalty, a comparison, `x @ other.kernel`, a nested gradient) means what it means on one device, and
XLA gathers it where needed. For a unit's call, it is replaced by the gathered copy in the compute
dtype. The gradients of both uses add up.

If a step cannot hold the full array (local batches), or should not (host memory), the model is
still traced with a full-shape array, and the unit's gather is a single equation of that trace; see
`units.shard_reads`.

[Note: dropping the gathered copy] A unit runs under `jax.checkpoint`. With `remat='none'` its
policy saves everything except

- what `GATHER` returns, so that the backward pass gathers again, unless the parameter stays
  gathered (`units.keep_gathered`);
- names and casts of an array of a parameter's shape, and casts of an array as large as a parameter
  from the dtype that it is gathered in, which may be copies of it (an activation's cast is worth
  saving: it is smaller than what it is made from);
- constraints and rearrangements (reshape, transpose, slice, concatenate), which are nearly free to
  do again. Outside a scan, parts of an array that is larger than all of the unit's parameters, such
  as queries, keys and values, are saved.

What a model computes from a weight by arithmetic, such as `w * scale`, is an activation like any
other and is saved. The other policies, of `units.remat` or of the user, are asked about everything
but the exceptions.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from fsdp_jax.errors import ArgumentError, SlowerWarning
from fsdp_jax.program.equations import Asked, array_name, asked_of, bodies
from fsdp_jax.program.primitives import CAST, CUSTOM_VJP, DOT, primitive_of
from fsdp_jax.sharding.mesh import shards_of
from fsdp_jax.units.collectives import FLOAT8, GATHER, gather, gather_whole
from fsdp_jax.units.comm import ParamComm
from fsdp_jax.units.remat import INPUT, SAVED, Activations, Policy

ROOT = ""  # path of the unit that is the whole model


def gather_unit(comms: Sequence[ParamComm], params: Sequence[jax.Array]) -> list[jax.Array]:
    """Gathers the parameters of a unit in the compute dtype; see the notes.

    `params`: as they are stored, or, inside a layer scan, a slice of the stored array.
    """
    gathered = []
    for comm, array in zip(comms, params, strict=True):
        if comm.traced_whole:
            array = gather_whole(comm, array)
        elif not comm.already_gathered:
            array = gather(comm, array)
        if comm.float8_matmuls:  # named in the trace, for `step.float8_matmuls`
            array = checkpoint_name(array, f"{FLOAT8}{comm.path}]")
        gathered.append(array)
    return gathered


def warn_of_unfound(unit: str, comms: Iterable[ParamComm], why: str, fix: str) -> None:
    """Warns of a call of a unit that finds none of its parameters, unless the unit gathers nothing.

    `comms`: of all parameters, the unit's among them.
    """
    own = [comm for comm in comms if comm.unit == unit and not comm.already_gathered]
    if any(shards_of(comm.mesh, comm.axes.batch_spec_axes(comm.shard_spec)) > 1 for comm in own):
        text = f"unit '{unit}' gathers none of its parameters: {why}. XLA chooses what is sent, in "
        text += f"the dtype that is stored, and what stays for the backward pass; {fix}"
        warnings.warn(text, SlowerWarning, stacklevel=3)


def gathers_nothing(comms: Sequence[ParamComm], activations: Activations) -> bool:
    """Tells whether a unit's call needs nothing done to its parameters and activations."""
    ready = all(c.already_gathered and not (c.traced_whole or c.float8_matmuls) for c in comms)
    return ready and activations == SAVED


def checkpoint_settings(
    comms: Sequence[ParamComm], params: Sequence[jax.Array], activations: Activations
) -> dict[str, Any] | None:
    """Chooses arguments of `jax.checkpoint` for a unit with these parameters; see the notes.

    `params`: as `gather_unit` takes them. Returns None if the unit needs no checkpoint: it gathers,
    recomputes and offloads nothing.
    """
    pairs = list(zip(comms, params, strict=True))
    dropped = [
        jax.ShapeDtypeStruct(x.shape, comm.transform.compute)
        for comm, x in pairs
        if not comm.already_gathered
    ]
    if not dropped and activations == SAVED:
        return None
    # Inside a scan the loops of forward and backward cannot be merged, so the guard against merging
    # them is not needed.
    in_scan = any(x.ndim < comm.ndim for comm, x in pairs)
    if activations == Activations("full"):
        policy = _only_kept
    else:
        policy = _without_gathered_copies(dropped, activations.checkpoint_policy, in_scan)
    return {"policy": policy, "prevent_cse": not in_scan}


def call_checkpointed(fn: Callable[..., Any], settings: dict[str, Any] | None, *args: Any) -> Any:
    """Calls `fn(*args)`, under `jax.checkpoint` where `checkpoint_settings` gave it arguments."""
    return fn(*args) if settings is None else jax.checkpoint(fn, **settings)(*args)


def _float8_dot(asked: Asked) -> Asked | None:
    """Finds the matmul inside a call of `float8.dot`, for policies; None for other operations."""
    if primitive_of(asked) is not CUSTOM_VJP:
        return None
    for eqn in (eqn for body in bodies(asked) for eqn in body.eqns):
        if primitive_of(eqn) is DOT and str(eqn.invars[0].aval).startswith("float8"):
            return asked_of(eqn)
    return None


def _only_kept(primitive: Any, *_: Any, **params: Any) -> bool:
    """The policy that saves only parameters that stay gathered, of the unit or of one inside."""
    return primitive is GATHER and params["comm"].kept


def _without_gathered_copies(
    gathered: Sequence[jax.ShapeDtypeStruct], chosen: Policy, in_scan: bool
) -> Policy:
    """Wraps the policy `chosen`, to save no results of gathering parameters.

    `gathered`: shapes and dtypes of the parameters. See the note on dropping the gathered copy.
    """
    # Casts of arrays of these sizes and dtypes, and casts and names of arrays of these shapes, are
    # taken for copies of parameters. A model may cast a parameter twice, from other dtypes too.
    cast = {(x.size, x.dtype) for x in gathered}
    shapes = {x.shape for x in gathered}
    in_all = sum(x.size for x in gathered)

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        """Answers like `chosen`, but False (recompute) from shard to gathered, cast weight."""
        asked = Asked(primitive, avals, params)
        row = primitive_of(asked)
        # Parts of an array larger than all parameters: but a scan would copy each into a stack.
        of_activation = row.slices and not in_scan and avals[0].size > in_all
        if primitive is GATHER:
            return _only_kept(primitive, **params)
        if row.recomputed and not of_activation:
            return False
        is_cast = row is CAST
        if is_cast and (avals[0].size, avals[0].dtype) in cast:
            return False
        is_named = array_name(asked) not in (None, INPUT)
        if (is_cast or is_named) and avals[0].shape in shapes:
            return False
        # The chosen policy decides the rest; a float8 matmul is presented to it as a plain one.
        answer = (_float8_dot(asked) or asked).ask(chosen)
        if callable(answer):
            raise ArgumentError(
                "the function makes a policy, and is none",
                where="remat",
                got=chosen,
                fix="call it: jax.checkpoint_policies.save_only_these_names('attention', ...)",
            )
        return answer

    return policy
