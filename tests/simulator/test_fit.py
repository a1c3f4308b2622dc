"""What does not fit is refused before a tensor is read."""

from pathlib import Path

import pytest
from support.heads import INVENTED, random_tensors
from support.trace_maker import make_request, write_trace

import replay
from replay.checkpoint.checkpoint import check_checkpoint
from replay.checkpoint.config import parse_config
from replay.errors import WiringError
from replay.simulator.fit import check_fit


def test_a_head_of_the_final_state_takes_one_tap_and_no_more(tmp_path: Path) -> None:
    """Its state is as wide as the head, so that nothing of fc is read, whatever fc would take."""
    config = parse_config({**INVENTED, "eagle_config": {"use_aux_hidden_state": False}})
    assert config.fc_inputs == 3 * 16
    checkpoint = check_checkpoint("tiny", config, random_tensors(config))
    trace = replay.Trace.open(write_trace(tmp_path / "trace", [[make_request("a", 1, output=9)]]))
    check_fit(checkpoint, replay.parse_wiring("final"), trace)
    with pytest.raises(WiringError, match="3 taps x 16 = 48 features"):
        check_fit(checkpoint, replay.parse_wiring("embed,2,final"), trace)
    (variant,) = replay.simulate(trace, {"tiny": checkpoint}, [replay.Variant("tiny", steps=2)]).variants
    assert variant.wiring == ("final",)
