"""Attention kernels that a compiled program calls: what they compute, which its text tells by their
names alone.
"""

import re
from collections.abc import Sequence

from fsdp_jax.hlo.parser import Instruction, Shape
from fsdp_jax.planner.machines.matmul import Product

# (name in the program, products of queries by keys that its algorithm needs, [B, H, T, K] rather
# than [B, T, H, K]; cuDNN takes both and says which). Forward: scores and their use. Backward:
# scores again and four derivatives. A kernel that walks keys and queries in two passes computes two
# of them twice; rates of attention are measured by the algorithm's count, so this one is too.
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
_CAUSAL = re.compile(r'"mask_type":\s*"(\w+)"')
_HEADS_THIRD = re.compile(r'_batch_dimensions":\s*\["0",\s*"2"\]')


def attention_products(
    one: Instruction, operands: Sequence[Sequence[Shape]]
) -> tuple[Product, ...] | None:
    """The products of an attention kernel in a compiled program; None where it is no kernel that is
    known here.

    Causal kernels skip what is masked: half is counted. cuDNN says whether it masks; of the others,
    which are called by language models, it is assumed.

    Args:
        one: the custom call.
        operands: shapes of what it reads.

    """
    said = f"{one.attribute('custom_call_target')} {one.op_name} {one.name}"
    mask = _CAUSAL.search(one.attributes)
    causal = mask is None or "CAUSAL" in mask.group(1)
    return kernel_products(
        said, [shapes[0] for shapes in operands if shapes], causal, one.attributes
    )


def kernel_products(
    said: str, operands: Sequence[Shape], causal: bool = True, attributes: str = ""
) -> tuple[Product, ...] | None:
    """The products of an attention kernel that `said` names, in a program or in a trace.

    Args:
        said: what holds its name.
        operands: queries and keys are the first two of floating dtype, with four dims, or three
            where a batch of one was left out.
        causal: half of the products is skipped.
        attributes: of a cuDNN call, which say where its heads are.

    """
    found = next(
        ((count, heads_first) for name, count, heads_first in _KERNELS if name.search(said)), None
    )
    arrays = [
        _batched(shape)
        for shape in operands
        if len(shape.dims) in (3, 4) and "float" in shape.dtype
    ]
    if found is None or len(arrays) < 2:
        return None
    count, heads_first = found
    if not count:
        return ()
    if heads_first is None:
        heads_first = not _HEADS_THIRD.search(attributes)
    query, key = arrays[0], arrays[1]
    B, T, H, K = _sizes(query, heads_first)
    S = _sizes(key, heads_first)[1]
    rows = max(1, T // 2) if causal else T
    return (Product(B * H, rows, S, K, query.dtype, count, fused=True),)


def _batched(shape: Shape) -> Shape:
    return shape if len(shape.dims) == 4 else Shape(shape.dtype, (1, *shape.dims))


def _sizes(shape: Shape, heads_first: bool) -> tuple[int, int, int, int]:
    """(batch, sequence, heads, head dim)."""
    B, second, third, K = shape.dims
    return (B, third, second, K) if heads_first else (B, second, third, K)
