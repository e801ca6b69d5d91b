"""What surrounds a prompt: the model's own chat template, or a text with {prompt}.

A chat template is a program of somebody else's, so what it makes of a conversation is looked at: where the answer
begins and ends, and whether each message is in it. The answer follows the rendering of all messages before it with the
opening of an answer (`add_generation_prompt`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fedlora.data.hub import first_line
from fedlora.data.text import Message
from fedlora.errors import ConfigError, DataError

CHAT = "chat"  # data.chat_template: the tokenizer's own
BARE = "{prompt}"  # data.chat_template: nothing around the prompt
_DAY = datetime(2024, 7, 26)  # for templates that ask for the date: the same at every client, in every round
# transformers' own function of this name says today's; a macro replaces it, since functions cannot be given.
_CLOCK = (
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(f"|replace('%{code}', {_DAY.strftime('%' + code)!r})" for code in "aAbBdHIjmMpSyYcxXZ")
    + " }}{%- endmacro -%}"
)
_WORDS = {"system": "Zebra7system", "user": "Zebra7question", "assistant": "Zebra7answer"}  # to see what one does


@dataclass(frozen=True)
class Template:
    """What surrounds a prompt. text: with {prompt} in it, or the source of a chat template.

    Of a chat template: marks: the tokens that it reads as borders of turns, by id: the tokenizer's special ones, and
    those that it writes itself around turns. ends: the tokens that end an answer.
    """

    text: str
    tokenizer: Any
    chat: bool = False
    marks: Mapping[int, str] = field(default_factory=dict)
    ends: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Its name in a manifest: the text itself, or a digest of the chat template."""
        return f"chat, sha256 {hashlib.sha256(self.text.encode()).hexdigest()[:16]}" if self.chat else self.text


def check_template(wanted: str | None) -> None:
    """Raise `ConfigError` for a `data.chat_template` that cannot work with any model."""
    if wanted is not None and wanted != CHAT and (wanted.count(BARE) != 1 or "{%" in wanted or "{{" in wanted):
        raise ConfigError(
            f"data.chat_template is 'chat' (the model's own), or a text with {{prompt}} in it once; got "
            f"{wanted[:80]!r}. A Jinja template of your own goes into tokenizer.chat_template: save the tokenizer with "
            f"the model."
        )


def find_template(wanted: str | None, tokenizer: Any) -> Template:
    """The template for this tokenizer that `data.chat_template` means; None is the tokenizer's own chat template.

    Raises:
        ConfigError: the tokenizer has none and nothing else was given; or with it, a model could not learn to answer.
        DataError: the template fails on every conversation.
    """
    check_template(wanted)
    if wanted is not None and wanted != CHAT:
        return Template(wanted, tokenizer, ends=(tokenizer.eos_token_id,))
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "the model's tokenizer has no chat template: set data.chat_template to a text such as '### Question:\\n"
            "{prompt}\\n\\n### Answer:\\n', or to '{prompt}' for the bare prompt directly followed by the response."
        )
    try:
        bare = Template(tokenizer.get_chat_template(), tokenizer)
    except ValueError as error:  # there are several named templates, none of them the default
        raise ConfigError(f"the tokenizer's chat template cannot be chosen: {first_line(error)}.") from error
    talk: tuple[Message, ...] = tuple(_WORDS.items())
    try:
        text, opening = rendered(bare, talk), rendered(bare, talk[:-1], ask=True)
    except DataError:  # some templates refuse a system message, and others need one
        talk = talk[1:]
        text, opening = rendered(bare, talk), rendered(bare, talk[:-1], ask=True)
    if lost := [role for role, word in talk if role != "system" and word not in text]:
        raise ConfigError(
            f"the chat template leaves out the {lost[0]}'s text. Mend tokenizer.chat_template, and save the tokenizer "
            f"again."
        )
    before, _, after = text.partition(_WORDS["assistant"])
    if opening == rendered(bare, talk[:-1]) and (header := before[len(opening) :].strip()):
        raise ConfigError(
            f"the chat template puts {header[:40]!r} before an answer but does not add it with add_generation_prompt. "
            f"Let it end with {{% if add_generation_prompt %}}...{{% endif %}}."
        )
    # Text may hold other tokens of the vocabulary: names of tags, or the thoughts that some templates put *into* turns.
    written = {k for part in (opening, after) for k in token_ids(tokenizer, part)}
    added = {k: token for k, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
    border = {*tokenizer.all_special_ids, *(k for k, token in added.items() if token.special or k in written)}
    marks = {k: tokenizer.convert_ids_to_tokens(k) for k in border - {tokenizer.unk_token_id}}
    end = next((k for k in reversed(token_ids(tokenizer, after)) if k in marks), None)
    if end is None:
        raise ConfigError(
            "the chat template ends the assistant's turns with no special token, so a model trained on it could not "
            "stop. Let its turns end with eos_token, or set data.chat_template to a text with {prompt}."
        )
    ends = tuple(sorted({tokenizer.eos_token_id, end} - {None}))
    return Template(bare.text, tokenizer, True, marks, ends)


def rendered(template: Template, messages: Sequence[Message], *, ask: bool = False) -> str:
    """The messages as text; ask: followed by the opening of an answer. Raises `DataError` if the template refuses."""
    from jinja2 import TemplateError

    try:
        text: str = template.tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages], chat_template=_CLOCK + template.text,
            tokenize=False, add_generation_prompt=ask, date_string=_DAY.strftime("%d %b %Y"),
        )  # fmt: skip
    except (TemplateError, TypeError) as error:
        raise DataError(
            f"the chat template refuses a conversation of {', '.join(role for role, _ in messages)}: "
            f"{first_line(error)}."
        ) from error
    return text


def conversation(template: Template, messages: Sequence[Message]) -> tuple[str, str]:
    """A conversation as the text before its last answer, and this answer up to the token that ends its turn.

    Raises:
        DataError: the template changes earlier turns when more follow, a message's text is not in its rendering, or it
            holds a token that borders turns.
    """
    signs = re.compile("|".join(map(re.escape, sorted(template.marks.values(), key=len, reverse=True))) or "(?!)")
    for role, content in messages:
        if sign := signs.search(content):
            raise DataError(
                f"the {role}'s text has {sign[0]!r} at character {sign.start()}, which the model would take for the "
                f"start or end of a turn. Remove it from the text, or leave the example out."
            )
    text, opening = rendered(template, messages), rendered(template, messages[:-1], ask=True)
    if not text.startswith(opening):
        raise DataError(
            f"the chat template renders the first {len(messages) - 1} of {len(messages)} messages differently when the "
            f"answer follows, so it is unclear where that begins. Use another template, or fedlora.hf.federate."
        )
    answer = text[len(opening) :]
    answer = answer[: max((sign.end() for sign in signs.finditer(answer)), default=None)]
    at = 0
    for k, (role, content) in enumerate(messages):
        place, start = (answer, 0) if k == len(messages) - 1 else (opening, 0 if role == "system" else at)
        found = place.find(content.strip(), start)
        if found < 0:
            raise DataError(
                f"the tokenizer's chat template ({template.name}) leaves out or changes the {role}'s text, "
                f"{content.strip()[:60]!r}. Mend tokenizer.chat_template, and save the tokenizer again."
            )
        at = at if role == "system" else found + len(content.strip())  # some templates move a system message
    return opening, answer


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text alone, without those that a tokenizer puts around it."""
    found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found
