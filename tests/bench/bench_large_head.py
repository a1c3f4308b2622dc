"""Benchmark: a whole replay with a head as wide as Kimi-K2's (7168, random weights), of 1, 4 and 16 times as many rows.

    PYTHONPATH=tests python -P tests/bench/bench_large_head.py [--rows 512] [--steps 3] [--kind latent|llama]
        [--request-rows 64] [--width 7168] [--times 1,4,16]

The latent head has 0.9 billion parameters in one layer, the llama head 1.5 billion in two. ``--request-rows`` says how
long a request is: with more than ``--rows`` times the last of ``--times`` each trace is one request, so that what grows
with its length alone shows. ``--width`` takes a narrower head.

It writes a head and traces of random rows into a temporary folder (3 GiB and, at this width, 57 KB a row), and replays
each trace in a process of its own. It prints the processor seconds of the passes, and the most memory that the process
held: its own pages, and those of mapped files, which the kernel takes back where it needs room. Then, of the same run:
the share of the matrix products, of all other operations, and of the host, which is what no operation of torch took.
Last, the seconds of the same products by themselves, shape by shape. Judge the ratios. Not part of ``make test``: the
llama head takes 20 minutes of two cores with AVX2 alone.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from threading import Event, Thread
from time import process_time
from typing import Any

import click
import torch
from safetensors.torch import save_file
from support.heads import tiny_config
from support.kimi_sizes import KINDS, SIZES, narrowed
from support.trace_maker import make_header
from torch.utils._python_dispatch import TorchDispatchMode

import replay
from replay.checkpoint.config import parse_config
from replay.checkpoint.tensor_table import expected_tensors
from replay.traces.captured import CapturedRequest
from replay.traces.header import TapInfo, TraceHeader
from replay.traces.writer import TraceWriter

TAPS = ("2", "3", "4")
PRODUCTS = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm")
MOST_OUTPUT = 256  # tokens of a request; the rest is prompt, at least half of it


def write_head(folder: Path, kind: str, width: int) -> None:
    """Random weights in bf16."""
    config = tiny_config(**narrowed(kind, width))
    tensors = {}
    for name, shape in expected_tensors(parse_config(config)).items():
        tensors[name] = torch.zeros(shape, dtype=torch.int64) if name == "d2t" else random(*shape)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def random(*shape: int) -> torch.Tensor:
    """[shape] in bf16; blocks of a table repeat, because to draw billions of numbers takes longer than the replay."""
    drawn = torch.randn(min(shape[0], 512), *shape[1:]) * shape[-1] ** -0.5
    return drawn.to(torch.bfloat16).repeat(-(-shape[0] // len(drawn)), *[1] * (len(shape) - 1))[: shape[0]]


def write_trace(folder: Path, rows: int, request_rows: int, width: int) -> None:
    """Requests of so many rows, at most half of them output, with random rows and tokens."""
    vocab = int(str(SIZES["vocab_size"]))
    with TraceWriter.create(folder, _header(width, vocab)) as writer:
        writer.write_target_weights(random(vocab, width), None)
        for number in range(rows // request_rows):
            writer.add([_request(number, request_rows, width, vocab)])
        writer.finish()


def _header(width: int, vocab: int) -> TraceHeader:
    header = make_header()
    target = replace(header.target, layers=6, hidden_size=width, vocab_size=vocab)
    return replace(header, target=target, taps={tap: TapInfo("bfloat16", width) for tap in (*TAPS, "final")})


def _request(number: int, request_rows: int, width: int, vocab: int) -> CapturedRequest:
    rows, output = request_rows + 1, min(MOST_OUTPUT, request_rows // 2)
    tokens = torch.randint(0, vocab, (rows + 1,)).tolist()
    top = torch.stack([torch.tensor(tokens[-output:]), *[torch.randint(0, vocab, (output,)) for _ in range(3)]], 1)
    return CapturedRequest(
        request_id=f"r{number}", category="random", prompt_ids=tokens[:-output], output_ids=tokens[-output:],
        finish_reason="length", source="generated", temperature=0.0, top_p=1.0, top_k=-1,
        taps={tap: torch.randn(rows, width).to(torch.bfloat16) for tap in (*TAPS, "final")},
        topk_ids=top.int(), topk_logprobs=-torch.arange(1.0, 5).expand(output, 4).contiguous(),
        logsumexp=torch.ones(output),
    )  # fmt: skip


class Watch(TorchDispatchMode):
    """Processor seconds inside torch's operations, and the shapes of products."""

    def __init__(self) -> None:
        super().__init__()
        self.begin: float | None = None
        self.products = self.others = 0.0
        self.shapes: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, start = func.name().removeprefix("aten::").split(".")[0], process_time()
        if name in PRODUCTS and self.begin is None:
            self.begin, self.others = start, 0.0
        out = func(*args, **(kwargs or {}))
        taken = process_time() - start
        if name in PRODUCTS:
            self.products += taken
            known = (one for one in args if one is not None)  # a product may have no bias
            self.shapes[func, *((tuple(one.shape), one.stride(), one.dtype) for one in known)] += 1
        else:
            self.others += taken
        return out


class Memory(Thread):
    """The most pages of its own, and of mapped files, that this process held, in GB; looked at 50 times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.own = self.mapped = 0.0
        self.done = Event()

    def run(self) -> None:
        while not self.done.wait(0.02):
            self.own, self.mapped = max(self.own, kernel("RssAnon")), max(self.mapped, kernel("RssFile"))


def kernel(field: str) -> float:
    """The kernel's count, in GB."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split("kB")[0]) / 1e6


def one_run(trace: Path, draft: Path, steps: int, bare: bool) -> dict[str, float]:
    """Replay in this process, and measure."""
    memory, watch = Memory(), Watch()
    memory.start()
    head = replay.load_head(draft)
    variant = replay.Variant("head", steps=steps, wiring=replay.parse_wiring(",".join(TAPS)))
    with watch:
        opened = replay.Trace.open(trace)
        replay.simulate(opened, {"head": head}, [variant])
    end = process_time()
    memory.done.set()
    assert watch.begin is not None
    seconds = end - watch.begin
    found = {
        "loading": watch.begin, "passes": seconds, "products": watch.products, "others": watch.others,
        "anchors": sum(record.output_tokens - 1 for record in opened.records), "own": memory.own,
        "mapped": memory.mapped, "peak": kernel("VmHWM"),
        "weights": sum(one.numel() * one.element_size() for one in head.tensors.values()) / 1e9,
    }  # fmt: skip
    return found | ({"bare": sum(count * alone(shape) for shape, count in watch.shapes.items())} if bare else {})


def alone(shape: Any) -> float:
    """Processor seconds of one product of these operands: the second of two runs."""
    func, *operands = shape
    made = [torch.empty_strided(size, stride, dtype=dtype).fill_(0.01) for size, stride, dtype in operands]
    with torch.inference_mode():
        func(*made)
        start = process_time()
        func(*made)
    return process_time() - start


def run_apart(*arguments: str) -> dict[str, float]:
    """``one_run`` in a process of its own."""
    command = [sys.executable, "-P", __file__, "--child", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@click.command()
@click.option("--rows", type=click.IntRange(min=4), default=512)
@click.option(
    "--request-rows", type=click.IntRange(min=4), default=64, help="Rows of a request, or one request of all."
)
@click.option("--steps", type=click.IntRange(min=1), default=3)
@click.option("--kind", type=click.Choice(list(KINDS)), default="latent")
@click.option("--width", type=int, default=7168, help="Of head and target: a divisor of 7168.")
@click.option("--times", default="1,4,16", help="How many times as many rows, each a replay.")
@click.option("--child", nargs=3, hidden=True)
def main(
    rows: int, request_rows: int, steps: int, kind: str, width: int, times: str, child: tuple[str, str, str] | None
) -> None:
    """Print seconds and memory by the number of rows, and what the seconds went into."""
    if child is not None:
        print(json.dumps(one_run(Path(child[0]), Path(child[1]), steps, child[2] == "bare")))
        return
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "draft"
        write_head(draft, kind, width)
        first: dict[str, float] = {}
        for number in map(int, times.split(",")):
            trace, long = Path(folder) / "trace", min(request_rows, rows * number)
            write_trace(trace, rows * number, long, width)
            found = run_apart(str(trace), str(draft), "bare" if not first else "", "--steps", str(steps))
            first = first or found
            _say(found, first, rows * number // long * long)
            rmtree(trace)


def _say(found: dict[str, float], first: dict[str, float], rows: int) -> None:
    host = found["passes"] - found["products"] - found["others"]
    print(
        f"{rows} rows, {found['anchors']:.0f} anchors: passes {found['passes']:.1f} s "
        f"({found['passes'] / first['passes']:.2f} times), before them {found['loading']:.1f} s; "
        f"memory {found['peak']:.2f} GB ({found['peak'] / first['peak']:.2f} times): own {found['own']:.2f}, "
        f"of mapped files {found['mapped']:.2f}, the weights being {found['weights']:.2f}"
    )
    print(
        f"    products {found['products'] / found['passes']:.1%} of the passes, other operations "
        f"{found['others'] / found['passes']:.1%}, host {host / found['products']:.2%} of the products "
        f"({host / found['anchors'] * 1e6:.0f} us an anchor)",
        flush=True,
    )
    if "bare" in found:
        print(f"    the same products alone {found['bare']:.1f} s: the passes run at "
              f"{found['bare'] / found['passes']:.0%} of their rate", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
