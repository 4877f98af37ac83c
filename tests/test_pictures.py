"""The pictures of the documentation are those that the script draws."""

import sys
from pathlib import Path
from subprocess import run

ROOT = Path(__file__).parents[1]


def test_pictures_are_as_the_script_draws_them(tmp_path):
    """In a process of its own: one picture is of 16 devices."""
    command = [sys.executable, ROOT / "scripts/draw_pictures.py", "--folder", tmp_path]
    run(command, check=True, env={"PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)})
    kept = {path.name: path.read_text() for path in (ROOT / "docs/static/pictures").glob("*.svg")}
    assert len(kept) == 6
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == kept
