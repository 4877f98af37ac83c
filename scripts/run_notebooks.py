"""Runs notebooks from top to bottom, each in a folder of its own, and keeps what they show.

`make notebooks`; of some: `python scripts/run_notebooks.py notebooks/01_first_steps.ipynb`.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient


def run(path: Path) -> None:
    """Runs a notebook and writes it with its outputs; raises at the first cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            coalesce_streams=True,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        client.execute()
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, flush=True)
        run(Path(name))
