"""A small tekken.json, the file of Mistral's tokenizers."""

import base64
import json
from pathlib import Path


def write_tekken(file: Path) -> None:
    """Every byte is a token, and a few words are; the special tokens are those that the library has by itself."""
    words = [bytes([byte]) for byte in range(256)] + [b"he", b" t", b"in", b" th", b" the"]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate(words)
    ]
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
        "num_vocab_tokens": len(words),
        "default_vocab_size": len(words) + 20,
        "default_num_special_tokens": 20,
        "version": "v3",
    }
    file.write_text(json.dumps({"config": config, "vocab": vocab}))
