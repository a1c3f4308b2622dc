"""What a rule of `replay check` says."""

from dataclasses import dataclass

from replay.analysis.json_document import JsonObject, object_json

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)


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

    def to_json(self) -> JsonObject:
        """With the evidence in an object of its own."""
        flat = object_json(self)
        evidence = {name: flat.pop(name) for name in ("file", "field", "seen", "expected")}
        return {**flat, "evidence": evidence}
