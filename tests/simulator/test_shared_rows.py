"""A trace whose requests share stored rows is replayed as one in which each has all of its own."""

from dataclasses import replace
from pathlib import Path

from support.heads import invented_checkpoint
from support.trace_maker import beginning, make_header, make_request, make_weights

import replay
from replay.traces.writer import TraceWriter


def test_rounds_are_those_of_the_trace_written_whole(tmp_path: Path) -> None:
    first = make_request("first", 0, prompt=100, output=30)
    requests = [first, *(beginning(make_request(f"r{i}", i, prompt=95, output=25), first, 90) for i in range(1, 5))]
    head, rounds, versions = {"h": invented_checkpoint()}, [], []
    variants = replay.sweep(draft=["h"], steps=[1, 3], faults=[(), replay.parse_faults("kv.rollback=stale")])
    for share in (True, False):
        folder = tmp_path / "trace" if share else tmp_path / "whole" / "trace"
        with TraceWriter.create(folder, make_header()) as writer:
            writer.share = share
            writer.write_target_weights(make_weights(), None)
            for at in (0, 2):
                writer.add(requests[at : at + 2 + at])
            writer.finish()
        trace = replay.Trace.open(folder)
        versions.append((trace.header.version, sum(record.shared for record in trace.records)))
        rounds.append(replay.simulate(trace, head, variants))
    assert versions == [(2, 4 * 90), (1, 0)]
    assert rounds[0].table.equals(rounds[1].table) and len(rounds[0].table) > 100
    left, right = ([replace(one, seconds=0.0) for one in made.variants] for made in rounds)
    assert left == right
