"""Directories with small tokenizers of the kinds that models bring, as Hugging Face writes them."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and then it isn't there any more; we've seen it go.",
    "def main(argv):\n    return {'a': 1, \"b\": [2, 3]}  # comment\n",
    "Ein Fuß im Äther — naïve café, señor! 12345 67.89 %",
    "人工智能模型的预训练数据。谢谢大家！",
    "Привет, мир. Как дела? שלום עולם. مرحبا بالعالم. नमस्ते दुनिया. こんにちは世界。안녕하세요",
] * 4

TEXTS = [
    "", " ", "\n", "hello", " hello  world ", "Hello\r\nWorld\t!", "I'll say: don't—it's 3.14159 or 1,000,000?",
    "tabs\t\tand\n\n\nnewlines  \n ", "🙂🤖 family 👨\u200d👩\u200d👧 flag 🇩🇪", "ﬁ ﬂ ½ ① Ⅳ e\u0301 é \u1e9b\u0323",
    "谢谢，再见。", "مرحبا بالعالم", "שלום", "नमस्ते", "ไทย", "\u200b\u200e\ufeff\u00a0\u3000", "a\x00b\x01\x7f\x1b[0m",
    "<s>begin</s> <s> x </s>end<|endoftext|>more <|im_start|>user\nhi<|im_end|>\n", "<extra>  <EXTRA>x<extra>",
    "[CLS] a [MASK] b [SEP]", "\U0010ffff\ufffd", "word" * 50, "▁under▁score ▁ _", "the theme",
    "x = foo(bar)[0] ** 2 != y // 3 <= 4",
]  # fmt: skip
"""Texts that pull tokenizers apart: white space, scripts, emoji, control characters, special tokens written out."""


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Random strings over all planes of Unicode that hold characters, mixed with pieces of `TEXTS`."""
    rng = random.Random(seed)
    planes = [(0, 0x7F), (0x80, 0x2FF), (0x370, 0xFFF), (0x2000, 0x2BFF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3)]
    planes += [(0xF900, 0xFFFD), (0x1F000, 0x1FAFF), (0x20000, 0x20FFF)]
    texts = []
    for _ in range(count):
        pieces = []
        for _ in range(rng.randint(1, 12)):
            if rng.random() < 0.3:
                pieces.append(rng.choice(TEXTS))
            else:
                low, high = rng.choice(planes)
                pieces.append("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 8))))
        texts.append("".join(pieces))
    return texts


def byte_level_bpe(
    *specials: str | AddedToken, vocab_size: int = 600, pre_tokenizer: Any = None, normalizer: Any = None
) -> Tokenizer:
    """A trained byte-level BPE with every byte in its vocabulary, and `specials` after it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(list(specials))
    return backend


def qwen_like(*specials: str, words: str | None = None) -> Tokenizer:
    """Byte-level BPE with the normalizer and the word pattern of Qwen (or another pattern)."""
    pattern = words or (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    return byte_level_bpe(
        *specials, pre_tokenizer=pre_tokenizers.Sequence([split, byte_level]), normalizer=normalizers.NFC()
    )


def llama_like() -> Tokenizer:
    """BPE over ▁ with byte fallback, a begin token put in front."""
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))])}
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    for token in model["vocab"]:
        vocab.setdefault(token, len(vocab))
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    begin(backend, "<s>")
    return backend


def begin(backend: Tokenizer, bos: str | None = None, eos: str | None = None) -> None:
    """Let `backend` put tokens around texts."""
    single = f"{bos + ' ' if bos else ''}$A{' ' + eos if eos else ''}"
    tokens = [(token, backend.token_to_id(token)) for token in (bos, eos) if token]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B", special_tokens=list(dict.fromkeys(tokens))
    )


def wordpiece() -> Tokenizer:
    """WordPiece with BERT's normalizer and markers."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    specials = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    backend.train_from_iterator(
        SENTENCES, trainers.WordPieceTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    )
    begin(backend, "[CLS]", "[SEP]")
    return backend


def unigram() -> Tokenizer:
    """Unigram over ▁ with byte fallback."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", -12.0) for byte in range(256))]
    words = {word for text in SENTENCES for word in text.replace(" ", " ▁").split(" ")}
    letters = {letter for word in words for letter in word}
    pieces += [(word, -6.0 - len(word) / 10) for word in sorted(words - letters) if word]
    pieces += [(letter, -9.0) for letter in sorted(letters)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def write_tokenizer(
    folder: Path, backend: Tokenizer, config: dict[str, Any], model_type: str | None = None, **files: Any
) -> Path:
    """Write tokenizer.json, tokenizer_config.json, config.json (with a model type) and other JSON files by stem."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    contents = {"tokenizer_config": config, **files}
    if model_type is not None:
        contents["config"] = {"model_type": model_type}
    for stem, content in contents.items():
        (folder / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def changed(backend: Tokenizer, change: Callable[[dict[str, Any]], None]) -> Tokenizer:
    """The tokenizer with its tokenizer.json changed in place by `change`."""
    description = json.loads(backend.to_str())
    change(description)
    return Tokenizer.from_str(json.dumps(description))
