"""Windows of a stream: every token is predicted once, and documents can be kept apart."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from fsdp_jax.data.tokenizer import ByteTokenizer
from fsdp_jax.data.windows import Windows, encode_stream
from fsdp_jax.errors import ConfigError


def test_windows_overlap_by_one_token():
    windows = Windows(np.arange(13, dtype=np.uint8), sequence_length=4)
    assert [windows[i]["tokens"].tolist() for i in range(len(windows))] == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [8, 9, 10, 11, 12],
    ]
    assert len(Windows(np.arange(12), sequence_length=4)) == 2
    assert windows.settings == {"sequence_length": 4, "corpus_tokens": 13}


def test_a_stream_is_each_text_and_its_end_token():
    stream = encode_stream(["ab", "c"], ByteTokenizer())
    assert stream.tokens.tolist() == [97, 98, 0, 99, 0]
    assert stream.tokens.dtype == np.uint16
    assert stream.starts.tolist() == [0, 3]
    assert not stream.tokens.flags.writeable
    empty = encode_stream([], ByteTokenizer())
    assert len(empty.tokens) == len(empty.starts) == 0


def test_documents_in_one_row_have_their_own_segments():
    stream = encode_stream(["ab", "cdefg"], ByteTokenizer())  # a b 0 c d e f g 0
    windows = Windows(stream.tokens, sequence_length=4, starts=stream.starts)
    first, second = windows[0], windows[1]
    assert first["tokens"].tolist() == [97, 98, 0, 99, 100]
    assert first["segments"].tolist() == [1, 1, 1, 2]
    assert first["positions"].tolist() == [0, 1, 2, 0]
    assert first["mask"].tolist() == [1, 1, 0, 1]
    assert second["segments"].tolist() == [1, 1, 1, 1]
    assert second["positions"].tolist() == [0, 1, 2, 3]
    assert second["mask"].tolist() == [1, 1, 1, 1]
    dtypes = {"tokens": "int32", "segments": "int32", "positions": "int32", "mask": "float32"}
    assert {name: array.dtype.name for name, array in first.items()} == dtypes
    assert windows.settings == {"sequence_length": 4, "corpus_tokens": 9, "segments": True}


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=20), length=st.integers(1, 10))
def test_segments_never_mix_documents(lengths, length):
    starts = np.cumsum(lengths) - lengths
    # token = 100 * document + position in it
    tokens = np.concatenate([100 * number + np.arange(n) for number, n in enumerate(lengths, 1)])
    if len(tokens) <= length:
        return
    windows = Windows(tokens, sequence_length=length, starts=starts)
    seen = []
    for row in (windows[i] for i in range(len(windows))):
        targets_document, position = row["tokens"] // 100, row["tokens"] % 100
        document, segments, positions = targets_document[:-1], row["segments"], row["positions"]
        np.testing.assert_array_equal(document[:, None] == document, segments[:, None] == segments)
        assert segments[0] == 1
        assert segments.min() > 0
        same_document = targets_document[1:] == targets_document[:-1]
        np.testing.assert_array_equal(row["mask"], same_document)
        begins = np.r_[True, segments[1:] != segments[:-1]]
        assert not positions[begins].any()
        np.testing.assert_array_equal(np.diff(positions)[~begins[1:]], 1)
        later = document != document[0]
        np.testing.assert_array_equal(positions[later], position[:-1][later])
        seen += row["tokens"][:-1].tolist()
    assert seen == tokens[: len(seen)].tolist()
    assert len(tokens) - len(seen) <= length


def test_a_corpus_shorter_than_a_window_is_refused():
    with refused(error=ConfigError, expected="at least 5 tokens", got="a corpus of 4 tokens"):
        Windows(np.arange(4), sequence_length=4)
    with refused(error=ConfigError, expected="at least 1"):
        Windows(np.arange(4), sequence_length=0)
