"""What a user says of the data of a run; importing it loads nothing else of this package."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fsdp_jax.limits import KeyNote, Positive

HELD_OUT = 0.05
IMAGES, SIDE = 50_000, 32  # of drawn images
Invalid = Literal["error", "replace", "skip"]
"""What to do with text that is not UTF-8: raise, repair with U+FFFD and count, skip and count."""
SpecialTokens = Literal["text", "tokens"]
"""Whether the spelling of a special token in a text is text, or that token; both are counted."""
TooLong = Literal["truncate", "skip"]
"""Whether an example that no row can hold is truncated or skipped; both are counted."""


@dataclass(frozen=True)
class DataKind:
    """A kind of data: for which models it is, and by which keys; `sources._OPEN` opens it."""

    tasks: tuple[str, ...]  # of the models that can read it
    path: Literal["required", "optional", "unused"]
    keys: tuple[str, ...] = ()  # optional ones that it uses; any other that is set is refused
    packs: bool = False  # rows hold several documents whether or not `packing` is set
    is_tokenized: bool = False  # the tokenizer is the one that the data were written with


TEXT = ("text", "text to text")
KINDS = {
    "embedded": DataKind(TEXT, "unused", ("packing", "special_tokens", "tokenizer")),
    "text": DataKind(
        TEXT, "required", ("field", "invalid", "packing", "special_tokens", "tokenizer")
    ),
    "tokens": DataKind(TEXT, "required", ("packing", "tokenizer"), is_tokenized=True),
    "instructions": DataKind(
        TEXT,
        "optional",
        ("invalid", "packing", "special_tokens", "split", "tokenizer", "too_long"),
        packs=True,
    ),
    "datasets": DataKind(
        TEXT, "required", ("field", "invalid", "packing", "special_tokens", "split", "tokenizer")
    ),
    "images": DataKind(("images",), "optional"),
}
KindName = Literal[*KINDS]  # type: ignore[valid-type]


def kinds_for(task: str) -> tuple[str, ...]:
    """Lists the kinds of data for models of a task, the default first."""
    return tuple(name for name, kind in KINDS.items() if task in kind.tasks)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The training data: which they are, and how they become rows of a batch."""

    # embedded: the source of Python's standard library; text: files, folders, .jsonl(.gz); tokens:
    # the output of `fsdp-jax tokenize`; instructions: Alpaca's format, prompt and completion, or
    # chats (messages); datasets: Hugging Face's; images: labelled images.
    kind: KindName = "embedded"
    # File, folder or name of the dataset. Not needed by embedded, instructions (a small English
    # set is included) and images (drawn).
    path: Annotated[str | None, KeyNote(may_differ=True)] = None
    # Tokens per sequence; of an encoder-decoder, of its input.
    sequence_length: Annotated[Positive, KeyNote(("seq_len", "sequence_length"))] = 128
    # Tokens of an encoder-decoder's target at most; default: a quarter of sequence_length.
    target_length: Positive | None = None
    # bytes, or a tokenizer.json or its folder; default: that of the tokens at `path` or of the
    # folder `model.weights`, else bytes.
    tokenizer: Annotated[str | None, KeyNote(may_differ=True)] = None
    # Mask attention between documents that share a row; always on for instructions.
    packing: bool = False
    field: str = "text"  # Field of a record that holds the text, in .jsonl, .json and datasets.
    split: str = "train"  # Split of a Hugging Face dataset.
    # Share held out for evaluation, 0 to 0.5; default: 0.05, or as the tokens at `path`.
    held_out: float | None = None
    # Text that is not UTF-8: raise an error, replace its bytes, or skip its document (counted).
    invalid: Invalid = "error"
    # What <|im_start|> and other special tokens are where a text, a prompt or a completion spells
    # them: text, or tokens (of which the end-of-text token ends a document). Both are counted.
    special_tokens: SpecialTokens = "text"
    # Instructions longer than a row: truncate or skip them (counted).
    too_long: TooLong = "truncate"

    # What follows from the model and the run.
    vocab_size: int | None = None  # of the model, which must have every id; None: not checked
    weights: str | None = None  # whose vocabulary it is; None: that of the configuration
    classes: int | None = None  # of the model, which must have every label; None: not checked
    image_size: int = SIDE  # of drawn images, in pixels
    images: int = IMAGES  # drawn for training
    seed: int = 0  # of the corruption of text, and of drawn images

    @property
    def share(self) -> float:
        """The share that is held out where shards do not state it: `held_out`, or the default."""
        return HELD_OUT if self.held_out is None else self.held_out
