"""The keys of a run, as dataclasses: their names, types, defaults and meanings."""

from dataclasses import dataclass
from typing import Literal

from fsdp_jax.data.sources import Kind


@dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    family: Literal["gpt", "llama", "t5", "vit", "cait"] = "gpt"
    """Kind of model. gpt, llama: language models; t5: text to text; vit, cait: images to classes."""
    preset: str | None = None
    """Size, by name; `fsdp-jax plan` takes any. None is the shape of `weights`, or else the smallest of the family:
    tiny, llama-tiny, t5-tiny, vit-tiny, cait-tiny. A name that does not exist is answered with those that do."""
    weights: str | None = None
    """Start from these weights: what `fsdp-jax import` wrote, or a folder as on Hugging Face (config.json and
    safetensors). None starts from random ones."""
    layers: int | None = None
    """Number of blocks; the preset's where None."""
    width: int | None = None
    """Width of the residual stream; the preset's where None."""
    heads: int | None = None
    """Attention heads; the preset's where None."""
    vocab_size: int | None = None
    """Tokens that there are; the preset's where None. Of text alone."""
    classes: int | None = None
    """Classes that there are; the preset's or the weights' where None; another number than theirs starts a new head. Of
    images alone."""
    dropout: float = 0.0
    """Probability that a value is dropped while training; gpt, t5 and vit."""
    scan_layers: bool = True
    """Stack the blocks and compile one of them; False compiles each."""
    attention: Literal["blockwise", "flash", "cudnn"] = "blockwise"
    """blockwise runs everywhere; flash is jax's kernel for GPUs and TPUs; cudnn is NVIDIA's, if cuDNN is installed."""
    frozen: tuple[str, ...] = ()
    """Patterns (regular expressions) of parameters that are not trained; they are sharded all the same."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters beside frozen weights (arXiv:2106.09685)."""

    rank: int | None = None
    """Rank of the adapters; None trains without any."""
    alpha: float | None = None
    """What an adapter adds is scaled by alpha / rank; None is alpha = rank."""
    targets: tuple[str, ...] = ()
    """Patterns of the linear layers that get one, by path; where empty, those of attention."""
    trained: tuple[str, ...] = ()
    """Patterns of other parameters that are trained too."""


@dataclass(frozen=True)
class MeshConfig:
    """The devices as a grid of replica x data."""

    replica: int = 1
    """Devices that hybrid strategies repeat the state along; -1 takes what `data` leaves."""
    data: int = -1
    """Devices that the state is sharded along; -1 takes what `replica` leaves."""


@dataclass(frozen=True)
class UnitsConfig:
    """What is gathered together; the whole model where nothing is set. Set one of them at most."""

    classes: tuple[str, ...] = ()
    """Module classes that are units, such as Block."""
    min_params: int | None = None
    """Modules with at least so many parameters are units."""
    scan: bool = False
    """The body of the layer scan is the unit."""


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes: float32 or bfloat16."""

    param: str = "float32"
    """Parameters at rest, and the optimizer."""
    compute: str = "float32"
    """Gathered parameters and activations."""
    reduce: str | None = None
    """Gradients while they are reduced; the compute dtype where None."""
    output: str | None = None
    """The model's output; float32 where None and `compute` is narrower."""
    frozen: str | None = None
    """Parameters at rest that are not trained; as `param` where None."""


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class DataConfig:
    """What is read."""

    kind: Kind = "embedded"
    """embedded: the source of Python's standard library, on every machine. text: files, folders, .jsonl. tokens: what
    `fsdp-jax tokenize` wrote. instructions: Alpaca's format. datasets: of Hugging Face. images: and their classes."""
    path: str | None = None
    """Where they are: a file or folder, or a dataset's name. None where the kind has some of its own: embedded,
    instructions (a small set in English), images (generated)."""
    sequence_length: int = 128
    """Tokens that a model sees at once; of a t5, its input."""
    target_length: int | None = None
    """Tokens that a t5 writes at most; a quarter of sequence_length where None."""
    tokenizer: str | None = None
    """How text becomes tokens: bytes, or a tokenizer.json or its folder. None is that of the tokens at `path`, or of
    the folder `model.weights`, and bytes where neither has one."""
    packing: bool = False
    """Keep the documents of a text apart: none sees another that lies in the same row. Instructions always are."""
    field: str = "text"
    """The text of a record, in .jsonl, .json and datasets."""
    split: str = "train"
    """Of datasets."""
    held_out: float | None = None
    """About the share kept from training, 0 to 0.5; None is 0.05, or what the tokens at `path` were split with."""
    invalid: Literal["error", "replace", "skip"] = "error"
    """Text that is not UTF-8: an error, or its bytes replaced, or its document skipped; both are counted."""
    too_long: Literal["truncate", "skip"] = "truncate"
    """Instructions that do not fit a row are cut, or skipped; both are counted."""


@dataclass(frozen=True)
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
    local_batch: bool = True
    """Each device runs the loss on its own rows, with explicit collectives (prefetch, precision.reduce and
    deferred_reduction need it). False runs it on the global batch, where XLA inserts the collectives."""
    loss_chunk: int | None = None
    """Tokens of the vocabulary whose logits are made at once, and again in the backward; None makes all at once."""
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
    sample: int = 400
    """Tokens of the sample that is printed at the end, or predictions for a few images; 0 prints none."""
    abort_after: int | None = 10
    """Give up after so many steps in a row that were not finite; never where None."""


@dataclass(frozen=True)
class ClusterConfig:
    """Several processes as one run: all three keys, or none."""

    coordinator: str | None = None
    """HOST:PORT where process 0 listens."""
    processes: int | None = None
    """How many there are."""
    process: int | None = None
    """Which one this is, from 0."""


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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
    lora: LoraConfig = LoraConfig()
    mesh: MeshConfig = MeshConfig()
    units: UnitsConfig = UnitsConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


LEAST = {
    "optimizer.learning_rate": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0,
    "train.steps": 1,
    "train.global_batch_size": 1,
    "train.accumulation": 1,
    "train.devices": 1,
    "train.log_every": 1,
    "train.eval_every": 1,
    "train.loss_chunk": 1,
    "train.sample": 0,
    "train.seed": 0,
    "lora.rank": 1,
    "data.target_length": 1,
    "train.eval_batches": 1,
    "train.abort_after": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "checkpoint.every_minutes": 0,
    "checkpoint.keep_every": 1,
    "checkpoint.step": 0,
}
"""The smallest value of keys that have one."""
