"""The Hugging Face hub: asked once, with a short time-out, before a library asks it again and again for minutes."""

import logging
import sys

_LOG = logging.getLogger("mindspeed_llm")

TIMEOUT_S = 5.0
"""So long the hub may take to answer."""


def looks_like_path(name: str) -> bool:
    """Whether a name cannot be that of something on the hub, which is NAME or OWNER/NAME."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name


def prepare_hub(name: str) -> str | None:
    """Find out whether the hub answers, and keep this process from asking it where it does not.

    Then libraries look into the hub's cache only. Returns why the hub is not asked, None where it is.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    _LOG.info("%s is no path; asking the hub for it", name)
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except Exception as error:  # whatever the HTTP client in use raises: no network, no name server, a proxy's error
        problem = f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {error})"
        _LOG.info("%s; only the cache of the hub is looked into", problem)
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:
            # It has copied the setting when it was imported.
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
        return problem
    return None
