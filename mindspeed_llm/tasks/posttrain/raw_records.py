"""Raw records that --data-path names: preprocessed once, by what `preprocess_data.py` does, and kept under a name that
changes with all that decides the samples.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.files import why_unwritable
from mindspeed_llm.tasks.preprocess.command.arguments import Arguments
from mindspeed_llm.tasks.preprocess.handlers import HANDLERS, Kind, find_handler
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer

if TYPE_CHECKING:
    from mindspeed_llm.tasks.preprocess.command.job import Job

_FOLDER = "cache"
_NO_KEY = "0" * 16
# Arguments of training that are arguments of the preprocessing by the same name.
_SHARED = (
    "handler_name", "map_keys", "prompt_type", "prompt_type_path", "enable_thinking", "drop_thinking",
    "reasoning_effort", "mask_history", "seq_length", "append_eod", "pack", "neat_pack", "workers", "tokenizer_type",
    "tokenizer_name_or_path", "tokenizer_not_use_fast", "tokenizer_model", "vocab_file", "merge_file",
)  # fmt: skip


@dataclass(frozen=True)
class RawRecords:
    """Raw files at `path`, a file or a folder of them, that `flag` names; `kind` is what they are to become."""

    flag: str
    path: Path
    kind: Kind = "instruction"

    def check(self, args: Namespace, tokenizer: Tokenizer | None) -> None:
        """Try the first records of the files. Raises UserError: no tokenizer, a handler or template that does not fit,
        a record that cannot be read."""
        self._job(args, tokenizer)

    def prepared(self, args: Namespace, tokenizer: Tokenizer | None) -> Path:
        """The prefix of the samples, which one process makes unless they exist. Every process must call this."""
        # Here, since these bring torch, which the checks above do without.
        from mindspeed_llm.tasks.preprocess.command.run import run
        from mindspeed_llm.tasks.preprocess.prepared import build_once, cache_key, files_identity
        from mindspeed_llm.tasks.preprocess.sample_store import store_exists

        job = self._job(args, tokenizer)
        key = cache_key(files=files_identity(job.inputs.files()), options=job.options)
        prefix = self._prefix(args, key)
        named = replace(job, arguments=replace(job.arguments, output_prefix=str(prefix)))

        def build() -> None:
            with self._in_words_of_training():
                run(named)

        build_once(
            lambda: store_exists(prefix),
            build,
            one_per_node=args.no_shared_storage,
            storage_flag="--no-shared-storage",
        )
        return prefix

    def _prefix(self, args: Namespace, key: str) -> Path:
        folder = Path(args.data_cache_path) if args.data_cache_path else self.path.parent / _FOLDER
        return folder / f"{self.path.stem}_{key}"

    def _job(self, args: Namespace, tokenizer: Tokenizer | None) -> Job:
        """What `preprocess_data.py` would do, under a name of the length of the final one."""
        from mindspeed_llm.tasks.preprocess.command.job import prepare

        if tokenizer is None:
            raise UserError(
                f"{self.flag} {self.path} is a file of records, which needs a tokenizer: name it with "
                "--tokenizer-name-or-path (--tokenizer-type says its kind)"
            )
        self._check_handler(args)
        folder = self._prefix(args, _NO_KEY).parent
        if reason := why_unwritable(folder):
            raise UserError(
                f"samples made from {self.flag} {self.path} cannot be kept in {folder}: {reason}; name another folder "
                "with --data-cache-path"
            )
        values: dict[str, Any] = {name: getattr(args, name) for name in _SHARED}
        arguments = Arguments(
            input=str(self.path),
            output_prefix=str(self._prefix(args, _NO_KEY)),
            given=frozenset(name for name in _SHARED if name in args.given),
            **values,
        )
        with self._in_words_of_training():
            return prepare(arguments, tokenizer)[0]

    def _check_handler(self, args: Namespace) -> None:
        name, handler = args.handler_name, find_handler(args.handler_name)
        if handler.kind != self.kind or not handler.formatting:
            fitting = [item.name for item in HANDLERS.values() if item.kind == self.kind and item.formatting]
            reason = (
                f"makes {handler.kind} data, but {self.kind} data are wanted"
                if handler.formatting
                else "reads names in dataset_info.json, which preprocess_data.py takes"
            )
            said = f"--handler-name {name} {reason}" if "handler_name" in args.given else "--handler-name is missing"
            raise UserError(f"{self.flag} {self.path}: {said}; choose one of {', '.join(fitting)}")

    @contextlib.contextmanager
    def _in_words_of_training(self) -> Iterator[None]:
        """Let messages name the flags that the user has given."""
        try:
            yield
        except UserError as error:
            text = str(error).replace("--input", self.flag).replace("--output-prefix", "--data-cache-path")
            raise UserError(text) from error
