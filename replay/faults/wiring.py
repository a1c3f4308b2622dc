"""Faults of what is fed to the head: taps, their order and stage, norms, the pairing of tokens and features."""

from dataclasses import replace

from replay.checkpoint.tensor_table import expected_tensors
from replay.engines.wiring import Wiring, default_wiring
from replay.errors import CheckpointError, UsageError, WiringError
from replay.faults.change import Change, Subject, behave, choice, number_of, positive_number
from replay.traces.taps import tap_index, tap_name

_NORMS = ("input_norm", "fc_norm", "hidden_norm", "input_layernorm", "post_attention_layernorm", "norm")
_LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
_QK_NORMS = ("q_norm", "k_norm")
_NEXTN_NORMS = ("enorm", "hnorm")


# ---- wiring ----


def aux_layer_id(value: str) -> Change:
    possible = "a number to add to every R index (1, -1), SLOT:N for one slot, or default"
    if value == "default":
        return lambda subject: replace(subject, wiring=default_wiring(subject.layers))
    slot_text, _, shift_text = value.rpartition(":")
    shift = number_of("wiring.aux-layer-id", shift_text, possible)
    slot = number_of("wiring.aux-layer-id", slot_text, possible, least=0) if slot_text else None

    def change(subject: Subject) -> Subject:
        taps = subject.wiring.taps
        if slot is not None and slot >= len(taps):
            raise UsageError(f"wiring {subject.wiring} has slots 0 to {len(taps) - 1}; type another slot than {slot}")
        moved = [tap if slot not in (None, place) else _moved(tap, shift, subject) for place, tap in enumerate(taps)]
        if tuple(moved) == taps:
            raise UsageError(
                f"wiring {subject.wiring} is the same with wiring.aux-layer-id={value}; move a tap R[k] by 1 or more, "
                "or leave the fault away"
            )
        return replace(subject, wiring=Wiring(tuple(moved)))

    return change


def _moved(tap: str, shift: int, subject: Subject) -> str:
    index = tap_index(tap)
    if index is None:
        return tap  # no id stands for the stream after the final norm
    if not 0 <= index + shift <= subject.layers:
        raise WiringError(
            f"R[{index}] of wiring {subject.wiring} moved by {shift} is R[{index + shift}], possible are R[0] to "
            f"R[{subject.layers}]; type a smaller number"
        )
    return tap_name(index + shift)


def aux_missing(value: str) -> Change:
    slots = None if value == "all" else (number_of("wiring.aux-missing", value, "a slot from 0, or all", least=0),)

    def change(subject: Subject) -> Subject:
        count = len(subject.wiring.taps)
        if slots is not None and slots[0] >= count:
            raise UsageError(f"wiring {subject.wiring} has slots 0 to {count - 1}; type another slot than {slots[0]}")
        return subject.with_behaviour(zero_slots=tuple(range(count)) if slots is None else slots)

    return change


def capture_stage(value: str) -> Change:
    return choice("wiring.aux-capture-stage", value, {"normed": behave(unit_taps=True)})


def concat_order(value: str) -> Change:
    def reverse(subject: Subject) -> Subject:
        if subject.wiring.taps[::-1] == subject.wiring.taps:
            raise UsageError(f"wiring {subject.wiring} is the same in reverse; leave wiring.concat-order=fc away")
        return replace(subject, wiring=Wiring(subject.wiring.taps[::-1]))

    return choice("wiring.concat-order", value, {"qkv": behave(features_first=True), "fc": reverse})


def norm(value: str) -> Change:
    def skip(name: str) -> Change:
        def change(subject: Subject) -> Subject:
            if not _has_norm(subject, name):
                raise CheckpointError(f"draft head {subject.checkpoint.name} has no {name} to leave out; type another")
            return subject.with_behaviour(skip_norms=(*subject.behaviour.skip_norms, name))

        return change

    changes: dict[str, Change] = {
        f"skip:{name}": skip(name) for name in (*_NORMS, *_LATENT_NORMS, *_QK_NORMS, *_NEXTN_NORMS)
    }
    other = {"residual": _other_residual, "twice": _twice}
    return choice("wiring.norm", value, {**other, **changes})


def _other_residual(subject: Subject) -> Subject:
    """The stream starts from the state before ``hidden_norm`` where training took the one behind, and the reverse."""
    _needs(subject, "hidden_norm", "wiring.norm=residual")
    return subject.with_behaviour(residual_normed=not subject.config.norm_before_residual)


def _twice(subject: Subject) -> Subject:
    _needs(subject, "hidden_norm", "wiring.norm=twice")
    return subject.with_behaviour(state_normed_twice=True)


def _needs(subject: Subject, norm: str, fault: str) -> None:
    """Raises CheckpointError where the head has no such norm."""
    if not _has_norm(subject, norm):
        raise CheckpointError(f"draft head {subject.checkpoint.name} has no {norm}; leave {fault} away")


def _has_norm(subject: Subject, norm: str) -> bool:
    return any(norm in name.split(".") for name in expected_tensors(subject.config))


def norm_eps(value: str) -> Change:
    eps = positive_number("wiring.norm-eps", value, "a number such as 1e-6")
    return lambda subject: subject.configured(rms_norm_eps=eps)


def recycle_norm(value: str) -> Change:
    def other(subject: Subject) -> Subject:
        return subject.with_behaviour(feedback="pre" if subject.config.norm_output else "post")

    changes = {"other": other, "pre": behave(feedback="pre"), "post": behave(feedback="post")}
    chosen = choice("wiring.recycle-norm", value, changes)

    def change(subject: Subject) -> Subject:
        if not subject.config.last_norm:
            raise CheckpointError(
                f"draft head {subject.checkpoint.name} has no norm behind its layers; leave wiring.recycle-norm away"
            )
        return chosen(subject)

    return change


def multi_layer(value: str) -> Change:
    changes = {
        "input_layernorm": behave(later_norm="input_layernorm"),
        "no-residual": behave(later_residual=False),
    }
    chosen = choice("wiring.multi-layer", value, changes)

    def change(subject: Subject) -> Subject:
        if subject.config.num_layers < 2:
            raise CheckpointError(f"draft head {subject.checkpoint.name} has one layer; wiring.multi-layer needs more")
        if value == subject.config.later_norm:
            raise CheckpointError(
                f"draft head {subject.checkpoint.name} has {value} in later layers already; type "
                "wiring.multi-layer=no-residual"
            )
        return chosen(subject)

    return change


def shift(value: str) -> Change:
    changes = {"token": behave(pairing="own-token"), "features": behave(pairing="earlier-features")}
    return choice("shift.alignment", value, changes)


def stale_row(value: str) -> Change:
    rows = ("anchor", "previous", "first", "last")
    return choice("shift.stale-row", value, {row: behave(stale_rows=row) for row in rows})
