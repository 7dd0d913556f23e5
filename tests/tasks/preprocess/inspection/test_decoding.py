"""Pieces of text against the tokenizers' own decoding of whole sequences."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mindspeed_llm.tasks.preprocess.inspection import decoding
from mindspeed_llm.tasks.preprocess.inspection.decoding import Decoder, Piece
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer
from tests.tasks.preprocess.inspection.data import EOS, TOKENIZER, ids_of

TEXTS = [
    "plain words, and some more",
    "😀 👨‍👩‍👧 family, 你好，世界! ё\n\t é\u0301 नमस्ते العربية",
    "a literal \N{REPLACEMENT CHARACTER} and \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}",
    "  leading and trailing  ",
    "<|im_start|>user\nhi<|im_end|></s>",
]


def trained_bytes():
    """Byte-level BPE whose merges cross characters."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["</s>"]
    )
    backend.train_from_iterator(["😀😁😂你好世界" * 3, *TEXTS] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def byte_fallback():
    """As Llama-2's: sentencepiece words with a space in front, bytes for what is not in the vocabulary."""
    words = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz,"]
    merges = [("▁", "a"), ("a", "n"), ("▁", "w")]
    words += ["▁a", "an", "▁w"]
    backend = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, merges, byte_fallback=True, unk_token=None)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {"bytes": TOKENIZER, "trained": trained_bytes(), "fallback": byte_fallback()}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_of_the_whole(name, text):
    tokenizer = TOKENIZERS[name]
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
    whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert whole == text
    for known in (tokenizer, as_tokenizer(tokenizer)):
        pieces = Decoder(known).pieces(ids, 0, len(ids))
        assert "".join(piece.text for piece in pieces) == whole
        assert [piece.start for piece in pieces[1:]] + [len(ids)] == [piece.stop for piece in pieces]


def test_characters_stay_whole_and_words_apart(monkeypatch):
    ids = np.array(ids_of("a😀b"))
    assert Decoder(TOKENIZER).pieces(ids, 0, 6) == [Piece("a", 0, 1), Piece("😀", 1, 5), Piece("b", 5, 6)]
    monkeypatch.setattr(decoding, "_MAX_HELD", 1)
    assert "".join(piece.text for piece in Decoder(TOKENIZER).pieces(ids, 0, 6)) == "a����b"


def test_spaces_in_front_of_words_need_their_context(monkeypatch):
    tokenizer = TOKENIZERS["fallback"]
    ids = np.array(tokenizer("an and a", add_special_tokens=False)["input_ids"])
    begin = len(tokenizer("an and", add_special_tokens=False)["input_ids"])
    decoder = Decoder(tokenizer)
    assert "".join(piece.text for piece in decoder.pieces(ids, begin, len(ids))) == " a"
    monkeypatch.setattr(decoding, "_CONTEXT", 0)
    assert "".join(piece.text for piece in decoder.pieces(ids, begin, len(ids))) == "a"


def test_special_tokens_and_unknown_ids():
    decoder = Decoder(TOKENIZER)
    ids = np.array([*ids_of("<|im_end|>"), EOS, *ids_of("x"), 5000, -7, *ids_of("é")[:1], 5000])
    kinds = [(piece.text, piece.kind) for piece in decoder.pieces(ids, 0, len(ids))]
    assert kinds == [
        ("<|im_end|>", "special"), ("</s>", "special"), ("x", "text"), ("id 5000", "unknown"), ("id -7", "unknown"),
        ("\N{REPLACEMENT CHARACTER}", "text"), ("id 5000", "unknown"),
    ]  # fmt: skip
    # A character that is cut off takes neither the marker behind it with it, nor is it a part of the marker.
    ids = np.array([*ids_of("é")[:1], *ids_of("<|im_end|>")])
    expected = [Piece("�", 0, 1), Piece("<|im_end|>", 1, 2, "special")]
    assert decoder.pieces(ids, 0, 2) == expected
    assert decoder.pieces(ids, 0, 1) + decoder.pieces(ids, 1, 2) == expected
    # A marker that is spelt in the data is text, though it reads the same.
    spelt = np.array([token for character in "<|im_end|>" for token in ids_of(character)])
    assert {piece.kind for piece in decoder.pieces(spelt, 0, len(spelt))} == {"text"}
    assert decoder.token(EOS) == Piece("</s>", 0, 1, "special")
    assert decoder.token(5000).kind == "unknown"


def test_a_token_without_text_shows_its_name():
    class Silent:
        bos_token_id = eos_token_id = pad_token_id = None

        def get_vocab(self):
            return {"<control>": 0, "a": 1}

        def decode(self, ids, skip_special_tokens=False):
            return "".join({0: "", 1: "a"}[number] for number in ids)

    pieces = Decoder(Silent()).pieces(np.array([1, 0, 1]), 0, 3)
    assert [(piece.text, piece.kind) for piece in pieces] == [("a", "text"), ("<control>", "special"), ("a", "text")]


def test_heads_and_tails_do_not_cut_characters():
    ids = np.array(ids_of("ab😀cd😀ef"))
    decoder = Decoder(TOKENIZER)
    for count in range(1, len(ids)):
        head = decoder.pieces(ids, 0, len(ids), at_least=count)
        assert head[-1].stop >= count > head[-1].start
        tail = decoder.tail(ids, count, len(ids), earliest=0)
        assert tail[0].start >= count
        assert "�" not in "".join(piece.text for piece in head + tail)


def test_ids_of_another_tokenizer_take_no_time_to_speak_of():
    continuation = np.full(3000, ids_of("😀")[1])
    pieces = Decoder(TOKENIZER).pieces(continuation, 0, len(continuation))
    assert "".join(piece.text for piece in pieces) == "�" * 3000


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", [text for text in TEXTS if "�" not in text])
def test_any_cut_gives_the_text_of_the_whole(name, text):
    tokenizer = TOKENIZERS[name]
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
    decoder = Decoder(tokenizer)
    for cut in range(1, len(ids)):
        pieces = decoder.pieces(ids, 0, cut) + decoder.pieces(ids, cut, len(ids))
        assert [piece.start for piece in pieces[1:]] + [len(ids)] == [piece.stop for piece in pieces]
        if pieces[0] == Piece("▁", 0, 1, "special"):
            # The space that sentencepiece puts in front of a text, cut off from the text.
            del pieces[0]
        parts = [piece for piece in pieces if piece.kind == "part"]
        assert len(parts) <= 1
        if not parts:
            assert "".join(piece.text for piece in pieces) == text
        else:
            # The character stands in the part, too, with what its first token has before it.
            (part,) = parts
            assert "�" not in part.text
            before = "".join(piece.text for piece in pieces if piece.start < part.start)
            after = "".join(piece.text for piece in pieces if piece.start > part.start)
            assert text == before + part.text + after.removeprefix(part.text[-1])
