"""Results of scripts as data: records with the environment that they come from."""

import json
import os
import platform
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

_PREFIXES = ("jax", "libtpu", "flax", "optax", "fsdp", "numpy")


def environment() -> dict[str, Any]:
    """Lists the date, the machine and the versions of the libraries that figures depend on."""
    versions = {(each.name or "").lower(): each.version for each in distributions()}
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: versions[name] for name in sorted(versions) if _matters(name)},
    }


def _matters(name: str) -> bool:
    return name.startswith(_PREFIXES) or name.startswith("nvidia-")


def save(path: Path, records: list[dict[str, Any]], **more: Any) -> None:
    """Writes records, with the environment, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment(), **more, "records": records}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
