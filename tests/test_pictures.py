"""The pictures of the documentation are those that the script draws."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_pictures_are_as_the_script_draws_them(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = ROOT / "scripts/draw_pictures.py"
    spec = importlib.util.spec_from_file_location("draw_pictures", script)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    kept = {path.name: path.read_text() for path in (ROOT / "docs/static/pictures").glob("*.svg")}
    assert len(kept) == 6
    assert dict(module.pictures()) == kept
