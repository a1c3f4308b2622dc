"""What a rule of `replay check` says."""

from dataclasses import dataclass, fields

from replay.analysis.json_document import JsonObject, object_json
from replay.printable import one_line

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
_MOST = 600  # characters of each field


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault, named as in the fault table.

    ``severity``: error, the accept length collapses, is not real, or the server does not start; warning, it costs
    acceptance; note, worth knowing. Evidence: ``file`` and ``field`` with the value ``seen`` there and the one
    ``expected``. ``fix``: what to type.
    """

    fault: str
    severity: str
    what: str
    file: str
    field: str
    seen: str
    expected: str
    fix: str

    def __post_init__(self) -> None:
        """Rules quote configs, tensor names and servers: what they say of them is bounded here, for all rules."""
        for item in fields(self):
            object.__setattr__(self, item.name, one_line(getattr(self, item.name), _MOST))

    def to_json(self) -> JsonObject:
        """With the evidence in an object of its own."""
        flat = object_json(self)
        evidence = {name: flat.pop(name) for name in ("file", "field", "seen", "expected")}
        return {**flat, "evidence": evidence}
