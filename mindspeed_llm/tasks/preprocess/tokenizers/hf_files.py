"""Read a Hugging Face tokenizer from its files without transformers, where that provably gives the same ids.

`AutoTokenizer` takes seconds, nearly all of it imports. For most models it does no more than load tokenizer.json; but
some classes build the tokenizer anew from the vocabulary in that file, and settings of tokenizer_config.json may change
or add tokens. So tokenizer.json is taken at its word only where

- the class that transformers will use is known, and is either one that loads the file as it is, or one that would build
  exactly what the file describes;
- every setting of tokenizer_config.json is known to leave ids alone, or says what the file says as well;
- every special token that the settings name is a special token of the file, so that nothing would be added.

Anything else raises `NeedsTransformers`, and the caller lets transformers load the tokenizer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_llm.errors import UserError, in_one_line
from mindspeed_llm.tasks.preprocess.tokenizers.rust_tokenizer import RustTokenizer, hash_of_files

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"


class NeedsTransformers(Exception):
    """tokenizer.json alone may not give the ids of transformers; the text says why."""


@dataclass(frozen=True)
class _Built:
    """What a class of transformers builds around the vocabulary, whatever tokenizer.json says."""

    normalizer: Any
    pre_tokenizer: Any
    defaults: Mapping[str, str] = field(default_factory=dict)


_BYTE_LEVEL_WORDS = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_AS_THE_FILE_SAYS = frozenset({"TokenizersBackend", "PreTrainedTokenizer"})
"""Classes (without the suffix Fast) that load tokenizer.json as it is."""
_BUILT_BY_CLASS = {
    "Qwen2Tokenizer": _Built(
        normalizer={"type": "NFC"},
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _QWEN_WORDS}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        },
        defaults={name: "<|endoftext|>" for name in ("unk_token", "eos_token", "pad_token")},
    ),
    "GPT2Tokenizer": _Built(
        normalizer=None,
        pre_tokenizer=_BYTE_LEVEL_WORDS,
        defaults={name: "<|endoftext|>" for name in ("unk_token", "bos_token", "eos_token")},
    ),
}
MODEL_CLASSES: dict[str, str | None] = {
    "llama": None, "deepseek_v2": None, "deepseek_v3": None, "deepseek_v32": None, "deepseek_v4": None,
    "gpt_oss": None, "minimax": None, "hunyuan_v1_dense": None, "hunyuan_v1_moe": None, "smollm3": None,
    "falcon": None, "seed_oss": None, "arcee": None, "lfm2": None, "bailing_moe": None, "bailing_moe_v2": None,
    "qwen2": "Qwen2Tokenizer", "qwen2_moe": "Qwen2Tokenizer", "qwen2_vl": "Qwen2Tokenizer",
    "qwen2_5_vl": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "qwen3_moe": "Qwen2Tokenizer",
    "qwen3_next": "Qwen2Tokenizer", "qwen3_vl": "Qwen2Tokenizer", "qwen3_vl_moe": "Qwen2Tokenizer",
    "gpt2": "GPT2Tokenizer", "phi": "GPT2Tokenizer", "opt": "GPT2Tokenizer",
    "glm": "TokenizersBackend", "glm4": "TokenizersBackend", "glm4_moe": "TokenizersBackend",
    "glm4_moe_lite": "TokenizersBackend", "internlm2": "TokenizersBackend", "internlm3": "TokenizersBackend",
    "phi3": "TokenizersBackend", "minimax_m2": "TokenizersBackend", "minicpm3": "TokenizersBackend",
    "olmo2": "TokenizersBackend", "olmo3": "TokenizersBackend", "granite": "TokenizersBackend",
    "granitemoe": "TokenizersBackend", "ernie4_5": "TokenizersBackend", "ernie4_5_moe": "TokenizersBackend",
}  # fmt: skip
"""model_type of config.json -> the tokenizer class that transformers has for it; None: the one that the tokenizer's own
settings name. Model types that are not listed are left to transformers."""

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA_TOKENS = ("extra_special_tokens", "additional_special_tokens")
_WITHOUT_EFFECT = frozenset(
    {
        "backend", "is_local", "local_files_only", "model_max_length", "max_len", "name_or_path", "tokenizer_class",
        "processor_class", "model_input_names", "padding_side", "truncation_side", "truncation_strategy", "max_length",
        "stride", "pad_to_multiple_of", "pad_token_type_id", "verbose", "errors", "trim_offsets", "chat_template",
        "response_template", "response_schema", "legacy", "sp_model_kwargs", "use_default_system_prompt",
        "spaces_between_special_tokens", "tokenizer_file", "special_tokens_map_file",
    }
)  # fmt: skip
_MUST_BE_UNSET = ("add_prefix_space", "split_special_tokens", "fix_mistral_regex", "fast_tokenizer_files")
_DEFAULT_FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "special": False}
_CHECKED = ("added_tokens_decoder", "add_bos_token", "add_eos_token", "clean_up_tokenization_spaces")


def read_hf_files(folder: Path, *, trust_remote_code: bool = False) -> RustTokenizer:
    """The tokenizer of a directory, as transformers would load it.

    Raises NeedsTransformers where only transformers can say what the ids are, and UserError when a file is damaged.
    """
    if not folder.is_dir():
        raise NeedsTransformers("it is not a directory")
    if not (folder / TOKENIZER_FILE).is_file() or not (folder / CONFIG_FILE).is_file():
        raise NeedsTransformers(f"{TOKENIZER_FILE} or {CONFIG_FILE} is missing")
    if (folder / "tekken.json").exists():
        raise NeedsTransformers("it holds a tekken.json")
    config = _json_object(folder / CONFIG_FILE)
    names = _class_names(folder, config)
    backend = _backend(folder / TOKENIZER_FILE)
    for name in names - _AS_THE_FILE_SAYS:
        _check_builds_the_same(name, backend)
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    _check_added_ids(backend, added)
    _check_settings(config, backend)
    tokens = _defaults(names, config) | {
        name: value for name, value in config.items() if name.endswith("_token") and not isinstance(value, bool)
    }
    special = {name: _special_token(name, value, added) for name, value in tokens.items() if value is not None}
    for name in _EXTRA_TOKENS:
        extra = config.get(name) or []
        for value in extra.values() if isinstance(extra, Mapping) else extra:
            _special_token(name, value, added)
    _check_declared_tokens(folder, config, backend, special, added)
    declared = config.get("added_tokens_decoder")
    if declared is not None and len(declared) != len(added) and not names <= _AS_THE_FILE_SAYS:
        raise NeedsTransformers(f"its class builds only the added tokens of {CONFIG_FILE}, which are not all")
    _check_begin_and_end(config, backend, special)
    return RustTokenizer(
        backend,
        # The settings too: a chat template may use any token that they name.
        content_hash=hash_of_files(folder / TOKENIZER_FILE, folder / CONFIG_FILE),
        special={name: special[name] for name in ("bos_token", "eos_token", "pad_token") if name in special},
        chat_template=_chat_template(folder, config),
        load_transformers=partial(load_with_transformers, str(folder), trust_remote_code=trust_remote_code),
    )


def load_with_transformers(name_or_path: str, *, trust_remote_code: bool = False, use_fast: bool = True) -> Any:
    """The tokenizer as transformers loads it. Raises UserError when it cannot."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code, use_fast=use_fast)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise UserError(
            f"tokenizer {name_or_path}: transformers cannot load it ({type(error).__name__}: {in_one_line(error)}); "
            f"expected a directory with {TOKENIZER_FILE} and {CONFIG_FILE}, or with the files of its tokenizer class"
        ) from error


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def _backend(file: Path) -> "Backend":
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{file} is not a tokenizer file that can be read: {error}") from error


def _class_names(folder: Path, config: Mapping[str, Any]) -> set[str]:
    """The classes that transformers may choose; all of them have to give the same ids."""
    model_config = _json_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    model_type = model_config.get("model_type")
    if model_type and model_type not in MODEL_CLASSES:
        raise NeedsTransformers(f"the model type {model_type!r} is not one whose tokenizer class is known")
    declared = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    names = {name.removesuffix("Fast") for name in (declared, MODEL_CLASSES.get(model_type or "")) if name}
    if "LlamaTokenizer" in names and '"ByteLevel"' in (folder / TOKENIZER_FILE).read_text(encoding="utf-8"):
        # The class cannot be meant: it is for vocabularies of another kind; transformers loads the file as it is.
        names = names - {"LlamaTokenizer"} | {"TokenizersBackend"}
    if not names:
        raise NeedsTransformers("no tokenizer class is named")
    if unknown := names - _AS_THE_FILE_SAYS - _BUILT_BY_CLASS.keys():
        raise NeedsTransformers(f"its class {sorted(unknown)[0]} may not take {TOKENIZER_FILE} as it is")
    return names


def _defaults(names: set[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens that the class has where the settings name none."""
    defaults: dict[str, Any] = {}
    for name in names - _AS_THE_FILE_SAYS:
        defaults |= _BUILT_BY_CLASS[name].defaults
    if len(names) > 1 and (missing := defaults.keys() - config.keys()):
        raise NeedsTransformers(f"{CONFIG_FILE} does not say {sorted(missing)[0]}, on which its classes differ")
    return defaults


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _check_builds_the_same(name: str, backend: "Backend") -> None:
    built, model = _BUILT_BY_CLASS[name], backend.model
    same = (
        type(model).__name__ == "BPE"
        and _without_offsets(_state(backend.normalizer)) == built.normalizer
        and _without_offsets(_state(backend.pre_tokenizer)) == built.pre_tokenizer
        and (_state(backend.decoder) or {}).get("type") == "ByteLevel"
        and not (model.dropout or model.unk_token or model.continuing_subword_prefix or model.end_of_word_suffix)
        and not (model.byte_fallback or model.ignore_merges)
    )
    if not same:
        raise NeedsTransformers(f"its class {name} builds something else than {TOKENIZER_FILE} describes")
    for token in backend.get_added_tokens_decoder().values():
        if token.special and (token.lstrip or token.rstrip or token.single_word or token.normalized):
            raise NeedsTransformers(f"its class {name} may change the special token {token.content!r}")


def _without_offsets(state: Any) -> Any:
    """The description of a part without what concerns offsets alone."""
    if isinstance(state, dict):
        return {key: _without_offsets(value) for key, value in state.items() if key != "trim_offsets"}
    return [_without_offsets(item) for item in state] if isinstance(state, list) else state


def _check_added_ids(backend: "Backend", added: Mapping[str, "AddedToken"]) -> None:
    """Added tokens beyond the vocabulary follow it without a gap, so that adding them again gives the same ids."""
    size = backend.get_vocab_size(with_added_tokens=False)
    beyond = sorted(i for i, token in backend.get_added_tokens_decoder().items() if i >= size)
    if beyond != list(range(size, size + len(beyond))):
        raise NeedsTransformers("its added tokens do not follow the vocabulary without a gap")


def _check_settings(config: Mapping[str, Any], backend: "Backend") -> None:
    for key, value in config.items():
        is_token = key.endswith("_token") and key not in _CHECKED
        if key in _MUST_BE_UNSET and value not in (None, False):
            raise NeedsTransformers(f"{CONFIG_FILE} sets {key}")
        if not (is_token or key in _WITHOUT_EFFECT or key in _CHECKED or key in _EXTRA_TOKENS or key in _MUST_BE_UNSET):
            raise NeedsTransformers(f"{CONFIG_FILE} has the setting {key}, whose effect is not known")
    if backend.padding is not None and not config.get("pad_token"):
        raise NeedsTransformers(f"{TOKENIZER_FILE} says how to pad, from which a pad token may be taken")
    if getattr(backend.model, "dropout", None):
        raise NeedsTransformers("its merges are dropped at random")
    if config.get("clean_up_tokenization_spaces") and type(backend.model).__name__ != "BPE":
        raise NeedsTransformers("it cleans up spaces when decoding")


def _special_token(name: str, value: Any, added: Mapping[str, "AddedToken"]) -> str:
    """The token that a setting names; it has to be a special token of the file, with the same flags where given."""
    content = value.get("content") if isinstance(value, Mapping) else value
    token = added.get(content) if isinstance(content, str) else None
    if token is None or not token.special:
        raise NeedsTransformers(f"the {name} {content!r} is no special token of {TOKENIZER_FILE}")
    if isinstance(value, Mapping):
        if value.get("__type") != "AddedToken":
            raise NeedsTransformers(f"the {name} is written in a form of its own")
        _check_flags(value, token)
    return token.content


def _check_flags(value: Mapping[str, Any], token: "AddedToken") -> None:
    for flag in ("lstrip", "rstrip", "single_word", "normalized", "special"):
        if flag in value and value[flag] != getattr(token, flag):
            raise NeedsTransformers(f"{flag} of the token {token.content!r} differs between its files")


def _check_declared_tokens(
    folder: Path,
    config: Mapping[str, Any],
    backend: "Backend",
    special: Mapping[str, str],
    added: Mapping[str, "AddedToken"],
) -> None:
    """Tokens that stand in other files besides tokenizer.json say the same there."""
    for token_id, value in (config.get("added_tokens_decoder") or {}).items():
        token = added.get(value.get("content"))
        if token is None or backend.token_to_id(token.content) != int(token_id):
            raise NeedsTransformers(f"{CONFIG_FILE} adds the token {value.get('content')!r}")
        # Where a flag is left out here, transformers takes its default instead of what the other file says.
        _check_flags({**_DEFAULT_FLAGS, "normalized": not value.get("special"), **value}, token)
    if "added_tokens_decoder" in config:
        return
    file = folder / "added_tokens.json"
    for content, token_id in (_json_object(file) if file.is_file() else {}).items():
        if content not in added or backend.token_to_id(content) != token_id:
            raise NeedsTransformers(f"{file.name} adds the token {content!r}")
    file = folder / "special_tokens_map.json"
    for name, value in (_json_object(file) if file.is_file() else {}).items():
        for item in value if isinstance(value, list) else [value]:
            content = _special_token(name, item, added)
            if name in _NAMED_TOKENS and special.get(name) != content:
                raise NeedsTransformers(f"{file.name} names another {name}")


def _check_begin_and_end(config: Mapping[str, Any], backend: "Backend", special: Mapping[str, str]) -> None:
    """Settings that ask for begin or end tokens agree with what the file puts around a text."""
    found = backend.encode("", add_special_tokens=True).ids
    for key, name, place in (("add_bos_token", "bos_token", 0), ("add_eos_token", "eos_token", -1)):
        if key in config:
            token_id = backend.token_to_id(special[name]) if name in special else None
            if bool(config[key]) != bool(found and found[place] == token_id):
                raise NeedsTransformers(f"{key} of {CONFIG_FILE} and {TOKENIZER_FILE} disagree")


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    files = {}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[file.stem] = file
    if files:
        templates = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        return templates["default"] if list(templates) == ["default"] else templates
    template = config.get("chat_template")
    if isinstance(template, list):
        return {item["name"]: item["template"] for item in template}
    return template
