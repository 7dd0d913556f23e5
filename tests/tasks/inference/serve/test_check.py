"""What is refused before a model is loaded."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.serve import check
from mindspeed_llm.tasks.inference.serve.check import KEY_VARIABLE, check_serve, listen, url_of
from tests.tasks.inference.serve.serving import serving_args


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.0.2.1"])
def test_other_machines_need_a_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=f"reached from other machines.*{KEY_VARIABLE}"):
        check_serve(serving_args(host=host))
    if host in ("0.0.0.0", ""):
        assert check_serve(serving_args(host=host, api_key="k")).api_key == "k"
        monkeypatch.setenv(KEY_VARIABLE, "of-the-environment")
        assert check_serve(serving_args(host=host)).api_key == "of-the-environment"
        assert check_serve(serving_args(host=host, api_key="k")).api_key == "k"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_this_machine_needs_none(host: str) -> None:
    address = check_serve(serving_args(host=host))
    assert address.api_key is None
    with listen(address) as bound:
        assert bound.getsockname()[0].startswith("127.")
        assert url_of(bound) == f"http://{bound.getsockname()[0]}:{bound.getsockname()[1]}/v1"


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "schlüssel"])
def test_keys_that_no_header_can_have(key: str) -> None:
    with pytest.raises(UserError, match="--api-key cannot be a key"):
        check_serve(serving_args(api_key=key))


def test_addresses_that_cannot_be_listened_on() -> None:
    with pytest.raises(UserError, match="--port 70000"):
        check_serve(serving_args(port=70000))
    with pytest.raises(UserError, match="'no host' is no address"):
        check_serve(serving_args(host="no host"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port} cannot be listened on"):
            check_serve(serving_args(port=port))


def test_of_several_ranks_one_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as first:
        first.bind(("127.0.0.1", 0))
        first.listen()
        monkeypatch.setenv("RANK", "1")
        assert check_serve(serving_args(port=first.getsockname()[1])).host == "127.0.0.1"


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"uvicorn.*mindspeed_llm\[serve\]"):
        check_serve(serving_args())


def test_checking_needs_no_torch() -> None:
    code = f"import sys, {check.__name__}; print([name for name in ('torch', 'uvicorn') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
