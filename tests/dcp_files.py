"""Writes checkpoints as `torch.distributed.checkpoint` does, without torch.

`tests/checkpoint/fsdp2.tar.xz` is one that torch itself wrote: the format here is the format there.
"""

import io
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

METADATA = "torch.distributed.checkpoint.metadata"
STORAGES = {"float32": "FloatStorage", "bfloat16": "BFloat16Storage", "int64": "LongStorage"}


@dataclass
class Made:
    """What a pickle makes by calling `name`, and the state that it gets."""

    name: str
    args: tuple = ()
    state: Any = None


def pickled(value: Any) -> bytes:
    """Writes a pickle of plain data, and of calls by name."""
    return b"\x80\x02" + _operations(value) + b"."


def _operations(value: Any) -> bytes:
    if isinstance(value, Made):
        made = _name(value.name) + _operations(value.args) + b"R"
        if value.state is not None:
            made += _operations(value.state) + b"b"
        return made
    if isinstance(value, bool) or value is None:
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        return b"\x8a\x08" + struct.pack("<q", value)
    if isinstance(value, bytes):  # operations of their own
        return value
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    items = b"".join(map(_operations, value)) if not isinstance(value, dict) else b""
    if isinstance(value, tuple):
        return b"(" + items + b"t"
    if isinstance(value, list):
        return b"](" + items + b"e"
    pairs = b"".join(_operations(key) + _operations(each) for key, each in value.items())
    return b"}(" + pairs + b"u"


def _name(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def _size(shape: tuple[int, ...]) -> Made:
    return Made("torch.Size", (tuple(shape),))


def saved_tensor(values: np.ndarray) -> bytes:
    """Writes a tensor as `torch.save` does: its pickle and its values in a zip archive."""
    strides = [step // values.dtype.itemsize for step in values.strides]
    storage = ("storage", _name(f"torch.{STORAGES[values.dtype.name]}"), "0", "cpu", values.size)
    tensor = Made(
        "torch._utils._rebuild_tensor_v2",
        (_operations(storage) + b"Q", 0, values.shape, tuple(strides), False, None),
    )
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled(tensor))
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", values.tobytes())
    return content.getvalue()


def write_dcp(
    folder: Path, tensors: dict[str, np.ndarray], ranks: int = 1, overlap: int = 0
) -> None:
    """Writes a checkpoint of so many ranks, whose shards are of the first dim, as FSDP2's are.

    `overlap`: rows by which all but the first shard claim to begin too early.
    """
    folder.mkdir(parents=True)
    stored, described = {}, {}
    ends = dict.fromkeys(range(ranks), 0)
    for name, values in tensors.items():
        chunks = []
        step = -(-len(values) // ranks) if values.ndim else 1
        for rank, first in enumerate(range(0, len(values) if values.ndim else 1, step)):
            part = np.ascontiguousarray(values[first : first + step]) if values.ndim else values
            claimed = max(first - overlap, 0)
            start = (claimed,) + (0,) * (values.ndim - 1) if values.ndim else ()
            content = saved_tensor(part)
            file = f"__{rank}_0.distcp"
            with (folder / file).open("ab") as written:
                written.write(content)
            index = Made(
                f"{METADATA}.MetadataIndex",
                state={"fqn": name, "offset": _size(start), "index": rank},
            )
            stored[id(index)] = (
                index,
                Made(
                    "torch.distributed.checkpoint.filesystem._StorageInfo",
                    state={
                        "relative_path": file,
                        "offset": ends[rank],
                        "length": len(content),
                    },
                ),
            )
            ends[rank] += len(content)
            chunks.append(
                Made(
                    f"{METADATA}.ChunkStorageMetadata",
                    state={"offsets": _size(start), "sizes": _size(part.shape)},
                )
            )
        properties = Made(
            f"{METADATA}.TensorProperties", state=(_name(f"torch.{values.dtype}"), False)
        )
        described[name] = Made(
            f"{METADATA}.TensorStorageMetadata",
            state={"properties": properties, "size": _size(values.shape), "chunks": chunks},
        )
    places = b"}(" + b"".join(_operations(i) + _operations(p) for i, p in stored.values()) + b"u"
    metadata = Made(
        f"{METADATA}.Metadata", state={"state_dict_metadata": described, "storage_data": places}
    )
    (folder / ".metadata").write_bytes(pickled(metadata))
