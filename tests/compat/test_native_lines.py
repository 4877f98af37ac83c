"""What Gloo prints of its connections is told from what a program prints."""

import mmap
from pathlib import Path

import jaxlib
import pytest
from mend import relied_on

from fsdp_jax.compat.native_lines import GLOO_PARTS, is_of_gloo


@pytest.mark.releases
def test_gloo_parts_are_texts_of_jaxlib():
    with (
        relied_on("jaxlib", "native_lines.GLOO_PARTS", "what Gloo prints of its connections"),
        open(Path(jaxlib.__file__).parent / "libjax_common.so", "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        assert [part for part in GLOO_PARTS if content.find(part.encode()) < 0] == []


# As two processes with four devices each printed it.
RECORDED = """\
[Gloo] Rank 4 is connected to 7 peer ranks. [Gloo] Rank 6 is connected to 7 peer ranks. Expected \
number of connected peer ranks is : 7
Expected number of connected peer ranks is : 7
[Gloo] Rank 2 is connected to [Gloo] Rank 17 peer ranks. Expected number of connected peer ranks \
is : [Gloo] Rank  is connected to 77
 peer ranks. 3 is connected to Expected number of connected peer ranks is : 77 peer ranks. \

Expected number of connected peer ranks is : 7
"""


def test_is_of_gloo_recorded():
    after = False
    for line in [*RECORDED.splitlines(), "", "7"]:
        after = is_of_gloo(line, after)
        assert after, line
    assert not is_of_gloo("")
    assert not is_of_gloo("7")


def test_is_of_gloo_keeps_all_other_lines():
    lines = [
        "step 10: loss 3.833783",
        "[Gloo] Rank 3: connection refused",
        "is connected to 7 peer ranks. step 10: loss 3.8",
        "error: 7 peer ranks are gone",
    ]
    assert [line for line in lines if is_of_gloo(line) or is_of_gloo(line, True)] == []
