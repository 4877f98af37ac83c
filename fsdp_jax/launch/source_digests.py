"""Digests of the package's own files, by which processes find that one runs another source."""

from fsdp_jax.errors import OWN_FOLDER
from fsdp_jax.io.digests import digest_file

# Of source and data files; editors and interpreters leave others.
SUFFIXES = {".py", ".jinja", ".jsonl", ".pbtxt", ".toml"}


def source_digests() -> dict[str, str]:
    """Computes {path: xxh3 digest} of the package's files; takes a few milliseconds."""
    return {
        f"{OWN_FOLDER.name}/{path.relative_to(OWN_FOLDER)}": digest_file(path)["xxh3_128"]
        for path in sorted(OWN_FOLDER.rglob("*"))
        if path.suffix in SUFFIXES and path.is_file()
    }
