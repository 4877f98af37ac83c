"""The configuration of a run: dataclasses, filled from a YAML file and then from the command line.

Keys are the dotted paths of the fields (`train.steps`), the same in both places. Only `run` reads these objects; what
lies below gets plain arguments.
"""

import contextlib
import dataclasses
import hashlib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
import yaml

from fsdp_jax.errors import ConfigError, did_you_mean, message


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    family: Literal["gpt", "llama"] = "gpt"
    """Kind of model."""
    preset: str = "tiny"
    """Size. gpt: tiny and small (bytes), gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt3-175b, gpt-1t. llama:
    llama-tiny (bytes), llama2-7b, llama2-13b, llama2-70b, llama3-8b, llama3-70b."""
    layers: int | None = None
    """Number of blocks; the preset's where None."""
    width: int | None = None
    """Width of the residual stream; the preset's where None."""
    heads: int | None = None
    """Attention heads; the preset's where None."""
    dropout: float = 0.0
    """Probability that a value is dropped while training; gpt only."""
    scan_layers: bool = True
    """Stack the blocks and compile one of them; False compiles each."""
    attention: Literal["blockwise", "flash", "cudnn"] = "blockwise"
    """blockwise runs everywhere; flash is jax's kernel for GPUs and TPUs; cudnn is NVIDIA's, if cuDNN is installed."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The devices as a grid of replica x data."""

    replica: int = 1
    """Devices that hybrid strategies repeat the state along; -1 takes what `data` leaves."""
    data: int = -1
    """Devices that the state is sharded along; -1 takes what `replica` leaves."""


@dataclasses.dataclass(frozen=True)
class UnitsConfig:
    """What is gathered together; the whole model where nothing is set. Set one of them at most."""

    classes: tuple[str, ...] = ()
    """Module classes that are units, such as Block."""
    min_params: int | None = None
    """Modules with at least so many parameters are units."""
    scan: bool = False
    """The body of the layer scan is the unit."""


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes: float32 or bfloat16."""

    param: str = "float32"
    """Parameters at rest, and the optimizer."""
    compute: str = "float32"
    """Gathered parameters and activations."""
    reduce: str | None = None
    """Gradients while they are reduced; the compute dtype where None."""
    output: str | None = None
    """The model's output; as the model made it where None."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are updated."""

    name: Literal["adamw", "adam", "sgd", "lion", "adafactor"] = "adamw"
    """Optimizer. adam and adamw use b2 = 0.95, sgd a momentum of 0.9."""
    learning_rate: float = 3e-4
    """Highest learning rate."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """After the warm-up: stay, or fall to a tenth by the last step along a cosine or a line."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from zero."""
    weight_decay: float = 0.0
    """Decoupled weight decay of adamw, lion and adafactor."""
    clip: float | None = 1.0
    """Largest global norm of the gradient; None does not clip."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read."""

    kind: Literal["embedded", "text"] = "embedded"
    """The source of Python's standard library, on every machine; or the text files at `path`."""
    path: str | None = None
    """A text file or a folder of them, for kind text."""
    sequence_length: int = 128
    """Tokens that a model sees at once."""
    tokenizer: Literal["bytes"] = "bytes"
    """How text becomes tokens."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, with which batch, and what is reported."""

    steps: int = 1000
    """Optimizer steps."""
    global_batch_size: int = 32
    """Sequences per optimizer step, over all devices and microbatches."""
    accumulation: int = 1
    """Microbatches per optimizer step."""
    deferred_reduction: bool = False
    """Reduce gradients once per step, after the last microbatch: less traffic, more memory."""
    seed: int = 0
    """Of the parameters, the order of the data, and dropout."""
    devices: int | None = None
    """Virtual CPU devices of each process, where there is no accelerator; jax's own number where None."""
    log_every: int = 10
    """Steps between lines of the log."""
    eval_every: int | None = None
    """Steps between evaluations; only at the end where None."""
    eval_batches: int | None = 10
    """Batches of held-out text per evaluation; all of it where None."""
    abort_after: int | None = 10
    """Give up after so many steps in a row that were not finite; never where None."""


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """Several processes as one run: all three keys, or none."""

    coordinator: str | None = None
    """HOST:PORT where process 0 listens."""
    processes: int | None = None
    """How many there are."""
    process: int | None = None
    """Which one this is, from 0."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved. It always is at the end, and when a signal stops the run."""

    every: int | None = 100
    """Steps between checkpoints; only at the end where None."""
    every_minutes: float | None = None
    """Also once so many minutes have passed since the last."""
    keep: int = 3
    """How many of the newest to keep."""
    keep_every: int | None = None
    """Also keep for good those at multiples of so many steps."""
    asynchronous: bool = True
    """Write in the background while training goes on."""
    verify: bool = True
    """Read every file against its digest before resuming from it."""
    damaged: Literal["stop", "previous"] = "stop"
    """Where the newest is damaged: stop and say so, or set it aside and resume from the one before."""
    step: int | None = None
    """Resume from this step, and set later ones aside; from the newest where None."""
    allow_cast: bool = False
    """Read floating-point arrays of another dtype than they were saved in."""


@dataclasses.dataclass(frozen=True)
class Config:
    """All keys of a run."""

    strategy: str = "full_shard"
    """no_shard (ddp), zero1, shard_grad_op (zero2), full_shard (zero3, fsdp), hybrid_shard, hybrid_shard_zero2."""
    remat: Literal["none", "full"] = "none"
    """Keep activations for the backward pass, or recompute each unit."""
    prefetch: Literal["none", "post", "pre"] = "none"
    """Gather the next unit while one computes (pre), as one has computed on the way back (post), or as XLA will."""
    output: str = "output/run"
    """Directory of the run: config.yaml, metrics.jsonl, checkpoints, layout.json."""
    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    units: UnitsConfig = UnitsConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


LEAST = {
    "optimizer.learning_rate": 0, "optimizer.warmup_steps": 0, "optimizer.weight_decay": 0, "train.steps": 1,
    "train.global_batch_size": 1, "train.accumulation": 1, "train.devices": 1, "train.log_every": 1,
    "train.eval_every": 1, "train.eval_batches": 1, "train.abort_after": 1, "checkpoint.every": 1, "checkpoint.keep": 1,
    "checkpoint.every_minutes": 0, "checkpoint.keep_every": 1, "checkpoint.step": 0,
}  # fmt: skip
"""The smallest value of keys that have one."""


def load(path: str | Path, overrides: Sequence[str] = (), *, prog: str = "fsdp-jax train CONFIG") -> Config:
    """Reads a YAML file, then applies dotted overrides such as `--train.steps 20`.

    Raises ConfigError for a file that cannot be read, an unknown key or a value of the wrong kind. A malformed value
    among the overrides is reported by the parser, which exits with 2; `--help` prints every key and exits with 0.
    """
    config = _filled(Config, _read(Path(path)), str(path), "")
    config = parse(overrides, default=config, prog=prog)
    _check_least(config)
    return config


def parse(overrides: Sequence[str], *, default: Config, prog: str, description: str = "") -> Config:
    """`default` with dotted overrides applied."""
    known = dict(flat(default))
    for word in overrides:
        key = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and key not in known and key != "help":
            later = "not in this release; plans say what it would save" if key.startswith("offload.") else ""
            fix = later or did_you_mean(key, known)
            raise ConfigError(message(f"unknown key '{key}'", where="command line", fix=fix))
    return tyro.cli(
        Config, args=overrides, default=default, prog=prog, description=description or None, use_underscores=True,
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
    )  # fmt: skip


def parse_help(command: str, words: Sequence[str], description: str | None) -> bool:
    """Prints every key with its type, default (the file's, if given) and meaning, if help is asked for."""
    if not {"-h", "--help"} & set(words):
        return False
    given = words[0] if not words[0].startswith("-") else None
    default = _filled(Config, _read(Path(given)), given, "") if given else Config()
    with contextlib.suppress(SystemExit):
        parse(["--help"], default=default, prog=f"fsdp-jax {command} CONFIG", description=description or "")
    return True


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every key."""
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from flat(value, key + ".")
        else:
            yield key, value


def dump(config: Config) -> str:
    """The configuration as YAML that `load` reads back to the same."""
    plain = dataclasses.asdict(
        config, dict_factory=lambda pairs: {k: list(v) if isinstance(v, tuple) else v for k, v in pairs}
    )
    return yaml.safe_dump(plain, sort_keys=False)


def digest(config: Config) -> str:
    """A short hash of what decides the numbers: not of where and when the run saves, nor of which process this is."""
    neutral = dataclasses.replace(config, output="", cluster=ClusterConfig(), checkpoint=CheckpointConfig())
    return hashlib.sha256(dump(neutral).encode()).hexdigest()[:16]


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        fix = "give the path of a YAML file, such as configs/quickstart.yaml"
        raise ConfigError(message("the configuration cannot be read", where=str(path), got=error, fix=fix)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(message("the configuration is not YAML", where=str(path), got=error)) from error
    return _mapping(content, str(path))


def _mapping(content: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(content or {}, dict):
        raise ConfigError(message("keys were expected", where=where, expected="`key: value` lines", got=repr(content)))
    return content or {}


def _filled(kind: type, content: Mapping[str, Any], file: str, prefix: str) -> Any:
    """An instance of this dataclass from what the YAML holds; defaults elsewhere."""
    hints = get_type_hints(kind)
    given = {}
    for name, value in content.items():
        where = f"{file}: {prefix}{name}"
        if name not in hints:
            fix = did_you_mean(
                prefix + str(name), [*(prefix + key for key in hints), *(key for key, _ in flat(Config()))]
            )
            raise ConfigError(message(f"unknown key '{prefix}{name}'", where=file, fix=fix))
        if dataclasses.is_dataclass(hints[name]):
            given[name] = _filled(hints[name], _mapping(value, where), file, f"{prefix}{name}.")
        else:
            given[name] = _converted(hints[name], value, where)
    return kind(**given)


def _converted(kind: Any, value: Any, where: str) -> Any:
    """A YAML value as a field of type `kind`."""
    if get_origin(kind) in (Union, types.UnionType):
        inner = next(part for part in get_args(kind) if part is not type(None))
        return None if value is None else _converted(inner, value, where)
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        choices = get_args(kind)
        fix = did_you_mean(str(value), choices)
        raise ConfigError(message(f"unknown value '{value}'", where=where, expected=", ".join(choices), fix=fix))
    if get_origin(kind) is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise _wrong_type("a list of names", value, where)
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 takes 1e-3 for text
        except ValueError:
            raise _wrong_type("a number", value, where) from None
    if type(value) is not kind:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise _wrong_type(names[kind], value, where)
    return value


def _wrong_type(expected: str, value: Any, where: str) -> ConfigError:
    return ConfigError(message("a value of the wrong kind", where=where, expected=expected, got=repr(value)))


def _check_least(config: Config) -> None:
    for key, value in flat(config):
        if value is not None and key in LEAST and not value >= LEAST[key]:
            raise ConfigError(message("a value is too small", where=key, expected=f"{LEAST[key]} or more", got=value))
    if sum(map(bool, (config.units.classes, config.units.min_params, config.units.scan))) > 1:
        raise ConfigError(message("units are chosen in one way", where="units", expected="classes, min_params or scan"))
