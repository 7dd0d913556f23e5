"""The layout of nearly all templates: one slot per role, filled in order."""

from collections.abc import Iterator, Sequence

from mindspeed_llm.tasks.preprocess.layouts.base import PieceTurn, RenderOptions, has_question, split_turns
from mindspeed_llm.tasks.preprocess.layouts.thoughts import Place, prompt_thought, reply_text
from mindspeed_llm.tasks.preprocess.records import Conversation, Message
from mindspeed_llm.tasks.preprocess.templates import Piece, Template
from mindspeed_llm.tasks.preprocess.tool_formats import TOOL_FORMATS, ToolCall, parse_calls, parse_tools


class SlotLayout:
    """Turns of prefix, blocks of tools and system, question or results (source), and reply (target).

    <prefix> <tools> <system> <user> | <assistant>   <separator> <user> | <assistant>   ...
    """

    def __init__(self, template: Template, options: RenderOptions) -> None:
        self._template, self._options = template, options
        self._tool_format = TOOL_FORMATS[template.tool_format]

    def pieces(
        self, conversation: Conversation, *, one_turn: bool = False, empty_in_target: bool = False
    ) -> Iterator[PieceTurn]:
        template = self._template
        turns = split_turns(conversation.messages)
        question = max((i for i, (sources, _) in enumerate(turns) if has_question(sources)), default=0)
        for index, (sources, reply) in enumerate(turns):
            number = str(index + template.first_index)
            opening, question_lead = self._opening(conversation) if index == 0 else (template.separator.fill(), "")
            source = opening + self._source(sources, question_lead, number, is_first=index == 0)
            if reply is None:
                yield _with_text(source, prompt_thought(template, self._options)), [], None
                return
            place = Place(is_last=index == len(turns) - 1, after_question=index >= question, one_turn=one_turn)
            empty, target = self._target(reply, place, number)
            if self._options.enable_thinking or empty_in_target:
                target = _with_lead(empty, target, joined=template.thinking.parsed)
            else:
                source = _with_text(source, empty)
            if template.role_marks is not None:
                following = None if place.is_last else turns[index + 1][0][0].role
                target.append(self._end_mark(reply, following))
            yield source, target, reply

    def _opening(self, conversation: Conversation) -> tuple[list[Piece], str]:
        """Pieces in front of the first question, and the text that the question itself begins with."""
        template = self._template
        pieces = template.prefix.fill()
        system = conversation.system or template.default_system
        if conversation.tools:
            listing = self._tool_format.listing(parse_tools(conversation.tools))
            if template.tools is not None:
                pieces += template.tools.fill(content=listing)
            else:
                system += self._tool_format.lead + listing if system else listing
        if template.system_end:
            system += "\n" * bool(system) + template.system_end
        block = template.system.fill(content=system) if system else []
        if template.system_in_user:
            return pieces, "".join(piece for piece in block if isinstance(piece, str))
        return pieces + block, ""

    def _source(self, sources: Sequence[Message], lead: str, number: str, *, is_first: bool) -> list[Piece]:
        template, role = self._template, sources[0].role
        slot = template.user if role == "user" else template.observation
        contents = [message.content for message in sources]
        mark = template.thinking.no_thinking_mark
        if role == "user" and mark and self._options.enable_thinking is False:
            contents = [content if content.endswith(mark) else content + mark for content in contents]
        pieces = slot.fill(content=self._stripped(role, lead + slot.join.join(contents)), idx=number)
        # The mark of a turn that follows a reply stands at the reply's end.
        is_marked = template.role_marks is not None and is_first
        return [self._mark(role), *pieces] if is_marked else pieces

    def _target(self, reply: Message, place: Place, number: str) -> tuple[str, list[Piece]]:
        """The empty thought that the turn needs ('' for none), and the pieces of the reply without it."""
        template = self._template
        parts = reply_text(template, self._options, reply, place)
        calls = parse_calls(parts.content) if reply.role == "function" else None
        preface = self._stripped("assistant", parts.preface)
        if calls is None:
            # A call that is not JSON is kept as the text that it is.
            text = self._stripped("assistant", parts.preface + parts.content)
            if not template.thinking.parsed:
                return parts.empty, template.assistant.fill(content=parts.thought + text, idx=number)
            return parts.empty, _with_lead(
                parts.thought, template.assistant.fill(content=text, idx=number), joined=True
            )
        lead = "".join(map(str, template.preface.fill(content=preface))) if preface else ""
        if not template.function.has("content"):
            return parts.empty, _with_lead(parts.thought + lead, self._slot_calls(calls))
        text = lead + template.function.join.join(map(self._tool_format.call, calls))
        if not template.thinking.parsed:
            return parts.empty, template.function.fill(content=parts.thought + text)
        return parts.empty, _with_lead(parts.thought, template.function.fill(content=text), joined=True)

    def _slot_calls(self, calls: Sequence[ToolCall]) -> list[Piece]:
        slot = self._template.function
        pieces: list[Piece] = []
        for call in calls[:-1]:
            filled = slot.fill(name=call.name, arguments=call.arguments_json)
            pieces += [piece for piece in filled if isinstance(piece, str)] + [slot.join]
        return pieces + slot.fill(name=calls[-1].name, arguments=calls[-1].arguments_json)

    def _stripped(self, role: str, text: str) -> str:
        return text.strip() if role in self._template.strip else text

    def _mark(self, role: str) -> str:
        assert self._template.role_marks is not None
        user, observation = self._template.role_marks
        return observation if role == "observation" else user

    def _end_mark(self, reply: Message, following: str | None) -> str:
        """The mark of the turn that follows; at the end, of the one that the reply waits for."""
        waits_for = "observation" if reply.role == "function" and parse_calls(reply.content) else "user"
        return self._mark(following or waits_for)


def _with_text(pieces: list[Piece], text: str) -> list[Piece]:
    return [*pieces, text] if text else pieces


def _with_lead(text: str, pieces: list[Piece], *, joined: bool = False) -> list[Piece]:
    """Pieces with text in front, as a piece of its own or `joined` to a first text piece."""
    if text and joined and pieces and isinstance(pieces[0], str):
        return [text + pieces[0], *pieces[1:]]
    return [text, *pieces] if text else pieces
