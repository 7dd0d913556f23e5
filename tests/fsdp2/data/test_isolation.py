"""Neatly packed batches through a transformers model: the same numbers as each sample alone."""

import pytest
import torch

from tests.fsdp2.data.helpers import build, make_config, write_jsonl
from tests.support.tokenizers import byte_tokenizer


def _losses(model, bundle):
    total, count = 0.0, 0
    for step in bundle.train.micro_batches():
        for batch in step:
            inputs = {k: batch[k] for k in ("input_ids", "attention_mask", "position_ids") if batch[k] is not None}
            # With a cache transformers does not look for segments in the position ids.
            logits = model(**inputs, use_cache=False).logits
            labels = batch["labels"]
            total = total + torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).double(), labels.flatten(), ignore_index=-100, reduction="sum"
            )
            count += int((labels != -100).sum())
    return total, count


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_equals_unpacked(tmp_path, attention):
    from transformers import LlamaConfig, LlamaForCausalLM

    rows = [{"instruction": "q" * (1 + i % 7), "output": "answer" + "!" * (i % 4)} for i in range(11)]
    data = {"dataset": {"file_name": write_jsonl(tmp_path / "a.jsonl", rows)}, "template": "default", "cutoff_len": 96}
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, attn_implementation=attention,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    results = []
    for packing in (False, True):
        model.zero_grad()
        # Two rows of a batch, so that a ragged last batch with a filler row is part of it.
        bundle = build(make_config(tmp_path, {**data, "neat_packing": packing}, num_train_epochs=1), tokenizer)
        total, count = _losses(model, bundle)
        total.backward()
        results.append((total.item(), count, [parameter.grad.clone() for parameter in model.parameters()]))
    (alone, targets, gradients), (packed, packed_targets, packed_gradients) = results
    assert targets == packed_targets
    assert packed == pytest.approx(alone, rel=1e-5)
    for expected, found in zip(gradients, packed_gradients, strict=True):
        assert torch.isfinite(found).all()
        assert (expected - found).norm() <= 1e-5 * expected.norm()
