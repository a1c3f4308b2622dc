"""Workers without processes: tasks as several of them would be given, done one after the other in this one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from replay.checkpoint.checkpoint import Checkpoint
from replay.simulator.cache_keys import kernels_of
from replay.simulator.product_settings import ProductSettings
from replay.simulator.replayer import Job, Replayer, StoredHead
from replay.simulator.tasks import Result, Task
from replay.traces.reader import Trace


@dataclass
class Here:
    """As many as ``count`` say; ``asked`` are the tasks that they were given."""

    trace: Trace
    checkpoints: Mapping[str, Checkpoint]
    count: int = 2
    asked: list[Task] = field(default_factory=list)
    kernels: tuple[str | int, ...] = kernels_of("cpu", 1, replace(ProductSettings.here(), threads=1))

    def __post_init__(self) -> None:
        heads = {name: StoredHead.carry(one) for name, one in self.checkpoints.items()}
        self.replayer = Replayer(Job(self.trace, heads, "cpu", 1))

    def replay(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """The last one first, as results come in no order."""
        self.asked += tasks
        for place in reversed(range(len(tasks))):
            yield place, self.replayer.replay(tasks[place])
