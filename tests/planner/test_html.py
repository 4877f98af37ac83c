"""Pages of plans: well-formed, self-contained, true to the plan, and small."""

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from pages import LOADS, Outline, drawings, percent

from fsdp_jax.planner import Fix, Plan, Time, compare_html, plan_html
from fsdp_jax.planner.compiled.peak_memory import Buffer
from fsdp_jax.planner.compiled.timeline import COMPUTE, LINK, Event
from fsdp_jax.planner.html import render_fragment

GIB = 2**30
BREAKDOWN = {
    "params": 4,
    "gradients": 6,
    "optimizer": 8,
    "activations": 20,
    "gathered": 1,
    "other": 1,
}
SENT = {
    "op": "all-gather",
    "dtype": "bfloat16",
    "axis": "data",
    "count": 3,
    "bytes": 4 * GIB,
    "overlapped_bytes": GIB,
    "where": "blocks/kernel",
}
PLAN = Plan(
    topology="h100:8",
    strategy="full_shard",
    mesh={"replica": 1, "data": 8},
    devices=8,
    parameters=1_000_000,
    valley_bytes=12 * GIB,
    peak_bytes=40 * GIB,
    host_bytes=0,
    capacity_bytes=80 * GIB,
    usable_bytes=72 * GIB,
    valley={"params": 4 * GIB, "optimizer": 8 * GIB},
    breakdown={kind: size * GIB for kind, size in BREAKDOWN.items()},
    buffers=(Buffer(2 * GIB, "f32[512,1024,1024]", "activations", "", "dot_general"),),
    collectives=(SENT,),
    wire_bytes=4 * GIB,
    wire_bytes_limit=4 * GIB,
    exposed_bytes=3 * GIB,
    time=Time(0.5, 0.25, 0.75, 0.25, 1.0),
    tokens_per_s_per_device=1234.0,
    mfu=0.41,
    hfu=0.5,
    convention="6 N a token",
    compile_s=2.0,
    basis={
        "peak_bytes": "compiled",
        "collectives": "compiled",
        "time": "compiled",
        "valley_bytes": "analytic",
    },
    notes=("set MEM_FRACTION",),
    fixes=(Fix("remat=full", 16 * GIB, 24 * GIB, True, "a third more compute"),),
    events=(
        Event(COMPUTE, 0.0, 0.4, "dot_general"),
        Event(LINK, 0.2, 0.6, "all-gather blocks/kernel"),
        Event(COMPUTE, 0.5, 1.0, "add"),
    ),
)
ANALYTIC = replace(
    PLAN, buffers=(), fixes=(), notes=(), events=(), basis={"collectives": "analytic"}
)
REFUSED = replace(
    ANALYTIC,
    peak_bytes=200 * GIB,
    breakdown=dict(PLAN.breakdown) | {"other": 161 * GIB},
    notes=("XLA refuses",),
)
NOTHING = replace(
    ANALYTIC,
    time=None,
    tokens_per_s_per_device=None,
    mfu=None,
    hfu=None,
    collectives=(),
    wire_bytes_limit=0,
    basis={},
)
PLANS = {"compiled": PLAN, "analytic": ANALYTIC, "refused": REFUSED, "nothing": NOTHING}
HOSTILE = "<script>alert('1')</script>&\"'"


def boxes(svg):
    """Yields (class, left, width, tooltip) of each box, in percent."""
    for group in svg.iter("g"):
        rect = group.find("rect")
        yield (
            rect.get("class"),
            percent(rect.get("x")),
            percent(rect.get("width")),
            group.findtext("title"),
        )


@pytest.mark.parametrize("name", PLANS)
def test_pages_are_well_formed_and_stay_inside_their_drawings(name):
    plan = PLANS[name]
    for page in (plan_html(plan), render_fragment(plan), compare_html([plan, PLAN])):
        Outline(page)
        assert not re.search(LOADS, page)
        assert "color-scheme:light dark" in page
        for svg in drawings(page).values():
            height = float(svg.get("height"))
            for rect in svg.iter("rect"):
                assert percent(rect.get("x")) >= 0
                assert percent(rect.get("x")) + percent(rect.get("width")) <= 100.01
                assert float(rect.get("y")) + float(rect.get("height")) <= height
            for shape in (*svg.iter("text"), *svg.iter("line")):
                assert 0 <= float(shape.get("y") or shape.get("y2")) <= height
                assert 0 <= float((shape.get("x") or shape.get("x2")).rstrip("%")) <= 100.01


@pytest.mark.parametrize("name", PLANS)
def test_segments_add_up_to_the_peak_on_a_scale_that_holds_it(name):
    plan = PLANS[name]
    (_, _, free, _), *parts = boxes(drawings(plan_html(plan))["memory at the peak"])
    scale = max(plan.capacity_bytes, plan.peak_bytes)
    assert free == pytest.approx(100 * plan.capacity_bytes / scale, abs=0.01)
    assert sum(width for _, _, width, _ in parts) == pytest.approx(
        100 * plan.peak_bytes / scale, abs=0.01
    )
    for (_, left, width, _), (_, following, _, _) in pairwise(parts):
        assert left + width == pytest.approx(following, abs=0.01)
    for kind, _, width, title in parts:
        assert width == pytest.approx(100 * plan.breakdown[kind] / scale, abs=0.01)
        assert title.startswith(kind)


def test_the_limit_the_peak_and_steady_state_are_drawn_to_scale():
    svg = drawings(plan_html(PLAN))["memory at the peak"]
    marks = {
        text.text: percent(text.get("x")) for text in svg.iter("text") if text.get("class") is None
    }
    assert marks["usable 72 GiB"] == 90
    assert marks["peak 40 GiB"] == 50
    assert marks["between steps 12 GiB"] == 15
    # state comes first, so its end is the valley
    stack = {kind: left + width for kind, left, width, _ in boxes(svg)}
    assert stack["optimizer"] == 15


def test_a_negative_part_is_listed_and_not_drawn():
    plan = replace(REFUSED, peak_bytes=38 * GIB, breakdown=dict(PLAN.breakdown) | {"other": -GIB})
    page = plan_html(plan)
    assert {kind: width for kind, _, width, _ in boxes(drawings(page)["memory at the peak"])}[
        "other"
    ] == 0
    assert "-1 GiB, -3%" in Outline(page).of("b")


def test_parts_of_the_step_add_up():
    parts = list(boxes(drawings(plan_html(PLAN))["time of a step"]))
    assert [width for _, _, width, _ in parts] == [50, 25, 25]
    assert parts[-1][0] == "exposed"


def test_communication_without_compute_beside_it_is_exposed():
    page = plan_html(PLAN)
    marks = [box for box in boxes(drawings(page)["timeline"]) if box[0] in (LINK, "exposed")]
    assert [(kind, left, width) for kind, left, width, _ in marks] == [
        (LINK, 20, 40),
        ("exposed", 40, 10),
    ]
    assert marks[1][3].startswith("waiting for all-gather blocks/kernel: 100 ms")
    assert (
        "link: busy 400 ms of 1 s; short bars: overlapped; tall bars: exposed, 100 ms"
        in Outline(page).of("text")
    )


def test_communication_alone_is_exposed_in_any_order_of_events():
    events = (Event(LINK, 0.5, 1.0, "b"), Event(LINK, 0.0, 0.5, "a"))
    marks = list(boxes(drawings(plan_html(replace(PLAN, events=events)))["timeline"]))
    assert sum(width for kind, _, width, _ in marks if kind == "exposed") == 100
    assert [title[:1] for kind, _, _, title in marks if kind == LINK] == ["a", "b"]


def test_the_headline_has_the_main_figures():
    values = Outline(plan_html(PLAN)).of("b")
    assert {"fits", "40 GiB", "1 s", "1,234", "41.0%"} <= set(values)
    assert "6 N a token" in Outline(plan_html(PLAN)).of("small")
    assert "does not fit" in Outline(plan_html(REFUSED)).of("b")
    assert "128 GiB too much" in Outline(plan_html(REFUSED)).of("small")


def test_pages_have_tables_and_notes():
    cells = Outline(plan_html(PLAN)).of("td")
    assert {"remat=full", "16 GiB", "24 GiB", "f32[512,1024,1024]", "all-gather", "25%"} <= set(
        cells
    )
    assert "25%" not in Outline(plan_html(ANALYTIC)).of("td"), "it has no overlap"
    lines = Outline(plan_html(PLAN)).of("li")
    assert {
        "set MEM_FRACTION",
        "compiled: peak_bytes, collectives, time",
        "analytic: valley_bytes",
    } <= set(lines)


def test_sections_that_a_plan_lacks_are_left_out():
    titles = {name: Outline(plan_html(plan)).of("h3") for name, plan in PLANS.items()}
    assert len(titles["compiled"]) == 7
    assert titles["analytic"] == [
        "Memory at the peak",
        "Time of a step",
        "Collectives of a step",
        "Notes, and the basis of each figure",
    ]
    assert titles["nothing"] == ["Memory at the peak", "Collectives of a step"]
    assert "<tbody></tbody>" not in plan_html(NOTHING)
    assert "None" not in plan_html(NOTHING)


def test_names_are_escaped():
    plan = replace(
        PLAN,
        topology=HOSTILE,
        strategy=HOSTILE,
        convention=HOSTILE,
        notes=(HOSTILE,),
        fixes=(Fix(HOSTILE, 1, 1, True, HOSTILE),),
        buffers=(Buffer(1, HOSTILE, "other", HOSTILE, HOSTILE),),
        collectives=(SENT | {"op": HOSTILE, "dtype": HOSTILE, "axis": HOSTILE, "where": HOSTILE},),
        events=(
            Event(COMPUTE, 0, 1, HOSTILE),
            Event(HOSTILE, 0, 1, HOSTILE),
            Event(LINK, 0, 2, HOSTILE),
        ),
    )
    for page in (plan_html(plan), render_fragment(plan), compare_html([plan, PLAN])):
        assert "<script" not in page
        outline = Outline(page)
        assert all(
            HOSTILE[:8] not in str(value) for _, attrs in outline.tags for value in attrs.values()
        )
        drawings(page)
        assert any(HOSTILE in text for _, text in outline.text)


@pytest.mark.parametrize("count", [300, 1500, 5000])
def test_pages_stay_small_with_any_number_of_events(count):
    events = [Event(COMPUTE, i, i + 0.7, f"{'module/' * 30}dot_general.{i}") for i in range(count)]
    events += [
        Event(LINK, i + 0.3, i + 1, f"all-gather {'blocks/kernel, ' * 30}{i}") for i in range(count)
    ]
    page = plan_html(replace(PLAN, events=events, collectives=[SENT | {"where": "x" * 5000}] * 500))
    assert len(page.encode()) < 300_000
    marks = list(boxes(drawings(page)["timeline"]))
    assert max(left + width for _, left, width, _ in marks) == pytest.approx(100, abs=0.01)
    assert "480 more" in Outline(page).of("td")


def test_merged_events_lose_no_time():
    events = [Event(COMPUTE, i * 1e-6, (i + 1) * 1e-6, "add") for i in range(5000)]
    marks = list(boxes(drawings(plan_html(replace(PLAN, events=events)))["timeline"]))
    assert 100 < len(marks) < 1000
    assert sum(width for _, _, width, _ in marks) == pytest.approx(100, abs=0.5)
    assert all("add: " in title and "events" in title for *_, title in marks[:-1])


def test_plans_are_compared_on_one_scale():
    page = compare_html([PLAN, replace(REFUSED, topology="v5e:16", mfu=None)])
    before, *_ = page.partition("<details>")
    bars = [
        list(boxes(ElementTree.fromstring(svg)))
        for svg in re.findall(r"<svg.*?</svg>", before, re.DOTALL)
    ]
    peaks = [sum(width for _, _, width, _ in parts) for _, *parts in bars]
    assert peaks == pytest.approx([20, 100], abs=0.01)
    assert Outline(page).of("th")[:2] == ["1. full_shard on h100:8", "2. full_shard on v5e:16"]
    assert page.count("<details>") == 2
    with pytest.raises(ValueError, match="no plans"):
        compare_html([])


def test_a_timeline_is_a_view_of_its_own(tmp_path):
    events = [
        Event(COMPUTE, 0.0, 0.6, "blocks/mlp/up/kernel, forward"),
        Event(LINK, 0.2, 1.0, "all-gather blocks/mlp/down/kernel, forward"),
        *(Event(COMPUTE, 0.6 + n / 1e3, 0.6 + n / 1e3 + 1e-4, f"copy.{n}") for n in range(50)),
    ]
    shown = replace(PLAN, events=events).timeline()
    text = str(shown)
    assert "compute  ██████████████··········  600 ms  blocks/mlp/up/kernel, forward" in text
    assert "link     ····░░░░░░░░░░░░░░░░░░░░  800 ms  all-gather blocks/mlp" in text
    assert "… 12 shorter events" in text
    assert len(shown.text().splitlines()) == 52 + 3
    shown.save(tmp_path / "timeline.html")
    for page in ((tmp_path / "timeline.html").read_text(), shown._repr_html_()):
        elements = Outline(page)
        assert not re.search(LOADS, page)
        assert any("blocks/mlp/up/kernel, forward" in text for text in elements.of("text"))
        assert elements.of("td")[:4] == ["compute", "0", "600 ms", "blocks/mlp/up/kernel, forward"]
    # an analytic plan has no program, and so no timeline
    empty = replace(PLAN, events=()).timeline()
    assert str(empty).startswith(f"{empty.title}\nno schedule: analytic plans have none")
    Outline(empty.page())


def test_a_bar_has_the_part_of_its_name_that_fits():
    events = [Event(COMPUTE, 0, 1.1, "blocks/mlp/up/kernel, backward")]
    events.append(Event(COMPUTE, 1.1, 5, "x"))
    page = replace(PLAN, events=events).timeline().page()
    assert "up/kernel, backward" in Outline(page).of("text")
