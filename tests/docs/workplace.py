"""A folder laid out as the documentation assumes, with toy models and small data where a reader has real ones."""

from __future__ import annotations

import json
from pathlib import Path

from tests.docs.pages import ROOT, yaml_files

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Paths of the pages -> the toy of tests.support.toys that stands there.
MODELS = {
    "model_from_hf/qwen3_hf": "qwen3",
    "model_from_hf/qwen3_moe_hf": "qwen3_moe",
    "output/quickstart/model": "llama_tied",
    "my_model": "qwen3",
}
ABSOLUTE_PATHS = {"/data/alpaca.jsonl": "data/alpaca.jsonl"}


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from scripts.demo_text import read_topics

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(read_topics().values())[:20], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=256
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def save_model(toy: str, folder: Path) -> None:
    """Write the toy of tests.support.toys with a tokenizer and a chat template, as a complete model directory."""
    from tests.support.toys import save_toy

    folder.parent.mkdir(parents=True, exist_ok=True)
    save_toy(toy, folder)
    _save_tokenizer(folder)


def make_workplace(folder: Path) -> Path:
    """Fill `folder`: links to the repository's code, toy models, data under the names that the pages use."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from scripts import demo_text
    from tests.commands.adapters import save_adapter
    from tests.tasks.checkpoint import toys as checkpoints

    programs = ("train_fsdp2.py", "preprocess_data.py", "convert_ckpt_v2.py")
    for name in (*programs, "examples", "scripts", "configs", "mindspeed_llm"):
        (folder / name).symlink_to(ROOT / name)
    for path, toy in MODELS.items():
        save_model(toy, folder / path)
    checkpoints.toy(folder / "model_from_hf/deepseek3_hf", "deepseek3")
    base = folder / "model_from_hf/qwen3_hf"
    adapter = save_adapter(folder / "my_adapter", checkpoints.read_hf(base))
    form = ("--hf-cfg-dir", str(base), "--lora-target-modules", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    checkpoints.run(adapter, folder / "ckpt/qwen3_lora", *form)
    demo_text.main(["--out", str(folder / "output/quickstart/data")])
    demo_text.main(["--out", str(folder / "output/alpaca"), "--format", "alpaca"])
    texts = [record["text"] for record in demo_text.text_records(demo_text.read_topics(), ["assert", "with"])]
    (folder / "my_text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name, text in yaml_files().items():
        (folder / name).write_text(text)
    (folder / "dataset").mkdir()
    pq.write_table(pa.table({"text": texts}), folder / "dataset/train-00000-of-00001.parquet")
    (folder / "data").mkdir()
    records = [{"instruction": f"Say {word}.", "input": "", "output": f"{word}!"} for word in ["one", "two", "three"]]
    (folder / "data/alpaca.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder
