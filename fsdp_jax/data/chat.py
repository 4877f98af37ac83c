"""Chats: a tokenizer's own template makes their text, and where in it the assistant answers.

The template is Jinja, rendered as Hugging Face's `apply_chat_template` renders it, in a sandbox.
One name that is there is missing here: `strftime_now`, the date of today, with which rows would
differ from day to day.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from fsdp_jax.errors import ConfigError, extra

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]
Span = tuple[int, int]
"""The first character of an answer, and the one after its last."""

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Put around an answer while it is rendered: Unicode's noncharacters, which no text contains."""
MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
ANSWERS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of a message that an answer may have beside its content."""
FIX = (
    "put `{% generation %}` and `{% endgeneration %}` around the answer in the template, in the "
    "file chat_template.jinja beside tokenizer.json"
)


def is_answer(message: Message) -> bool:
    """Tells whether the assistant says or does anything in a message."""
    other = any(message.get(name) for name in ANSWERS)
    return message["role"] == "assistant" and bool(message["content"].strip() or other)


class ChatTemplate:
    """A chat template, and the special tokens that it names, {bos_token: text}.

    Raises ConfigError, with `where`, for a template that is not Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, where: str) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.where = where
        self.has_markers = MARKER.search(source) is not None
        import jinja2

        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            what, fix = "the chat template cannot be read", "mend it, or restore the file"
            raise ConfigError(what, where=where, got=error, fix=fix) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        where: str,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Renders a chat; `add_generation_prompt` ends it with what precedes an answer.

        `where`: the place of the chat, for messages. Raises ConfigError for one that the template
        refuses.
        """
        text = self._render(messages, tools, add_generation_prompt, where)
        return text.replace(OPEN, "").replace(CLOSE, "")

    def render_answers(
        self, messages: Sequence[Message], *, where: str, tools: Sequence[Any] | None = None
    ) -> tuple[str, list[Span]]:
        """Renders a chat, and finds the assistant's answers in it, in order.

        An answer is what stands within the template's `generation` markers; without markers, what
        the chat up to an answer has more than the chat before it with its generation prompt. An
        empty one, of which only the end would be learned, is none.

        Raises ConfigError where the text before an answer depends on what follows, so that neither
        tells the answers apart.
        """
        if self.has_markers:
            text, spans = _split_marked(self._render(messages, tools, False, where))
            answers = [each for each in messages if each["role"] == "assistant"]
            if len(spans) == len(answers):  # a template may mark parts of them
                spans = [span for span, each in zip(spans, answers, strict=True) if is_answer(each)]
            return text, spans
        text = self.render(messages, where=where, tools=tools)
        spans = []
        for number, message in enumerate(messages):
            if not is_answer(message):
                continue
            common: dict[str, Any] = {"where": where, "tools": tools}
            before = self.render(messages[:number], add_generation_prompt=True, **common)
            after = self.render(messages[: number + 1], **common)
            if not (after.startswith(before) and text.startswith(after)):
                raise ConfigError(
                    "the answers of a chat cannot be told from its prompts",
                    where=f"{where}, message {number + 1}",
                    expected="a template that renders the start of a chat as in the whole chat",
                    got=f"another text before or in this answer, by the template of {self.where}",
                    fix=f"{FIX}; or write each chat up to one answer, with no answer before it",
                )
            spans.append((len(before), len(after)))
        return text, spans

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        where: str,
    ) -> str:
        """Renders a chat, with `OPEN` and `CLOSE` around what the template marks."""
        # a dataset has dates and bytes too, which a template may read as it likes
        written = json.dumps([messages, tools], ensure_ascii=False, default=str)
        if OPEN in written or CLOSE in written:
            what, fix = "a chat contains a noncharacter of Unicode", "remove it"
            raise ConfigError(what, where=where, got="U+FDD0 or U+FDD1", fix=fix)
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except Exception as error:  # a template is a program, and fails in its own ways
            what = "the chat template refuses a chat"
            got = f"{type(error).__name__}: {error}"
            fix = f"write the chat as the template of {self.where} expects it, or mend the template"
            raise ConfigError(what, where=where, got=got, fix=fix) from error


def _split_marked(marked: str) -> tuple[str, list[Span]]:
    """Removes `OPEN` and `CLOSE`; returns the text, and the spans that they enclosed."""
    text, spans, start = "", [], 0
    for piece in re.split(f"([{OPEN}{CLOSE}])", marked):
        if piece == OPEN:
            start = len(text)
        elif piece == CLOSE:
            spans.append((start, len(text)))
        else:
            text += piece
    return text, spans


@cache
def _environment() -> "jinja2.Environment":
    """Makes the environment of templates: that of transformers, without the date of today."""
    with extra("hf"):
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block `{% generation %}`, which encloses the text of an answer."""

        tags: set[str] = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: Any) -> Any:
            """Makes a call of `_mark` around the block's body."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        """Writes JSON without the escapes for HTML that jinja2's own filter adds."""
        return json.dumps(value, **{"ensure_ascii": False} | options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment
