"""The error that a user's mistake raises, and what goes into its text."""


def in_one_line(error: BaseException, most: int = 300) -> str:
    """The text of another library's error, for a message of ours."""
    text = " ".join(str(error).split())
    return text if len(text) <= most else f"{text[:most]} ..."


class UserError(ValueError):
    """A mistake that the user can mend: a wrong value, a missing file, settings that disagree.

    Its text is shown as it is, without a traceback, and the process ends with exit code 2 (see `mindspeed_llm.cli`). It
    therefore names the file or field, the value found, the value expected, and what to do.
    """
