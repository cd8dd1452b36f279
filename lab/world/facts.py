"""Facts the model is to know by heart, and questions about them.

Knows: countries (`countries.tsv`: names and neighbours after the CIA World Factbook, public domain), the calendar,
opposites, colours, animals, small sums and times tables. Does not know: stories, tasks on a given text. An answer is
one fixed sentence, so that it can be checked letter by letter.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from world.grammar import GrammarSample, Wordings, a, capital, expand, listed
from world.words import DAYS, MONTHS, NUMBERS

# A request is a question of one of three forms in one of the frames for that form.
DIRECT = Wordings(
    train=(
        "{q}?",
        "{q}?",
        "{q}?",
        "{q}?",
        "[Hi|Hello|Hey][!|,|.] {q}?",
        "[A quick|Quick|A short] question: {q}?",
        "I have a question[.|:] {q}?",
        "[Please answer|Answer this|Tell me|Answer]: {q}?",
        "{q}? [Thank you|Thanks|Please answer|Tell me|I forgot].",
        "Question: {q}?",
        "[I forgot|I am not sure|Help me|I need help|I do not know]. {q}?",
        "My [teacher|sister|friend|son|brother|mother|daughter] [asks|wants to know]: {q}?",
        "[So|And|Now|Well|Okay|Right], {q}?",
        "[Next|Another|The next] question: {q}?",
        "[Something else|Next|Now this]: {q}?",
        "Good [evening|afternoon|day]! {q}?",
        "[I was asked|Somebody asked me|They asked me][:|,] {q}?",
        "[For school|For a quiz|For my homework]: {q}?",
        "[Let us|Let's] see. {q}?",
        "[I was thinking|I want to ask|May I ask]: {q}?",
        "[A test|Quiz|Riddle]: {q}?",
        "[Do you know|Who knows]: {q}?",
        "Excuse me, {q}?",
        "[In one sentence|Short answer, please]: {q}?",
        "Here is [a question|one]: {q}?",
    ),
    test=("One more thing: {q}?", "Good morning! {q}?", "I was wondering, {q}?", "Let me test you. {q}?"),
)  # fmt: skip
INDIRECT = Wordings(
    train=(
        "[Can|Could] you tell me {i}?",
        "Do you know {i}?",
        "[Please tell|Tell] me {i}.",
        "I [want|need] to know {i}.",
        "I would [like|love] to know {i}.",
        "[Can|Could|Will] you [please|] say {i}?",
        "Do you remember {i}?",
        "Tell me, please, {i}.",
        "[I wonder|I am not sure|I do not know|I forgot] {i}.",
        "[Please say|Say|Explain|Write] {i}.",
        "[Have you an idea|Do you have an idea] {i}?",
        "[My friend|My son|My teacher] asks {i}.",
        "I am [interested in|asking you] {i}.",
        "[Are you able to|Can you] tell me {i}?",
        "[Remind|Inform|Teach] me {i}.",
        "I [have to|must|should] [know|find out] {i}.",
        "[Hello|Hi], [can you tell me|do you know] {i}?",
        "[Who knows|Does anybody know] {i}?",
        "[You know|You surely know] {i}, [right|don't you]?",
        "I want to [hear|learn] {i}.",
    ),
    test=("Would you tell me {i}?", "Let me know {i}.", "I am curious {i}.", "Any idea {i}?"),
)  # fmt: skip
NOUN = Wordings(
    train=(
        "{b}",
        "{b}?",
        "{B}",
        "{B}?",
        "Name {n}.",
        "Tell me {n}.",
        "{N}?",
        "{N}, please.",
        "Give me {n}.",
        "I need {n}.",
        "[Please name|Say|Write|Show me|Find] {n}.",
        "[Can|Could] you [name|tell me|give me] {n}?",
        "Do you know {n}?",
        "{N}[.|]",
        "I [want|would like] to know {n}.",
        "I [forgot|am asking for|want] {n}.",
        "[Hello|Hi]! {N}?",
        "[Question|Quiz]: {n}[?|.]",
        "Tell me, please, {n}.",
        "{N}: [what is it|do you know it|tell me]?",
        "[What|And] about {n}?",
        "[In a sentence|Briefly], {n}.",
        "{N}, [now|if you can|thank you].",
        "Let me [see|have] {n}.",
        "[What I look for|What I am looking for] is {n}.",
        "I am trying to [find|remember] {n}.",
        "[I search|I look|We are looking|I was looking|I am searching] for {n}.",
        "[Say|Name|Give|Write|Show|Compute|Find|Recall|Answer with] {n}[.|, please.|!|]",
        "{N} [now|then|next|here]?",
        "[And now|Now|Next|Then|So]: {n}[.|?|]",
        "[I am asking about|I was asked for|I think about|It is about|This is about] {n}.",
        "[Quick|Fast|Short|Easy]: {n}[.|?|!]",
        "[Let us|Let's] [name|find|hear|have] {n}.",
        "{N} [is what I need|is what I want|is my question|, if you know it|, do you know].",
    ),
    test=("State {n}.", "I am looking for {n}.", "{N}, quickly."),
)

LOWER = {"train": 0.4, "test": 0.1}  # of the questions are typed without capitals; names look new then, and are few


class Fact(NamedTuple):
    """A question in three forms, and its answer."""

    direct: str
    indirect: str
    noun: str
    answer: str


def ask(fact: Fact, kind: str, rng: random.Random, split: str) -> GrammarSample:
    """The fact in one of the split's wordings, sometimes typed without capitals."""
    form = rng.choice([frames for frames, text in ((DIRECT, fact.direct), (DIRECT, fact.direct), (INDIRECT,
                       fact.indirect), (NOUN, fact.noun)) if text])  # fmt: skip
    names = {"q": fact.direct, "i": fact.indirect, "n": fact.noun, "b": fact.noun.removeprefix("the ")}
    frame = rng.choice(form.of(split))
    if frame.startswith("{q}"):
        names["q"] = capital(fact.direct)
    text = expand(frame, rng, names)
    text = text.lower() if rng.random() < LOWER[split] else text
    return GrammarSample(kind, ((text.rstrip("?.") if rng.random() < 0.1 else text, fact.answer),))


# -- countries --------------------------------------------------------------------------------------------------


class Country(NamedTuple):
    """A row of the table."""

    country: str
    capital: str
    continent: str
    language: str
    currency: str
    neighbours: tuple[str, ...]


@cache
def countries() -> tuple[Country, ...]:
    """All countries."""
    with open(Path(__file__).with_name("countries.tsv"), encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t"))[1:]
    return tuple(Country(*row[:5], tuple(filter(None, row[5].split(", ")))) for row in rows)


WITH_THE = ("Netherlands", "Philippines", "Maldives", "Bahamas", "Gambia", "United States", "United Kingdom",
            "United Arab Emirates", "Comoros", "Seychelles", "Solomon Islands", "Central African Republic",
            "Dominican Republic", "Ivory Coast", "DR Congo", "Congo")  # fmt: skip


def named(country: str) -> str:
    """The name as it stands in a sentence."""
    return f"the {country}" if country in WITH_THE else country


def country_fact(rng: random.Random) -> Fact:
    """A fact about one country, or all of them."""
    row = rng.choice(countries())
    return rng.choice((capital_fact, capital_fact, of_capital, continent_fact, language_fact, currency_fact,
                       neighbour_fact, all_of_country))(row, rng)  # fmt: skip


def sentence(text: str) -> str:
    """With one full stop at its end."""
    return text if text.endswith(".") else f"{text}."


def capital_fact(row: Country, rng: random.Random) -> Fact:
    """The capital of a country."""
    c = named(row.country)
    direct = rng.choice((f"what is the capital of {c}", f"what is the capital of {c}", f"what is the capital city of {c}",
                         f"which city is the capital of {c}", f"what's the capital of {c}"))  # fmt: skip
    indirect = rng.choice((f"what the capital of {c} is", f"which city is the capital of {c}"))
    return Fact(direct, indirect, f"the capital of {c}", sentence(f"The capital of {c} is {row.capital}"))


def of_capital(row: Country, rng: random.Random) -> Fact:
    """The country of a capital."""
    city, c = row.capital, named(row.country)
    direct = rng.choice((f"which country has the capital {city}", f"{city} is the capital of which country",
                         f"what country is {city} the capital of"))  # fmt: skip
    return Fact(direct, f"which country has the capital {city}", f"the country whose capital is {city}",
                f"{city} is the capital of {c}.")  # fmt: skip


def continent_fact(row: Country, rng: random.Random) -> Fact:
    """The continent of a country."""
    c = named(row.country)
    direct = rng.choice((f"which continent is {c} on", f"on which continent is {c}", f"what continent is {c} in"))
    return Fact(direct, f"which continent {c} is on", f"the continent of {c}", f"{capital(c)} is in {row.continent}.")


def language_fact(row: Country, rng: random.Random) -> Fact:
    """The main language of a country."""
    c = named(row.country)
    direct = rng.choice((f"what language do people speak in {c}", f"which language is spoken in {c}",
                         f"what is the main language of {c}"))  # fmt: skip
    return Fact(direct, f"which language people speak in {c}", f"the main language of {c}",
                f"The main language of {c} is {row.language}.")  # fmt: skip


def currency_fact(row: Country, rng: random.Random) -> Fact:
    """The money of a country."""
    c = named(row.country)
    direct = rng.choice((f"what is the currency of {c}", f"what money do people use in {c}",
                         f"which currency is used in {c}"))  # fmt: skip
    return Fact(direct, f"which currency {c} uses", f"the currency of {c}",
                f"The currency of {c} is the {row.currency}.")  # fmt: skip


def neighbour_fact(row: Country, rng: random.Random) -> Fact:
    """The neighbours of a country, in the order of the alphabet."""
    c = named(row.country)
    direct = rng.choice((f"which countries border {c}", f"what are the neighbours of {c}",
                         f"which countries are next to {c}"))  # fmt: skip
    answer = (
        f"{capital(c)} borders {listed([named(other) for other in row.neighbours])}."
        if row.neighbours
        else f"{capital(c)} has no land neighbours."
    )
    return Fact(direct, f"which countries border {c}", f"the neighbours of {c}", answer)


def all_of_country(row: Country, rng: random.Random) -> Fact:
    """All that is known of a country."""
    c = named(row.country)
    direct = rng.choice((f"what do you know about {c}", f"what can you tell me about {c}"))
    answer = " ".join((
        f"{capital(c)} is a country in {row.continent}.", sentence(f"Its capital is {row.capital}"),
        f"People there speak {row.language} and pay with the {row.currency}.",
        f"It borders {listed([named(other) for other in row.neighbours])}." if row.neighbours
        else "It has no land neighbours.",
    ))  # fmt: skip
    return Fact(direct, f"about {c}", f"a few facts about {c}", answer)


# -- the calendar -----------------------------------------------------------------------------------------------

SEASONS = {"spring": MONTHS[2:5], "summer": MONTHS[5:8], "autumn": MONTHS[8:11], "winter": (*MONTHS[11:], *MONTHS[:2])}
LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
            "twelfth")  # fmt: skip


def calendar_fact(rng: random.Random) -> Fact:
    """Days and months, what comes before and after, how long they are."""
    names, unit = rng.choice(((DAYS, "day"), (MONTHS, "month"), (MONTHS, "month")))
    index = rng.randrange(len(names))
    name, after, before = names[index], names[(index + 1) % len(names)], names[index - 1]
    kinds: list[Fact] = [
        Fact(f"{rng.choice(('which', 'what'))} {unit} comes after {name}", f"which {unit} comes after {name}", f"the {unit} after {name}",
             f"{after} comes after {name}."),
        Fact(f"{rng.choice(('which', 'what'))} {unit} comes before {name}", f"which {unit} comes before {name}", f"the {unit} before {name}",
             f"{before} comes before {name}."),
        Fact(f"what is the {ORDINALS[index]} {unit} of the {'week' if unit == 'day' else 'year'}", "",
             f"the {ORDINALS[index]} {unit} of the {'week' if unit == 'day' else 'year'}",
             f"The {ORDINALS[index]} {unit} of the {'week' if unit == 'day' else 'year'} is {name}."),
    ]  # fmt: skip
    if unit == "month":
        season = next(season for season, months in SEASONS.items() if name in months)
        days = f"{name} has {LENGTHS[index]} days" + (", or 29 in a leap year." if index == 1 else ".")
        kinds += [
            Fact(f"how many days does {name} have", f"how many days {name} has", f"the number of days in {name}", days),
            Fact(f"in which season is {name}", f"in which season {name} is", f"the season of {name}",
                 f"In the north, {name} is in {season}."),
        ]  # fmt: skip
    return rng.choice(kinds)


# -- words ------------------------------------------------------------------------------------------------------

OPPOSITES = """big small|hot cold|up down|day night|black white|fast slow|happy sad|old new|open closed|light dark
full empty|wet dry|high low|long short|loud quiet|early late|hard soft|rich poor|strong weak|good bad|left right|in out
over under|first last|near far|clean dirty|thick thin|wide narrow|heavy light|sweet sour|young old|true false|win lose
buy sell|give take|push pull|start stop|love hate|laugh cry|come go|arrive leave|inside outside|before after|above below
always never|easy difficult|cheap expensive|safe dangerous|asleep awake|alive dead|tall short|warm cool|deep shallow
sharp blunt|smooth rough|tight loose|brave cowardly|polite rude|kind cruel|clever stupid|front back|top bottom|north south
east west|summer winter|sunrise sunset|question answer|friend enemy|king queen|boy girl|man woman|brother sister
son daughter|husband wife|uncle aunt|more less|many few|same different|right wrong|begin end|remember forget
find lose|build destroy|float sink|freeze melt|borrow lend|teach learn|noisy silent|calm stormy"""
COLOUR_OF = """grass green|the sky blue|snow white|coal black|a banana yellow|a tomato red|a carrot orange|an elephant grey
milk white|chocolate brown|a lemon yellow|a strawberry red|the sun yellow|a polar bear white|a frog green|a flamingo pink
an orange orange|a plum purple|a leaf in summer green|blood red|a crow black|a cherry red|salt white|a cucumber green
a swan white|honey golden|a fire engine red|an eggplant purple|rice white|a pine tree green|a raspberry red"""
ANIMAL_TABLE = """dog puppy bark kennel 4|cat kitten meow house 4|cow calf moo barn 4|horse foal neigh stable 4
pig piglet oink sty 4|sheep lamb baa fold 4|goat kid bleat barn 4|duck duckling quack pond 2|hen chick cluck coop 2
frog tadpole croak pond 4|lion cub roar savanna 4|wolf cub howl den 4|bear cub growl cave 4|owl owlet hoot tree 2
bee larva buzz hive 6|snake hatchling hiss hole 0|mouse pup squeak hole 4|fox cub bark den 4|rabbit kit squeak burrow 4
donkey foal bray stable 4|elephant calf trumpet savanna 4|kangaroo joey chortle grassland 2|goose gosling honk pond 2
swan cygnet hiss lake 2|deer fawn grunt forest 4|bird chick sing nest 2|spider spiderling rustle web 8
polar_bear cub growl den 4|penguin chick squawk coast 2|camel calf grunt desert 4|giraffe calf hum savanna 4
zebra foal bark savanna 4|squirrel kit chatter tree 4|hedgehog hoglet snuffle hedge 4|turtle hatchling hiss sea 4
parrot chick squawk jungle 2|bat pup squeak cave 2|panda cub bleat forest 4|koala joey grunt tree 4|hamster pup squeak cage 4
eagle eaglet scream nest 2|crow chick caw nest 2|tiger cub roar jungle 4|monkey infant chatter tree 4
whale calf sing sea 0|dolphin calf click sea 0|seal pup bark coast 0|ant larva rustle anthill 6"""
IRREGULAR = """go went gone|see saw seen|eat ate eaten|write wrote written|take took taken|give gave given|come came come
run ran run|sing sang sung|swim swam swum|drink drank drunk|begin began begun|break broke broken|speak spoke spoken
choose chose chosen|drive drove driven|ride rode ridden|rise rose risen|fall fell fallen|know knew known|grow grew grown
throw threw thrown|fly flew flown|draw drew drawn|wear wore worn|think thought thought|bring brought brought
buy bought bought|catch caught caught|teach taught taught|find found found|hold held held|keep kept kept|sleep slept slept
feel felt felt|leave left left|meet met met|pay paid paid|say said said|sell sold sold|send sent sent|build built built
spend spent spent|lose lost lost|make made made|stand stood stood|tell told told|win won won|have had had|do did done
be was been|get got got|hear heard heard|sit sat sat|read read read|put put put|cut cut cut|hide hid hidden|forget forgot
forgotten|shake shook shaken|steal stole stolen|freeze froze frozen|wake woke woken|bite bit bitten|blow blew blown"""
PLURALS = """child children|man men|woman women|foot feet|tooth teeth|goose geese|mouse mice|person people|leaf leaves
knife knives|wolf wolves|shelf shelves|loaf loaves|life lives|wife wives|baby babies|city cities|berry berries|story stories
box boxes|bus buses|dish dishes|watch watches|fox foxes|potato potatoes|tomato tomatoes|hero heroes|sheep sheep|fish fish
deer deer|ox oxen|half halves|thief thieves|penny pennies|fly flies|lady ladies|party parties|glass glasses|brush brushes"""


@cache
def rows_of(text: str) -> tuple[tuple[str, ...], ...]:
    """The words of each row of a table."""
    return tuple(tuple(row.split()) for row in text.replace("\n", "|").split("|") if len(row.split()) > 1)


@cache
def colours() -> tuple[tuple[str, str], ...]:
    """Things and their colours."""
    rows = [row.rsplit(" ", 1) for row in COLOUR_OF.replace("\n", "|").split("|")]
    return tuple((name, colour) for name, colour in rows)


def word_fact(rng: random.Random) -> Fact:
    """An opposite, a colour, a plural, a past tense."""
    return rng.choice((opposite_fact, opposite_fact, colour_fact, plural_fact, past_fact))(rng)


@cache
def _opposites() -> dict[str, str]:
    known: dict[str, str] = {}
    for one, other in rows_of(OPPOSITES):
        known.setdefault(one, other)
        known.setdefault(other, one)
    return known


def opposite_fact(rng: random.Random) -> Fact:
    """The opposite of a word."""
    word = rng.choice(list(_opposites()))
    direct = rng.choice((f"what is the opposite of {word}", f'what is the opposite of "{word}"'))
    return Fact(direct, f"what the opposite of {word} is", f"the opposite of {word}",
                f"The opposite of {word} is {_opposites()[word]}.")  # fmt: skip


def colour_fact(rng: random.Random) -> Fact:
    """The colour of something."""
    name, colour = rng.choice(colours())
    direct = rng.choice((f"what colour is {name}", f"what is the colour of {name}"))
    return Fact(direct, f"what colour {name} is", f"the colour of {name}", f"{capital(name)} is {colour}.")


def plural_fact(rng: random.Random) -> Fact:
    """The plural of a noun."""
    one, many = rng.choice(rows_of(PLURALS))
    direct = rng.choice((f"what is the plural of {one}", f'what is the plural of "{one}"'))
    return Fact(direct, f"what the plural of {one} is", f"the plural of {one}", f"The plural of {one} is {many}.")


def past_fact(rng: random.Random) -> Fact:
    """The past tense of a verb."""
    row = rng.choice(rows_of(IRREGULAR))
    direct = rng.choice((f"what is the past tense of {row[0]}", f'what is the past tense of "{row[0]}"'))
    return Fact(direct, f"what the past tense of {row[0]} is", f"the past tense of {row[0]}",
                f"The past tense of {row[0]} is {row[1]}.")  # fmt: skip


def animal_fact(rng: random.Random) -> Fact:
    """An animal's young, sound, home or legs."""
    name, young, sound, home, legs = rng.choice(rows_of(ANIMAL_TABLE))
    name = name.replace("_", " ")
    the = a(name)
    many = NUMBERS[int(legs)] if int(legs) else "no"
    return rng.choice((
        Fact(f"what is a baby {name} called", f"what a baby {name} is called", f"the name of a baby {name}",
             f"A baby {name} is called {a(young)}."),
        Fact(f"what sound does {the} make", f"what sound {the} makes", f"the sound of {the}", f"{capital(the)} can {sound}."),
        Fact(f"where does {the} live", f"where {the} lives", f"the home of {the}",
             f"{capital(the)} lives {'on' if home == 'coast' else 'in'} {_home(home)}."),
        Fact(f"how many legs does {the} have", f"how many legs {the} has", f"the number of legs of {the}",
             f"{capital(the)} has {many} legs."),
    ))  # fmt: skip


def _home(home: str) -> str:
    return f"the {home}" if home in ("sea", "savanna", "jungle", "forest", "desert", "coast") else a(home)


# -- numbers ----------------------------------------------------------------------------------------------------


def sum_fact(rng: random.Random) -> Fact:
    """A sum or a difference up to 20, or a product up to 10 times 10, in digits or in words."""
    kind = rng.choice(("plus", "plus", "minus", "times", "times"))
    if kind == "plus":
        x = rng.randint(0, 20)
        y = rng.randint(0, 20 - x)
        result, sign = x + y, "+"
    elif kind == "minus":
        x = rng.randint(0, 20)
        y = rng.randint(0, x)
        result, sign = x - y, "-"
    else:
        x, y = rng.randint(1, 10), rng.randint(1, 10)
        result, sign = x * y, "*"
    spoken = rng.choice((f"{x} {kind} {y}", f"{x} {kind} {y}", f"{x} {sign} {y}", f"{x}{sign}{y}"))
    if kind == "times" and rng.random() < 0.2:
        spoken = rng.choice((f"{x} x {y}", f"{x}x{y}", f"{x} × {y}"))
    direct = rng.choice((f"what is {spoken}", f"what's {spoken}", f"how much is {spoken}", f"what does {spoken} make"))
    return Fact(direct, f"what {spoken} is", spoken, f"{x} {kind} {y} is {result}.")


FACTS: dict[str, Callable[[random.Random], Fact]] = {
    "countries": country_fact,
    "calendar": calendar_fact,
    "words": word_fact,
    "animals": animal_fact,
    "sums": sum_fact,
}
SHARES = {"countries": 0.4, "calendar": 0.09, "words": 0.18, "animals": 0.09, "sums": 0.24}


def fact(rng: random.Random, split: str) -> GrammarSample:
    """A question about a fact."""
    kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
    return ask(FACTS[kind](rng), kind, rng, split)


def sums(rng: random.Random, split: str) -> GrammarSample:
    """A question about a sum, a difference or a product."""
    return ask(sum_fact(rng), "sums", rng, split)


def several(rng: random.Random, split: str) -> GrammarSample:
    """A conversation of several questions about facts, the later ones sometimes short."""
    samples = [fact(rng, split) for _ in range(rng.randint(2, 4))]
    turns = [turn for sample in samples for turn in sample.turns]
    if rng.random() < 0.5:
        rows = rng.sample(countries(), 2)
        relation = rng.choice((capital_fact, capital_fact, language_fact, currency_fact, continent_fact))
        first, second = (relation(row, rng) for row in rows)
        more = "|And of" if relation in (capital_fact, currency_fact) else ""
        follow = expand(f"[And|What about|And what about{more}] {{c}}?", rng, {"c": named(rows[1].country)})
        turns = [(capital(first.direct) + "?", first.answer), (follow, second.answer), *turns[:2]]
    return GrammarSample("facts_in_turns", tuple(turns))


def sentences(rng: random.Random) -> Iterator[str]:
    """Running text that says facts, for learning them from the other side."""
    row = rng.choice(countries())
    c = named(row.country)
    yield f"{capital(c)} is a country in {row.continent}."
    yield f"Its capital is {row.capital}, people there speak {row.language}, and they pay with the {row.currency}."
    if row.neighbours:
        yield f"{capital(c)} borders {listed([named(other) for other in row.neighbours])}."
