"""Replica groups in every form that XLA prints, as axes of the mesh."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_jax.hlo.parser import Instruction
from fsdp_jax.hlo.replica_groups import groups_of

MESH = (("replica", 2), ("data", 4))  # device = 4 * replica + data


def read(groups: str, axes: tuple[tuple[str, int], ...] = MESH) -> tuple[int, str]:
    one = Instruction(
        "g", "all-gather", "f32[8]", "%x", f", channel_id=1, {groups}, dimensions={{0}}", False
    )
    return tuple(groups_of(one, axes))


@pytest.mark.parametrize(
    ("groups", "size", "axis"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4, "data"),
        ("{{3,1,0,2},{4,5,6,7}}", 4, "data"),  # in any order
        ("{{0,4},{1,5},{2,6},{3,7}}", 2, "replica"),
        ("{{0,1,2,3,4,5,6,7}}", 8, "replica+data"),
        ("{}", 8, "replica+data"),
        ("{{0,1},{2,3},{4,5},{6,7}}", 2, "?"),  # half of data
        ("{{0,5},{1,4},{2,7},{3,6}}", 2, "?"),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", 1, ""),
        ("[2,4]<=[8]", 4, "data"),
        ("[4,2]<=[2,4]T(1,0)", 2, "replica"),
        ("[1,8]<=[8]", 8, "replica+data"),
        ("mesh['axis_0'=1,'axis_1'=8] {'axis_1'}", 8, "replica+data"),
        ("mesh['a'=2,'b'=4] {'b'}", 4, "data"),
        ("mesh['a'=2,'b'=4] {'a'}", 2, "replica"),
        ("mesh['a'=2,'b'=4] {'b','a'}", 8, "replica+data"),
        ("mesh[a=8] {a:(1)2}", 2, "replica"),  # the first half of a: device // 4
        ("mesh['a'=8] {'a':(2)4}", 4, "data"),
        ("mesh['a'=8] {'a':(2)2}", 2, "?"),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", 4, "data"),  # devices 0 4 1 5 2 6 3 7
        ("mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}", 2, "replica"),
    ],
)
def test_groups(groups, size, axis):
    assert read(f"replica_groups={groups}") == (size, axis)


@pytest.mark.parametrize(
    ("pairs", "size", "axis"),
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", 4, "data"),
        ("{{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}", 4, "data"),  # the last has no one to send to
        ("{{0,4},{4,0}}", 2, "replica"),
        ("{{0,1},{1,4}}", 8, "replica+data"),
        ("{{0,0},{1,1}}", 1, ""),
    ],
)
def test_pairs(pairs, size, axis):
    assert read(f"source_target_pairs={pairs}") == (size, axis)


@pytest.mark.parametrize("groups", ["{{0,1},{2}}", "{{0,1}}", "somewhere"])
def test_invalid_groups_are_refused(groups):
    with pytest.raises(ValueError, match="unreadable program"):
        read(f"replica_groups={groups}")


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_any_axes_of_any_mesh(sizes, data):
    """Groups that span some axes are read as these axes, without those of size 1."""
    axes = tuple((f"axis{i}", size) for i, size in enumerate(sizes))
    along = sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1))))
    size = int(np.prod([sizes[i] for i in along], dtype=int))
    devices = np.arange(np.prod(sizes)).reshape(sizes)
    groups = np.moveaxis(devices, along, range(-len(along), 0)).reshape(-1, size)
    written = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups.tolist())
    expected = "+".join(axes[i][0] for i in along if sizes[i] > 1)
    assert read(f"replica_groups={{{written}}}", axes) == (size, expected)
