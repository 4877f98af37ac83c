"""Documents, instructions and token shards."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_jax.data.documents import open_documents, split_documents
from fsdp_jax.data.files import Skipped
from fsdp_jax.data.instructions import load_instructions
from fsdp_jax.data.shard_manifest import PARTS
from fsdp_jax.data.shards import TokenShards
from fsdp_jax.data.tokenize_shards import tokenize
from fsdp_jax.data.tokenizer import ByteTokenizer, train_bpe
from fuzz import mutations
from fuzz.harness import Case, RefusedError, Target
from fuzz.stored import copy_of

SENTENCES = [
    f"The river {number} is long.\nété 日本 \U0001d518 {'x' * number}" for number in range(40)
]
INVALID = ("error", "error", "replace", "skip")


class DocumentsTarget(Target):
    """Documents and Alpaca's instructions as JSON; the reference is `json`, of a list or lines."""

    name = "jsonl"

    def prepare(self, seeds: Path) -> None:
        for name, records in {
            "documents": [{"text": text, "n": i} for i, text in enumerate(SENTENCES[:8])],
            "instructions": [
                {"instruction": f"Say {i}.", "input": "" if i % 2 else "é", "output": text}
                for i, text in enumerate(SENTENCES[:8])
            ],
        }.items():
            (seeds / name).mkdir()
            lines = [
                json.dumps(record, ensure_ascii=i % 2 == 0) for i, record in enumerate(records)
            ]
            (seeds / name / "data.jsonl").write_text("\n".join(lines) + "\n")
            (seeds / f"{name}.json").write_text(json.dumps(records))

    def make(self, case: Case) -> None:
        kind = case.pick(["documents", "instructions"])
        suffix = case.pick([".jsonl", ".jsonl", ".json"])
        folder = copy_of(case, kind)
        if suffix == ".json":
            (folder / "data.jsonl").unlink()
            shutil.copy(case.seeds / f"{kind}.json", folder / "data.json")
        path = folder / f"data{suffix}"
        settings = [kind, path.name, case.pick(INVALID), case.pick(["file", "folder"])]
        (case.folder / "settings.json").write_text(json.dumps(settings))

        def damage_record() -> str:
            if suffix == ".json":
                return mutations.damage_json(case, path)
            return mutations.damage_line(case, path, range(8))

        case.damage(
            (5, lambda: mutations.damage_file(case, path, lines=True)),
            (4, damage_record),
            (1, lambda: mutations.replace_file(case, path)),
        )

    def read(self, case: Case) -> Any:
        kind, name, invalid, how = json.loads((case.folder / "settings.json").read_text())
        path = case.folder / "folder" / name
        skipped = Skipped()
        if kind == "instructions":
            records = load_instructions(str(path), skipped, invalid=invalid)
            return [(each.instruction, each.input, each.output) for each in records]
        opened = open_documents(path if how == "file" else path.parent, invalid=invalid)
        split_documents(opened, held_out=0.1)
        return list(opened.read(skipped))

    def reference(self, case: Case) -> Any:
        kind, name, invalid, _ = json.loads((case.folder / "settings.json").read_text())
        path = case.folder / "folder" / name
        fields = {"documents": ["text"], "instructions": ["instruction", "input", "output"]}[kind]
        content = path.read_bytes()
        is_list = content[:512].removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
        blocks = [content] if is_list else content.split(b"\n")
        records = []
        for block in blocks:
            try:
                text = block.decode()
            except UnicodeDecodeError as error:
                if invalid == "error":
                    raise RefusedError("not UTF-8") from error
                if invalid == "skip":
                    continue
                text = block.decode(errors="replace")
            text = text.removeprefix("\ufeff")
            if text.strip():
                try:
                    records.append(json.loads(text))
                except (ValueError, RecursionError) as error:
                    raise RefusedError(str(error)) from error
        if is_list:
            records = records[0] if records else []
        found = []
        for record in records:
            texts = self._texts(record, fields, invalid)
            if texts is not None and texts[-1].strip():
                found.append(texts[0] if kind == "documents" else tuple(texts))
        if not found:
            raise RefusedError("nothing is left")
        return found

    @staticmethod
    def _texts(record: Any, fields: list[str], invalid: str) -> list[str] | None:
        """Returns the texts of a record; None for one that is skipped."""
        if not isinstance(record, dict):
            raise RefusedError("a record is no object")
        texts = []
        for name in fields:
            text = record.get(name)
            if name == "input" and text is None:
                text = ""
            if not isinstance(text, str):
                raise RefusedError(f"{name} is no text")
            if any("\ud800" <= letter <= "\udfff" for letter in text):
                if invalid == "error":
                    raise RefusedError("half a surrogate pair")
                if invalid == "skip":
                    return None
                raw = text.encode("utf-16", "surrogatepass")
                text = raw.decode("utf-16", "replace")
            texts.append(text)
        return texts


class ShardsTarget(Target):
    """Token shards and their manifest; what is accepted must be what was written."""

    name = "shards"

    def prepare(self, seeds: Path) -> None:
        corpus = seeds / "corpus.jsonl"
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in SENTENCES))
        split = split_documents(open_documents(corpus), held_out=0.1)
        for name, tokenizer in {"bytes": ByteTokenizer(), "bpe": train_bpe(SENTENCES, 300)}.items():
            tokenize(split, tokenizer, seeds / name, shard_tokens=300)
        # As older releases wrote it, without digests.
        old = shutil.copytree(seeds / "bpe", seeds / "old")
        manifest = json.loads((old / "manifest.json").read_text())
        manifest = {key: manifest[key] for key in ("plan", "shards", "largest", "sums")}
        (old / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")

    def make(self, case: Case) -> None:
        name = case.pick(["bytes", "bpe", "old"])
        folder = copy_of(case, name)
        (case.folder / "seed").write_text(name)
        files = sorted(folder.iterdir())
        case.damage(
            (6, lambda: mutations.damage_file(case, case.pick(files))),
            (7, lambda: mutations.damage_json(case, folder / "manifest.json")),
            (3, lambda: mutations.replace_file(case, case.pick(files))),
            (3, lambda: mutations.swap_files(case, files)),
        )

    def read(self, case: Case) -> Any:
        shards = TokenShards.open(case.folder / "folder")
        tokenizer = shards.tokenizer
        read: dict[str, Any] = {
            part: (shards.tokens(part)[:], shards.starts(part), shards.manifest.documents(part))
            for part in PARTS
        }
        return read | {"tokenizer": (tokenizer.vocab_size, tokenizer.end)}

    def reference(self, case: Case) -> Any:
        """Reads the files as they were written: damage is never another text.

        Without digests other ids in the files are another text; but ids, and not another count.
        """
        name = (case.folder / "seed").read_text()
        written = case.seeds / name
        manifest = json.loads((written / "manifest.json").read_text())
        plan = manifest["plan"]
        tokenizer = (plan["vocab_size"], plan["end"])
        folder = case.folder / "folder" if name == "old" else written
        read: dict[str, Any] = {"tokenizer": tokenizer}
        for part in ("train", "held_out"):
            shards = [shard for shard in manifest["shards"] if shard["part"] == part]
            tokens = [np.zeros(0, np.int32)]
            starts = [np.zeros(0, np.int64)]
            begin = 0
            for shard in shards:
                ids = np.fromfile(folder / f"{shard['name']}.tokens", plan["dtype"])
                firsts = np.fromfile(folder / f"{shard['name']}.documents", "<i8")
                if (len(ids), len(firsts)) != (shard["tokens"], shard["documents"]):
                    raise RefusedError(f"{shard['name']} has another size")
                if (ids >= plan["vocab_size"]).any():
                    raise RefusedError(f"{shard['name']} has ids beyond the vocabulary")
                if firsts[0] != 0 or (np.diff(firsts) < 0).any() or firsts[-1] > len(ids):
                    raise RefusedError(f"{shard['name']} has impossible positions")
                tokens.append(ids.astype(np.int32))
                starts.append(firsts + begin)
                begin += len(ids)
            read[part] = (np.concatenate(tokens), np.concatenate(starts), sum(map(len, starts)))
        return read
