"""GPT2BPETokenizer: byte-level BPE from vocab.json and merges.txt, as GPT-2 has it."""

from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.tokenizers.rust_tokenizer import RustTokenizer, hash_of_files

END_OF_TEXT = "<|endoftext|>"


def read_gpt2_files(vocab_file: Path, merge_file: Path) -> RustTokenizer:
    """The tokenizer of the two files; `<|endoftext|>`, where the vocabulary has it, is its begin and end token, and
    texts that hold it are split there. Raises UserError when a file is missing or damaged.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    for flag, file in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
        if not file.is_file():
            raise UserError(f"{flag} {file} does not exist")
    try:
        backend = Tokenizer(models.BPE.from_file(str(vocab_file), str(merge_file)))
    except Exception as error:  # the library raises plain Exception
        raise UserError(
            f"{vocab_file} and {merge_file} are not the vocabulary (JSON: token -> id) and merges (two tokens a line) "
            f"of one BPE tokenizer: {error}"
        ) from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {}
    if backend.token_to_id(END_OF_TEXT) is not None:
        backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
        special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    return RustTokenizer(backend, content_hash=hash_of_files(vocab_file, merge_file), special=special)
