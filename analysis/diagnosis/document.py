"""A diagnosis as the body of a JSON document."""

import math

from replay.analysis.diagnosis.breakdown import profile_json
from replay.analysis.diagnosis.feed import feeding_json
from replay.analysis.diagnosis.verdict import Diagnosis
from replay.analysis.json_document import JsonObject, interval_json, object_json
from replay.analysis.ladder.ladder import ladder_json


def to_json(diagnosis: Diagnosis) -> JsonObject:
    """The body of ``replay diagnose --json``."""
    evidence = diagnosis.healthy.evidence
    unknown = diagnosis.unknown
    gain, low, high = diagnosis.mending
    return object_json(
        {
            "verdict": diagnosis.verdict,
            "why": diagnosis.why,
            "implausible": diagnosis.implausible,
            "doubts": diagnosis.doubts,
            "fault": diagnosis.named,
            "certainty": diagnosis.certainty,
            "values": None if diagnosis.values is None else list(diagnosis.values),
            "served": diagnosis.served,
            "replayed": evidence.accept_length,
            "replayed_at_served_anchors": diagnosis.replayed_at_served_anchors,
            "replayed_own_walk": diagnosis.healthy.accept_length,
            "expected": diagnosis.expected,
            "mending": None if math.isnan(gain) else {"gain": gain, "ci95": interval_json((low, high))},
            "fix": diagnosis.fix,
            "evidence": {
                "kind": evidence.kind,
                "rounds": evidence.rounds,
                "agreeing": evidence.agreeing,
                "agreement": diagnosis.agreement,
            },
            "unknown": None
            if unknown is None
            else {
                "probability": unknown.probability,
                "size": unknown.size,
                "nearest": unknown.nearest,
                "nearest_size": unknown.nearest_size,
            },
            **feeding_json(diagnosis.feeding),
            "cannot_tell": diagnosis.undecided,
            "separate": diagnosis.separate,
            **ladder_json(diagnosis.ladder),
            "hypotheses": [
                {
                    "fault": item.kind,
                    "value": item.value,
                    "accept_length": item.accept_length,
                    "score": item.probability,
                    "log_likelihood": item.evidence.log_likelihood,
                    "disturbed": item.evidence.disturbed,
                    "rounds": item.evidence.rounds,
                    "agreeing": item.evidence.agreeing,
                    "near_tie": item.evidence.near_tie,
                    "unexplained": item.evidence.unexplained,
                    "fits": item.fits,
                    "fix": item.fix,
                    "contradicted": item.contradicted or None,
                }
                for item in diagnosis.ranked
            ],
            "gains": [
                {
                    "fault": gain.kind,
                    "value": gain.value,
                    "gain": gain.gain,
                    "ci95": interval_json(gain.ci95),
                    "accept_length": gain.accept_length,
                    "fix": gain.fix,
                }
                for gain in diagnosis.gains
            ],
            "limits": diagnosis.limits,
            **profile_json(diagnosis.profile),
        }
    )
