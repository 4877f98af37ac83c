"""Draws cases of fuzz_steps.py: a model, its loss, an optimizer, one or two settings.

A seed and a number determine a case. Draws avoid what the documentation says is refused.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

EXACT = ("float32", "frozen-bfloat16")
"""Precisions that are compared as float32; the others at a tolerance of their dtype."""
FLOAT8 = ("float8", "float8-matmuls")
EIGHT_BITS = (*FLOAT8, "int8")  # for the kernels of units
NEED_LOCAL = ("reduce-float32", "reduce-bfloat16", "int8")
COMPUTE = {
    "bfloat16": "bfloat16",
    "params-bfloat16": "bfloat16",
    "reduce-float32": "bfloat16",
    "float16": "float16",
}
"""The compute dtypes of the precisions that have another than float32."""
SMOOTH = ("sgd", "momentum", "adam", "adamw-mask", "multi-steps", "partition", "inject", "clipped")
"""Optimizers whose update is no sign of the gradient: low precision is compared with these."""


@dataclass(frozen=True)
class Net:
    """A small model. `shared`: one block runs twice; `scale`, `calls`: odd parameters and state."""

    flax: str = "nnx"  # nnx, linen
    block: str = "mlp"  # mlp, attention, conv
    layers: int = 2
    scan: bool = False
    shared: bool = False
    tokens: bool = False
    tied: bool = False  # the head is the embedding
    norm: str = "layer"  # none, layer, rms, batch
    bias: bool = True
    dropout: float = 0.0
    scale: bool = False  # a parameter without dims
    calls: bool = False  # state that counts the calls
    width: int = 8
    hidden: int = 12
    inputs: int = 5  # features, or the vocabulary
    outputs: int = 3
    length: int = 4
    dtype: str | None = None  # of `Embed` alone; the others take that of their arrays


@dataclass(frozen=True)
class Loss:
    """What the loss adds to a sum of masked errors."""

    penalty: bool = False  # of parameters
    statistic: bool = False  # of the batch
    key: bool = False  # noise from a random key
    metrics: bool = False


@dataclass(frozen=True)
class Setting:
    """How the library runs the model: `fully_shard`, `make_train_step`, and the devices."""

    devices: int = 1
    replica: int = 1
    mesh: str = "data"  # the name of the axis that shards; `fsdp` is a mesh of jax's own
    strategy: str = "full_shard"
    units: Any = "auto"  # `Block` for the class; a number; a name
    remat: str = "none"  # `every` is RematPolicy(every=2), `policy` one of jax's
    prefetch: str = "auto"
    offload: tuple[str, ...] = ()
    min_size: int = 2**14
    rule: str | None = None  # replicated, last
    stacked: bool = False
    spikes: bool = False
    accumulation: int = 1
    local_batch: bool = False
    deferred: bool = False
    clip: float | None = None
    pure: bool = False  # by `pure_step`
    rows: int = 1  # on a device, of a microbatch

    @property
    def batch(self) -> int:
        """The rows of a batch."""
        return self.devices * self.accumulation * self.rows


@dataclass(frozen=True)
class Case:
    """All that is drawn. `settings`: one, or two with a checkpoint between them."""

    seed: int
    net: Net
    loss: Loss
    optimizer: str
    precision: str
    settings: tuple[Setting, ...]
    steps: int  # with each setting
    frozen: tuple[str, ...] = ()
    lora: int | None = None  # the rank
    lora_head: bool = False  # the head is trained too
    given: bool = False  # one parameter is passed to `init`
    checkpoint: str = "memory"  # memory, store
    evaluate: bool = False

    def labels(self) -> Iterator[str]:
        """Lists the settings of the case, `name=value`, as they are counted."""
        net = asdict(self.net)
        names = ("flax", "block", "scan", "shared", "tokens", "tied", "norm", "scale", "calls")
        yield from (f"net.{name}={net[name]}" for name in names)
        yield f"net.dropout={self.net.dropout > 0}"
        yield from (f"loss.{name}" for name, value in asdict(self.loss).items() if value)
        yield f"optimizer={self.optimizer}"
        yield f"precision={self.precision}"
        if self.lora is not None:
            yield "lora"
        if self.frozen:
            yield "frozen"
        if self.given:
            yield "init(params)"
        if self.evaluate:
            yield "eval step"
        if len(self.settings) == 2:
            yield f"checkpoint={self.checkpoint}"
        found = dict.fromkeys(label for each in self.settings for label in _labels(each))
        yield from found


def _labels(setting: Setting) -> Iterator[str]:
    for name in ("strategy", "units", "remat", "prefetch", "min_size", "accumulation", "mesh"):
        yield f"{name}={getattr(setting, name)}"
    yield f"devices={setting.devices}"
    if setting.replica > 1:
        yield "replicas"
    yield from (f"offload={each}" for each in setting.offload)
    if setting.rule is not None:
        yield f"rule={setting.rule}"
    flags = ("local_batch", "deferred", "stacked", "spikes", "pure")
    yield from (name for name in flags if getattr(setting, name))
    if setting.clip is not None:
        yield "clip"


class Draw:
    """Draws values from a generator."""

    def __init__(self, seed: int, number: int) -> None:
        self._random = random.Random(f"fuzz-steps {seed} {number}")

    def chance(self, share: float) -> bool:
        """Draws True in this share of the cases."""
        return self._random.random() < share

    def pick(self, *values: Any) -> Any:
        """Draws one of the values."""
        return self._random.choice(values)

    def weighted(self, **weights: float) -> str:
        """Draws a name by weight; `_` stands for `-`."""
        [name] = self._random.choices([*weights], [*weights.values()])
        return name.replace("_", "-")


def draw_case(seed: int, number: int) -> Case:
    """Draws the case of this number."""
    draw = Draw(seed, number)
    precision = draw.weighted(
        float32=56, output=2, frozen_bfloat16=3, bfloat16=6, float16=5, params_bfloat16=4,
        stochastic=3, reduce_float32=5, reduce_bfloat16=4, float8=3, float8_matmuls=5, int8=10,
    )  # fmt: skip
    low = precision not in EXACT
    local = precision in NEED_LOCAL or draw.chance(0.4)
    lora = draw.pick(1, 2) if draw.chance(0.14) and precision not in EIGHT_BITS else None

    optimizer = draw.weighted(
        sgd=8, momentum=8, adam=8, adamw_mask=9, lion=11, adafactor=10, muon=19, multi_steps=11,
        partition=11, inject=9, clipped=6,
    )  # fmt: skip
    if (low and optimizer not in SMOOTH) or (lora is not None and optimizer == "muon"):
        optimizer = draw.pick(*SMOOTH)
    net = _draw_net(draw, local=local, precision=precision, lora=lora is not None)
    penalty = lora is None and precision == "float32" and not local and draw.chance(0.3)
    loss = Loss(
        penalty=penalty,
        statistic=not local and draw.chance(0.2),
        key=draw.chance(0.2),
        metrics=draw.chance(0.4),
    )
    if local and precision in FLOAT8:  # the control, on one device, draws from other keys
        net, loss = replace(net, dropout=0.0), replace(loss, key=False)

    frozen: tuple[str, ...] = ()
    if lora is None and (precision == "frozen-bfloat16" or draw.chance(0.15)):
        frozen = (draw.pick("positions", "^embed/", "bias$") if net.bias else "positions",)
        if frozen == ("^embed/",) and net.tied:
            frozen = ("positions",)
    first = _draw_setting(draw, net, precision, optimizer, local=local, first=None)
    settings = [first]
    if draw.chance(0.35):
        still_local = local and (precision in NEED_LOCAL or draw.chance(0.6))
        other = _draw_setting(draw, net, precision, optimizer, local=still_local, first=first)
        settings.append(other)
    steps = 2 if len(settings) == 2 else draw.pick(2, 3)
    return Case(
        seed=draw.pick(*range(100)),
        net=net,
        loss=loss,
        optimizer=optimizer,
        precision=precision,
        settings=tuple(settings),
        steps=steps,
        frozen=frozen,
        lora=lora,
        lora_head=lora is not None and not net.tied and draw.chance(0.4),
        given=draw.chance(0.08),
        checkpoint="store" if draw.chance(0.25) else "memory",
        evaluate=not low and draw.chance(0.12),
    )


def _draw_net(draw: Draw, *, local: bool, precision: str, lora: bool) -> Net:
    flax = "nnx" if lora or draw.chance(0.6) else "linen"
    tokens = draw.chance(0.5)
    block = "mlp" if lora else draw.weighted(mlp=50, attention=25, conv=25)
    if block == "attention" and COMPUTE.get(precision) == "float16":
        block = "mlp"  # plain Flax fails too: XLA:CPU lacks its matmul in float16
    if block == "conv" and precision == "float8-matmuls":
        block = "mlp"  # a convolution is none
    norms = (
        ("none", "layer", "rms") if local or precision not in EXACT else ("none", "layer", "batch")
    )
    arrangement = draw.pick("unrolled", "unrolled", "scan", "scan", "shared")
    if arrangement == "shared" and flax == "nnx" and precision in EIGHT_BITS:
        arrangement = "unrolled"  # a unit owns no parameters that two of them share
    width = draw.pick(4, 6, 8, 8, 10, 16)
    return Net(
        flax=flax,
        block=block,
        layers=draw.pick(2, 3) if arrangement != "shared" else 2,
        scan=arrangement == "scan",
        shared=arrangement == "shared",
        tokens=tokens,
        tied=tokens and draw.chance(0.35),
        norm=draw.pick(*norms),
        bias=draw.chance(0.8),
        dropout=draw.pick(0.0, 0.0, 0.0, 0.25),
        scale=draw.chance(0.25),
        calls=draw.chance(0.2),
        width=width,
        hidden=draw.pick(5, 7, 12, 16, 24),
        inputs=draw.pick(11, 16, 23, 32) if tokens else draw.pick(3, 5, 8),
        outputs=draw.pick(3, 8, 9),
        length=draw.pick(3, 4, 6),
        dtype=COMPUTE.get(precision),
    )


STRATEGIES = (
    "no_shard", "zero1", "shard_grad_op", "full_shard", "full_shard", "full_shard",
    "hybrid_shard", "hybrid_shard_zero2", "hybrid_shard_optimizer",
)  # fmt: skip
PER_UNIT = ("full_shard", "hybrid_shard", "hybrid_shard_optimizer")


def _draw_setting(
    draw: Draw, net: Net, precision: str, optimizer: str, *, local: bool, first: Setting | None
) -> Setting:
    """Draws a setting; of a second one, the devices are those of the `first` in half of them."""
    least = 2 if local else 1
    devices = draw.pick(*range(least, 5), *range(least, 9))
    if first is not None and first.devices >= least and draw.chance(0.5):
        devices = first.devices
    strategies = [s for s in STRATEGIES if precision != "int8" or s != "no_shard"]
    strategy = draw.pick(*strategies)
    hybrid = strategy.startswith("hybrid")
    replicas = [n for n in range(2, devices) if devices % n == 0]
    replica = 1
    if replicas and (hybrid or draw.chance(0.15)):
        replica = draw.pick(*replicas)

    units = draw.pick("auto", "auto", "Block", "name", "model", 40)
    if precision in EIGHT_BITS:
        units = draw.pick("Block", "name")
    if net.scan and draw.chance(0.2):
        units = "scan"
    remat = draw.weighted(none=60, full=14, selective=10, dots=6, policy=5, every=5)
    if remat == "every" and (net.scan or net.shared or units not in ("Block", "name")):
        remat = "full"
    prefetch = "auto"
    if strategy in PER_UNIT:
        prefetch = draw.weighted(auto=35, none=15, pre=35, post=15)
    sharded_small = precision == "int8" or draw.chance(0.75)
    min_size = draw.pick(0, 1, 8, 40) if sharded_small else 2**14

    # State on the host: not what one parameter's update reads of another's.
    offload: tuple[str, ...] = ()
    if draw.chance(0.2):
        choices: list[tuple[str, ...]] = []
        if units not in ("model", "auto"):  # the inputs of units
            choices = [("activations",)]
        if optimizer != "multi-steps":
            choices += [("params",), ("optimizer",), ("params", "optimizer")]
        if choices:
            offload = draw.pick(*choices)
    if "optimizer" in offload and optimizer == "muon":
        min_size = max(min_size, 8)  # the coefficients that all matrices share stay on the device
    rule = draw.pick("replicated", "last") if draw.chance(0.12) else None
    # A rule names a dim that every device gets a part of.
    if rule == "last" and math.ceil(net.width / devices) * (devices - 1) >= net.width:
        rule = "replicated"
    if precision == "int8":
        rule = None
    accumulation = draw.pick(1, 1, 2, 3)
    return Setting(
        devices=devices,
        replica=replica,
        mesh="fsdp" if replica == 1 and draw.chance(0.1) else "data",
        strategy=strategy,
        units=units,
        remat=remat,
        prefetch=prefetch,
        offload=offload,
        min_size=min_size,
        rule=rule,
        stacked=net.scan and draw.chance(0.2),
        spikes=draw.chance(0.08),
        accumulation=accumulation,
        local_batch=local,
        deferred=local and accumulation > 1 and draw.chance(0.5),
        clip=draw.pick(0.05, 1.0) if draw.chance(0.3) else None,
        pure=not offload and draw.chance(0.08),
        rows=draw.pick(1, 2) if net.norm != "batch" else 2,
    )
