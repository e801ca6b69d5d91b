"""The tables [data] and [clients] of a run's configuration: where the text is, and who has it at which rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from fedlora.errors import ConfigError
from fedlora.runs.rank_profiles import PAPER_TYPES, RankProfile, RankType, assign_types, brings_types
from fedlora.training.settings import Positive, Section
from fedlora.training.templates import BARE, CHAT, check_template

DataTask = Literal["sst2", "qqp", "qnli", "mnli", "superni"]


class RankEntry(Section):
    """Ranks by kind of module: attention, and all others."""

    attention: Positive
    feed_forward: Positive


class ClientsSection(Section):
    """Who takes part, with which rank, and how one data file is dealt out.

    count: how many, named site-1, site-2, ... ranks: one for each client in that order, or one for all; an entry is a
    rank or {attention = r, feed_forward = r}; default 8. With `profile`, the values that it distributes. profile:
    uniform, normal (a bell over the sizes), heavy-tail (80 % the smallest), heavy-tail-strong (80 % the largest), or
    flexlora-*, with ranks of its own (`fedlora experiment ranks` shows each). partition: label skew, or equal mixes.
    dirichlet_alpha: of the skew, default 1; smaller is more skewed. min_examples: the fewest examples of a client.
    test_fraction: a share of each client's data to measure it on; with data.test = 0 these together are the common test
    set.
    """

    count: Positive | None = None
    ranks: list[Positive | RankEntry] | None = None
    profile: RankProfile | None = None
    partition: Literal["dirichlet", "iid"] = "dirichlet"
    dirichlet_alpha: Annotated[float, Field(gt=0)] | None = None
    min_examples: Positive = 8
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None

    @field_validator("ranks", mode="before")
    @classmethod
    def _one_for_all(cls, ranks: object) -> object:
        """4 and {attention = 4, feed_forward = 8} mean [4] and a list of that table: the same configuration."""
        if isinstance(ranks, dict) or (isinstance(ranks, int) and not isinstance(ranks, bool)):
            return [ranks]
        if ranks is not None and not isinstance(ranks, list):
            raise ValueError("one rank for all (8), or a list with one for each client ([4, 8, 8])")
        return ranks

    @property
    def how_many(self) -> int:
        """The number of clients by `count`, otherwise one for each rank; 0 if only the data tell."""
        return self.count or len([] if self.profile else self.ranks or [])

    def types(self) -> list[RankType]:
        """`ranks` as client types; without them rank 8 for all, or the paper's five for a profile."""
        if self.ranks is None:
            return [RankType(8, 8)] if self.profile is None else list(PAPER_TYPES)
        return [RankType(r, r) if isinstance(r, int) else RankType(r.attention, r.feed_forward) for r in self.ranks]

    def assigned(self, names: Sequence[str], seed: int) -> dict[str, RankType]:
        """Client -> its ranks, in the order of the names. Raises `ConfigError` if the numbers do not match."""
        types = self.types()
        if self.profile is not None:
            assigned = assign_types(names, types, self.profile, seed=seed)
            return {name: assigned[name] for name in names}
        if len(types) == 1:
            return dict.fromkeys(names, types[0])
        if len(types) == len(names):
            return dict(zip(names, types, strict=True))
        raise ConfigError(
            f"clients.ranks has {len(types)} entries for {len(names)} clients. Give one for each, or a single one, "
            f"or name a clients.profile that distributes them."
        )

    @model_validator(mode="after")
    def _types_once(self) -> ClientsSection:
        if self.profile is not None and brings_types(self.profile) and self.ranks is not None:
            raise ValueError(f"the profile {self.profile} brings its own ranks; leave clients.ranks out")
        return self


def _distinct(labels: list[str]) -> list[str]:
    if len(labels) < 2:
        raise ValueError("give at least two classes: with one there is nothing to learn")
    twice = [name for k, name in enumerate(labels) if name.strip() in [other.strip() for other in labels[:k]]]
    if twice:
        raise ValueError(f"the class {twice[0]!r} is named twice")
    if not all(name.strip() and name.isprintable() for name in labels):
        raise ValueError("the name of a class must be printable text, and not blank")
    return labels


# Names that a file of examples can tell apart.
ClassNames = Annotated[list[Annotated[str, Field(min_length=1)]], AfterValidator(_distinct)]


class DataSection(Section):
    """Where the text is. Paths are relative to the config file.

    Give one of three sources. train: one file, dealt out to the clients; "demo" is built in. clients: id -> that
    client's own file. task: GLUE, or "superni", where each task is a client, both from --data-root. text: the column of
    the text. text_pair: of a second text. label: of the class. label_names: the classes in the order of their numbers;
    default: all that occur. prompt: the column of an instruction. response: of its answer. messages: of conversations;
    default: "messages", if the rows have it. validation: a share of each file to hold out, or a file; it
    chooses the best round. test: likewise; GLUE has its own. max_train: the most training examples (superni: per
    client). max_test: the most test examples, and the most validation examples (superni: per task). task_lists: for
    superni, files that name the clients' tasks and those nobody trains on. tasks: how many of the first list are
    clients. unseen_tasks: how many of the second are measured. chat_template: around prompts: "chat", the model's own
    (the default), or a text with {prompt} in it (superni: "{prompt}"). max_length: tokens per example; longer ones are
    cut, and the manifest counts them.
    """

    train: str | None = None
    clients: dict[str, str] = Field(default_factory=dict)
    task: DataTask | None = None
    tasks: Positive = 50
    unseen_tasks: Annotated[int, Field(ge=0)] = 20
    task_lists: list[str] = Field(default_factory=list)
    max_train: Positive | None = None
    max_test: Positive | None = None
    text: str = "text"
    text_pair: str | None = None
    label: str = "label"
    label_names: ClassNames | None = None
    prompt: str = "prompt"
    response: str = "response"
    messages: str | None = None
    chat_template: str | None = None
    validation: str | Annotated[float, Field(ge=0, lt=1)] = 0.1
    test: str | Annotated[float, Field(ge=0, lt=1)] = 0.1
    max_length: Positive = 128

    def prompting(self) -> str:
        """The effective `chat_template` for a language model: by default "chat", for superni "{prompt}"."""
        return self.chat_template or (BARE if self.task == "superni" else CHAT)

    @model_validator(mode="after")
    def _one_kind_of_rows(self) -> DataSection:
        given = [name for name in ("prompt", "response") if getattr(self, name) != name]
        if self.messages is not None and given:
            raise ValueError(
                f"data.messages = {self.messages!r} reads conversations, but data.{given[0]} is for prompts: leave "
                f"one of them out"
            )
        check_template(self.chat_template)
        return self

    @model_validator(mode="after")
    def _one_source(self) -> DataSection:
        sources = [self.train is not None, bool(self.clients), self.task is not None]
        if sum(sources) != 1:
            raise ValueError(
                "give one of data.train (one file), data.clients (a file for each client) or data.task (a benchmark)"
            )
        if self.task_lists and len(self.task_lists) != 2:
            raise ValueError("data.task_lists names two files: the clients' tasks and the unseen ones")
        for client in self.clients:
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", client):
                raise ValueError(
                    f"a client id names a folder: it may have the letters a to z and A to Z, digits, '_', '-' and '.', "
                    f"and may not begin with '-' or '.'; got {client!r}"
                )
        return self
