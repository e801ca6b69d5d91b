"""What surrounds a prompt: the model's own chat template, a text of the user's, or nothing.

The template renders a conversation as text, and we find the assistant's turns in it without the template's help (few
mark them): the rendering of the first messages, plus the opening of an answer, must be a prefix of the whole rendering;
the turn follows it. A template that rewrites earlier messages is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from typing import Any, Literal

from fedlora.data.text import Message
from fedlora.errors import ConfigError, DataError

RAW = "none"  # data.template: prompt and response as they are, one after the other
CHAT = "chat"  # data.template: the tokenizer's own
_TODAY = datetime(2024, 7, 26)  # for templates that ask for the date (Llama 3): the same at every site, every day
_DAY = "%d %b %Y"
# A macro that replaces transformers' template function of the same name, with fixed values for all date codes.
_CLOCK = (
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(f"|replace('%{code}', {_TODAY.strftime('%' + code)!r})" for code in "aAbBdHIjmMpSyYcxXZ")
    + " }}{%- endmacro -%}"
)


@dataclass(frozen=True)
class Template:
    """Turns a prompt into what the model reads.

    kind: "raw", prompt followed by response; "text", `text` with the prompt in place of {prompt}, followed by the
    response; "chat", the Jinja chat template `text`.
    """

    kind: Literal["raw", "text", "chat"]
    text: str = ""

    @property
    def name(self) -> str:
        """Its name in a manifest: "raw", the text itself, or a digest of the chat template."""
        if self.kind == "chat":
            return f"chat, sha256 {hashlib.sha256(self.text.encode()).hexdigest()[:16]}"
        return self.text or "raw"

    def around(self, prompt: str) -> tuple[str, int]:
        """The prompt with its surroundings, and the prompt's start in it. Not for chat templates."""
        if self.kind == "raw":
            return prompt, 0
        head, _, tail = self.text.partition("{prompt}")
        return head + prompt + tail, len(head)


def check_template(wanted: str | None) -> None:
    """Raise `ConfigError` for a `data.template` that cannot work with any model."""
    if wanted in (None, RAW, CHAT):
        return
    assert wanted is not None
    if is_jinja(wanted):
        if "messages" not in wanted:
            raise ConfigError(
                f"data.template has {{{{ or {{%, so it is a Jinja chat template, which needs `messages`: "
                f"{wanted[:60]!r}. For a text around the prompt write {{prompt}}."
            )
        return
    if wanted.count("{prompt}") != 1 or "{response}" in wanted:
        raise ConfigError(
            f"data.template is {CHAT!r} (the model's own), {RAW!r} (nothing around the prompt), a text with {{prompt}} "
            f"in it once, such as '### Question:\\n{{prompt}}\\n\\n### Answer:\\n' (the response and the end token "
            f"follow by themselves), or a Jinja chat template; got {wanted[:80]!r}."
        )


def find_template(wanted: str | None, tokenizer: Any) -> Template:
    """The template for this tokenizer given by `data.template`; None: the tokenizer's own chat template.

    Raises:
        ConfigError: the tokenizer has none and nothing else was given, or the text is not a template.
    """
    check_template(wanted)
    if wanted == RAW:
        return Template("raw")
    if wanted is not None and wanted != CHAT:
        return Template("chat", wanted) if is_jinja(wanted) else Template("text", wanted)
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "the model's tokenizer has no chat template, so fedlora cannot separate a prompt from its "
            "answer. Set data.template to a text such as "
            "'### Question:\\n{prompt}\\n\\n### Answer:\\n', a Jinja chat template, or 'none' for the bare prompt "
            "directly followed by the response."
        )
    try:
        return Template("chat", tokenizer.get_chat_template())
    except ValueError as error:  # there are several named templates, none of them the default
        raise ConfigError(f"the tokenizer's chat template cannot be chosen: {str(error).splitlines()[0]}") from error


def render(template: Template, tokenizer: Any, messages: Sequence[Message], *, ask: bool) -> str:
    """The messages as text; ask: followed by the opening of the assistant's next turn.

    Raises:
        DataError: the template rejects these messages.
    """
    from jinja2 import TemplateError

    turns = [{"role": role, "content": content} for role, content in messages]
    try:
        text: str = tokenizer.apply_chat_template(
            turns, chat_template=_CLOCK + template.text, tokenize=False, add_generation_prompt=ask,
            date_string=_TODAY.strftime(_DAY),
        )  # fmt: skip
    except (TemplateError, TypeError) as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"the chat template refuses a conversation of {', '.join(role for role, _ in messages)}: {said}"
        ) from error
    return text


@dataclass(frozen=True)
class Conversation:
    """A conversation as text. turns: (start, end) of each assistant turn in characters, from after its opening to the
    start of the next message."""

    text: str
    turns: tuple[tuple[int, int], ...]


def converse(template: Template, tokenizer: Any, messages: Sequence[Message]) -> Conversation:
    """Render a conversation with a chat template, and find the assistant's turns.

    Raises:
        DataError: the template rejects the messages, or its rendering of the first few is not a prefix of the whole.
    """
    _refuse_signs(tokenizer, messages)
    text = render(template, tokenizer, messages, ask=False)
    turns = []
    for k, (role, _) in enumerate(messages):
        if role != "assistant":
            continue
        opened = render(template, tokenizer, messages[:k], ask=True)
        closed = render(template, tokenizer, messages[: k + 1], ask=False) if k + 1 < len(messages) else text
        if not (closed.startswith(opened) and text.startswith(closed)):
            raise DataError(
                f"the chat template renders the first {k} of {len(messages)} messages differently when more "
                f"follow (it rewrites earlier turns, as templates of reasoning models do), so it is unclear which "
                f"turns to learn. Split such conversations after each answer, or give a data.template that does not."
            )
        header = _unopened(template, tokenizer, messages[:k], opened)
        if header:
            raise DataError(
                f"the chat template puts {header[:40]!r} before an answer but does not add it with "
                f"add_generation_prompt, so the model would have to generate it itself. Add that part, as "
                f"{{% if add_generation_prompt %}}...{{% endif %}}, in a data.template."
            )
        turns.append((len(opened), len(closed)))
    return Conversation(text, tuple(turns))


def _unopened(template: Template, tokenizer: Any, asked: Sequence[Message], opened: str) -> str:
    """What the template puts before any answer, if it does not open answers on request."""
    if opened != render(template, tokenizer, asked, ask=False):
        return ""
    two = [render(template, tokenizer, (*asked, ("assistant", word)), ask=False) for word in ("alpha", "omega")]
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(*(text[len(opened) :] for text in two), strict=False))
    return "".join(letter for letter, _ in alike).strip()


def _refuse_signs(tokenizer: Any, messages: Sequence[Message]) -> None:
    """Raise `DataError` if a message contains a token that opens or ends turns: the model would read it as one."""
    signs = [tokenizer.convert_ids_to_tokens(k) for k in sorted(_markers(tokenizer))]
    found = re.compile("|".join(map(re.escape, sorted(signs, key=len, reverse=True))))
    for role, content in messages if signs else ():
        if sign := found.search(content):
            raise DataError(
                f"the {role}'s text has {sign[0]!r} at character {sign.start()}, a special token of the tokenizer "
                f"and not text: the model would take it for the start or end of a turn. Remove it from the text, or "
                f"leave the example out."
            )


def end_tokens(template: Template, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's own, and the one that ends the chat template's turns.

    Raises:
        DataError, ConfigError: as in `converse` and `last_marker`.
    """
    ends = {tokenizer.eos_token_id}
    if template.kind == "chat":
        short: tuple[Message, ...] = (("user", "a"), ("assistant", "b"))
        try:
            talk = converse(template, tokenizer, short)
        except DataError:  # some templates require a system message
            talk = converse(template, tokenizer, (("system", "s"), *short))
        (start, end), *_ = talk.turns
        ids = tokenizer(talk.text[start:end], add_special_tokens=False)["input_ids"]
        ends.add(ids[last_marker(ids, tokenizer)])
    return tuple(sorted(ends))


def last_marker(ids: Sequence[int], tokenizer: Any) -> int:
    """The index of the last token in `ids` that is not text, which ends a turn.

    Raises:
        ConfigError: there is none.
    """
    markers = _markers(tokenizer)
    for place in range(len(ids) - 1, -1, -1):
        if ids[place] in markers:
            return place
    raise ConfigError(
        "the chat template ends the assistant's turns with no special token of the tokenizer, so a model trained on "
        "it could not stop. Give a data.template whose turns end with eos_token, or a text with {prompt}, where the "
        "end token follows the response automatically."
    )


def _markers(tokenizer: Any) -> set[int]:
    """Tokens added to the vocabulary as markers: neither text nor names for white space."""
    added = {k for k, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
    return (added | set(tokenizer.all_special_ids)) - {tokenizer.unk_token_id}


def is_jinja(text: str) -> bool:
    """Whether a template is a Jinja template for conversations."""
    return "{%" in text or "{{" in text
