"""What one diagnosis is about."""

from collections.abc import Collection
from dataclasses import dataclass

from replay.analysis.diagnosis.evidence import LENGTH
from replay.analysis.diagnosis.feed import Feeding
from replay.checkpoint.checkpoint import Checkpoint
from replay.diagnosis.observed import Observation
from replay.engines.wiring import Wiring
from replay.simulator.cache import Cache
from replay.simulator.tasks import Workers
from replay.simulator.variant import ResolvedVariant
from replay.traces.reader import Trace


@dataclass(frozen=True, slots=True)
class Case:
    """A trace, the head, the variant that its server ran, and what is known of that server.

    ``trace`` has the requests with the most taps, on which every hypothesis is tried; ``every`` all requests.
    ``trained``: the wiring that the head was made for, where it is known and is another one than that served.
    ``feeding``: what the draft of the trace's own server was fed, where that was recorded. ``without``: kinds of faults
    that are not tried. ``cache`` keeps what was replayed; ``workers`` replay, where they are not this process.
    """

    trace: Trace
    every: Trace
    checkpoint: Checkpoint
    served: ResolvedVariant
    trained: Wiring | None
    observation: Observation
    feeding: Feeding | None
    without: Collection[str] = ()
    cache: Cache | None = None
    workers: Workers | None = None

    @property
    def right_wiring(self) -> Wiring:
        """The wiring to serve, as far as it is known before anything is replayed."""
        return self.trained or self.served.wiring

    @property
    def judged_feeding(self) -> Feeding | None:
        """The feed that speaks for or against hypotheses: none where the accept length came from elsewhere, from a
        server that may have fed its draft otherwise."""
        return None if self.observation.kind == LENGTH else self.feeding
