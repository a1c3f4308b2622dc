"""A view of tokens as a person reads it in a terminal: marks tell the same as colours."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from replay.analysis import wording
from replay.analysis.tables import bullet, heading
from replay.analysis.tokens.spelling import Token
from replay.analysis.tokens.view import (
    RANKED,
    UNDRAFTABLE,
    Alternative,
    Rejection,
    RequestView,
    RoundView,
    View,
    accept_length,
)
from replay.printable import one_line

_ACCEPTED, _REJECTED, _UNREACHED, _BONUS = ("+", "green"), ("x", "bold red"), ("-", "dim"), ("*", "bold cyan")
_LEGEND = "+ accepted   x first rejected   - behind it, not looked at   * the target's own token"
_TREE_LEGEND = "+ accepted   - node of the tree   * the target's own token"
_MOST_PROMPT = 400  # characters of a prompt that are shown


@dataclass(frozen=True, slots=True)
class Cells:
    """Short texts in a row, each whole: lines break between them alone."""

    cells: tuple[Text, ...]
    indent: int = 2

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        lines: list[list[Text]] = [[]]
        for cell in self.cells:
            width = self.indent + sum(cell_len(one.plain) + 2 for one in lines[-1]) + cell_len(cell.plain)
            if lines[-1] and width > options.max_width:
                lines.append([])
            lines[-1].append(cell)
        for line in lines:
            yield Text(" " * self.indent).append_text(Text("  ").join(line))


def render_view(view: View) -> RenderableType:
    """The view as a rich renderable."""
    parts: list[RenderableType] = [Text(f"Variant {one_line(view.variant)}", style="bold")]
    parts += [Text(_LEGEND if view.topk == 1 else _TREE_LEGEND, style="dim")]
    for request in view.requests:
        parts += [Text(), *_request(request, chain=view.topk == 1)]
    if view.notes:
        parts += [Text(), heading("Not shown"), *map(bullet, view.notes)]
    return Group(*parts)


def _request(view: RequestView, *, chain: bool) -> Iterator[RenderableType]:
    yield heading(_title(view))
    yield from (Text(f"  {said}") for said in _prompt(view))
    for one in view.rounds:
        yield Text()
        yield from _round(one, chain=chain)


def _title(view: RequestView) -> str:
    category = f" ({one_line(view.category)})" if view.category else ""
    shown = "" if len(view.rounds) == view.played else f", {len(view.rounds)} of them shown"
    return (
        f"Request {one_line(view.request_id)}{category}: {wording.counted(view.output_tokens, 'output token')}, accept "
        f"length {wording.decimal(accept_length(view))} over {wording.counted(view.played, 'round')}{shown}"
    )


def _prompt(view: RequestView) -> Iterator[str]:
    said = f"prompt of {wording.counted(view.prompt_tokens, 'token')}"
    if view.cached_tokens:
        said += f", {wording.count(view.cached_tokens)} of them cached"
    if len(view.pieces) > 1:
        said += f", prefilled in pieces of {wording.listed([wording.count(rows) for rows in view.pieces])}"
    yield said
    if view.prompt is not None:
        yield f"  {_quoted(_end(view.prompt))}"


def _end(text: str) -> str:
    """The end of a long text is what the output follows on."""
    return text if len(text) <= _MOST_PROMPT else f"...{text[-_MOST_PROMPT:]}"


def _round(view: RoundView, *, chain: bool) -> Iterator[RenderableType]:
    after = "" if view.known is None else f" after {_called(view.known)}"
    cut = ", runs past the end of the output" if view.cut else ""
    yield Cells((Text(f"round {view.round} at {view.anchor}{after}: {view.accepted} accepted{cut}"),), indent=0)
    yield Cells(tuple(_chain(view) if chain else _tree(view)))
    if view.rejection is not None:
        yield Cells((Text(_reason(view.rejection), style="red"),))
        if view.rejection.top:
            yield Cells((Text("the draft had", style="dim"), *map(_alternative, view.rejection.top)))


def _chain(view: RoundView) -> Iterator[Text]:
    yield from _marked(view.drafted[: view.accepted], _ACCEPTED)
    yield from _marked(view.drafted[view.accepted : view.accepted + 1], _REJECTED)
    yield from _marked(view.drafted[view.accepted + 1 :], _UNREACHED)
    yield from _marked([] if view.bonus is None else [view.bonus], _BONUS)


def _tree(view: RoundView) -> Iterator[Text]:
    yield from _marked(view.taken, _ACCEPTED)
    yield from _marked([] if view.bonus is None else [view.bonus], _BONUS)
    yield from _marked(view.drafted, _UNREACHED)


def _marked(tokens: Sequence[Token], look: tuple[str, str]) -> Iterator[Text]:
    mark, style = look
    return (Text(f"{mark} {_called(token)}", style=style) for token in tokens)


def _alternative(one: Alternative) -> Text:
    return Text(f"{_called(one.token)} {_percent(one.probability)}", style="dim")


def _reason(rejection: Rejection) -> str:
    """Why the draft ended there, in one sentence."""
    place = f"position {rejection.position}: "
    if rejection.chosen is None:
        return f"{place}what the target chose is not known"
    said = f"{place}the target chose {_called(rejection.chosen)}{_share(rejection.target_probability)}"
    if rejection.reason == UNDRAFTABLE:
        said += ", which is not in the draft vocabulary"
    if rejection.reason == RANKED and rejection.probability is not None:
        said += f", rank {rejection.rank} in the draft with {_percent(rejection.probability)}"
    if rejection.drafted is not None and rejection.target_probability_of_drafted is not None:
        said += f"; it gave {_called(rejection.drafted)}{_share(rejection.target_probability_of_drafted)}"
    return said


def _share(probability: float | None) -> str:
    return "" if probability is None else f" ({_percent(probability)})"


def _percent(probability: float) -> str:
    """What is small is not nothing."""
    return wording.percent(probability) if probability >= 0.0005 or probability == 0 else "< 0.1 %"


def _called(token: Token) -> str:
    return f"#{token.id}" if token.text is None else _quoted(token.text)


def _quoted(text: str) -> str:
    escaped = text.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    return f'"{one_line(escaped)}"'
