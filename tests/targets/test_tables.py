"""The tables of targets: derived again from the installed SGLang, and held against rows that were read by hand."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.target_tables import SCRIPT, derived, shipped

from replay.targets.rules import (
    NEWEST,
    RELEASES,
    CaptureRule,
    NoRule,
    capture_rule,
    default_graphs,
    has_table,
    recorded_to,
    release_of,
)


def test_the_installed_sglang_gives_the_table() -> None:
    """A class that a new SGLang moves is named. Make the table again (scripts/targets/derive.py), read what changed."""
    new, old = derived(), shipped(NEWEST)
    moved = {name: (old.said.get(name), new.said.get(name)) for name in {*old.said, *new.said}}
    assert {name: both for name, both in moved.items() if both[0] != both[1]} == {}
    assert new.document == old.document


@pytest.mark.parametrize("release", RELEASES)
def test_a_table_is_of_its_release(release: str) -> None:
    table = shipped(release)
    assert table.document["version"] == release
    assert len(table.names) == sum(len(rule["targets"]) for rule in table.document["rules"]) + len(
        [*table.document["none"], *table.unknown]
    )


# Read by hand in SGLang 0.5.23: how ids and the default list become R indices, what the loop asks for, whether layers
# are marked, whether R[N] is captured, whether into one buffer; the line of the setter and that of the loop.
PLAIN = ("plus one", "verbatim", "list", "none", False, False)
TO_LAST = ("plus one", "verbatim", "list", "none", True, False)
MARKED = ("plus one", "verbatim", "flag", "unchecked", False, False)
DEEPSEEK = ("plus one if the first is 1", "verbatim", "list", "none", False, True)
READ = {
    "LlamaForCausalLM": (*PLAIN, "llama.py:929", "llama.py:486"),
    "Phi3ForCausalLM": (*PLAIN, "llama.py:929", "llama.py:486"),  # an empty subclass
    "InternLM3ForCausalLM": (*PLAIN, "llama.py:929", "llama.py:486"),
    "MistralForCausalLM": (*PLAIN, "llama.py:929", "llama.py:486"),
    "Ministral3ForCausalLM": (*PLAIN, "llama.py:929", "llama.py:486"),  # its own model, of Llama's forward
    "TeleFLMForCausalLM": (*PLAIN, "llama.py:929", "llama.py:486"),  # its forward ends in Llama's
    "Llama4ForCausalLM": (*PLAIN, "llama.py:929", "llama4.py:523"),
    "Llama4ForConditionalGeneration": (*PLAIN, "mllama4.py:971", "llama4.py:523"),
    "Qwen2ForCausalLM": (*PLAIN, "qwen2.py:781", "qwen2.py:456"),
    "Qwen3ForCausalLM": (*PLAIN, "qwen3.py:778", "qwen3.py:524"),
    "Qwen2MoeForCausalLM": (*MARKED, "qwen2_moe.py:1418", "qwen2_moe.py:1188"),
    "Qwen3MoeForCausalLM": (*MARKED, "qwen3_moe.py:1128", "qwen2_moe.py:1188"),
    "Qwen3NextForCausalLM": (*MARKED, "qwen3_next.py:1286", "qwen3_next.py:983"),
    "Qwen3_5ForCausalLM": (*MARKED, "qwen3_5_text.py:150", "qwen3_5.py:1942"),
    "Qwen3_5ForConditionalGeneration": (*MARKED, "qwen3_vl.py:1777", "qwen3_5.py:1942"),
    "Qwen2_5_VLForConditionalGeneration": (*PLAIN, "qwen2_5_vl.py:990", "qwen2.py:456"),
    "Qwen3VLForConditionalGeneration": (*PLAIN, "qwen3_vl.py:1777", "qwen3_vl.py:1230"),
    "Qwen3VLMoeForConditionalGeneration": (  # marks layers, and looks at the list
        "plus one", "verbatim", "list", "unchecked", False, False, "qwen3_vl.py:1777", "qwen3_vl_moe.py:107"),
    "DeepseekV2ForCausalLM": (*DEEPSEEK, "deepseek_v2.py:3458", "deepseek_v2.py:3176"),
    "DeepseekV3ForCausalLM": (*DEEPSEEK, "deepseek_v2.py:3458", "deepseek_v2.py:3176"),
    "DeepseekV32ForCausalLM": (*DEEPSEEK, "deepseek_v2.py:3458", "deepseek_v2.py:3176"),
    "GlmMoeDsaForCausalLM": (*DEEPSEEK, "deepseek_v2.py:3458", "deepseek_v2.py:3176"),
    "MistralLarge3ForCausalLM": (*DEEPSEEK, "deepseek_v2.py:3458", "deepseek_v2.py:3176"),
    "KimiK25ForConditionalGeneration": (*DEEPSEEK, "kimi_k25.py:928", "deepseek_v2.py:3176"),
    "Glm4MoeForCausalLM": (*PLAIN, "glm4_moe.py:1269", "glm4_moe.py:949"),
    "Glm4MoeLiteForCausalLM": (*DEEPSEEK[:5], False, "glm4_moe_lite.py:805", "glm4_moe_lite.py:648"),
    "Glm5NextForConditionalGeneration": (*PLAIN, "glm5_next.py:1533", "glm5_next.py:1176"),
    "GptOssForCausalLM": (
        "verbatim if the largest is N", "verbatim", "list", "none", True, False, "gpt_oss.py:1337", "gpt_oss.py:711"),
    "Gemma3ForCausalLM": (*TO_LAST, "gemma3_causal.py:917", "gemma3_causal.py:655"),
    "Gemma3ForConditionalGeneration": (*TO_LAST, "gemma3_mm.py:543", "gemma3_causal.py:655"),
    "Gemma4ForCausalLM": (*TO_LAST, "gemma4_causal.py:1495", "gemma4_causal.py:1062"),
    "Gemma4ForConditionalGeneration": (*TO_LAST, "gemma4_mm.py:1155", "gemma4_causal.py:1062"),
    "Gemma4UnifiedForConditionalGeneration": (*TO_LAST, "gemma4_mm.py:1155", "gemma4_causal.py:1062"),
    "MiniMaxM2ForCausalLM": (*PLAIN, "minimax_m2.py:1067", "minimax_m2.py:990"),
    "MiniMaxM3SparseForCausalLM": (
        "plus one", "verbatim", "flag", "checked", True, False, "minimax_m3.py:2056", "minimax_m3.py:1932"),
    "MiniMaxM3SparseForConditionalGeneration": (
        "plus one", "plus one", "flag", "checked", True, False, "minimax_m3_vl.py:246", "minimax_m3.py:1932"),
    "BailingMoeV2ForCausalLM": (*PLAIN, "bailing_moe.py:1098", "bailing_moe.py:829"),
    "ExaoneMoEForCausalLM": (*PLAIN, "exaone_moe.py:866", "exaone_moe.py:600"),
    "LongcatFlashForCausalLM": (*PLAIN, "longcat_flash.py:1112", "longcat_flash.py:619"),
    "ApertusForCausalLM": (*PLAIN, "apertus.py:675", "apertus.py:366"),
}  # fmt: skip


@pytest.mark.parametrize("architecture", READ)
def test_a_class_that_was_read_by_hand(architecture: str) -> None:
    rule = capture_rule(architecture)
    assert isinstance(rule, CaptureRule)
    said = (rule.ids, rule.default, rule.captures, rule.flags, rule.last, rule.packed, *rule.where.split())
    assert said == READ[architecture]


# Neither the class nor a base of it has the method: models/ was searched for its name, in 28 files.
NOTHING = """
    Olmo2ForCausalLM OlmoForCausalLM OlmoeForCausalLM Glm4ForCausalLM Glm4vForConditionalGeneration
    Glm4vMoeForConditionalGeneration GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM PhiForCausalLM
    PhiMoEForCausalLM Phi3SmallForCausalLM Phi4MMForCausalLM Ernie4_5_ForCausalLM Ernie4_5_MoeForCausalLM
    Ernie4_5_VLMoeForConditionalGeneration Step3VLForConditionalGeneration Step3p5ForCausalLM HunYuanDenseV1ForCausalLM
    HunYuanMoEV1ForCausalLM HYV3ForCausalLM InternLM2ForCausalLM InternVLChatModel ExaoneForCausalLM Exaone4ForCausalLM
    MiMoForCausalLM MiMoV2ForCausalLM MiMoV2FlashForCausalLM LagunaForCausalLM NemotronHForCausalLM
    Qwen2VLForConditionalGeneration KimiVLForConditionalGeneration KimiLinearForCausalLM KimiK3ForConditionalGeneration
    MixtralForCausalLM Mistral3ForConditionalGeneration DeepseekV4ForCausalLM Gemma2ForCausalLM Lfm2ForCausalLM
    ArceeForCausalLM BailingMoeV2_5ForCausalLM Qwen3OmniMoeForConditionalGeneration StableLmForCausalLM
    TransformersForCausalLM TransformersMoEForCausalLM
""".split()


@pytest.mark.parametrize("architecture", NOTHING)
def test_a_class_that_captures_nothing(architecture: str) -> None:
    rule = capture_rule(architecture)
    assert isinstance(rule, NoRule) and rule.known and rule.registered


# How far a recording inside the server reaches (set_dflash_layers_to_capture): the same loops, also of classes that
# EAGLE-3 has no way to
@pytest.mark.parametrize(
    ("architecture", "last"),
    [("LlamaForCausalLM", 7), ("KimiK25ForConditionalGeneration", 7), ("Qwen3MoeForCausalLM", 7),
     ("GptOssForCausalLM", 8), ("Gemma4ForCausalLM", 8), ("MiMoV2ForCausalLM", 8), ("LagunaForCausalLM", 8),
     ("NemotronHForCausalLM", 8), ("NoSuchForCausalLM", 7)],
)  # fmt: skip
def test_how_far_a_recording_reaches(architecture: str, last: int) -> None:
    assert recorded_to(architecture, 8) == last


@pytest.mark.parametrize(
    ("release", "architecture", "ids", "last"),
    [
        ("0.5.9", "GptOssForCausalLM", "plus one", False),  # gpt_oss.py:1132, :568
        ("0.5.9", "DeepseekV3ForCausalLM", "plus one", False),  # deepseek_v2.py:2975, :2721
        ("0.5.9", "GlmMoeDsaForCausalLM", "plus one", False),
        ("0.5.12", "KimiK25ForConditionalGeneration", "plus one", False),
        ("0.5.12", "Gemma3ForCausalLM", "plus one", True),
        ("0.5.12", "GptOssForCausalLM", "plus one", False),
    ],
)
def test_older_releases_were_read_by_hand_too(release: str, architecture: str, ids: str, last: bool) -> None:
    rule = capture_rule(architecture, release)
    assert isinstance(rule, CaptureRule)
    assert (rule.ids, rule.last, rule.engine) == (ids, last, f"SGLang {release}")


# Read by hand in the wheels: 0.5.14 deepseek_v2.py reads ids by the first one (sgl-project/sglang#25454), 0.5.17 packs
# its captured states (layers/aux_hidden_states.py), 0.5.18 captures MiniMax M3, 0.5.22 the text model of Qwen3.5
@pytest.mark.parametrize(
    ("architecture", "before", "after", "what"),
    [
        ("DeepseekV3ForCausalLM", "0.5.12", "0.5.14", "ids"),
        ("KimiK25ForConditionalGeneration", "0.5.16", "0.5.17", "packed"),
        ("MiniMaxM3SparseForCausalLM", "0.5.17", "0.5.18", "captures"),
        ("Qwen3VLMoeForConditionalGeneration", "0.5.21", "0.5.22", "flags"),
    ],
)
def test_the_release_that_moves_a_rule(architecture: str, before: str, after: str, what: str) -> None:
    old, new = capture_rule(architecture, before), capture_rule(architecture, after)
    assert isinstance(old, CaptureRule) and isinstance(new, CaptureRule)
    assert getattr(old, what) != getattr(new, what)
    changed = {one for one in ("ids", "default", "captures", "flags", "last", "packed")
               if getattr(old, one) != getattr(new, one)}  # fmt: skip
    assert what in changed and len(changed) <= 2


def test_a_llama_is_read_alike_in_every_release() -> None:
    rules = [capture_rule("LlamaForCausalLM", release) for release in RELEASES]
    assert {(rule.ids, rule.default) for rule in rules if isinstance(rule, CaptureRule)} == {("plus one", "verbatim")}
    assert all(isinstance(rule, CaptureRule) for rule in rules)


@pytest.mark.parametrize(
    ("version", "release"), [("0.5.18", "0.5.18"), ("0.5.18.post1", "0.5.18"), ("0.5.13", NEWEST), (None, NEWEST)]
)
def test_the_table_of_a_version(version: str | None, release: str) -> None:
    assert release_of(version) == release and has_table(version) == (version not in ("0.5.13", None))


@pytest.mark.parametrize("architecture", ["KimiK25ForConditionalGeneration", "Gemma3ForCausalLM"])
def test_what_the_oldest_release_does_not_capture(architecture: str) -> None:
    rule = capture_rule(architecture, "0.5.9")
    assert isinstance(rule, NoRule) and rule.known


# ---- the script, on code that was made up ----

CORE = """
class Layer(nn.Module):
    def forward(self, hidden_states, forward_batch, capture_output=None):
        hidden_states = self.attn_boundary.prepare(hidden_states, forward_batch, capture=capture_output)
        return self.mlp(self.self_attn(hidden_states))

class Model(nn.Module):
    def __init__(self, config):
        self.layers = [Layer() for _ in range(config.num_hidden_layers)]
        self.layers_to_capture = []

    def forward(self, hidden_states, forward_batch):
        aux_hidden_states = AuxHiddenStateList()
        for i in range(self.start_layer, self.end_layer):
            hidden_states = self.layers[i](hidden_states, forward_batch,
                capture_output=aux_hidden_states.capture if i in self.layers_to_capture else None)
        if not aux_hidden_states:
            return hidden_states
        return hidden_states, aux_hidden_states
"""
OUTER = """
class Target(nn.Module):
    def __init__(self, config):
        self.model = self._init_model(config)

    def _init_model(self, config):
        return Model(config)

    def forward(self, input_ids):
        hidden_states = self.model(input_ids)
        if self.capture_aux_hidden_states:
            hidden_states, aux_hidden_states = hidden_states
        return self.logits_processor(input_ids, hidden_states, aux_hidden_states)

    def set_eagle3_layers_to_capture(self, layer_ids=None):
        if not self.pp_group.is_last_rank:
            return
        self.capture_aux_hidden_states = True
        if layer_ids is None:
            n = self.config.num_hidden_layers
            self.model.layers_to_capture = [2, n // 2, n - 3]
        else:
            self.model.layers_to_capture = [val + 1 for val in layer_ids]
"""
SUBCLASS = """
from sglang.srt.models.plain import Target

class Child(Target):
    pass

EntryClass = [Child]
"""


def package(folder: Path, source: str = CORE + OUTER, entry: str = "EntryClass = Target\n") -> Path:
    """An SGLang of two files."""
    models = folder / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    (models / "plain.py").write_text(source + entry)
    (models / "child.py").write_text(SUBCLASS)
    (folder / "sglang-9.9.9.dist-info").mkdir()
    (folder / "sglang-9.9.9.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 9.9.9\n")
    return folder


def test_code_of_a_known_kind_is_read_and_inherited(tmp_path: Path) -> None:
    table = derived(package(tmp_path))
    assert table.document["version"] == "9.9.9"
    (rule,) = table.document["rules"]
    assert rule.pop("targets").keys() == {"Target", "Child"}
    assert tuple(rule.values()) == PLAIN


def test_a_wheel_is_read_as_its_folder(tmp_path: Path) -> None:
    folder = package(tmp_path / "folder")
    with zipfile.ZipFile(tmp_path / "sglang.whl", "w") as wheel:
        for file in folder.rglob("*"):
            wheel.write(file, file.relative_to(folder))
    assert derived(tmp_path / "sglang.whl") == derived(folder)


UNREADABLE = {
    "another sum": ("val + 1", "val + 2", "plain.py:"),
    "another default": ("[2, n // 2, n - 3]", "[2, n // 2, n - 4]", "plain.py:"),
    "a condition": ("else:\n            self.model", "elif max(layer_ids) > 3:\n            self.model",
                    "max(layer_ids)"),
    "a statement": ("        self.capture_aux_hidden_states = True\n", "        self.capture_aux_hidden_states = True\n"
                    "        layer_ids.sort()\n", "layer_ids.sort()"),
    "a model of two kinds": (
        "return Model(config)", "return Model(config) if config.a else Layer(config)", "may be of"),
    "a model from elsewhere": ("return Model(config)", "return AutoModel(config)", "AutoModel"),
    "methods at run time": ("    def set_eagle3_layers_to_capture(self", "    def __getattr__(self, name):\n"
                            "        return self.other\n\n    def other(self", "looks its methods up at run time"),
    "capture after the layer": ("i in self.layers_to_capture", "i + 1 in self.layers_to_capture", "i + 1"),
    "capture of some layers": ("i in self.layers_to_capture else",
                               "i in self.layers_to_capture and i % 2 else", "i % 2"),
    "capture elsewhere": ("capture=capture_output)", ")\n        self.self_attn(capture_output)", "Layer"),
    "nothing handed on": ("hidden_states, aux_hidden_states)\n\n", "hidden_states)\n\n", "hands no captured states on"),
    "another thing returned": ("return hidden_states, aux_hidden_states\n\nclass", "return hidden_states, 1\n\nclass",
                               "return"),
}  # fmt: skip


def test_a_collector_is_handed_on_by_either_name(tmp_path: Path) -> None:
    """0.5.21 layers/layer_boundary/stage.py calls the parameter capture_output, later releases capture."""
    now = derived(package(tmp_path / "now", CORE + OUTER))
    then = derived(package(tmp_path / "then", (CORE + OUTER).replace("capture=capt", "capture_output=capt")))
    assert now.document["rules"] == then.document["rules"] != []


@pytest.mark.parametrize("name", UNREADABLE)
def test_code_of_another_kind_is_said_to_be_unknown(name: str, tmp_path: Path) -> None:
    old, new, said = UNREADABLE[name]
    source = CORE + OUTER
    assert source.count(old) == 1
    table = derived(package(tmp_path, source.replace(old, new)))
    assert table.document["rules"] == []
    assert table.unknown.keys() == {"Target", "Child"} and all(said in why for why in table.unknown.values())


def test_decode_graphs_that_do_not_see_the_ids() -> None:
    """0.5.9 model_executor/cuda_graph_runner.py:365 sets the default layers; model_runner.py:622, which sets the stated
    ones, comes after it in ``initialize``."""
    assert [default_graphs(release) for release in RELEASES] == [True, *[False] * (len(RELEASES) - 1)]


def test_a_folder_without_sglang_is_refused(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, str(SCRIPT), "--wheel", str(tmp_path)], capture_output=True, text=True)
    assert ran.returncode == 1 and "give a wheel of SGLang or the folder it is installed in" in ran.stderr
