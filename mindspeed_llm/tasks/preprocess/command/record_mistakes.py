"""What becomes of records that cannot be used because something is wrong with them: an error, or a count."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chunks import Chunk, Work
from mindspeed_llm.tasks.preprocess.json_stream import TOO_DEEP, depth_error
from mindspeed_llm.tasks.preprocess.readers import Mistake, Record

_HINT = "--on-bad-record skip leaves such records out and counts them"


class CheckedWork:
    """The work `inner` on records of which some could not be read.

    Where `skips` is set these are counted as skipped; else the first mistake among the records, of reading or of the
    work, is raised as UserError with a hint at the flag.
    """

    def __init__(self, inner: Work, *, skips: bool) -> None:
        self._inner, self._skips = inner, skips
        self.keys = inner.keys

    @property
    def runs_in_threads(self) -> bool:
        """As the work within says."""
        return getattr(self._inner, "runs_in_threads", False)

    def __call__(self, records: Sequence[Record]) -> Chunk:
        wrong = [number for number, record in enumerate(records) if record.mistake is not None]
        if not wrong:
            return self._worked(records)
        if not self._skips:
            # What stands before it is worked on, so that the first mistake is the one that is reported.
            self._worked(records[: wrong[0]])
            raise UserError(f"{_mistake(records[wrong[0]]).message}. {_HINT}")
        chunk = self._worked([record for record in records if record.mistake is None])
        chunk.num_records = len(records)
        chunk.skipped += [(f"bad record: {_mistake(records[number]).kind}", records[number].where) for number in wrong]
        return chunk

    def _worked(self, records: Sequence[Record]) -> Chunk:
        try:
            return self._tried(records)
        except RecursionError as error:
            # JSON text within a record, such as arguments of a tool call, may be nested as deeply as records.
            marked = [self._marked(record) for record in records]
            if all(record.mistake is None for record in marked):
                raise UserError(f"{records[0].where}: {TOO_DEEP} in this record or one of the next") from error
            return self(marked)

    def _tried(self, records: Sequence[Record]) -> Chunk:
        try:
            return self._inner(records)
        except UserError as error:
            if self._skips or not any(record.where in str(error) for record in records):
                raise
            raise UserError(f"{error}. {_HINT}") from error

    def _marked(self, record: Record) -> Record:
        """The record, with its mistake where the work on it goes too deep."""
        try:
            self._tried([record])
        except RecursionError as error:
            mistake = depth_error(record.where)
            if not self._skips:
                raise UserError(f"{mistake}. {_HINT}") from error
            return record._replace(data={}, mistake=Mistake(TOO_DEEP, str(mistake)))
        return record


def _mistake(record: Record) -> Mistake:
    assert record.mistake is not None
    return record.mistake
