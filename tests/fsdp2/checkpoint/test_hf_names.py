"""Which stored tensor fills which parameter, against transformers' own loader; the way back, against the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint import hf_names
from mindspeed_llm.fsdp2.checkpoint.hf_load import load_weights, read_weight_map
from mindspeed_llm.fsdp2.checkpoint.hf_names import conversion_groups, map_to_model, to_file_layout
from mindspeed_llm.fsdp2.checkpoint.weight_files import LazyTensor, full_index, open_weights
from tests.support.toys import TOYS, save_toy

# Families whose way from file to memory cuts one stored tensor into several parameters.
CUT: dict[str, dict[str, Any]] = {
    "hrm_text": {
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 8,
    },
    "sarvam_moe": {
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}


def save(name: str, folder: Path) -> Path:
    """The toy `name`, or the small model of a family in `CUT`, as transformers writes it."""
    if name in TOYS:
        return save_toy(name, folder)
    config = CONFIG_MAPPING[name](**CUT[name], bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def on_meta(folder: Path) -> PreTrainedModel:
    """The model of a directory, shapes only."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)


def read_whole(tensor: LazyTensor) -> torch.Tensor:
    return tensor.read(full_index(tensor.shape))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of a single-file directory."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", [*TOYS, *CUT])
def test_every_parameter_equals_that_of_transformers(tmp_path: Path, name: str) -> None:
    folder = save(name, tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = expected.state_dict()
    tied = set(expected.all_tied_weights_keys or {})
    found = map_to_model(on_meta(folder), open_weights(folder))
    assert found.tensors.keys() == state.keys() - tied
    for key, tensor in found.tensors.items():
        assert tensor.shape == tuple(state[key].shape)
        assert torch.equal(read_whole(tensor), state[key]), key


@pytest.mark.parametrize("name", ["llama_uneven", "qwen3_moe", "mixtral", *CUT])
def test_shards_of_every_parameter_are_slices_of_it(tmp_path: Path, name: str) -> None:
    folder = save(name, tmp_path)
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for rank in range(3):
        for key, tensor in map_to_model(on_meta(folder), open_weights(folder)).tensors.items():
            rows = tensor.shape[0]
            part = -(-rows // 3)
            index = (slice(min(rank * part, rows), min((rank + 1) * part, rows)), *full_index(tensor.shape)[1:])
            assert torch.equal(tensor.read(index), state[key][index]), (rank, key)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", *CUT])
def test_the_way_back_gives_the_stored_tensors(tmp_path: Path, name: str) -> None:
    folder = save(name, tmp_path)
    model = on_meta(folder)
    weights = map_to_model(model, open_weights(folder))
    groups = conversion_groups(model, list(weights.tensors))
    assert sorted(key for group in groups for key in group) == sorted(weights.tensors)
    found: dict[str, torch.Tensor] = {}
    for group in groups:
        part = to_file_layout(model, {key: read_whole(weights.tensors[key]) for key in group})
        assert not found.keys() & part.keys()
        found |= part
    stored = load_file(folder / "model.safetensors")
    assert found.keys() == stored.keys()
    for key, tensor in stored.items():
        assert torch.equal(found[key], tensor), key


def test_a_tensor_that_is_cut_is_read_once_for_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save("hrm_text", tmp_path)
    reads: list[str] = []

    class Watched:
        def __init__(self, name: str, tensor: LazyTensor) -> None:
            self._name, self._tensor, self.shape, self.dtype = name, tensor, tensor.shape, tensor.dtype

        def read(self, index: tuple[slice, ...]) -> torch.Tensor:
            reads.append(self._name)
            return self._tensor.read(index)

    stored = {name: Watched(name, tensor) for name, tensor in open_weights(folder).items()}
    weights = map_to_model(on_meta(folder), stored)
    assert reads == []  # the map alone costs no data
    for tensor in weights.tensors.values():
        read_whole(tensor)
    assert sorted(reads) == sorted(stored)
    groups = {id(t._group): t._group for t in weights.tensors.values() if isinstance(t, hf_names._ConvertedTensor)}
    assert groups and all(group._values is None for group in groups.values())  # nothing stays in memory


# --- Weights that do not fit


def expect_error(folder: Path, *parts: str) -> None:
    with pytest.raises(UserError) as error:
        read_weight_map(on_meta(folder), folder)
    missing = [part for part in (*parts, "model.model_name_or_path") if part not in str(error.value)]
    assert not missing, str(error.value)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    rewrite(folder, **{"model.layers.2.mlp.up_proj.weight": None})
    expect_error(folder, "no tensor fills 1 of its parameters: model.layers.2.mlp.up_proj.weight", "LlamaForCausalLM")


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    rewrite(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(96)})
    expect_error(folder, "nothing takes 1 tensors of the files: model.layers.0.self_attn.q_proj.bias")


def test_many_tensors_are_counted_and_the_first_named(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    rewrite(folder, **{f"extra.{i}": torch.zeros(1) for i in range(7)}, **{"model.norm.weight": None})
    expect_error(folder, "extra.0, extra.1, extra.2, extra.3, extra.4, ... (2 more)", "model.norm.weight")


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    rewrite(folder, **{"model.embed_tokens.weight": torch.zeros(512, 48)})
    expect_error(folder, "model.embed_tokens.weight has shape [512, 48]", "expects [509, 48]")


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (["model.layers.1.mlp.experts.3.gate_proj.weight"], "model.layers.1.mlp.experts.gate_up_proj"),
        (["model.layers.1.mlp.experts.5.down_proj.weight"], "has shape [5, 48, 40]"),
        ([f"model.layers.1.mlp.experts.{i}.up_proj.weight" for i in range(6)], "up_proj"),
    ],
)
def test_a_lost_expert_is_found(tmp_path: Path, lost: list[str], said: str) -> None:
    folder = save("qwen3_moe", tmp_path)
    rewrite(folder, **dict.fromkeys(lost))
    with pytest.raises(UserError) as error:
        read_weight_map(on_meta(folder), folder)
    assert said in str(error.value)


def test_old_rotary_buffers_are_left_out(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    rewrite(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert read_weight_map(on_meta(folder), folder).ignored == ["model.layers.0.self_attn.rotary_emb.inv_freq"]


def test_what_the_class_declares_as_not_needed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save("llama", tmp_path)
    rewrite(folder, **{"mtp.layers.0.weight": torch.zeros(8)})
    expect_error(folder, "mtp.layers.0.weight")
    # As Qwen3-Next's class says of its multi-token prediction layers.
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^mtp.*"])
    assert read_weight_map(on_meta(folder), folder).ignored == ["mtp.layers.0.weight"]


# --- Tied weights


def test_a_tied_duplicate_that_is_equal_is_accepted(tmp_path: Path) -> None:
    folder = save("llama_tied", tmp_path)
    stored = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in stored
    rewrite(folder, **{"lm_head.weight": stored["model.embed_tokens.weight"].clone()})
    weights = read_weight_map(on_meta(folder), folder)
    assert "lm_head.weight" not in weights.tensors
    assert weights.aliases["lm_head.weight"][1] == "model.embed_tokens.weight"


@pytest.mark.parametrize("row", [0, 508])
def test_a_tied_duplicate_that_differs_is_refused(tmp_path: Path, row: int) -> None:
    folder = save("llama_tied", tmp_path)
    other = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    other[row, 7] += 1
    rewrite(folder, **{"lm_head.weight": other})
    expect_error(folder, "ties lm_head.weight to model.embed_tokens.weight", "tie_word_embeddings")


def test_only_the_head_is_stored_of_a_tied_pair(tmp_path: Path) -> None:
    folder = save("llama_tied", tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, **{"lm_head.weight": embedding.clone(), "model.embed_tokens.weight": None})
    weights = read_weight_map(on_meta(folder), folder)
    assert torch.equal(read_whole(weights.tensors["model.embed_tokens.weight"]), embedding)


def test_loading_casts_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    folder = save_toy("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    model = on_meta(folder).to_empty(device="cpu")
    load_weights(model, read_weight_map(model, folder))
    for key, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("with_scales", [True, False])
def test_quantised_weights_are_refused(with_scales: bool, tmp_path: Path) -> None:
    folder = save_toy("llama", tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    if with_scales:
        tensors[name + "_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"quantised weights \(1 tensors, .*up_proj.weight is float8_e4m3fn\)"):
        read_weight_map(on_meta(folder), folder)
