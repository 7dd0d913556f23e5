"""What the tokenizer and the model's vocabulary say about token ids."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer, TokenizerOptions, load_tokenizer

_NEED_EOD = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """What the tensors of a batch depend on beside its tokens."""

    vocab_size: int
    """Ids from 0 to below this have a meaning for the model."""
    eod_id: int | None = None
    """The id that ends documents; needed by the three rules below."""
    pad_id: int | None = None
    """An id that is never a target: it fills up documents (--pad-to-multiple-of of the preprocessing)."""
    isolates_documents: bool = False
    restarts_positions: bool = False
    masks_eod: bool = False

    @property
    def needs_eod(self) -> bool:
        """Whether it matters where documents end."""
        return self.isolates_documents or self.restarts_positions or self.masks_eod


def named_tokenizer(args: Namespace) -> Tokenizer | None:
    """The tokenizer that the flags name; None where they name none. Raises UserError where it cannot be loaded."""
    if not (args.tokenizer_type or args.tokenizer_name_or_path or args.tokenizer_model or args.vocab_file):
        return None
    return load_tokenizer(
        TokenizerOptions(
            kind=args.tokenizer_type or TokenizerOptions.kind,
            name_or_path=args.tokenizer_name_or_path,
            model=args.tokenizer_model,
            vocab_file=args.vocab_file,
            merge_file=args.merge_file,
            use_fast=not args.tokenizer_not_use_fast,
        )
    )


def vocabulary_of(args: Namespace, tokenizer: Tokenizer | None) -> int:
    """Ids that have a meaning for the model. Raises UserError where the tokenizer has more tokens."""
    vocab_size = args.vocab_size or args.padded_vocab_size
    if tokenizer is not None and len(tokenizer) > vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model's vocabulary has {vocab_size} (--vocab-size "
            f"{args.vocab_size}, --padded-vocab-size {args.padded_vocab_size}); name the model's own tokenizer, or "
            "give the model a larger vocabulary"
        )
    return vocab_size


def token_rules(args: Namespace, tokenizer: Tokenizer | None) -> TokenRules:
    """The rules that the flags ask for.

    Where samples are made up and no tokenizer says it, documents end with the last id. A pad token is taken for padding
    only where it is no other special token, as in megatron-core: of many models it is the end-of-document token. Raises
    UserError where the end-of-document token is needed and not known, or where the tokenizer has more tokens than the
    model.
    """
    vocab_size = vocabulary_of(args, tokenizer)
    eod_id = None if tokenizer is None else tokenizer.eos_token_id
    if eod_id is None and args.mock_data:
        eod_id = vocab_size - 1
    needing = [f"--{name.replace('_', '-')}" for name in _NEED_EOD if getattr(args, name)]
    if needing and eod_id is None and tokenizer is None:
        raise UserError(
            f"{' '.join(needing)}: the token that ends documents is not known; name the tokenizer with "
            "--tokenizer-name-or-path (--tokenizer-type says its kind)"
        )
    if needing and eod_id is None:
        raise UserError(
            f"{' '.join(needing)}: the tokenizer has no eos token, so that nothing ends documents; name one in its "
            "tokenizer_config.json, or leave the flags out"
        )
    return TokenRules(
        vocab_size=vocab_size,
        eod_id=eod_id,
        pad_id=None if tokenizer is None else _padding(tokenizer),
        isolates_documents=args.reset_attention_mask,
        restarts_positions=args.reset_position_ids,
        masks_eod=args.eod_mask_loss,
    )


def _padding(tokenizer: Tokenizer) -> int | None:
    pad = tokenizer.pad_token_id
    return None if pad in (tokenizer.eos_token_id, tokenizer.bos_token_id) else pad
