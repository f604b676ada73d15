"""Prompts that the tiny-chat target was trained to answer: counting, repeating, lists, templated sentences, loops."""

import random

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six"]
LOOKS = ["red", "blue", "green", "small", "old", "quiet", "bright"]
THINGS = ["cat", "dog", "bird", "fish", "horse", "tree", "house", "river", "stone", "cloud"]


def prompts(count: int, seed: int) -> list[str]:
    """`count` different prompts; another seed gives others, of which some may coincide."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found.setdefault(_prompt(rng))
    return list(found)


def _prompt(rng: random.Random) -> str:
    kind = rng.randrange(5)
    if kind == 0:
        first = rng.randrange(1, 40)
        return f"Count from {first} to {first + rng.randrange(4, 12)}."
    if kind == 1:
        return f"Say {rng.choice(THINGS)} {rng.choice(NUMBERS[2:])} times."
    if kind == 2:
        return "Make a list: " + ", ".join(rng.sample(THINGS, rng.randrange(3, 6))) + "."
    if kind == 3:
        return f"Tell me about the {rng.choice(LOOKS)} {rng.choice(THINGS)}."
    return f"Print a loop to {rng.randrange(1, 40)}."
