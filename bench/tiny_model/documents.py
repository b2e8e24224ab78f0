"""A training document: text with stretches that are read but not learned, and chat rendering."""

from __future__ import annotations

from dataclasses import dataclass, field

from .tokenizer import END_OF_TEXT, TURN_END, TURN_START

NO_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass
class Document:
    """Text built piece by piece; a piece with `learn=False` gets no loss."""

    text: str = ""
    unlearned: list[tuple[int, int]] = field(default_factory=list)  # character ranges

    def add(self, piece: str, learn: bool = True) -> Document:
        """Append `piece`."""
        if not learn and piece:
            self.unlearned.append((len(self.text), len(self.text) + len(piece)))
        self.text += piece
        return self


def raw(text: str, ends: bool = True) -> Document:
    """Plain text; `ends` says whether its author really stopped there."""
    return Document().add(text).add(END_OF_TEXT, learn=ends)


def chat(
    user: str,
    answer: str,
    thought: str | None = None,
    system: str | None = None,
    history: list[tuple[str, str]] | None = None,
    learn_user: bool = False,
) -> Document:
    """One conversation, laid out exactly as chat_template.jinja does.

    Only the last answer (and, if asked, the last question) is learned. Without a thought the empty
    think block belongs to the prompt, so a model that is not told otherwise always thinks.
    """
    document = Document()
    if system:
        document.add(f"{TURN_START}system\n{system}{TURN_END}\n", learn=False)
    for question, reply in history or []:
        turn = f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n{reply}{TURN_END}\n"
        document.add(turn, learn=False)
    document.add(f"{TURN_START}user\n", learn=False)
    document.add(user + TURN_END, learn=learn_user)
    document.add(f"\n{TURN_START}assistant\n", learn=False)
    if thought is None:
        document.add(NO_THOUGHT, learn=False)
    else:
        document.add(f"<think>\n{thought}\n</think>\n\n")
    return document.add(f"{answer}{TURN_END}\n{END_OF_TEXT}")
