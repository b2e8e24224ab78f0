"""New variants of a GSM8K problem: other people, other numbers, arithmetic still right.

GSM8K marks every calculation, as in `48/2 = <<48/2=24>>24`. So a problem can be read as a small
program: change some numbers of the question, run the calculations again, and write the new
results wherever the old ones stood. A variant in which any number could not be traced is refused.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable
from fractions import Fraction

_CALCULATION = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")
_NUMBER = re.compile(r"\d+(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+")
_NAME = re.compile(r"\b[A-Z][a-z]+\b")

# Numbers that mean something by themselves (days, hours, percent, halves) and never change.
_CONSTANTS = {Fraction(n) for n in (0, 1, 2, 3, 4, 7, 10, 12, 24, 30, 31, 52, 60, 100, 365, 1000)}
_CONSTANTS |= {Fraction(1, 2), Fraction(1, 4), Fraction(3, 4), Fraction(3, 2)}

_WOMEN = """Mary Sarah Janet Martha Jill Lisa Jenny Jane Carla Anna Sally Maria Karen Betty Emily
Susan Rachel Alice Hannah Nancy Julia Jenna Tina Annie Monica Lucy Amanda Kim Kendra Jessica Emma
Lily Megan Grace Olivia Sophia Diana Laura Linda Helen Ruth Clara Nina Rosa Ella Zoe Amy Kate Carol
Gina Marie Claire Judy Wendy Mia Ava Elise Nadia Priya Yuki""".split()
_MEN = """John James Mark Tom Jack Bob Bill Mike Peter Jerry Sam Jason Matt Michael Tony Harry Joe
Frank Billy Paul Jake Andrew Steve Jim Ben Alex Tim Max Jackson Carl Adam Jeff Jimmy Andy Ryan Jacob
Kevin Randy Josh Ken Marcus Kyle Brian Rick Greg George Thomas Henry Chris Fred Tommy David Ali
Oscar Luis Omar Victor Simon Walter Hugo Ivan Noah Leo Felix Raj Kenji""".split()

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def clean_answer(answer: str) -> str:
    """The answer without its calculation marks."""
    return _CALCULATION.sub("", answer)


def final_number(answer: str) -> str:
    """What follows `####`."""
    return answer.rsplit("####", 1)[-1].strip()


def variant(question: str, answer: str, rng: random.Random) -> tuple[str, str]:
    """A renamed and, where it can be done safely, renumbered problem; the answer is cleaned."""
    renumbered = renumber(question, answer, rng)
    question, answer = renumbered or (question, clean_answer(answer))
    return _rename(question, answer, rng)


def renumber(question: str, answer: str, rng: random.Random) -> tuple[str, str] | None:
    """Change numbers of the question and recompute the answer; None when that is not safe."""
    in_question, free = _question_numbers(question)
    if not free:
        return None
    for _ in range(40):
        changes = {old: _similar(old, rng) for old in free}
        if len(set(changes.values())) < len(changes):
            continue
        mapping = _recompute(answer, changes, in_question)
        if mapping is None:
            continue
        new_answer = _rewrite(clean_answer(answer), mapping, in_question)
        new_question = _rewrite(question, changes, in_question)
        if new_answer is not None and new_question is not None:
            return new_question, new_answer
    return None


def _question_numbers(question: str) -> tuple[set[Fraction], list[Fraction]]:
    """All numbers of the question, and those among them that may change."""
    seen: set[Fraction] = set()
    fixed: set[Fraction] = set(_CONSTANTS)
    for match in _NUMBER.finditer(question):
        value = _value(match.group())
        seen.add(value)
        before, after = question[: match.start()][-1:], question[match.end() :][:1]
        if value < 5 or value.denominator != 1 or before in ("/", ":", "-", "."):
            fixed.add(value)
        if after.isalpha() or after in ("%", "/", ":", "-"):
            fixed.add(value)
    return seen, sorted(seen - fixed)


def _similar(value: Fraction, rng: random.Random) -> Fraction:
    """A whole number of the same size and roundness."""
    step = next(s for s in (1000, 100, 50, 10, 5, 1) if value % s == 0)
    if value == step:
        step = max(1, step // 5)
    low, high = int(value * Fraction(1, 2) / step), int(value * Fraction(7, 4) / step)
    return Fraction(step * max(1, rng.randint(low, high + 1)))


def _recompute(
    answer: str, changes: dict[Fraction, Fraction], in_question: set[Fraction]
) -> dict[Fraction, Fraction] | None:
    """Old value -> new value, for the question's numbers and every result of the answer."""
    mapping = dict(changes)
    for match in _CALCULATION.finditer(answer):
        expression, shown = match.groups()
        if not _NUMBER.fullmatch(shown.strip()):
            return None
        old = _value(shown.strip())
        for number in _NUMBER.findall(expression):
            value = _value(number)
            known = value in mapping or value in in_question or value in _CONSTANTS
            if not known and value * 100 not in in_question:
                return None
        before = _evaluate(expression, {})
        after = _evaluate(expression, mapping)
        if before != old or after is None or after <= 0 or after > 10_000_000:
            return None
        if (after * (1 if old.denominator == 1 else 100)).denominator != 1:
            return None
        if after != mapping.get(old, old) and (
            old in mapping or old in in_question or old in _CONSTANTS
        ):
            return None  # one number, two meanings
        mapping[old] = after
    return mapping


def _rewrite(
    text: str, mapping: dict[Fraction, Fraction], in_question: set[Fraction]
) -> str | None:
    """`text` with its numbers mapped; None when one of them is of unknown origin."""
    parts, end = [], 0
    for match in _NUMBER.finditer(text):
        value = _value(match.group())
        if value in mapping:
            if mapping[value] != value and text[match.end() :][:1] == "%":
                return None
            shown = _show(mapping[value], "," in match.group())
        elif value in in_question or value in _CONSTANTS or value * 100 in in_question:
            shown = match.group()
        else:
            return None
        parts += [text[end : match.start()], shown]
        end = match.end()
    return "".join(parts) + text[end:]


def _evaluate(expression: str, mapping: dict[Fraction, Fraction]) -> Fraction | None:
    """The exact value of `expression` after mapping its numbers; None when it is no arithmetic."""

    def value_of(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            value = Fraction(node.value)
            return mapping.get(value, value)
        raise ValueError(ast.dump(node))

    quoted = _NUMBER.sub(lambda m: f"'{_value(m.group())}'", expression.strip())
    try:
        return value_of(ast.parse(quoted, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _value(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _show(value: Fraction, with_commas: bool) -> str:
    if value.denominator == 1:
        return f"{value.numerator:,}" if with_commas else str(value.numerator)
    return f"{float(value):.2f}".rstrip("0")


def _rename(question: str, answer: str, rng: random.Random) -> tuple[str, str]:
    """Give the people of the problem other names, the same one everywhere."""
    present = set(_NAME.findall(question + " " + answer))
    mapping: dict[str, str] = {}
    for group in (_WOMEN, _MEN):
        old = sorted(present & set(group))
        new = rng.sample(sorted(set(group) - present), len(old))
        mapping.update(zip(old, new, strict=True))

    def new_name(match: re.Match[str]) -> str:
        return mapping.get(match.group(), match.group())

    return _NAME.sub(new_name, question), _NAME.sub(new_name, answer)
