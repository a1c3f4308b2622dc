"""States that cross between requests of a batch: drafts, margins and trees equal the twin's, request by request."""

from collections.abc import Generator
from dataclasses import replace

import pytest
import torch
from support.random_heads import make_head, requests
from torch import Tensor
from twins.crossed import mix, run_batch
from twins.margins import margin_of
from twins.rounds import Twin
from twins.trees import growing

from replay.drafting.crossed import BatchRow, BatchRows, known_steps, row_handed
from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.first_pass import first_pass
from replay.drafting.margins import margins_along
from replay.drafting.round_by_round import walk
from replay.drafting.rows import DraftInput
from replay.drafting.tree_shape import TreeSize
from replay.drafting.trees import draft_every_tree
from replay.engines.behaviour import CROSSED, Behaviour
from replay.errors import UsageError
from replay.head.model import Head

STEPS = 4
SHAPES = [(3, 9), (1, 12), (6, 7), (2, 8), (4, 6)]
# By verify pass the rows of its batch: request and anchor. The last request is never in a batch with others.
PASSES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((1, 2), (0, 3), (3, 2)),
    ((1, 4), (0, 5), (3, 3), (2, 7)),
    ((2, 9), (3, 6)),
    ((0, 8), (2, 10), (1, 7)),
    ((4, 5),),
)
BEHAVIOURS = {
    f"{row}{':once' if once else ''}": Behaviour(crossed=row, crossed_once=once)
    for row in CROSSED[1:]
    for once in (False, True)
}
every_behaviour = pytest.mark.parametrize("name", BEHAVIOURS)


def served_rows(request: int) -> dict[int, BatchRow]:
    """By anchor where the rounds of a request ran."""
    return {
        anchor: BatchRow(number, row, len(batch))
        for number, batch in enumerate(PASSES)
        for row, (one, anchor) in enumerate(batch)
        if one == request
    }


def at_rounds(inputs: list[DraftInput]) -> list[DraftInput]:
    """The requests at the anchors of their rounds."""
    made = []
    for request, item in enumerate(inputs):
        rows = served_rows(request)
        made.append(replace(item, only=torch.tensor(sorted(rows)), batch_rows=[rows[one] for one in sorted(rows)]))
    return made


def twin_at(head: Head, item: DraftInput, anchor: int) -> Twin:
    """A request with so many committed tokens."""
    twin = Twin(head, item.tokens_T, item.features_RKD, item.prompt_tokens)
    while twin.anchor < anchor:
        twin.commit(1, 0)
    return twin


def expected_drafts(head: Head, inputs: list[DraftInput]) -> dict[tuple[int, int], list[int]]:
    """By request and anchor what the twin drafts there."""
    found = {}
    for batch in PASSES:
        runs = [twin_at(head, inputs[request], anchor).drafting(STEPS) for request, anchor in batch]
        made, _ = run_batch(runs, head.behaviour.crossed, once=head.behaviour.crossed_once)
        found.update(zip(batch, made, strict=True))
    return found


@every_behaviour
def test_drafts_equal_the_twins(name: str) -> None:
    head = make_head("two layers", behaviour=BEHAVIOURS[name])
    inputs = requests(head, SHAPES)
    expected = expected_drafts(head, inputs)
    for request, (item, drafts) in enumerate(
        zip(at_rounds(inputs), draft_every_anchor(head, at_rounds(inputs), STEPS), strict=True)
    ):
        for anchor, drafted in zip(item.anchors_A.tolist(), drafts.drafted_AK.tolist(), strict=True):
            assert drafted == expected[request, anchor]


@every_behaviour
def test_states_that_cross_show_in_batches_alone(name: str) -> None:
    """In what tokens are chosen from: not in the first one of a round, nor in a request that drafts by itself."""
    healthy, head = make_head("plain"), make_head("plain", behaviour=BEHAVIOURS[name])
    inputs = at_rounds(requests(head, SHAPES))
    chains = [torch.full((item.anchors, STEPS), 7) for item in inputs]
    own, crossed = (margins_along(one, inputs, chains) for one in (healthy, head))
    for request, (mine, theirs) in enumerate(zip(own, crossed, strict=True)):
        torch.testing.assert_close(mine.best_AK[:, 0], theirs.best_AK[:, 0])
        assert torch.equal(mine.best_AK, theirs.best_AK) == (request == 4)


@every_behaviour
def test_along_a_servers_drafts_margins_equal_the_twins(name: str) -> None:
    head = make_head("two layers", behaviour=BEHAVIOURS[name])
    inputs = at_rounds(requests(head, SHAPES))
    generator = torch.Generator().manual_seed(3)
    chains = [torch.randint(96, (item.anchors, STEPS), generator=generator) for item in inputs]
    found = margins_along(head, inputs, chains)
    for batch in PASSES:
        twins = [twin_at(head, inputs[request], anchor) for request, anchor in batch]
        places = [inputs[request].anchors_A.tolist().index(anchor) for request, anchor in batch]
        fed = [chains[request][place].tolist() for (request, _), place in zip(batch, places, strict=True)]
        runs = [twin.drafting(STEPS, tokens) for twin, tokens in zip(twins, fed, strict=True)]
        run_batch(runs, head.behaviour.crossed, once=head.behaviour.crossed_once)
        for (request, _), place, twin, tokens in zip(batch, places, twins, fed, strict=True):
            steps = [margin_of(head, logits_W, token) for logits_W, token in zip(twin.logits, tokens, strict=True)]
            told = found[request].rows(slice(place, place + 1))
            assert told.preferred_AK[0].tolist() == [one.preferred for one in steps]
            torch.testing.assert_close(
                torch.stack([told.best_AK[0], told.logit_AK[0], told.logsumexp_AK[0]], 1).double(),
                torch.tensor([[one.best, one.logit, one.logsumexp] for one in steps], dtype=torch.float64),
                rtol=1e-5, atol=1e-5,
            )  # fmt: skip


@every_behaviour
def test_every_anchor_has_the_batch_of_the_round_in_which_it_lies(name: str) -> None:
    """It is handed the states that the others made in that round, where they started."""
    head = make_head("plain", behaviour=BEHAVIOURS[name])
    inputs = requests(head, SHAPES)
    every = []
    for request, item in enumerate(inputs):
        starts = served_rows(request)
        rows = [
            next((starts[s] for s in sorted(starts, reverse=True) if s <= a), None) for a in item.anchors_A.tolist()
        ]
        every.append(replace(item, batch_rows=rows))
    drafts = draft_every_anchor(head, every, STEPS)
    handed = [_states_of(head, inputs, batch) for batch in PASSES]
    between = 0
    for request, item in enumerate(inputs):
        for place, anchor in enumerate(item.anchors_A.tolist()):
            here = every[request].batch_rows[place]  # type: ignore[index]
            run = twin_at(head, item, anchor).drafting(STEPS)
            if here is None:
                expected, _ = run_batch([run], "none", once=False)
                assert drafts[request].drafted_AK[place].tolist() == expected[0]
                continue
            between += anchor not in served_rows(request)
            expected = _drafted_in(run, here, handed[here.verify_pass], head.behaviour)
            assert drafts[request].drafted_AK[place].tolist() == expected
    assert between > 10


def _states_of(head: Head, inputs: list[DraftInput], batch: tuple[tuple[int, int], ...]) -> list[list[Tensor]]:
    """Of each step the states that the rows of a batch made which start their rounds."""
    runs = [twin_at(head, inputs[request], anchor).drafting(STEPS) for request, anchor in batch]
    return run_batch(runs, head.behaviour.crossed, once=head.behaviour.crossed_once)[1]


def _drafted_in(
    run: Generator[Tensor, Tensor, list[int]], here: BatchRow, handed: list[list[Tensor]], behaviour: Behaviour
) -> list[int]:
    """What a run drafts in a row of a batch whose other rows made these states."""
    source = mix(range(here.batch), behaviour.crossed)[here.row]
    state = next(run)
    for number, states in enumerate(handed):
        own = source == here.row or (behaviour.crossed_once and number > 0)
        try:
            state = run.send(state if own else states[source])
        except StopIteration as ended:
            return list(ended.value)
    raise AssertionError("it goes on")


@every_behaviour
def test_a_state_of_a_request_that_is_not_there_is_not_known(name: str) -> None:
    """Its neighbour goes on from its own state, and what that leads to is marked, in all that it reaches."""
    head = make_head("plain", behaviour=BEHAVIOURS[name])
    inputs = at_rounds(requests(head, SHAPES))
    gone = 2  # in passes 1, 2 and 3
    chains = [torch.full((item.anchors, STEPS), 7) for item in inputs]
    rows_A = [row for item in inputs for row in item.batch_rows or ()]
    whole = known_steps(head.behaviour, rows_A, torch.cat(chains) >= 0)
    assert whole.all()
    left = [item for request, item in enumerate(inputs) if request != gone]
    told = [chain_AK for request, chain_AK in enumerate(chains) if request != gone]
    known_AK = known_steps(
        head.behaviour, [row for item in left for row in item.batch_rows or ()], torch.cat(told) >= 0
    )
    full, lacking = (margins_along(head, *pair) for pair in ((inputs, chains), (left, told)))
    whole_AK, some_AK = (
        torch.cat([one.best_AK for request, one in enumerate(of) if of is not full or request != gone])
        for of in (full, lacking)
    )
    same_AK = torch.isclose(whole_AK, some_AK, rtol=1e-6, atol=1e-6)
    assert torch.equal(same_AK, known_AK)
    assert known_AK[:, 0].all() and (name.startswith("first") or not known_AK[:, 1].all())


def test_what_a_shorter_chain_leads_to_is_not_known() -> None:
    """Rows 0 and 1 of a batch of two: the second drafted two tokens, so that nobody knows what its later rows embed."""
    rows: BatchRows = [BatchRow(0, 0, 2), BatchRow(0, 1, 2), BatchRow(1, 0, 1), None]
    told_AK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    known_AK = known_steps(Behaviour(crossed="next"), rows, told_AK)
    # The row that makes step 4 of the first is handed what a row of the second made that embeds its third token.
    assert known_AK.long().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    once_AK = known_steps(Behaviour(crossed="next", crossed_once=True), rows, told_AK)
    assert once_AK.long().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert known_steps(Behaviour(), rows, told_AK).all()


@pytest.mark.parametrize("row", CROSSED[1:])
@pytest.mark.parametrize("batch", range(1, 6))
def test_rows_are_handed_what_the_twin_hands_them(row: str, batch: int) -> None:
    assert [row_handed(row, own, batch) for own in range(batch)] == mix(range(batch), row)


def test_a_first_pass_of_a_healthy_variant_serves_states_that_cross() -> None:
    head = make_head("two layers", behaviour=BEHAVIOURS["next"])
    inputs = at_rounds(requests(head, SHAPES))
    assert head.behaviour.of_first_pass() == Behaviour()
    first = first_pass(make_head("two layers"), inputs)
    shared, alone = (draft_every_anchor(head, inputs, STEPS, first=given) for given in (first, None))
    assert [one.drafted_AK.tolist() for one in shared] == [one.drafted_AK.tolist() for one in alone]


@pytest.mark.parametrize("kv", ["slot", "path"])
@every_behaviour
def test_trees_equal_the_twins(name: str, kv: str) -> None:
    """A column is handed the state of the same column of the other request."""
    head = make_head("plain", behaviour=BEHAVIOURS[name])
    inputs = requests(head, SHAPES)
    shape = {"topk": 3, "steps": STEPS, "num_draft_tokens": 9, "kv": kv}
    at, size = at_rounds(inputs), TreeSize(STEPS, 9)
    (trees,) = draft_every_tree(head, at, topk=3, sizes=[size], kv=kv)
    for batch in PASSES:
        runs = [
            growing(head, inputs[request].tokens_T, inputs[request].features_RKD, anchor, **shape)  # type: ignore[arg-type]
            for request, anchor in batch
        ]
        made, _ = run_batch(runs, head.behaviour.crossed, once=head.behaviour.crossed_once)
        for (request, anchor), nodes in zip(batch, made, strict=True):
            place = at[request].anchors_A.tolist().index(anchor)
            assert trees[request].drafted_AN[place].tolist() == [node.token for node in nodes]
            assert trees[request].parents_AN[place].tolist() == [node.parent for node in nodes]


@every_behaviour
def test_one_column_is_the_chain(name: str) -> None:
    head = make_head("plain", behaviour=BEHAVIOURS[name])
    inputs = at_rounds(requests(head, SHAPES))
    (trees,) = draft_every_tree(head, inputs, topk=1, sizes=[TreeSize(STEPS, STEPS + 1)], kv="slot")
    for tree, chain in zip(trees, draft_every_anchor(head, inputs, STEPS), strict=True):
        assert torch.equal(tree.drafted_AN, chain.drafted_AK)


def test_blocks_of_trees_do_not_part_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head("plain", behaviour=BEHAVIOURS["reversed"])
    inputs = at_rounds(requests(head, SHAPES))
    shape = {"topk": 3, "sizes": [TreeSize(3, 8)], "kv": "slot"}
    (whole,) = draft_every_tree(head, inputs, **shape)  # type: ignore[arg-type]
    monkeypatch.setattr("replay.drafting.trees._BLOCK_ROWS", 6)
    (blocked,) = draft_every_tree(head, inputs, **shape)  # type: ignore[arg-type]
    assert [one.drafted_AN.tolist() for one in whole] == [one.drafted_AN.tolist() for one in blocked]


def test_without_batches_states_do_not_cross_in_silence() -> None:
    head = make_head("plain", behaviour=BEHAVIOURS["next"])
    inputs = requests(head, SHAPES)
    for without in (inputs, [*at_rounds(inputs)[1:], inputs[0]]):
        with pytest.raises(UsageError, match="states cross between requests of a batch, and batches were not told"):
            draft_every_anchor(head, without, STEPS)
        with pytest.raises(UsageError, match="and batches were not told"):
            draft_every_tree(head, without, topk=2, sizes=[TreeSize(2, 4)], kv="slot")
    with pytest.raises(UsageError, match="a walk has no batches"):
        walk(head, inputs, STEPS)
