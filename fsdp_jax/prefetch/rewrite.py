"""Prefetch: gathers the next unit while the current one computes.

In the backward pass it also reduces the gradients of the previous unit meanwhile.

[Note: by construction] Inside a scan, XLA cannot move a gather out of its iteration. So the forward
pass is traced, the layers in it are found (the body of a layer scan, or one unit after another),
and the program is evaluated again in another order: layer i receives its gathered parameters as an
argument and, while it computes, gathers those of layer i+1. A custom VJP does the same in the
backward pass, where it also reduces the gradients of layer i+1 while layer i computes. Each layer's
own `jax.checkpoint` is kept. It saves the same arrays, except the gathered parameters, which are
gathered again (but those of the last layer with `pre`).

Where XLA inserts the collectives, gradients can wait for the next iteration only with `pre` in a
layer scan (`partial_sums`); elsewhere they are reduced as they are computed.

The user's model is not changed and needs no annotation: each gather is one equation of the jaxpr. A
gather that cannot be moved (inside a `while`, a `cond` or a custom derivative; of parameters that
are computed before they are gathered) stays where it is and is named in
`PrefetchReport.not_prefetched`.

`pre` gathers unit i-1 as the backward pass of unit i begins: memory holds one more gathered unit
than without prefetch. `post` gathers it when that pass has ended, while the gradients of unit i are
reduced: this needs no more memory, but less compute is available to hide the gather. The names are
those of PyTorch's BackwardPrefetch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from typing import Any, Literal, get_args

import jax
import jax.extend.core as jex
from jax import lax

from fsdp_jax.errors import ArgumentError, did_you_mean
from fsdp_jax.prefetch.layer_scan import LayerScan
from fsdp_jax.prefetch.unit_chain import Stage, UnitChain
from fsdp_jax.prefetch.vjp import Arrays, gather_after_layers, is_float, is_traced
from fsdp_jax.program.equations import (
    body_of,
    differentiated_carry,
    eqns_inside,
    free_and_defined,
    inputs_of,
    is_transparent,
    named_scope_of,
    notes_of,
    own_comm,
    reads,
    scan_arguments,
    split_scan,
    trips_of,
    values_of,
    without_cotangent,
    without_literals,
)
from fsdp_jax.program.evaluate import evaluate_inside, evaluate_unchanged, reevaluated
from fsdp_jax.program.primitives import SCAN, primitive_of
from fsdp_jax.units.collectives import gather_results, path_of_gather, path_of_movable
from fsdp_jax.units.comm import ParamComm

Prefetch = Literal["auto", "none", "post", "pre"]
"""`auto`: as the step chooses for its platform; see `step.xla_options.prefetches_by_default`."""
Eqns = Sequence[jex.JaxprEqn]


class _Env(dict[Any, Any]):
    """Values of variables.

    `without_cotangent`: the variables that receive no cotangent. JAX gives a custom derivative
    zeros for these, and zero times an infinite derivative is not zero.
    """

    without_cotangent: Set[Any] = frozenset()


def check_prefetch(prefetch: Any) -> None:
    """Raises ValueError for an unknown name."""
    if prefetch not in get_args(Prefetch):
        raise ArgumentError(
            f"unknown prefetch '{prefetch}'",
            where="prefetch",
            fix=did_you_mean(str(prefetch), get_args(Prefetch)),
        )


@jax.tree_util.register_static
@dataclass(eq=False)
class PrefetchReport:
    """Reports which gathers of a traced function were moved, by path of the parameter.

    A pytree without arrays, so that a traced function can return it.
    """

    moved: set[str] = field(default_factory=set)  # gathered ahead in one place or more
    # Path -> why it is gathered where it is used; only parameters in units.
    not_prefetched: dict[str, str] = field(default_factory=dict)

    @property
    def prefetched(self) -> set[str]:
        """The paths that are gathered ahead wherever they are used."""
        return self.moved - self.not_prefetched.keys()


def call_prefetched(
    fn: Callable[..., Any], comms: Mapping[str, ParamComm], when: Prefetch, *args: Any
) -> tuple[Any, PrefetchReport]:
    """Calls `fn(*args)` with its units gathered ahead of their use, and reports which were.

    `fn` is a pure function of pytrees of arrays that gathers parameters by `gather`. Only the first
    array of its results may be differentiated, and only by the arrays in its first argument.
    """
    assert when != "auto", "the step has chosen"
    if when == "none" and not any(comm.keeps_some for comm in comms.values()):
        return fn(*args), PrefetchReport()
    report = PrefetchReport()
    leaves, by = len(jax.tree.leaves(args)), len(jax.tree.leaves(args[0]))

    def evaluate(jaxpr: jex.Jaxpr, values: list[Any]) -> list[Any]:
        first = len(values) - leaves  # of the arguments, after the constants
        fixed = {id(x): x for x in (*values[:first], *values[first + by :])}
        rewriter = _Rewriter(comms, when, report, fixed)
        differentiated = [number == 0 for number in range(len(jaxpr.outvars))]
        return rewriter.evaluate(jaxpr, values, None, differentiated)

    results = reevaluated(fn, evaluate)(*args)
    return results, PrefetchReport() if when == "none" else report


@dataclass(frozen=True)
class _Rewriter:
    """Evaluates a jaxpr with its layers gathered ahead.

    The argument `gathered` of its methods is, inside a layer, the gathered parameters by path,
    which replace the layer's own gathers; outside, where layers are still to be found, it is None.
    """

    comms: Mapping[str, ParamComm]
    when: Literal["none", "post", "pre"]
    report: PrefetchReport
    fixed: Mapping[int, Any]  # inputs that are not differentiated, by their ids
    in_scan: bool = False  # of something else than layers, which has layers inside

    @property
    def pre(self) -> bool:
        """Whether the next unit is gathered while the current one computes."""
        return self.when == "pre"

    @property
    def keep_last(self) -> bool:
        """Whether the last unit's gathered parameters are kept for the backward pass.

        A scan around the units would keep them for each of its iterations.
        """
        return self.pre and not self.in_scan

    def _comms_of(self, *operands: Mapping[str, Sequence[Any]]) -> dict[str, ParamComm]:
        """Finds the communication of parameters, given the arrays that they are gathered from.

        An array that the model computed, and put in the place of a frozen parameter, has a gradient
        all the same, as where LoRA's matrices are merged into a kernel.
        """
        comms = dict(self.comms)
        for path, values in chain.from_iterable(each.items() for each in operands):
            if not all(id(x) in self.fixed for x in values) and is_float(values[0]):
                comms[path] = replace(comms[path], trained=True)
        return comms

    def evaluate(
        self,
        jaxpr: jex.Jaxpr,
        args: Sequence[Any],
        gathered: Arrays | None,
        differentiated: Sequence[bool] | None = None,
    ) -> list[Any]:
        """Computes the outputs of a jaxpr, given its constants and arguments.

        `differentiated`: for each output, whether it may have a cotangent; by default all may.
        """
        env = _Env(zip(inputs_of(jaxpr), args, strict=True))
        if differentiated is not None:
            env.without_cotangent = without_cotangent(jaxpr, differentiated)
        remaining = list(jaxpr.eqns)
        moves = gathered is None and self.when != "none"
        for layers in _find_layers(jaxpr) if moves else ():
            start, end = remaining.index(layers[0]), remaining.index(layers[-1]) + 1
            before, eqns, remaining = remaining[:start], remaining[start:end], remaining[end:]
            # The equations before them, except gathers that are needed only after them.
            late = _late_gathers(before, eqns, remaining, _models(layers))
            self.evaluate_eqns(jaxpr, [eqn for eqn in before if eqn not in late], env, None)
            if len(layers) > 1:
                self._run_chain(jaxpr, eqns, layers, remaining, env)
            else:
                self.evaluate_eqns(jaxpr, layers, env, None)
            if late:
                self._gather_late(late, eqns, env)
        self.evaluate_eqns(jaxpr, remaining, env, gathered)
        return values_of(env, jaxpr.outvars)

    def evaluate_eqns(
        self, jaxpr: jex.Jaxpr, eqns: Eqns, env: _Env, gathered: Arrays | None
    ) -> None:
        """Evaluates some equations of a jaxpr, and adds their results to `env`.

        Equations that gather are evaluated one by one, the others together, as they were traced.
        """
        for gathers, group in groupby(eqns, key=lambda eqn: bool(_gathered_paths(eqn))):
            if not gathers:
                unmoved = list(group)
                reason = "it is computed before it is gathered, or mapped over by `vmap`"
                for path in _paths(unmoved, path_of_gather):
                    self.report.not_prefetched.setdefault(path, reason)
                evaluate_unchanged(jaxpr, unmoved, env)
                continue
            for eqn in group:
                if path_of_movable(eqn) or is_transparent(eqn) or primitive_of(eqn) is SCAN:
                    values = self._gathering_eqn(eqn, env, gathered)
                    env.update(zip(eqn.outvars, values, strict=True))
                else:
                    reason = f"it is gathered inside a `{primitive_of(eqn).name}`"
                    self.report.not_prefetched |= dict.fromkeys(_gathered_paths(eqn), reason)
                    evaluate_unchanged(jaxpr, [eqn], env)

    def _gathering_eqn(
        self, eqn: jex.JaxprEqn, env: _Env, gathered: Arrays | None
    ) -> Sequence[Any]:
        """Computes the results of an equation that is a gather, or has gathers inside."""
        args = values_of(env, eqn.invars)
        path = path_of_movable(eqn)
        if path:
            if gathered and path in gathered:
                return gathered[path]
            if gathered is None and self.comms[path].unit:
                reason = "no other unit is run just before or after its own"
                self.report.not_prefetched.setdefault(path, reason)
            return gather_results(self.comms[path], *args)
        differentiated = [v not in env.without_cotangent for v in eqn.outvars]
        if primitive_of(eqn) is SCAN:
            assert gathered is None, "a layer's own gathers are all moved out of it"
            return self._scan(eqn, args, differentiated)
        evaluate = partial(self.evaluate, differentiated=differentiated)
        with named_scope_of(eqn):
            return evaluate_inside(eqn, args, evaluate, gathered)

    def _scan(
        self, eqn: jex.JaxprEqn, args: list[Any], differentiated: Sequence[bool]
    ) -> Sequence[Any]:
        """Computes the results of a scan over layers, or of another scan with layers inside.

        Where units are not gathered ahead, a scan that stays whole is among the others.
        """
        carried = differentiated_carry(eqn, differentiated)
        differentiated = [*carried, *differentiated[len(carried) :]]
        sites = _scanned_sites(eqn)
        # It gathers ahead, or runs in parts where only some layers stay gathered.
        comms = [self.comms[path] for path in sites]
        in_parts = any(comm.keeps_some and comm.layers == trips_of(eqn) for comm in comms)
        if not sites or not (in_parts or self.when != "none"):
            inside = replace(self, in_scan=True)
            evaluate = partial(inside.evaluate, gathered=None, differentiated=differentiated)
            return evaluate_inside(eqn, args, evaluate)
        # The stacks that layers gather from, without those that they only slice.
        body, closed_over = body_of(eqn)
        consts, carry, xs = split_scan(eqn, args)
        consts = [*closed_over, *consts]
        constants = {number: x for number, x in enumerate(consts) if not is_traced(x)}
        traced = [x for x in consts if is_traced(x)]
        n_carry, n_shared = len(carry), len(traced) + len(carry)
        self.report.moved |= set(sites)
        gathered_from = {number for numbers in sites.values() for number in numbers}
        slices = inputs_of(body)[len(consts) + n_carry :]
        read = _reads_without_gathers(body)
        others = [n for n, v in enumerate(slices) if n not in gathered_from or v in read]

        def layer(gathered: Arrays, inputs: list[Any]) -> list[Any]:
            # Shards stay None: `gathered` has the results of their gathers.
            slices = dict(zip(others, inputs[n_shared:], strict=True))
            shared = iter(inputs[:n_shared])
            inputs = [constants[n] if n in constants else next(shared) for n in range(len(consts))]
            inputs += [*shared, *(slices.get(number) for number in range(len(xs)))]
            outputs = self.evaluate(body, inputs, gathered)
            return _stop_gradients(outputs, differentiated)

        # The pipeline replaces the scan, with the same arguments.
        operands = {path: [xs[n] for n in numbers] for path, numbers in sites.items()}
        scan = LayerScan(
            layer=layer,
            comms=self._comms_of(operands),
            carried=n_carry,
            when=self.when,
            keep_last=self.keep_last,
            **scan_arguments(eqn),
        )
        carry, ys = scan.run(operands, traced, carry, [xs[number] for number in others])
        return [*carry, *ys]

    def _run_chain(self, jaxpr: jex.Jaxpr, eqns: Eqns, units: Eqns, later: Eqns, env: _Env) -> None:
        """Evaluates units one after another: the layers of a model that keeps them in a list.

        `eqns` are those from the first of the `units` to the last. `later` are those after the
        chain, which read its results; these results are added to `env`.
        """
        # Equations that read nothing of the chain run first; the others make a stage for each unit.
        independent, stages = _split_stages(eqns, units)
        self.evaluate_eqns(jaxpr, independent, env, None)
        # Results of the chain are the values that later equations read.
        computed = {v for stage in stages for eqn in stage for v in eqn.outvars}
        read_later = [v for eqn in later for v in reads(eqn)]
        read_later += without_literals(jaxpr.outvars)
        results = [v for v in dict.fromkeys(read_later) if v in computed]
        numbers: dict[Any, int] = {}  # of the values that pass between stages

        def numbered(variables: Sequence[Any]) -> list[int]:
            return [numbers.setdefault(v, len(numbers)) for v in variables]

        # From the last stage to the first, because a stage returns the values that later stages
        # need.
        units_run: list[Stage] = []
        needed = set(results)
        for stage in reversed(stages):
            unit = stage[-1]
            sites = {
                path: [unit.invars[number] for number in positions]
                for path, positions in _unit_sites(unit).items()
            }
            if all(v in env for variables in sites.values() for v in variables):
                self.report.moved |= set(sites)
            else:  # gathered from what an earlier unit computes
                reason = "it is computed between the units"
                self.report.not_prefetched |= dict.fromkeys(sites, reason)
                sites = {}
            # Inputs and outputs of the stage; the pipeline gives it the gathered parameters.
            read, defined = free_and_defined(stage)
            gathered_from = {v for variables in sites.values() for v in variables}
            gathered_from -= _reads_without_gathers(jaxpr.replace(eqns=stage, outvars=[]))
            ins = [v for v in read if v not in gathered_from]
            constants = {v: env[v] for v in ins if v in env and not is_traced(env[v])}
            ins = [v for v in ins if v not in constants]
            outs = [v for v in defined if v in needed]
            needed |= set(ins)
            layer = partial(
                self._run_stage, jaxpr, stage, ins, outs, constants, env.without_cotangent
            )
            operands = {path: [env[v] for v in variables] for path, variables in sites.items()}
            units_run.append(Stage(layer, operands, numbered(ins), numbered(outs)))
        # Run the pipeline, on values from before the chain.
        comms = self._comms_of(*(stage.operands for stage in units_run))
        unit_chain = UnitChain(units_run[::-1], comms, numbered(results), self.pre, self.keep_last)
        external = {number: env[v] for v, number in numbers.items() if v in env}
        env.update(zip(results, unit_chain.run(external), strict=True))

    def _run_stage(
        self,
        jaxpr: jex.Jaxpr,
        eqns: Eqns,
        ins: list[Any],
        outs: list[Any],
        constants: dict[Any, Any],
        without_cotangent: Set[Any],
        gathered: Arrays,
        inputs: list[Any],
    ) -> list[Any]:
        """Computes the values of `outs`, given those of `ins` and the gathered parameters.

        `eqns`: of one stage of a chain; `inputs`: the values of `ins`; `constants`: of the program.
        """
        # Shards stay None: `gathered` has the results of their gathers.
        env = _Env(dict.fromkeys(free_and_defined(eqns)[0]))
        env.update(constants)
        env.update(zip(ins, inputs, strict=True))
        self.evaluate_eqns(jaxpr, eqns, env, gathered)
        return _stop_gradients(values_of(env, outs), [v not in without_cotangent for v in outs])

    def _gather_late(self, gathers: Eqns, layers: Eqns, env: _Env) -> None:
        """Adds to `env` parameters that are gathered only after some layers have run.

        In the backward pass their gradients are reduced before that of the layers begins.
        """
        outputs = [
            v
            for eqn in layers
            for v in eqn.outvars
            if v in env and is_float(env[v]) and v not in env.without_cotangent
        ]
        operands = {str(path_of_movable(eqn)): values_of(env, eqn.invars) for eqn in gathers}
        comms = self._comms_of(operands)
        values, gathered = gather_after_layers(comms, operands, [env[v] for v in outputs])
        env.update(zip(outputs, values, strict=True))
        for eqn in gathers:
            env.update(zip(eqn.outvars, gathered[str(path_of_movable(eqn))], strict=True))


def _gathered_paths(eqn: jex.JaxprEqn) -> list[str]:
    """Lists the paths of the parameters that an equation gathers, itself or inside, in order."""
    return _paths([eqn], path_of_movable)


def _paths(eqns: Eqns, path_of: Callable[[jex.JaxprEqn], str | None]) -> list[str]:
    """Lists the paths that `path_of` finds in equations and inside them, in order."""
    found = (path_of(each) for eqn in eqns for each in (eqn, *eqns_inside(eqn)))
    return list(dict.fromkeys(path for path in found if path))


def _unit_sites(eqn: jex.JaxprEqn) -> dict[str, tuple[int, ...]]:
    """Finds {path: numbers of the arguments that a unit gathers it from}; empty for no unit."""
    if path_of_movable(eqn) or not is_transparent(eqn):
        return {}
    inner, _ = body_of(eqn)
    return _movable_gathers(inner, len(inputs_of(inner)) - len(eqn.invars))


def _scanned_sites(eqn: jex.JaxprEqn) -> dict[str, tuple[int, ...]]:
    """Finds {path: numbers of the sliced arguments that a scan over layers gathers it from}.

    Empty for other equations: an iteration over layers gathers only from its own slices.
    """
    if primitive_of(eqn) is not SCAN or trips_of(eqn) < 2:
        return {}
    body, _ = body_of(eqn)
    consts, carry, _ = split_scan(eqn, eqn.invars)
    return _movable_gathers(body, len(body.constvars) + len(consts) + len(carry))


def _movable_gathers(jaxpr: jex.Jaxpr, first: int) -> dict[str, tuple[int, ...]]:
    """Finds {path: numbers of the inputs that it is gathered from, counted from `first`}.

    Empty if a gather cannot be moved out: it is inside control flow, reads an intermediate result
    or an earlier input, or gathers the same parameter from two inputs.
    """
    sites: dict[str, tuple[int, ...]] = {}

    def visit(jaxpr: jex.Jaxpr, numbers: dict[Any, int]) -> bool:
        """Fills `sites`; returns whether all can be moved out. `numbers`: {variable: input}."""
        for eqn in jaxpr.eqns:
            if not _gathered_paths(eqn):
                continue
            # A gather may be moved if it reads only inputs of the program.
            sources = notes_of(numbers, eqn.invars)
            path = path_of_movable(eqn)
            if path:
                known = tuple(number for number in sources if number is not None)
                if len(known) < len(sources) or sites.setdefault(path, known) != known:
                    return False
            elif is_transparent(eqn):
                inner, _ = body_of(eqn)
                arguments = inputs_of(inner)[-len(sources) :]
                pairs = zip(arguments, sources, strict=True)
                if not visit(inner, {v: number for v, number in pairs if number is not None}):
                    return False
            else:
                return False
        return True

    inputs = inputs_of(jaxpr)[first:]
    return sites if visit(jaxpr, {v: number for number, v in enumerate(inputs)}) else {}


def _reads_without_gathers(jaxpr: jex.Jaxpr) -> set[Any]:
    """Finds the variables of a jaxpr that are read by anything but gathers, or returned.

    A layer may compute with a parameter that it gathers too, as a penalty on it does.
    """
    found = set(without_literals(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        if path_of_movable(eqn):
            continue
        if not (is_transparent(eqn) and _gathered_paths(eqn)):
            found.update(reads(eqn))
            continue
        inner, _ = body_of(eqn)
        read = _reads_without_gathers(inner)
        arguments = zip(inputs_of(inner)[-len(eqn.invars) :], eqn.invars, strict=True)
        found.update(without_literals([v for argument, v in arguments if argument in read]))
    return found


def _find_layers(jaxpr: jex.Jaxpr) -> Iterator[list[jex.JaxprEqn]]:
    """Yields the equations that are layers: a scan over them, or the units of a chain.

    They come in the order of the program. A chain is two or more units of one model with no other
    gather between.
    """
    gathering = filter(_gathered_paths, jaxpr.eqns)
    for (are_units, _), group in groupby(
        gathering, key=lambda eqn: (bool(_unit_sites(eqn)), _models([eqn]))
    ):
        eqns = list(group)
        if not are_units:
            yield from ([eqn] for eqn in eqns if _scanned_sites(eqn))
        elif len(eqns) > 1:
            yield eqns


def _models(eqns: Eqns) -> frozenset[str]:
    """Finds the models whose parameters equations gather, inside or themselves: their names."""
    gathers = (each for eqn in eqns for each in (eqn, *eqns_inside(eqn)) if path_of_movable(each))
    return frozenset(own_comm(each).model for each in gathers)


def _late_gathers(before: Eqns, layers: Eqns, later: Eqns, models: Set[str]) -> list[jex.JaxprEqn]:
    """Finds gathers before some layers that are read only after them, such as the head's.

    `models`: names of those that the layers are of. A gather of another model is not tied to them.
    """
    read_before = {v for eqn in [*before, *layers] for v in reads(eqn)}
    read_later = {v for eqn in later for v in reads(eqn)}
    return [
        eqn
        for eqn in before
        if path_of_movable(eqn)
        and own_comm(eqn).model in models
        and not read_later.isdisjoint(eqn.outvars)
        and read_before.isdisjoint(eqn.outvars)
    ]


def _split_stages(eqns: Eqns, units: Eqns) -> tuple[list[jex.JaxprEqn], list[list[jex.JaxprEqn]]]:
    """Splits a chain: (equations that run before it, those of each stage, each ending with a unit).

    Equations between two units belong to the stage of the second. If they read nothing that the
    chain computes, they run before it.
    """
    independent: list[jex.JaxprEqn] = []
    stages: list[list[jex.JaxprEqn]] = [[]]
    computed: set[Any] = set()
    for eqn in eqns:
        if eqn not in units and computed.isdisjoint(reads(eqn)):
            independent.append(eqn)
            continue
        computed.update(eqn.outvars)
        stages[-1].append(eqn)
        if eqn in units[:-1]:
            stages.append([])
    return independent, stages


def _stop_gradients(outputs: Sequence[Any], differentiated: Sequence[bool]) -> list[Any]:
    """Applies `stop_gradient` to the outputs of a layer that are not differentiated."""
    pairs = zip(outputs, differentiated, strict=True)
    return [x if has_cotangent else lax.stop_gradient(x) for x, has_cotangent in pairs]
