"""The configuration of a run: one field per key with its type, default, limit and help text."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from fsdp_jax.data.options import DataOptions
from fsdp_jax.errors import ConfigError
from fsdp_jax.limits import (
    Devices,
    KeyNote,
    MeshSize,
    NonNegative,
    NonNegativeFloat,
    Positive,
    Range,
    Size,
)
from fsdp_jax.lora import Adapters
from fsdp_jax.models import FAMILIES
from fsdp_jax.prefetch.rewrite import Prefetch
from fsdp_jax.sharding.offload import Offload
from fsdp_jax.sharding.precision import Precision
from fsdp_jax.step.loss_spikes import LossSpikes
from fsdp_jax.trackers import TrackerOptions
from fsdp_jax.train.optimizers import OptimizerConfig
from fsdp_jax.units.auto_wrap import Units
from fsdp_jax.units.keep_gathered import KeepGathered
from fsdp_jax.units.remat import RematPolicy

FamilyName = Literal[*FAMILIES]  # type: ignore[valid-type]


def _check_set_once(section: str, settings: object, what: str, unset: str) -> None:
    """Raises ConfigError if more than one key of a section is set; `unset`: how one is not."""
    keys = [f"{section}.{name}" for name, value in vars(settings).items() if value]
    if len(keys) > 1:
        fix = f"set one of them; {unset}"
        raise ConfigError(what, where=section, got=", ".join(keys), fix=fix)


@dataclass(frozen=True)
class ModelConfig:
    """The model: its architecture, size, initial weights and attention kernel."""

    family: FamilyName = "gpt"  # Architecture; see the table in docs/models-and-data.md.
    # Size by name, such as llama3-8b (an unknown name lists all); default: that of `weights`, or
    # the smallest of the family.
    preset: str | None = None
    # Initial weights: the directory of a run, the output of `fsdp-jax import`, or a Hugging Face
    # folder (config.json and safetensors); default: random.
    weights: str | None = None
    # Number of blocks; default: the preset's.
    layers: Annotated[int, Range(1, 4096)] | None = None
    # Width of the residual stream; default: the preset's.
    width: Annotated[int, Range(1, 2**20)] | None = None
    heads: Positive | None = None  # Attention heads; default: the preset's.
    # Vocabulary size of a text model; default: the preset's or the weights'. A number above the
    # weights' adds rows to the embedding and the head, each the mean of the others.
    vocab_size: Positive | None = None
    # Classes of an image model; default: the preset's or the weights'. A number other than the
    # weights' starts with a new random head.
    classes: Positive | None = None
    dropout: float = 0.0  # Dropout probability in training; refused for a family without it.
    # Stack the blocks and compile one of them (jax.lax.scan); False compiles each block.
    scan_layers: bool = True
    # Kernel. blockwise: everywhere; flash: JAX's for GPUs and TPUs; cudnn: NVIDIA's cuDNN.
    attention: Literal["blockwise", "flash", "cudnn"] = "blockwise"
    # Regular expressions of parameter paths that are not trained; they are sharded as usual.
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True)
class MeshConfig:
    """The device mesh, replica x data."""

    # Replicas of the state in hybrid strategies; -1: all devices that `data` leaves. Default: one
    # per host (per slice on several TPU slices) with hybrid strategies, otherwise 1.
    replica: MeshSize | None = None
    # Devices that the state is sharded over; -1: all devices that `replica` leaves.
    data: MeshSize = -1


@dataclass(frozen=True)
class UnitsConfig:
    """Which parameters are gathered together. Set one key at most; default: each repeated block."""

    classes: tuple[str, ...] = ()  # Module classes; each instance is a unit, such as Block.
    # Modules with at least this many parameters are units.
    min_params: Size | None = None
    whole_model: bool = False  # The model is one unit: all of it is gathered at once.

    def __post_init__(self) -> None:
        what = "units are set in more than one way"
        unset = "`--units.classes` without a value unsets that of a file"
        _check_set_once("units", self, what, unset)

    @property
    def choice(self) -> Units:
        """The `units` of `fully_shard`."""
        if self.whole_model:
            return "model"
        return self.min_params or self.classes or "auto"


@dataclass(frozen=True)
class KeepGatheredConfig:
    """Which units stay gathered from forward to backward. Set one key at most; default: none."""

    last: NonNegative = 0  # So many units from the end, of which a layer of a scan is one.
    # The last units whose gathered parameters fit into these bytes of a device, such as 2GiB.
    budget: str | None = None
    classes: tuple[str, ...] = ()  # Units of these module classes, or with these paths.

    def __post_init__(self) -> None:
        what = "the units that stay gathered are set in more than one way"
        unset = "`--keep_gathered.last 0` unsets that of a file"
        _check_set_once("keep_gathered", self, what, unset)

    @property
    def choice(self) -> KeepGathered:
        """The `keep_gathered` of `fully_shard`."""
        return self.budget or self.classes or self.last


@dataclass(frozen=True)
class TrainConfig:
    """Steps, batch, loss, log and evaluation."""

    steps: Annotated[Positive, KeyNote(("steps", "max_steps"))] = 1000  # Optimizer steps.
    # Sequences per optimizer step, over all devices and microbatches.
    global_batch_size: Annotated[Positive, KeyNote(("batch_size", "global_batch_size"))] = 32
    accumulation: Positive = 1  # Microbatches per optimizer step.
    # Reduce gradients once per step, after the last microbatch: less traffic, more memory.
    deferred_reduction: bool = False
    # False: the loss runs on the global batch, as on one device, and XLA inserts the collectives.
    # True: each device runs the loss on its own rows, with explicit collectives; required by
    # precision.reduce, precision.scatter and deferred_reduction.
    local_batch: bool = False
    # Vocabulary chunk size for the loss; logits are recomputed in the backward pass.
    loss_chunk: Positive | None = None
    # Keep compiled programs, so that a later start does not compile them again: in the user's cache
    # directory, in a run of several processes in `programs` of the run's own. auto and always do;
    # never. JAX_COMPILATION_CACHE_DIR, where it is set, counts.
    keep_programs: Literal["auto", "always", "never"] = "auto"
    # Take the programs of the steps from this folder, which `fsdp-jax compile` wrote; refused where
    # they are of other devices, versions or keys.
    programs: Annotated[str | None, KeyNote(("programs",), may_differ=True)] = None
    # Seed of initialization, data order and dropout.
    seed: Annotated[int, Range(0, 2**32 - 1), KeyNote(("seed",))] = 0
    # Virtual CPU devices per process where there is no accelerator; default: JAX's number.
    devices: Devices | None = None
    log_every: Positive = 10  # Steps between log lines.
    # Steps between evaluations; default: before the first step and after the last only.
    eval_every: Positive | None = None
    eval_batches: Positive | None = 10  # Held-out batches per evaluation; None: all of them.
    # Tokens of the sample printed at the end (for images: predictions); 0: none. Each costs a
    # forward pass.
    sample: Annotated[int, Range(0, 2**16)] = 400
    # Abort after this many consecutive skipped steps, whose loss, gradients or new state were not
    # finite; None: never.
    abort_after: Positive | None = 10
    # If the loss is far above those of the steps before: ignore it, warn, skip the update, or go
    # back to the last checkpoint of `checkpoint.every` and on with the data that follows.
    spike: Literal["ignore", "warn", "skip", "back"] = "warn"
    # Steps between comparisons of the copies of replicated arrays (all state with no_shard,
    # parameters with zero1, all shards with hybrid strategies); also made before each evaluation
    # and save. A bit that differs ends the run and names the device. Default: none.
    check_replicas: Positive | None = None


@dataclass(frozen=True)
class ClusterConfig:
    """A run of several processes. A scheduler tells the first three keys; set, they count."""

    coordinator: str | None = None  # HOST:PORT where process 0 listens.
    processes: Positive | None = None  # Number of processes.
    process: NonNegative | None = None  # Index of this process, from 0.
    # Read the environment of Slurm, Open MPI, Kubeflow, SkyPilot, torchrun or Cloud TPU for keys
    # that are not set. False: a run of one process, unless all three are set.
    detect: bool = True
    # File that holds the secret of the run, which every process has to know; default: the secret is
    # that of the environment variable FSDP_JAX_CLUSTER_SECRET, or there is none.
    secret: str | None = None
    timeout: Positive = 300  # Seconds to wait for the other processes to join.
    # End a run that hangs: seconds for a step, with the evaluation and the save after it; not for
    # the first, which compiles. 0: no limit. Default: 20 times the median of the steps before, at
    # least 300, without evaluations and saves.
    step_timeout: NonNegative | None = None


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save; a run always saves at the end and when a signal stops it."""

    every: Positive | None = 100  # Steps between checkpoints; None: only at the end.
    # Also save when this many minutes have passed since the last checkpoint.
    every_minutes: NonNegativeFloat | None = None
    keep: Positive = 3  # Number of newest checkpoints to keep.
    # Also keep every checkpoint whose step is a multiple of this, for good. (A save that is
    # postponed, since steps are skipped, has a later step.)
    keep_every: Positive | None = None
    asynchronous: bool = True  # Write in the background while training continues.
    verify: bool = True  # Compare every file with its digest before resuming.
    # If the newest checkpoint is damaged: stop, or rename it and resume from the previous one.
    damaged: Literal["stop", "previous"] = "stop"
    # Resume from this step and rename later ones; default: the newest.
    step: NonNegative | None = None
    # Allow floating-point arrays to be read in another dtype than they were saved in.
    allow_cast: bool = False
    # Steps between copies of the state in the hosts' memory, from which a restarted run goes on
    # without reading the disk; None: no copies. They need the state's bytes twice in memory.
    memory_every: Positive | None = None
    memory_folder: str | None = None  # Folder of the copies; default: /dev/shm.
    # Each process also keeps the copy of the process before it, for when that one's host is lost.
    memory_neighbours: bool = False


@dataclass(frozen=True)
class ProfileConfig:
    """A trace of some steps, in the run's directory, for xprof and Perfetto."""

    start: Positive | None = None  # First step of the trace; default: no trace. Step 1 compiles.
    steps: Positive = 3  # Steps in the trace.
    memory: bool = False  # Also write what device memory holds after them, for pprof.


@dataclass(frozen=True)
class Config:
    """All keys of a run, by section; the first few belong to none.

    Where the library has a dataclass, the section is that very dataclass; `renamed_keys.py` has the
    keys with other names, and docs/command.md says why some defaults are not the library's.
    """

    # no_shard (ddp, zero0), zero1, shard_grad_op (zero2), full_shard (zero3, fsdp),
    # hybrid_shard (hsdp), hybrid_shard_zero2, hybrid_shard_optimizer (hfsdp).
    strategy: str = "full_shard"
    remat: RematPolicy = field(default=RematPolicy("none"))
    # pre: gather the next unit while the current one computes, forward and backward; post: in
    # the backward pass, after the current unit has computed; none: as XLA schedules it; auto: pre
    # on GPUs, otherwise none.
    prefetch: Prefetch = "auto"
    output: str = "output/run"  # Run directory: configuration, metrics, layout and checkpoints.
    model: ModelConfig = ModelConfig()
    # Low-rank adapters of frozen weights (arXiv:2106.09685).
    lora: Adapters = field(default_factory=Adapters)
    mesh: MeshConfig = MeshConfig()
    units: UnitsConfig = UnitsConfig()
    keep_gathered: KeepGatheredConfig = KeepGatheredConfig()
    # Dtypes: float32, bfloat16 or, but for `param`, float16; those of `gather`, `matmul` and
    # `scatter` are narrower.
    precision: Precision = field(default_factory=Precision)
    # What is kept in the host's memory while it is not used.
    offload: Offload = field(default_factory=Offload)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataOptions = field(default_factory=DataOptions)
    train: TrainConfig = TrainConfig()
    loss_spikes: LossSpikes = field(default_factory=LossSpikes)
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    profile: ProfileConfig = ProfileConfig()
    track: TrackerOptions = field(default_factory=TrackerOptions)

    def __post_init__(self) -> None:
        profile, steps = self.profile, self.train.steps
        if profile.start is not None and profile.start + profile.steps - 1 > steps:
            raise ConfigError(
                "the profile ends after the last step",
                where="profile.start",
                expected=f"profile.start + profile.steps - 1 of at most {steps} (train.steps)",
                got=f"{profile.start} + {profile.steps} - 1",
            )
