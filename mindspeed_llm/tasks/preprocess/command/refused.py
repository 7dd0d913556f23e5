"""Flags of the mirrored interface that are refused, and those that can have no effect here, each with the reason."""

REFUSED: dict[str, str] = {
    "--datasets": "nothing reads it; name the data with --input",
    "--reward-tokens": "nothing reads it: reward models are trained on the files of the pairwise handlers",
    "--script-data-dir": "loading scripts are programs that come with the data, and are not run; save the data as "
    "jsonl or parquet and name it with --input",
    "--data-obfuscation": "it needs a closed library (ai_asset_obfuscate) and one fixed model shape",
    "--obf-seed-content": "it belongs to --data-obfuscation, which needs a closed library (ai_asset_obfuscate)",
}
"""Flag -> why it is refused."""

REFUSED_VALUES: dict[tuple[str, str], str] = {
    ("--tokenizer-type", "BertWordPieceLowerCase"): "no model that is trained here has a BERT vocabulary",
    ("--tokenizer-type", "BertWordPieceCase"): "no model that is trained here has a BERT vocabulary",
    ("--dataset-impl", "lazy"): "there is one format of output, mmap",
    ("--dataset-impl", "cached"): "there is one format of output, mmap",
}
"""(Flag, value) -> why the value is refused."""

INERT: dict[str, str] = {
    "--dataset-impl": "mmap is the one format of output",
    "--make-vocab-size-divisible-by": "the vocabulary is padded where the model is built; token ids stay as they are",
}
"""Flag -> why it has no effect; one line says so when it is given."""
