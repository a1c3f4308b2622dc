"""What was typed, before a command sees it: an option that takes one value and was given two."""

from collections.abc import Sequence

import click

from replay.errors import UsageError


def refuse_repeats(command: click.Command, arguments: Sequence[str]) -> None:
    """Click keeps the last value of an option and drops the others in silence. Raises UsageError instead.

    An option that sweeps over several values takes them all, and a flag says the same twice. Of a group its own
    command is looked at, whatever stands before its name.
    """
    if isinstance(command, click.Group):
        place = next((place for place, word in enumerate(arguments) if word in command.commands), None)
        if place is not None:
            refuse_repeats(command.commands[arguments[place]], arguments[place + 1 :])
        return
    context = click.Context(command, info_name=command.name, resilient_parsing=True, help_option_names=["-h", "--help"])
    _, _, order = command.make_parser(context).parse_args(list(arguments))
    options = [one for one in order if isinstance(one, click.Option) and not (one.multiple or one.is_flag or one.count)]
    for option in options:
        if options.count(option) > 1:
            name = max(option.opts, key=len)
            raise UsageError(f"{name} takes one value and was typed {options.count(option)} times; type {name} once")
