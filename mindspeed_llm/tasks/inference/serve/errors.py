"""What a client is told when its request cannot be answered, in the form that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

OVERLOADED = "overloaded"
SHUTTING_DOWN = "shutting_down"


class ApiError(Exception):
    """A request that gets no answer.

    Args:
        status: the HTTP status.
        message: for people.
        param: the field of the request that is wrong.
        code: a word for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_field(name: str, message: str) -> ApiError:
    """The error for a field with a value that it cannot have."""
    return ApiError(400, f"{name}: {message}", param=name, code="invalid_value")


def too_long(name: str, prompt_tokens: int, max_new_tokens: int, length: int) -> ApiError:
    """The error for a prompt, in the field `name`, that leaves no room for what is asked."""
    return ApiError(
        400,
        f"This model's maximum context length is {length} tokens. The request has {prompt_tokens} tokens in the prompt "
        f"and asks for {max_new_tokens} more, {prompt_tokens + max_new_tokens} together; shorten the prompt or ask for "
        "fewer",
        param=name,
        code="context_length_exceeded",
    )
