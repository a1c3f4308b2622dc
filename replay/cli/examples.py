"""What may be typed, at the end of each command's help. A test reads every line with the command it belongs to."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "serve": (
        "replay serve --trace trace -- --model-path target --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path head",
        "replay serve --trace trace --wiring embed,3,31 -- --model-path target --speculative-algorithm EAGLE3",
    ),
    "capture": (
        "replay capture --model path/to/target --prompts prompts.jsonl -o trace",
        "replay capture --server http://127.0.0.1:30000 --prompts prompts.jsonl -o trace --max-new-tokens 256",
        "replay capture --model path/to/target --prompts prompts.jsonl -o trace --resume",
        "replay capture --model path/to/target --prompts prompts.jsonl -o trace --taps-for 100 --then-taps 3,31",
    ),
    "import": ("replay import path/to/dump --target path/to/target -o trace",),
    "simulate": (
        "replay simulate trace --draft path/to/head -o rounds.parquet",
        "replay simulate trace --draft epoch-1 --draft epoch-9 --steps 3 --steps 5 --top 5",
        "replay simulate trace --draft path/to/head --wiring embed,3,31 --wiring 3,31,59 --format csv",
        "replay simulate trace --draft path/to/head --steps 3 --steps 5 --workers 4 -o rounds.parquet",
        "replay simulate trace --draft path/to/head --ray auto --cache kept -o rounds.parquet",
        "replay simulate trace --draft path/to/head --fault none --fault kv.rollback=stale",
    ),
    "faults": ("replay faults", "replay faults --format md"),
    "report": (
        "replay report rounds.parquet",
        "replay report rounds.parquet --sort length --top 5",
        "replay report rounds.parquet --format csv > variants.csv",
        "replay report rounds.parquet --peers --html report.html",
        "replay report epoch-1.parquet epoch-9.parquet --html heads.html",
    ),
    "show": (
        "replay show rounds.parquet --request code-1",
        "replay show rounds.parquet --category math --first-rejected --top 5",
    ),
    "compare": (
        "replay compare before.parquet after.parquet",
        "replay compare rounds.parquet --variant-a embed,3,31",
        "replay compare rounds.parquet --format csv > pairs.csv",
    ),
    "time": (
        "replay time --server http://127.0.0.1:30000 -o timings.jsonl",
        "replay time --server http://127.0.0.1:30000 -o timings.jsonl --prompts prompts.jsonl --batch 1,8,32",
    ),
    "plan": (
        "replay plan rounds.parquet --time batch=1,tok/s=90 --time batch=1,steps=5,accept=1.8,tok/s=54.8",
        "replay plan rounds.parquet --bench results.jsonl --batch 1,8,32",
        "replay plan trace --draft path/to/head --cost pass=37.7,rest=35,draft=26 --html plan.html",
        "replay plan rounds.parquet --bench before.txt,after.txt --time ms=20",
    ),
    "inspect": ("replay inspect trace --check", "replay inspect path/to/head"),
    "diagnose": (
        "replay diagnose trace --draft path/to/head",
        "replay diagnose trace --draft path/to/head --observed 1.85 --steps 5",
        "replay diagnose trace --draft path/to/head --observed server.log --wiring embed,3,31",
    ),
    "check": (
        "replay check --draft path/to/head --target path/to/target",
        'replay check --draft path/to/head --target path/to/target --server-args "--speculative-num-steps 5"',
        "replay check --draft path/to/head --target path/to/target --server http://127.0.0.1:30000",
    ),
    "trace": (
        "replay trace stats trace",
        "replay trace merge monday tuesday -o both",
        "replay trace subset both --category code -o code",
    ),
    "demo": ("replay demo", "replay demo -o demo --max-new-tokens 64"),
}


def epilog(command: str) -> str:
    """The examples of a command as click prints them: a line each, not joined."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in EXAMPLES[command])])
