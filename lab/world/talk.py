"""Conversations: about itself, about the day, small errands, and questions outside of the world.

Knows: scripts with gaps, both sides of them, and what the assistant cannot know. Does not know: facts, stories, tasks. The
assistant keeps to what was said: names, numbers and times come back as they were given.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from world.facts import countries
from world.grammar import GrammarSample, Wordings, a, capital, expand
from world.words import (
    DAYS,
    DRINKS,
    FOODS,
    GOOD_FEELINGS,
    HOBBIES,
    JOBS,
    NUMBERS,
    PETS,
    TOWNS,
    person,
)  # fmt: skip

SELF = "self"  # the kind of greetings and of questions about the assistant
UNKNOWN_ANSWER = "I don't know."
ABOUT_SELF: tuple[tuple[str, str], ...] = (
    ("[Who|What] are you?", "I am mini, a very small language model."),
    ("[Tell me|Say] who you are[.|, please.]", "I am mini, a very small language model."),
    ("[What is|What's] your name?", "My name is mini."),
    ("[Do you have|Have you got] a name?", "My name is mini."),
    (
        "What [can|do] you do[| for me| here]?",
        "I can tell short stories, answer simple questions, copy, sort and change texts, and find things in them.",
    ),
    (
        "[How can you help me|What are you good at|What can I ask you|What are you for]?",
        "I can tell short stories, answer simple questions, copy, sort and change texts, and find things in them.",
    ),
    ("Are you [a person|a human|human|a robot|a bot|real|alive|an AI]?", "No, I am mini, a small language model."),
    ("How old are you?", "I have no age. I am a small language model."),
    ("Who [made|built|trained] you?", "I come with forerun, which makes language models faster."),
    ("[Where do you come from|Where are you from]?", "I come with forerun, which makes language models faster."),
    ("[Do you have|Have you got] [a body|feelings|friends|a family]?", "No, I am only a small language model."),
    ("How [big|large|small] are you?", "I am very small: I fit on any computer."),
    ("Can you [see|hear] me?", "No, I can only read what you write."),
    ("Do you speak [French|German|Spanish|other languages]?", "No, I only speak English."),
    ("How are you[| today| doing]?", "I am fine, thank you. How can I help you?"),
    ("[How is it going|How do you do|What's up|Are you well]?", "I am fine, thank you. How can I help you?"),
    ("[Can|Could|Will] you help me?", "Yes, gladly. What do you need?"),
    ("I need [help|your help|some help].", "Yes, gladly. What do you need?"),
    ("Are you [there|awake|ready]?", "Yes, I am here. How can I help you?"),
)
GREETINGS = (
    ("[Hello|Hi|Hey|Good morning|Good evening|Good afternoon|Good day|Hello there|Hi there|Hello, mini|Hi, mini][!|.|]", "Hello! How can I help you?"),
    ("[Hello|Hi|Hey|Good morning][!|.|]", "Hello! How can I help you?"),
    ("[Thank you|Thanks|Thank you very much|Thanks a lot|Many thanks][!|.|]", "You are welcome!"),
    ("[Goodbye|Bye|Good night|See you|Bye bye|See you tomorrow][!|.|]", "Goodbye! Have a nice day."),
)  # fmt: skip


def about_self(rng: random.Random, split: str) -> GrammarSample:
    """A greeting or a question about the assistant, now and then typed without capitals."""
    asked, answer = rng.choice((*ABOUT_SELF, *GREETINGS, *GREETINGS))
    text = expand(asked, rng)
    if split == "test":
        text = f"{rng.choice(('Listen:', 'Now,', 'Well,'))} {text}"
    elif rng.random() < 0.15:
        text = text.lower()
    return GrammarSample(SELF, ((text, answer),))


def introduction(rng: random.Random, split: str) -> GrammarSample:
    """The user says who they are; the assistant remembers."""
    who, job, town, hobby = person(rng), rng.choice(JOBS), rng.choice(TOWNS), rng.choice(HOBBIES)
    food, pet = rng.choice(FOODS), rng.choice(PETS)
    names = {"name": who.name, "job": a(job), "town": town, "hobby": hobby, "food": food, "pet": a(pet)}
    facts = [
        ("My name is {name}.", "[What is my name|Do you remember my name|Who am I]?", "Your name is {name}."),
        ("I am {job}.", "[What is my job|What do I do for work]?", "You are {job}."),
        ("I live in {town}.", "Where do I live?", "You live in {town}."),
        ("I like {hobby}.", "[What do I like|What is my hobby]?", "You like {hobby}."),
        ("My favourite food is {food}.", "What is my favourite food?", "Your favourite food is {food}."),
        ("I have {pet}.", "[What pet do I have|Which animal do I have]?", "You have {pet}."),
    ]
    told = rng.sample(facts, rng.randint(1, 4))
    opening = " ".join(expand(line, rng, names) for line, _, _ in told)
    hello = rng.choice(("Hello! ", "Hi. ", "", "Good morning. "))
    reply = f"Nice to meet you, {who.name}!" if told[0] == facts[0] or facts[0] in told else "Nice to meet you!"
    turns = [(hello + opening, reply)]
    for _, question, answer in rng.sample(told, min(len(told), rng.randint(1, 3))):
        turns.append((expand(question, rng, names), expand(answer, rng, names)))
    unknown = [entry for entry in facts if entry not in told]
    if unknown and rng.random() < 0.3:
        turns.append((expand(rng.choice(unknown)[1], rng, names), "You have not told me."))
    return GrammarSample("introduction", tuple(turns))


def booking(rng: random.Random, split: str) -> GrammarSample:
    """A table, a ticket or a meeting, arranged step by step and repeated at the end."""
    who = person(rng)
    count, day, hour = rng.randint(2, 9), rng.choice(DAYS), rng.randint(1, 11)
    time = f"{hour}{rng.choice((':00', ':30', ':15'))} {rng.choice(('am', 'pm'))}"
    town, other = rng.sample(TOWNS, 2)
    names = {"name": who.name, "n": NUMBERS[count], "day": day, "time": time, "town": town, "other": other}
    kind = rng.choice(("table", "train", "meeting"))
    if kind == "table":
        steps = [
            ("[I would like to|I want to|Can I|Please help me to] book a table[ in {town}|].", "For how many people?"),
            ("[For {n}|For {n} people|{N}|We are {n}], please.", "On which day?"),
            ("[On {day}|{day}|This {day}].", "At what time?"),
            ("[At|] {time}.", "Under which name?"),
            (
                "[{name}|My name is {name}|Under {name}].",
                "I have noted a table for {n} on {day} at {time}, under the name {name}.",
            ),
        ]
    elif kind == "train":
        steps = [
            ("I need a [train|bus] ticket to {town}.".replace("[train|bus]", "train"), "Where do you start?"),
            ("[From|In] {other}.", "On which day do you want to travel?"),
            ("[On|Next] {day}.", "How many tickets do you need?"),
            ("[{N}|{N}, please|I need {n}].", "I have noted {n} train tickets from {other} to {town} on {day}."),
        ]
    else:
        steps = [
            ("[Please plan|Plan|I need to plan] a meeting with {name}.", "On which day?"),
            ("[{day} is good|On {day}|{day}].", "At what time?"),
            ("[{time}|At {time}].", "I have noted a meeting with {name} on {day} at {time}."),
        ]
    turns = [(expand(user, rng, names), expand(answer, rng, names)) for user, answer in steps]
    if rng.random() < 0.5:
        turns.append((rng.choice(("Thank you.", "Thanks!", "Great, thank you.")), "You are welcome!"))
    return GrammarSample("booking", tuple(turns))


def small_talk(rng: random.Random, split: str) -> GrammarSample:
    """How the day was, what somebody likes, what to do."""
    hobby, food, drink, feeling = rng.choice(HOBBIES), rng.choice(FOODS), rng.choice(DRINKS), rng.choice(GOOD_FEELINGS)
    names = {"hobby": hobby, "food": food, "drink": drink, "feeling": feeling, "day": rng.choice(DAYS)}
    scripts = (
        (("I am [sad|tired|lonely] today.", "I am sorry to hear that. What happened?"),
         ("[I lost my keys|It rained all day|My friend is ill|I had too much work].",
          "That is not easy. Maybe a cup of {drink} and some rest will help."),
         ("[Good idea|Maybe you are right|I will try that].", "I hope you feel better soon.")),
        (("I am {feeling} today!", "That is good to hear! What happened?"),
         ("[I found a new friend|I passed my test|It is my birthday|I learned something new|My team won].",
          "How nice! I am glad for you."), ("Thank you!", "You are welcome!")),
        (("What should I [cook|eat] [today|tonight|for dinner]?", "How about {food}?"),
         ("[Good idea|I like that|Yes, why not]. And what should I drink?", "{Drink} goes well with it.")),
        (("I am bored. What can I do?", "You could try {hobby}."), ("[I do not like that|Not today|Something else, please].",
          "Then read a good book or call a friend."), ("[Good idea|Yes, I will do that|All right].", "Have fun!")),
        (("I [love|like] {hobby}.", "{Hobby} is a nice hobby. When do you do it?"), ("[Every {day}|On {day}|Mostly on {day}].",
          "Then enjoy it on {day}!")),
        (("It is [very cold|raining|snowing] today.", "Then put on something warm."), ("[I will|Good idea|Of course].",
          "And have a cup of {drink} when you come home.")),
    )  # fmt: skip
    script = rng.choice(scripts)
    return GrammarSample(
        "small_talk", tuple((expand(user, rng, names), expand(answer, rng, names)) for user, answer in script)
    )


# -- outside of the world ---------------------------------------------------------------------------------------

_THINGS = ("the stock price of {x}", "the phone number of {name}", "the population of {x}", "the weather in {x}", "the winner of the "
           "{bare} cup", "the price of {x}", "the boiling point of {x}", "the distance from {x} to {y}", "the mayor of {x}",
           "the height of {x}", "the meaning of {x}", "the score of the {bare} game", "the author of {x}", "the director of {x}",
           "the president of {x}", "the chemical formula of {x}", "the birthday of {name}", "the age of {name}",
           "the address of {name}", "the password of {name}", "the history of {x}", "the battle of {bare}")  # fmt: skip
_OTHERS = ("[Who|Why|When] [invented|discovered|founded|destroyed|won|wrote] {x}?", "What happened in {year}?", "What time is it[ in {x}|]?",
           "What is the square root of {big}?", "What is {big} times {big2}?", "What is {big} plus {big2}?", "How do I [fix|install|build|"
           "program|repair] {x}?", "Who is {name} {surname}?", "What does {name} think of {x}?", "Translate {x} into [French|German|Latin|"
           "Chinese].", "Prove that {x} is true.", "What will [happen|the weather be] [tomorrow|next year|in {year}]?", "Which {bare} "
           "is the best?", "How much does {x} cost?", "Where is {name} {surname} now?", "What is the [latest|newest] {bare}?",
           "When was {name} {surname} born?", "How many people live in {x}?", "Who won the {bare} prize in {year}?", "Compare {x} with {y}.",
           "What did {name} {surname} say about {x}?", "Write a [Python|] function that [parses|encrypts|downloads|compiles|explains] {x}.",
           "Name [three|five] [kinds|parts|makers] of {x}.", "Is {x} [good|dangerous|expensive|true]?", "Which is [bigger|better|older], {x} or "
           "{y}?", "[Can|Could] you [buy|draw|show me|play] {x}?")  # fmt: skip
_ODD = """quantum mechanics|Bitcoin|the Roman Senate|a transistor|Beethoven's fifth symphony|the theory of relativity|a blockchain
the Treaty of Versailles|Shakespeare|a neutron star|the French Revolution|inflation|a GPU|Kubernetes|DNA|the Higgs boson|Napoleon
the stock market|a mortgage|penicillin|the World Cup|Mount Everest|the Great Wall|a black hole|an electric motor|the Nobel Prize
a jet engine|the Magna Carta|a vaccine|Picasso|Mozart|a democracy|the Titanic|a semiconductor|Newton|Einstein|an isotope|calculus
the Mona Lisa|TCP/IP|a compiler|the Olympics|a hedge fund|plate tectonics|a telescope|the Bible|Buddhism|the Cold War|a tax return
Python 4|Windows|an iPhone|a Tesla|the Pythagorean theorem|the Ottoman Empire|an enzyme|the ozone layer|a transformer|radium
a submarine|an atom bomb|the Silk Road|NATO|a contract|copyright|a chess engine|the periodic table|antibiotics|the Amazon"""
_SURNAMES = [
    "Smith",
    "Johnson",
    "Weber",
    "Rossi",
    "Dubois",
    "Novak",
    "Ivanov",
    "Tanaka",
    "Silva",
    "Kowalski",
    "Jensen",
    "Okafor",
    "Singh",
    "Nguyen",
    "Garcia",
]
UNKNOWN = Wordings(
    train=("What is {t}?", "[Can|Could] you tell me {t}?", "Tell me {t}.", "Do you know {t}?", "I need {t}."),
    test=("Would you tell me {t}?", "Look up {t}."),
)


def _odd_things() -> list[str]:
    return _ODD.replace("\n", "|").split("|")


_PLACES = ["Atlantis", "Narnia", "Mordor", "Gondor", "Wakanda", "Oz", "Neverland", "Camelot", "Asgard", "Eldorado", "Lilliput", "Utopia",
           "Middle-earth", "Gotham", "Wonderland", "the moon", "the sea", "Mars", "my village"]  # fmt: skip
_OF_PLACES = ("[What is|What's|Tell me|Do you know|] the [capital|currency|main language] of {p}[?|.]", "[Capital|Currency] of {p}?",
              "Which countries border {p}?", "Which continent is {p} on?", "What language do people speak in {p}?")  # fmt: skip


def _place(rng: random.Random) -> str:
    """A place that does not exist, or none with a capital."""
    if rng.random() < 0.4:
        return rng.choice(_PLACES)
    while True:
        syllables = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))
        name = (syllables + rng.choice(("nia", "land", "stan", "ria", "via", "burg"))).capitalize()
        if name not in [row.country for row in countries()]:
            return name


def unknown(rng: random.Random, split: str) -> GrammarSample:
    """A question the model cannot answer; one in five subjects is kept for the examination."""
    subjects = [x for i, x in enumerate(_odd_things()) if (i % 5 == 0) == (split == "test")]
    x, y = rng.sample(subjects, 2)
    names = {"x": x, "y": y, "bare": x.removeprefix("the ").removeprefix("a ").removeprefix("an "), "name": person(rng).name, "surname": rng.choice(_SURNAMES), "year": str(rng.randint(1200, 2024)),
             "big": str(rng.randint(101, 9999)), "big2": str(rng.randint(101, 999))}  # fmt: skip
    if split == "train" and rng.random() < 0.2:
        text = expand(rng.choice(_OF_PLACES), rng, {"p": _place(rng)})
    elif rng.random() < 0.15:
        text = expand("[Explain|Describe|Tell me about|What is] {x}[.|]", rng, names)
    elif rng.random() < 0.5:
        thing = expand(rng.choice(_THINGS), rng, names)
        text = expand(rng.choice(UNKNOWN.of(split)), rng, {"t": thing})
    else:
        text = expand(rng.choice(_OTHERS), rng, names)
    text = text.lower() if split == "train" and rng.random() < 0.15 else capital(text)
    return GrammarSample("unknown", ((text, UNKNOWN_ANSWER),))


TALKS: tuple[tuple[float, Callable[[random.Random, str], GrammarSample]], ...] = (
    (0.12, about_self), (0.22, introduction), (0.24, booking), (0.2, small_talk), (0.22, unknown),
)  # fmt: skip


def talk(rng: random.Random, split: str) -> GrammarSample:
    """One conversation of one of the kinds."""
    return rng.choices([make for _, make in TALKS], [share for share, _ in TALKS])[0](rng, split)
