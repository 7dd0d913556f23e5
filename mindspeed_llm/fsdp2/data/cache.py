"""Prepared data on disk, with this backend's fields in the messages."""

import functools

from mindspeed_llm.tasks.preprocess import prepared
from mindspeed_llm.tasks.preprocess.prepared import cache_key, files_identity

__all__ = ["build_once", "cache_key", "files_identity", "stored"]

_STORAGE = "data.no_shared_storage: true (mg), data.data_shared_file_system: false (lf)"
build_once = functools.partial(prepared.build_once, storage_flag=_STORAGE)
stored = functools.partial(prepared.stored, storage_flag=_STORAGE, folder_flag="training.output_dir")
