"""The user-visible surface is frozen: fields, values, defaults, and the tables of what does nothing or is refused."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from mindspeed_llm.fsdp2.config import parse_command_line
from mindspeed_llm.fsdp2.config.config import SECTIONS
from mindspeed_llm.fsdp2.config.fields import REQUIRED, all_fields
from mindspeed_llm.fsdp2.config.help import shown
from mindspeed_llm.fsdp2.config.inert import IDLE, INERT
from mindspeed_llm.fsdp2.config.not_available import NOT_AVAILABLE
from mindspeed_llm.fsdp2.config.reference import main as write_reference
from mindspeed_llm.fsdp2.config.suggestions import _KNOWN_ELSEWHERE

SURFACE = Path(__file__).with_name("surface.txt")


def test_fields_values_and_defaults_are_frozen() -> None:
    lines = [
        f"{key} | {spec.expected} | {'required' if spec.default is REQUIRED else shown(spec.default)}"
        for key, spec in all_fields().items()
    ]
    assert lines == SURFACE.read_text(encoding="utf-8").splitlines()


def test_number_of_fields_by_section() -> None:
    counts = {section: sum(spec.section == section for spec in all_fields().values()) for section in SECTIONS}
    # Those of the interface that is mirrored, plus ours: adapters and freezing (6 in model, 1 in training), DPO (5 in
    # training), answers at evaluations (2 in training), and 1 in data and 12 in training of other kinds.
    assert counts == {
        "model": 24 + 6,
        "data": 33 + 1,
        "parallel": 30,
        "training": 50 + 12 + 6 + 2,
        "optimization": 17,
        "inference": 3,
    }


def test_fields_without_effect_are_frozen() -> None:
    assert sorted(INERT) == [
        "data.create_attention_mask_in_dataloader",
        "data.eval_num_beams",
        "inference.do_sample",
        "inference.max_new_tokens",
        "model.ms_hub_token",
        "model.om_hub_token",
        "model.use_fast_tokenizer",
        "training.calculate_per_token_loss",
    ]


def test_refused_fields_are_frozen() -> None:
    assert sorted(NOT_AVAILABLE) == [
        "data.dataset_dir",
        "data.ignore_pad_token_for_loss",
        "model.init_special_tokens",
        "model.model_id",
        "model.new_special_tokens_config",
        "model.quant_recipe_name",
        "model.resize_vocab",
        "optimization.chunk_loss_size",
        "optimization.fix_router",
        "optimization.gdn_chunk_size",
        "optimization.next_tokens",
        "optimization.pre_tokens",
        "optimization.use_ascend_mhc",
        "optimization.use_flash_gdn",
        "optimization.use_fused_lightning_indexer",
        "optimization.use_fused_lightning_indexer_loss",
        "optimization.use_sparse_flash_attn",
        "optimization.use_triton_gdn",
        "optimization.use_triton_rmsnormgated",
        "optimization.use_triton_swiglu_limit",
        "parallel.cp_size",
        "parallel.enable_chunk_batch",
        "parallel.ep_size",
        "parallel.fsdp_implementation",
        "parallel.tp_size",
        "training.indexer_loss_coeff",
        "training.mtp_loss_scaling_factor",
        "training.optimizer",
    ]


def test_tables_name_existing_fields_and_give_reasons() -> None:
    fields = all_fields()
    for table in (INERT, IDLE, NOT_AVAILABLE):
        assert [key for key in table if key not in fields] == []
    assert [row.because for row in IDLE.values() if row.because not in fields] == []
    assert [target for target in _KNOWN_ELSEWHERE.values() if target not in fields] == []
    assert all(INERT.values())
    assert all(row.reason for row in NOT_AVAILABLE.values())
    # A field that is refused outright has no use for a row that says it does nothing.
    assert not set(INERT) & set(IDLE)
    assert not set(INERT) & set(NOT_AVAILABLE)


@pytest.mark.parametrize("key", all_fields())
def test_every_field_is_documented(key: str) -> None:
    doc = all_fields()[key].doc
    assert len(doc) > 10
    assert doc.endswith((".", ")"))


def test_help_lists_every_field_with_its_doc_and_exits_0() -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as exit_:
        parse_command_line(["--help"])
    assert exit_.value.code == 0
    text = output.getvalue()
    words = " ".join(text.split())
    for key, spec in all_fields().items():
        assert f"  --{key}  (" in text
        assert spec.doc in words
    assert "--training.output_dir (a text; required)" in words
    assert "--training.lr (a number >= 0; default 1e-05)" in words


def test_help_wins_over_a_broken_rest_and_is_printed_by_one_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        parse_command_line(["no_such.yaml", "-h"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("language", ["en", "zh"])
def test_committed_reference_is_the_generated_one(tmp_path: Path, repository: Path, language: str) -> None:
    write_reference([str(tmp_path)])
    name = f"{language}/fsdp2_arguments.md"
    assert (repository / "docs" / name).read_text(encoding="utf-8") == (tmp_path / name).read_text(encoding="utf-8"), (
        "run: python -m mindspeed_llm.fsdp2.config.reference"
    )
