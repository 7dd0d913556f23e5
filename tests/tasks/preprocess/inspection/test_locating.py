"""Which files are meant by what a user types."""

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.inspection.locating import locate
from tests.tasks.preprocess.inspection.data import N, write, write_file, write_summary


@pytest.fixture
def folder(tmp_path):
    """An instruction data set, two of text of which one prefix begins with the other, and one of another tool."""
    write(tmp_path / "alpaca", input_ids=[[1, 2]], labels=[[N, 2]], attention_mask=[[1, 1]])
    write_summary(tmp_path / "alpaca", kind="instruction", keys=["input_ids", "attention_mask", "labels"])
    for name in ("wiki_text_document", "wiki_en_text_document", "books_raw_text_sentence", "merged"):
        write_file(tmp_path / name, [[1, 2]])
    return tmp_path


SAMPLES = ["attention_mask", "input_ids", "labels"]


@pytest.mark.parametrize(
    "typed, prefix, keys",
    [
        ("alpaca", "alpaca", SAMPLES),
        ("alpaca_packed", "alpaca", SAMPLES),
        ("alpaca_packed_input_ids", "alpaca", SAMPLES),
        ("alpaca_packed_labels_document", "alpaca", SAMPLES),
        ("alpaca_packed_labels_document.bin", "alpaca", SAMPLES),
        ("alpaca_summary.json", "alpaca", SAMPLES),
        ("wiki", "wiki", ["text"]),
        ("wiki_text", "wiki", ["text"]),
        ("wiki_text_document.idx", "wiki", ["text"]),
        ("wiki_en", "wiki_en", ["text"]),
        ("books_raw", "books_raw", ["text"]),
        ("books", "books", ["raw_text"]),
        ("books_raw_text_sentence", "books_raw", ["text"]),
        ("merged", "merged", ["text"]),
        ("merged.bin", "merged", ["text"]),
    ],
)
def test_names(folder, typed, prefix, keys):
    location = locate(folder / typed)
    assert (location.prefix, list(location.files)) == (folder / prefix, keys)
    assert (location.summary is not None) == (prefix == "alpaca")
    assert location.is_text == (prefix != "alpaca")


def test_a_summary_says_which_columns_belong_to_a_prefix(folder):
    write_summary(folder / "books", kind="pretrain", keys=["raw_text"])
    location = locate(folder / "books_raw_text_sentence")
    assert (location.prefix, list(location.files)) == (folder / "books", ["raw_text"])
    write_file(folder / "wiki_title_document", [[1]])
    assert list(locate(folder / "wiki").files) == ["text", "title"]
    assert list(locate(folder / "wiki_title_document").files) == ["title"]


def test_a_folder_with_one_data_set(folder, tmp_path_factory):
    alone = tmp_path_factory.mktemp("alone")
    write_file(alone / "wiki_text_document", [[1]])
    assert locate(alone).prefix == alone / "wiki"
    with pytest.raises(UserError, match="may be 5 data sets"):
        locate(folder)


def test_relative_names(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert str(locate("wiki").prefix) == "wiki"


def test_two_kinds_under_one_prefix(folder):
    write_file(folder / "alpaca_text_document", [[1]])
    assert list(locate(folder / "alpaca").files) == SAMPLES  # the summary names these keys
    (folder / "alpaca_summary.json").unlink()
    with pytest.raises(UserError, match=r"may be 2 data sets; name a file(.|\n)*samples: (.|\n)*text: text"):
        locate(folder / "alpaca")
    assert locate(folder / "alpaca_text_document").is_text


def test_what_is_not_there(folder, tmp_path_factory):
    with pytest.raises(UserError, match=r"did you mean .*/alpaca\? (.|\n)*wiki_en \(text: text\)"):
        locate(folder / "alpca")
    with pytest.raises(UserError, match=r"the folder .*/nowhere does not exist"):
        locate(folder / "nowhere" / "a")
    with pytest.raises(UserError, match="holds no indexed files"):
        locate(tmp_path_factory.mktemp("empty") / "a")
    for number in range(30):
        write_file(folder / f"part{number}_text_document", [[1]])
    with pytest.raises(UserError, match="and 15 more"):
        locate(folder / "zzz")


def test_damaged_summaries_matter_only_to_their_own_data(folder):
    for content in ("{", "[]"):
        (folder / "alpaca_summary.json").write_text(content)
        assert locate(folder / "wiki").prefix == folder / "wiki"
        with pytest.raises(UserError, match=r"alpaca_summary\.json is damaged"):
            locate(folder / "alpaca")


def test_text_under_a_prefix_that_ends_in_packed(folder):
    write_file(folder / "c_packed_text_document", [[1]])
    location = locate(folder / "c_packed")
    assert (location.is_text, list(location.files)) == (True, ["text"])
