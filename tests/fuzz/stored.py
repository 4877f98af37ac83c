"""Weights, model configurations and tokenizers that others have stored."""

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import tokenizers
from family_cases import FIRST, wider_config_of
from safetensors.numpy import save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from fsdp_jax.data.tokenizer import HuggingFaceTokenizer, load_tokenizer, train_bpe
from fsdp_jax.io.boxes import full_box
from fsdp_jax.io.safetensors import CODE_OF_DTYPE, INDEX, SINGLE, SafetensorsFolder
from fsdp_jax.models import FAMILIES
from fsdp_jax.weights import config_files, read_config, table_of
from fuzz import mutations
from fuzz.harness import Case, RefusedError, Running, Target


def copy_of(case: Case, name: str) -> Path:
    """Returns a copy of a folder of valid files, as the input."""
    return shutil.copytree(case.seeds / name, case.folder / "folder", symlinks=True)


def damage_one(case: Case, folder: Path, name: str) -> None:
    """Damages a JSON file of a folder, or one of the others."""
    paths = [*[folder / name] * 6, *sorted(folder.iterdir())]
    case.damage(
        (9, lambda: mutations.damage_json(case, case.pick(paths))),
        (1, lambda: mutations.replace_file(case, case.pick(paths))),
    )


class SafetensorsTarget(Target):
    """Safetensors files and their index; the reference is the `safetensors` package."""

    name = "safetensors"

    def prepare(self, seeds: Path) -> None:
        random = np.random.default_rng(0)
        tensors = {
            "embed": random.standard_normal((5, 4)).astype(np.float32),
            "half": random.standard_normal((3, 2)).astype(np.float16),
            "ids": np.arange(6, dtype=np.int64).reshape(1, 6),
            "mask": np.array([True, False, True]),
            "scalar": np.array(2.5),
            "empty": np.zeros((0, 3), np.uint8),
        }
        for folder in ("one", "two", "bfloat16"):
            (seeds / folder).mkdir()
        save_file(tensors, seeds / "one" / SINGLE, {"format": "pt"})
        parts = {"model-1.safetensors": ["embed", "half"], "model-2.safetensors": ["ids", "mask"]}
        for name, keys in parts.items():
            save_file({key: tensors[key] for key in keys}, seeds / "two" / name)
        index = {key: name for name, keys in parts.items() for key in keys}
        (seeds / "two" / INDEX).write_text(
            json.dumps({"metadata": {"total_size": 111}, "weight_map": index}, indent=1)
        )
        header = {"a": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}
        (seeds / "bfloat16" / SINGLE).write_bytes(_packed(json.dumps(header), bytes(range(8))))

    def make(self, case: Case) -> None:
        folder = copy_of(case, case.pick(["one", "two", "two", "bfloat16"]))
        paths = sorted(folder.iterdir())
        files = sorted(folder.glob("*.safetensors"))
        index = [folder / INDEX] if (folder / INDEX).exists() else files
        case.damage(
            (5, lambda: mutations.damage_file(case, case.pick(files))),
            (6, lambda: self._damage_header(case, case.pick(files))),
            (4, lambda: mutations.damage_json(case, case.pick(index))),
            (2, lambda: mutations.replace_file(case, case.pick(paths))),
            (2, lambda: mutations.swap_files(case, paths)),
        )

    @staticmethod
    def _damage_header(case: Case, path: Path) -> str:
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header, name = mutations.damage_tree(case, json.loads(content[8 : 8 + size]))
        text = mutations.dumps(header) + " " * case.pick([0, 0, 3])
        path.write_bytes(_packed(text, content[8 + size :]))
        return f"header: {name}"

    def read(self, case: Case) -> Any:
        with SafetensorsFolder(case.folder / "folder") as tensors:
            return {
                name: (
                    CODE_OF_DTYPE[tensor.dtype.name],
                    list(tensor.shape),
                    tensor.read(full_box(tensor.shape)).tobytes(),
                )
                for name, tensor in tensors.items()
            }

    def reference(self, case: Case) -> Any:
        folder = case.folder / "folder"
        index: dict[str, Any] = {}
        names = [SINGLE]
        try:
            if os.path.lexists(folder / INDEX):
                index = json.loads((folder / INDEX).read_text())["weight_map"]
                names = sorted(set(index.values()))
            if any("/" in name for name in names):
                raise RefusedError("a file elsewhere")
            found: dict[str, Any] = {}
            for name in names:
                for key, tensor in safetensors.deserialize((folder / name).read_bytes()):
                    if key in found:
                        raise RefusedError(f"{key!r} in two files")
                    if index.get(key, name) != name:
                        raise RefusedError(f"{key!r} is in {name}, not where the index says")
                    found[key] = (tensor["dtype"], tensor["shape"], bytes(tensor["data"]))
        except RefusedError:
            raise
        except Exception as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from error
        if missing := index.keys() - found.keys():
            raise RefusedError(f"the index names {sorted(missing)}, which are not there")
        return found


def _packed(header: str, data: bytes) -> bytes:
    content = header.encode(errors="surrogatepass")
    return len(content).to_bytes(8, "little") + content + data


SHAPES = {name: wider_config_of(name)[1] for name in FIRST.values()}
# Keys of a config.json that are numbers of ours: {family: {theirs: ours}}.
NUMBERS = {
    "gpt2": {"vocab_size": "vocab_size", "n_layer": "layers", "n_embd": "width", "n_head": "heads"},
    "llama": {
        "vocab_size": "vocab_size", "num_hidden_layers": "layers", "hidden_size": "width",
        "num_attention_heads": "heads", "intermediate_size": "hidden",
        "rms_norm_eps": "norm_epsilon",
    },
    "t5": {
        "vocab_size": "vocab_size", "num_layers": "layers", "d_model": "width", "d_ff": "hidden",
        "d_kv": "head_dim", "layer_norm_epsilon": "norm_epsilon",
    },
    "vit": {
        "image_size": "image_size", "patch_size": "patch", "num_hidden_layers": "layers",
        "hidden_size": "width", "layer_norm_eps": "norm_epsilon",
    },
}  # fmt: skip
MAY_BE_ZERO = ("dropout",)


class ConfigJsonTarget(Target):
    """config.json of Hugging Face and timm; every number must be what it says and make sense."""

    name = "config.json"

    def prepare(self, seeds: Path) -> None:
        for name, shape in SHAPES.items():
            (seeds / name).mkdir()
            for file, content in config_files(shape).items():
                (seeds / name / file).write_bytes(content)

    def make(self, case: Case) -> None:
        damage_one(case, copy_of(case, case.pick(list(SHAPES))), "config.json")

    def read(self, case: Case) -> Any:
        config = read_config(case.folder / "folder")
        table_of(config).names()
        return dataclasses.asdict(config)

    def reference(self, case: Case) -> Any:
        content = json.loads((case.folder / "folder" / "config.json").read_text())
        expected = dict(Running.result)
        for theirs, ours in NUMBERS.get(content.get("model_type"), {}).items():
            if theirs in content:
                expected[ours] = content[theirs]
        declared = {field.name: field for field in dataclasses.fields(_kind_of(content))}
        for name, value in expected.items():
            kind = declared[name].type
            if kind in (int, "int") and (type(value) is not int or value < 1):
                raise RefusedError(f"{name} is {value!r:.80}")
            if kind in (bool, "bool") and type(value) is not bool:
                raise RefusedError(f"{name} is {value!r:.80}")
            if kind in (float, "float") and not _is_rate(name, value):
                raise RefusedError(f"{name} is {value!r:.80}")
        return expected


def _kind_of(content: dict[str, Any]) -> Any:
    kinds = {each.weight_format.model_type: each.config for each in FAMILIES.values()}
    return kinds[content.get("model_type") or None]  # timm's has none


def _is_rate(name: str, value: Any) -> bool:
    if type(value) not in (int, float) or not math.isfinite(value):
        return False
    return value > 0 or (value == 0 and name in MAY_BE_ZERO)


SAMPLES = [
    "",
    "A river is long.",
    "été 日本 \U0001d518 \u2028 \0 </s>",
    "a" * 300,
    "  two  spaces\n\n",
]


class TokenizerTarget(Target):
    """tokenizer.json; the reference is the `tokenizers` package."""

    name = "tokenizer"

    def prepare(self, seeds: Path) -> None:
        words = {
            word: number for number, word in enumerate(["?", "</s>", "a", "river", "is", "##l"])
        }
        letters = ["<unk>", "</s>", "\u2581", *"Arivesong. ", "\u2581is"]
        made = {
            "words": models.WordLevel(words, unk_token="?"),
            "pieces": models.WordPiece(words, unk_token="?"),
            "unigram": models.Unigram(
                [(each, -float(i)) for i, each in enumerate(letters)], 0, False
            ),
        }
        for name, model in made.items():
            tokenizer = tokenizers.Tokenizer(model)
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.NFKC(), normalizers.Lowercase()]
            )
            tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
            if name == "unigram":
                tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
                tokenizer.decoder = decoders.Metaspace()
            tokenizer.add_special_tokens(["</s>"])
            tokenizer.post_processor = processors.TemplateProcessing(
                single="$A </s>", special_tokens=[("</s>", 1)]
            )
            (seeds / name).mkdir()
            (seeds / name / "tokenizer.json").write_text(tokenizer.to_str())
            (seeds / name / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        (seeds / "bpe").mkdir()
        trained = train_bpe([sample * 3 for sample in SAMPLES], 300)
        (seeds / "bpe" / "tokenizer.json").write_bytes(trained.files["tokenizer.json"])

    def make(self, case: Case) -> None:
        folder = copy_of(case, case.pick(["words", "pieces", "unigram", "bpe"]))
        damage_one(case, folder, "tokenizer.json")

    def read(self, case: Case) -> Any:
        tokenizer = load_tokenizer(case.folder / "folder")
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        ids = [tokenizer.encode(sample).tolist() for sample in SAMPLES]
        assert [each.tolist() for each in tokenizer.encode_batch(SAMPLES)] == ids
        tokenizer.decode(np.array([0, 1, -1, tokenizer.vocab_size, *ids[1]]))
        return {"size": tokenizer.vocab_size, "ids": ids, "end": tokenizer.end}

    def reference(self, case: Case) -> Any:
        folder = case.folder / "folder"
        try:
            tokenizer = tokenizers.Tokenizer.from_str((folder / "tokenizer.json").read_text())
            tokenizer.no_truncation()
            tokenizer.no_padding()
            tokenizer.encode_special_tokens = True
            ids = [tokenizer.encode(each, add_special_tokens=False).ids for each in SAMPLES]
            vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        except BaseException as error:  # Rust's panics too
            raise RefusedError(f"{type(error).__name__}: {error}") from error
        settings = folder / "tokenizer_config.json"
        end = Running.result["end"]
        if os.path.lexists(settings):
            if not settings.is_file():
                raise RefusedError("tokenizer_config.json is no file")
            stated = json.loads(settings.read_text()).get("eos_token")
            stated = stated.get("content") if isinstance(stated, dict) else stated
            end = end if stated is None else vocabulary[stated]
        return {"size": max(vocabulary.values(), default=-1) + 1, "ids": ids, "end": end}
