"""The CPU functions of ``sgl_kernel`` that SGLang 0.5.23 calls for EAGLE-3 on a Llama-like target, in plain torch.

SGLang's CPU build of this package is not on PyPI. Each function here restates one of its kernels, from the call in
SGLang's own source and from the Triton kernel which does the same on a GPU; both are named as paths inside the
``sglang`` package. Names and order of parameters are SGLang's. Results go where SGLang wants them: most functions
fill a tensor that the caller made.

What is not restated stays absent, so that SGLang stops with the missing name. ``convert_weight_packed`` must stay
absent: without it ``cpu_has_amx_support()`` is false, and every norm, activation, rotation and linear layer takes
SGLang's own torch code.

Shape suffixes: B requests, T rows of all requests together, N heads, M key-value heads, H features per head,
L key slots, D draft tokens of a request (its verify rows), W width of a table row.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

QLEN_ONLY = 1  # TreeMaskMode.QLEN_ONLY in kernels/ops/speculative/spec_tree.py


def attend(q_TNH: Tensor, k_LMH: Tensor, v_LMH: Tensor, scaling: float, seen_TL: Tensor | None) -> Tensor:
    """Softmax attention [T, N, H] of one request in fp32, cast back to the dtype of ``q_TNH``.

    N is a multiple of M: query head n reads key-value head n // (N / M). ``seen_TL`` is true where a row may look;
    None lets every row look everywhere.
    """
    rows, heads, width = q_TNH.shape
    kv_heads = k_LMH.shape[1]
    group = heads // kv_heads
    # The query heads of one key-value head form the rows of one product.
    q_MRH = q_TNH.float().view(rows, kv_heads, group, width).permute(1, 2, 0, 3).flatten(1, 2)
    scores_MRL = torch.bmm(q_MRH, k_LMH.float().permute(1, 2, 0)) * scaling
    if seen_TL is not None:
        scores_MRL.masked_fill_(~seen_TL.repeat(group, 1), float("-inf"))
    out_MRH = torch.bmm(scores_MRL.softmax(dim=-1), v_LMH.float().transpose(0, 1))
    return out_MRH.view(kv_heads, group, rows, -1).permute(2, 0, 1, 3).flatten(1, 2).to(q_TNH.dtype)


def decode_attention_cpu(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scaling: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One query row per request: stores its key and value at slot ``loc``, then attends to the request's slots.

    ``query`` [B, N, H], ``key`` and ``value`` [B, M, H] or flat, caches [slots, M, H], ``output`` [B, N, H] is filled.
    Called by srt/layers/attention/intel_amx_backend.py ``forward_decode``; ``attn_logits`` is the real kernel's
    scratch space.
    """
    _refuse_other_attention(k_scale, v_scale, logit_cap, is_cross_attn, sliding_window, sinks)
    if key is not None and value is not None:
        k_cache[loc] = key.reshape(-1, *k_cache.shape[1:])
        v_cache[loc] = value.reshape(-1, *v_cache.shape[1:])
    for row, (pool, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots_L = req_to_token[pool, :length].long()
        output[row : row + 1] = attend(query[row : row + 1], k_cache[slots_L], v_cache[slots_L], scaling, None)


def extend_attention_cpu(
    q_extend: Tensor,
    k_extend: Tensor | None,
    v_extend: Tensor | None,
    o_extend: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    scaling: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """The last ``extend_seq_lens[b]`` rows of each request attend to its ``seq_lens[b]`` slots.

    ``q_extend`` [T, N, H], caches [slots, M, H], ``o_extend`` [T, N, H] is filled. The new rows' keys and values are
    ``k_extend`` and ``v_extend``, or where these are None in the caches: DeepSeek's attention prefills a prompt with
    the keys and values of every head, which it never stores (srt/models/deepseek_common/attention_forward_methods/
    forward_mha.py), and its cache holds latents. Values may be narrower than keys. Everything before the new rows is
    seen; among them ``tree_mask`` (B matrices [D, D] one after the other) says who sees whom, otherwise order does.
    Called by srt/layers/attention/intel_amx_backend.py ``forward_extend``; the GPU twin is
    kernels/ops/attention/extend_attention.py.
    """
    _refuse_other_attention(k_scale, v_scale, logit_cap, is_cross_attn, sliding_window, sinks)
    if not is_causal:
        raise NotImplementedError("the CPU rig attends causally only")
    pools, lengths = req_pool_indices.tolist(), seq_lens.tolist()
    new, starts = extend_seq_lens.tolist(), extend_start_loc.tolist()
    mask_start = 0
    for pool, length, rows, start in zip(pools, lengths, new, starts, strict=True):
        if tree_mask is None:
            among_TT = torch.ones(rows, rows, dtype=torch.bool).tril()
        else:
            among_TT = tree_mask.view(-1)[mask_start : mask_start + rows * rows].view(rows, rows).bool()
            mask_start += rows * rows
        seen_TL = torch.cat([torch.ones(rows, length - rows, dtype=torch.bool), among_TT], dim=1)
        q_TNH, before = q_extend[start : start + rows], length if k_extend is None else length - rows
        slots_L = req_to_token[pool, :before].long()
        k_LMH, v_LMH = k_cache[slots_L], v_cache[slots_L]
        if k_extend is not None and v_extend is not None:
            k_TMH = k_extend[start : start + rows].reshape(rows, -1, q_TNH.shape[-1])
            v_TMH = v_extend[start : start + rows].reshape(rows, -1, o_extend.shape[-1])
            # Without rows before, a cache of latents is of no shape that these could be joined to.
            k_LMH, v_LMH = (torch.cat([k_LMH, k_TMH]), torch.cat([v_LMH, v_TMH])) if before else (k_TMH, v_TMH)
        o_extend[start : start + rows] = attend(q_TNH, k_LMH, v_LMH, scaling, seen_TL)


def _refuse_other_attention(
    k_scale: float, v_scale: float, logit_cap: float, is_cross_attn: bool, sliding_window: int, sinks: Tensor | None
) -> None:
    if is_cross_attn or sinks is not None or logit_cap or sliding_window > 0 or (k_scale, v_scale) != (1.0, 1.0):
        raise NotImplementedError(
            "the CPU rig has plain attention only: no cross attention, sinks, logit cap, window or scaled cache"
        )


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Writes the slots of ``out_cache_loc``, request after request, to ``req_to_token[pool, start:end]``.

    Restates ``assign_req_to_token_pool`` of srt/mem_cache/allocation.py.
    """
    taken = 0
    for pool, start, end in _spans(req_pool_indices, start_offset, end_offset):
        req_to_token[pool, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Fills ``out_cache_loc``, request after request, with ``req_to_token[pool, start:end]``.

    Restates ``assign_extend_cache_locs`` of kernels/ops/speculative/cache_locs.py.
    """
    filled = 0
    for pool, start, end in _spans(req_pool_indices, start_offset, end_offset):
        out_cache_loc[filled : filled + end - start] = req_to_token[pool, start:end]
        filled += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    speculative_num_steps: int,
) -> None:
    """Fills ``out_cache_loc`` with the ``topk * speculative_num_steps`` slots after each request's committed ones.

    Restates ``assign_draft_cache_locs_contiguous`` of kernels/ops/speculative/cache_locs.py.
    """
    width = topk * speculative_num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, seq_lens + width, out_cache_loc, pool_len)


def _spans(req_pool_indices: Tensor, start_offset: Tensor, end_offset: Tensor) -> list[tuple[int, int, int]]:
    return list(zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True))


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    speculative_num_steps: int,
    pool_len: int,
) -> Tensor:
    """Slot table [B*topk, pool_len]: row b*topk + c holds request b's committed slots, then those of its branch c.

    Branch c of a request owns the slots from ``seq_lens + c * speculative_num_steps`` on. Called by
    srt/layers/attention/intel_amx_backend.py ``IntelAMXMultiStepDraftBackend``; the GPU twin is
    ``generate_draft_decode_kv_indices`` of kernels/ops/speculative/cache_locs.py with page size 1.
    """
    table = req_to_token.new_zeros(seq_lens.numel() * topk, pool_len)
    for row, (pool, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        branches = req_to_token[pool, length : length + topk * speculative_num_steps].view(topk, -1)
        here = table[row * topk : (row + 1) * topk]
        here[:, :length] = req_to_token[pool, :length]
        here[:, length : length + speculative_num_steps] = branches
    return table


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Links the draft tokens that were kept for verification into one tree per request.

    Node 0 is the last committed token; node i is the candidate ``selected_index[b, i-1]``, rising. Candidates come in
    groups of ``topk`` with one parent each: group 0 hangs on node 0, the parent of group g > 0 is the candidate
    ``parent_list[b, g]``; where that one was not kept, the node is left out of the lists and sees itself and node 0.
    Filled: ``tree_mask`` (B matrices [D, D]: whom a node sees, itself and its ancestors),
    ``positions`` (committed length + depth), ``retrieve_index`` (row of the node among all requests' rows),
    ``retrieve_next_token`` (first child) and ``retrieve_next_sibling``, both -1 where there is none.
    Restates ``sgl_build_tree_kernel_efficient_triton`` of kernels/ops/speculative/spec_tree.py in mode QLEN_ONLY.
    """
    if tree_mask_mode != QLEN_ONLY:
        raise NotImplementedError(f"the CPU rig builds tree masks of mode {QLEN_ONLY} only, not {tree_mask_mode}")
    requests, nodes = verified_seq_len.numel(), draft_token_num
    masks_BDD = tree_mask[: requests * nodes * nodes].view(requests, nodes, nodes)
    positions_BD = positions.view(requests, nodes)
    retrieve_index.copy_(torch.arange(requests * nodes).view(requests, nodes))
    for request in range(requests):
        parents = _parents(selected_index[request].tolist(), parent_list[request].tolist(), topk)
        committed = int(verified_seq_len[request])
        first_child, next_sibling, last_child = [-1] * nodes, [-1] * nodes, [-1] * nodes
        sees = torch.eye(nodes, dtype=torch.bool)
        for node in range(1, nodes):
            parent = parents[node]
            sees[node, 0] = True
            if parent == -1:
                continue  # in no list of children
            sees[node] |= sees[parent]  # a parent stands before its children
            if last_child[parent] == -1:
                first_child[parent] = node
            else:
                next_sibling[last_child[parent]] = node
            last_child[parent] = node
        masks_BDD[request] = sees
        positions_BD[request] = committed + sees.sum(dim=1) - 1
        retrieve_next_token[request] = torch.tensor(first_child)
        retrieve_next_sibling[request] = torch.tensor(next_sibling)


def _parents(selected: list[int], parent_list: list[int], topk: int) -> list[int]:
    """The parent node of each node of a tree, -1 where it was not kept; node 0 is its own."""
    node_of = {candidate: node for node, candidate in enumerate(selected, start=1)}
    groups = [candidate // topk for candidate in selected]
    return [0, *(0 if group == 0 else node_of.get(parent_list[group], -1) for group in groups)]


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walks each request's tree along the target's choices.

    From node 0 the walk goes to the child whose token ``candidates[b, child]`` equals the target's choice
    ``target_predict[b, node]`` after the node, and ends where no child does. Filled: ``accept_index`` [B, most nodes
    of a path] with the rows of the path, ``accept_token_num`` with its length without node 0, ``predicts`` (flat
    over all rows) with the target's choice at each row of the path; other entries stay as they are.
    Restates ``verify_tree_greedy_kernel_triton`` of kernels/ops/speculative/spec_tree.py.
    """
    longest = accept_index.shape[1]
    for request in range(candidates.shape[0]):
        rows, tokens = retrive_index[request].tolist(), candidates[request].tolist()
        first_child, next_sibling = retrive_next_token[request].tolist(), retrive_next_sibling[request].tolist()
        choices = target_predict[request].tolist()
        path = [0]
        while len(path) < longest:
            child = first_child[path[-1]]
            while child != -1 and tokens[child] != choices[path[-1]]:
                child = next_sibling[child]
            if child == -1:
                break
            path.append(child)
        accept_token_num[request] = len(path) - 1
        for place, node in enumerate(path):
            accept_index[request, place] = rows[node]
            predicts[rows[node]] = choices[node]


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """``bonus_tokens[b]`` = the last of the ``accept_lens[b]`` tokens in row b of ``accept_tokens`` [B, stride], flat.

    Restates ``fill_bonus_tokens`` of kernels/ops/speculative/eagle.py.
    """
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens[: accept_lens.numel()] = accept_tokens.view(-1)[last]


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Packs the slots of the accepted rows to the front; ``accept_index`` holds -1 where nothing was accepted.

    Restates ``fill_accept_out_cache_loc`` of kernels/ops/speculative/eagle.py.
    """
    rows = accept_index.view(-1)
    rows = rows[rows != -1].long()
    accept_out_cache_loc[: rows.numel()] = out_cache_loc[rows]


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copies slots ``src_loc`` to ``tgt_loc`` in every buffer, as if all were read before any is written.

    ``data_ptrs`` holds the address of each layer's buffer, ``strides`` the bytes of one of its slots.
    Restates ``copy_all_layer_kv_cache_tiled`` of kernels/ops/kvcache/cache_move.py.
    """
    if tgt_loc.numel() == 0:
        return
    source, goal = src_loc.long(), tgt_loc.long()
    slots = 1 + int(torch.maximum(source.max(), goal.max()))
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * stride)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(slots, stride)
        buffer[goal] = buffer[source]


def _scaled(kernel: Callable[..., None], place: int) -> Callable[..., None]:
    """The kernel for SGLang before 0.5.20 too, which passes no scales of the cache: they stand at ``place``."""

    def called(*given: Any) -> None:
        scales = (1.0, 1.0) if isinstance(given[place], Tensor) else ()
        kernel(*given[:place], *scales, *given[place:])

    return called


# SGLang finds these two through torch's registry of operators; the others it imports from here.
torch.ops.sgl_kernel.decode_attention_cpu = _scaled(decode_attention_cpu, 3)
torch.ops.sgl_kernel.extend_attention_cpu = _scaled(extend_attention_cpu, 6)
