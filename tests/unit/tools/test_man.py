"""Man pages: each command has one, with what its --help shows."""

from __future__ import annotations

import re

import click

from fusecache.cli.main import cli as fusecache
from hintsd.cli.main import cli as hintsd
from tools import man

ESCAPED = {r"\(rs": "\\", r"\-": "-", r"\(aq": "'", r"\(ga": "`", r"\(ha": "^", r"\(ti": "~"}


def shown(page: str) -> str:
    """The words, as they are on a terminal."""
    text = re.sub(r"\\(\(..|-|&)", lambda found: ESCAPED.get(found[0], ""), page)
    return " ".join(re.sub(r"^\.(\w+)", "", text, flags=re.MULTILINE).split())


def commands(command: click.Command, name: str) -> dict[str, click.Command]:
    found = {name: command}
    for each, child in command.commands.items() if isinstance(command, click.Group) else ():
        found |= commands(child, f"{name}-{each}")
    return found


def test_each_command_has_a_page_with_its_help_and_all_options() -> None:
    pages = man.pages()
    found = commands(fusecache, "fusecache") | commands(hintsd, "hintsd")
    assert sorted(pages) == sorted(f"{name}.1" for name in found)
    assert "hintsd-lab-replay" in found
    for name, command in found.items():
        page = shown(pages[f"{name}.1"])
        assert command.help is not None
        assert " ".join(command.help.replace("\b", " ").split()) in page, name
        for option in command.params:
            if isinstance(option, click.Option):
                assert f" {', '.join(option.opts[:1])}" in page, (name, option)
                assert " ".join((option.help or "").split()) in page, (name, option)
        assert "--help Show this message and exit." in page, name


def test_what_help_leaves_as_it_is_is_not_filled() -> None:
    lines = man.pages()["fusecache-warm.1"].splitlines()
    begin = lines.index(".nf")
    assert lines[begin + 1 : begin + 3] == [
        "fusecache warm /data/imagenet", "fusecache warm /data/imagenet/train"
    ]  # fmt: skip
    assert lines.index(".fi") > begin
    assert r"train \(aqval/**/*.JPEG\(aq" in lines[begin + 3]


def test_the_page_of_a_program_has_its_commands_and_exit_codes() -> None:
    page = man.pages()["fusecache.1"]
    assert r".BR fusecache\-warm (1)" in page.splitlines()
    assert "130 interrupted with Ctrl-C" in shown(page)


def test_no_line_is_a_request_by_mistake() -> None:
    @click.command()
    def strange() -> None:
        """Reads.

        .TH is troff's, 'so is this', and \\fB.
        """

    text = man.page(click.Context(strange, info_name="strange"))
    assert r"\&.TH is troff\(aqs, \(aqso is this\(aq, and \(rsfB." in text.splitlines()
