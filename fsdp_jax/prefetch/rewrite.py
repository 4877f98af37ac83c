"""Prefetch: the next unit is gathered while this one computes, and the last one's gradients are
reduced meanwhile.

[Note: by construction] No XLA scheduler moves a gather out of the layer that uses it. So the
forward pass is traced, the layers in it are found (the body of a layer scan, or one unit after
another), and they are run again with what they need in hand: layer i gets its gathered parameters
as an argument and, beside computing, gathers for layer i+1. A custom VJP does the same on the way
back, where it also reduces the gradients of layer i+1 while layer i computes. Each layer's own
`jax.checkpoint` is kept: what it saves is saved, except the gathered parameters, which are gathered
again. So at any time one more unit is in memory than without.

The user's model is not changed and need not know: the places are found in the jaxpr, where
`travel.gather` leaves its name. What cannot be moved (a gather inside a `while`, a `cond` or a
custom derivative; parameters that are computed before they are gathered) stays where it is and is
named in `Report.left`.

`pre` gathers unit i-1 as the backward of unit i begins; `post` when it has ended, while its
gradients are reduced: nothing more in memory, and less to hide behind. The names are PyTorch's
BackwardPrefetch.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import jax
import jax.extend.core as jex
from jax import lax

from fsdp_jax.compat import scan_arguments
from fsdp_jax.prefetch.gather_sites import (
    arguments,
    ends_of,
    inner_of,
    is_checkpoint,
    is_transparent,
    liftable,
    paths_in,
    sites_of,
)
from fsdp_jax.prefetch.layer_scan import LayerScan
from fsdp_jax.prefetch.unit_chain import Stage, UnitChain
from fsdp_jax.prefetch.vjp import gather_behind, is_float
from fsdp_jax.units.collectives import ParamComm, gather, site_of

Prefetch = Literal["none", "post", "pre"]
Gathered = dict[str, jax.Array]
_Env = dict[Any, Any]  # values by variable


@dataclass
class Report:
    """What was done with the gathers of a traced function.

    Attributes:
        moved: paths of parameters that are gathered ahead.
        left: {path: why} of those in units that are not.

    """

    moved: set[str] = field(default_factory=set)
    left: dict[str, str] = field(default_factory=dict)


def prefetched(
    fn: Callable[..., Any], comms: Mapping[str, ParamComm], when: Prefetch, report: Report
) -> Callable[..., Any]:
    """`fn` with the same arguments and results, its units gathered ahead of their use.

    Args:
        fn: a pure function of pytrees of arrays that gathers parameters by `travel.gather`.
        comms: of those parameters, by path.
        when: see the note.
        report: filled when the result is traced.

    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        plan = _Plan(comms, when, report)
        out = _replay(plan, closed.jaxpr, [*closed.consts, *jax.tree.leaves(args)], None)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


@dataclass(frozen=True)
class _Plan:
    comms: Mapping[str, ParamComm]
    when: Prefetch
    report: Report

    @property
    def pre(self) -> bool:
        return self.when == "pre"


# Running it again


def _replay(
    plan: _Plan, jaxpr: jex.Jaxpr, args: Sequence[Any], given: Gathered | None
) -> list[Any]:
    """Evaluates with the parameters of `given` in place of their gathers; where None, finds the
    layers itself.
    """
    env: _Env = dict(zip(arguments(jaxpr), args, strict=True))
    if given is not None:
        _run(plan, jaxpr, jaxpr.eqns, env, given)
        return _read(env, jaxpr.outvars)
    rest = list(jaxpr.eqns)
    chains = {id(chain.units[0]): chain for chain in _chains(jaxpr)}
    while rest:
        at = next(
            (n for n, eqn in enumerate(rest) if id(eqn) in chains or _is_layers(plan, eqn)), None
        )
        if at is None:
            break
        chain = chains.get(id(rest[at]))
        end = at if chain is None else _position(rest, chain.units[-1])
        before, layers, rest = rest[:at], rest[at : end + 1], rest[end + 1 :]
        late = _late(before, layers, rest)
        _run(
            plan, jaxpr, [eqn for eqn in before if all(eqn is not each for each in late)], env, None
        )
        if chain is None:
            _run(plan, jaxpr, layers, env, None)
        else:
            _run(plan, jaxpr, chain.early, env, None)
            chain.run(plan, env)
        _gather_late(plan, late, layers, env)
    _run(plan, jaxpr, rest, env, None)
    return _read(env, jaxpr.outvars)


def _position(eqns: Sequence[jex.JaxprEqn], eqn: jex.JaxprEqn) -> int:
    return next(n for n, each in enumerate(eqns) if each is eqn)


def _is_layers(plan: _Plan, eqn: jex.JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" and bool(paths_in(eqn)) and _Scan(plan, eqn).liftable


def _late(
    before: Sequence[jex.JaxprEqn], layers: Sequence[jex.JaxprEqn], after: Sequence[jex.JaxprEqn]
) -> list[jex.JaxprEqn]:
    """The gathers before some layers of what is needed only behind them: the head."""
    used = {v for eqn in [*before, *layers] for v in eqn.invars if not isinstance(v, jex.Literal)}
    needed = {v for eqn in after for v in eqn.invars if not isinstance(v, jex.Literal)}
    return [
        eqn
        for eqn in before
        if site_of(eqn) and eqn.outvars[0] not in used and eqn.outvars[0] in needed
    ]


def _gather_late(
    plan: _Plan, late: Sequence[jex.JaxprEqn], layers: Sequence[jex.JaxprEqn], env: _Env
) -> None:
    """Gathers them behind the layers; on the way back their gradients are reduced before the layers
    begin.
    """
    made = [v for eqn in layers for v in eqn.outvars if v in env and is_float(env[v])]
    if not late or not made:
        for eqn in late:
            env[eqn.outvars[0]] = gather(plan.comms[str(site_of(eqn))], *_read(env, eqn.invars))
        return
    paths = [str(site_of(eqn)) for eqn in late]
    shards = {path: _read(env, eqn.invars) for path, eqn in zip(paths, late, strict=True)}
    values = {path: at[0] for path, at in shards.items()}
    pending = {path: at[1] for path, at in shards.items() if len(at) > 1}
    out, gathered = gather_behind(plan.comms, values, pending, [env[v] for v in made])
    env.update(zip(made, out, strict=True))
    env.update((eqn.outvars[0], gathered[path]) for path, eqn in zip(paths, late, strict=True))


def _run(
    plan: _Plan, jaxpr: jex.Jaxpr, eqns: Sequence[jex.JaxprEqn], env: _Env, given: Gathered | None
) -> None:
    """Some eqns of a jaxpr: the plain ones together as long as they last, those that gather one by
    one.
    """
    for gathers, group in groupby(eqns, key=lambda eqn: bool(paths_in(eqn))):
        if not gathers:
            _evaluate(jaxpr, list(group), env)
            continue
        for eqn in group:
            if not (site_of(eqn) or is_transparent(eqn) or eqn.primitive.name == "scan"):
                plan.report.left |= dict.fromkeys(
                    paths_in(eqn), f"it is gathered inside a `{eqn.primitive.name}`"
                )
                _evaluate(jaxpr, [eqn], env)
                continue
            values = _replay_eqn(plan, eqn, _read(env, eqn.invars), given)
            env.update(zip(eqn.outvars, values, strict=True))


def _read(env: _Env, variables: Sequence[Any]) -> list[Any]:
    return [v.val if isinstance(v, jex.Literal) else env[v] for v in variables]


def _evaluate(jaxpr: jex.Jaxpr, eqns: Sequence[jex.JaxprEqn], env: _Env) -> None:
    """Eqns in which nothing is gathered, with the names and source lines they were traced with."""
    invars, outvars = ends_of(eqns)
    debug = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    part = jaxpr.replace(
        constvars=[], invars=invars, outvars=outvars, eqns=list(eqns), debug_info=debug
    )
    values = jex.jaxpr_as_fun(jex.ClosedJaxpr(part, ()))(*_read(env, invars))
    env.update(zip(outvars, values, strict=True))


def _replay_eqn(
    plan: _Plan, eqn: jex.JaxprEqn, args: list[Any], given: Gathered | None
) -> Sequence[Any]:
    """One eqn that gathers, itself or somewhere inside."""
    path = site_of(eqn)
    if path:
        if given and path in given:
            return [given[path]]
        if given is None and plan.comms[path].unit:
            plan.report.left.setdefault(path, "no other unit is run just before or after its own")
        return [gather(plan.comms[path], *args)]
    if is_transparent(eqn):
        (inner,) = inner_of(eqn)
        consts = getattr(eqn.params.get("jaxpr"), "consts", ())

        def call(args: list[Any], given: Gathered | None) -> list[Any]:
            return _replay(plan, inner, [*consts, *args], given)

        with _scope(eqn):
            if not is_checkpoint(eqn):
                return call(args, given)
            settings = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
            return jax.checkpoint(call, **settings)(args, given)
    assert given is None, "a layer's own gathers are all lifted out of it"
    assert eqn.primitive.name == "scan", eqn.primitive
    return _replay_scan(plan, eqn, args)


def _scope(eqn: jex.JaxprEqn) -> Any:
    """The names that stood around it in the user's model; profiles are read by them."""
    names = str(eqn.source_info.name_stack)
    return jax.named_scope(names) if names else nullcontext()


def _replay_scan(plan: _Plan, eqn: jex.JaxprEqn, args: list[Any]) -> Sequence[Any]:
    """A scan over layers; or over something else, with layers somewhere inside."""
    scan = _Scan(plan, eqn)
    if scan.liftable:
        plan.report.moved |= set(scan.sites)
        return scan.run(args)
    consts, carry, xs = scan_arguments(eqn.params, args)
    n_carry = len(carry)

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        closed = eqn.params["jaxpr"]
        out = _replay(plan, closed.jaxpr, [*closed.consts, *consts, *carry, *x], None)
        return out[:n_carry], out[n_carry:]

    settings = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(body, carry, xs, **settings)
    return [*carry, *ys]


class _Scan:
    """A `scan` eqn as layers."""

    def __init__(self, plan: _Plan, eqn: jex.JaxprEqn) -> None:
        self.plan, self.eqn, self.body = plan, eqn, eqn.params["jaxpr"]
        sites = liftable(self.body.jaxpr)
        consts, carry, _ = scan_arguments(eqn.params, eqn.invars)
        offset = len(self.body.jaxpr.constvars) + len(consts) + len(carry)
        self.liftable = sites is not None and eqn.params["length"] > 1
        self.liftable &= all(
            number >= offset for numbers in (sites or {}).values() for number in numbers
        )
        self.sites = {
            path: tuple(n - offset for n in numbers) for path, numbers in (sites or {}).items()
        }

    def run(self, args: list[Any]) -> list[Any]:
        """The outputs of the eqn."""
        params = self.eqn.params
        consts, carry, xs = scan_arguments(params, args)
        consts = [*self.body.consts, *consts]
        taken = {number for numbers in self.sites.values() for number in numbers}
        left = [number for number in range(len(xs)) if number not in taken]
        n = len(consts) + len(carry)

        def layer(gathered: Gathered, inputs: list[Any]) -> list[Any]:
            slots: list[Any] = [None] * len(
                xs
            )  # nothing reads the shards: what is gathered from them is given
            for number, x in zip(left, inputs[n:], strict=True):
                slots[number] = x
            return _replay(self.plan, self.body.jaxpr, [*inputs[:n], *slots], gathered)

        scan = LayerScan(
            layer,
            self.plan.comms,
            params["length"],
            len(carry),
            params["reverse"],
            params["unroll"],
            self.plan.pre,
        )
        values = {path: xs[numbers[0]] for path, numbers in self.sites.items()}
        pending = {path: xs[numbers[1]] for path, numbers in self.sites.items() if len(numbers) > 1}
        carry, ys = scan.run(values, pending, consts, carry, [xs[number] for number in left])
        return [*carry, *ys]


class _Chain:
    """Units one after another in one jaxpr: the layers of a model that keeps them in a list.

    What stands between two units goes with the second, unless it needs neither: that runs before
    them all (`early`).
    """

    def __init__(self, jaxpr: jex.Jaxpr, units: Sequence[jex.JaxprEqn]) -> None:
        self.jaxpr, self.units = jaxpr, units
        self.early: list[jex.JaxprEqn] = []
        self.stages: list[list[jex.JaxprEqn]] = [[]]
        start, end = _position(jaxpr.eqns, units[0]), _position(jaxpr.eqns, units[-1])
        made: set[Any] = set()
        for eqn in jaxpr.eqns[start : end + 1]:
            is_unit = any(eqn is unit for unit in units)
            if not is_unit and made.isdisjoint(
                v for v in eqn.invars if not isinstance(v, jex.Literal)
            ):
                self.early.append(eqn)
                continue
            made.update(eqn.outvars)
            self.stages[-1].append(eqn)
            if is_unit and eqn is not units[-1]:
                self.stages.append([])
        later = [*(v for eqn in jaxpr.eqns[end + 1 :] for v in eqn.invars), *jaxpr.outvars]
        self.wanted = list(
            dict.fromkeys(v for v in later if not isinstance(v, jex.Literal) and v in made)
        )

    def run(self, plan: _Plan, env: _Env) -> None:
        """Evaluates it, its early eqns done; what later eqns want is put into `env`."""
        numbers: dict[Any, int] = {}
        stages, values, pending = [], [], []
        wanted = set(self.wanted)
        for eqns, unit in reversed(list(zip(self.stages, self.units, strict=True))):
            ins, made = ends_of(eqns)
            sites = {path: tuple(unit.invars[n] for n in at) for path, at in sites_of(unit).items()}
            if all(v in env for at in sites.values() for v in at):
                plan.report.moved |= set(sites)
            else:  # computed from what an earlier unit made
                plan.report.left |= dict.fromkeys(sites, "it is computed between the units")
                sites = {}
            taken = {v for at in sites.values() for v in at}
            ins = [v for v in ins if v not in taken]
            outs = [v for v in made if v in wanted]
            wanted |= set(ins)
            stages.append(
                Stage(
                    self._layer(plan, eqns, ins, outs),
                    _numbered(numbers, ins),
                    _numbered(numbers, outs),
                )
            )
            values.append({path: env[at[0]] for path, at in sites.items()})
            pending.append({path: env[at[1]] for path, at in sites.items() if len(at) > 1})
        chain = UnitChain(stages[::-1], plan.comms, _numbered(numbers, self.wanted), plan.pre)
        external = {number: env[v] for v, number in numbers.items() if v in env}
        env.update(zip(self.wanted, chain.run(values[::-1], pending[::-1], external), strict=True))

    def _layer(self, plan: _Plan, eqns: list[jex.JaxprEqn], ins: list[Any], outs: list[Any]) -> Any:
        def layer(gathered: Gathered, inputs: list[Any]) -> list[Any]:
            env: _Env = _Shardless(zip(ins, inputs, strict=True))
            _run(plan, self.jaxpr, eqns, env, gathered)
            return _read(env, outs)

        return layer


class _Shardless(dict[Any, Any]):
    """Variables of a stage; nothing reads its shards, for what is gathered from them is given."""

    def __missing__(self, variable: Any) -> None:
        return None


def _numbered(numbers: dict[Any, int], variables: Sequence[Any]) -> list[int]:
    return [numbers.setdefault(v, len(numbers)) for v in variables]


def _chains(jaxpr: jex.Jaxpr) -> list[_Chain]:
    """Runs of two units or more with nothing else that gathers between them."""
    runs: list[list[jex.JaxprEqn]] = [[]]
    for eqn in jaxpr.eqns:
        if paths_in(eqn):
            is_unit = site_of(eqn) is None and is_transparent(eqn) and sites_of(eqn)
            if is_unit and all(n >= 0 for at in sites_of(eqn).values() for n in at):
                runs[-1].append(eqn)
            else:
                runs.append([])
    return [_Chain(jaxpr, run) for run in runs if len(run) > 1]
