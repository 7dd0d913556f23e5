"""Load the tokenizer that options name."""

import logging
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.hub_access import looks_like_path, prepare_hub
from mindspeed_llm.tasks.preprocess.tokenizers.base import TOKENIZER_KINDS, Tokenizer, TokenizerOptions
from mindspeed_llm.tasks.preprocess.tokenizers.gpt2_files import read_gpt2_files
from mindspeed_llm.tasks.preprocess.tokenizers.hf_files import NeedsTransformers, load_with_transformers, read_hf_files
from mindspeed_llm.tasks.preprocess.tokenizers.magistral_tokenizer import MagistralTokenizer
from mindspeed_llm.tasks.preprocess.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from mindspeed_llm.tasks.preprocess.tokenizers.transformers_tokenizer import TransformersTokenizer

_LOG = logging.getLogger("mindspeed_llm")


def load_tokenizer(options: TokenizerOptions) -> Tokenizer:
    """Load a tokenizer. Raises UserError when a file or a flag is missing, or a file cannot be read."""
    if options.kind == "PretrainedFromHF":
        return _load_hf(options)
    if options.kind == "GPTSentencePieceTokenizer":
        return SentencePieceTokenizer(_model_file(options))
    if options.kind == "GPT2BPETokenizer":
        for flag, value in (("--vocab-file", options.vocab_file), ("--merge-file", options.merge_file)):
            if value is None:
                raise UserError(f"--tokenizer-type GPT2BPETokenizer needs {flag}")
        assert options.vocab_file is not None and options.merge_file is not None
        return read_gpt2_files(Path(options.vocab_file), Path(options.merge_file))
    if options.kind == "MagistralTokenizer":
        path = options.model or options.name_or_path
        if path is None:
            raise UserError("--tokenizer-type MagistralTokenizer needs --tokenizer-name-or-path or --tokenizer-model")
        return MagistralTokenizer(Path(path))
    raise UserError(f"--tokenizer-type {options.kind!r} is unknown; expected one of {', '.join(TOKENIZER_KINDS)}")


def _load_hf(options: TokenizerOptions) -> Tokenizer:
    name = options.name_or_path
    if name is None:
        raise UserError("--tokenizer-type PretrainedFromHF needs --tokenizer-name-or-path")
    if not Path(name).expanduser().exists():
        if looks_like_path(name):
            raise UserError(f"--tokenizer-name-or-path {name} does not exist")
        return _load_from_hub(name, options)
    if options.use_fast:
        try:
            return read_hf_files(Path(name).expanduser(), trust_remote_code=options.trust_remote_code)
        except NeedsTransformers as reason:
            _LOG.info("tokenizer %s: loading it with transformers, which takes seconds (%s)", name, reason)
    else:
        _LOG.info(
            "tokenizer %s: loading it with transformers and use_fast=False; transformers 5 has one kind of each "
            "tokenizer, so that the ids are the same",
            name,
        )
    loaded = load_with_transformers(
        str(Path(name).expanduser()),
        trust_remote_code=options.trust_remote_code,
        use_fast=options.use_fast,
    )
    return TransformersTokenizer(loaded, is_final=True)


def _load_from_hub(name: str, options: TokenizerOptions) -> Tokenizer:
    problem = prepare_hub(f"--tokenizer-name-or-path {name}")
    try:
        loaded = load_with_transformers(name, trust_remote_code=options.trust_remote_code, use_fast=options.use_fast)
    except UserError as error:
        if problem is None:
            raise
        raise UserError(
            f"--tokenizer-name-or-path {name}: there is no such directory, the cache of the hub has no tokenizer of "
            f"that name, and the hub is not asked: {problem}. Name a directory that holds the tokenizer's files"
        ) from error
    return TransformersTokenizer(loaded, is_final=True)


def _model_file(options: TokenizerOptions) -> Path:
    if options.model is not None:
        return Path(options.model)
    if options.name_or_path is not None and (file := Path(options.name_or_path) / "tokenizer.model").is_file():
        return file
    raise UserError(
        "--tokenizer-type GPTSentencePieceTokenizer needs --tokenizer-model (a sentencepiece model file), or "
        "--tokenizer-name-or-path with a directory that holds tokenizer.model"
    )
