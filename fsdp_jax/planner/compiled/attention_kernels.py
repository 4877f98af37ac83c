"""The matmuls of attention kernels, which a program's text identifies by their names alone."""

import re
from collections.abc import Sequence
from math import prod

from fsdp_jax.hlo.parser import Shape
from fsdp_jax.planner.machines.roofline import Matmul

# (name in the program, matmuls of queries by keys that its algorithm needs, [B, H, T, K] rather
# than [B, T, H, K]; cuDNN takes both and says which). Forward: scores and their use. Backward:
# scores again and four derivatives. A kernel that walks keys and queries in two passes computes two
# of them twice; attention rates are measured by the algorithm's count, so this one is too.
_KERNELS = (
    (re.compile(r"__cudnn\$fmha\w*Backward"), 5, None),
    (re.compile(r"__cudnn\$fmha"), 2, None),
    (re.compile(r"\bmha_preprocess_backward\b"), 0, False),
    (re.compile(r"\bmha_forward\b"), 2, False),
    (re.compile(r"\bmha_backward\b"), 5, False),
    (re.compile(r"splash_mha_dkv|splash_mqa_dkv"), 3, True),
    (re.compile(r"splash_mha_dq|splash_mqa_dq"), 2, True),
    (re.compile(r"splash_mha_fwd|splash_mqa_fwd|splash_mha_forward"), 2, True),
)
_MASK = re.compile(r'"mask_type":\s*"(\w+)"')
_HEADS_THIRD = re.compile(r'_batch_dimensions":\s*\["0",\s*"2"\]')


def attention_matmuls(
    name: str, operands: Sequence[Shape], attributes: str = ""
) -> tuple[Matmul, ...] | None:
    """Finds the matmuls of an attention kernel of a program or a trace; None if it is unknown.

    `name` contains the kernel's name. Queries and keys are the first two operands of floating
    dtype, with four dims, or three where a batch of one was left out. Causal kernels skip masked
    blocks: half is counted. The attributes of a cuDNN call tell its mask and the position of its
    heads; the other kernels, which language models call, are assumed to be causal, and named.
    """
    found = ((pattern.search(name), *kernel) for pattern, *kernel in _KERNELS)
    kernel = next((each for each in found if each[0]), None)
    arrays = [each for each in operands if len(each.dims) in (3, 4) and "float" in each.dtype]
    if kernel is None or len(arrays) < 2:
        return None
    called, count, heads_first = kernel
    if not count:
        return ()
    if heads_first is None:
        heads_first = not _HEADS_THIRD.search(attributes)
    # scores of T queries by S keys, for each head of each example; of causal ones half the queries
    query, key = arrays[:2]
    B, T, H, K = _batch_sequence_heads(query, heads_first)
    S = _batch_sequence_heads(key, heads_first)[1]
    mask = _MASK.search(attributes)
    rows, keys, assumed = T, S, ""
    if mask is None:
        assumed = called[0]
    if mask is None or "CAUSAL" in mask[1]:
        rows, keys = max(1, T // 2), max(1, S // 2)
    return (Matmul(B * H, rows, S, K, query.dtype, count, True, keys, assumed),)


def _batch_sequence_heads(shape: Shape, heads_first: bool) -> tuple[int, int, int, int]:
    """Reads (batch, sequence, heads, head dim) of queries or keys."""
    *batch, T, H, K = shape.dims
    if heads_first:
        T, H = H, T
    return prod(batch), T, H, K
