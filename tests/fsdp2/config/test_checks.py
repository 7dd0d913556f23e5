"""Checks of whole configurations: a table of changes to a good one, with the message or the notice they cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config import Config, ParallelConfig, check_config
from mindspeed_llm.fsdp2.config.fields import all_fields
from mindspeed_llm.fsdp2.config.inert import IDLE, INERT
from mindspeed_llm.fsdp2.config.not_available import NOT_AVAILABLE

MakeConfig = Callable[..., Config]
PT_MG = {"training.stage": "pt", "data.data_manager_type": "mg"}
PT_LF = {"training.stage": "pt"}
DATASETS = {"data.dataset": "a,b"}
INTERLEAVE = {**DATASETS, "data.mix_strategy": "interleave_under"}
FILES = {"data.dataset": {"file_name": ["a.jsonl", "b.jsonl"]}, "data.mix_strategy": "interleave_over"}
STREAM = {"data.streaming": True, "training.max_steps": 5}
PROFILE = {"training.profile": True}


def test_the_good_configuration_passes(make_config: MakeConfig) -> None:
    assert check_config(make_config(), world_size=1) == []


@pytest.mark.parametrize(
    ("changes", "world_size", "fsdp_size", "replicas"),
    [
        ({}, 1, 1, 1),
        ({}, 8, 8, 1),
        ({"parallel.fsdp_size": 8}, 8, 8, 1),
        ({"parallel.fsdp_size": 2}, 4, 2, 2),
        ({"parallel.fsdp_size": 1}, 6, 1, 6),
    ],
)
def test_worlds_that_fit(
    make_config: MakeConfig, changes: dict[str, Any], world_size: int, fsdp_size: int, replicas: int
) -> None:
    config = make_config(changes)
    check_config(config, world_size=world_size)
    assert config.parallel.resolved_fsdp_size(world_size) == fsdp_size
    assert world_size == replicas * fsdp_size


@pytest.mark.parametrize(
    ("world_size", "fsdp_size", "parts"),
    [
        (8, 3, ["8 = 2 x 3 + 2", "1, 2, 4, 8"]),
        (1, 8, ["1 = 0 x 8 + 1", "one of 1,"]),
        (4, 8, ["4 = 0 x 8 + 4", "1, 2, 4"]),
    ],
)
def test_worlds_that_do_not_fit_show_the_arithmetic(
    make_config: MakeConfig, world_size: int, fsdp_size: int, parts: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        check_config(make_config({"parallel.fsdp_size": fsdp_size}), world_size=world_size)
    expected = [f"parallel.fsdp_size = {fsdp_size}", f"{world_size} ranks", "world = replicas x fsdp_size", *parts]
    assert [part for part in expected if part not in str(error.value)] == []


def test_fsdp_size_by_hand() -> None:
    assert ParallelConfig(fsdp_size=4).resolved_fsdp_size(12) == 4
    with pytest.raises(UserError):
        ParallelConfig(fsdp_size=5).resolved_fsdp_size(12)


DPO = {"training.stage": "dpo"}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        # adapters and freezing
        ({"model.lora_rank": 0}, ["model.lora_rank", "0 is out of range", ">= 1"]),
        ({"model.lora_rank": 4, "model.lora_alpha": 0.0}, ["model.lora_alpha", "> 0"]),
        ({"model.lora_rank": 4, "model.lora_dropout": 1.0}, ["model.lora_dropout", "< 1"]),
        ({"model.lora_rank": 4, "model.lora_target": "q_proj,"}, ["model.lora_target = 'q_proj,'", "empty name"]),
        ({"model.lora_rank": 4, "model.freeze_modules": ["x"]}, ["model.freeze_modules", "model.lora_rank = 4"]),
        ({"model.lora_rank": 4, "model.train_from_scratch": True}, ["train_from_scratch = true", "lora_rank = 4"]),
        ({"model.freeze_modules": ["a{b"]}, ["model.freeze_modules", "stray '{'"]),
        ({"model.adapter_name_or_path": "no/folder"}, ["model.adapter_name_or_path = 'no/folder'", "is no folder"]),
        ({"training.merge_adapter": True}, ["training.merge_adapter = true", "model.lora_rank"]),
        # preference pairs
        ({**DPO, "data.packing": True}, ["training.stage = dpo", "data.packing = true"]),
        ({**DPO, "data.data_manager_type": "mg"}, ["training.stage = dpo", "data.data_manager_type = mg"]),
        ({**DPO, "data.tokenized_path": "x"}, ["training.stage = dpo", "data.tokenized_path = 'x'"]),
        ({**DPO, "training.dpo_beta": 0.0}, ["training.dpo_beta", "> 0"]),
        ({**DPO, "training.dpo_label_smoothing": 0.5}, ["training.dpo_label_smoothing", "< 0.5"]),
        (
            {**DPO, "training.dpo_label_smoothing": 0.1, "training.dpo_loss_type": "ipo"},
            ["training.dpo_label_smoothing = 0.1", "training.dpo_loss_type = ipo"],
        ),
        ({**DPO, "training.ref_model": "no/such/folder"}, ["training.ref_model = 'no/such/folder' does not exist"]),
        # section data
        ({"data.dataset": None}, ["data.dataset is not set", "file_name"]),
        ({"data.dataset": {}}, ["data.dataset is empty"]),
        ({"data.dataset": []}, ["data.dataset is empty"]),
        ({"data.dataset": ""}, ["data.dataset is empty"]),
        ({"data.dataset": "a,,b"}, ["data.dataset", "'a,,b'", "empty name"]),
        ({"data.eval_dataset": {}}, ["data.eval_dataset is empty"]),
        ({"data.data_manager_type": "mg"}, ["training.stage = sft", "data.data_manager_type = mg"]),
        ({"data.cutoff_len": 1}, ["data.cutoff_len = 1", "nothing to learn", "2 or more"]),
        ({**PT_MG, "data.val_size": 0.1}, ["data.val_size = 0.1", "data.split"]),
        ({**PT_MG, "data.split": "a,b"}, ["data.split = 'a,b'", "95,5,0"]),
        ({**PT_MG, "data.split": "90,-5,15"}, ["data.split", "from 0 on"]),
        ({**PT_MG, "data.split": "1,1,1,1"}, ["data.split", "up to three"]),
        ({**PT_MG, "data.split": "nan,1"}, ["data.split"]),
        ({**PT_MG, "data.split": "0,50,50"}, ["data.split", "nothing for training"]),
        ({**DATASETS, "data.interleave_probs": "0.5,0.5"}, ["data.interleave_probs", "data.mix_strategy = concat"]),
        ({**INTERLEAVE, "data.interleave_probs": "0.5,x"}, ["data.interleave_probs = '0.5,x'", "a list of prob"]),
        ({**INTERLEAVE, "data.interleave_probs": "1.5,-0.5"}, ["data.interleave_probs", "above 0"]),
        ({**INTERLEAVE, "data.interleave_probs": "1.0"}, ["1 probabilities", "2 data set(s)"]),
        ({**INTERLEAVE, "data.interleave_probs": "0.2,0.3,0.5"}, ["3 probabilities", "2 data set(s)"]),
        ({**INTERLEAVE, "data.interleave_probs": "0.5,0.4"}, ["adds up to 0.9"]),
        ({"data.val_size": 0.1, "data.eval_dataset": "b"}, ["data.val_size = 0.1", "data.eval_dataset = 'b'"]),
        ({"data.val_size": 1.5}, ["data.val_size = 1.5", "whole number"]),
        ({"training.eval_steps": 5}, ["training.eval_steps = 5", "data.eval_dataset or data.val_size"]),
        ({**PT_MG, "training.eval_steps": 5}, ["training.eval_steps = 5", "data.split"]),
        ({"training.eval_on_start": True}, ["training.eval_on_start = true", "data.eval_dataset"]),
        ({**STREAM, **PT_MG}, ["data.streaming", "data.data_manager_type = mg"]),
        ({**STREAM, "data.packing": True}, ["data.streaming", "data.packing"]),
        ({**STREAM, "data.neat_packing": True}, ["data.streaming", "data.packing"]),
        ({**PT_MG, "data.dataset": None, "data.tokenized_path": "t"}, ["data.dataset is not set"]),
        ({**FILES, "data.interleave_probs": "1"}, ["1 probabilities", "2 data set(s)"]),
        ({**STREAM, "data.max_samples": 3}, ["data.streaming", "data.max_samples = 3"]),
        ({**STREAM, "data.val_size": 0.1}, ["data.streaming", "data.val_size = 0.1", "whole number"]),
        ({**STREAM, "data.tokenized_path": "t"}, ["data.streaming", "data.tokenized_path = 't'"]),
        ({"data.streaming": True}, ["data.streaming", "training.max_steps", "-1"]),
        ({"data.train_on_prompt": True, "data.mask_history": True}, ["data.train_on_prompt", "data.mask_history"]),
        ({**PT_MG, "data.reset_attention_mask": True}, ["data.reset_attention_mask", "data.append_eod"]),
        # section training
        ({"training.max_steps": 0}, ["training.max_steps = 0", "-1"]),
        ({"training.lr": 1e-7}, ["training.min_lr = 1e-06", "training.lr = 1e-07"]),
        ({"training.dataloader_prefetch_factor": 2}, ["dataloader_prefetch_factor = 2", "dataloader_num_workers = 0"]),
        ({"training.dataloader_persistent_workers": True}, ["dataloader_persistent_workers = true", "num_workers = 0"]),
        ({"training.output_dir": ""}, ["training.output_dir is empty"]),
        # profiling
        ({**PROFILE, "training.profile_step_end": 0}, ["profile_step_end = 0", "profile_step_start = 0"]),
        ({**PROFILE, "training.profile_step_start": 5, "training.profile_step_end": 5}, ["= 5", "no step"]),
        ({**PROFILE, "training.profile_step_start": 9, "training.max_steps": 9}, ["= 9 is not below", "max_steps = 9"]),
        ({**PROFILE, "training.profile_ranks": [0, 2]}, ["profile_ranks = [0, 2]", "2 ranks", "0 to 1"]),
        ({**PROFILE, "training.profile_ranks": [-1, 0]}, ["profile_ranks = [-1, 0]", "-1 alone"]),
        ({**PROFILE, "training.profile_ranks": []}, ["profile_ranks = []"]),
        # module patterns
        ({"parallel.fsdp_modules": []}, ["parallel.fsdp_modules is empty"]),
        ({"parallel.fsdp_modules": ["layers.{x}"]}, ["parallel.fsdp_modules", "'layers.{x}'", "stray"]),
        ({"parallel.ignored_modules": ["a{"]}, ["parallel.ignored_modules", "'a{'"]),
        ({"parallel.recompute_modules": ["{3-1}"]}, ["parallel.recompute_modules", "'{3-1}'"]),
        ({"parallel.recompute": True, "parallel.recompute_modules": []}, ["parallel.recompute = true", "modules"]),
        # switches of some families
        ({"optimization.use_ascend_mhc": True}, ["use_ascend_mhc", "model.model_id = null", "deepseek_v4"]),
        ({"optimization.use_triton_swiglu_limit": True, "model.model_id": "qwen3"}, ["model_id = qwen3", "deepseek"]),
        ({"optimization.use_sparse_flash_attn": True, "model.model_id": "qwen3"}, ["glm52 or deepseek_v4"]),
        ({"optimization.use_fused_lightning_indexer": True}, ["use_fused_lightning_indexer = true", "glm52"]),
        ({"optimization.use_fused_lightning_indexer_loss": True}, ["use_fused_lightning_indexer_loss = true", "glm52"]),
        (
            {"optimization.use_flash_gdn": True, "optimization.use_triton_gdn": True, "model.model_id": "qwen3_next"},
            ["use_triton_gdn", "use_flash_gdn", "exclude"],
        ),
        (
            {"model.model_id": "qwen3_next", "parallel.cp_size": 2, "parallel.cp_type": "ring"},
            ["qwen3_next", "parallel.cp_type = ring", "parallel.cp_size = 2", "ulysses"],
        ),
        # ... and where the rule about qwen3_next does not apply
        ({"model.model_id": "qwen3", "parallel.cp_size": 2, "parallel.cp_type": "ring"}, ["cp_size = 2 is not"]),
        ({"model.model_id": "qwen3_next", "parallel.cp_size": 2}, ["cp_size = 2 is not"]),
        ({"model.model_id": "qwen3_next", "parallel.cp_type": "ring"}, ["model_type qwen3"]),
        # values that the loader would have refused
        ({"training.lr": -1.0}, ["training.lr", "out of range", ">= 0"]),
        ({"training.seed": "1"}, ["training.seed", "'1' (a text)"]),
        ({"training.stage": "rlhf"}, ["training.stage", "'rlhf'", "pt, sft, dpo"]),
        ({"parallel.fsdp_modules": "lm_head"}, ["parallel.fsdp_modules", "no list"]),
    ],
)  # fmt: skip
def test_settings_that_disagree(make_config: MakeConfig, changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        check_config(make_config(changes), world_size=2)
    assert [part for part in parts if part not in str(error.value)] == []


@pytest.mark.parametrize(
    "changes",
    [
        {**PT_MG, "data.split": "98,2"},
        {**PT_MG, "data.split": "95,5,0", "training.eval_steps": 5},
        {**PT_MG, "data.reset_attention_mask": True, "data.append_eod": True},
        {**INTERLEAVE, "data.interleave_probs": "0.7, 0.3"},
        {**FILES, "data.interleave_probs": "0.7,0.3"},
        {**FILES, "data.dataset": {"file_name": "a.jsonl,b.jsonl"}, "data.interleave_probs": "0.7,0.3"},
        {**INTERLEAVE, "data.dataset": ["a", "b", "c"], "data.interleave_probs": "0.2,0.3,0.5"},
        {"data.val_size": 8, "training.eval_steps": 5, "training.eval_on_start": True},
        {"data.val_size": 0.5},
        {"data.eval_dataset": "b", "training.eval_on_start": True},
        {**STREAM, "data.val_size": 8},
        {"data.dataset": None, "data.tokenized_path": "tokens"},
        {"data.dataset": None, "data.tokenized_path": "tokens", "data.val_size": 0.1},
        {"model.lora_rank": 4, "training.merge_adapter": True, "model.lora_target": "q_proj, v_proj"},
        {"model.freeze_modules": ["model.embed_tokens", "model.layers.{0-1}"]},
        {**DPO, "model.lora_rank": 4, "training.dpo_label_smoothing": 0.1, "training.pref_ftx": 1.0},
        {"training.lr": 0.0, "training.min_lr": 0.0},
        {"training.lr": 1e-7, "training.lr_scheduler_type": "linear"},
        {"training.max_grad_norm": 0},
        {"training.num_train_epochs": 0.25},
        {"training.dataloader_prefetch_factor": 2, "training.dataloader_num_workers": 1},
        {**PROFILE, "training.profile_step_start": 5, "training.profile_step_end": 6, "training.profile_ranks": [1]},
        {"training.profile_step_end": 0},
        {"data.train_on_prompt": True},
        {"data.mask_history": True},
        {"data.reset_attention_mask": True},
        {"parallel.recompute_modules": []},
        {"model.model_id": "qwen3"},
        {"training.optimizer": "fused_adamw"},
        {"data.dataset_dir": "/data"},
        {"training.save_steps": 0, "training.save_epochs": 0},
        PT_LF,
    ],
)
def test_settings_that_agree(make_config: MakeConfig, changes: dict[str, Any]) -> None:
    check_config(make_config(changes), world_size=2)


# One value away from the default, and allowed by the checks before, for every field that is refused.
REFUSED = {
    "data.dataset_dir": "ONLINE",
    "data.ignore_pad_token_for_loss": False,
    "model.init_special_tokens": "desc_init",
    "model.model_id": "step35",
    "model.new_special_tokens_config": "tokens.yaml",
    "model.quant_recipe_name": "mxfp8",
    "model.resize_vocab": True,
    "optimization.chunk_loss_size": 1024,
    "optimization.fix_router": True,
    "optimization.gdn_chunk_size": 128,
    "optimization.next_tokens": 1,
    "optimization.pre_tokens": 1,
    "optimization.use_ascend_mhc": (True, "deepseek_v4"),
    "optimization.use_flash_gdn": (True, "qwen3_next"),
    "optimization.use_fused_lightning_indexer": (True, "glm52"),
    "optimization.use_fused_lightning_indexer_loss": (True, "glm52"),
    "optimization.use_sparse_flash_attn": (True, "deepseek_v4"),
    "optimization.use_triton_gdn": (True, "qwen3_next"),
    "optimization.use_triton_rmsnormgated": (True, "mamba3"),
    "optimization.use_triton_swiglu_limit": (True, "deepseek_v4"),
    "parallel.cp_size": 2,
    "parallel.enable_chunk_batch": True,
    "parallel.ep_size": 2,
    "parallel.fsdp_implementation": "custom",
    "parallel.tp_size": 2,
    "training.indexer_loss_coeff": 0.5,
    "training.mtp_loss_scaling_factor": 0.1,
    "training.optimizer": "muon",
}


@pytest.mark.parametrize("key", NOT_AVAILABLE)
def test_what_is_not_available_is_refused(make_config: MakeConfig, key: str) -> None:
    changed = REFUSED[key]
    value, model_id = changed if isinstance(changed, tuple) else (changed, None)
    changes = {key: value} if model_id is None else {key: value, "model.model_id": model_id}
    with pytest.raises(UserError, match=r"is not available yet: .*The default .* is") as error:
        check_config(make_config(changes), world_size=4)
    # A family that is missing itself is named before its switches.
    named = "model.model_id" if model_id in ("deepseek_v4", "glm52", "mamba3") else key
    assert str(error.value).startswith(f"{named} = ")


@pytest.mark.parametrize("key", sorted(INERT))
def test_fields_without_effect_are_noticed_once_when_set(make_config: MakeConfig, key: str) -> None:
    spec = all_fields()[key]
    value = {bool: not spec.default, int: 7, str: "secret"}[spec.kind]
    found = [notice for notice in check_config(make_config({key: value}), world_size=1) if key in notice]
    assert len(found) == 1
    assert found[0].startswith("no effect from ")
    assert found[0].endswith(INERT[key])
    assert "secret" not in found[0]
    assert not any(key in notice for notice in check_config(make_config(), world_size=1))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {**PT_MG, "data.packing": True, "data.tokenized_path": "t"},
            "no effect from data.packing = true, data.tokenized_path = t: data.data_manager_type is mg",
        ),
        ({**PT_LF, "data.template": "a"}, "no effect from data.template = a: training.stage is pt"),
        (
            {**PT_LF, "data.mask_history": True, "data.tool_format": "qwen", "data.default_system": "S"},
            "no effect from data.mask_history = true, data.tool_format = qwen, data.default_system = S: training.stage "
            "is pt",
        ),
        (
            {**PT_LF, "data.train_on_prompt": True, "data.enable_thinking": False},
            "no effect from data.train_on_prompt = true, data.enable_thinking = false: training.stage is pt",
        ),
        (
            {**PT_MG, "data.data_shared_file_system": True},
            "no effect from data.data_shared_file_system = true: data.data_manager_type is mg",
        ),
        (
            {"training.dataloader_drop_last": True, "training.max_steps": 5},
            "no effect from training.dataloader_drop_last = true: training.max_steps is 5",
        ),
        (
            {"data.mix_strategy": "interleave_over"},
            "no effect from data.mix_strategy = interleave_over: data.dataset is one data set",
        ),
        (
            {"data.neat_packing": True},
            "data.neat_packing = true packs samples, whatever data.packing says (false)",
        ),
        ({"data.append_eod": True}, "no effect from data.append_eod = true: training.stage is sft"),
        ({"data.split": "90,10,0"}, "no effect from data.split = 90,10,0: data.data_manager_type is lf"),
        ({"parallel.cp_type": "ring"}, "no effect from parallel.cp_type = ring: parallel.cp_size is 1"),
        ({"parallel.ep_modules": ["*.e"]}, "no effect from parallel.ep_modules = [*.e]: parallel.ep_size is 1"),
        (
            {"parallel.recompute_modules": ["a"]},
            "no effect from parallel.recompute_modules = [a]: parallel.recompute is false",
        ),
        (
            {"training.profile_level": "level1"},
            "no effect from training.profile_level = level1: training.profile is false",
        ),
        ({"data.buffer_size": 5}, "no effect from data.buffer_size = 5: data.streaming is false"),
        ({"data.eval_max_samples": 5}, "no effect from data.eval_max_samples = 5: there is no evaluation data"),
        (
            {"training.lr_scheduler_type": "constant", "training.min_lr": 1e-9},
            "no effect from training.min_lr = 1e-09: training.lr_scheduler_type is constant",
        ),
        (
            {"data.cutoff_len": 65536},
            "data.cutoff_len = 65536 is above max_position_embeddings = 40960 of the model: it "
            "has not seen such positions",
        ),
    ],
)  # fmt: skip
def test_idle_fields_are_noticed(make_config: MakeConfig, changes: dict[str, Any], expected: str) -> None:
    assert expected in check_config(make_config(changes), world_size=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"data.val_size": 0.1, "data.eval_max_samples": 5},
        {"parallel.recompute": True, "parallel.recompute_modules": ["a"]},
        {**PROFILE, "training.profile_level": "level1"},
        {**STREAM, "data.buffer_size": 5},
        {"data.template": "qwen3"},
        {**PT_LF, "data.append_eod": True, "data.packing": True, "data.neat_packing": True},
        INTERLEAVE,
        {**FILES, "data.interleave_probs": "0.5,0.5"},
        {"training.dataloader_drop_last": True},
        {**PT_MG, "data.append_eod": True, "data.max_samples": 5},
        {"parallel.shard_placement_fn": "shard_by_dim_1"},
        {**PT_MG, "data.split": "90,10,0"},
        {"training.min_lr": 1e-9},
        {"data.cutoff_len": 40960},
    ],
)
def test_fields_that_work_are_not_noticed(make_config: MakeConfig, changes: dict[str, Any]) -> None:
    assert check_config(make_config(changes), world_size=1) == []


def test_every_idle_row_is_idle_at_the_default_or_can_be(make_config: MakeConfig) -> None:
    """A row whose test can never be true, or never be false, says nothing."""
    alternatives = {
        "model.quant_recipe_name": "mxfp8",
        "data.data_manager_type": "mg",
        "data.streaming": True,
        "training.stage": ("pt", "dpo"),
        "training.max_steps": 5,
        "training.eval_samples": 2,
        "parallel.ep_size": 2,
        "parallel.cp_size": 2,
        "parallel.tp_size": 2,
        "parallel.fsdp_implementation": "custom",
        "parallel.recompute": True,
        "parallel.enable_chunk_batch": True,
        "training.lr_scheduler_type": "linear",
        "training.profile": True,
        "training.save_hf_weights": False,
    }
    for key, row in IDLE.items():
        default = all_fields()[row.because].default
        others = alternatives[row.because]
        others = others if isinstance(others, tuple) else (others,)
        assert any(row.idle(default) != row.idle(other) for other in others), key


def test_a_comma_in_the_name_of_a_file_makes_no_two_data_sets(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "a,b.jsonl").touch()
    changes = {**FILES, "data.dataset": {"file_name": str(tmp_path / "a,b.jsonl")}}
    check_config(make_config({**changes, "data.interleave_probs": "1.0"}), world_size=1)
    with pytest.raises(UserError, match=r"2 probabilities, but data\.dataset has 1"):
        check_config(make_config({**changes, "data.interleave_probs": "0.5,0.5"}), world_size=1)
