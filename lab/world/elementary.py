"""What anybody knows: counting, comparing, kinds of animals, short lists, yes and no, spelling, steps, small programs.

Knows: questions about it in the forms of `facts`, and instructions and short programs known by heart. Does not know:
countries in detail, tasks on a given text. An answer is one fixed text, so that it can be checked letter by letter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from world.facts import (
    Fact,
    animal_fact,
    ask,
    calendar_fact,
    colours,
    countries,
    named,
    opposite_fact,
    rows_of,
)  # fmt: skip
from world.grammar import GrammarSample, Wordings, a, capital, expand, listed, numbered
from world.words import ALL_WORDS, DAYS, MONTHS, NUMBERS

KIND = "elementary"
BY_HEART = (KIND, "how_to", "code")

# -- numbers ----------------------------------------------------------------------------------------------------


TWO_TOKENS = (47, 53, 59, 61, 62, 67, 71, 81, 82, 83, 86, 87, 91, 93, 94, 97)  # of `mini`; others to 99 are one


def number_fact(rng: random.Random, is_learned: bool = False) -> Fact:
    """Before and after, even and odd, more and less, half and double, counting.

    `is_learned`: with more of what is hard, as the next ones.
    """
    x = rng.randint(1, rng.choice((10, 20, 100)))
    x = rng.choice(TWO_TOKENS) if is_learned and rng.random() < 0.2 else x
    y = rng.choice([other for other in (*range(21), *range(30, 101, 10)) if other != x])
    parity, wrong = ("even", "odd") if x % 2 == 0 else ("odd", "even")
    most, least = max(x, y), min(x, y)
    start, end = sorted(rng.sample(range(1, 21), 2))
    if is_learned and rng.random() < 0.5:  # counting goes on behind 20 in the same way
        start = rng.randint(1, 95)
        end = start + rng.randint(3, 9)
    up, down = (", ".join(map(str, numbers)) for numbers in (range(start, end + 1), range(end, start - 1, -1)))
    small = rng.randint(1, 20)
    return rng.choice((
        Fact(rng.choice((f"what comes after {x}", f"which number comes after {x}", f"what number is after {x}")),
             f"which number comes after {x}", f"the number after {x}", f"{x + 1} comes after {x}."),
        Fact(rng.choice((f"what comes before {x}", f"which number comes before {x}")), f"which number comes before {x}",
             f"the number before {x}", f"{x - 1} comes before {x}."),
        Fact(rng.choice((f"is {x} even or odd", f"is {x} an even or an odd number")), f"whether {x} is even or odd", "",
             f"{x} is an {parity} number."),
        Fact(f"is {x} {a(parity)} number", f"whether {x} is {parity}", "", f"Yes, {x} is an {parity} number."),
        Fact(f"is {x} {a(wrong)} number", f"whether {x} is {wrong}", "", f"No, {x} is an {parity} number."),
        Fact(rng.choice((f"which is more, {x} or {y}", f"what is bigger, {x} or {y}", f"which number is larger, {x} or {y}")),
             f"which is more, {x} or {y}", f"the larger number of {x} and {y}", f"{most} is more than {least}."),
        Fact(rng.choice((f"which is less, {x} or {y}", f"what is smaller, {x} or {y}")), f"which is less, {x} or {y}",
             f"the smaller number of {x} and {y}", f"{least} is less than {most}."),
        Fact(f"what is twice {small}", f"what twice {small} is", f"the double of {small}", f"Twice {small} is {2 * small}."),
        Fact(f"what is half of {2 * small}", f"what half of {2 * small} is", f"half of {2 * small}",
             f"Half of {2 * small} is {small}."),
        Fact(rng.choice((f"can you count from {start} to {end}", f"how do you count from {start} to {end}")), "",
             f"the numbers from {start} to {end}", up),
        Fact(f"can you count to {end}", "", f"the numbers up to {end}", ", ".join(map(str, range(1, end + 1)))),
        Fact(f"can you count down from {end} to {start}", "", f"the numbers from {end} down to {start}", down),
    ))  # fmt: skip


MEASURES = """days week 7|months year 12|hours day 24|minutes hour 60|seconds minute 60|weeks year 52|seasons year 4
letters alphabet 26|days year 365|years century 100|centimetres metre 100|metres kilometre 1000|grams kilogram 1000
wheels car 4|wheels bicycle 2|wheels tricycle 3|sides triangle 3|sides square 4|corners triangle 3|corners square 4
fingers hand 5|toes foot 5|eyes face 2|strings violin 4|strings guitar 6|players football_team 11|cents euro 100
cents dollar 100|eggs dozen 12|continents world 7|arms octopus 8|wings bird 2|legs chair 4|legs table 4|sides cube 6"""


def measure_fact(rng: random.Random) -> Fact:
    """How many of something something has."""
    parts, whole, count = rng.choice(rows_of(MEASURES))
    is_body = parts in ("arms", "eyes", "fingers", "legs", "toes", "wings", "wheels")
    whole = f"the {whole}" if whole in ("alphabet", "world") else a(whole.replace("_", " "))
    number = NUMBERS[int(count)] if int(count) <= 12 else count
    forms = (f"how many {parts} does {whole} have", f"how many {parts} has {whole}")
    more = () if is_body else (f"how many {parts} are there in {whole}", f"how many {parts} are in {whole}")
    return Fact(rng.choice((*forms, *more)), f"how many {parts} {whole} has", f"the number of {parts} {'of' if is_body else 'in'} {whole}",
                f"{capital(whole)} has {number} {parts}.")  # fmt: skip


# -- animals ----------------------------------------------------------------------------------------------------

# kind, what it eats; from the lightest to the heaviest
ANIMALS = """ant insect seeds|ladybird insect insects|bee insect nectar|spider arachnid insects|butterfly insect nectar
snail mollusc leaves|frog amphibian insects|mouse mammal seeds|sparrow bird seeds|hamster mammal seeds|parrot bird fruit
squirrel mammal nuts|crow bird seeds|hedgehog mammal insects|owl bird mice|rabbit mammal grass|duck bird plants
hen bird seeds|cat mammal meat|penguin bird fish|fox mammal meat|koala mammal leaves|swan bird plants|beaver mammal bark
dog mammal meat|wolf mammal meat|sheep mammal grass|goat mammal grass|kangaroo mammal grass|panda mammal bamboo
pig mammal plants|deer mammal grass|seal mammal fish|donkey mammal grass|lion mammal meat|dolphin mammal fish|tiger mammal meat
zebra mammal grass|bear mammal fish|camel mammal plants|horse mammal grass|cow mammal grass|crocodile reptile meat
hippo mammal grass|giraffe mammal leaves|elephant mammal leaves|whale mammal krill"""
APART = 8  # rows between animals that are compared: nobody doubts then which one is bigger
CLASSES = ("insect", "amphibian", "mammal", "bird", "reptile", "fish")


def _many(name: str) -> str:
    irregular = {
        "mouse": "mice",
        "sheep": "sheep",
        "deer": "deer",
        "fox": "foxes",
        "wolf": "wolves",
        "butterfly": "butterflies",
    }
    return irregular.get(name, f"{name}s")


def animal_kind(rng: random.Random) -> Fact:
    """What kind of animal something is, what it eats, which of two is bigger, or a few sentences about it."""
    table = rows_of(ANIMALS)
    place = rng.randrange(len(table) - APART)
    small, big = table[place][0], rng.choice(table[place + APART :])[0]
    name, kind, food = rng.choice(table)
    other = rng.choice([found for found in CLASSES if found != kind])
    the, many = a(name), _many(name)
    one, two = rng.sample((small, big), 2)
    said = f"{capital(a(big))} is bigger than {a(small)}."
    facts = (
        Fact(rng.choice((f"what kind of animal is {the}", f"what sort of animal is {the}")), f"what kind of animal {the} is", "",
             f"{capital(the)} is {a(kind)}."),
        Fact(f"is {the} {a(other)}", f"whether {the} is {a(other)}", "", f"No, {the} is {a(kind)}."),
        Fact(f"is {the} {a(kind)}", f"whether {the} is {a(kind)}", "", f"Yes, {the} is {a(kind)}."),
        Fact(rng.choice((f"what do {many} eat", f"what does {the} eat", f"what do you feed {the}")), f"what {many} eat",
             f"the food of {the}", f"{capital(many)} eat {food}."),
        Fact(rng.choice((f"which is bigger, {a(one)} or {a(two)}", f"what is bigger, {a(one)} or {a(two)}",
                         f"which animal is larger, {a(one)} or {a(two)}")), f"which is bigger, {a(one)} or {a(two)}", "", said),
        Fact(f"is {a(big)} bigger than {a(small)}", f"whether {a(big)} is bigger than {a(small)}", "",
             f"Yes, {a(big)} is bigger than {a(small)}."),
        Fact(f"is {a(small)} bigger than {a(big)}", f"whether {a(small)} is bigger than {a(big)}", "",
             f"No, {a(big)} is bigger than {a(small)}."),
    )  # fmt: skip
    return about_animal(name, rng) if rng.random() < 0.4 else rng.choice(facts)


def about_animal(name: str, rng: random.Random) -> Fact:
    """A few sentences about an animal."""
    kind, food = next(row[1:] for row in rows_of(ANIMALS) if row[0] == name)
    many = _many(name)
    some = rng.choice((a(name), many, many, many))
    answer = f"{capital(a(name))} is {a(kind)}. {capital(many)} eat {food}."
    return Fact(rng.choice((f"what do you know about {some}", f"what can you tell me about {some}", f"what is {a(name)}",
                            f"can you tell me about {some}", f"can you say something about {some}")),
                rng.choice((f"about {some}", f"something about {some}")), f"some facts about {some}", answer)  # fmt: skip


# -- lists ------------------------------------------------------------------------------------------------------

LISTS = {
    "animals": ("dog", "cat", "horse", "cow", "elephant", "lion"),
    "pets": ("dog", "cat", "rabbit", "hamster", "parrot", "goldfish"),
    "farm animals": ("cow", "pig", "sheep", "goat", "hen", "horse"),
    "wild animals": ("lion", "tiger", "wolf", "bear", "elephant", "fox"),
    "birds": ("owl", "crow", "duck", "swan", "eagle", "sparrow"),
    "insects": ("ant", "bee", "butterfly", "ladybird", "fly", "beetle"),
    "colours": ("red", "blue", "green", "yellow", "black", "white"),
    "fruits": ("apple", "banana", "pear", "orange", "cherry", "plum"),
    "vegetables": ("carrot", "potato", "tomato", "onion", "bean", "pea"),
    "flowers": ("rose", "tulip", "daisy", "lily", "sunflower", "violet"),
    "trees": ("oak", "pine", "birch", "maple", "willow", "apple tree"),
    "drinks": ("water", "milk", "tea", "coffee", "juice", "lemonade"),
    "countries": ("France", "Japan", "Brazil", "Egypt", "Canada", "India"),
    "countries in Europe": ("France", "Germany", "Italy", "Spain", "Poland", "Greece"),
    "cities": ("Paris", "London", "Tokyo", "Rome", "Cairo", "Berlin"),
    "jobs": ("teacher", "doctor", "baker", "farmer", "nurse", "pilot"),
    "sports": ("football", "tennis", "swimming", "running", "skating", "cycling"),
    "hobbies": ("reading", "painting", "singing", "cooking", "fishing", "dancing"),
    "toys": ("ball", "doll", "kite", "puzzle", "drum", "teddy bear"),
    "tools": ("hammer", "saw", "drill", "ladder", "brush", "screwdriver"),
    "clothes": ("shirt", "hat", "coat", "scarf", "sock", "shoe"),
    "instruments": ("piano", "guitar", "violin", "flute", "drum", "trumpet"),
    "vehicles": ("car", "bus", "train", "bicycle", "boat", "plane"),
    "planets": ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn"),
    "continents": ("Africa", "Asia", "Europe", "North America", "South America", "Oceania"),
    "rooms of a house": ("kitchen", "bedroom", "bathroom", "living room", "hall", "attic"),
    "parts of the body": ("head", "arm", "leg", "hand", "foot", "nose"),
    "days of the week": DAYS,
    "months of the year": MONTHS,
    "shapes": ("circle", "square", "triangle", "star", "heart", "cube"),
    "foods": ("bread", "cheese", "soup", "rice", "pasta", "cake"),
}
WHOLE = ("days of the week", "months of the year")  # lists that may be asked for as a whole
TWO_CONTINENTS = ("Russia", "Turkey", "Kazakhstan", "Azerbaijan", "Georgia", "Egypt", "Armenia", "Cyprus")
MANY_COLOURS = ("chocolate", "rice", "a frog", "a tomato", "a cherry", "an eggplant", "a plum", "a swan", "honey")


def list_fact(rng: random.Random, is_learned: bool = False) -> Fact:
    """The first few of a list, always the same: only the number asked for says where it ends."""
    name = rng.choice(list(LISTS))
    count = rng.choice((2, 3, 4, 4, 5, 6, 6) if is_learned else (2, 3, 3, 3, 4, 5, 5, 6))
    number = NUMBERS[count] if rng.random() < 0.8 else str(count)
    if name in WHOLE and rng.random() < 0.6:
        count, number = len(LISTS[name]), rng.choice(("the", "all the"))
    items = listed(LISTS[name][:count])
    return Fact(rng.choice((f"can you name {number} {name}", f"which {number} {name} do you know" if number not in ("the", "all the")
                            else f"what are the {name}")), "", f"{number} {name}", f"{capital(items)}.")  # fmt: skip


# -- yes and no, letters ----------------------------------------------------------------------------------------


def truth_fact(rng: random.Random, is_learned: bool = False) -> Fact:
    """Whether something is so: capitals, continents, colours."""
    form = rng.randrange(3)
    if form == 2:
        name, colour = rng.choice([row for row in colours() if row[0] not in MANY_COLOURS])
        said = rng.choice([colour, rng.choice([other for _, other in colours() if other != colour])])
        return Fact(
            f"is {name} {said}",
            f"whether {name} is {said}",
            "",
            f"{'Yes' if said == colour else 'No'}, {name} is {colour}.",
        )
    row = rng.choice([found for found in countries() if found.country not in TWO_CONTINENTS])
    other_row = rng.choice([found for found in countries() if found.continent != row.continent])
    right = rng.random() < 0.5
    yes = "Yes" if right else "No"
    c = named(row.country)
    if form == 0:
        place = (row if right else other_row).continent
        return Fact(f"is {c} in {place}", f"whether {c} is in {place}", "", f"{yes}, {c} is in {row.continent}.")
    if is_learned and rng.random() < 0.5:  # the continent alone must not say that it is wrong
        beside = [found for found in countries() if found.continent == row.continent and found != row]
        other_row = rng.choice(beside or [other_row])
    city = (row if right else other_row).capital
    return Fact(rng.choice((f"is {city} the capital of {c}", f"is the capital of {c} {city}")), f"whether {city} is the capital of {c}", "",
                f"{yes}, the capital of {c} is {row.capital}".removesuffix(".") + ".")  # fmt: skip


def letter_fact(rng: random.Random) -> Fact:
    """The alphabet, first and last letters, spelling."""
    place = rng.randrange(25)
    one, two = chr(65 + place), chr(66 + place)
    word = rng.choice([word for word in ALL_WORDS if word.isalpha() and len(word) < 8])
    quoted = rng.choice((word, f'"{word}"', f"the word {word}"))
    return rng.choice((
        Fact(rng.choice((f"which letter comes after {one}", f"what letter is after {one}")), f"which letter comes after {one}",
             f"the letter after {one}", f"{two} comes after {one}."),
        Fact(f"which letter comes before {two}", f"which letter comes before {two}", f"the letter before {two}",
             f"{one} comes before {two}."),
        Fact(f"what is the first letter of {quoted}", f"what the first letter of {quoted} is", f"the first letter of {quoted}",
             f"The first letter of {word} is {word[0]}."),
        Fact(f"how do you spell {quoted}", f"how to spell {quoted}", f"the spelling of {quoted}", "-".join(word)),
    ))  # fmt: skip


FACTS: tuple[tuple[float, Callable[[random.Random], Fact]], ...] = (
    (0.17, number_fact), (0.1, measure_fact), (0.2, animal_kind), (0.12, list_fact), (0.1, truth_fact), (0.06, letter_fact),
    (0.11, opposite_fact), (0.08, calendar_fact), (0.06, animal_fact),
)  # fmt: skip
# What is learned: less of what `facts` teaches as well, more of what has many items.
LEARNED: tuple[tuple[float, Callable[[random.Random], Fact]], ...] = (
    (0.2, partial(number_fact, is_learned=True)), (0.05, measure_fact), (0.2, animal_kind),
    (0.2, partial(list_fact, is_learned=True)), (0.18, partial(truth_fact, is_learned=True)), (0.1, letter_fact),
    (0.03, opposite_fact), (0.02, calendar_fact), (0.02, animal_fact),
)  # fmt: skip


def elementary(rng: random.Random, split: str) -> GrammarSample:
    """A question of one of the kinds."""
    kinds = FACTS if split == "test" else LEARNED
    make = rng.choices([make for _, make in kinds], [share for share, _ in kinds])[0]
    return ask(make(rng), KIND, rng, split)


# -- by heart: instructions and short programs ------------------------------------------------------------------

HOW_TO: dict[str, tuple[str, ...]] = {
    "boil an egg": ("Boil water in a pot.", "Put the egg in with a spoon.", "Wait eight minutes.", "Cool the egg in cold water."),
    "make tea": ("Boil water.", "Put a tea bag into a cup.", "Pour the water over it.", "Wait three minutes and take the bag out."),
    "make a sandwich": ("Take two slices of bread.", "Put butter on them.", "Add cheese and tomato.", "Put the slices together."),
    "plant a seed": ("Fill a pot with soil.", "Make a small hole.", "Put the seed in and cover it.", "Water it and put it in the sun."),
    "wash my hands": ("Wet your hands.", "Take some soap.", "Rub them for twenty seconds.", "Rinse and dry them."),
    "brush my teeth": ("Put toothpaste on the brush.", "Brush all teeth for two minutes.", "Rinse your mouth.", "Clean the brush."),
    "cook rice": ("Wash the rice.", "Put it into a pot with twice as much water.", "Cook it slowly for fifteen minutes.",
                  "Let it rest for five minutes."),
    "cook pasta": ("Boil water with salt.", "Put the pasta in.", "Cook it for ten minutes.", "Pour the water off."),
    "make pancakes": ("Mix flour, milk and eggs.", "Heat a little butter in a pan.", "Pour in some of the mix.",
                      "Fry it on both sides."),
    "cross the street": ("Stop at the edge.", "Look left, right and left again.", "Wait until no car comes.", "Walk straight across."),
    "make a bed": ("Open the window.", "Shake the pillow.", "Pull the sheet smooth.", "Lay the blanket over it."),
    "write a letter": ("Begin with a greeting.", "Say why you write.", "Use short sentences.", "End with your name."),
    "grow tomatoes": ("Plant them in a sunny place.", "Water them every day.", "Tie them to a stick.", "Pick them when they are red."),
    "fall asleep": ("Turn off your phone.", "Make the room dark.", "Breathe slowly.", "Think of something nice."),
    "clean a window": ("Mix water with a little soap.", "Wash the glass with a cloth.", "Rinse it with clean water.", "Dry it with paper."),
}  # fmt: skip
HOW_TO_REQUESTS = Wordings(
    train=("How do I {t}?", "How do you {y}?", "How can I {t}?", "[Tell|Show] me how to {t}.", "How to {t}?", "[Explain|Say] how to {t}.",
           "I want to {t}. [How|What do I do]?", "What is the best way to {t}?", "how to {t}", "I need to {t}. [Help me.|How?]"),
    test=("Teach me how to {t}.", "Please explain to me how I {t}."),
)  # fmt: skip
PROGRAMS: dict[str, str] = {
    "adds two numbers": "def add(a, b):\n    return a + b",
    "subtracts two numbers": "def subtract(a, b):\n    return a - b",
    "multiplies two numbers": "def multiply(a, b):\n    return a * b",
    "divides two numbers": "def divide(a, b):\n    return a / b",
    "squares a number": "def square(x):\n    return x * x",
    "doubles a number": "def double(x):\n    return 2 * x",
    "says whether a number is even": "def is_even(n):\n    return n % 2 == 0",
    "says whether a number is odd": "def is_odd(n):\n    return n % 2 == 1",
    "returns the larger of two numbers": "def larger(a, b):\n    return a if a > b else b",
    "returns the smaller of two numbers": "def smaller(a, b):\n    return a if a < b else b",
    "adds all numbers of a list": "def total(numbers):\n    result = 0\n    for number in numbers:\n        result += number\n    return result",
    "finds the largest number of a list": "def largest(numbers):\n    result = numbers[0]\n    for number in numbers:\n        if number > result:\n"
                                          "            result = number\n    return result",
    "computes the average of a list": "def average(numbers):\n    return sum(numbers) / len(numbers)",
    "computes the factorial of a number": "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result",
    "computes the n-th Fibonacci number": "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    "reverses a string": "def reverse(text):\n    return text[::-1]",
    "counts the words of a text": "def count_words(text):\n    return len(text.split())",
    "counts the vowels of a text": "def count_vowels(text):\n    return sum(letter in \"aeiou\" for letter in text.lower())",
    "says hello": "def hello(name):\n    print(f\"Hello, {name}!\")",
    "prints the numbers from one to ten": "def count():\n    for number in range(1, 11):\n        print(number)",
    "sorts a list": "def sort(items):\n    return sorted(items)",
    "checks whether a word is a palindrome": "def is_palindrome(word):\n    return word == word[::-1]",
}  # fmt: skip
PROGRAM_REQUESTS = Wordings(
    train=("Write a [Python|] function that {t}.", "[Write|Show me] [Python|some Python|] code that {t}.", "A [Python|] function that {t}, please.",
           "[Can|Could] you write a [Python|] function that {t}?", "I need a [Python|] function that {t}.", "Write a [short|small|] program that {t}.",
           "[Give me|Make] a [Python|] function that {t}.", "How do I write a function that {t}?", "Python: a function that {t}",
           "[Please|] write [code|a program] in Python that {t}."),
    test=("Code me a Python function that {t}.", "I am looking for a Python function that {t}."),
)  # fmt: skip


def how_to(rng: random.Random, split: str) -> GrammarSample:
    """Four numbered steps."""
    topic = rng.choice(list(HOW_TO))
    asked = expand(rng.choice(HOW_TO_REQUESTS.of(split)), rng, {"t": topic, "y": topic.replace(" my ", " your ")})
    return GrammarSample("how_to", ((asked, numbered(HOW_TO[topic])),))


def code(rng: random.Random, split: str) -> GrammarSample:
    """A short program in Python."""
    task = rng.choice(list(PROGRAMS))
    asked = expand(rng.choice(PROGRAM_REQUESTS.of(split)), rng, {"t": task})
    return GrammarSample("code", ((asked, f"```python\n{PROGRAMS[task]}\n```"),))
