"""Prefetch: the next unit is gathered while this one computes.

The gradients of the unit before it in the backward pass are reduced meanwhile.

[Note: by construction] Inside a scan, XLA cannot move a gather out of its iteration. So the forward
pass is traced, the layers in it are found (the body of a layer scan, or one unit after another),
and the program is evaluated again in another order: layer i receives its gathered parameters as an
argument and, while it computes, gathers those of layer i+1. A custom VJP does the same in the
backward pass, where it also reduces the gradients of layer i+1 while layer i computes. Each layer's
own `jax.checkpoint` is kept: what it saves is saved, except the gathered parameters, which are
gathered again.

The user's model is not changed and needs no annotation: the gathers are found in the jaxpr, by the
name that `units.collectives.gather` leaves there. A gather that cannot be moved (inside a `while`,
a `cond` or a custom derivative; of parameters that are computed before they are gathered) stays
where it is and is named in `PrefetchReport.not_prefetched`.

`pre` gathers unit i-1 as the backward pass of unit i begins: one more gathered unit is in memory
than without prefetch. `post` gathers it when that pass has ended, while the gradients of unit i are
reduced: this needs no more memory, and there is less compute to hide behind. The names are those of
PyTorch's BackwardPrefetch.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import jax
import jax.extend.core as jex
from jax import lax

from fsdp_jax.compat import scan_arguments
from fsdp_jax.prefetch.gather_sites import (
    ends_of,
    evaluate_unchanged,
    inner_jaxprs,
    inputs_of,
    is_checkpoint,
    is_transparent,
    movable_gathers,
    paths_in,
    reads,
    scope_of,
    sites_of,
    values_of,
    without_cotangent,
)
from fsdp_jax.prefetch.layer_scan import LayerScan
from fsdp_jax.prefetch.unit_chain import Stage, UnitChain
from fsdp_jax.prefetch.vjp import Arrays, GatherInputs, gather_after_layers, is_float
from fsdp_jax.units.collectives import ParamComm, gather, site_of

Prefetch = Literal["none", "post", "pre"]


class _Env(dict[Any, Any]):
    """Values of variables.

    `without_cotangent`: the variables that no differentiated output depends on. A custom derivative
    is given zeros for these, and zero times an infinite derivative is not zero.
    """

    without_cotangent: Set[Any] = frozenset()


@dataclass
class PrefetchReport:
    """What was done with the gathers of a traced function.

    Attributes:
        prefetched: paths of the parameters that are gathered ahead.
        not_prefetched: path -> reason, of the parameters in units that are gathered where they are
            used.

    """

    prefetched: set[str] = field(default_factory=set)
    not_prefetched: dict[str, str] = field(default_factory=dict)


def prefetched(
    fn: Callable[..., Any], comms: Mapping[str, ParamComm], when: Prefetch, report: PrefetchReport
) -> Callable[..., Any]:
    """Returns `fn` with the same arguments and results, its units gathered ahead of their use.

    Args:
        fn: a pure function of pytrees of arrays that gathers parameters by `gather`. Of its results
            only the first array may be differentiated.
        comms: path -> how that parameter is communicated.
        when: `post` or `pre`; see the note.
        report: filled when the result is traced.

    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        rewriter = _Rewriter(comms, when == "pre", report)
        inputs = [*closed.consts, *jax.tree.leaves(args)]
        differentiated = [number == 0 for number in range(len(closed.jaxpr.outvars))]
        outputs = rewriter.evaluate(closed.jaxpr, inputs, None, differentiated)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return run


@dataclass(frozen=True)
class _Rewriter:
    """Evaluates a jaxpr with its layers gathered ahead.

    Its methods take `gathered`: inside a layer, the gathered parameters by path, which replace the
    layer's own gathers; None outside, where layers are still to be found.
    """

    comms: Mapping[str, ParamComm]
    pre: bool
    report: PrefetchReport

    def evaluate(
        self,
        jaxpr: jex.Jaxpr,
        args: Sequence[Any],
        gathered: Arrays | None,
        differentiated: Sequence[bool] | None = None,
    ) -> list[Any]:
        """Returns the outputs of a jaxpr, given its constants and arguments.

        `differentiated`: of each output, whether it may have a cotangent; all may by default.
        """
        env = _Env(zip(inputs_of(jaxpr), args, strict=True))
        if differentiated is not None:
            env.without_cotangent = without_cotangent(jaxpr, differentiated)
        if gathered is not None:
            self.run(jaxpr, jaxpr.eqns, env, gathered)
            return values_of(env, jaxpr.outvars)
        remaining = list(jaxpr.eqns)
        chains = {id(chain.units[0]): chain for chain in _chains(jaxpr)}
        while True:
            # The next layers: a chain of units, or a scan over layers.
            starts = (
                number
                for number, eqn in enumerate(remaining)
                if id(eqn) in chains or self._is_layer_scan(eqn)
            )
            start = next(starts, None)
            if start is None:
                break
            chain = chains.get(id(remaining[start]))
            end = start if chain is None else _position(remaining, chain.units[-1])
            before, layers = remaining[:start], remaining[start : end + 1]
            remaining = remaining[end + 1 :]
            # The equations before them, except gathers that are needed only after them.
            late = _late_gathers(before, layers, remaining)
            now = [eqn for eqn in before if all(eqn is not each for each in late)]
            self.run(jaxpr, now, env, None)
            if chain is None:
                self.run(jaxpr, layers, env, None)
            else:
                self.run(jaxpr, chain.independent, env, None)
                chain.run(self, env)
            self._run_late_gathers(late, layers, env)
        self.run(jaxpr, remaining, env, None)
        return values_of(env, jaxpr.outvars)

    def run(
        self, jaxpr: jex.Jaxpr, eqns: Sequence[jex.JaxprEqn], env: _Env, gathered: Arrays | None
    ) -> None:
        """Evaluates some equations of a jaxpr: those that gather one by one, the others in runs."""
        for gathers, group in groupby(eqns, key=lambda eqn: bool(paths_in(eqn))):
            if not gathers:
                evaluate_unchanged(jaxpr, list(group), env)
                continue
            for eqn in group:
                if site_of(eqn) or is_transparent(eqn) or eqn.primitive.name == "scan":
                    differentiated = [v not in env.without_cotangent for v in eqn.outvars]
                    args = values_of(env, eqn.invars)
                    values = self._gathering_eqn(eqn, args, gathered, differentiated)
                    env.update(zip(eqn.outvars, values, strict=True))
                else:
                    reason = f"it is gathered inside a `{eqn.primitive.name}`"
                    self.report.not_prefetched |= dict.fromkeys(paths_in(eqn), reason)
                    evaluate_unchanged(jaxpr, [eqn], env)

    def _gathering_eqn(
        self,
        eqn: jex.JaxprEqn,
        args: list[Any],
        gathered: Arrays | None,
        differentiated: Sequence[bool],
    ) -> Sequence[Any]:
        """Evaluates an equation that is a gather, or has some inside."""
        path = site_of(eqn)
        if path:
            if gathered and path in gathered:
                return [gathered[path]]
            if gathered is None and self.comms[path].unit:
                reason = "no other unit is run just before or after its own"
                self.report.not_prefetched.setdefault(path, reason)
            return [gather(self.comms[path], *args)]
        if not is_transparent(eqn):
            assert gathered is None, "a layer's own gathers are all moved out of it"
            assert eqn.primitive.name == "scan", eqn.primitive
            return self._scan(eqn, args, differentiated)
        (inner,) = inner_jaxprs(eqn)
        consts = getattr(eqn.params.get("jaxpr"), "consts", ())

        def call(args: list[Any], gathered: Arrays | None) -> list[Any]:
            return self.evaluate(inner, [*consts, *args], gathered, differentiated)

        with scope_of(eqn):
            if not is_checkpoint(eqn):
                return call(args, gathered)
            settings = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
            return jax.checkpoint(call, **settings)(args, gathered)

    def _is_layer_scan(self, eqn: jex.JaxprEqn) -> bool:
        return (
            eqn.primitive.name == "scan"
            and bool(paths_in(eqn))
            and _ScanEqn(self, eqn).is_over_layers
        )

    def _scan(
        self, eqn: jex.JaxprEqn, args: list[Any], differentiated: Sequence[bool]
    ) -> Sequence[Any]:
        """Evaluates a scan over layers; or over something else, with layers somewhere inside."""
        scan = _ScanEqn(self, eqn)
        if scan.is_over_layers:
            self.report.prefetched |= set(scan.sites)
            return scan.run(args, differentiated)
        consts, carry, xs = scan_arguments(eqn.params, args)
        n_carry = len(carry)

        def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            closed = eqn.params["jaxpr"]
            outputs = self.evaluate(closed.jaxpr, [*closed.consts, *consts, *carry, *x], None)
            return outputs[:n_carry], outputs[n_carry:]

        settings = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(body, carry, xs, **settings)
        return [*carry, *ys]

    def _run_late_gathers(
        self, gathers: Sequence[jex.JaxprEqn], layers: Sequence[jex.JaxprEqn], env: _Env
    ) -> None:
        """Gathers after some layers; reduces the gradients before the layers' backward pass."""
        if not gathers:
            return
        outputs = [v for eqn in layers for v in eqn.outvars if v in env and is_float(env[v])]
        if not outputs:
            for eqn in gathers:
                args = values_of(env, eqn.invars)
                env[eqn.outvars[0]] = gather(self.comms[str(site_of(eqn))], *args)
            return
        inputs = _gather_inputs({str(site_of(eqn)): values_of(env, eqn.invars) for eqn in gathers})
        values = [env[v] for v in outputs]
        values, gathered = gather_after_layers(self.comms, inputs, values)
        env.update(zip(outputs, values, strict=True))
        env.update((eqn.outvars[0], gathered[str(site_of(eqn))]) for eqn in gathers)


def _gather_inputs(operands: Mapping[str, Sequence[Any]]) -> GatherInputs:
    """Returns operands of gathers: path -> shard, and path -> slot where there is one."""
    shards = {path: args[0] for path, args in operands.items()}
    return GatherInputs(shards, {path: args[1] for path, args in operands.items() if len(args) > 1})


def _position(eqns: Sequence[jex.JaxprEqn], eqn: jex.JaxprEqn) -> int:
    return next(number for number, each in enumerate(eqns) if each is eqn)


def _differentiated(outputs: Sequence[Any], differentiated: Sequence[bool]) -> list[Any]:
    """Returns the outputs of a layer; those that have no cotangent are not differentiated."""
    pairs = zip(outputs, differentiated, strict=True)
    return [x if has_cotangent else lax.stop_gradient(x) for x, has_cotangent in pairs]


def _late_gathers(
    before: Sequence[jex.JaxprEqn], layers: Sequence[jex.JaxprEqn], later: Sequence[jex.JaxprEqn]
) -> list[jex.JaxprEqn]:
    """Returns the gathers before some layers that are needed only after them, as the head's."""
    read_before = {v for eqn in [*before, *layers] for v in reads(eqn)}
    read_later = {v for eqn in later for v in reads(eqn)}
    return [
        eqn
        for eqn in before
        if site_of(eqn) and eqn.outvars[0] in read_later and eqn.outvars[0] not in read_before
    ]


class _ScanEqn:
    """A `scan` equation that may be a scan over layers.

    Attributes:
        is_over_layers: whether each iteration gathers parameters from its own slices alone.
        sites: path -> numbers of the sliced arguments that it is gathered from.

    """

    def __init__(self, rewriter: _Rewriter, eqn: jex.JaxprEqn) -> None:
        self.rewriter, self.eqn, self.body = rewriter, eqn, eqn.params["jaxpr"]
        movable = movable_gathers(self.body.jaxpr)
        consts, carry, _ = scan_arguments(eqn.params, eqn.invars)
        offset = len(self.body.jaxpr.constvars) + len(consts) + len(carry)
        self.sites = {
            path: tuple(number - offset for number in numbers)
            for path, numbers in (movable or {}).items()
        }
        sliced = all(number >= 0 for numbers in self.sites.values() for number in numbers)
        self.is_over_layers = movable is not None and sliced and eqn.params["length"] > 1

    def run(self, args: list[Any], differentiated: Sequence[bool]) -> list[Any]:
        """Returns the outputs of the equation."""
        params = self.eqn.params
        consts, carry, xs = scan_arguments(params, args)
        consts = [*self.body.consts, *consts]
        gathered_from = {number for numbers in self.sites.values() for number in numbers}
        others = [number for number in range(len(xs)) if number not in gathered_from]
        n_shared = len(consts) + len(carry)

        def layer(gathered: Arrays, inputs: list[Any]) -> list[Any]:
            # Shards stay None: what is gathered from them is given.
            slices: list[Any] = [None] * len(xs)
            for number, x in zip(others, inputs[n_shared:], strict=True):
                slices[number] = x
            inputs = [*inputs[:n_shared], *slices]
            outputs = self.rewriter.evaluate(self.body.jaxpr, inputs, gathered)
            passed_on = [True] * len(carry)
            return _differentiated(outputs, [*passed_on, *differentiated[len(carry) :]])

        scan = LayerScan(
            layer=layer,
            comms=self.rewriter.comms,
            length=params["length"],
            carried=len(carry),
            reverse=params["reverse"],
            unroll=params["unroll"],
            pre=self.rewriter.pre,
        )
        operands = {path: [xs[n] for n in numbers] for path, numbers in self.sites.items()}
        inputs = _gather_inputs(operands)
        carry, ys = scan.run(inputs, consts, carry, [xs[number] for number in others])
        return [*carry, *ys]


class _Chain:
    """Units one after another in one jaxpr: the layers of a model that keeps them in a list.

    Equations between two units belong to the stage of the second, unless they read nothing that the
    chain computes: those run before it.

    Attributes:
        units: the equations that run the units.
        stages: the equations of each stage; the unit is the last.
        independent: equations that run before the chain.
        results: variables of the chain that later equations read.

    """

    def __init__(self, jaxpr: jex.Jaxpr, units: Sequence[jex.JaxprEqn]) -> None:
        self.jaxpr, self.units = jaxpr, units
        self.independent: list[jex.JaxprEqn] = []
        self.stages: list[list[jex.JaxprEqn]] = [[]]
        start, end = _position(jaxpr.eqns, units[0]), _position(jaxpr.eqns, units[-1])
        computed: set[Any] = set()
        for eqn in jaxpr.eqns[start : end + 1]:
            is_unit = any(eqn is unit for unit in units)
            if not is_unit and computed.isdisjoint(reads(eqn)):
                self.independent.append(eqn)
                continue
            computed.update(eqn.outvars)
            self.stages[-1].append(eqn)
            if is_unit and eqn is not units[-1]:
                self.stages.append([])
        read_later = [v for eqn in jaxpr.eqns[end + 1 :] for v in eqn.invars]
        later = [v for v in [*read_later, *jaxpr.outvars] if not isinstance(v, jex.Literal)]
        self.results = [v for v in dict.fromkeys(later) if v in computed]

    def run(self, rewriter: _Rewriter, env: _Env) -> None:
        """Evaluates the chain, whose independent equations have run; adds its results to `env`."""
        report = rewriter.report
        numbers: dict[Any, int] = {}  # of the values that pass between stages

        def numbered(variables: Sequence[Any]) -> list[int]:
            return [numbers.setdefault(v, len(numbers)) for v in variables]

        stages: list[Stage] = []
        inputs: list[GatherInputs] = []
        needed = set(self.results)
        for eqns, unit in reversed(list(zip(self.stages, self.units, strict=True))):
            sites = {
                path: [unit.invars[number] for number in positions]
                for path, positions in sites_of(unit).items()
            }
            if all(v in env for variables in sites.values() for v in variables):
                report.prefetched |= set(sites)
            else:  # gathered from what an earlier unit computes
                reason = "it is computed between the units"
                report.not_prefetched |= dict.fromkeys(sites, reason)
                sites = {}
            read, defined = ends_of(eqns)
            gathered_from = {v for variables in sites.values() for v in variables}
            ins = [v for v in read if v not in gathered_from]
            outs = [v for v in defined if v in needed]
            needed |= set(ins)
            layer = self._layer(rewriter, eqns, ins, outs, env.without_cotangent)
            stages.append(Stage(layer, numbered(ins), numbered(outs)))
            operands = {path: [env[v] for v in variables] for path, variables in sites.items()}
            inputs.append(_gather_inputs(operands))
        chain = UnitChain(stages[::-1], rewriter.comms, numbered(self.results), rewriter.pre)
        external = {number: env[v] for v, number in numbers.items() if v in env}
        env.update(zip(self.results, chain.run(inputs[::-1], external), strict=True))

    def _layer(
        self,
        rewriter: _Rewriter,
        eqns: list[jex.JaxprEqn],
        ins: list[Any],
        outs: list[Any],
        without_cotangent: Set[Any],
    ) -> Callable[[Arrays, list[Any]], list[Any]]:
        def layer(gathered: Arrays, inputs: list[Any]) -> list[Any]:
            env = _WithoutShards(zip(ins, inputs, strict=True))
            rewriter.run(self.jaxpr, eqns, env, gathered)
            return _differentiated(values_of(env, outs), [v not in without_cotangent for v in outs])

        return layer


class _WithoutShards(_Env):
    """Variables of a stage; its shards read as None, since what is gathered from them is given."""

    def __missing__(self, variable: Any) -> None:
        return None


def _chains(jaxpr: jex.Jaxpr) -> list[_Chain]:
    """Returns the runs of two units or more with no other gather between them."""
    runs: list[list[jex.JaxprEqn]] = [[]]
    for eqn in jaxpr.eqns:
        if not paths_in(eqn):
            continue
        sites = {} if site_of(eqn) or not is_transparent(eqn) else sites_of(eqn)
        if sites and all(number >= 0 for numbers in sites.values() for number in numbers):
            runs[-1].append(eqn)
        else:
            runs.append([])
    return [_Chain(jaxpr, run) for run in runs if len(run) > 1]
