"""A Transformers causal LM in this process: loaded, its taps hooked, and both checked on a real input."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay.capture.target_check import TransformersCalls
from replay.capture.target_files import TargetFiles
from replay.errors import CaptureError, UsageError
from replay.traces.fields import some
from replay.traces.taps import EMBED, FINAL, tap_index, tap_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(slots=True)
class LocalTarget:
    """A loaded target and the rows its hooks last saw."""

    model: Any  # transformers.PreTrainedModel, whose stubs know too little of what it holds
    decoder: Any
    layers: "nn.ModuleList"
    lm_head: Any
    embed_weight: "Tensor"  # [V, H]
    eos_ids: frozenset[int]
    device: "torch.device"
    cache_argument: str
    _seen: "dict[str, Tensor]" = field(default_factory=dict)

    def new_cache(self) -> Any:
        """An empty key-value cache of the target's own kind."""
        from transformers import DynamicCache

        return DynamicCache(config=self.decoder.config)

    def forward(
        self, ids_BS: "Tensor", mask_BM: "Tensor", positions_BS: "Tensor", cache: Any | None
    ) -> "dict[str, Tensor]":
        """Run the decoder; the rows [B, S, width] of the taps now recorded, and of ``final`` always.

        M counts the keys so far, padding and these S included; the cache (None: no cache) is extended in place.
        """
        self._seen.clear()
        extra = {} if cache is None else {self.cache_argument: cache}
        out = self.decoder(
            input_ids=ids_BS, attention_mask=mask_BM, position_ids=positions_BS, use_cache=cache is not None, **extra
        )
        return {**self._seen, FINAL: out.last_hidden_state}

    @contextmanager
    def recording(self, taps: Sequence[str]) -> Iterator[None]:
        """While open, forward() also gives these taps: R[i] is the input of layer i, R[N] the output of the last."""
        handles = []
        try:
            for name in taps:
                index = tap_index(name)
                if index is None:
                    continue  # final is the decoder's own result
                if index < len(self.layers):
                    handles.append(
                        self.layers[index].register_forward_pre_hook(self._keep_input(name), with_kwargs=True)
                    )
                else:
                    handles.append(self.layers[-1].register_forward_hook(self._keep_output(name)))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._seen.clear()

    def _keep_input(self, name: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A copy: a layer may add to its input in place.
            self._seen[name] = (args[0] if args else kwargs["hidden_states"]).clone()

        return hook

    def _keep_output(self, name: str) -> Callable[[Any, Any, Any], None]:
        def hook(_: Any, __: Any, output: Any) -> None:
            self._seen[name] = (output[0] if isinstance(output, tuple) else output).clone()

        return hook

    @property
    def lm_head_weight(self) -> "Tensor | None":
        """[V, H], or None where it is the embedding itself."""
        weight: Tensor = self.lm_head.weight
        return None if weight.data_ptr() == self.embed_weight.data_ptr() else weight


def load_target(files: TargetFiles, *, dtype: str, device: str) -> LocalTarget:
    """Read the weights (safetensors only). Raises CaptureError where the checkpoint or its form is not supported."""
    import torch
    from transformers import AutoModelForCausalLM

    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    torch_device = _device(device)
    with TransformersCalls(files.folder):
        with _quiet_loading():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                files.folder, dtype=dtype if dtype == "auto" else getattr(torch, dtype), use_safetensors=True,
                trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
        model, told = loaded
        _check_whole(files.folder, told)
        model.to(torch_device).eval()
    use_fast_products(model)
    return _dissect(model, files, torch_device)


def use_fast_products(model: Any) -> None:
    """Let the model's linear layers take products in fp32 where this CPU has no kernels for their dtype."""
    from torch import nn

    from replay import narrow_products

    for module in model.modules():
        if type(module) is nn.Linear and not narrow_products.has_kernels(module.weight.dtype):
            vars(module)["forward"] = partial(_multiply, module)


def _multiply(module: "nn.Linear", x: "Tensor") -> "Tensor":
    from replay import narrow_products

    return narrow_products.linear(x, module.weight, module.bias)


def _check_whole(folder: Path, told: Mapping[str, Any]) -> None:
    """Raises CaptureError for weights that are not there or do not fit, which Transformers would make up."""
    odd = {str(one[0] if isinstance(one, tuple) else one) for one in told.get("mismatched_keys") or ()}
    if odd:
        raise CaptureError(
            f"{folder}: the weights {some(sorted(odd))} have other shapes than config.json says: mend it, or give "
            "--model another checkpoint"
        )
    if lacking := sorted(told.get("missing_keys") or ()):
        raise CaptureError(
            f"{folder} lacks the weights {some(lacking)}, which config.json calls for: give --model a whole checkpoint"
        )


def _device(name: str) -> "torch.device":
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"--device {name} cannot be used ({reason}): type auto, cpu or cuda:0") from error
    return device


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Without Transformers' own progress bar and tables, which would run into the caller's lines."""
    import transformers

    logging: Any = transformers.utils.logging
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)  # what its tables say is refused
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def _dissect(model: Any, files: TargetFiles, device: "torch.device") -> LocalTarget:
    from torch import nn

    decoder = model.get_decoder()
    found = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == files.layers]
    if len(found) != 1:
        raise CaptureError(
            f"{type(decoder).__name__} has {len(found)} lists of {files.layers} layers where one was looked for: "
            "its residual stream cannot be tapped in process; capture it from an SGLang server (--server)"
        )
    lm_head, embed = model.get_output_embeddings(), model.get_input_embeddings()
    if lm_head is None or getattr(lm_head, "bias", None) is not None:
        raise CaptureError(
            f"{type(model).__name__} has {'no lm_head' if lm_head is None else 'an lm_head with a bias'}, which a "
            "trace cannot hold: give --model a causal LM whose logits are lm_head(final)"
        )
    arguments = inspect.signature(decoder.forward).parameters
    cache = next((name for name in ("cache", "past_key_values") if name in arguments), None)
    if cache is None:
        raise CaptureError(f"{type(decoder).__name__} takes no key-value cache: give --model a transformer decoder")
    return LocalTarget(model, decoder, found[0], lm_head, embed.weight, files.eos_ids, device, cache)


def check_target(target: LocalTarget, prompt_ids: Sequence[int]) -> bool:
    """Hold the hooks against ``output_hidden_states=True`` on a real input [L]; True when R[0] is embed_weight[ids].

    In one pass R[i] must be hidden_states[i] for i < N bit for bit, and R[N] what a final norm turns into the last of
    them; the logits must be lm_head(final), with no scaling or soft cap behind it. Raises CaptureError otherwise.
    """
    import torch

    count = len(target.layers)
    ids = torch.tensor([list(prompt_ids)], device=target.device)
    mask, positions = torch.ones_like(ids), torch.arange(ids.shape[1], device=target.device)[None]
    norms: list[tuple[Any, Any]] = []
    handles = [child.register_forward_hook(_keep_pass(norms)) for child in target.decoder.children()]
    try:
        with torch.inference_mode(), target.recording([tap_name(i) for i in range(count + 1)]):
            full = target.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, output_hidden_states=True, use_cache=False
            )
            seen = dict(target._seen)
            final = target.forward(ids, mask, positions, None)[FINAL]
            logits = target.lm_head(final)
            lookup = torch.nn.functional.embedding(ids, target.embed_weight)
    finally:
        for handle in handles:
            handle.remove()
    states = full.hidden_states
    if len(states) != count + 1:
        raise CaptureError(
            f"the target gives {len(states)} hidden states for {count} layers: it cannot be tapped in process"
        )
    wrong = [tap_name(i) for i in range(count) if not torch.equal(seen[tap_name(i)], states[i])]
    if not any(torch.equal(out, states[count]) and torch.equal(seen[tap_name(count)], into) for into, out in norms):
        wrong.append(tap_name(count))
    if not _near(final, states[count]):
        wrong.append(FINAL)
    if wrong:
        raise CaptureError(
            f"the target's hidden_states are not what its layers take and give (taps {', '.join(wrong)} differ): "
            "it cannot be tapped in process; capture it from an SGLang server (--server)"
        )
    if not _near(logits, full.logits):
        raise CaptureError(
            f"{type(target.model).__name__} scales or caps its logits after lm_head, which a trace cannot hold: "
            "give --model a target whose logits are lm_head(final)"
        )
    return torch.equal(seen[EMBED], lookup)


def _keep_pass(kept: list[tuple[Any, Any]]) -> Callable[[Any, tuple[Any, ...], Any], None]:
    def hook(_: Any, args: tuple[Any, ...], output: Any) -> None:
        import torch

        if args and isinstance(args[0], torch.Tensor) and isinstance(output, torch.Tensor):
            kept.append((args[0], output))

    return hook


def _near(a: "Tensor", b: "Tensor") -> bool:
    """Equal but for rounding: two passes over the same input may run in another order."""
    import torch

    tolerance = {torch.float32: 1e-4, torch.float16: 2e-3}.get(a.dtype, 1.6e-2)
    return bool((a.float() - b.float()).abs().max() <= tolerance * b.float().abs().max())
