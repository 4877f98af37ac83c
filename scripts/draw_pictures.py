"""Draws the pictures of `docs/` and of README as SVG files.

Those of a step's course are schematic: a collective is drawn as long as the matmuls of one unit.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import bench_scale
import jinja2
import numpy as np
import optax

import fsdp_jax as fsdp
from fsdp_jax.models.llama import PRESETS, Llama
from fsdp_jax.planner import fake_devices, parse_topology

ROOT = Path(__file__).parents[1]
FOLDER, RESULTS = ROOT / "docs/static/pictures", ROOT / "benchmarks/results"
# The colours of the library's views: told apart by people who are colour-blind.
COLORS = {
    "compute": "#77aadd",
    "gather": "#eedd88",
    "reduce": "#ee8866",
    "kept": "#99ddff",
    "update": "#44bb99",
    "copy": "#ee6677",
}
LEFT, UNIT, ROW = 190, 44, 30  # pixels: of the labels' column, of a unit of time, of a lane

TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ width }} {{ height }}" \
width="{{ width }}" height="{{ height }}" role="img" aria-label="{{ title }}">
<title>{{ title }}</title>
<style>
text { font: 13px system-ui, sans-serif; fill: #1b1f24 }
.name { fill: #1b1f24 } .head { font-weight: 600; fill: #1b1f24 } .dim { fill: #5c6570 }
.page { fill: #fff } .line { stroke: #d5dae0 } .bar { stroke: #14181d; stroke-width: .6 }
.bar + text { fill: #14181d }
@media (prefers-color-scheme: dark) {
.name, .head { fill: #e6e9ed } .dim { fill: #9aa4af } .page { fill: #14181d }
.line { stroke: #3a424b }
}
</style>
<rect class="page" width="{{ width }}" height="{{ height }}"/>
{% for item in items %}
{%- if item.kind == "text" -%}
<text class="{{ item.style }}" x="{{ item.x }}" y="{{ item.y }}"\
{% if item.middle %} text-anchor="middle"{% endif %}>{{ item.text }}</text>
{% elif item.kind == "line" -%}
<line class="line" x1="{{ item.x }}" y1="{{ item.y }}" x2="{{ item.x2 }}" y2="{{ item.y2 }}"/>
{% else -%}
<rect class="bar" x="{{ item.x }}" y="{{ item.y }}" width="{{ item.width }}" \
height="{{ item.height }}" fill="{{ item.fill }}" rx="2"/>\
<text x="{{ item.x + item.width / 2 }}" y="{{ item.y + item.height / 2 + 4.5 }}" \
text-anchor="middle">{{ item.text }}</text>
{% endif %}
{%- endfor %}
</svg>
"""


@dataclass(frozen=True)
class Bar:
    """What a lane does from `start` to `end`, in units of time."""

    lane: str
    start: float
    end: float
    text: str
    color: str


@dataclass(frozen=True)
class Panel:
    """Lanes below one another, over one time axis, with a heading."""

    heading: str
    lanes: tuple[str, ...]
    bars: tuple[Bar, ...]


def text(x: float, y: float, words: str, style: str = "name", *, middle: bool = False) -> dict:
    """Makes a text, which begins at `x`, or whose middle is there."""
    return {"kind": "text", "x": x, "y": y, "text": words, "style": style, "middle": middle}


def box(x: float, y: float, width: float, height: float, words: str, color: str) -> dict:
    """Makes a box with a text in its middle."""
    fill = COLORS.get(color, color)
    size = {"x": x, "y": y, "width": width, "height": height}
    return {"kind": "box", **size, "text": words, "fill": fill}


def render(title: str, width: float, height: float, items: list[dict]) -> str:
    """Renders a picture."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(TEMPLATE)
    return template.render(title=title, width=width, height=height, items=items)


def lanes(title: str, *panels: Panel) -> str:
    """Draws panels of lanes, one below the other."""
    end = max(bar.end for panel in panels for bar in panel.bars)
    width, items, y = LEFT + end * UNIT + 15, [], 8
    for panel in panels:
        items.append(text(10, y + 16, panel.heading, "head"))
        y += 26
        for lane in panel.lanes:
            items.append({"kind": "line", "x": LEFT, "y": y + ROW, "x2": width - 15, "y2": y + ROW})
            items.append(text(10, y + 20, lane))
            for bar in panel.bars:
                if bar.lane == lane:
                    x, size = LEFT + bar.start * UNIT, (bar.end - bar.start) * UNIT
                    items.append(box(x, y + 4, size - 2, ROW - 8, bar.text, bar.color))
            y += ROW
        y += 12
    items.append(text(LEFT, y + 6, "time →", "dim"))
    return render(title, width, y + 16, items)


GATHER, COMPUTE, REDUCE, MEMORY = "all-gather", "compute", "reduce-scatter", "gathered weights"
LANES = (GATHER, COMPUTE, REDUCE, MEMORY)


def unit_course() -> str:
    """Draws what happens to the weights of three units in a step of `full_shard`."""
    bars, now = [], 0.0
    # Forward: a unit's weights are there from its gather to the end of its call.
    for unit in (1, 2, 3):
        bars += [
            Bar(GATHER, now, now + 1, f"{unit}", "gather"),
            Bar(COMPUTE, now + 1, now + 2, f"{unit}", "compute"),
            Bar(MEMORY, now, now + 2, f"unit {unit}", "kept"),
        ]
        now += 2
    # Backward: gathered again; the gradient leaves as shards.
    for unit in (3, 2, 1):
        bars += [
            Bar(GATHER, now, now + 1, f"{unit}", "gather"),
            Bar(COMPUTE, now + 1, now + 3, f"{unit} backward", "compute"),
            Bar(REDUCE, now + 3, now + 4, f"{unit}", "reduce"),
            Bar(MEMORY, now, now + 3, f"unit {unit}", "kept"),
        ]
        now += 3
    bars.append(Bar(COMPUTE, now + 1, now + 2.2, "update", "update"))
    title = "A step of three units: each is gathered, computed, dropped, and gathered again"
    return lanes(title, Panel("full_shard: three units, forward and backward", LANES, tuple(bars)))


def prefetched() -> str:
    """Draws four units of a forward pass without prefetch, and with it."""
    without, ahead, now = [], [], 0.0
    for unit in (1, 2, 3, 4):
        without += [
            Bar(GATHER, now, now + 1, f"{unit}", "gather"),
            Bar(COMPUTE, now + 1, now + 2, f"{unit}", "compute"),
            Bar(MEMORY, now, now + 2, f"unit {unit}", "kept"),
        ]
        now += 2
    for unit in (1, 2, 3, 4):
        ahead += [
            Bar(GATHER, unit - 1, unit, f"{unit}", "gather"),
            Bar(COMPUTE, unit, unit + 1, f"{unit}", "compute"),
        ]
        # Two units are in memory at once.
        lane = MEMORY if unit % 2 else "… of the next unit"
        ahead.append(Bar(lane, unit - 1, unit + 1, f"unit {unit}", "kept"))
    lanes_of_one = (GATHER, COMPUTE, MEMORY)
    return lanes(
        "Without prefetch a unit waits for its all-gather; with it the gather runs beside compute",
        Panel('prefetch="none": each gather is exposed', lanes_of_one, tuple(without)),
        Panel(
            'prefetch="pre": one more unit in memory, gathers are hidden',
            (*lanes_of_one, "… of the next unit"),
            tuple(ahead),
        ),
    )


def rematerialized() -> str:
    """Draws which activations are held, and what is computed twice."""
    held, remat_bars = [], []
    lanes_held = ("compute", *(f"activations of {unit}" for unit in (1, 2, 3)))
    for unit in (1, 2, 3):
        back = 3 + 2 * (3 - unit)
        held += [
            Bar("compute", unit - 1, unit, f"{unit}", "compute"),
            Bar("compute", back, back + 2, f"{unit} backward", "compute"),
            Bar(f"activations of {unit}", unit - 1, back + 2, "all of the unit's", "kept"),
        ]
        back = 3 + 3 * (3 - unit)
        remat_bars += [
            Bar("compute", unit - 1, unit, f"{unit}", "compute"),
            Bar("compute", back, back + 1, "again", "update"),
            Bar("compute", back + 1, back + 3, f"{unit} backward", "compute"),
            Bar(f"activations of {unit}", unit - 1, back, "input", "#eef0f3"),
            Bar(f"activations of {unit}", back, back + 3, "all", "kept"),
        ]
    return lanes(
        "Without rematerialization all activations wait for the backward pass",
        Panel('remat="none": all activations wait for the backward pass', lanes_held, tuple(held)),
        Panel(
            'remat="full": a unit\'s input waits; its forward pass runs again',
            lanes_held,
            tuple(remat_bars),
        ),
        Panel(
            "Offload(activations=True): units' inputs wait in host memory",
            ("compute", "to the host", "from the host"),
            tuple(_copies()),
        ),
    )


def _copies() -> Iterator[Bar]:
    """Draws what is saved of each unit on its way to the host and back."""
    for unit in (1, 2, 3):
        back = 4 + 2 * (3 - unit)
        yield Bar("compute", unit - 1, unit, f"{unit}", "compute")
        yield Bar("to the host", unit, unit + 1, f"{unit}", "copy")
        yield Bar("from the host", back - 1 + (unit == 3), back + (unit == 3), f"{unit}", "copy")
        yield Bar("compute", back + 1, back + 3, f"{unit} backward", "compute")


def mesh() -> str:
    """Draws 16 devices of two hosts as a mesh of replica x data."""
    size, items = 56, []
    items.append(text(10, 24, "make_mesh(replica=2, data=8) on two hosts of 8 devices", "head"))
    for replica in range(2):
        y = 60 + replica * 104
        items.append(text(10, y + 32, f"host {replica}: replica {replica}"))
        for data in range(8):
            x = LEFT - 40 + data * (size + 4)
            color = list(COLORS.values())[data % 6]
            items.append(box(x, y, size, size, f"shard {data}", color))
    end = LEFT - 40 + 8 * (size + 4)
    items += [
        text(
            LEFT - 40, 52, "along data: all-gather of weights, reduce-scatter of gradients →", "dim"
        ),
        text(LEFT - 40, 140, "↕ along replica: all-reduce of the gradients' shards", "dim"),
        text(
            LEFT - 40,
            240,
            "A column holds the same shard twice; the batch is split over all 16.",
            "dim",
        ),
    ]
    return render("Two replicas of eight shards each", end + 15, 254, items)


def strategies() -> str:
    """Draws what each device holds of Llama 2 7B and Adam, by strategy, read from the layouts."""
    # The colors are those of `compare_strategies`.
    parts = {"params": "compute", "optimizer": "gather", "gradients": "reduce"}
    devices = fake_devices(parse_topology("cpu:16"))
    items, y, gib, scale = [], 8, 1024**3, 6.0  # pixels per GiB
    items.append(
        text(
            10,
            y + 16,
            "Llama 2 7B and Adam in float32 on 16 devices (hybrid: 2 replicas of 8)",
            "head",
        )
    )
    y += 26
    for name, strategy in fsdp.STRATEGIES.items():
        mesh = fsdp.make_mesh(replica=2 if strategy.hybrid else 1, devices=devices)
        layout = fsdp.fully_shard(
            lambda rngs: Llama(PRESETS["llama2-7b"], rngs=rngs),
            optax.adam(1e-3),
            mesh,
            name,
        ).layout
        sizes = {part: layout.per_device(part) / gib for part in ("params", "optimizer")}
        # A step's gradients, once they are reduced, in float32.
        leaves = layout.by_path.values()
        shards = [np.prod(leaf.grad_sharding.shard_shape(leaf.grad_shape)) for leaf in leaves]
        sizes["gradients"] = 4 * float(sum(shards)) / gib
        items.append(text(10, y + 20, name))
        x: float = LEFT
        for part, color in parts.items():
            width = sizes[part] * scale
            words = f"{sizes[part]:.1f}"
            items.append(box(x, y + 4, width, ROW - 8, words if width > 26 else "", color))
            x += width
        items.append(text(x + 8, y + 20, f"{sum(sizes.values()):.1f} GiB", "dim"))
        y += ROW
    # The legend.
    x = LEFT
    for part, color in parts.items():
        items += [box(x, y + 8, 18, 14, "", color), text(x + 24, y + 20, part)]
        x += 120
    return render("Memory per device by strategy", LEFT + 102 * scale + 90, y + 32, items)


def pictures() -> Iterator[tuple[str, str]]:
    """Yields (file name, SVG) of each picture."""
    yield "strategies.svg", strategies()
    yield "unit.svg", unit_course()
    yield "prefetch.svg", prefetched()
    yield "mesh.svg", mesh()
    yield "remat.svg", rematerialized()
    yield "scale.svg", bench_scale.picture(bench_scale.read(RESULTS / "scale.json"))


def main() -> None:
    """Writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in pictures():
        (folder / name).write_text(svg, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
