"""Chat templates: from messages to the prompt that a model was trained on. Templates run in a jinja2 sandbox.

What a template may use is what transformers offers: raise_exception, strftime_now, tojson, break and continue.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import InvalidRequestError, TokenizerError
from forerun.models.tokenizer import read_json

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's chat template. source: jinja2 text; None when the model has none, then `render` refuses.

    special_tokens: variables such as bos_token that the template may use.
    Raises TokenizerError when the template is not valid jinja2.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._variables = dict(special_tokens or {})
        self._template = None if source is None else _compile(source)

    @classmethod
    def from_directory(cls, directory: Path | str, special_tokens: Mapping[str, str] | None = None) -> "ChatTemplate":
        """The template of a model's directory: chat_template.jinja, chat_template.json, or in tokenizer_config.json."""
        return cls(_read_source(Path(directory)), special_tokens)

    @property
    def available(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **extra: Any) -> str:
        """The prompt for a conversation.

        messages: each with `role` and `content` (a text, or a list of text parts). add_generation_prompt: end where the
        answer begins. extra: further variables, such as tools.
        Raises InvalidRequestError when the messages are malformed, the template refuses them, or there is no template.
        """
        if self._template is None:
            raise InvalidRequestError("this model has no chat template; send a plain prompt instead of messages")
        checked = _checked(messages)
        variables = {**self._variables, **extra, "messages": checked, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(variables)
        except Exception as error:  # a template is foreign code: anything may come out of it
            raise InvalidRequestError(
                f"the model's chat template refused the messages: {error}; check their roles, order and contents"
            ) from error


def _read_source(directory: Path) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = read_json(directory, name).get("chat_template")
        if isinstance(found, list):  # several named ones
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("default")
        if isinstance(found, str):
            return found
    return None


def _compile(source: str) -> "Template":
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %} marks the assistant's words for training; here it is its content."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(f"the chat template is not valid jinja2: line {error.lineno}: {error.message}") from error


def _raise_exception(message: str) -> None:
    raise InvalidRequestError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it in templates; jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple):
        raise InvalidRequestError(
            f"messages must be a list of objects with role and content, not {type(messages).__name__}"
        )
    if not messages:
        raise InvalidRequestError("messages is empty; send at least one message with role and content")
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"message {index} must be an object with role and content, not {type(message).__name__}"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"message {index} needs a role (system, user, assistant or tool), not {role!r}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}
    if isinstance(content, list):
        content = "".join(_text_part(index, part) for part in content)
    if not isinstance(content, str):
        raise InvalidRequestError(
            f"message {index} needs a content: a text or a list of text parts, not {type(content).__name__}"
        )
    return {**message, "content": content}


def _text_part(index: int, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(f"message {index} has a content part of the kind {kind!r}; only text parts are supported")
