"""Prompt rows to token ids, by a target's tokenizer and limits. It needs no model: call it before one is loaded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replay.capture.prompts import PromptFile, PromptRow
from replay.errors import PromptError
from replay.printable import counted, one_line
from replay.traces.fields import show, some

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What the code of a template may raise beside jinja's own errors.
_IN_TEMPLATES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_MOST_REASON = 300  # characters


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """One request ready for the target: L prompt tokens, then up to max_new_tokens to generate or a forced output."""

    request_id: str
    category: str | None
    prompt_ids: tuple[int, ...]
    forced_ids: tuple[int, ...] | None
    max_new_tokens: int  # at least 1; the forced output's length where there is one

    @property
    def most_tokens(self) -> int:
        """Prompt and longest possible output together."""
        return len(self.prompt_ids) + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """What token ids and lengths the target takes."""

    vocab_size: int
    context: int | None  # max_position_embeddings; None where the target states none


@dataclass(frozen=True, slots=True)
class Encoded:
    """Requests in file order, one at least, and the rows that are too long for the target, with the reason of each."""

    requests: tuple[EncodedRequest, ...]
    left_out: Mapping[str, str]

    def notes(self) -> Iterator[str]:
        """What the user should know."""
        if self.left_out:
            rows = len(self.requests) + len(self.left_out)
            first = next(iter(self.left_out.values()))
            yield (
                f"left out as too long: {len(self.left_out)} of {counted(rows, 'prompt')} "
                f"({some(list(self.left_out))}); {first}"
            )


class _TooLong(PromptError):
    """Of one row: the others can be asked."""


def encode_prompts(
    prompts: PromptFile,
    tokenizer: "PreTrainedTokenizerBase | None",
    limits: TargetLimits,
    *,
    raw: bool,
    max_new_tokens: int,
) -> Encoded:
    """Token ids of every row, in file order; ``tokenizer`` may be None where all rows hold ids.

    Generation is cut so that prompt and output fit the context; a row whose prompt or forced output does not fit is
    left out. Raises PromptError naming file and line for a row that has no text the tokenizer or its template takes, or
    an id outside the vocabulary, and where every row is too long.
    """
    requests: list[EncodedRequest] = []
    left_out: dict[str, str] = {}
    for row in prompts.rows:
        try:
            requests.append(_encode(row, prompts.where(row), tokenizer, limits, raw, max_new_tokens))
        except _TooLong as error:
            left_out[row.request_id] = str(error)
    if not requests:
        raise PromptError(next(iter(left_out.values())))
    return Encoded(tuple(requests), left_out)


def _encode(
    row: PromptRow,
    where: str,
    tokenizer: "PreTrainedTokenizerBase | None",
    limits: TargetLimits,
    raw: bool,
    max_new_tokens: int,
) -> EncodedRequest:
    prompt_ids = _prompt_ids(row, where, tokenizer, raw)
    forced_ids = _forced_ids(row, where, tokenizer)
    for key, ids in (("prompt", prompt_ids), ("output", forced_ids or ())):
        _check_ids(ids, key, where, limits.vocab_size)
    room = max_new_tokens
    if limits.context is not None:
        room = min(room, limits.context - len(prompt_ids))
        if room < 1:
            raise _TooLong(
                f"{where}: the prompt has {len(prompt_ids)} tokens and the target's context is {limits.context}, "
                "one of which the output needs: shorten the prompt or take the row out"
            )
        if forced_ids is not None and len(prompt_ids) + len(forced_ids) > limits.context:
            raise _TooLong(
                f"{where}: prompt and forced output have {len(prompt_ids)} + {len(forced_ids)} tokens and the target's "
                f"context is {limits.context}: shorten them or take the row out"
            )
    length = room if forced_ids is None else len(forced_ids)
    return EncodedRequest(row.request_id, row.category, prompt_ids, forced_ids, length)


def _prompt_ids(row: PromptRow, where: str, tokenizer: "PreTrainedTokenizerBase | None", raw: bool) -> tuple[int, ...]:
    if row.input_ids is not None:
        return row.input_ids
    if tokenizer is None:
        raise PromptError(f"{where} holds text and the target folder has no tokenizer: give input_ids instead")
    templated = bool(tokenizer.chat_template)
    if row.messages is not None:
        if not templated:
            raise PromptError(f"{where} holds messages and the target has no chat template: give a prompt instead")
        return _apply_template(tokenizer, row.messages, where)
    assert row.prompt is not None  # read_prompts saw to it
    if templated and not raw:
        return _apply_template(tokenizer, ({"role": "user", "content": row.prompt},), where)
    ids = tuple(tokenizer(row.prompt)["input_ids"])
    if not ids:
        raise PromptError(f"{where}: the target's tokenizer makes no token of this prompt: write some text")
    return ids


def _apply_template(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[dict[str, Any]], where: str
) -> tuple[int, ...]:
    from jinja2 import TemplateError

    try:
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except (TemplateError, *_IN_TEMPLATES) as error:
        roles = show([message["role"] for message in messages])
        reason = one_line(str(error), _MOST_REASON)
        raise PromptError(
            f"{where}: the target's chat template refuses the roles {roles} ({reason}): mend them"
        ) from error
    return tuple(ids)


def _forced_ids(row: PromptRow, where: str, tokenizer: "PreTrainedTokenizerBase | None") -> tuple[int, ...] | None:
    if row.response is None:
        return row.output_ids
    if tokenizer is None:
        raise PromptError(f"{where} holds a response and the target folder has no tokenizer: give output_ids instead")
    ids = tuple(tokenizer(row.response, add_special_tokens=False)["input_ids"])
    if not ids:
        raise PromptError(f"{where}: the target's tokenizer makes no token of this response: write some text")
    return ids


def _check_ids(ids: Sequence[int], key: str, where: str, vocab_size: int) -> None:
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise PromptError(f"{where}: {key} token id {wrong} is outside the target's vocabulary, 0 to {vocab_size - 1}")
