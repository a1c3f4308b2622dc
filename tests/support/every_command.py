"""Every command of the command line, those in groups too."""

from collections.abc import Iterator

import click


def every_command(command: click.Command, words: str = "") -> Iterator[tuple[str, click.Command]]:
    """What is typed for it, and the command itself."""
    if not isinstance(command, click.Group):
        yield words, command
        return
    for name, inner in command.commands.items():
        yield from every_command(inner, f"{words} {name}".strip())
