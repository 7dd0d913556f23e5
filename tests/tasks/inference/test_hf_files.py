"""What is missing in a model directory is told before anything heavy is imported, in the words of inference.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.adapters.hf_files import check_directory, naming

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
GENERATION = "generation_config.json"
QWEN3 = json.dumps({"model_type": "qwen3"})
_OF_TRAINING = re.compile(r"\b(?:model|training|data)\.(?!safetensors)[a-z_]+|train")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({CONFIG: QWEN3, TOKENIZER: "{}"}, r"--load: .* holds no weights .*; copy the weights of the model there"),
        (
            {CONFIG: QWEN3, TOKENIZER: "{}", WEIGHTS: "", "adapter_config.json": "{}"},
            r"--load: .* holds an adapter too",
        ),
        ({CONFIG: "{", TOKENIZER: "{}", WEIGHTS: ""}, r"config.json is no valid JSON"),
        ({CONFIG: "[]", TOKENIZER: "{}", WEIGHTS: ""}, r"config.json holds a list; expected a JSON object"),
        ({CONFIG: "{}", TOKENIZER: "{}", WEIGHTS: ""}, r"config.json has no model_type"),
        (
            {CONFIG: '{"model_type": "a", "max_position_embeddings": "256"}', WEIGHTS: ""},
            r'config.json: max_position_embeddings "256"; expected a whole number above 0',
        ),
        (
            {CONFIG: '{"model_type": "a", "text_config": {"vocab_size": 0}}', WEIGHTS: ""},
            r"config.json: text_config.vocab_size 0; expected",
        ),
        ({CONFIG: QWEN3, WEIGHTS: "", GENERATION: "[]"}, r"generation_config.json holds a list; expected a JSON"),
        ({CONFIG: QWEN3, WEIGHTS: "", GENERATION: '{"eos_token_id": "x"}'}, r'eos_token_id "x"; expected the id of a'),
        (
            {CONFIG: QWEN3, WEIGHTS: "", GENERATION: '{"eos_token_id": [1, null]}'},
            r"eos_token_id \[1, null\]; expected",
        ),
        ({CONFIG: QWEN3, WEIGHTS: "", GENERATION: '{"eos_token_id": -1}'}, r"eos_token_id -1; expected the id"),
        ({CONFIG: QWEN3, WEIGHTS: ""}, r"--load .* holds no tokenizer .* --tokenizer-name-or-path"),
        ({"adapter_config.json": "{}"}, r"--load = .* holds no config.json but an adapter"),
    ],
)
def test_what_is_missing(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        check_directory(tmp_path, has_other_tokenizer=False)
    assert not _OF_TRAINING.search(str(error.value).replace(str(tmp_path), "")), error.value


def test_a_whole_directory_passes(tmp_path: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        (tmp_path / name).write_text(QWEN3)
    check_directory(tmp_path, has_other_tokenizer=True)
    (tmp_path / TOKENIZER).write_text("{}")
    check_directory(tmp_path, has_other_tokenizer=False)


def test_other_errors_pass_as_they_are() -> None:
    with pytest.raises(UserError, match=r"^model\.other: x$"), naming("--load"):
        raise UserError("model.other: x")


def test_no_torch_is_imported_for_it(tmp_path: Path, repository: Path) -> None:
    (tmp_path / CONFIG).write_text(QWEN3)
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "a"}))
    flags = [
        "--load",
        str(tmp_path),
        "--prompt-file",
        str(tmp_path / "in.jsonl"),
        "--output-file",
        str(tmp_path / "out"),
    ]
    program = """
import sys
from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.main import main
try:
    main(sys.argv[1:])
except UserError as error:
    print(error, [name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *flags], cwd=repository, capture_output=True, text=True, check=True
    )
    assert "holds no weights" in done.stdout and done.stdout.endswith("[]\n"), done.stdout + done.stderr
