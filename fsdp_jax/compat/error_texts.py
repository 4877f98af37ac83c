"""Texts of errors of jax, XLA, optax and of libraries that write files.

By them an error is told from others of the same type.
"""

import errno
import re


class ErrorText:
    """A text of errors, a regular expression."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)

    def found_in(self, error: BaseException) -> re.Match[str] | None:
        """Finds the match in an error's text; None for another error."""
        return self._pattern.search(str(error))


# jax

CONSTRAINT_WITHOUT_MESH = ErrorText("non-empty mesh")  # of with_sharding_constraint
RESHARD_WITHOUT_MESH = ErrorText("PartitionSpec when you are not under a mesh context")
NOT_EXPLICIT = ErrorText(r"with axis name: (\S+) of type: (?:AxisType\.)?(Auto|Manual)")
NOT_AUTO = ErrorText("only refer to Auto axes of the mesh")  # of with_sharding_constraint
NO_AXIS = ErrorText(r"(?:Resource axis: |Unreduced axes )(\S+) .*is not found")  # in the mesh
OTHER_MESH = ErrorText(r"[Cc]ontext mesh .* (should|must) match")  # that of an array or sharding
NOT_TYPED = ErrorText(
    "[Ee]xplicit sharding|sharding rule for|unreduced rule for|input that is unreduced"
    "|mesh should be the same across"
)
UNBOUND_AXIS = ErrorText(r".*unbound axis name: (\w+)")  # no vmap or shard_map around binds it
STARTED_ALREADY = ErrorText(r"initialize\(\) must be called before any JAX")  # jax.distributed's
EFFECTS = ErrorText("Effects not supported in (?:partial-eval|AD) of `checkpoint`")  # io_callback
LOST_VARIABLE = ErrorText(r"Var\(id=\d+\):")  # of jax 0.10: a checkpoint with new_ref
MAPPED_RESULT = ErrorText("vmap has mapped output")  # as of a mutable array made under vmap
OF_KEYS = ErrorText("key<")  # an operation on numbers got a random key
OF_ARRAYS = ErrorText(  # an array or a random key is used as an object of another kind
    "(?:Tracer|PRNGKeyArray)'? (?:object )?(?:is not callable|has no attribute)"
)

# optax

EVALUATES_AGAIN = ErrorText("value_fn|grad_fn|obj_fn")  # a line search, or SAM, lacks the loss
OF_PAIRS = ErrorText("no attribute '(?:fast|slow)'")  # `lookahead` gets parameters alone
UNEXPECTED_ARGUMENT = ErrorText(r"unexpected keyword argument '(\w+)'")  # Python's own

# XLA

NO_OPTION = ErrorText("No such compile option: '([^']*)'")
NO_TILES = ErrorText("find output tile sizes")  # see `xla_flags.WITHOUT_TRITON`
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"(?P<size>\d+(?:\.\d+)?)(?P<unit>[KMGT]?)i?B?"
_USED = ErrorText(rf"(?i)Used {_SIZE} of [\d.]+[KMGT]? hbm")
_EXHAUSTED = ErrorText("RESOURCE_EXHAUSTED|CUDA_ERROR_OUT_OF_MEMORY")
# without it what is exhausted is a quota of a file server, or the length of a message
_OF_MEMORY = ErrorText(r"(?i)memory|\bhbm\b|\b(?:allocat|reserv)")
_OF_A_KERNEL = ErrorText(r"(?i)shared memory|\bvmem\b|\bsmem\b")  # no setting of a step frees it
_REQUESTED = ErrorText(rf"(?i)(?:allocate|allocating|reserve|request for) {_SIZE}")
_TEMPORARIES = ErrorText(rf"(?i)memory required for HLO temporaries \({_SIZE}\) exceeds available")

# Libraries in C++ and Rust, such as tensorstore: their errors have no `errno`.

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_TEXTS = ErrorText("No space left on device|File too large|Disk quota exceeded")


def first_line(error: BaseException) -> str:
    """Takes an error's first line, without the devices and the source line that jax adds."""
    line = str(error).partition("\n")[0].partition(" [tensorstore_spec")[0]
    return re.sub(r", device_kind=[^)]*| This error occurs at source:.*", "", line)


def in_one_line(error: BaseException | None) -> str:
    """Formats an error's message in one line, without what jax adds below it."""
    lines = [" ".join(line.split()) for line in str(error).partition("\n-----")[0].splitlines()]
    return "; ".join(filter(None, lines)) or type(error).__name__


def refused_bytes(error: BaseException) -> int | None:
    """Reads the bytes that XLA says a refused program needs; None for an error of another kind.

    Arguments are among the temporaries that libtpu names.
    """
    return _bytes_in(error, _USED, _TEMPORARIES)


def requested_bytes(error: BaseException) -> int | None:
    """Reads the bytes of the allocation that failed while a program ran; None if not told."""
    return _bytes_in(error, _REQUESTED)


def _bytes_in(error: BaseException, *texts: ErrorText) -> int | None:
    """Reads the size in the first of the texts that an error has; None where it has none."""
    for text in texts:
        if match := text.found_in(error):
            return int(float(match["size"]) * _UNITS[match["unit"].upper()])
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether XLA says that a device's memory is exhausted, as it compiles or runs."""
    is_exhausted = _EXHAUSTED.found_in(error) and _OF_MEMORY.found_in(error)
    return bool(is_exhausted) and not _OF_A_KERNEL.found_in(error)


def is_disk_full(error: BaseException) -> bool:
    """Tells whether an error says that a disk has no space left."""
    code = getattr(error, "errno", None)
    return code in _FULL if code else _FULL_TEXTS.found_in(error) is not None
