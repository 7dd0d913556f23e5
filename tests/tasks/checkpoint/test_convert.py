"""What the reference files and the grid do not show: one rank alone, padding, what stands around the weights, and an
output that is whole or not there.
"""

from __future__ import annotations

import json
import threading
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import fill, staging
from mindspeed_llm.tasks.checkpoint.layout import Rank
from mindspeed_llm.tasks.checkpoint.plan import rank_targets
from mindspeed_llm.tasks.checkpoint.prepare import prepare
from mindspeed_llm.tasks.checkpoint.slabs import assemble, slabs
from tests.tasks.checkpoint import toys
from tests.tasks.checkpoint.test_layout import EP, NOOP, PP, TP


def expect_same_mg(one: Path, other: Path) -> None:
    """Same files, keys and values."""
    before, after = toys.read_mg(one), toys.read_mg(other)
    assert sorted(before) == sorted(after)
    for path, tensors in before.items():
        assert {key: toys.summary(value) for key, value in tensors.items()} == {
            key: toys.summary(value) for key, value in after[path].items()
        }


def test_one_rank_alone(tmp_path: Path) -> None:
    """What a training job needs for its own rank is what the converter writes for it, slice by slice."""
    flags = [TP, "2", PP, "2", EP, "2", "--moe-grouped-gemm"]
    source = toys.toy(tmp_path / "hf", "qwen3-moe")
    toys.run(source, tmp_path / "mg", *flags)
    conversion = prepare(toys.request(source, tmp_path / "unused", *flags))
    written = toys.read_mg(tmp_path / "mg")["iter_0000001/mp_rank_01_000_001/model_optim_rng.pt"]
    values = conversion.loaded.source
    found = {}
    for _, target in rank_targets(conversion.model, Rank(tp=1, pp=0, ep=1), values):
        flat = [assemble(target, slab, values).reshape(-1) for slab in slabs(target, limit=700)]
        found[target.key.removeprefix("model/")] = torch.cat(flat).view(target.shape)
    assert {key: toys.summary(value) for key, value in found.items()} == {
        key: toys.summary(value) for key, value in written.items()
    }


def test_vocabulary_is_padded_and_trimmed(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3", vocab_size=1003)
    toys.run(source, tmp_path / "mg", TP, "2", "--make-vocab-size-divisible-by", "128")
    ranks = list(toys.read_mg(tmp_path / "mg").values())
    for key, name in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        rows = torch.cat([rank[key] for rank in ranks])
        assert rows.shape[0] == 1024
        assert torch.equal(rows[:1003], toys.read_hf(source)[name]) and not rows[1003:].any()
    toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    expect_same_hf(source, tmp_path / "back")


def test_a_share_of_the_vocabulary_that_is_all_padding(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen25", vocab_size=100)
    toys.run(source, tmp_path / "mg", TP, "4", "--padded-vocab-size", "512")
    toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    expect_same_hf(source, tmp_path / "back")


def expect_same_hf(source: Path, back: Path) -> None:
    """Same names, dtypes, shapes and bits."""
    before, after = toys.read_hf(source), toys.read_hf(back)
    assert sorted(before) == sorted(after)
    for name, value in before.items():
        assert value.dtype == after[name].dtype and torch.equal(value, after[name]), name


def test_tied_beside_untied(tmp_path: Path) -> None:
    """A redundant lm_head of a tied model is named as dropped; the last stage gets the embedding."""
    tied = toys.toy(tmp_path / "tied", "qwen3", tie_word_embeddings=True)
    weights = load_file(tied / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, tied / "model.safetensors")
    untied = toys.toy(tmp_path / "untied", "qwen3")
    for source, name in ((tied, "model.embed_tokens.weight"), (untied, "lm_head.weight"), (tied, None)):
        output = tmp_path / f"mg_{source.name}_{name}"
        pipelined = name is not None
        dropped = toys.run(source, output, PP, "2" if pipelined else "1").plan.dropped
        last = list(toys.read_mg(output).values())[-1]
        if pipelined:
            assert torch.equal(last["output_layer.weight"], toys.read_hf(source)[name])
        else:
            assert "output_layer.weight" not in last
        assert dropped == ({"lm_head.weight": "a copy of model.embed_tokens.weight"} if source is tied else {})
        toys.run(output, tmp_path / f"back_{output.name}", of="mg", to="hf")
        back = toys.read_hf(tmp_path / f"back_{output.name}")
        assert ("lm_head.weight" in back) == (source is untied)
        assert all(torch.equal(value, back[key]) for key, value in weights.items() if source is tied)


def test_two_mtp_layers_keep_their_order(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "deepseek3", num_nextn_predict_layers=2)
    toys.run(source, tmp_path / "mg", PP, "2", "--mtp-num-layers", "2")
    last = list(toys.read_mg(tmp_path / "mg").values())[-1]
    hf = toys.read_hf(source)
    for mtp in range(2):
        assert torch.equal(last[f"mtp.layers.{mtp}.enorm.weight"], hf[f"model.layers.{4 + mtp}.enorm.weight"])
    toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    expect_same_hf(source, tmp_path / "back")


def test_dtype_change_spares_what_training_holds_in_fp32(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "deepseek3")
    weights = load_file(source / "model.safetensors")
    for name in weights:
        if name.endswith("e_score_correction_bias"):
            weights[name] = weights[name].float()
    save_file(weights, source / "model.safetensors")
    toys.run(source, tmp_path / "mg", "--params-dtype", "fp16")
    [tensors] = toys.read_mg(tmp_path / "mg").values()
    for key, value in tensors.items():
        assert value.dtype == (torch.float32 if key.endswith("expert_bias") else torch.float16), key
    toys.run(tmp_path / "mg", tmp_path / "back", "--params-dtype", "bf16", of="mg", to="hf")
    for name, value in toys.read_hf(tmp_path / "back").items():
        assert value.dtype == (torch.float32 if name.endswith("bias") else torch.bfloat16), name
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def test_checkpoint_around_the_weights(tmp_path: Path) -> None:
    """What Megatron reads beside the model: the tracker, and arguments under its own names."""
    toys.run(toys.toy(tmp_path / "hf", "qwen3"), tmp_path / "mg", TP, "2", PP, "2", NOOP, "0,5")
    assert (tmp_path / "mg" / "latest_checkpointed_iteration.txt").read_text() == "1"
    path = tmp_path / "mg" / "iter_0000001" / "mp_rank_01_001" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    assert (content["checkpoint_version"], content["iteration"]) == (3.0, 1)
    says = vars(content["args"])
    assert says["num_layers"] == 6 and says["noop_layers"] == {0, 5}
    assert (says["tensor_model_parallel_size"], says["pipeline_model_parallel_size"]) == (2, 2)
    assert (says["num_query_groups"], says["kv_channels"], says["ffn_hidden_size"]) == (2, 16, 88)
    assert says["untie_embeddings_and_output_weights"] and says["padded_vocab_size"] == 512
    # torch's own safe loader takes it, too.
    with torch.serialization.safe_globals([type(content["args"])]):
        safe = torch.load(path, weights_only=True)
    assert all(torch.equal(value, content["model"][key]) for key, value in safe["model"].items())


def test_dense_layers_under_transformer_engine(tmp_path: Path) -> None:
    """Both norms are parts of the linear layer behind them."""
    source = toys.toy(tmp_path / "hf", "qwen3")
    toys.run(source, tmp_path / "mg", "--transformer-impl", "transformer_engine")
    [tensors] = toys.read_mg(tmp_path / "mg").values()
    hf = toys.read_hf(source)
    for layer in range(4):
        for key, name in (
            ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
            ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
        ):
            assert torch.equal(tensors[f"decoder.layers.{layer}.{key}"], hf[f"model.layers.{layer}.{name}"])
    assert not [key for key in tensors if key.endswith(("input_layernorm.weight", "pre_mlp_layernorm.weight"))]


def test_whole_experts_spread_over_both_sizes(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3-moe")
    toys.run(source, tmp_path / "mg", TP, "2", EP, "2", "--moe-tp-extend-ep")
    hf = toys.read_hf(source)
    ranks = toys.read_mg(tmp_path / "mg")
    for (tp, ep), first in {(0, 0): 0, (1, 0): 2, (0, 1): 4, (1, 1): 6}.items():
        tensors = ranks[f"iter_0000001/mp_rank_{tp:02d}_{ep:03d}/model_optim_rng.pt"]
        for local in range(2):
            prefix = f"model.layers.1.mlp.experts.{first + local}."
            expected = torch.cat([hf[f"{prefix}gate_proj.weight"], hf[f"{prefix}up_proj.weight"]])
            key = f"decoder.layers.1.mlp.experts.local_experts.{local}.linear_fc1.weight"
            assert torch.equal(tensors[key], expected)


def test_checkpoint_without_arguments(tmp_path: Path) -> None:
    """Upstream's files of Mamba 2 carry none: sizes are read off the folders, the rest off config.json."""
    source = toys.toy(tmp_path / "hf", "mamba2")
    toys.run(source, tmp_path / "mg", TP, "2", PP, "2", "--mamba-num-groups", "4")
    first, last = (toys.read_mg(tmp_path / "mg")[f"iter_0000001/mp_rank_00_{n:03d}/model_optim_rng.pt"] for n in (0, 1))
    assert {key.split(".")[2] for key in first if ".layers." in key} == {"0", "1"}
    assert "decoder.final_norm.weight" not in first and "embedding.word_embeddings.weight" not in last
    for path in (tmp_path / "mg").glob("*/*/*.pt"):
        content = torch.load(path, weights_only=False)
        del content["args"]
        torch.save(content, path, pickle_protocol=4)
    with pytest.raises(UserError, match="does not say of which family it is"):
        toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    toys.run(tmp_path / "mg", tmp_path / "back", "--hf-cfg-dir", str(source), of="mg", to="hf")
    expect_same_hf(source, tmp_path / "back")


def test_parts_of_two_dtypes(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"].float()
    save_file(weights, source / "model.safetensors")
    with pytest.raises(UserError, match=r"made of several dtypes: .*up_proj\.weight is float32; give --params-dtype"):
        toys.run(source, tmp_path / "mg")
    toys.run(source, tmp_path / "mg", "--params-dtype", "bf16")


def test_config_without_kv_heads(tmp_path: Path) -> None:
    config = {key: value for key, value in toys.CONFIGS["qwen3"].items() if key != "num_key_value_heads"}
    source = toys.toy(tmp_path / "hf", "qwen3", num_key_value_heads=6)
    (source / "config.json").write_text(json.dumps(config))
    toys.run(source, tmp_path / "mg", TP, "2")
    toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    expect_same_hf(source, tmp_path / "back")


def test_arguments_of_a_training_run(tmp_path: Path) -> None:
    """They say KV groups by another name, and say 1 where there is no group-query attention."""
    for groups in (2, 6):
        source = toys.toy(tmp_path / f"hf{groups}", "qwen3", num_key_value_heads=groups)
        mg = tmp_path / f"mg{groups}"
        toys.run(source, mg, TP, "2")
        for path in mg.glob("*/*/*.pt"):
            content = torch.load(path, weights_only=False)
            content["args"].group_query_attention = groups != 6
            content["args"].num_query_groups = groups if groups != 6 else 1
            del content["args"].num_key_value_heads
            torch.save(content, path, pickle_protocol=4)
        toys.run(mg, tmp_path / f"back{groups}", of="mg", to="hf")
        expect_same_hf(source, tmp_path / f"back{groups}")


def test_missing_and_unknown_tensors(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    weights = load_file(source / "model.safetensors")
    fewer = {name: value for name, value in weights.items() if name != "model.layers.2.mlp.up_proj.weight"}
    save_file(fewer, source / "model.safetensors")
    with pytest.raises(UserError, match=r"no tensor model\.layers\.2\.mlp\.up_proj\.weight"):
        toys.run(source, tmp_path / "mg")
    save_file(weights | {"model.layers.0.strange.weight": torch.ones(1)}, source / "model.safetensors")
    with pytest.raises(UserError, match=r"1 source tensors have no place .*: model\.layers\.0\.strange\.weight"):
        toys.run(source, tmp_path / "mg")
    save_file(weights | {"model.norm.weight": torch.ones(47)}, source / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight has shape \[47\], but config\.json says \[48\]"):
        toys.run(source, tmp_path / "mg")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_shards_index_and_companions(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "merges.txt"):
        (source / name).write_text("{}")
    toys.run(source, tmp_path / "mg", PP, "2")
    flags = ["--max-shard-size", "60KB", "--hf-cfg-dir", str(source)]
    toys.run(tmp_path / "mg", tmp_path / "back", *flags, of="mg", to="hf")
    back = tmp_path / "back"
    index = json.loads((back / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files == sorted(path.name for path in back.glob("*.safetensors"))
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in toys.read_hf(source).values())
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json", "merges.txt"} <= {
        path.name for path in back.iterdir()
    }
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    expect_same_hf(source, back)


def test_existing_output(tmp_path: Path) -> None:
    """Weights are not overwritten; an empty folder, and one with other files, are used."""
    source = toys.toy(tmp_path / "hf", "qwen3")
    (tmp_path / "mg").mkdir()
    toys.run(source, tmp_path / "mg")
    with pytest.raises(UserError, match="already holds latest_checkpointed_iteration"):
        toys.run(source, tmp_path / "mg")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.md").write_text("mine")
    toys.run(source, tmp_path / "other")
    assert (tmp_path / "other" / "notes.md").read_text() == "mine"
    expect_same_mg(tmp_path / "mg", tmp_path / "other")
    assert not list(tmp_path.glob("*.partial"))


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    usage = namedtuple("usage", "total used free")(10**9, 10**9, 1000)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"only 0 MB are free"):
        toys.run(source, tmp_path / "mg")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("to", ["mg", "hf"])
def test_failure_leaves_nothing(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails in one thread ends all, and no folder is left that anything would load."""
    source, of = toys.toy(tmp_path / "hf", "qwen3"), "hf"
    if to == "hf":
        toys.run(source, tmp_path / "from", PP, "2")
        source, of = tmp_path / "from", "mg"
    before = sorted(tmp_path.iterdir())
    original, calls = fill.write_slab, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) > 5:
            raise OSError(28, "No space left on device")
        return original(*args, **kwargs)

    monkeypatch.setattr(fill, "write_slab", failing)
    with pytest.raises(UserError, match=r"writing failed \(No space left on device\)"):
        toys.run(source, tmp_path / "out", of=of, to=to)
    assert sorted(tmp_path.iterdir()) == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("convert")]


def test_leftovers_of_a_kill_are_replaced(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    for left in ("iter_0000001", ".unpublished_conversion"):
        (tmp_path / "mg.partial" / left).mkdir(parents=True)
    toys.run(source, tmp_path / "mg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mg"]
