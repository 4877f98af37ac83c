"""The report of a run: true to its files, whatever state they are in, and a page of its own."""

import json
import re
import subprocess
import sys

import pytest
from pages import LOADS, Outline, drawings, percent
from runs import records

import fsdp_jax
from fsdp_jax.cli.main import main
from fsdp_jax.train.charts import BUCKETS, make_chart, thinned
from fsdp_jax.train.goodput import read_goodput
from fsdp_jax.train.report import render_report, report_run

HOSTILE = "<script>alert('1')</script>&\"'"


def append(file, *lines):
    with file.open("a") as stream:
        stream.writelines(line if isinstance(line, str) else json.dumps(line) for line in lines)


def rewrite(file, change):
    """Replaces the fields of each line of a file by what `change` makes of them."""
    lines = [json.dumps(change(record)) for record in records(file.parent, file.name)]
    file.write_text("".join(f"{line}\n" for line in lines))


def page_of(directory):
    report = report_run(directory)
    return report, render_report(report)


def placed(svg):
    """Lists the points of the lines of a chart: x from 0 to 1000, y in pixels."""
    lines = [line.get("points").split() for line in svg.iter("polyline")]
    return [[tuple(map(float, point.split(","))) for point in line] for line in lines]


def test_the_figures_are_those_of_the_files(finished):
    report, page = page_of(finished)
    steps, evaluations = records(finished), records(finished, "evals.jsonl")
    fields = json.loads(json.dumps(report.to_json()))
    assert fields["newest_step"] == steps[-1]
    assert [each["held_out_loss"] for each in fields["held_out_losses"]] == [
        each["held_out_loss"] for each in evaluations
    ]
    assert fields["goodput"] == read_goodput(finished).as_json()
    assert (
        fields["layout"]["totals"] == json.loads((finished / "layout.json").read_text())["totals"]
    )
    assert [each["step"] for each in fields["checkpoints"]] == [2, 4, 6]
    assert fields["starts"][0]["devices"] == 8
    assert fields["changed_keys"]["train.steps"] == {"value": 6, "default": 1000}
    assert "strategy" not in fields["changed_keys"]
    assert fields["environment"].keys() >= {"jax", "flax"}
    assert fields["problems"] == fields["skipped_steps"] == []
    # The page and the text have them too.
    outline = Outline(page)
    least = min(record["loss"] for record in steps)
    for shown in (outline.of("b") + outline.of("small"), str(report)):
        for expected in (f"{steps[-1]['loss']:.4f}", f"{evaluations[-1]['held_out_loss']:.4f}"):
            assert expected in shown
    assert any(text.startswith(f"lowest {least:.4f}") for text in outline.of("small"))
    cells = outline.of("td")
    assert {"train.steps", "1000", "strategy", "blocks/mlp/up/kernel", "float32"} <= set(cells)
    assert {f"{record['loss']:.5g}" for record in steps} <= set(cells)


def test_curves_go_through_the_values_of_the_files(finished):
    svg = drawings(page_of(finished)[1])["loss"]
    values = [record["loss"] for record in records(finished)]
    (line,) = placed(svg)
    # Step 0 was evaluated, so the first step is a sixth to the right.
    assert [x for x, _ in line] == pytest.approx([1000 * step / 6 for step in range(1, 7)], abs=0.1)
    # One linear map from losses to pixels fits all of them, the circles of evaluations too.
    ys = [y for _, y in line]
    slope = (ys[-1] - ys[0]) / (values[-1] - values[0])
    assert slope < 0
    held_out = {
        record["step"]: record["held_out_loss"] for record in records(finished, "evals.jsonl")
    }
    circles = list(svg.iter("circle"))
    assert [percent(circle.get("cx")) for circle in circles] == pytest.approx(
        [100 * step / 6 for step in held_out], abs=0.01
    )
    found = ys + [float(circle.get("cy")) for circle in circles]
    expected = [ys[0] + slope * (value - values[0]) for value in (*values, *held_out.values())]
    assert found == pytest.approx(expected, abs=0.3)


def test_curves_are_a_view_of_their_own(finished, tmp_path):
    shown = fsdp_jax.train.run_curves(finished)
    losses = [record["loss"] for record in records(finished)]
    assert shown.title == f"{finished}: 6 steps"
    line = next(line for line in str(shown).splitlines() if line.startswith("loss "))
    assert line.split()[2:4] == [f"{losses[0]:.4g}", f"{losses[-1]:.4g}"]
    assert len(line.split()[1]) == 6
    shown.save(tmp_path / "curves.html")
    for page in ((tmp_path / "curves.html").read_text(), shown._repr_html_()):
        svg = drawings(page)["loss"]
        assert placed(svg) == placed(drawings(page_of(finished)[1])["loss"])
        Outline(page)
        assert not re.search(LOADS, page.replace(str(finished), ""))


def test_a_page_is_well_formed_and_loads_nothing(finished):
    page = page_of(finished)[1]
    outline = Outline(page)
    assert not re.search(LOADS, page.replace(str(finished), ""))
    assert "color-scheme:light dark" in page
    assert "name='viewport'" in page
    assert ("html", {"lang": "en"}) in outline.tags
    for svg in drawings(page).values():
        for shape in svg.iter():
            for name in ("y", "y1", "y2", "cy"):
                assert 0 <= float(shape.get(name, 0)) <= float(svg.get("height"))


def test_planned_against_measured(copied):
    directory = copied("measured")
    figures = {
        "planned": {"peak_bytes": 2**33, "step_s": 0.5},
        "measured": {"peak_bytes": 2**33 * 1.25, "step_s": None},
    }
    place = {"time": "now", "device": "a chip", "first_step": 3, "last_step": 7}
    (directory / "measured.json").write_text(json.dumps(place | figures))
    report, page = page_of(directory)
    assert "peak memory 8 GiB planned, 10 GiB measured, ratio 1.25; a step 500 ms" in str(report)
    rows = ["peak memory of a device", "8 GiB", "10 GiB", "1.25"]
    rows += ["time of a step", "500 ms", "-", "-"]
    cells = Outline(page).of("td")
    at = cells.index(rows[0])
    assert cells[at : at + 8] == rows
    assert any("median of steps 3 to 7" in text for text in Outline(page).of("p"))
    assert report.to_json()["measured"]["planned"] == figures["planned"]
    (directory / "measured.json").write_text('{"planned": {}, "measured": 1}')
    assert [text[:15] for text in page_of(directory)[0].files.problems] == ["measured.json: "]


def test_a_resumed_run_has_a_mark_where_it_was_resumed(copied):
    directory = copied("resumed")
    last = records(directory)[-1]["time"]
    again = {"step": 3, "time": last, "processes": 2, "devices": 8}
    append(directory / "starts.jsonl", again | {"last_step": 5, "last_time": last})
    report, page = page_of(directory)
    (mark,) = [
        group for group in drawings(page)["loss"].iter("g") if group.find("line") is not None
    ]
    assert mark.findtext("title") == "start 2 resumed from step 3"
    assert mark.findtext("text") == "2"
    assert percent(mark.find("line").get("x1")) == pytest.approx(50)
    assert report.to_json()["starts"][1]["steps_done_again"] == 2
    assert "2 steps done again" in Outline(page).of("small")
    assert "mark" not in {
        line.get("class") for line in drawings(page)["gradient norm"].iter("line")
    }


def test_a_line_that_was_cut_short_is_named_and_left_out(copied):
    directory = copied("torn")
    append(directory / "metrics.jsonl", '{"step": 7, "loss": 0.0001')
    report, page = page_of(directory)
    assert report.to_json()["newest_step"]["step"] == 6
    (problem,) = report.files.problems
    assert problem.startswith('metrics.jsonl: 1 of 7 lines cannot be read\nline 7: {"step": 7')
    assert problem in Outline(page).of("li")
    assert f"warning: {problem}" in str(report)


DAMAGE = {
    "metrics.jsonl": '{"step": 1, "time": 5, "step_time_s": "x", "loss": [], "mfu": "1"}\n\xff',
    "starts.jsonl": '{"step": 0, "time": {}, "last_step": "x"}\n{"step": -1}\n{"step": true}\n{}',
    "evals.jsonl": '{"step": 1e999}\n{"step": 3, "held_out_loss": "x"}\n{"step": NaN}\n'
    + "[" * 100_000,
    "layout.json": '{"leaves": [{"path": 1}]}',
    "config.yaml": "train: {stpes: 3}",
    "checkpoints/4/manifest.json": "{",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_or_missing_file_is_named(copied, name):
    directory = copied("damaged")
    file = directory / name
    file.write_bytes(DAMAGE[name].encode("latin-1"))
    named = file.parent.relative_to(directory) if "checkpoints" in name else name
    for _ in range(2):
        report, page = page_of(directory)
        assert any(problem.startswith(f"{named}") for problem in report.files.problems)
        assert set(report.files.problems) <= set(Outline(page).of("li"))
        json.dumps(report.to_json(), allow_nan=False)
        assert str(report)
        file.unlink(missing_ok=True)


def test_a_run_before_its_first_step_has_a_page(copied):
    directory = copied("empty")
    for name in ("metrics.jsonl", "evals.jsonl", "starts.jsonl"):
        (directory / name).write_text("")
    report, page = page_of(directory)
    assert report.files.problems == []
    assert "No step was recorded yet." in Outline(page).of("p")
    assert report.to_json()["newest_step"] is None
    assert "loss" not in drawings(page)


def test_what_is_not_a_run_is_refused_with_a_fix(copied, capsys):
    directory = copied("run")
    assert main(["report", str(directory / "checkpoints")]) == 2
    assert f"fix:      pass {directory}" in capsys.readouterr().err
    assert main(["report", str(directory.parent)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: no run there\n")
    assert "metrics.jsonl" in shown


def test_names_are_escaped(copied):
    directory = copied("hostile")
    layout = json.loads((directory / "layout.json").read_text())
    text = json.dumps(layout).replace("blocks/mlp", HOSTILE.replace('"', '\\"'))
    (directory / "layout.json").write_text(text.replace('"full_shard"', json.dumps(HOSTILE)))
    rewrite(directory / "starts.jsonl", lambda line: line | {"processes": HOSTILE})
    append(directory / "metrics.jsonl", HOSTILE)
    (directory / "process-0.log").write_text(HOSTILE)
    page = page_of(directory)[1]
    assert "<script" not in page
    outline = Outline(page)
    for tag in ("td", "p", "pre"):
        assert any(HOSTILE in text for text in outline.of(tag)), tag


def test_skipped_steps_and_memory_of_devices_are_shown(copied):
    directory = copied("skipped")

    def change(record):
        skipped = record["step"] >= 4
        loss = None if record["step"] == 4 else record["loss"]
        memory = {"memory_peak_bytes": 3 * 2**30, "memory_valley_bytes": 2**30, "mfu": 0.5}
        return record | memory | {"skipped_steps": int(skipped), "loss": loss}

    rewrite(directory / "metrics.jsonl", change)
    report, page = page_of(directory)
    assert report.to_json()["skipped_steps"] == [4]
    assert {"3 GiB", "50.0%"} <= set(Outline(page).of("b"))
    # The loss has a gap where it is not finite.
    assert [len(line) for line in placed(drawings(page)["loss"])] == [3, 2]
    assert len(placed(drawings(page)["memory of the fullest device"])) == 2


def test_the_command_writes_the_page(finished, tmp_path, capsys):
    page = tmp_path / "run.html"
    assert main(["report", str(finished), "--html", str(page)]) == 0
    assert f"written to {page}" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.long
def test_the_command_starts_no_devices(finished):
    code = (
        "import sys; from fsdp_jax.cli.main import main; code = main(sys.argv[1:]); "
        "import jax._src.xla_bridge as bridge; assert not bridge.backends_are_initialized(); "
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "report", str(finished)]
    subprocess.run(command, capture_output=True, check=True)


def test_the_command_prints_json(finished, capsys):
    assert main(["report", str(finished), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(report_run(finished).to_json())
    )


@pytest.mark.parametrize("count", [1, 2, 399, 400, 100_000])
def test_a_spike_is_kept_among_any_number_of_steps(count):
    points = [(step, 1.0) for step in range(count)]
    points[count // 2] = (count // 2, 9.0)
    (line,) = thinned(points)
    assert len(line) <= 2 * BUCKETS + 2
    assert (count // 2, 9.0) in line
    assert (line[0], line[-1]) == (points[0], points[-1])


def test_values_of_several_magnitudes_have_a_logarithmic_scale():
    chart = make_chart("x", [("", [(0, 1.0), (1, 1000.0), (2, None), (3, 31.6)])])
    assert chart.caption == "logarithmic scale"
    assert [tick.text for tick in chart.values] == ["1", "10", "100", "1000"]
    assert [len(line.points.split()) for line in chart.lines] == [2, 2]  # a single point, twice
    low, top = (float(point.split(",")[1]) for point in chart.lines[0].points.split())
    middle = float(chart.lines[1].points.split()[0].split(",")[1])
    assert middle == pytest.approx((top + low) / 2, abs=0.3)
    # Zero has no logarithm, and one value no range.
    assert make_chart("x", [("", [(0, 0.0), (1, 1000.0)])]).caption == ""
    assert make_chart("x", [("", [(5, 0.0)])]).lines
    assert make_chart("x", [("", [(5, None)])]) is None
