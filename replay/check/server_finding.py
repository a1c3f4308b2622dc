"""A finding on one server argument."""

from replay.check.facts import Facts
from replay.check.finding import Finding
from replay.traces.fields import show_name


def at(facts: Facts, fault: str, severity: str, what: str, field: str, expected: object, fix: str) -> Finding:
    """``seen`` is the argument as it is given, ``absent`` where it is not."""
    seen = facts.server.arguments.get(field)
    shown = "absent" if seen is None else show_name(str(seen))
    return Finding(fault, severity, what, facts.server.where, field, shown, str(expected), fix)


def flag(field: str) -> str:
    """``--a-b`` of ``a_b``."""
    return f"--{field.replace('_', '-')}"
