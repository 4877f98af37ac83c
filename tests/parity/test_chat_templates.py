"""Chats against transformers' `apply_chat_template`: the same text, tokens and counted tokens."""

import json

import numpy as np
import pytest
import tokenizers
import transformers

from fsdp_jax.data import load_tokenizer, train_bpe
from fsdp_jax.data.files import Skipped
from fsdp_jax.data.instructions import encode_instructions, load_instructions
from fsdp_jax.data.tokenizer import FILE, SETTINGS

CHATML = """{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message['content'].strip() + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
BRACKETS = """{{ bos_token }}
{% for message in messages %}
{% if message['role'] == 'user' %}
    [INST] {{ message['content'] | trim }} [/INST]
{% elif message['role'] == 'assistant' %}{% generation %}
 {{ message['content'] }}{{ eos_token }}
{%- endgeneration %}{% else %}{% continue %}{% endif %}
{% endfor %}"""
TOOLS = [{"type": "function", "function": {"name": "add", "description": "<a> + é"}}]
CHATS = [
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "One and one?\n"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "  Été <s> 日本?"},
        {"role": "assistant", "content": " \n Yes, <b> & 'no'"},
    ],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ja"}],
]


@pytest.mark.parametrize("template", [CHATML, BRACKETS], ids=["chatml", "brackets"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("trims", [True, False])
def test_chats_are_encoded_as_transformers_encodes_them(tmp_path, template, tools, trims):
    trained = train_bpe(["Two. One and one? user assistant system Be brief."] * 9, 300)
    model = tokenizers.Tokenizer.from_str(trained.files[FILE].decode())
    model.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trims)
    model.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    model.save(str(tmp_path / FILE))
    end = "<|im_end|>" if template is CHATML else "</s>"
    settings = {"bos_token": "<s>", "eos_token": end, "chat_template": template}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / SETTINGS).write_text(json.dumps(settings | kind))
    ours = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    path = tmp_path / "chats.jsonl"
    path.write_text(
        "".join(json.dumps({"messages": chat, "tools": tools}) + "\n" for chat in CHATS)
    )
    records = load_instructions(str(path), Skipped())
    for chat, encoded in zip(CHATS, encode_instructions(records, ours), strict=True):
        for prompt in (False, True):
            text = theirs.apply_chat_template(
                chat, tools=tools, tokenize=False, add_generation_prompt=prompt
            )
            said = {"tools": tools, "where": "", "add_generation_prompt": prompt}
            assert ours.chat_template.render(chat, **said) == text
        found = theirs.apply_chat_template(
            chat, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = np.concatenate([encoded.prompt, encoded.answer])
        assert ids.tolist() == found["input_ids"]
        # Theirs finds no token at white space where the tokenizer trims it, and then marks nothing.
        marked = np.asarray(found["assistant_masks"], bool)
        counted = np.concatenate([np.zeros(len(encoded.prompt), bool), encoded.counted])
        if trims:
            assert not (marked & ~counted).any()
        else:
            np.testing.assert_array_equal(counted, marked)
