"""The site's reference is whole: no key, command or public name without an entry. Kind: structural."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import fedlora
import generate
from fedlora.experiments.spec import Experiment
from fedlora.methods.registry import Listed, listed
from fedlora.runs.config import RunConfig
from generate import commands, config_keys, docstrings, experiment_keys, method_list, python_names
from generate.markdown import prose

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """The keys of a configuration, two deep, as TOML names them."""
    for table, inside in value.items():
        yield from (f"{table}.{key}" for key in inside)


class TestConfiguration:
    """Expected: the fields of `RunConfig`, walked here by hand, and the text of the docstrings."""

    def test_every_key_has_an_entry_with_a_meaning(self) -> None:
        page = config_keys.page()
        sections = {
            name: next(
                part
                for part in (field.annotation, *getattr(field.annotation, "__args__", ()))
                if isinstance(part, type) and issubclass(part, BaseModel)
            )
            for name, field in RunConfig.model_fields.items()
        }
        wanted = set(leaves({name: section.model_fields for name, section in sections.items()}))
        entries = dict(re.findall(r"^`([\w.]+)` \(.+\)\n: (.*)$", page, flags=re.M))
        assert len(wanted) > 80 and set(entries) == wanted
        silent = [key for key, meaning in entries.items() if len(meaning) < 5]
        assert not silent, f"say in the section's docstring what these mean, as 'key: meaning.': {silent}"

    def test_types_and_defaults_are_the_fields(self) -> None:
        keys = {f"{table.name}.{key.name}": key for table in config_keys.tables() for key in table.keys}
        assert keys["run.rounds"].kind == "integer ≥1" and keys["run.rounds"].default == "`10`"
        assert keys["model.name"].default == "**required**"
        assert keys["data.validation"].kind == "text or number ≥0, <1"
        assert keys["clients.partition"].kind == '`"dirichlet"`/`"iid"`'

    def test_the_page_s_own_file_loads(self) -> None:
        block = re.findall(r"```toml\n(.*?)```", (DOCS / "reference" / "config.md").read_text(), flags=re.S)[0]
        assert RunConfig.model_validate(tomllib.loads(block)).model.name == "demo"


class TestExperiments:
    """Expected: the fields of the classes that read the file, found by walking from `Experiment`."""

    def test_every_key_has_an_entry_with_a_meaning(self) -> None:
        tables = experiment_keys.EXPERIMENT
        assert set(parts_of(Experiment)) == set(tables.values()), "a table of the file that the page does not have"
        page = experiment_keys.experiment_page()
        entries = dict(re.findall(r"^`([\w.]+)` \(.+\)\n: (.*)$", page, flags=re.M))
        wanted = {f"{name}.{key}".lstrip(".") for name, part in tables.items() for key in part.model_fields}
        assert len(wanted) > 20 and set(entries) == wanted
        silent = [key for key, meaning in entries.items() if len(meaning) < 10]
        assert not silent, f"say in the class's docstring what these mean, as 'key: meaning.': {silent}"


def parts_of(whole: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The class, and every one that its fields hold, however deep."""
    yield whole
    for field in whole.model_fields.values():
        waiting: list[Any] = [field.annotation]
        while waiting:
            held = waiting.pop()
            waiting += getattr(held, "__args__", ())
            if isinstance(held, type) and issubclass(held, BaseModel):
                yield from parts_of(held)


class TestCommands:
    """Expected: what `fedlora.cli` and `fedlora.cli.flower` list, and the options of two commands read in the code."""

    def test_every_command_has_a_section(self) -> None:
        from fedlora.cli import COMMANDS
        from fedlora.cli.flower import COMMANDS as FLOWER

        page = commands.page()
        wanted = [*COMMANDS, *(f"flower {name}" for name in FLOWER), "methods check", "experiment run"]
        missing = [name for name in wanted if not re.search(rf"^##+ `fedlora {name}`$", page, flags=re.M)]
        assert not missing, missing

    def test_every_option_says_what_it_does(self) -> None:
        silent = [
            f"{path} {parameter.opts[0]}"
            for path, command in commands.commands()
            for parameter in commands.parameters(command)
            if parameter.param_type_name == "option" and not getattr(parameter, "help", None)
        ]
        assert not silent, silent

    def test_nothing_of_a_help_text_is_taken_for_markup(self) -> None:
        """rich drops "[default: zero]" from what `--help` shows, for its own markup is in brackets."""
        eaten = [
            f"{path} {parameter.opts[0]}"
            for path, command in commands.commands()
            for parameter in commands.parameters(command)
            if "[" in (getattr(parameter, "help", None) or "")
        ]
        assert not eaten, eaten


class TestNames:
    def test_every_public_name_is_on_the_page_of_its_module(self) -> None:
        pages = python_names.site_pages()
        missing = [
            f"{module}.{name}" for module, name in python_names.names() if f":: {module}.{name}\n" not in pages[module]
        ]
        missing += [name for name in fedlora.__all__ if f":: fedlora.{name}\n" not in pages["fedlora"]]
        assert not missing, missing
        listed_here = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
        assert [name for _, name in python_names.names() if f"* `{name}`: " not in listed_here] == []


METHODS_PAGE = DOCS / "reference" / "methods.md"
SECTION = (  # what stands in each method's section, in this order
    "<!-- generated: NAME -->\n", "<!-- end of NAME -->\n\n**Use it** ", "**Not**",
)  # fmt: skip
BUILT_IN = pytest.mark.parametrize("row", [r for r in listed() if r.name in fedlora.METHODS], ids=lambda r: r.name)


def test_the_committed_reference_is_what_the_program_prints() -> None:
    """Expected: the generators' own parts. `python docs/generate` writes them."""
    stale = [path.name for path, text in generate.pages().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"`python docs/generate` writes them anew: {stale}"
    marked = "".join(path.read_text(encoding="utf-8") for path in generate.pages())
    assert [name for name in generate.parts() if f"<!-- end of {name} -->" not in marked] == []


class TestMethods:
    """Expected: the registry, the fields of the classes, and one template for all sections."""

    def test_every_method_has_a_section_by_the_template(self) -> None:
        sections = re.split(r"^## ", METHODS_PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
        assert {part.partition("\n")[0] for part in sections} == set(fedlora.METHODS)
        template = (DOCS / "how-to" / "add-a-method.md").read_text(encoding="utf-8").split("````markdown\n## ")[1]
        for text in [*sections, template]:
            name, at = text.partition("\n")[0], 0
            for part in (one.replace("NAME", name) for one in SECTION):
                assert part in text[at:], f"{name} lacks, or has too early: {part}"
                at = text.index(part, at) + len(part)

    @BUILT_IN
    def test_every_setting_has_its_default_and_a_meaning(self, row: Listed) -> None:
        entries = dict(re.findall(r"^`(\w+)` · .+\n: (.*)$", method_list.entries()[row.name], flags=re.M))
        assert set(entries) == {field.name for field in fields(fedlora.METHODS[row.name])}
        assert all(len(meaning) > 5 for meaning in entries.values()), f"{row.name}: say in Args what each setting means"

    def test_the_example_runs(self) -> None:
        page = METHODS_PAGE.read_text(encoding="utf-8")
        (file,), (lines,) = (re.findall(f"```{kind}\n(.*?)```", page, flags=re.S) for kind in ("toml", "python"))
        run = RunConfig.model_validate(tomllib.loads(f'[model]\nname = "demo"\n[data]\ntrain = "demo"\n{file}'))
        made: dict[str, Any] = {}
        exec(compile(lines, "methods.md", "exec"), made)
        assert made["server"].method == run.method.build() == fedlora.build("svd", energy=0.95)

    def test_what_travels_is_what_the_method_says(self) -> None:
        """Read in three papers: FFA-LoRA freezes A, FedSA-LoRA keeps B, RoLoRA takes turns, B first."""
        entries = method_list.entries()
        assert "A: received, not trained, not sent." in entries["ffa-lora"]
        assert "B, heads: trained, and never leaves" in entries["fedsa-lora"]
        first, second = entries["rolora"].split("In rounds 1, 3, 5")
        assert "B, heads: trained and sent" in first and "A, heads: trained and sent" in second

    def test_the_family_names_each_with_its_paper(self) -> None:
        """The table of explanation/methods.md, beside the papers in the code."""
        page = (DOCS / "explanation" / "methods.md").read_text(encoding="utf-8")
        for name, cls in fedlora.METHODS.items():
            (row,) = re.findall(rf"^.*\]\(\.\./reference/methods\.md#{name}\) \|.*$", page, flags=re.M)
            number = re.search(r"\d{4}\.\d{5}", cls.paper)
            assert (number[0] in row) if number else ("arXiv" not in row), row


class TestPlainProse:
    """Expected: the rules of both markups."""

    def test_letters_stay_letters(self) -> None:
        assert prose("sum_i p_i <a> [b] `c_d`") == r"sum\_i p\_i \<a\> \[b\] `c_d`"
        lines = ["* one *args and |a|", "trailing_ word", "`kept_`", "Example:", "    >>> a * b"]
        docstrings.as_rst(None, "class", "x", None, None, lines)
        assert lines == [r"* one \*args and \|a\|", r"trailing\_ word", "`kept_`", "Example:", "    >>> a * b"]


def test_the_drawing_is_the_script_s() -> None:
    drawn = runpy.run_path(str(DOCS / "images" / "draw_gauge.py"))["drawing"]()
    assert (DOCS / "images" / "gauge.svg").read_text(encoding="utf-8") == drawn


def test_every_picture_has_words() -> None:
    """For those who do not see it: four words at least, in Markdown, in directives and in what cells show."""
    pages = "".join(page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *DOCS.rglob("*.md")])
    words = re.findall(r"!\[([^\]]*)\]\(", pages)
    for picture in re.findall(r"<img[^>]*>|\bImage\(.*?\n?\)|```\{(?:image|figure)\}.*?```", pages, re.S):
        found = re.search(r'(?:alt="|:alt: )([^"\n]*)', picture)
        words.append(found[1] if found else "")
    assert len(words) >= 4 and [one for one in words if len(one.split()) < 4] == []
