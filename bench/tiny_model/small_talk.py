"""Short made-up conversations, so that greetings, facts and small requests get a sane answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from .documents import Document, chat
from .tasks import maybe_system

_CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid",
    "Portugal": "Lisbon", "Austria": "Vienna", "Greece": "Athens", "Norway": "Oslo",
    "Sweden": "Stockholm", "Finland": "Helsinki", "Poland": "Warsaw", "Ireland": "Dublin",
    "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Canada": "Ottawa", "Mexico": "Mexico City", "Peru": "Lima",
    "Cuba": "Havana", "Chile": "Santiago", "Russia": "Moscow", "Turkey": "Ankara",
}  # fmt: skip
_OPPOSITES = {
    "hot": "cold", "big": "small", "early": "late", "full": "empty", "open": "closed",
    "light": "dark", "fast": "slow", "high": "low", "old": "new", "hard": "soft",
    "happy": "sad", "left": "right", "true": "false", "first": "last", "near": "far",
}  # fmt: skip
_PLURALS = {
    "city": "cities", "child": "children", "box": "boxes", "mouse": "mice", "leaf": "leaves",
    "book": "books", "man": "men", "woman": "women", "foot": "feet", "story": "stories",
}  # fmt: skip
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_MONTHS = (
    "January February March April May June July August September October November December"
).split()
_WORDS = (
    "apple river stone candle garden window silver winter bridge market pencil letter forest "
    "copper island basket orange ladder mirror pepper rocket saddle tunnel velvet wagon yellow"
).split()
_GREETINGS = ("Hello!", "Hi", "Hello", "Good morning!", "Hi there!", "Hey", "Good evening.")
_REPLIES = (
    "Hello! How can I help you?",
    "Hi! What can I do for you today?",
    "Hello! Ask me anything about numbers, Python or old plays.",
)
_ABOUT = {
    "Who are you?": "I am a very small language model that runs inside openspec.",
    "What are you?": "I am a tiny language model, trained to test a fast inference engine.",
    "What can you do?": "I can write steps of a calculation, Python code and verse, and copy text.",
    "How are you?": "I am fine, thank you. How can I help you?",
    "Thank you!": "You are welcome!",
    "Thanks, that helped.": "I am glad to hear that!",
    "Goodbye!": "Goodbye! Have a nice day.",
    "Tell me a joke.": "Why did the number six fear seven? Because seven eight nine.",
    "Can you write code?": "Yes, I can write short Python functions. What should the code do?",
    "What is Python?": "Python is a programming language that is easy to read and to write.",
    "What is speculative decoding?": "A small drafter guesses some tokens and the large model "
    "checks them all in one pass, so the text stays the same but comes faster.",
    "Tell me about yourself.": "I am a tiny model with four layers. I like sums, code and plays.",
}
Exchange = tuple[str, str, str]  # user's text, answer, thought


def small_talk_documents(count: int, rng: random.Random) -> Iterator[Document]:
    """`count` conversations, some of two turns."""
    makers = (_greet, _about, _capital, _opposite, _sum, _count, _calendar, _sort, _reverse, _spell)
    for _ in range(count):
        user, answer, thought = rng.choice(makers)(rng)
        history = None
        if rng.random() < 0.3:
            earlier: Callable[[random.Random], Exchange] = rng.choice(makers)
            history = [earlier(rng)[:2]]
        spoken = thought if rng.random() < 0.5 else None
        yield chat(user, answer, spoken, maybe_system(rng), history)


def _greet(rng: random.Random) -> Exchange:
    return rng.choice(_GREETINGS), rng.choice(_REPLIES), "The user greets me. I greet back."


def _about(rng: random.Random) -> Exchange:
    question = rng.choice(list(_ABOUT))
    return question, _ABOUT[question], "A simple question. I answer in one sentence."


def _capital(rng: random.Random) -> Exchange:
    land = rng.choice(list(_CAPITALS))
    city = _CAPITALS[land]
    if rng.random() < 0.3:
        question = f"Which country has the capital {city}?"
        return question, f"{city} is the capital of {land}.", f"{city} is in {land}."
    question = rng.choice(("What is the capital of {}?", "Name the capital of {}."))
    return question.format(land), f"The capital of {land} is {city}.", f"I know this: {city}."


def _opposite(rng: random.Random) -> Exchange:
    if rng.random() < 0.4:
        word = rng.choice(list(_PLURALS))
        answer = f'The plural of "{word}" is "{_PLURALS[word]}".'
        return f'What is the plural of "{word}"?', answer, "I think of the plural."
    word = rng.choice(list(_OPPOSITES))
    answer = f'The opposite of "{word}" is "{_OPPOSITES[word]}".'
    return f'What is the opposite of "{word}"?', answer, "I think of the opposite."


def _sum(rng: random.Random) -> Exchange:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    sign, result = rng.choice((("+", a + b), ("-", max(a, b) - min(a, b)), ("*", a * b)))
    a, b = (max(a, b), min(a, b)) if sign == "-" else (a, b)
    question = rng.choice(("What is {}?", "Calculate {}.", "How much is {}?"))
    line = f"{a} {sign} {b} = {result}"
    return question.format(f"{a} {sign} {b}"), f"{line}.", f"I calculate {line}."


def _count(rng: random.Random) -> Exchange:
    first, step = rng.randint(0, 60), rng.choice((1, 1, 1, 2, 5, 10))
    numbers = range(first, first + step * rng.randint(4, 20), step)
    how = f" in steps of {step}" if step > 1 else ""
    answer = ", ".join(map(str, numbers))
    return f"Count from {first} to {numbers[-1]}{how}.", answer, "I count up."


def _calendar(rng: random.Random) -> Exchange:
    names, kind = rng.choice(((_DAYS, "days of the week"), (_MONTHS, "months of the year")))
    if rng.random() < 0.3:
        return f"List the {kind}.", "\n".join(f"- {n}" for n in names), f"I list the {kind}."
    at = rng.randrange(len(names) - 1)
    answer = f"After {names[at]} comes {names[at + 1]}."
    return f"What comes after {names[at]}?", answer, f"I go through the {kind}."


def _sort(rng: random.Random) -> Exchange:
    words = rng.sample(_WORDS, rng.randint(3, 8))
    user = f"Sort these words: {', '.join(words)}"
    return user, ", ".join(sorted(words)), "I sort the words by the alphabet."


def _reverse(rng: random.Random) -> Exchange:
    words = rng.sample(_WORDS, rng.randint(3, 8))
    user = f"Write these words in the opposite order: {', '.join(words)}"
    return user, ", ".join(reversed(words)), "I start with the last word."


def _spell(rng: random.Random) -> Exchange:
    word = rng.choice(_WORDS)
    return f'Spell the word "{word}".', "-".join(word.upper()), f'The word is "{word}".'
