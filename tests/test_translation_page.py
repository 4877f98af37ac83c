"""The settings that docs/translation.md and docs/edge-of-memory.md name exist."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import yaml

import fsdp_jax as fsdp
from fsdp_jax import public
from fsdp_jax.lora import with_lora
from fsdp_jax.sharding.strategy import get_strategy
from fsdp_jax.train.config_file import KEYS
from fsdp_jax.weights import from_arrays

DOCS = Path(__file__).parents[1] / "docs"
SECTIONS = {key.partition(".")[0] for key in KEYS}
SETTINGS = {"Precision", "Offload", "RematPolicy", "LossScale", "QuantizedBase"}
ARGUMENTS = {
    "make_train_step": {*inspect.signature(fsdp.Sharded.make_train_step).parameters},
    "make_mesh": {*inspect.signature(fsdp.make_mesh).parameters},
    "fully_shard": {*inspect.signature(fsdp.fully_shard).parameters},
    "with_lora": {*inspect.signature(with_lora).parameters},
    "from_arrays": {*inspect.signature(from_arrays).parameters},
}
# Of one of the two, where the page does not say of which.
ARGUMENTS["argument"] = ARGUMENTS["fully_shard"] | ARGUMENTS["make_train_step"]


def code(page):
    """Lists what a page has between backquotes, without the other libraries' column."""
    text = (DOCS / page).read_text()
    if page == "translation.md":
        text = re.sub(r"(?m)^\| .*? \|", "", text)
    return re.findall(r"`([^`\n]+)`", text)


def check_key(text):
    """Checks `strategy: zero1` or `train.accumulation`; tells whether it is a key."""
    name, _, value = text.partition(": ")
    if not re.fullmatch(r"\w+(\.\w+)?", name) or name.partition(".")[0] not in SECTIONS:
        return False
    if name in SECTIONS and name not in KEYS:
        return False
    assert name in KEYS, text
    if value and value != "k":
        converted = KEYS[name].convert(yaml.safe_load(value), text)
        assert name != "strategy" or get_strategy(converted)
    return True


def check_python(text):
    """Evaluates settings, and looks arguments up; tells whether there was anything to check."""
    try:
        call = ast.parse(text if re.match(r"\w+\(", text) else f"argument({text})").body[0].value
    except SyntaxError:
        return False
    name = getattr(getattr(call, "func", None), "id", None)
    if name in SETTINGS:
        eval(text, vars(public))
    elif name in ARGUMENTS and call.keywords:
        assert {word.arg for word in call.keywords} <= ARGUMENTS[name], text
    else:
        return False
    return True


def test_each_library_has_its_own_table():
    text = (DOCS / "translation.md").read_text()
    names = re.findall(r"(?m)^\| `(\w+(?:\.\w+)?)", text.split("## PEFT and bitsandbytes")[1])
    assert {"BitsAndBytesConfig", "prepare_model_for_kbit_training"} <= {*names}
    assert "PeftModel.merge_and_unload" in names


@pytest.mark.parametrize("page", ["translation.md", "edge-of-memory.md"])
def test_every_setting_that_the_page_names_is_there(page):
    keys = [text for text in code(page) if check_key(text)]
    python = [text for text in code(page) if check_python(text)]
    assert len(keys) > 15
    assert len(python) > {"translation.md": 80, "edge-of-memory.md": 0}[page]
