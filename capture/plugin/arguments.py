"""What was typed of SGLang's own arguments, as its parser takes them."""

from collections.abc import Sequence

from replay.capture.plugin.facts import server_url


def has_option(arguments: Sequence[str], option: str) -> bool:
    """Whether ``option`` was typed, in full."""
    return any(argument == option or argument.startswith(f"{option}=") for argument in arguments)


def typed_nodes(arguments: Sequence[str]) -> int:
    """What --nnodes says, 1 where there is none."""
    nodes = typed_value(arguments, "--nnodes", "--nn") or "1"
    return int(nodes) if nodes.isdecimal() else 1  # what is no number SGLang refuses


def typed_key(arguments: Sequence[str]) -> str | None:
    """What --api-key says."""
    return typed_value(arguments, "--api-key", "--ap")


def typed_url(arguments: Sequence[str]) -> str:
    """Where a server that has said nothing of itself is asked."""
    names = {"host": "--hos", "port": "--po", "ssl_certfile": "--ssl-c"}
    typed = {name: typed_value(arguments, f"--{name.replace('_', '-')}", least) for name, least in names.items()}
    return server_url(typed)


def typed_value(arguments: Sequence[str], option: str, least: str) -> str | None:
    """What was typed for ``option`` or a beginning of it from ``least`` on, as argparse takes it; the last counts."""
    found = None
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=True):
        name, equals, value = argument.partition("=")
        if name.startswith(least) and option.startswith(name):
            found = value if equals else following
    return found
