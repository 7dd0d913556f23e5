"""The error that a user's mistake raises."""


class UserError(ValueError):
    """A mistake that the user can mend: a wrong value, a missing file, settings that disagree.

    Its text is shown as it is, without a traceback, and the process ends with exit code 2 (see `mindspeed_llm.cli`). It
    therefore names the file or field, the value found, the value expected, and what to do.
    """
