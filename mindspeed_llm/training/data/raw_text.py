"""Raw files that --data-path names: tokenized once, and kept under a name that changes with all that decides ids."""

from __future__ import annotations

import dataclasses
import itertools
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chunks import Chunk, Summary, Work
from mindspeed_llm.tasks.preprocess.engine import empty_files, tokenize_files
from mindspeed_llm.tasks.preprocess.handler_flags import check_flag
from mindspeed_llm.tasks.preprocess.handlers import Handler, WorkOptions, find_handler, make_work
from mindspeed_llm.tasks.preprocess.readers import read_file
from mindspeed_llm.tasks.preprocess.sample_store import key_prefix
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer

_FOLDER = "cache"


@dataclass(frozen=True)
class RawText:
    """Raw files at `path`, a file or a folder of them, that `flag` names."""

    flag: str
    path: Path
    files: tuple[Path, ...]

    def check(self, args: Namespace, tokenizer: Tokenizer | None) -> None:
        """Try the first record of every file. Raises UserError: no tokenizer, a wrong handler, no record, no text."""
        work = self._work(args, tokenizer)
        firsts = [record for file in self.files for record in itertools.islice(read_file(file), 1)]
        if not firsts:
            raise empty_files(self.files)
        work(firsts)

    def tokenized(self, args: Namespace, tokenizer: Tokenizer | None) -> Path:
        """The prefix of the indexed file, which one process makes unless it exists. Every process must call this."""
        # Here, since it brings torch, which the checks above do without.
        from mindspeed_llm.tasks.preprocess.prepared import cache_key, files_identity, stored

        work = self._work(args, tokenizer)
        assert tokenizer is not None
        key = cache_key(
            files=files_identity(self.files),
            handler=args.handler_name,
            json_keys=list(args.json_keys),
            append_eod=args.append_eod,
            tokenizer=tokenizer.identity(),
        )
        folder = Path(args.data_cache_path) if args.data_cache_path else self.path.parent / _FOLDER
        prefix = folder / f"{self.path.stem}_{key}"

        def chunks(summary: Summary) -> Iterator[Chunk]:
            for chunk in tokenize_files(self.files, work, summary, num_workers=args.workers, name=str(self.path)):
                yield _under_one_name(chunk)

        stored(
            prefix,
            ("text",),
            chunks,
            one_per_node=args.no_shared_storage,
            storage_flag="--no-shared-storage",
            folder_flag="--data-cache-path",
        )
        return key_prefix(prefix, "text")

    def _work(self, args: Namespace, tokenizer: Tokenizer | None) -> Work:
        if tokenizer is None:
            raise UserError(
                f"{self.flag} {self.path} is raw text, which needs a tokenizer: name it with --tokenizer-name-or-path "
                "(--tokenizer-type says its kind)"
            )
        handler = _text_handler(args.handler_name)
        keys = tuple(args.json_keys)
        if len(keys) > 1:
            raise UserError(
                f"--json-keys {' '.join(keys)}: training reads one column of a raw file; preprocess several with "
                "preprocess_data.py"
            )
        if keys != WorkOptions.json_keys:
            check_flag("json_keys", handler)
        return make_work(handler, tokenizer, WorkOptions(append_eod=args.append_eod, json_keys=keys))


def _text_handler(name: str) -> Handler:
    handler = find_handler(name)
    if handler.kind != "pretrain":
        raise UserError(
            f"--handler-name {name} makes {handler.kind} data, but pretraining takes text; choose a pretraining "
            "handler, such as GeneralPretrainHandler"
        )
    return handler


def _under_one_name(chunk: Chunk) -> Chunk:
    """The chunk with its only key called `text`, whatever the column's name is."""
    [key] = chunk.arrays
    return dataclasses.replace(
        chunk,
        arrays={"text": chunk.arrays[key]},
        lengths={"text": chunk.lengths[key]},
        document_sizes={"text": chunk.document_sizes[key]} if chunk.document_sizes else {},
    )
