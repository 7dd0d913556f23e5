"""Where samples and tokens come from."""

from mindspeed_llm.flag import Group, count, positive, several, switch, value

_DATA = "training.data"
# As in `tasks.preprocess.tokenizers`, whose import loads numpy.
_TOKENIZER_KINDS = ("PretrainedFromHF", "GPTSentencePieceTokenizer", "GPT2BPETokenizer", "MagistralTokenizer")

DATA = Group(
    title="Data",
    flags=(
        several(
            "--data-path",
            str,
            None,
            "prefix of a .bin/.idx pair, or weights and prefixes in turn; or a raw file (jsonl, parquet, ...), which "
            "is tokenized once.",
            _DATA,
            metavar="[WEIGHT] PREFIX",
        ),
        value(
            "--split",
            str,
            None,
            "parts of --data-path for training, validation and test; 969,30,1 by default.",
            _DATA,
            metavar="N,N,N",
        ),
        several(
            "--train-data-path", str, None, "as --data-path, for training alone.", _DATA, metavar="[WEIGHT] PREFIX"
        ),
        several(
            "--valid-data-path", str, None, "as --data-path, for validation alone.", _DATA, metavar="[WEIGHT] PREFIX"
        ),
        several("--test-data-path", str, None, "as --data-path, for the test alone.", _DATA, metavar="[WEIGHT] PREFIX"),
        switch("--mock-data", "samples that are made up.", _DATA),
        value("--seq-length", positive, None, "tokens of a sample.", f"{_DATA} training.train_step"),
        value(
            "--data-cache-path",
            str,
            None,
            "folder for sample indexes; by default beside the data.",
            _DATA,
            metavar="DIR",
        ),
        switch("--no-shared-storage", "nodes share no disk: each makes its own sample indexes.", _DATA),
        value("--num-workers", count, 2, "threads that read samples ahead; 0: none.", _DATA),
        switch("--reset-position-ids", "count learned positions anew in each document of a sample.", _DATA),
        switch("--eod-mask-loss", "no loss where the end of a document is the input.", _DATA),
        value(
            "--handler-name",
            str,
            "GeneralPretrainHandler",
            "a raw file: layout of its records.",
            _DATA,
            metavar="HANDLER",
        ),
        several("--json-keys", str, ("text",), "a raw file: the column with the text.", _DATA, metavar="COLUMN"),
        switch("--append-eod", "a raw file: end each document with the token for that.", _DATA),
        value("--workers", positive, 1, "a raw file: processes that tokenize it.", _DATA),
    ),
)

TOKENIZER = Group(
    title="Tokenizer",
    flags=(
        value("--tokenizer-type", str, None, "kind of tokenizer.", _DATA, choices=_TOKENIZER_KINDS),
        value("--tokenizer-name-or-path", str, None, "model directory (PretrainedFromHF).", _DATA, metavar="PATH"),
        switch("--tokenizer-not-use-fast", "do not use the tokenizer's fast form (PretrainedFromHF).", _DATA),
        value("--tokenizer-model", str, None, "model file (GPTSentencePieceTokenizer, ...).", _DATA, metavar="FILE"),
        value("--vocab-file", str, None, "vocabulary (GPT2BPETokenizer).", _DATA, metavar="FILE"),
        value("--merge-file", str, None, "merges (GPT2BPETokenizer).", _DATA, metavar="FILE"),
    ),
)
