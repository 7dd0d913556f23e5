"""The flags are frozen, and every mistake is answered with what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.command.arguments import FLAGS
from mindspeed_llm.tasks.preprocess.command.parser import help_text, parse, parse_json_object
from mindspeed_llm.tasks.preprocess.command.refused import INERT, REFUSED, REFUSED_VALUES
from tests.support.command_line import environment

# Flag: default. Those of the mirrored interface first, then our own.
SURFACE = {
    "--input": None,
    "--handler-name": "GeneralPretrainHandler",
    "--map-keys": None,
    "--json-keys": ("text",),
    "--dataset-dir": None,
    "--mix-strategy": "concat",
    "--interleave-probs": None,
    "--seed": 1234,
    "--max-samples": None,
    "--streaming": False,
    "--hf-datasets-params": None,
    "--cache-dir": None,
    "--prompt-type": None,
    "--prompt-type-path": None,
    "--enable-thinking": "none",
    "--drop-thinking": "true",
    "--reasoning-effort": None,
    "--seq-length": None,
    "--append-eod": False,
    "--pack": False,
    "--neat-pack": False,
    "--pad-to-multiple-of": 1,
    "--split-sentences": False,
    "--keep-newlines": False,
    "--dataset-additional-keys": (),
    "--tokenizer-type": "PretrainedFromHF",
    "--tokenizer-name-or-path": None,
    "--tokenizer-not-use-fast": False,
    "--tokenizer-model": None,
    "--vocab-file": None,
    "--merge-file": None,
    "--make-vocab-size-divisible-by": 128,
    "--pad-vocab-size-to": None,
    "--output-prefix": None,
    "--overwrite-cache": False,
    "--dataset-impl": "mmap",
    "--workers": 1,
    "--n-subs": 1,
    "--log-interval": 100,
    "--merge-group-keys": (),
}
OURS = {
    "--mask-history": False,
    "--on-bad-record": "error",
    "--debug": False,
    "--check": False,
    "--inspect": None,
    "--num": 3,
    "--html": None,
    "--whole": False,
}


def test_flags_and_defaults_are_frozen() -> None:
    assert {flag: spec.default for flag, spec in FLAGS.items()} == SURFACE | OURS


def test_what_is_refused_or_idle_is_frozen() -> None:
    assert sorted(REFUSED) == [
        "--data-obfuscation", "--datasets", "--obf-seed-content", "--reward-tokens", "--script-data-dir",
    ]  # fmt: skip
    assert sorted(REFUSED_VALUES) == [
        ("--dataset-impl", "cached"),
        ("--dataset-impl", "lazy"),
        ("--tokenizer-type", "BertWordPieceCase"),
        ("--tokenizer-type", "BertWordPieceLowerCase"),
    ]
    assert sorted(INERT) == ["--dataset-impl", "--make-vocab-size-divisible-by"]


def test_help_documents_every_flag() -> None:
    text = help_text()
    for flag, spec in FLAGS.items():
        assert f"\n  {flag} " in text or f"\n  {flag}\n" in text
        assert len(spec.metadata["doc"]) > 15
    assert all(reason.split()[0] in text for reason in (*REFUSED.values(), *INERT.values()))
    assert "AlpacaStyleInstructionHandler (instruction)" in text and "deepseek2-lite" in text
    assert max(map(len, text.splitlines())) <= 120


def test_values() -> None:
    arguments = parse(
        ["--input", "a b.jsonl", "--json-keys", "text", "title", "--workers=4", "--pack", "--enable-thinking", "True"]
    )
    assert (arguments.input, arguments.json_keys, arguments.workers) == ("a b.jsonl", ("text", "title"), 4)
    assert arguments.pack and not arguments.neat_pack and arguments.enable_thinking == "true"
    assert arguments.given == {"input", "json_keys", "workers", "pack", "enable_thinking"}
    assert parse([]).given == frozenset()


@pytest.mark.parametrize(
    "argv, words",
    [
        ("--inptu a", "unknown flag --inptu; did you mean --input? --help shows all flags"),
        ("--in a", "unknown flag --in; did you mean --input?"),
        ("--num_workers 4", "did you mean --workers?"),
        ("--json_keys text", "did you mean --json-keys?"),
        ("-input a", "unknown flag -input; did you mean --input?"),
        ("--tokenizer-path x", "did you mean --tokenizer-"),
        ("--workers four", "argument --workers: expected a whole number of 1 or more, found 'four'"),
        ("--workers 0", "found '0'"),
        ("--seed -1", "argument --seed: expected a whole number of 0 or more, found '-1'"),
        ("--enable-thinking yes", "argument --enable-thinking: expected one of true, false, none, found 'yes'"),
        ("--mix-strategy interleave", "did you mean interleave_"),
        ("--pack true", "--pack takes no value, found 'true'"),
        ("--output-prefix my data", "'data' belongs to no flag; a value with spaces must stand in quotes"),
        ("--output-prefix", "argument --output-prefix: expected one argument"),
        ("--json-keys text title text", "--json-keys text title text: the same name stands there twice"),
        ("--tokenizer-type BertWordPieceCase", "--tokenizer-type BertWordPieceCase is not available: no model"),
        ("--dataset-impl=lazy", "--dataset-impl lazy is not available: there is one format"),
        *[(f"{flag} x", f"{flag} is not available: {reason}") for flag, reason in REFUSED.items()],
    ],
)
def test_mistakes(argv: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        parse(argv.split())
    assert words in str(error.value)


def test_several_files_of_a_shell_pattern(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.touch()
    with pytest.raises(UserError, match=r"b\.jsonl' belongs to no flag; to read several files name their folder"):
        parse(["--input", *map(str, files)])


def test_json_values() -> None:
    assert parse_json_object("--map-keys", '{"prompt": ""}') == {"prompt": ""}
    for text, words in (
        ("{'prompt': 1}", r"--map-keys: not valid JSON \(.* at character 2\): \{'prompt': 1\}\. Put it in single"),
        ("[1]", r"--map-keys: expected a JSON object, found list: \[1\]"),
    ):
        with pytest.raises(UserError, match=words):
            parse_json_object("--map-keys", text)


def test_help_and_mistakes_load_no_big_library(repository: Path) -> None:
    """In a fresh process: neither the help nor the answer to a typo needs a tokenizer or a reader of columnar files."""
    big = ("torch", "transformers", "datasets", "pyarrow", "tokenizers", "sentencepiece", "megatron")
    for argv, code in ((["--help"], 0), (["--inptu", "a"], 2)):
        program = (
            "import runpy, sys, atexit\n"
            f"atexit.register(lambda: print([name for name in {big!r} if name in sys.modules], file=sys.stderr))\n"
            f"sys.argv = ['preprocess_data.py', *{argv!r}]\n"
            f"runpy.run_path({str(repository / 'preprocess_data.py')!r}, run_name='__main__')\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment(repository), timeout=60
        )
        assert done.returncode == code
        assert done.stderr.splitlines()[-1] == "[]"
        assert ("--output-prefix PREFIX" in done.stdout) == (code == 0)
        assert ("error: unknown flag --inptu" in done.stderr) == (code == 2)
