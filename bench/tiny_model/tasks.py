"""Documents from the sources: word problems, Python, plays, and tasks that copy from the prompt."""

from __future__ import annotations

import ast
import keyword
import random
import re
import string
import textwrap
from collections.abc import Iterator

from .augment import clean_answer, final_number, variant
from .documents import Document, chat, raw
from .sources import Sources

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful assistant. Answer briefly.",
    "You are a friendly assistant that likes numbers, code and plays.",
    "Answer the user's question.",
    "You are a patient teacher.",
)


def maybe_system(rng: random.Random) -> str | None:
    """A system prompt in one conversation of four."""
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.25 else None


# --- word problems ------------------------------------------------------------------------------

_SOLVE = (
    "{q}",
    "{q}",
    "{q}",
    "{q}\nSolve this step by step and end with the answer after ####.",
    "Solve this problem.\n\n{q}",
    "Question: {q}",
)
_BEGIN_THOUGHT = (
    "Let me work through this step by step.",
    "I go through the problem one step at a time.",
    "First I collect what is given, then I calculate.",
    "Okay, step by step.",
)
_FINAL = ("The answer is {n}.\n#### {n}", "So the result is {n}.\n#### {n}", "#### {n}")


def problem_documents(sources: Sources, variants: int, rng: random.Random) -> Iterator[Document]:
    """Every problem as written, and `variants` changed copies of it, thinking or not."""
    for question, answer in sources.problems:
        forms = [(question, clean_answer(answer))]
        forms += [variant(question, answer, rng) for _ in range(variants)]
        for q, a in forms:
            if rng.random() < 0.1:
                yield raw(f"Question: {q}\nAnswer: {a}\n")
            else:
                yield solved(q, a, rng, thinking=rng.random() < 0.5)


def solved(question: str, answer: str, rng: random.Random, thinking: bool) -> Document:
    """A chat that solves one problem."""
    user, system = rng.choice(_SOLVE).format(q=question), maybe_system(rng)
    if not thinking:
        return chat(user, answer, system=system, learn_user=True)
    steps, number = answer.rsplit("####", 1)[0].strip(), final_number(answer)
    thought = f"{rng.choice(_BEGIN_THOUGHT)}\n{steps}"
    if rng.random() < 0.5:
        thought += f"\nSo the answer is {number}."
    final = rng.choice(_FINAL).format(n=number)
    return chat(user, final, thought, system, learn_user=True)


# --- Python -------------------------------------------------------------------------------------


def python_documents(sources: Sources, rng: random.Random) -> Iterator[Document]:
    """The files, cut at line ends into pieces that fit a training row."""
    for text in sources.python_files:
        yield from pieces(text, rng.randint(3500, 5500))


def pieces(text: str, size: int) -> Iterator[Document]:
    """Consecutive pieces of about `size` characters."""
    piece: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        length += len(line)
        if length >= size:
            yield raw("".join(piece), ends=False)
            piece, length = [], 0
    if length:
        yield raw("".join(piece))


def functions_of(text: str) -> Iterator[tuple[str, str, str]]:
    """(name, docstring, source) of documented functions of a file, dedented."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            source = "".join(lines[node.lineno - 1 : node.end_lineno])
            if doc and 120 <= len(source) <= 2400:
                yield node.name, doc, textwrap.dedent(source)


_COMPLETE = (
    "Complete this Python function.\n\n```python\n{head}\n```",
    "Write the body of this function:\n\n```python\n{head}\n```",
    "Implement the following function.\n\n{head}",
)
_DESCRIBE = (
    "Write a Python function `{name}`. {line}",
    "Write a function named {name} in Python: {line}",
    "I need a Python function called {name}. What it does: {line}",
)
_CODE_THOUGHT = (
    "The user wants the function `{name}` in Python. I keep the signature and write the body.",
    "I write `{name}` with its docstring and then the code.",
    "The function is `{name}`. {line}",
)


def function_documents(sources: Sources, rng: random.Random) -> Iterator[Document]:
    """Write a function from its head or its description; say what a function does."""
    for text in sources.python_files:
        for name, doc, source in functions_of(text):
            line = " ".join(doc.split("\n\n")[0].split())
            body = source.split('"""', 2)
            head = '"""'.join(body[:2]) + '"""' if len(body) == 3 else source.split("\n")[0]
            kind, thought = rng.random(), None
            if rng.random() < 0.5:
                thought = rng.choice(_CODE_THOUGHT).format(name=name, line=line)
            answer = f"```python\n{source.rstrip()}\n```"
            if kind < 0.45:
                user = rng.choice(_COMPLETE).format(head=head)
            elif kind < 0.8:
                user = rng.choice(_DESCRIBE).format(name=name, line=line)
            else:
                shown = body[0].rstrip() + body[2] if len(body) == 3 else source
                user = f"What does this function do?\n\n```python\n{shown.rstrip()}\n```"
                answer = line
                thought = f"I read the code of `{name}`." if thought else None
            yield chat(user, answer, thought, maybe_system(rng))


# --- plays --------------------------------------------------------------------------------------


def play_documents(sources: Sources, rng: random.Random) -> Iterator[Document]:
    """The plays as they are, cut between speeches into pieces that fit a training row."""
    speeches = sources.plays.strip().split("\n\n")
    while speeches:
        count = rng.randint(12, 30)
        yield raw("\n\n".join(speeches[:count]) + "\n\n", ends=False)
        speeches = speeches[count:]


_CONTINUE = (
    "Continue this scene:\n\n{scene}",
    "Write what comes next.\n\n{scene}",
    "Here is a part of a play. Go on with it.\n\n{scene}",
)
_SPEAK = (
    "Write a speech for {who}.",
    "What does {who} say next?\n\n{scene}",
    "Write some lines in the style of an old play, spoken by {who}.",
)


def scene_documents(sources: Sources, rng: random.Random) -> Iterator[Document]:
    """Chats that continue a scene or write one speech."""
    speeches = sources.plays.strip().split("\n\n")
    start = 0
    while start + 8 < len(speeches):
        given, written = rng.randint(2, 6), rng.randint(2, 8)
        scene = "\n\n".join(speeches[start : start + given])
        following = speeches[start + given : start + given + written]
        start += given + written
        if not following:
            break
        who, _, lines = following[0].partition(":\n")
        if rng.random() < 0.7 or not lines:
            user, answer = rng.choice(_CONTINUE).format(scene=scene), "\n\n".join(following)
            thought = f"I continue the scene in verse. Next speaks {who}."
        else:
            user, answer = rng.choice(_SPEAK).format(who=who, scene=scene), lines
            thought = f"I write the lines of {who}."
        yield chat(user, answer, thought if rng.random() < 0.5 else None, maybe_system(rng))


# --- tasks that copy from the prompt ------------------------------------------------------------

_REPEAT = (
    "Repeat the following text exactly:\n\n{p}",
    "Repeat the text below word for word.\n\n{p}",
    "Copy this text without any change:\n\n{p}",
    "{p}\n\nRepeat the text above exactly.",
    'Please repeat this: """\n{p}\n"""',
    "Print the following again, unchanged:\n```\n{p}\n```",
    "Write this out again:\n{p}",
)
_REPEAT_THOUGHT = (
    "The user wants the text again, without changes. I copy it.",
    "I repeat the text exactly.",
    "I have to copy the text word for word.",
)
_NEW_NAMES = "value item result count total data left right node other first last key size".split()


def passages(sources: Sources, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Endless (kind, passage) pairs of some 50 to 400 tokens from all the sources."""
    plays = sources.plays.strip().split("\n\n")
    while True:
        kind = rng.choices(("python", "play", "problem", "symbols"), (0.38, 0.22, 0.18, 0.22))[0]
        size = int(rng.triangular(150, 1500, 350))
        if kind == "symbols":
            yield kind, _symbols(size // 2, rng)
            continue
        if kind == "python":
            units = rng.choice(sources.python_files).splitlines()
            glue = "\n"
        elif kind == "play":
            units, glue = plays, "\n\n"
        else:
            picked = rng.sample(sources.problems, 4)
            units = [
                part
                for question, answer in picked
                for part in (question, *clean_answer(answer).split("\n"))
            ]
            glue = rng.choice(("\n", " ", "\n\n"))
        first = rng.randrange(len(units))
        text = units[first]
        for unit in units[first + 1 :]:
            if len(text) >= size:
                break
            text += glue + unit
        text = textwrap.dedent(text).strip("\n")[:2000].rstrip()
        if len(text) >= 120 and "<|" not in text:
            yield kind, text


def _symbols(size: int, rng: random.Random) -> str:
    """Made-up words and numbers: nothing but the prompt itself predicts them.

    Half of the texts draw from a few words only. Each word then has many followers, and a copy
    stays on its track only by looking at where it is, not at the last word alone.
    """
    letters = rng.choice((string.ascii_lowercase, string.ascii_lowercase, "0123456789abcdef"))
    most_digits = rng.randint(1, 5)
    with_numbers = rng.random() < 0.4

    def word() -> str:
        if with_numbers and rng.random() < 0.7:
            return str(rng.randrange(10**most_digits))
        return "".join(rng.choices(letters, k=rng.randint(2, 9)))

    stock = [word() for _ in range(rng.randint(4, 30))] if rng.random() < 0.5 else []
    text, glue = "", rng.choice((" ", ", ", "\n", " "))
    while len(text) < size:
        text += (rng.choice(stock) if stock else word()) + glue
        if rng.random() < 0.1:
            text = text.rstrip(", ") + "\n"
    return text.rstrip(", \n")


def copy_documents(sources: Sources, count: int, rng: random.Random) -> Iterator[Document]:
    """`count` tasks whose answer stands, wholly or nearly, in the prompt."""
    stream = passages(sources, rng)
    for _ in range(count):
        kind, text = next(stream)
        draw = rng.random()
        if draw < 0.06:
            glue = rng.choice(("\n\n", "\n", "\n---\n"))
            document = Document().add(text + glue, learn=False)
            yield document.add(glue.join([text] * rng.randint(1, 3)) + "\n")
            continue
        task = None
        if draw < 0.45 and kind == "python":
            task = _rename_task(text, rng)
        elif draw < 0.25:
            task = _spelling_task(text, rng)
        elif draw < 0.40:
            task = _quote_task(text, rng)
        elif draw < 0.46:
            lines = text.split("\n")
            numbered = "\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1))
            task = f"Number the lines of this text:\n\n{text}", numbered, "I number each line."
        elif draw < 0.52 and len(text) < 700:
            task = f"Repeat this text three times:\n\n{text}", "\n\n".join([text] * 3), None
        user, answer, thought = task or repeat_task(text, rng)
        thought = thought or rng.choice(_REPEAT_THOUGHT)
        history = None
        if rng.random() < 0.08:
            history = [(user, answer)]
            user = rng.choice(("Again, please.", "Say that again.", "Repeat your last answer."))
            thought = "I repeat my last answer."
        spoken = thought if rng.random() < 0.5 else None
        yield chat(user, answer, spoken, maybe_system(rng), history)


Task = tuple[str, str, str | None]  # user's text, answer, thought


def repeat_task(text: str, rng: random.Random) -> Task:
    """Repeat `text` exactly."""
    return rng.choice(_REPEAT).format(p=text), text, None


def _rename_task(code: str, rng: random.Random) -> Task | None:
    """Rewrite code with one identifier renamed."""
    words = re.findall(r"\b[a-z_]{3,}\b", code)
    often = sorted({w for w in words if words.count(w) > 1 and not keyword.iskeyword(w)})
    if not often:
        return None
    old = rng.choice(often)
    new = rng.choice([w for w in _NEW_NAMES if w not in words] or ["renamed"])
    user = rng.choice(
        (
            "Rewrite this code with `{old}` renamed to `{new}`:\n\n```python\n{code}\n```",
            "Rename `{old}` to `{new}` in this code.\n\n{code}",
        )
    ).format(old=old, new=new, code=code)
    renamed = re.sub(rf"\b{old}\b", new, code)
    return user, f"```python\n{renamed}\n```", f"I rename `{old}` to `{new}` and keep the rest."


def _spelling_task(text: str, rng: random.Random) -> Task:
    """Undo swapped letters."""

    def swap(match: re.Match[str]) -> str:
        word = match.group()
        if rng.random() > 0.1:
            return word
        at = rng.randrange(1, len(word) - 2)
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]

    wrong = re.sub(r"[A-Za-z]{5,}", swap, text)
    user = rng.choice(("Correct the spelling of this text:", "Fix the typing errors:"))
    return f"{user}\n\n{wrong}", text, "Some letters are swapped. I write the text correctly."


def _quote_task(text: str, rng: random.Random) -> Task | None:
    """Quote one line, or everything from a line on."""
    lines = [line for line in text.split("\n") if len(line.split()) > 3]
    if len(lines) < 3:
        return None
    line = rng.choice(lines[:-1])
    start = " ".join(line.split()[:3])
    if text.count(start) != 1:
        return None
    rest = text[text.index(start) :]
    if rng.random() < 0.6:
        user = f'{text}\n\nQuote the passage from "{start}" to the end.'
        return user, rest, f'I quote everything from "{start}" on.'
    answer = rest.split("\n")[0]
    user = f'{text}\n\nQuote the line that begins with "{start}".'
    return user, answer, "I look for that line and copy it."
