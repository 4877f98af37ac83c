"""The example of docs/models-and-data.md, LoRA on chats, run as it is written, on a toy model.

The step is compiled and run, as the page promises that it trains.
"""

import json
import re
from pathlib import Path

import pytest
import tokenizers
from flax import nnx
from runs import losses
from safetensors.numpy import load_file

from fsdp_jax.cli.main import main
from fsdp_jax.data import train_bpe
from fsdp_jax.models import Llama, LlamaConfig
from fsdp_jax.weights import export_weights, from_arrays

PAGE = Path(__file__).parents[2] / "docs" / "models-and-data.md"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + "
    "eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def block(language, number=0):
    """Returns a block of a language in the page's section on chats."""
    section = PAGE.read_text().split("## LoRA on your own chats")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)[number]


@pytest.mark.long
def test_the_example_of_the_page_trains_adapters_on_chats(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text(block("json") * 20)
    Path("chat.yaml").write_text(block("yaml"))
    # a toy of the model's name, with a tokenizer for chats
    folder = Path("Llama-3.1-8B-Instruct")
    files = Path("tokenizer")
    files.mkdir()
    trained = train_bpe([block("json")], 280)
    model = tokenizers.Tokenizer.from_str(trained.files["tokenizer.json"].decode())
    model.add_special_tokens(["<s>", "</s>", "<|start|>"])
    model.save(str(files / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (files / "tokenizer_config.json").write_text(json.dumps(settings))
    (files / "chat_template.jinja").write_text(TEMPLATE)
    config = LlamaConfig(
        vocab_size=384, sequence_length=128, layers=1, width=64, heads=2, kv_heads=2, hidden=128
    )
    params = nnx.to_pure_dict(nnx.state(Llama(config, rngs=nnx.Rngs(0)), nnx.Param))
    export_weights(from_arrays(params), config, folder, tokenizer=files)
    # the page's commands, with sizes of a toy
    assert main(["train", "chat.yaml", *TOY.split()]) == 0
    shown = capsys.readouterr().out
    assert "chats.jsonl: 40 instructions" in shown
    found = [loss for _, loss, *_ in losses(Path("output/chat"))]
    assert found[-1] < found[0]
    assert main(["export", "output/chat", "--to", "merged", "--format", "huggingface"]) == 0
    assert Path("merged/chat_template.jinja").read_text() == TEMPLATE
    before, after = load_file(folder / "model.safetensors"), load_file("merged/model.safetensors")
    assert before.keys() == after.keys()
    # the adapters alone, and an answer
    assert main(["export", "output/chat", "--to", "adapters", "--format", "peft"]) == 0
    exec(block("python"), {})
    for file in ("adapters", "again"):
        assert len(load_file(f"{file}/adapter_model.safetensors")) == 14
    more = "chat.yaml --lora.weights adapters --output output/more"
    assert main(["train", *more.split(), *TOY.split(), "--train.steps", "1"]) == 0
    capsys.readouterr()
    exec(block("python", 1), names := {})
    assert "<|start|>user\nCapital of France?</s>" in names["text"]
    assert len(names["prompt"]) < len(names["text"])
    assert capsys.readouterr().out == f"{names['tokenizer'].decode(names['tokens'])}\n"


TOY = (
    "--train.steps 6 --train.global_batch_size 8 --train.devices 8 --data.sequence_length 96 "
    "--train.loss_chunk 128 --train.eval_every 6 --train.sample 8 --optimizer.learning_rate 1e-2"
)
