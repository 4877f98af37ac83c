"""Runs one case of fuzz_steps.py: by the library, and by the control; compares the two."""

import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fuzz_steps_cases import EXACT, FLOAT8, Case, Setting
from fuzz_steps_control import LOSS_SCALE, Control, by_name
from fuzz_steps_models import (
    Batch,
    Block,
    LinenBlock,
    example,
    make_batch,
    make_loss,
    make_model,
    make_optimizer,
)
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import CheckpointStore
from fsdp_jax.errors import ArgumentError
from fsdp_jax.lora import with_lora

TOLERANCE = 1e-5  # of the largest value of an array, and of at least `LEAST`
LEAST = 1e-2
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "output": {"output": "bfloat16"},
    "frozen-bfloat16": {"frozen": "bfloat16"},
    "bfloat16": {"compute": "bfloat16"},
    "float16": {"compute": "float16", "loss_scale": LOSS_SCALE},
    "params-bfloat16": {"param": "bfloat16", "compute": "bfloat16"},
    "stochastic": {"param": "bfloat16", "stochastic_rounding": True},
    "reduce-float32": {"compute": "bfloat16", "reduce": "float32"},
    "reduce-bfloat16": {"reduce": "bfloat16"},
    "float8": {"gather": "float8_e4m3fn"},
    "float8-matmuls": {"gather": "float8_e4m3fn", "matmul": "float8"},
    "int8": {"scatter": "int8"},
}  # fmt: skip


@dataclass(frozen=True)
class Low:
    """Tolerances of a precision: of losses and norms, and of the change of a parameter."""

    loss: float  # of the loss
    change: float  # of the norm of the change
    bits: float = 0.0  # of the largest value of a parameter that is stored in fewer bits, a step


LOW = {
    "output": Low(1e-2, 0.1),
    "bfloat16": Low(2e-2, 0.25),  # positions under Adam: 0.21 on 3 devices, 0.07 on 1
    "float16": Low(5e-3, 0.03),
    "params-bfloat16": Low(2e-2, 0.15, 2**-7),
    "stochastic": Low(2e-2, 0.1, 2**-7),
    "reduce-float32": Low(2e-2, 0.15),
    "reduce-bfloat16": Low(2e-3, 0.05),
    "float8": Low(2e-2, 0.15),
    "float8-matmuls": Low(2e-2, 0.15),
    # Adam divides by an element's size, so the small elements of a block show its rounding: 0.12
    # was seen where SGD's change is off by 0.02.
    "int8": Low(2e-3, 0.15),
}


@dataclass
class Result:
    """What became of a case.

    Attributes:
        outcome: equal, refused, different, or raised.
        worst: the largest difference over its tolerance, and where it is.
        float32: the largest difference itself, relative, where float32 is compared.
        text: the refusal, the traceback, or the differences.

    """

    outcome: str
    worst: float = 0.0
    where: str = ""
    float32: float = 0.0
    text: str = ""
    seconds: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)


def run_case(case: Case) -> Result:
    """Runs a case; never raises."""
    started = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = _compared(case)
    except _RefusedError as error:
        result = Result("refused", text=str(error.__cause__))
    except Exception:
        result = Result("raised", text=traceback.format_exc())
    result.seconds = time.process_time() - started
    return result


class _RefusedError(Exception):
    """The library refuses a combination of settings, with a ValueError of its own."""


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except ArgumentError as error:
        raise _RefusedError from error


# The library


def make_sharded(case: Case, setting: Setting) -> fsdp.Sharded:
    """Lays a case's model out."""
    model, frozen = make_model(case.net), case.frozen
    if case.lora is not None:
        trained = ("^head/",) if case.lora_head else ()
        rank = case.lora
        model = with_lora(model, rank=rank, alpha=1.0, targets=("up$", "down$"), trainable=trained)
        frozen = model.frozen
    remat: Any = setting.remat
    if remat == "every":
        remat = fsdp.RematPolicy("full", every=2)
    if remat == "policy":
        remat = jax.checkpoint_policies.dots_saveable
    block = LinenBlock if case.net.flax == "linen" else Block
    units: Any = setting.units
    if units in ("Block", "name"):
        units = [block if units == "Block" else block.__name__]
    rules: list[Any] = []
    if setting.rule is not None:
        spec = P(None, setting.mesh) if setting.rule == "last" else None
        rules = [("positions$", spec)]
    settings = PRECISIONS[case.precision]
    as_made = case.precision == "float32" and case.seed % 2
    precision = None if as_made else fsdp.Precision(**settings)
    offload: dict[str, Any] = dict.fromkeys(setting.offload, True)
    return fsdp.fully_shard(
        model,
        make_optimizer(case.optimizer, control=False),
        _make_mesh(setting),
        setting.strategy,
        units,
        inputs=(example(case.net),) if case.net.flax == "linen" else None,
        precision=precision,
        remat=remat,
        prefetch=setting.prefetch,  # type: ignore[arg-type]
        offload=fsdp.Offload(**offload),
        loss_spikes=fsdp.LossSpikes() if setting.spikes else None,
        rules=rules,
        min_size=setting.min_size,
        stacked=("^blocks/",) if setting.stacked else None,
        frozen=frozen,
    )


def _make_mesh(setting: Setting) -> jax.sharding.Mesh:
    devices = jax.devices()[: setting.devices]
    if setting.mesh == "fsdp":
        return jax.make_mesh((setting.devices,), ("fsdp",), devices=devices)
    data = setting.devices // setting.replica
    return fsdp.make_mesh(data=data, replica=setting.replica, devices=devices)


def make_step(case: Case, sharded: fsdp.Sharded, setting: Setting) -> Any:
    """Makes the step of a setting."""
    loss = make_loss(case.net, case.loss)
    settings: dict[str, Any] = {
        "accumulation": setting.accumulation,
        "deferred_reduction": setting.deferred,
        "local_batch": setting.local_batch,
        "clip": setting.clip,
    }
    if setting.pure:
        return jax.jit(sharded.pure_step(loss, **settings), donate_argnums=0)
    return sharded.make_train_step(loss, **settings)


def _moved(case: Case, old: fsdp.Sharded, state: Any, new: fsdp.Sharded) -> Any:
    """Takes a state to another layout, by a checkpoint."""
    saved = old.to_checkpoint(state)
    if case.checkpoint == "store":
        with tempfile.TemporaryDirectory() as folder, CheckpointStore(Path(folder)) as store:
            store.save(1, saved, data={}, metadata={})
            store.wait()
            saved, _, _ = store.restore(1, new.checkpoint_target())
        return new.from_checkpoint(saved)
    if new.arguments.mesh == old.arguments.mesh and new.layout == old.layout:
        return new.from_checkpoint(saved)
    target = replace(new.abstract_state(), copies={})
    optional = ("loss_scale", "recent_losses")
    for name in optional:  # of a setting that the other does not have
        started = getattr(target, name)
        if by_name(started).keys() != by_name(getattr(saved, name)).keys():
            saved = replace(saved, **{name: started})
    return new.from_checkpoint(jax.tree.map(_put, saved, target))


def _put(array: Any, target: jax.ShapeDtypeStruct) -> Any:
    """Stores an array as a layout does: with zeros behind it where it is padded."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return jnp.zeros(array.shape, array.dtype, device=array.sharding)
    if jnp.issubdtype(target.dtype, jax.dtypes.prng_key):
        return jax.device_put(array, target.sharding)
    own = np.asarray(array)
    stored = np.zeros(target.shape, target.dtype)
    stored[tuple(map(slice, own.shape))] = own
    return jax.device_put(stored, target.sharding)


# The comparison


def _compared(case: Case) -> Result:
    """Runs a case by both; raises `_RefusedError` where the library refuses it."""
    first = case.settings[0]
    with _refusals():
        sharded = make_sharded(case, first)
        state = _start(case, sharded)
        saved = sharded.to_checkpoint(state)
    initial = {path: np.array(x) for path, x in by_name(saved.params).items()}
    other = jax.tree.map(np.asarray, saved.model_state) if case.net.flax == "linen" else None
    control: Any = _OneDevice(case) if case.precision in FLOAT8 else Control(case, initial, other)

    found: dict[str, list[Any]] = {"loss": [], "grad_norm": [], "metrics": []}
    number = 0
    for setting in case.settings:
        if setting is not first:
            with _refusals():
                old, sharded = sharded, make_sharded(case, setting)
            state = _moved(case, old, state, sharded)
        with _refusals():
            step = make_step(case, sharded, setting)
        for _ in range(case.steps):
            batch = make_batch(case.net, setting.batch, 1000 * case.seed + number)
            number += 1
            with _refusals():
                state, metrics = step(state, batch)
            assert int(metrics["skipped"]) == 0, f"a step was skipped: {metrics}"
            found["loss"].append(float(metrics["loss"]))
            found["grad_norm"].append(float(metrics["grad_norm"]))
            found["metrics"].append({k: np.asarray(v) for k, v in metrics.items()})
            control.step(setting, batch)
    if hasattr(step, "finish"):
        step.finish()
    saved = sharded.to_checkpoint(state)
    compare = _Comparison(case, control)
    compare.run(found, saved, initial)
    if case.evaluate and case.precision not in FLOAT8:
        batch = make_batch(case.net, case.settings[-1].batch, 7)
        with _refusals():
            evaluate = sharded.make_eval_step(make_loss(case.net, case.loss, train=False))
            out = evaluate(state, batch)
        expected = control.evaluate(batch)
        for name, a, b in zip(("eval sum", "eval count"), out, expected, strict=False):
            compare.scalar(name, float(a), b, compare.loose)
    return compare.result()


def _start(case: Case, sharded: fsdp.Sharded) -> Any:
    params = None
    if case.given:
        leaf = by_name(sharded.checkpoint_target().params)["positions"]
        count = int(np.prod(leaf.shape))
        values = np.linspace(-1, 1, count).reshape(leaf.shape)
        params = {"positions": jnp.asarray(values, leaf.dtype)}
    seed: Any = case.seed if case.seed % 3 else jax.random.key(case.seed)
    return sharded.init(seed, params)


class _OneDevice:
    """The library's own step on one device, where plain Flax cannot know the rounding: float8."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.metrics: list[dict[str, Any]] = []
        self.undecided: dict[str, Any] = {}
        self._sharded: Any = None
        self._state: Any = None
        self._steps: dict[Any, Any] = {}

    def step(self, setting: Setting, batch: Batch) -> None:
        """Trains on a batch without sharding."""
        alone = replace(
            Setting(), strategy="no_shard", units=setting.units, min_size=setting.min_size,
            accumulation=setting.accumulation, clip=setting.clip,
        )  # fmt: skip
        if self._sharded is None:
            self._sharded = make_sharded(self.case, alone)
            self._state = _start(self.case, self._sharded)
        if alone not in self._steps:
            self._steps[alone] = make_step(self.case, self._sharded, alone)
        self._state, metrics = self._steps[alone](self._state, batch)
        self.losses.append(float(metrics["loss"]))
        self.norms.append(float(metrics["grad_norm"]))
        self.metrics.append({})

    @property
    def params(self) -> dict[str, Any]:
        """All parameters."""
        return by_name(self._sharded.to_checkpoint(self._state).params)


class _Comparison:
    """Collects differences, each over its tolerance."""

    def __init__(self, case: Case, control: Any) -> None:
        self.case, self.control = case, control
        self.low = LOW.get(case.precision)
        is_loose = any(where.any() for where in control.undecided.values())
        # Elements whose sign was undecided move the others a little.
        self.loose = 10 * TOLERANCE if is_loose else TOLERANCE
        self.shares: dict[str, float] = {}
        self.largest = 0.0

    def note(self, name: str, difference: float, tolerance: float) -> None:
        """Notes a difference of what has this name; the largest counts."""
        share = difference / tolerance
        self.shares[name] = max(self.shares.get(name, 0.0), share if share == share else np.inf)

    def scalar(
        self, name: str, found: Any, expected: Any, tolerance: float, least: float = LEAST
    ) -> None:
        """Compares numbers, or arrays of them, relative to the largest."""
        found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
        assert found.shape == expected.shape, f"{name}: {found.shape}, expected {expected.shape}"
        size = max(float(np.abs(expected).max()), least)
        difference = float(np.abs(found - expected).max()) / size
        self.largest = max(self.largest, difference)
        self.note(name, difference, tolerance)

    def run(self, found: dict[str, list[Any]], saved: Any, initial: dict[str, np.ndarray]) -> None:
        """Compares losses, norms, metrics, parameters and the model's state."""
        control = self.control
        loose = self.low.loss if self.low else self.loose
        for step, (loss, norm) in enumerate(zip(control.losses, control.norms, strict=True)):
            self.scalar("loss", found["loss"][step], loss, loose)
            if self.loose == TOLERANCE or step == 0:
                norm_loose = self.low.change if self.low else TOLERANCE
                self.scalar("grad_norm", found["grad_norm"][step], norm, norm_loose)
            for name, value in control.metrics[step].items():
                metric_loose = 5 * loose if self.low else loose
                self.scalar(f"metric {name}", found["metrics"][step][name], value, metric_loose)
        params = {path: np.asarray(x, np.float64) for path, x in by_name(saved.params).items()}
        expected = {path: np.asarray(x, np.float64) for path, x in control.params.items()}
        assert params.keys() == expected.keys(), f"{sorted(params.keys() ^ expected.keys())}"
        if self.low is None:
            self._params(params, expected)
        else:
            start = {path: np.asarray(x, np.float64) for path, x in initial.items()}
            self._changes(params, expected, start, self.low)
        if self.low is None and self.case.net.norm == "batch":
            self._statistics(saved)

    def _params(self, found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
        for path, value in expected.items():
            decided = ~self.control.undecided[path]
            # A bias of attention's keys begins at zero, and has no gradient but rounding's.
            least = 1.0 if path.endswith("key/bias") else LEAST
            self.scalar(path, found[path] * decided, value * decided, self.loose, least)

    def _changes(
        self,
        found: dict[str, np.ndarray],
        expected: dict[str, np.ndarray],
        start: dict[str, np.ndarray],
        low: Low,
    ) -> None:
        """Compares the changes of parameters; one that hardly moves, with all of them."""
        changes = {path: value - start[path] for path, value in expected.items()}
        moved = {path: x for path, x in changes.items() if x.any()}
        size = sum(x.size for x in moved.values())
        mean = np.sqrt(sum(np.square(x).sum() for x in moved.values()) / max(size, 1))
        steps = len(self.control.losses)
        for path, change in changes.items():
            if path.endswith("key/bias"):  # it has no gradient but rounding's
                continue
            allowed = low.change * max(np.linalg.norm(change), mean * np.sqrt(change.size))
            rounded = low.bits * steps * np.abs(expected[path]).max()
            allowed += rounded * np.sqrt(change.size)
            difference = float(np.linalg.norm(found[path] - expected[path]))
            self.note(path, difference, float(allowed) + 1e-9)

    def _statistics(self, saved: Any) -> None:
        found, expected = by_name(saved.model_state), by_name(self.control.rest)
        names = [name for name, x in expected.items() if jnp.issubdtype(x.dtype, jnp.floating)]
        assert names, "no batch statistics"
        for name in names:
            self.scalar(f"state {name}", found[name], expected[name], TOLERANCE)

    def result(self) -> Result:
        """Judges all differences."""
        where = max(self.shares, key=self.shares.__getitem__)
        worst = self.shares[where]
        largest = self.largest if self.low is None else 0.0
        result = Result("equal", worst, where, largest, shares=self.shares)
        if worst > 1:
            result.outcome = "different"
            above = {name: share for name, share in self.shares.items() if share > 1}
            result.text = ", ".join(f"{name}: {share:.3g}" for name, share in above.items())
            result.text = f"difference / tolerance: {result.text}"
        return result


assert set(EXACT).isdisjoint(LOW)
assert {*EXACT, *LOW} == PRECISIONS.keys()
