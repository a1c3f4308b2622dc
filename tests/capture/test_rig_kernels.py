"""The CPU rig's restated kernels, each against a second formulation.

Where SGLang ships a Triton kernel that does the same on a GPU, that kernel itself is the second formulation: Triton's
interpreter runs it on the CPU. The others are held against plain loops or against torch's own attention in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from rig.inprocess import sglang_module
from torch import Tensor

POOL, WIDTH, SLOTS = 7, 64, 400  # rows and columns of a slot table, slots of a cache


@pytest.fixture(scope="module")
def kernels() -> Any:
    """The rig's ``sgl_kernel``."""
    sglang_module("srt.utils")
    import sgl_kernel

    return sgl_kernel


@pytest.fixture
def triton_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """The Triton kernel of this name in this module of SGLang, run by Triton's interpreter."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    # Functions that a kernel calls were compiled for a GPU when Triton was imported: interpret them too.
    monkeypatch.setattr(JITFunction, "__call__", lambda self, *args, **kw: InterpretedFunction(self.fn)(*args, **kw))
    return lambda module, name: InterpretedFunction(getattr(sglang_module(module), name).fn)


@pytest.fixture(params=range(4))
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(request.param)


def integers(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator)


def slot_table(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A slot table [POOL, WIDTH] with no slot twice, as int32, and four of its rows in no order."""
    slots = torch.randperm(POOL * WIDTH, generator=generator)
    return slots.view(POOL, WIDTH).int(), torch.randperm(POOL, generator=generator)[:4]


def test_slots_go_into_the_table_as_triton_puts_them(
    kernels: Any, triton_kernel: Callable[[str, str], Any], generator: torch.Generator
) -> None:
    ours, rows = slot_table(generator)
    theirs = ours.clone()
    start = integers(generator, 0, 20, 4)
    end = start + integers(generator, 0, 40, 4)
    slots = integers(generator, 1000, 2000, int((end - start).sum()))
    kernels.assign_req_to_token_pool_cpu(rows, ours, start, end, slots, WIDTH)
    triton_kernel("srt.mem_cache.allocation", "assign_req_to_token_pool")[(4,)](
        rows, theirs, start, end, slots, WIDTH, 4
    )
    assert torch.equal(ours, theirs)
    assert ours.sum() > 1000 * len(slots)


def test_slots_come_out_of_the_table_as_triton_takes_them(
    kernels: Any, triton_kernel: Callable[[str, str], Any], generator: torch.Generator
) -> None:
    table, rows = slot_table(generator)
    start = integers(generator, 0, 20, 4)
    end = start + integers(generator, 0, 40, 4)
    ours = torch.full((int((end - start).sum()) + 3,), -7)
    theirs = ours.clone()
    kernels.assign_extend_cache_locs_cpu(rows, table, start, end, ours, WIDTH)
    triton_kernel("kernels.ops.speculative.cache_locs", "assign_extend_cache_locs")[(4,)](
        rows, table, start, end, theirs, WIDTH, 4
    )
    assert torch.equal(ours, theirs)
    assert (ours == -7).sum() == 3  # filled, and not beyond


@pytest.mark.parametrize(("topk", "steps"), [(1, 5), (4, 3)])
def test_draft_slots_are_those_of_triton(
    kernels: Any, triton_kernel: Callable[[str, str], Any], generator: torch.Generator, topk: int, steps: int
) -> None:
    table, rows = slot_table(generator)
    lengths = integers(generator, 1, WIDTH - topk * steps, 4)
    ours = torch.full((4 * topk * steps,), -7)
    theirs = ours.clone()
    kernels.assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, ours, WIDTH, topk, steps)
    triton_kernel("kernels.ops.speculative.cache_locs", "assign_draft_cache_locs_contiguous")[(4,)](
        rows, table, lengths, theirs, WIDTH, topk, steps
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("topk", "steps"), [(1, 5), (3, 4)])
def test_each_branch_sees_the_prefix_and_its_own_slots(
    kernels: Any, generator: torch.Generator, topk: int, steps: int
) -> None:
    table, rows = slot_table(generator)
    lengths = integers(generator, 1, WIDTH - topk * steps, 4)
    found = kernels.build_draft_decode_metadata_cpu(table, rows, lengths, topk, steps, WIDTH)
    assert found.shape == (4 * topk, WIDTH)
    for request, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        slots = table[row].tolist()
        for branch in range(topk):
            own = [slots[length + branch * steps + step] for step in range(steps)]
            assert found[request * topk + branch, : length + steps].tolist() == slots[:length] + own


def test_the_bonus_token_is_the_last_accepted_one(
    kernels: Any, triton_kernel: Callable[[str, str], Any], generator: torch.Generator
) -> None:
    tokens, lengths = integers(generator, 0, 99, 5, 6).int(), integers(generator, 1, 7, 5).int()
    ours, theirs = torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    kernels.fill_bonus_tokens_cpu(tokens.flatten(), lengths, ours, 6)
    triton_kernel("kernels.ops.speculative.eagle", "fill_bonus_tokens")[(5,)](tokens, lengths, theirs, 6)
    assert torch.equal(ours, theirs)
    assert ours.tolist() == [row[length - 1] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]


def test_accepted_slots_are_packed_as_triton_packs_them(
    kernels: Any, triton_kernel: Callable[[str, str], Any], generator: torch.Generator
) -> None:
    accepted = torch.where(integers(generator, 0, 2, 16) == 1, torch.arange(16), -1).int()
    slots = torch.randperm(SLOTS, generator=generator)[:16]
    ours = torch.full((16,), -7)
    theirs = ours.clone()
    kernels.fill_accept_out_cache_loc_cpu(accepted.view(4, 4), slots, ours)
    triton_kernel("kernels.ops.speculative.eagle", "fill_accept_out_cache_loc")[(16,)](accepted, slots, theirs, 16)
    assert torch.equal(ours, theirs)


def test_copied_slots_are_read_before_any_is_written(kernels: Any, generator: torch.Generator) -> None:
    buffers = [
        torch.randn(30, 2, 3, generator=generator).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)
    ]
    source = integers(generator, 0, 30, 9)
    goal = torch.randperm(30, generator=generator)[:9]
    before = [buffer.tolist() for buffer in buffers]
    kernels.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64),
        torch.tensor([buffer[0].numel() * buffer.element_size() for buffer in buffers]),
        goal,
        source,
    )
    for buffer, rows in zip(buffers, before, strict=True):
        expected = list(rows)
        for to, of in zip(goal.tolist(), source.tolist(), strict=True):
            expected[to] = rows[of]
        assert buffer.tolist() == expected


@dataclass(frozen=True, slots=True)
class Tree:
    """One request's tree as SGLang describes it, and the parent of each node as it was grown."""

    selected: list[int]
    parent_list: list[int]
    parents: list[int]


def grown_tree(generator: torch.Generator, topk: int, steps: int, nodes: int) -> Tree:
    """Grows candidates step by step as ``draft_forward`` numbers them, then keeps ``nodes`` - 1 with their parents."""
    parent_of = {candidate: -1 for candidate in range(topk)}
    frontier, parent_list = list(range(topk)), [-1, *range(topk)]
    for _ in range(1, steps):
        born = {len(parent_of) + place: frontier[place // topk] for place in range(topk * topk)}
        parent_of |= born
        chosen = torch.randperm(topk * topk, generator=generator)[:topk].tolist()
        frontier = [list(born)[place] for place in chosen]
        parent_list += frontier
    kept: list[int] = []
    while len(kept) < nodes - 1:
        ready = [child for child, parent in parent_of.items() if child not in kept and parent in (-1, *kept)]
        kept.append(ready[int(integers(generator, 0, len(ready), 1))])
    kept.sort()
    return Tree(kept, parent_list, [0] + [1 + kept.index(parent_of[c]) if parent_of[c] != -1 else 0 for c in kept])


def torn_tree(generator: torch.Generator, topk: int, steps: int, nodes: int) -> Tree:
    """A tree of which any candidates are kept, whether their parents are or not."""
    whole = grown_tree(generator, topk, steps, nodes)
    candidates = topk + (steps - 1) * topk * topk
    kept = sorted(torch.randperm(candidates, generator=generator)[: nodes - 1].tolist())
    groups = [candidate // topk for candidate in kept]
    wanted = [whole.parent_list[group] for group in groups]
    parents = [0 if g == 0 else 1 + kept.index(w) if w in kept else -1 for g, w in zip(groups, wanted, strict=True)]
    return Tree(kept, whole.parent_list, [0, *parents])


def linked(
    build: Callable[..., object], trees: list[Tree], lengths: Tensor, topk: int, steps: int, nodes: int
) -> dict[str, Tensor]:
    """What ``build`` fills in for these trees."""
    links = torch.full((3, len(trees), nodes), -1)
    filled = {
        "tree_mask": torch.ones(len(trees) * nodes * nodes, dtype=torch.bool),
        "positions": torch.zeros(len(trees) * nodes, dtype=torch.int64),
        "retrieve_index": links[0],
        "retrieve_next_token": links[1],
        "retrieve_next_sibling": links[2],
    }
    parent_list = torch.tensor([tree.parent_list for tree in trees])
    selected = torch.tensor([tree.selected for tree in trees])
    build(parent_list, selected, lengths, *filled.values(), topk, steps, nodes)
    return filled


SHAPES = [(1, 5, 6), (2, 3, 5), (4, 3, 8), (3, 5, 16)]  # topk, steps, nodes


@pytest.mark.parametrize(("topk", "steps", "nodes"), SHAPES)
def test_trees_are_linked_as_triton_links_them(
    kernels: Any,
    triton_kernel: Callable[[str, str], Any],
    generator: torch.Generator,
    topk: int,
    steps: int,
    nodes: int,
) -> None:
    trees = [grown_tree(generator, topk, steps, nodes) for _ in range(2)]
    # And one with nodes whose parents were not kept: equal scores allow it.
    torn = (torn_tree(generator, topk, steps, nodes) for _ in range(1000))
    trees.append(next(tree for tree in torn if topk == 1 or -1 in tree.parents))
    lengths = integers(generator, 1, 50, 3)

    def theirs(parent_list: Tensor, selected: Tensor, lengths: Tensor, *rest: Any) -> None:
        *filled, topk, steps, nodes = rest
        triton_kernel("kernels.ops.speculative.spec_tree", "sgl_build_tree_kernel_efficient_triton")[(3,)](
            parent_list, selected, lengths, lengths.cumsum(0) - lengths, *filled, topk, steps, nodes, 1, 3,
            parent_list.stride(0), selected.stride(0),
        )  # fmt: skip

    def ours(*args: Any) -> None:
        kernels.build_tree_kernel_efficient_cpu(*args, kernels.QLEN_ONLY)

    mine, reference = (linked(build, trees, lengths, topk, steps, nodes) for build in (ours, theirs))
    for name in reference:
        assert torch.equal(mine[name], reference[name]), name
    masks = mine["tree_mask"].view(3, nodes, nodes)
    for request, tree in enumerate(trees):
        for node in range(nodes):
            family, ancestor = {0, node}, node
            while ancestor > 0:
                ancestor = tree.parents[ancestor]
                family.add(max(ancestor, 0))
            assert set(masks[request, node].nonzero().flatten().tolist()) == family
            assert mine["positions"].view(3, nodes)[request, node] == lengths[request] + len(family) - 1


@pytest.mark.parametrize(("topk", "steps", "nodes"), SHAPES)
def test_trees_are_verified_as_triton_verifies_them(
    kernels: Any,
    triton_kernel: Callable[[str, str], Any],
    generator: torch.Generator,
    topk: int,
    steps: int,
    nodes: int,
) -> None:
    requests = 12
    trees = [grown_tree(generator, topk, steps, nodes) for _ in range(requests)]

    def build(*args: Any) -> None:
        kernels.build_tree_kernel_efficient_cpu(*args, kernels.QLEN_ONLY)

    links = linked(build, trees, torch.ones(requests, dtype=torch.int64), topk, steps, nodes)
    # Few tokens, so that drafts are often right.
    candidates, choices = integers(generator, 0, 3, requests, nodes), integers(generator, 0, 3, requests, nodes)

    def outputs() -> tuple[Tensor, Tensor, Tensor]:
        predicts = torch.zeros(requests * nodes, dtype=torch.int32)
        return predicts, torch.full((requests, steps + 1), -1, dtype=torch.int32), torch.zeros(requests).int()

    tree = (links["retrieve_index"], links["retrieve_next_token"], links["retrieve_next_sibling"])
    ours, theirs = outputs(), outputs()
    kernels.verify_tree_greedy_cpu(*ours, candidates, *tree, choices)
    triton_kernel("kernels.ops.speculative.spec_tree", "verify_tree_greedy_kernel_triton")[(requests,)](
        *theirs, candidates, *tree, choices, requests, steps + 1, nodes
    )
    for mine, reference in zip(ours, theirs, strict=True):
        assert torch.equal(mine, reference)
    assert 0 < ours[2].sum() < requests * steps


@dataclass(frozen=True, slots=True)
class Caches:
    """Keys and values [SLOTS, M, H], and a slot table with the lengths of four requests."""

    k: Tensor
    v: Tensor
    table: Tensor
    rows: Tensor
    lengths: Tensor

    @classmethod
    def random(cls, generator: torch.Generator, dtype: torch.dtype) -> "Caches":
        table, rows = slot_table(generator)
        k, v = (torch.randn(POOL * WIDTH, 2, 8, generator=generator).to(dtype) for _ in range(2))
        return cls(k, v, table, rows, integers(generator, 12, WIDTH, 4))

    def expected(self, request: int, q_TNH: Tensor, seen_TL: Tensor) -> Tensor:
        """torch's own attention [T, N, H] in float64."""
        slots = self.table[self.rows[request], : seen_TL.shape[1]].long()
        q, k, v = (x.double().transpose(0, 1)[None] for x in (q_TNH, self.k[slots], self.v[slots]))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen_TL, scale=0.3, enable_gqa=True)
        return out[0].transpose(0, 1)


# float32: rounding of sums only. bfloat16: sums in float32, output of 8 bits: one unit of the last of them.
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-8, "atol": 1e-6}}
PLAIN = {"logit_cap": 0.0, "is_cross_attn": False, "sliding_window": 0, "encoder_lens": None, "sinks": None}


@pytest.mark.parametrize("dtype", list(CLOSE))
def test_decode_attention_is_that_of_torch(kernels: Any, generator: torch.Generator, dtype: torch.dtype) -> None:
    caches = Caches.random(generator, dtype)
    q = torch.randn(4, 6, 8, generator=generator).to(dtype)
    key, value = (torch.randn(4, 2, 8, generator=generator).to(dtype) for _ in range(2))
    newest = caches.table[caches.rows, caches.lengths - 1].long()
    out = torch.empty_like(q)
    kernels.decode_attention_cpu(
        q, caches.k, caches.v, 1.0, 1.0, out, key.flatten(1), value.flatten(1), newest, torch.empty(0),
        caches.table, caches.rows, caches.lengths, 0.3, **PLAIN,
    )  # fmt: skip
    assert torch.equal(caches.k[newest], key)
    assert torch.equal(caches.v[newest], value)
    for request, length in enumerate(caches.lengths.tolist()):
        expected = caches.expected(request, q[request : request + 1], torch.ones(1, length, dtype=torch.bool))
        torch.testing.assert_close(out[request : request + 1].double(), expected, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("tree", [False, True])
def test_extend_attention_is_that_of_torch(
    kernels: Any, generator: torch.Generator, dtype: torch.dtype, tree: bool
) -> None:
    caches = Caches.random(generator, dtype)
    new = torch.full((4,), 5) if tree else integers(generator, 1, 12, 4)
    starts = new.cumsum(0) - new
    q = torch.randn(int(new.sum()), 6, 8, generator=generator).to(dtype)
    masks = [torch.ones(rows, rows, dtype=torch.bool).tril() for rows in new.tolist()]
    if tree:
        masks = [mask & (torch.rand(mask.shape, generator=generator) < 0.5) | torch.eye(5).bool() for mask in masks]
    out = torch.empty_like(q)
    kernels.extend_attention_cpu(
        q, None, None, out, caches.k, caches.v, 1.0, 1.0, caches.table, caches.rows, caches.lengths, new, starts,
        int(new.max()), 0.3, **PLAIN, tree_mask=torch.cat([mask.flatten() for mask in masks]) if tree else None,
        is_causal=True,
    )  # fmt: skip
    for request, (length, rows, start) in enumerate(
        zip(caches.lengths.tolist(), new.tolist(), starts.tolist(), strict=True)
    ):
        seen = torch.cat([torch.ones(rows, length - rows, dtype=torch.bool), masks[request]], dim=1)
        expected = caches.expected(request, q[start : start + rows], seen)
        torch.testing.assert_close(out[start : start + rows].double(), expected, **CLOSE[dtype])


def test_an_extend_takes_new_rows_as_they_are_given(kernels: Any, generator: torch.Generator) -> None:
    """Rows before them come from the caches, they themselves do not: there they are NaN."""
    caches = Caches.random(generator, torch.float32)
    new = integers(generator, 1, 12, 4)
    starts = new.cumsum(0) - new
    q = torch.randn(int(new.sum()), 6, 8, generator=generator)
    places = zip(caches.rows.tolist(), caches.lengths.tolist(), new.tolist(), strict=True)
    slots = torch.cat([caches.table[row, length - rows : length] for row, length, rows in places]).long()
    sound = replace(caches, k=caches.k.clone(), v=caches.v.clone())
    given = caches.k[slots], caches.v[slots]
    caches.k[slots] = caches.v[slots] = float("nan")
    out = torch.empty_like(q)
    kernels.extend_attention_cpu(
        q, *given, out, caches.k, caches.v, 1.0, 1.0, caches.table, caches.rows, caches.lengths, new, starts,
        int(new.max()), 0.3, **PLAIN, tree_mask=None, is_causal=True,
    )  # fmt: skip
    lines = zip(caches.lengths.tolist(), new.tolist(), starts.tolist(), strict=True)
    for request, (length, rows, start) in enumerate(lines):
        seen = torch.cat([torch.ones(rows, length - rows), torch.ones(rows, rows).tril()], dim=1).bool()
        expected = sound.expected(request, q[start : start + rows], seen)
        torch.testing.assert_close(out[start : start + rows].double(), expected, **CLOSE[torch.float32])


def test_a_prefill_may_be_of_another_shape_than_the_cache(kernels: Any, generator: torch.Generator) -> None:
    """As DeepSeek's attention prefills a prompt: a key and a narrower value for each head, and latents in the cache."""
    caches = Caches.random(generator, torch.float32)
    new = caches.lengths
    starts = new.cumsum(0) - new
    total = int(new.sum())
    q, k = (torch.randn(total, 6, 8, generator=generator) for _ in range(2))
    v = torch.randn(total, 6, 5, generator=generator)
    out = torch.empty_like(v)
    latents = torch.full((POOL * WIDTH, 1, 12), float("nan"))
    kernels.extend_attention_cpu(
        q, k, v, out, latents, latents[..., :9], 1.0, 1.0, caches.table, caches.rows, caches.lengths, new, starts,
        int(new.max()), 0.3, **PLAIN, tree_mask=None, is_causal=True,
    )  # fmt: skip
    for rows, start in zip(new.tolist(), starts.tolist(), strict=True):
        own = (x[start : start + rows].double().transpose(0, 1)[None] for x in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*own, is_causal=True, scale=0.3)
        made = out[start : start + rows].double()
        torch.testing.assert_close(made, expected[0].transpose(0, 1), **CLOSE[torch.float32])


def test_calls_of_earlier_releases_are_understood(kernels: Any, generator: torch.Generator) -> None:
    """SGLang before 0.5.20 passes no scales, before 0.5.19 not whether order counts."""
    caches = Caches.random(generator, torch.float32)
    q, new, starts = torch.randn(4, 6, 8, generator=generator), torch.ones(4).int(), torch.arange(4)
    plain = tuple(PLAIN.values())
    after = (caches.table, caches.rows, caches.lengths)
    outs = [torch.empty_like(q) for _ in range(4)]
    for scales, out in zip(((), (1.0, 1.0)), outs[:2], strict=True):
        kernels.torch.ops.sgl_kernel.extend_attention_cpu(
            q, None, None, out, caches.k, caches.v, *scales, *after, new, starts, 1, 0.3, *plain, None
        )
    key, value = (cache[caches.table[caches.rows, caches.lengths - 1].long()] for cache in (caches.k, caches.v))
    slots = caches.table[caches.rows, caches.lengths - 1].long()
    for scales, out in zip(((), (1.0, 1.0)), outs[2:], strict=True):
        kernels.torch.ops.sgl_kernel.decode_attention_cpu(
            q, caches.k, caches.v, *scales, out, key, value, slots, q, *after, 0.3, *plain
        )
    assert all(torch.equal(outs[0], out) for out in outs)  # one new row sees what a decoded one sees


@pytest.mark.parametrize("change", [{"logit_cap": 30.0}, {"sliding_window": 128}, {"is_cross_attn": True}])
def test_other_attention_is_refused(kernels: Any, change: dict[str, Any]) -> None:
    caches = Caches.random(torch.Generator().manual_seed(0), torch.float32)
    q = torch.zeros(4, 6, 8)
    with pytest.raises(NotImplementedError, match="plain attention only"):
        kernels.decode_attention_cpu(
            q, caches.k, caches.v, 1.0, 1.0, q, None, None, caches.rows, q, caches.table, caches.rows, caches.lengths,
            0.3, **(PLAIN | change),
        )  # fmt: skip


def test_other_tree_masks_are_refused(kernels: Any) -> None:
    tree = grown_tree(torch.Generator().manual_seed(0), 1, 2, 3)
    with pytest.raises(NotImplementedError, match="mode 1 only, not 0"):
        linked(lambda *args: kernels.build_tree_kernel_efficient_cpu(*args, 0), [tree], torch.tensor([4]), 1, 2, 3)
