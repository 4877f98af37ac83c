"""Every notebook runs from top to bottom, shows no noise, and is kept with its outputs."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

PATHS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
BYTES = 300_000  # of a notebook
DRAWS = r"matplotlib|<svg|IPython.display"
LOSSES = re.compile(r"loss (\d+\.\d+) -> (\d+\.\d+)")

COMPILES = ("03", "04")  # for machines that are absent
IN_CI = ("01",)


def cases():
    compiled = [pytest.mark.needs_plugin]
    return [
        pytest.param(
            path,
            id=path.stem,
            marks=compiled * path.name.startswith(COMPILES)
            + [pytest.mark.long if path.name.startswith(IN_CI) else pytest.mark.exhaustive],
        )
        for path in PATHS
    ]


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell["outputs"]]


def noise(notebook):
    """Errors, and what is written to stderr."""
    return [each for each in outputs(notebook) if each.get("name", each["output_type"]) in NOISE]


NOISE = ("stderr", "error")


def kinds(notebook):
    """The kinds of the outputs of each cell."""
    return [
        [(output["output_type"], *sorted(output.get("data", ()))) for output in cell["outputs"]]
        for cell in code_cells(notebook)
    ]


def printed(notebook):
    return "\n".join(output.get("text", "") for output in outputs(notebook))


@pytest.mark.parametrize("path", cases())
def test_runs_without_error_or_noise(path, tmp_path, monkeypatch):
    # of the extra `notebooks`
    import nbformat
    from nbclient import NotebookClient

    kept, notebook = (nbformat.read(path, as_version=4) for _ in range(2))
    # the command `fsdp-jax` of this environment
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    # raises CellExecutionError at the first cell that fails
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": tmp_path}},
    ).execute()
    assert noise(notebook) == []
    assert kinds(notebook) == kinds(kept), "make notebooks"
    text = printed(notebook)
    assert "[Gloo]" not in text
    # of one process, of two, and of two after a fault
    assert len(set(re.findall(r"step 20: loss (\S+),", text))) <= 1
    assert all(float(last) < float(first) for first, last in LOSSES.findall(text))


def source(cell):
    return "".join(cell["source"])


def test_are_kept_small_and_with_their_outputs():
    for path in PATHS:
        kept = json.loads(path.read_text())
        cells = code_cells(kept)
        assert path.stat().st_size < BYTES, path
        assert noise(kept) == [], path
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), path
        # the library's views draw
        assert re.findall(DRAWS, "".join(map(source, cells))) == [], path
        # nothing of the machine that it ran on
        assert re.findall(r"/(?:root|home|work)/\S*", path.read_text()) == [], path


def test_notebooks_are_numbered():
    assert [int(path.name[:2]) for path in PATHS] == sorted({int(path.name[:2]) for path in PATHS})
    assert len(PATHS) >= 8
