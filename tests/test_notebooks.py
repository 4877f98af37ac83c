"""Notebooks run from top to bottom, show no noise, and train."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


@pytest.fixture(scope="module")
def first_steps(tmp_path_factory):
    notebook = nbformat.read(NOTEBOOKS / "01_first_steps.ipynb", as_version=4)
    # raises CellExecutionError at the first cell that fails
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": tmp_path_factory.mktemp("nb")}},
    ).execute()
    return notebook


def outputs(notebook):
    return [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]


@pytest.mark.long
def test_runs_without_error_or_noise(first_steps):
    shown = outputs(first_steps)
    streams = [output for output in shown if output.output_type == "stream"]
    assert [output for output in shown if output.output_type == "error"] == []
    assert [output.text for output in streams if output.name == "stderr"] == []


@pytest.mark.long
def test_losses_fall(first_steps):
    text = "".join(output.text for output in outputs(first_steps) if output.output_type == "stream")
    pairs = re.findall(r"loss (\d+\.\d+) -> (\d+\.\d+)", text)
    assert len(pairs) == 2  # NNX and Linen
    assert all(float(last) < float(first) for first, last in pairs)


def test_stays_small():
    assert (NOTEBOOKS / "01_first_steps.ipynb").stat().st_size < 200_000
