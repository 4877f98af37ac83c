"""The layout as a tree: every byte is in it once, alike layers share a row, pages are sound."""

import re
import sys
from dataclasses import replace

import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from pages import LOADS, Outline
from reference import Chain, on_eight

import fsdp_jax as fsdp
from fsdp_jax.models import GPT, preset
from fsdp_jax.views.layout_tree import LayoutTree, StateArray


def of_class(outline, name):
    """The attributes of the elements of a class."""
    return [attrs for _, attrs in outline.tags if name in (attrs.get("class") or "").split()]


@pytest.fixture(scope="module")
def stacked():
    config = preset("tiny", layers=4)
    mesh = fsdp.make_mesh(data=4, replica=2)
    return fsdp.fully_shard(
        lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), mesh, "hybrid_shard"
    ).layout


def tiny(rngs):
    return GPT(preset("tiny", layers=2), rngs=rngs)


def layers(rngs):
    return Chain([nnx.Linear(64, width, rngs=rngs) for width in [64] * 6 + [128]])


def row_of(tree, path):
    (row,) = [row for row in tree.rows() if row.path == path]
    return row


def test_the_tree_has_every_byte_once(stacked):
    tree = stacked.tree()
    params = tree.roots[0]
    assert params.own_bytes == stacked.per_device("params")
    other = sum(root.own_bytes for root in tree.roots[1:])
    assert params.other_bytes + other == stacked.per_device("optimizer") + stacked.per_device(
        "other"
    )
    for row in tree.rows():
        if row.children:
            assert row.own_bytes == sum(child.own_bytes for child in row.children)
            assert row.other_bytes == sum(child.other_bytes for child in row.children)
    leaves = [row for row in tree.rows() if not row.children]
    alone = [leaf for leaf in stacked if leaf.part == "other"]
    assert len(leaves) == len(stacked.by_path) + 1 + len(alone)  # and the optimizer's count


def test_stacked_layers_are_one_row_with_their_moments(stacked):
    tree = stacked.tree()
    assert [row.path for row in tree.rows() if "stacked" in row.label] == ["blocks"]
    assert row_of(tree, "blocks").label == "blocks x 4 (stacked)"
    kernel = row_of(tree, "blocks/mlp/up/kernel")
    assert [array.kind for array in kernel.node.arrays] == ["", "mu", "nu"]
    leaf = stacked.by_path["blocks/mlp/up/kernel"]
    assert kernel.own_bytes == leaf.bytes_per_device
    assert kernel.other_bytes == 2 * leaf.bytes_per_device
    assert [segment.axes for segment in kernel.segments] == [("data",), ("data",)]
    assert tree.kinds == "mu, nu"


def test_layers_that_are_alike_share_a_row():
    layout = on_eight(layers, optax.adamw(1e-3)).layout
    tree = layout.tree()
    labels = [row.label for row in tree.rows() if row.level == 2]
    assert labels == ["0-5 x 6", "6"]
    kernel = row_of(tree, "layers/0-5/kernel")
    assert kernel.array == "6 x float32[64,64]"
    assert kernel.own_bytes == 6 * layout.by_path["layers/0/kernel"].bytes_per_device
    assert tree.roots[0].own_bytes == layout.per_device("params")
    # all seven are alike where only the names of the layers differ
    sections = {"parameters": {f"block_{i}/w": (array(),) for i in (0, 2, 4, 7)}}
    assert [row.label for row in made(sections).rows()][1:] == ["block_0, 2, 4, 7/w x 4"]


def array(kind="", shape=(4, 8), reason="a reason", spec="P()", axes=()):
    return StateArray(kind, shape, "float32", spec, axes, 128, reason)


def made(sections):
    return LayoutTree("a summary", [], {"data": 8}, sections)


def test_copies_and_other_specs_are_told_apart():
    precision = fsdp.Precision(compute="bfloat16")
    layout = on_eight(tiny, optax.adamw(1e-3), strategy="zero1", precision=precision).layout
    tree = layout.tree()
    kernel = row_of(tree, "blocks/mlp/up/kernel")
    assert kernel.spec == "P(None, None, 'data'); copies P()"
    assert kernel.others == ["copies bfloat16[2,128,512] P()"]
    assert [segment.axes for segment in kernel.segments] == [("data",), ("data",), ()]
    assert "model_state" not in tree.kinds


def test_a_factored_moment_is_beside_its_parameter(stacked):
    factored = on_eight(tiny, optax.adafactor(1e-3, min_dim_size_to_factor=32)).layout
    kernel = row_of(factored.tree(), "blocks/mlp/up/kernel")
    assert {array.kind for array in kernel.node.arrays} >= {"v_row", "v_col"}


def test_text(stacked):
    text = str(stacked.tree())
    summary, header, _, *rows = text.splitlines()
    assert summary == stacked.summary()
    assert re.split(r"  +", header) == [
        *("per device", "bytes", "mu, nu", "share", "spec", "array")
    ]
    assert rows[-1].startswith("units: ")
    assert max(map(len, text.splitlines())) <= 120
    assert "largest dim divisible" not in text
    assert "largest dim divisible by 4" in str(stacked.tree(reasons=True))


def test_rich_has_the_mesh_axes_in_colour(stacked):
    from rich.console import Console

    console = Console(width=100, color_system="standard", force_terminal=True)
    with console.capture() as capture:
        console.print(stacked.tree())
    colored = capture.get()
    assert "\x1b[1;33m'data'\x1b[0m" in colored
    assert "'data'" in str(stacked.tree())


def test_pages_are_well_formed_and_load_nothing(stacked, tmp_path):
    tree = stacked.tree()
    tree.save(tmp_path / "layout.html")
    page = (tmp_path / "layout.html").read_text()
    for html in (page, stacked._repr_html_()):
        elements = Outline(html)
        leaves = [row for row in tree.rows() if not row.children]
        assert len(of_class(elements, "leaf")) == len(leaves)
        assert len(of_class(elements, "why")) == len(leaves)
        assert of_class(elements, "m")
        segments = sum(len(row.segments) for row in tree.rows())
        bars = [attrs for tag, attrs in elements.tags if tag == "u"]
        assert len(bars) == segments
        assert all(re.fullmatch(r"(m )?k\d", bar["class"]) for bar in bars)
        assert "color-scheme:light dark" in html
        assert "[data-theme=dark] &" in html  # the site's theme, where it is one
        # in a notebook, the rules of one kind of view leave the others alone
        assert [attrs["class"] for attrs in of_class(elements, "fsdp-view")] == [
            "fsdp-view layout_tree"
        ]
        assert "&.layout_tree{ .tree{" in html.replace("\n", "")
        assert not re.search(LOADS, html)
    tree.save(tmp_path / "layout.txt")
    assert (tmp_path / "layout.txt").read_text() == str(tree) + "\n"
    with pytest.raises(fsdp.errors.ArgumentError, match=r"layout\.html"):
        tree.save(tmp_path / "layout.pdf")


def test_hostile_names_are_escaped():
    bad = """</div><script>alert('1')</script>"""
    tree = replace(made({bad: {bad: (array(reason=bad, spec=bad),)}}), summary=bad, footer=[bad])
    elements = Outline(tree.page())
    assert not [tag for tag, _ in elements.tags if tag == "script"]
    assert sum(bad in text for _, text in elements.text) >= 5


def test_thousands_of_leaves_stay_usable():
    """Layers that differ, so that no two share a row: the most that a page may have to hold."""
    arrays = {}
    for number in range(2000):
        shape = (number + 1, 8)
        reason = "heuristic: largest dim divisible by 8 is dim 1"
        path = (
            f"decoder/layers/{number // 20}/module_{number // 4 % 5}/kernel_of_{'abcd'[number % 4]}"
        )
        arrays[path] = tuple(
            array(kind, shape, reason, "P(None, 'data')", ("data",)) for kind in ("", "mu", "nu")
        )
    tree = made({"parameters": arrays})
    page = tree.page()
    assert len(page.encode()) < 1_100_000
    elements = Outline(page)
    assert len(of_class(elements, "leaf")) == 2000
    # only the upper levels are open at first
    shown = [attrs for attrs in of_class(elements, "node") if "open" in attrs]
    assert len(shown) == 2


def test_without_jinja_a_notebook_has_the_table(stacked, monkeypatch):
    from fsdp_jax.views import page

    page.environment.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    html = stacked._repr_html_()
    assert html.startswith("<table>")
    assert "pip install &#x27;fsdp_jax[plan]&#x27;" in html
    monkeypatch.undo()
    assert "fsdp-view" in stacked._repr_html_()


def test_a_layout_is_saved_as_its_tree(stacked, tmp_path):
    stacked.save(tmp_path / "layout.txt")
    assert (tmp_path / "layout.txt").read_text() == f"{stacked.tree().text()}\n"


def test_state_in_host_memory_says_so():
    layout = on_eight(tiny, optax.adamw(1e-3), offload=fsdp.Offload(optimizer=True)).layout
    kernel = row_of(layout.tree(), "blocks/mlp/up/kernel")
    assert kernel.spec == "P(None, None, 'data'); mu, nu P(None, None, 'data'), on the host"
    assert "in host memory" in kernel.reason
    assert jnp.dtype(kernel.node.arrays[0].dtype) == jnp.float32
