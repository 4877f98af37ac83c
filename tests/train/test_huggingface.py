"""Imports, exports and fine-tuning of Hugging Face weights: full, partial, and LoRA.

The steps of imported, frozen and adapted models are compiled and run, as a user's are.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from runs import losses
from safetensors.numpy import load_file

from fsdp_jax.cli.main import main
from fsdp_jax.data import files, train_bpe
from fsdp_jax.sharding.quantized import Blocks, QuantizedBase

pytestmark = pytest.mark.long

SIZES = "--model.layers None --model.width None --model.heads None"
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def short_corpus(monkeypatch):
    """Cuts the embedded corpus, since a tokenizer takes seconds for 8 MiB of text."""
    monkeypatch.setattr(files, "EMBEDDED_LIMIT", 2**17)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The Hugging Face folder of a small GPT-2, trained for one step, with a tokenizer."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "run.yaml").write_text(
        "model: {layers: 2, width: 64, heads: 2, vocab_size: 300}\nunits: {classes: [Block]}\n"
        "data: {sequence_length: 512}\n"
        "train: {steps: 1, global_batch_size: 8, devices: 8, eval_batches: 1, sample: 0}\n"
    )
    assert main(["train", str(folder / "run.yaml"), "--output", str(folder / "run")]) == 0
    export = f"export {folder / 'run'} --to {folder / 'gpt2'} --format huggingface"
    assert main(export.split()) == 0
    trained = train_bpe(
        ["Below is an instruction that describes a task. ### Response: ### Instruction:"] * 9, 300
    )
    (folder / "gpt2" / "tokenizer.json").write_bytes(trained.files["tokenizer.json"])
    return folder / "gpt2"


@pytest.fixture(scope="module")
def imported(theirs):
    run = theirs.parent / "imported"
    assert main(["import", str(theirs), "--to", str(run), "--devices", "8"]) == 0
    return run


def tensors(folder):
    return load_file(folder / "model.safetensors")


def exported(run, to):
    assert main(["export", str(run), "--to", str(to), "--format", "huggingface"]) == 0
    return tensors(to)


def test_a_changed_tokenizer_beside_a_run_is_refused(run, imported, tmp_path, capsys):
    """One that reads well too: it would encode the text otherwise."""
    changed = shutil.copytree(imported, tmp_path / "changed")
    other = train_bpe(["Below is another text"] * 9, 300)
    (changed / "tokenizer.json").write_bytes(other.files["tokenizer.json"])
    words = ["export", str(changed), "--to", str(tmp_path / "back"), "--format", "huggingface"]
    assert main(words) == 3
    assert run("wrong", f"--model.weights {changed}", SIZES) == 3
    said = rf"beside the weights has changed\n +where: +{changed}/tokenizer.json\n"
    assert len(re.findall(said, capsys.readouterr().err)) == 2
    assert not (tmp_path / "back").exists()


def test_the_recipe_for_instructions(imported, tmp_path, capsys):
    """The shipped configuration trains imported weights, and the model is exported."""
    config = CONFIGS / "finetune_alpaca_gpt2.yaml"
    words = f"--model.weights {imported} --output {tmp_path / 'tuned'}"
    words += " --optimizer.learning_rate 1e-3 --train.steps 16"
    words += " --train.eval_every 8 --train.sample 10"
    assert main(["train", str(config), *words.split()]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"instructions: 211 instructions, 10 of them held out, the others in \d+ rows", shown
    )
    assert "| ### Response:" in shown
    assert "nats per token" in shown
    found = [loss for _, loss, *_ in losses(tmp_path / "tuned")]
    assert np.mean(found[-3:]) < np.mean(found[:3]) - 0.1
    after, before = (
        exported(tmp_path / "tuned", tmp_path / "out"),
        tensors(imported.parent / "gpt2"),
    )
    assert set(after) == set(before)
    assert not np.array_equal(after["transformer.wte.weight"], before["transformer.wte.weight"])


def test_a_folder_and_its_import_start_the_same_run(run, theirs, imported, tmp_path):
    for name, weights in (("folder", theirs), ("imported", imported)):
        assert run(name, f"--model.weights {weights}", SIZES, "--train.steps 2") == 0
    assert losses(tmp_path / "folder") == losses(tmp_path / "imported")


def test_frozen_parameters_do_not_change(run, imported, tmp_path):
    frozen = "--model.frozen ^embed blocks/mlp --train.steps 2"
    assert run("part", f"--model.weights {imported}", SIZES, frozen) == 0
    after, before = exported(tmp_path / "part", tmp_path / "out"), tensors(imported.parent / "gpt2")
    same = {name for name in after if np.array_equal(after[name], before[name])}
    assert {name for name in after if "wte" in name or "mlp" in name} == same


def test_exports_have_the_adapters_merged(run, imported, tmp_path, capsys):
    words = f"--model.weights {imported} {SIZES} --lora.rank 4 --lora.alpha"
    assert run("lora", words, "8 --train.steps 3") == 0
    assert run("lora", words, "16 --train.steps 5") == 2
    assert "LoRA's scale has changed since the checkpoint" in capsys.readouterr().err
    assert run("lora", words, "8 --train.steps 5") == 0  # goes on
    shown = capsys.readouterr().out
    assert "changed since the run last started: train.steps 3 -> 5" in shown
    assert re.search(r"parameters: .* of which 3,072 are trained", shown)
    assert f"from the checkpoint (the run started from {imported})" in shown
    after, before = exported(tmp_path / "lora", tmp_path / "out"), tensors(imported.parent / "gpt2")
    changed = {name for name in after if not np.array_equal(after[name], before[name])}
    assert changed == {name for name in after if re.search(r"attn\.c_\w+\.weight$", name)}
    # the merged model is what was trained: it starts where the run with adapters ended
    assert run("again", f"--model.weights {tmp_path / 'out'}", SIZES, "--train.steps 1") == 0
    ends, starts = (
        (tmp_path / name / "evals.jsonl").read_text().splitlines() for name in ("lora", "again")
    )
    ended, started = json.loads(ends[-1])["held_out_loss"], json.loads(starts[0])["held_out_loss"]
    assert started == pytest.approx(ended, rel=1e-5)


def test_a_quantized_base_is_trained_resumed_and_exported(run, theirs, imported, tmp_path, capsys):
    """From a folder and from an imported run; the export adds adapters to the dequantized base."""
    words = f"{SIZES} --lora.rank 4 --lora.alpha 8 --lora.base nf4 --model.weights"
    assert run("folder", f"{words} {theirs}", "--train.steps 3") == 0
    assert run("folder", f"{words} {theirs}", "--train.steps 5") == 0  # goes on
    assert run("folder", f"{words} {theirs} --lora.base int4", "--train.steps 6") == 2
    assert "nf4:64:float32" in capsys.readouterr().err
    assert run("imported", f"{words} {imported}", "--train.steps 5") == 0
    after, before = exported(tmp_path / "folder", tmp_path / "out"), tensors(theirs)
    assert main(["export", str(tmp_path / "folder"), "--to", str(tmp_path / "own")]) == 0
    own = tensors(tmp_path / "own")
    kernel, (a, b) = own["blocks/attn/qkv/kernel"], (own[f"blocks/attn/qkv/lora_{x}"] for x in "ab")
    for layer in range(2):
        name = f"transformer.h.{layer}.attn.c_attn.weight"
        blocks = Blocks(QuantizedBase("nf4"), before[name].shape, np.dtype(np.float32), 0)
        base = blocks.to_host(np.asarray(blocks.encode(before[name])))
        np.testing.assert_array_equal(kernel[layer], base)
        merged = base + 2.0 * a[layer].astype(np.float64) @ b[layer]
        np.testing.assert_allclose(after[name], merged, atol=1e-6)
        assert np.abs(after[name] - base).max() > 1e-4
    # A new run starts with its codes and adapters: where it ended.
    assert run("more", f"{words} {tmp_path / 'folder'}", "--train.steps 1") == 0
    assert run("wrong", f"{words} {tmp_path / 'folder'} --lora.base int4") == 2
    assert "with lora.base nf4 and lora.base_scales float32; or" in capsys.readouterr().err
    ends, starts = (
        (tmp_path / name / "evals.jsonl").read_text().splitlines() for name in ("folder", "more")
    )
    assert json.loads(starts[0])["held_out_loss"] == json.loads(ends[-1])["held_out_loss"]
    # Both begin with the same codes.
    assert losses(tmp_path / "folder")[0] == losses(tmp_path / "imported")[0]


def test_adapters_are_exported_and_started_from_in_peft_s_format(
    run, theirs, imported, tmp_path, capsys
):
    """A run that starts from exported adapters begins where the run that trained them ended."""
    words = f"{SIZES} --lora.rank 4 --lora.alpha 8 --model.weights"
    assert run("lora", f"{words} {theirs}", "--train.steps 3") == 0
    export = f"export {tmp_path / 'lora'} --format peft"
    assert main([*export.split(), "--to", str(tmp_path / "peft")]) == 0
    assert f"in {tmp_path / 'peft'}, adapters of {theirs}" in capsys.readouterr().out
    assert {file.name for file in (tmp_path / "peft").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    }
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(theirs)
    assert settings["task_type"] == "CAUSAL_LM"
    assert settings["target_modules"] == ["attn.c_proj", "c_attn"]
    # The rank, alpha and targets are the folder's; the merged weights are the same.
    words = f"{SIZES} --model.weights {imported} --lora.weights {tmp_path / 'peft'}"
    assert run("again", words, "--train.steps 1") == 0
    ends, starts = (
        (tmp_path / name / "evals.jsonl").read_text().splitlines() for name in ("lora", "again")
    )
    assert json.loads(ends[-1])["held_out_loss"] == json.loads(starts[0])["held_out_loss"]
    assert run("again", words, "--train.steps 2") == 0  # goes on
    # An imported run has no path that PEFT could load.
    capsys.readouterr()
    export = f"export {tmp_path / 'again'} --format peft --to {tmp_path / 'of_run'}"
    assert main(export.split()) == 0
    assert "adapters of no stated base (--base)" in capsys.readouterr().out
    # What does not fit is refused.
    wrong = {
        f"{words} --lora.rank 8": ["lora.weights has its own rank", "expected: 4"],
        f"{words} --lora.targets qkv": ["lora.weights has its own targets"],
        f"{SIZES} --model.preset gpt2 --lora.weights x": ["adapters without the weights"],
        f"{words}x": ["no adapters there"],
    }
    for case, said in wrong.items():
        assert run("wrong", case) == 2
        error = capsys.readouterr().err
        assert [part for part in said if part not in error] == [], (case, error)
    trained = f"{words} --lora.trained ln_f --train.steps 1"
    assert run("trained", trained) == 0
    refused = {
        f"export {tmp_path / 'trained'} --format peft": "ln_f/bias, ln_f/scale",
        f"export {imported} --format peft": "a run without adapters",
        f"export {tmp_path / 'lora'} --base x": "--format peft",
    }
    for case, part in refused.items():
        assert main([*case.split(), "--to", str(tmp_path / "none")]) == 2
        assert part in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


CONTRADICTING = [
    ("--model.family llama", ["the weights are of another family", "set model.family to gpt"]),
    (
        "--model.layers 3",
        ["the weights have a shape of their own", "model.layers 3", "leave them out"],
    ),
    ("--data.sequence_length 1024", ["the sequence is too long", "use 512"]),
    ("--lora.rank 99", ["rank"]),
    ("--lora.rank 2 --lora.targets atn/", ["atn/"]),
    ("--lora.rank 2 --model.frozen embed", ["LoRA freezes all the rest"]),
    ("--lora.alpha 8", ["adapters without a rank", "set lora.rank"]),
    ("--precision.frozen bfloat16", ["frozen would be ignored", "precision.frozen"]),
    (
        "--data.tokenizer bytes",
        ["another tokenizer than the weights were trained with", "leave data.tokenizer out"],
    ),
    ("--model.frozen .", ["nothing is trained"]),
    ("--model.frozen embd", ["pattern 'embd' matches no parameter"]),
    (
        "--model.scan_layers False",
        ["the weights do not fit the model", "blocks/0/attn/out/bias: missing"],
    ),
    ("--data.kind images", ["family and data do not go together", "for gpt"]),
    ("--data.target_length 9", ["target_length would be ignored"]),
    ("--model.classes 9", ["classes would be ignored"]),
]


def test_keys_that_contradict_the_weights_are_refused(run, imported, capsys):
    for words, said in CONTRADICTING:
        assert run("wrong", f"--model.weights {imported}", SIZES, words) == 2
        error = capsys.readouterr().err
        assert [part for part in said if part not in error] == [], words


@pytest.mark.filterwarnings("default:.*the mean of the others:UserWarning")
def test_a_tokenizer_with_more_ids_than_the_weights_have_rows_names_the_key(
    run, theirs, tmp_path, capsys
):
    """The fix is the key that adds the rows: the run then trains, and exports them."""
    folder = shutil.copytree(theirs, tmp_path / "more")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 300, "content": "<new>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert run("more", f"--model.weights {folder}", SIZES) == 2
    said = capsys.readouterr().err
    assert "the vocabulary of the weights is too small\n  where:    model.weights" in said
    (fix,) = re.findall(r"set (model.vocab_size) to (384)", said)
    words = f"--model.weights {folder}", SIZES, f"--{' '.join(fix)} --train.steps 1"
    assert run("grown", *words, "--optimizer.learning_rate 0") == 0
    said = capsys.readouterr().err
    assert "the last 84 rows of embed/embedding are the mean of the others" in said
    found, before = exported(tmp_path / "grown", tmp_path / "out"), tensors(theirs)
    table, old = found["transformer.wte.weight"], before["transformer.wte.weight"]
    np.testing.assert_array_equal(table[:300], old)
    np.testing.assert_allclose(table[300:], old.mean(0)[None].repeat(84, 0), atol=1e-7)
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["vocab_size"] == 384


def test_weights_without_a_tokenizer_need_one_stated(run, theirs, tmp_path, capsys):
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((theirs / name).read_bytes())
    words = f"--model.weights {folder} {SIZES}"
    assert run("bare", words) == 2
    assert "no tokenizer beside the weights" in capsys.readouterr().err
    assert run("bare", words, "--data.tokenizer bytes --train.steps 1") == 0


def test_imported_weights_are_not_resumed(run, imported, capsys):
    assert run("wrong", SIZES, f"--output {imported}") == 2
    assert "imported weights, not a run that can be resumed" in capsys.readouterr().err
