"""Resuming needs no more memory than starting: what a checkpoint holds is read right into its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import RankPool
from tests.support.runs import text_data, write_config, write_texts
from tests.support.tokenizers import byte_tokenizer

# 59 million parameters: 0.24 GB in fp32, and three times that with the gradients and both moments.
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


@pytest.mark.distributed
def test_peak_of_a_resumed_run(rank_pool: RankPool, tmp_path: Path, repository: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    byte_tokenizer(pad_token="<pad>").save_pretrained(model)
    data = text_data(write_texts(tmp_path / "data.jsonl", 8), manager="lf")

    def command(name: str, **training: Any) -> list[str]:
        fields: dict[str, Any] = {"stage": "pt", "save_hf_weights": False, "num_train_epochs": 1.0, **training}
        config = write_config(tmp_path / name, model, data, **fields)
        return [config, "--model.train_from_scratch", "--model.init_model_with_meta_device"]

    def peak(name: str, **training: Any) -> int:
        """Peak RSS of a run in KiB."""
        process = subprocess.Popen(
            [sys.executable, "train_fsdp2.py", *command(name, **training)],
            cwd=repository,
            # glibc's own threshold grows as blocks are freed, and with it the peak, by chance.
            env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, output
        return usage.ru_maxrss

    (saved,) = rank_pool.run("tests.distributed.runs:train", ranks=1, argv=command("saved", max_steps=1, save_steps=1))
    assert saved["code"] == 0
    fresh = peak("fresh", max_steps=2)
    resumed = peak("saved", max_steps=2, resume_from_checkpoint="latest")
    # Weights, gradients and moments are all there in both.
    assert fresh > 4 * 0.23e6
    assert resumed <= 1.1 * fresh, f"resumed {resumed / 1e6:.2f} GB, fresh {fresh / 1e6:.2f} GB"
    print(f"peak: resumed {resumed / 1e6:.3f} GB, fresh {fresh / 1e6:.3f} GB, ratio {resumed / fresh:.3f}")
