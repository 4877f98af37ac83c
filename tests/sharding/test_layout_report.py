"""A layout as JSON, text and a page."""

import json

import optax
import pytest

from fsdp_jax import Offload, fully_shard, make_mesh
from fsdp_jax.models import GPT, preset
from fsdp_jax.sharding.report import layout_html, layout_json, layout_report, totals_table

FIELDS = ["path", "part", "shape", "dtype", "spec", "rule", "reason", "memory"]
FIELDS += ["bytes", "bytes_per_device"]


def shard(**settings):
    config = preset("tiny", layers=2)
    mesh = make_mesh()
    return fully_shard(lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), mesh, **settings)


@pytest.fixture(scope="module")
def layout():
    return shard().layout


def test_json_has_exactly_its_fields(layout):
    shown = json.loads(json.dumps(layout_json(layout)))
    assert list(shown) == ["mesh", "strategy", "leaves", "totals"]
    assert shown["mesh"] == {"replica": 1, "data": 8}
    assert shown["strategy"] == "full_shard"
    assert all(list(leaf) == FIELDS for leaf in shown["leaves"])
    assert all(len(leaf["spec"]) == len(leaf["shape"]) for leaf in shown["leaves"])
    assert {leaf["part"] for leaf in shown["leaves"]} == {"params", "optimizer", "other"}


def test_json_adds_up(layout):
    shown = layout_json(layout)
    for part, total in shown["totals"].items():
        leaves = [leaf for leaf in shown["leaves"] if part in ("total", leaf["part"])]
        for field in ("bytes", "bytes_per_device"):
            assert total[field] == sum(leaf[field] for leaf in leaves)
    (kernel,) = [leaf for leaf in shown["leaves"] if leaf["path"] == "blocks/mlp/up/kernel"]
    assert kernel["spec"] == [None, None, ["data"]]
    assert kernel["bytes"] == 8 * kernel["bytes_per_device"] == 4 * 2 * 128 * 512


def test_report_is_readable(layout):
    report = layout_report(layout)
    assert max(map(len, report.splitlines())) <= 140
    order = [
        "full_shard on",
        "per device",
        "largest replicated",
        "parameters",
        "optimizer state",
        "other state",
    ]
    places = [report.index(title) for title in order]
    assert places == sorted(places)
    assert all(path in report for path in layout.by_path)
    assert "0/mu/blocks/mlp/up/kernel (+1)" in report


def test_nothing_is_called_replicated_on_one_device():
    import jax

    config = preset("tiny", layers=1, width=32)
    mesh = make_mesh(devices=jax.devices()[:1])
    alone = fully_shard(lambda rngs: GPT(config, rngs=rngs), optax.sgd(1e-3), mesh).layout
    assert "largest replicated leaves\nnone" in layout_report(alone)


def test_page(layout):
    page = layout_html(layout)
    assert page.startswith("<!doctype html>")
    assert "blocks/mlp/up/kernel" in page


def test_what_is_in_host_memory_is_told_apart(layout):
    without = layout
    layout = shard(offload=Offload(optimizer=True)).layout
    totals = layout_json(layout)["totals"]
    assert totals["params"]["host_bytes_per_device"] == 0
    assert totals["optimizer"]["host_bytes_per_device"] == layout.per_device("optimizer", host=True)
    moments = [leaf for leaf in layout_json(layout)["leaves"] if leaf["memory"] == "host"]
    assert {leaf["part"] for leaf in moments} == {"optimizer"}
    report = layout_report(layout)
    assert "on the host" in report
    assert "in host memory; follows its parameter" in report
    # What is sharded counts, wherever it is.
    ratios = [totals_table(each).splitlines()[-1].split()[-1] for each in (layout, without)]
    assert ratios[0] == ratios[1]
