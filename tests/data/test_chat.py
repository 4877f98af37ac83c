"""Chats: the tokenizer's own template, its special tokens, and which tokens count in the loss."""

import datetime
import json
from decimal import Decimal

import numpy as np
import pytest
import tokenizers
from collected import collected
from refusals import fields, refused

from fsdp_jax.data import DataOptions, instructions, load_tokenizer, open_examples, train_bpe
from fsdp_jax.data.chat import ChatTemplate
from fsdp_jax.data.files import Skipped
from fsdp_jax.data.instruction_rows import PackedInstructions
from fsdp_jax.data.instructions import digest_instructions, encode_instructions, load_instructions
from fsdp_jax.data.tokenizer import FILE, SETTINGS, TEMPLATE
from fsdp_jax.errors import ConfigError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = """{{ bos_token }}{% for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + eos_token }}{% endgeneration %}
    {%- else %}{{ '[' + message.role + ']' + message.content }}
    {%- endif %}
{%- endfor %}"""
# an answer is rendered otherwise where another follows, as Qwen's thinking models do
CHANGING = (
    "{% for message in messages %}{{ message.role + ': ' }}"
    "{% if message.role == 'assistant' and loop.last %}{{ '<think>' }}{% endif %}"
    "{{ message.content + '\n' }}{% endfor %}"
)
# Llama 2's: the generation prompt is nothing, and roles must alternate
ALTERNATING = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One and one?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Été 日本?"},
    {"role": "assistant", "content": "Yes \U0001f600"},
]


@pytest.fixture(scope="session")
def words():
    """The bytes of a tokenizer with four special tokens, of which bos and eos are stated."""
    trained = train_bpe(["Two. One and one? user assistant system Be brief."] * 9, 300)
    model = tokenizers.Tokenizer.from_str(trained.files[FILE].decode())
    model.add_special_tokens(list(SPECIAL))
    return model.to_str().encode()


@pytest.fixture
def tokenizer_of(words, tmp_path):
    """Writes a folder with the tokenizer and a template, and loads it."""

    def make(template=None, *, file=None, end=None):
        (tmp_path / FILE).write_bytes(words)
        if end is None:
            end = "<|im_end|>" if template and CHATML in template else "</s>"
        # one as an added token with options
        settings = {"bos_token": {"content": "<s>"}, "eos_token": end, "chat_template": template}
        (tmp_path / SETTINGS).write_text(json.dumps(settings))
        if file is not None:
            (tmp_path / TEMPLATE).write_text(file)
        return load_tokenizer(tmp_path)

    return make


def chats_of(tmp_path, *chats, **more):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat} | more) + "\n" for chat in chats))
    return str(path)


def counted_text(tokenizer, encoded):
    """Returns the text of each run of tokens that count."""
    counted = np.concatenate([np.zeros(len(encoded.prompt), bool), encoded.counted])
    ids = np.concatenate([encoded.prompt, encoded.answer])
    edges = np.flatnonzero(np.diff(np.r_[False, counted, False]))
    return [
        tokenizer.decode(ids[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]


@pytest.mark.filterwarnings("ignore:a model that learns these answers")
@pytest.mark.parametrize(
    ("template", "chat", "text", "answers"),
    [
        (
            CHATML,
            CHAT,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne and one?<|im_end|>\n"
            "<|im_start|>assistant\nTwo.<|im_end|>\n<|im_start|>user\nÉté 日本?<|im_end|>\n"
            "<|im_start|>assistant\nYes \U0001f600<|im_end|>\n",
            ["Two.<|im_end|>\n", "Yes \U0001f600<|im_end|>\n"],
        ),
        (
            MARKED,
            CHAT,
            "<s>[system]Be brief.[user]One and one?Two.</s>[user]Été 日本?Yes \U0001f600</s>",
            ["Two.</s>", "Yes \U0001f600</s>"],
        ),
        (
            ALTERNATING,
            CHAT[1:],
            "<s>[INST] One and one? [/INST] Two. </s>[INST] Été 日本? [/INST] Yes \U0001f600 </s>",
            [" Two. </s>", " Yes \U0001f600 </s>"],
        ),
        # an answer alone can be told apart
        (CHANGING, CHAT[:2] + CHAT[4:], None, None),
    ],
    ids=["prefixes", "markers", "without a generation prompt", "changing"],
)
def test_the_answers_of_a_chat_count_and_nothing_else(
    tokenizer_of, tmp_path, template, chat, text, answers
):
    tokenizer = tokenizer_of(template)
    (record,) = load_instructions(chats_of(tmp_path, chat), Skipped())
    if text is None:
        text = "system: Be brief.\nuser: One and one?\nassistant: <think>Yes \U0001f600\n"
        answers = ["assistant: <think>Yes \U0001f600\n"]
    (encoded,) = encode_instructions([record], tokenizer)
    ids = np.concatenate([encoded.prompt, encoded.answer])
    assert tokenizer.decode(ids) == text
    assert counted_text(tokenizer, encoded) == answers
    special = [tokenizer._with_special_tokens.token_to_id(name) for name in SPECIAL]
    assert sum(np.isin(ids, special)) == sum(text.count(name) for name in SPECIAL)
    # in a row, the target of a position is the next token
    (row,) = list(PackedInstructions([encoded], sequence_length=len(ids) + 3, skipped=Skipped()))
    counted = np.concatenate([np.zeros(len(encoded.prompt), bool), encoded.counted])
    np.testing.assert_array_equal(row["mask"][: len(ids) - 1], counted[1:])
    assert not row["mask"][len(ids) - 1 :].any()


ENDLESS = "a model that learns these answers may never stop"


@pytest.mark.parametrize(
    ("template", "end", "got"),
    [
        # the end of an answer is after its markers; it has none; it is not where programs stop
        (
            MARKED.replace(" + eos_token }}{% endgeneration", " }}{% endgeneration").replace(
                "{% endgeneration %}", "{% endgeneration %}{{ eos_token }}"
            ),
            "</s>",
            "2 of 2 answers hold no special token",
        ),
        (CHATML.replace("<|im_end|>", ""), "</s>", "2 of 2 answers hold no special token"),
        (CHATML, "</s>", "no answer holds </s>, the end-of-text token"),
    ],
)
def test_a_template_that_teaches_no_end_is_warned_of(tokenizer_of, tmp_path, template, end, got):
    records = load_instructions(chats_of(tmp_path, CHAT), Skipped())
    with pytest.warns(UserWarning, match=ENDLESS) as warned:
        encode_instructions(records, tokenizer_of(template, end=end))
    said = str(warned[0].message)
    assert got in said
    assert f"{tmp_path}: tokenizer_config.json" in said
    assert "eos_token" in said


def test_empty_answers_are_counted_and_not_learned(tokenizer_of, tmp_path):
    turn = {"role": "user", "content": "Hi"}
    empty = [turn, {"role": "assistant", "content": " \n", "id": 7}]
    null = [turn, {"role": "assistant", "content": None}]
    call = [turn, null[1] | {"tool_calls": [{"name": "sum"}]}]
    path = chats_of(tmp_path, empty, null, [*empty, *CHAT[1:]], call)
    skipped = Skipped()
    records = load_instructions(path, skipped)
    assert skipped == {"without an answer": 2, "empty answers within chats": 1}
    for template, answers in (
        (CHATML, ["Two.<|im_end|>\n", "Yes \U0001f600<|im_end|>\n"]),
        (MARKED, ["Two.</s>", "Yes \U0001f600</s>"]),
    ):
        tokenizer = tokenizer_of(template)
        encoded = encode_instructions(records, tokenizer)
        assert counted_text(tokenizer, encoded[0]) == answers
        assert len(encoded) == 2  # a call of a tool is an answer


def test_the_roles_of_chats_without_an_answer_are_named(tmp_path):
    chat = [{"role": "human", "content": "Hi"}, {"role": "Assistant", "content": "Ho"}]
    got = "2 records (2 without an answer (of the role assistant; Assistant, human))"
    with refused("no instructions", error=ConfigError, got=got):
        load_instructions(chats_of(tmp_path, chat, chat), Skipped())


def test_a_chat_that_is_cut_keeps_the_marks_of_its_tokens(tokenizer_of, tmp_path):
    (record,) = load_instructions(chats_of(tmp_path, CHAT), Skipped())
    (encoded,) = encode_instructions([record], tokenizer_of(CHATML))
    cut, skipped = len(encoded) - 20, Skipped()
    rows = PackedInstructions([encoded], sequence_length=cut - 1, skipped=skipped)
    assert skipped == {"truncated": 1}
    whole = PackedInstructions([encoded], sequence_length=len(encoded), skipped=Skipped())[0]
    for name in ("tokens", "mask"):
        length = len(rows[0][name])
        np.testing.assert_array_equal(rows[0][name], whole[name][:length])


def test_the_file_of_a_template_goes_before_the_settings(tokenizer_of, tmp_path):
    tokenizer = tokenizer_of(CHATML, file=MARKED)
    assert tokenizer.chat_template.source == MARKED
    assert tokenizer.files[TEMPLATE] == MARKED.encode()
    (tmp_path / TEMPLATE).unlink()
    named = [{"name": "tools", "template": MARKED}, {"name": "default", "template": CHATML}]
    assert tokenizer_of(named).chat_template.source == CHATML


def test_tools_reach_the_template(tokenizer_of, tmp_path):
    tokenizer = tokenizer_of("{{ tools[0] | tojson }}" + CHATML)
    tools = [{"name": "été", "html": "<b>"}]
    (record,) = load_instructions(chats_of(tmp_path, CHAT, tools=tools), Skipped())
    (encoded,) = encode_instructions([record], tokenizer)
    text = tokenizer.decode(encoded.prompt)
    assert text.startswith('{"name": "été", "html": "<b>"}<|im_start|>system')


def test_the_rows_of_a_run_hold_chats_and_prompts(tokenizer_of, tmp_path):
    tokenizer_of(CHATML)
    path = tmp_path / "chats.jsonl"
    records = [{"messages": CHAT}, {"messages": CHAT[:2]}, {"prompt": "a", "completion": "b"}]
    path.write_text("".join(json.dumps(each) + "\n" for each in records * 5))
    options = DataOptions(
        kind="instructions", path=str(path), tokenizer=str(tmp_path), sequence_length=255
    )
    data = open_examples(options)
    assert "chats.jsonl: 10 instructions" in data.description
    assert "5 without an answer" in data.description
    # another template makes other rows of the same chats
    (tmp_path / TEMPLATE).write_text(MARKED)
    other = open_examples(options)
    assert other.digest != data.digest
    chats = load_instructions(str(path), Skipped())
    assert data.digest == digest_instructions(chats, CHATML)


def test_what_a_template_cannot_render_is_refused(tokenizer_of, tmp_path):
    cases = [
        (
            None,
            CHAT,
            {"what": "no chat template", "expected": "chat_template.jinja", "fix": "Instruct"},
        ),
        (
            CHANGING,
            CHAT,
            {
                "what": "cannot be told",
                "where": "./chats.jsonl, line 1, message 3",
                "fix": "{% generation %}",
            },
        ),
        (
            ALTERNATING,
            CHAT,
            {
                "what": "refuses a chat",
                "where": "./chats.jsonl, line 1",
                "got": "roles must alternate",
            },
        ),
        (
            "{{ strftime_now('%d') }}",
            CHAT,
            {"what": "refuses a chat", "got": "'strftime_now' is undefined"},
        ),
        ("{{ ''.__class__.__mro__ }}", CHAT, {"what": "refuses a chat", "got": "SecurityError"}),
        (
            "{% for %}",
            CHAT,
            {"what": "cannot be read", "where": f"{tmp_path}: tokenizer_config.json"},
        ),
        ("{% generation %}{% endgeneration %}", CHAT, {"what": "marks no answer"}),
        (CHATML, [CHAT[1], {"role": "assistant", "content": "\ufdd0"}], {"what": "noncharacter"}),
    ]
    with collected() as case:
        for template, chat, said in cases:
            with case(template):
                tokenizer = tokenizer_of(template)
                records = load_instructions(chats_of(tmp_path, chat), Skipped())
                with refused(error=ConfigError, **fields(said, tmp_path)):
                    encode_instructions(records, tokenizer)


def test_chats_of_a_dataset_may_hold_dates_and_bytes(tokenizer_of, tmp_path, monkeypatch):
    """As Arrow's columns give them; a template writes them as Jinja does."""
    day, more = datetime.datetime(2026, 1, 2, 3), {"cost": Decimal("1.50"), "image": b"\xff\x00"}
    chats = [
        [message | more | {"at": day + datetime.timedelta(days)} for message in CHAT]
        for days in range(2)
    ]
    chats[0][1]["content"] = b"One and one?"
    rows = [(f"row {number}", {"messages": chat}) for number, chat in enumerate(chats)]
    monkeypatch.setattr(instructions, "read_dataset", lambda *_: iter(rows))
    records = load_instructions("chats.parquet", Skipped())
    assert digest_instructions(records[:1]) != digest_instructions(records[1:])
    for template, text in (
        (CHATML, "One and one?"),
        ("{{ messages[0].at }} {{ messages[0].cost }}" + CHATML, "2026-01-02 03:00:00 1.50<|im"),
    ):
        tokenizer = tokenizer_of(template)
        encoded = encode_instructions(records, tokenizer)
        assert text in tokenizer.decode(encoded[0].prompt)
    with refused("refuses a chat", error=ConfigError, where="row 0", got="not JSON serializable"):
        encode_instructions(records, tokenizer_of("{{ messages[0] | tojson }}" + CHATML))


def test_malformed_messages_are_refused(tmp_path):
    cases = [
        ("Hi", {"where": "./chats.jsonl, line 1, field 'messages'", "got": "str"}),
        ([], "an empty list"),
        (["Hi"], {"where": "./chats.jsonl, line 1, message 1", "got": "str"}),
        (
            [{"from": "human", "value": "Hi"}],
            {"where": "./chats.jsonl, line 1, message 1", "got": "from, value"},
        ),
        (
            [{"role": "user"}],
            {"where": "./chats.jsonl, line 1, message 1", "expected": "a field 'content'"},
        ),
        (
            [{"role": "user", "content": None}],
            {"where": "./chats.jsonl, line 1, message 1, field 'content'", "got": "null"},
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            {"where": "./chats.jsonl, line 1, message 1, field 'content'", "got": "a list"},
        ),
    ]
    with collected() as case:
        for messages, said in cases:
            with case(messages), refused(error=ConfigError, **fields(said, tmp_path)):
                load_instructions(chats_of(tmp_path, messages), Skipped())


def test_a_model_with_an_encoder_reads_no_chats(tokenizer_of, tmp_path):
    tokenizer_of(CHATML)
    options = {"kind": "instructions", "path": chats_of(tmp_path, CHAT), "target_length": 9}
    with refused("decoder-only", error=ConfigError):
        open_examples(DataOptions(tokenizer=str(tmp_path), **options))


def test_a_message_that_calls_a_tool_needs_no_content():
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls %}{{ call.name }}{% endfor %};{% endfor %}",
        {},
        where="here",
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]
    messages[1]["tool_calls"] = [{"name": "sum"}]
    assert template.render(messages, where="") == "user:a;assistant:sum;"
