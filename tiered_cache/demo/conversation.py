"""What the demo's agents say, and in which order they take turns."""

from __future__ import annotations

from typing import NamedTuple

SYSTEM = """You help in a small travel office. Answer in one short sentence, in plain words, without lists.
You may call these tools:
- trains(origin, destination, day): connections with their times and prices
- hotels(city, first_night, nights): free rooms with their prices
- weather(city, day): the forecast, at most ten days ahead
- museums(city, day): what is open, and when
Ask the customer for nothing that a tool can tell you. If you do not know an answer, say so."""

# Each agent's first message brings a text to work with; what follows is short, as in a dialogue.
AGENTS = {
    "Ada": "A family with two children wants to spend three days in Paris in May. They come by train, like to walk, "
    "and would rather see one thing well than five in a hurry. Which country is Paris the capital of?",
    "Ben": "Two retired teachers plan a week in Rome in October. They have read a lot about it, do not like crowds, "
    "and one of them cannot climb stairs. Which country is Rome the capital of?",
    "Cleo": "A student wants to see Cairo in January for as little money as possible. She arrives late at night, stays "
    "for four days, and hopes to take many photographs. Which country is Cairo the capital of?",
}
FOLLOW_UPS = ("Which river flows there?", "Name something old to see there.", "And something good to eat?")


class Script(NamedTuple):
    """Whose turn it is, before the restart and after it; an answer has at most `answer_tokens`."""

    first: tuple[str, ...]
    resume: tuple[str, ...]
    answer_tokens: int


# The third agent pushes the first one out of RAM, and so on from there; who speaks twice in a row is still in it.
QUICK = Script(("Ada", "Ben", "Cleo", "Ada"), ("Ada", "Ben"), 8)
FULL = Script(("Ada", "Ben", "Ben", "Cleo", "Cleo", "Ada", "Ada", "Ben", "Cleo"), ("Ada", "Ben", "Cleo"), 12)
