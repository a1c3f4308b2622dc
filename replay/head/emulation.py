"""A head's tensors under a precision: its weights once, its inputs, features, keys, values and logits as they pass.

Where inputs are quantised, the product of the two grids is taken in fp32 and rounded once, as kernels accumulate it;
where only weights are, they are unpacked into the head's dtype first, as weight-only kernels do. q, k and v, and gate
and up, are one product in a server: they share its input, and a scale per tensor spans them all.

Suffixes as in model.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from replay.checkpoint.config import HeadConfig
from replay.checkpoint.nextn import ROUTING_BIAS
from replay.checkpoint.tensor_table import LATENT_KV_B, NOT_LINEAR, linear_names
from replay.engines.layer_names import fused_name
from replay.engines.precision import Format, Precision, Scheme
from replay.engines.profiles import PRECISIONS, EngineProfile
from replay.head.held import Held, aligned
from replay.head.products import Execution, ProductSizes, multiply
from replay.head.quantise import LARGEST, largest_magnitude, quantise, quantise_weight

_NOT_FINITE = "rows of logits are not finite (there argmax drafts the first NaN, as in a server)"
_OF_DTYPE = {dtype: name for name, dtype in PRECISIONS.items()}


@dataclass(frozen=True, slots=True)
class _Product:
    """What one product takes in: the inputs' format, and the dtype in which it is summed."""

    entering: Format | None
    dtype: torch.dtype


class Emulation:
    """The precision of one head, and what it did to the numbers that they cannot bear."""

    def __init__(self, precision: Precision, config: HeadConfig, profile: EngineProfile, dtype: torch.dtype) -> None:
        """``dtype`` is what the head runs in. A format that is this dtype's own grid changes nothing and is dropped."""
        self._precision, self._dtype, self._config = precision, dtype, config
        self._schemes: dict[str, Scheme] = {}
        self._kept = (*profile.unquantised, LATENT_KV_B)
        self._features, self._kv = self._needed(precision.features), self._needed(precision.kv)
        logits = precision.logits
        self.logits_dtype = dtype if logits is None else getattr(torch, PRECISIONS[logits.grid])
        self._products = self._plan_products()
        # To look reads every number once more, and in fp32 and bf16 nothing overflows that was finite in the trace.
        self._looks = dtype == torch.float16 or bool(precision.rules or precision.features or precision.kv)
        # Whether it happened stays on the device until somebody asks: to read it would wait for all that was started
        # there. How often depends on the passes that variants share, and on who else replays.
        self._of_weights: dict[str, Tensor] = {}
        self._in_passes: dict[str, Tensor] = {}
        self._short_groups: list[str] = []

    def _needed(self, form: Format | None) -> Format | None:
        own = form is not None and form.is_dtype and getattr(torch, PRECISIONS[form.grid]) == self._dtype
        return None if own else form

    def _plan_products(self) -> dict[str, _Product]:
        planned: dict[str, _Product] = {}
        for name in linear_names(self._config):
            scheme = self._precision.scheme(name, self._kept)
            scheme = Scheme(self._needed(scheme.weight), self._needed(scheme.input))
            self._schemes[name] = scheme
            wide = scheme.input is not None or (scheme.weight is not None and scheme.weight.is_dtype)
            wide |= name == "lm_head" and self.logits_dtype != self._dtype
            dtype = torch.promote_types(torch.float32, self._dtype) if wide else self._dtype
            earlier = planned.get(fused_name(name))
            if earlier is not None:
                dtype = torch.promote_types(dtype, earlier.dtype)
            planned[fused_name(name)] = _Product(scheme.input, dtype)
        return planned

    # ---- once ----

    def weights(self, tensors: Mapping[str, Tensor], device: torch.device, held: Held) -> dict[str, Tensor]:
        """The checkpoint's tensors but vocabulary maps and embedding, ready to run on ``device``."""
        names = [name for name in tensors if name.removesuffix(".weight") not in NOT_LINEAR]
        together: dict[tuple[str, Format], list[str]] = {}
        for name in names:
            form = self._form(name)
            if form is not None and form.scaling == "tensor":
                together.setdefault((fused_name(name.removesuffix(".weight")), form), []).append(name)
        groups = {name: [tensors[part] for part in group] for group in together.values() for name in group}
        return {name: self.weight(name, tensors[name], device, held, groups.get(name, ())) for name in names}

    def weight(
        self, name: str, weight: Tensor, device: torch.device, held: Held, together: Sequence[Tensor] = ()
    ) -> Tensor:
        """One tensor ready to run: the one copy that is made of it, none where it is as the head runs already (and, in
        fp32, ``aligned``) or ``held`` has it. A scale per tensor spans all that are ``together`` (none: this alone).
        """
        if name.endswith(ROUTING_BIAS):
            return weight.to(device)
        product = self._products.get(fused_name(name.removesuffix(".weight"))) if name.endswith(".weight") else None
        dtype = self._dtype if product is None else product.dtype
        form = self._form(name)
        if form is not None:
            self._note_short_group(name, weight.shape[-1], form)
            self._note_beyond(self._of_weights, name, weight, form)
            how = (form, dtype, device, *map(id, together))
            return held.ready(weight, how, lambda: _quantised(weight.to(device), form, dtype, together))
        cast = weight.to(device=device, dtype=self._dtype) if self._dtype == torch.float16 else weight
        if self._dtype == torch.float16:
            infinite = cast.isinf() & ~weight.to(device).isinf()
            _note(self._of_weights, f"values of {name} became infinite in fp16", infinite)
        how = (self._dtype, dtype, device)
        return held.ready(weight, how, lambda: aligned(cast.to(device=device, dtype=self._dtype).to(dtype)))

    def _note_short_group(self, name: str, inputs: int, form: Format) -> None:
        if form.scaling.startswith("g") and inputs % int(form.scaling[1:]):
            self._short_groups.append(f"{name} {inputs}")

    def _form(self, name: str) -> Format | None:
        """The format of a tensor by its name in the checkpoint."""
        if not name.endswith(".weight"):
            return None
        layer = name.removesuffix(".weight")
        scheme = self._schemes.get(layer) or self._precision.scheme(layer, self._kept)
        return self._needed(scheme.weight)

    # ---- as they pass ----

    def embedding(self, rows_RE: Tensor) -> Tensor:
        """Looked-up rows of the embedding; each row of the table has a scale of its own, whatever ``scaling`` says."""
        form = self._form("embed_tokens.weight")
        if form is not None:
            scaling = "channel" if form.scaling == "tensor" else form.scaling
            rows_RE = quantise(rows_RE, replace(form, scaling=scaling))
        return rows_RE.to(self._dtype)

    def features(self, features_RKD: Tensor) -> Tensor:
        """Features as they are handed over: each tap of a row has a scale of its own."""
        out_RKD = features_RKD
        if self._features is not None:
            self._note_beyond(self._in_passes, "the features", features_RKD, self._features)
            taps = features_RKD.unflatten(-1, (-1, self._config.target_hidden_size))
            out_RKD = quantise(taps, self._features).flatten(-2)
        out_RKD = out_RKD.to(self._dtype)
        self._note_overflow("the features", features_RKD, out_RKD)
        return out_RKD

    def entering(self, product: str, x_RI: Tensor) -> Tensor:
        """The input of a product as its kernel takes it, in the dtype in which it is summed."""
        planned = self._products[product]
        if planned.entering is not None:
            self._note_beyond(self._in_passes, f"the input of {product}", x_RI, planned.entering)
            x_RI = quantise(x_RI, planned.entering)
        return x_RI.to(planned.dtype)

    def leaving(self, product: str, x_RI: Tensor, out_RO: Tensor) -> Tensor:
        """The product's outcome, rounded to what it leaves as."""
        out_RO = out_RO.to(self.logits_dtype if product == "lm_head" else self._dtype)
        if product == "lm_head":
            # A row with NaN has nothing but NaN logits. Where nothing overflows, its input tells that at no cost.
            finite_R = _finite_rows(out_RO if self._looks else x_RI)
            _note(self._in_passes, _NOT_FINITE, ~finite_R)
        self._note_overflow(product, x_RI, out_RO)
        return out_RO

    def stored(self, kv_RMH: Tensor) -> Tensor:
        """Keys or values as the draft KV holds them; every row reads them so.

        SGLang's extend kernels (0.5.23 kernels/ops/attention/extend_attention.py) read the rows of their own pass as
        they were before they were stored.
        """
        if self._kv is None:
            return kv_RMH
        self._note_beyond(self._in_passes, "keys and values", kv_RMH, self._kv)
        return quantise(kv_RMH, self._kv).to(kv_RMH.dtype)

    # ---- notes ----

    def _note_beyond(self, notes: dict[str, Tensor], what: str, x: Tensor, form: Format) -> None:
        if form.is_dtype:
            infinite = x.to(getattr(torch, PRECISIONS[form.grid])).isinf() & ~x.isinf()
            _note(notes, f"values of {what} became infinite in {form.grid}", infinite)
        elif form.fixed is not None:
            top = LARGEST[form.grid] * form.fixed
            _note(notes, f"values of {what} lay beyond {top:g} and were clipped to it in {form.grid}", x.abs() > top)

    def _note_overflow(self, what: str, before_RI: Tensor, after_RO: Tensor) -> None:
        if self._looks:
            dtype = str(after_RO.dtype).removeprefix("torch.")
            said = f"{what} overflowed in {_OF_DTYPE.get(dtype, dtype)}: finite rows became infinite or NaN"
            _note(self._in_passes, said, ~_finite_rows(after_RO) & _finite_rows(before_RI))

    def forget_passes(self) -> None:
        """From here on notes say nothing of the rows that passed before."""
        self._in_passes.clear()

    def notes(self) -> list[str]:
        """That something was clipped or became infinite, and which groups are short, in words; often nothing.

        Not how often, so that it is the same whoever replays with whom; in sorted order.
        """
        said = [what for notes in (self._of_weights, self._in_passes) for what, seen in notes.items() if seen]
        if self._short_groups:
            short = ", ".join(sorted(self._short_groups))  # whatever order a worker has the tensors in
            said.append(
                f"the inputs of {short} are no multiple of the group, whose last one is "
                "shorter, as GPTQ makes it; many kernels refuse such a weight"
            )
        return [f"{self._precision}: {what}" for what in sorted(said)]


@dataclass(frozen=True, slots=True)
class RoundedProducts:
    """Matrix products of a head, by the name of the layer that servers run them as."""

    emulation: Emulation
    execution: Execution

    def __call__(
        self, name: str, x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, sizes: ProductSizes | None
    ) -> Tensor:
        """Input [R, I], weight [O, I] as ``Emulation.weight`` made it, bias [O] or None; [R, O]."""
        entering_RI = self.emulation.entering(name, x_RI)
        bias_O = None if bias_O is None else bias_O.to(entering_RI.dtype)
        out_RO = multiply(entering_RI, weight_OI, bias_O, self.execution, sizes)
        return self.emulation.leaving(name, x_RI, out_RO)


def _quantised(weight: Tensor, form: Format, dtype: torch.dtype, together: Sequence[Tensor]) -> Tensor:
    largest = torch.stack([largest_magnitude(one) for one in together]).max() if together else None
    return quantise_weight(weight, form, dtype, None if largest is None else largest.to(weight.device))


def _note(notes: dict[str, Tensor], what: str, found: Tensor) -> None:
    """Note ``what`` if any of ``found`` is true; no synchronisation with a GPU."""
    seen, earlier = found.any(), notes.get(what)
    notes[what] = seen if earlier is None else seen | earlier.to(seen.device)


def _finite_rows(x_RN: Tensor) -> Tensor:
    """Which rows hold finite values only: 0 times anything else is NaN. To ask ``isfinite`` takes ten times as long."""
    return (x_RN * 0).sum(-1) == 0
