"""Writes that survive a crash: whole or not at all."""

import os
from pathlib import Path


def flush_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
