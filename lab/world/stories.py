"""Short stories about consistent people, animals and places, made of plots.

Knows: plots as runs of patterns, and what each story makes true (questions with answers, a title, a moral). Does not
know: how stories are asked for. Everything a story says of its people is decided before the first sentence.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from world.grammar import a, capital, expand
from world.words import (
    DAYS,
    FABLE_ANIMALS,
    FLOWERS,
    FOODS,
    FRUITS,
    GOOD_FEELINGS,
    HIDING_PLACES,
    INDOOR,
    JOBS,
    OUTDOOR,
    PETS,
    RELATIVES,
    SKILLS,
    SMALL_ANIMALS,
    TOWNS,
    VEGETABLES,
    Person,
    person,
    thing,
)  # fmt: skip


@dataclass
class Story:
    """A story: paragraphs, a title, what it is about, and what may be asked about it."""

    title: str
    about: str  # a noun phrase: "a little bird"
    paragraphs: list[str] = field(default_factory=list)
    questions: list[tuple[str, str]] = field(default_factory=list)
    hero: str = ""
    key_sentences: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """All of it."""
        return "\n\n".join(self.paragraphs)


class Teller:
    """The names of one story and the paragraphs told so far."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names: dict[str, str] = {}
        self.paragraphs: list[str] = []

    def hero(self, who: Person, prefix: str = "") -> None:
        """Make somebody known: {hero}, {he}, {his}, ... or with a prefix."""
        self.names[f"{prefix}hero" if prefix else "hero"] = who.name
        self.names |= who.pronouns(prefix)

    def set(self, **names: str) -> None:
        """More names for patterns."""
        self.names |= names

    def say(self, *patterns: str) -> None:
        """A paragraph; a pattern that begins with "?" is told half of the time."""
        told = []
        for pattern in patterns:
            if pattern.startswith("?"):
                if self.rng.random() < 0.5:
                    continue
                pattern = pattern[1:]
            told.append(expand(pattern, self.rng, self.names))
        if told:
            self.paragraphs.append(" ".join(told))

    def pick(self, *words: str) -> str:
        """One of them."""
        return self.rng.choice(words)

    def story(self, title: str, about: str, questions: list[tuple[str, str]]) -> Story:
        """What was told."""
        made = [(expand(q, self.rng, self.names), expand(answer, self.rng, self.names)) for q, answer in questions]
        return Story(expand(title, self.rng, self.names), expand(about, self.rng, self.names), self.paragraphs, made,
                     self.names.get("hero", ""))  # fmt: skip


OPENING = (
    "[One|On a] [sunny|rainy|cold|warm|windy|quiet|bright|cloudy|grey|lovely] [morning|afternoon|day|evening]",
    "One {day}",
    "[Last|One] [summer|winter|spring|autumn]",
    "A [long|short] time ago",
    "One [fine|beautiful] day",
    "Early one [morning|{day} morning]",
)
PLACE_OF_HERO = (
    "[Once there was|There once was|There was once] a [little|young|kind|cheerful|curious|quiet|brave|clever] {child} "
    "[named|called] {hero}. {He} lived in [a small house|a little cottage|a tall house|a yellow house|an old farmhouse] "
    "[near the {place}|in {town}|by the river|at the end of the road|with {his} {relative}].",
    "{Hero} was a [little|young|kind|cheerful|curious|quiet|brave|clever] {child} who lived [in {town}|near the {place}|"
    "with {his} {relative} in {town}].",
    "In {town} there lived a [{child}|little {child}|young {child}] [named|called] {hero}.",
    "{Hero} lived in {town} with {his} {relative} and [a {pet}|an old {pet}|a small {pet}] [called|named] {petname}.",
)
CLOSING = (
    "[That evening|That night|When {he} went to bed], {hero} [felt|was] [very|so] {good}.",
    "[It had been|It was] [a good day|a wonderful day|the best day of the week|a day to remember].",
    "{Hero} [smiled|laughed] all the way home.",
    "From [that day on|then on], {hero} [never forgot what had happened|often thought of that day|told the story to everyone].",
    "And {hero} was {good}.",
)
THANKS = (
    '"[Thank you|Thank you so much|How kind of you]," said {hero}. "[You are a good friend|I will never forget this|You '
    'made my day]!"',
    '"[Thank you|Thanks]!" said {hero}[ with a big smile| and gave {friendhim} a hug|].',
)


def _teller(rng: random.Random) -> Teller:
    """A teller with the usual names: a hero, a friend, a place, a town."""
    told = Teller(rng)
    hero = person(rng)
    friend = person(rng, hero)
    told.hero(hero)
    told.hero(friend, "friend")
    told.set(
        friend=friend.name,
        place=rng.choice(OUTDOOR),
        room=rng.choice(INDOOR),
        town=rng.choice(TOWNS),
        day=rng.choice(DAYS),
        relative=rng.choice(RELATIVES),
        pet=rng.choice(PETS),
        petname=rng.choice(
            ("Biscuit", "Pepper", "Shadow", "Coco", "Max", "Bubbles", "Snowy", "Tiger", "Patch", "Rusty")
        ),
        good=rng.choice(GOOD_FEELINGS),
        bad=rng.choice(("sad", "worried", "upset", "unhappy", "nervous")),
        open=rng.choice(OPENING),
    )
    told.names["open"] = expand(told.names["open"], rng, told.names)
    return told


def lost_thing(rng: random.Random) -> Story:
    """Something is lost, looked for and found."""
    told, item, where = _teller(rng), thing(rng), rng.choice(HIDING_PLACES)
    gift = rng.choice(("{relative} had given it to {him}", "{friend} had made it for {him}", "it was a present"))
    told.set(item=item, an_item=a(item), where=where)
    told.set(gift=expand(gift, rng, told.names))
    told.say(rng.choice(PLACE_OF_HERO))
    told.say(
        "{Hero} had {an_item}. [{He} loved it more than anything|{He} took it everywhere|{He} was very proud of it]"
        "[, because {gift}|].",
        "?{He} [played with it every day|kept it [beside {his} bed|on {his} shelf]].",
    )
    told.say(
        "{Open}, the {item} was [gone|not in its place|missing].",
        '[{Hero} was {bad}.|"Oh no!" cried {hero}. "Where is my {item}?"|{Hero} did not know what to do.]',
        "{He} looked [in the {room}|under the table|in every corner of the house|in {his} bag], but [it was not there|{he} "
        "could not find it|there was no {item}].",
    )
    told.say(
        "[Then|After a while] {friend} came [by|to the door|to visit].",
        '"[What is wrong|What happened|Why are you so {bad}]?" [asked {friend}|{friend} asked].',
        '"[I have lost|I cannot find|I lost] my {item}," said {hero}.',
        '"[Do not worry|Let us look together|I will help you]," said {friend}. ["Two pairs of eyes see more than '
        'one."|"When did you last have it?"|]',
    )
    told.say(
        "[They looked for a long time|They searched the whole house|They looked everywhere].",
        "[At last|In the end|Then] {friend} [looked|had an idea and looked] {where}. [There it was!|And there was the "
        "{item}!|The {item} was there!]",
    )
    told.say(rng.choice(THANKS), rng.choice(CLOSING))
    return told.story("{Hero} and the {item}", f"a lost {item}", [
        ("What did {hero} lose?", "{Hero} lost {an_item}."),
        ("Where was the {item}?", "The {item} was {where}."),
        ("Who found the {item}?", "{Friend} found the {item}."),
        ("Who helped {hero}?", "{Friend} helped {hero}."),
    ])  # fmt: skip


def hurt_animal(rng: random.Random) -> Story:
    """A small animal is found in need and helped."""
    told, animal = _teller(rng), rng.choice(SMALL_ANIMALS)
    trouble, remedy = rng.choice((
        ("had hurt its leg", "put a bandage on its leg"), ("was cold and wet", "wrapped it in a warm towel"),
        ("was very hungry", "gave it something to eat"), ("had lost its mother", "looked for its mother"),
        ("was stuck in a fence", "carefully set it free"), ("could not move", "carried it home in a basket"),
    ))  # fmt: skip
    size = rng.choice(("little", "small", "tiny", "young"))
    told.set(animal=f"{size} {animal}", an_animal=a(f"{size} {animal}"), kind=animal, trouble=trouble, remedy=remedy)
    told.say(rng.choice(PLACE_OF_HERO))
    told.say(
        "{Open}, {hero} [went to|was walking to|was on {his} way to] the {place}.",
        "[Suddenly|Then] {he} [heard a soft sound|saw something in the grass|heard a sad little cry]. It was {an_animal}.",
        "[The {kind} {trouble}.|{He} saw that it {trouble}.]",
    )
    told.say(
        '"[Poor little thing|Do not be afraid|You poor {kind}]," said {hero}. "I will help you."',
        "{He} [knelt down|came closer very slowly] and {remedy}.",
        "?The {kind} [looked at {him} with big eyes|trembled a little|did not run away].",
    )
    told.say(
        '[At home|Back home], {his} {relative} [said|told {him}], "[We must take good care of it|You did the right '
        'thing|Let us keep it warm]. [It needs rest|It needs some water|It will be better soon]."',
        "[Every day|For a week|Day after day] {hero} [looked after|cared for|watched over] the {kind}.",
        "?{He} [gave it water and food|made it a soft bed|spoke to it in a quiet voice].",
    )
    told.say(
        "[At last|Soon|After some days] the {kind} was [well|strong|healthy] again. {Hero} [took it back to|carried it "
        "to|set it free at] the {place}.",
        "[It looked back once and was gone.|It turned around as if to say thank you.|{He} was a little sad, but also "
        "{good}.]",
    )
    told.say(rng.choice(CLOSING))
    return told.story("{Hero} and the {animal}", "{an_animal}", [
        ("What animal did {hero} find?", "{Hero} found {an_animal}."),
        ("What was wrong with the {kind}?", "The {kind} {trouble}."),
        ("Where did {hero} set the {kind} free?", "{Hero} set the {kind} free at the {place}."),
    ])  # fmt: skip


def baking(rng: random.Random) -> Story:
    """Something is cooked for somebody."""
    told, food = _teller(rng), rng.choice(FOODS)
    extra = rng.choice((*FRUITS, "nuts", "raisins", "cinnamon", "butter"))
    told.set(
        food=food,
        extra=extra,
        reason=rng.choice(
            (
                "it was {friend}'s birthday",
                "{friend} was ill",
                "{friend} had helped {him} the day before",
                "{friend} was coming to visit",
                "it was {friend}'s first day at school",
            )
        ),
    )
    told.names["reason"] = expand(told.names["reason"], rng, told.names)
    told.say(
        "{Open}, {hero} [wanted to make|decided to make|had an idea: {he} would make] {food} for {friend}, because {reason}.",
        "?{Hero} had never [done it alone|made {food} before].",
    )
    told.say(
        "{He} [went to|ran to] the kitchen and [took|looked for] everything {he} needed. [But they had|They had] no "
        "{extra} [left|in the house].",
        '"[What now|What shall I do]?" [thought {hero}|{he} asked]. {His} {relative} said, "[Go to the market|Ask our '
        'neighbour|Run to the shop] and get some."',
    )
    told.say(
        "{Hero} [ran|hurried|went] there as fast as {he} could. [The {job} gave {him} some {extra}.|A kind {job} sold {him} "
        "some {extra}.]".replace("{job}", rng.choice(JOBS)),
        "Back in the kitchen, {he} [mixed|stirred|washed, cut and mixed] everything and [waited|sang a song while {he} waited].",
        "?[Soon the whole house smelled wonderful.|The kitchen was a mess, but {hero} did not mind.]",
    )
    told.say(
        "[When it was ready|In the afternoon|At last], {hero} [took the {food} to {friend}|brought {friend} the {food}].",
        '"[For me|Did you make this yourself|This is wonderful]!" said {friend}. [They ate together and laughed.|They sat '
        "down and shared it.|It was gone in five minutes.]",
        rng.choice(CLOSING),
    )
    return told.story("{Hero} makes {food}", f"making {food}", [
        ("What did {hero} make?", "{Hero} made {food}."),
        ("For whom did {hero} make {food}?", "{Hero} made {food} for {friend}."),
        ("Why did {hero} make {food}?", "{Hero} made {food} because {reason}."),
        ("What was missing?", "They had no {extra}."),
    ])  # fmt: skip


def growing(rng: random.Random) -> Story:
    """Seeds are planted, and patience is needed."""
    told, plant = _teller(rng), rng.choice(FLOWERS + VEGETABLES)
    weeks = rng.choice(("one week", "two weeks", "three weeks", "a month"))
    told.set(plant=plant, weeks=weeks)
    told.say(rng.choice(PLACE_OF_HERO))
    told.say(
        '{Open}, {his} {relative} gave {him} [some|a bag of|a handful of] seeds. "[Plant them in the garden|Put them '
        'into the earth]|," said {his} {relative}. "They will become {plant}."'.replace("]|,", "],"),
        "{Hero} [dug little holes|made a small bed behind the house], put the seeds [in|into them] and [gave them water|"
        "watered them].",
    )
    told.say(
        "The next day {he} [looked|went to look]. [Nothing|There was nothing to see]. [The day after, still nothing.|"
        "{He} looked again on {day}. Nothing.]",
        '"[Why do they not grow|When will they grow|Are they asleep]?" asked {hero}. "[Be patient|Good things take time|You '
        'must wait]," said {his} {relative}.',
        '?{Friend} [laughed|came to look] and said, "[You will wait for ever|Maybe they need more sun|Give them a little '
        'more water]."',
    )
    told.say(
        "{Hero} [watered them every morning|pulled out the weeds|did not give up].",
        "After {weeks} {he} saw [a tiny green leaf|something small and green|the first green tips]. [{He} jumped for "
        'joy.|"They are growing!" {he} shouted.]',
        "In [summer|the end] the [garden|bed] was full of {plant}. {Hero} [gave some to {friend}|shared them with {friend}|"
        "took the best ones to {friend}].",
    )
    told.say(rng.choice(CLOSING))
    return told.story("{Hero} and the {plant}", f"growing {plant}", [
        ("What did {hero} plant?", "{Hero} planted {plant}."),
        ("How long did it take until something grew?", "It took {weeks}."),
        ("Who gave {hero} the seeds?", "{His} {relative} gave {hero} the seeds."),
        ("Who got some of the {plant}?", "{Friend} got some of the {plant}."),
    ])  # fmt: skip


def learning(rng: random.Random) -> Story:
    """A skill is learned by trying again."""
    told, skill = _teller(rng), rng.choice(SKILLS)
    tries = rng.choice(("three", "five", "ten", "twenty", "a hundred"))
    told.set(skill=skill, tries=tries)
    told.say(
        "{Hero} [wanted to learn to|wished {he} could|dreamed that {he} could] {skill}. [All {his} friends could do it|"
        "{Friend} could do it|{His} {relative} could do it very well], but {hero} could not.",
        "?{He} lived in {town}, [near the {place}|not far from the {place}].",
    )
    told.say(
        '{Open}, {he} [asked {friend} to help|went to {friend} for help]. "[Can you show me how|Can you teach me to {skill}|Will you help me]?" '
        "asked {hero}.",
        '"[Of course|Gladly|Yes, I will]," said {friend}. "[It is not hard, but you must practise|Watch me first|First, go '
        'slowly]."',
    )
    told.say(
        "{Hero} tried {tries} times. [Every time something went wrong.|It did not work.|{He} made one mistake after the "
        "other.]",
        "[{He} was {bad}|{He} wanted to give up|{He} sat down and sighed]. "
        '"[I will never learn it|I cannot do it]," {he} said.',
        '"[Not yet|You cannot do it yet|Everybody starts that way]," said {friend}. "[Try once more|Come, one more time|'
        'Tomorrow you will do better]."',
    )
    told.say(
        "[The next day|After a week|The day after], {hero} came back [to the {place}|and tried again]. {He} [took a deep "
        "breath|thought of what {friend} had said] and [tried|began].",
        "[And this time it worked!|Suddenly {he} could do it!|It worked!] {Hero} [could {skill}|had learned to {skill}].",
        rng.choice(CLOSING),
    )
    return told.story("{Hero} learns to {skill}", f"learning to {skill}", [
        ("What did {hero} want to learn?", "{Hero} wanted to learn to {skill}."),
        ("Who taught {hero}?", "{Friend} taught {hero}."),
        ("How many times did {hero} try?", "{Hero} tried {tries} times."),
    ])  # fmt: skip


def sharing(rng: random.Random) -> Story:
    """Somebody has much, somebody has nothing."""
    told, fruit = _teller(rng), rng.choice([fruit for fruit in FRUITS if fruit != "lemons"])
    count = rng.choice(("four", "six", "eight", "ten", "twelve"))
    half = {"four": "two", "six": "three", "eight": "four", "ten": "five", "twelve": "six"}[count]
    told.set(fruit=fruit, count=count, half=half)
    told.say(
        "{Open}, {hero} [picked|bought|found] {count} {fruit} [at the market|at the farm|in the orchard].",
        "[They looked sweet and ripe.|{He} could not wait to eat them.|{He} put them into {his} basket.]",
    )
    told.say(
        "On the way home {he} [met|saw] {friend}, who [was sitting on a bench|was sitting under a tree|looked {bad}].",
        '"[What is the matter|Are you all right|Why are you sitting here]?" asked {hero}.',
        '"[I forgot my lunch|I am so hungry|I have had nothing to eat today]," said {friend}.',
    )
    told.say(
        "{Hero} looked at {his} {fruit}. [{He} wanted to eat them all.|{He} thought for a moment.]",
        'Then {he} said, "[Take half of them|Let us share|Here, these are for you]." {He} gave {friend} {half} of the {fruit}'
        " and kept {half}.",
        "[They tasted better than ever.|They sat side by side and ate.|They ate and told each other stories.]",
    )
    told.say(
        "The next [day|week] {friend} brought {hero} [a present|a surprise]: {gift}.".replace("{gift}", a(thing(rng))),
        rng.choice(CLOSING),
    )
    return told.story("{Hero} shares", f"sharing {fruit}", [
        ("How many {fruit} did {hero} have?", "{Hero} had {count} {fruit}."),
        ("How many {fruit} did {friend} get?", "{Friend} got {half} {fruit}."),
        ("With whom did {hero} share?", "{Hero} shared with {friend}."),
    ])  # fmt: skip


def storm(rng: random.Random) -> Story:
    """A storm, fear, and a way through the night."""
    told = _teller(rng)
    comfort = rng.choice(("a song", "a story", "a cup of hot chocolate", "a candle", "a warm blanket"))
    told.set(comfort=comfort)
    told.say(
        "[One night|One evening|Late one evening] there was a [great|terrible|wild] storm [over {town}|near the {place}].",
        "[The wind howled around the house|The rain beat against the windows|Thunder rolled over the roofs].",
        "{Hero} [lay in bed|pulled the blanket over {his} head|sat up in bed]. {He} was [afraid|very frightened|scared].",
    )
    told.say(
        "[Then the lights went out.|Suddenly it was dark in the whole house.|There was a loud bang.]",
        '{Hero} [ran to|called for|went to find] {his} {relative}. "[I am afraid|I cannot sleep|The storm is so loud]!"',
        '"[A storm is only wind and water|It will pass|Come here, we are safe in here]," said {his} {relative}, and gave {him} '
        "{comfort}.",
    )
    told.say(
        "[They counted the seconds between lightning and thunder.|They listened to the rain together.|They sat by the "
        "window and watched.] [The storm moved on|Slowly it grew quiet|Little by little the storm went away].",
        "?{Petname}, the {pet}, [slept through it all|came and lay down beside them|crept under the table].",
    )
    told.say(
        "In the morning the sun [shone|was shining] again. [Only the wet garden told of the storm.|The air smelled fresh "
        "and clean.|{Hero} went out and jumped into every puddle.]",
        "{Hero} was not afraid of storms any more.",
    )
    return told.story("{Hero} and the storm", "a stormy night", [
        ("What was {hero} afraid of?", "{Hero} was afraid of the storm."),
        ("What did {his} {relative} give {hero}?", "{His} {relative} gave {hero} {comfort}."),
    ])  # fmt: skip


def honest(rng: random.Random) -> Story:
    """Something is broken, and the truth is told."""
    told, item = (
        _teller(rng),
        rng.choice(("vase", "cup", "window", "plate", "lamp", "mirror", "clock", "flower pot", "bowl")),
    )
    how = rng.choice(("with a ball", "while dancing", "while running through the house", "with {his} elbow"))
    told.set(item=item, how=how)
    told.names["how"] = expand(how, rng, told.names)
    told.say(
        "{Open}, {hero} was [alone in the {room}|playing at home|at home]. [{He} was not careful|It happened very fast|"
        "{He} only wanted to play]: {he} broke {his} {relative}'s {item} {how}."
    )
    told.say(
        "[{His} heart beat fast|{Hero} was frightened|{Hero} stood very still]. [Nobody had seen it.|Only {petname}, the "
        "{pet}, had seen it.]",
        '"[I could say it was the {pet}|I could hide the pieces|I could say nothing]," thought {hero}. [But that did not feel '
        "right.|But {he} knew that this was wrong.]",
    )
    told.say(
        'When {his} {relative} came home, {hero} [went to the door|took a deep breath] and said, "[I broke your {item}|It was '
        'me. I broke the {item}]. I am [sorry|very sorry|so sorry]."',
        '{His} {relative} [was quiet for a moment|looked at the pieces]. Then {relative} said, "[Thank you for telling the '
        'truth|I am glad that you told me|A {item} can be replaced, but trust cannot]."'.replace(
            "Then {relative}", "Then {his} {relative}"
        ),
    )
    told.say(
        "[Together they cleaned up the pieces.|They glued the pieces together.|{Hero} helped to buy a new one.]",
        "{Hero} felt [light again|much better|as light as a feather].",
    )
    return told.story("{Hero} and the broken {item}", f"a broken {item}", [
        ("What did {hero} break?", "{Hero} broke {his} {relative}'s {item}."),
        ("How did it happen?", "{Hero} broke it {how}."),
        ("Did {hero} tell the truth?", "Yes, {hero} told the truth."),
    ])  # fmt: skip


def new_friend(rng: random.Random) -> Story:
    """Somebody new comes to town."""
    told = _teller(rng)
    common = rng.choice(
        (
            "both loved drawing",
            "both liked to climb trees",
            "both had a {pet}",
            "both collected shells",
            "both loved stories about the sea",
            "both liked to bake",
            "were both born in the same month",
        )
    )
    told.set(
        common=expand(common, rng, told.names), town2=rng.choice([town for town in TOWNS if town != told.names["town"]])
    )
    told.say(
        "{Hero} [was new in|had just moved to] {town}. [Before, {he} had lived in {town2}.|{He} came from {town2}.]",
        "[{He} knew nobody|{He} had no friends there|Everything was strange], and {he} was {bad}.",
    )
    told.say(
        "{Open}, {he} [sat alone|stood all alone|was alone] [at the {place}|near the {place}]. [A {friendchild} came along.|Then "
        "a {friendchild} came up to {him}.]",
        '"[Hello|Hi]! My name is {friend}," [the {friendchild} said|said the {friendchild}]. "[What is your name|Who are '
        'you]?" "I am {hero}," said {hero}.',
    )
    told.say(
        '"[Do you want to play|Shall I show you the {place}|Would you like to come with me]?" asked {friend}.',
        "[They talked the whole afternoon|They talked and talked] and found out that they {common}.",
        "?{Friend} [showed {him} the best places of {town}|took {him} home to meet {petname}, the {pet}].",
    )
    told.say(
        "[The next day|On {day}] they met again[, and the day after too|]. "
        "[Soon they were best friends.|After a week they were best friends.]",
        rng.choice(CLOSING),
    )
    return told.story("{Hero} finds a friend", "a new friend", [
        ("Where did {hero} live before?", "{Hero} lived in {town2} before."),
        ("What was the name of the new friend?", "The new friend was called {friend}."),
        ("What did {hero} and {friend} have in common?", "They {common}."),
        ("Where did {hero} and {friend} meet?", "They met at the {place}."),
    ])  # fmt: skip


def present(rng: random.Random) -> Story:
    """A secret present for a birthday."""
    told, item = _teller(rng), thing(rng)
    money = rng.choice(("three", "five", "seven", "nine", "ten"))
    price = {"three": "six", "five": "eight", "seven": "ten", "nine": "twelve", "ten": "fifteen"}[money]
    told.set(item=item, an_item=a(item), money=money, price=price, job=rng.choice(JOBS))
    told.say(
        "It was almost the birthday of {hero}'s {relative}. {Hero} wanted to buy {an_item}, which cost {price} coins. But {he} "
        "had only {money} coins."
    )
    told.say(
        '{Open}, {he} went to the {job}. "[Can I help you|Do you have any work for me]?" {he} asked. "[I need to earn some '
        'money|I am saving for a present]."',
        '"[Yes, indeed|What luck|Certainly]," said the {job}. "[Sweep the floor|Carry these boxes|Clean the windows] and I will '
        'pay you."',
        "{Hero} worked [hard|all afternoon|until the sun went down].",
    )
    told.say(
        "[In the evening|At last] {he} had enough. {He} ran to the shop and bought the {item}.",
        "?{Friend} helped {him} to wrap it in [blue|red|yellow|green] paper.",
        'On the birthday {his} {relative} opened it and [smiled|laughed with joy|had tears of joy]. "[This is the best present '
        'I ever had|How did you know|What a surprise]!"',
        rng.choice(CLOSING),
    )
    return told.story("{Hero} and the present", "a birthday present", [
        ("What did {hero} buy?", "{Hero} bought {an_item}."),
        ("How much did the {item} cost?", "The {item} cost {price} coins."),
        ("How many coins did {hero} have at first?", "{Hero} had {money} coins at first."),
        ("Who was the present for?", "The present was for {hero}'s {relative}."),
        ("For whom did {hero} work?", "{Hero} worked for the {job}."),
    ])  # fmt: skip


def lost_way(rng: random.Random) -> Story:
    """Somebody gets lost and finds the way home."""
    told = _teller(rng)
    sign = rng.choice(
        (
            "a church tower",
            "a light between the trees",
            "the sound of a bell",
            "a little river",
            "the smell of fresh bread",
            "the voice of {friend}",
            "a red roof",
        )
    )
    told.set(
        sign=expand(sign, rng, told.names),
        goal=rng.choice(
            (
                "pick berries",
                "look for mushrooms",
                "see the ducks",
                "collect wood",
                "find flowers for {his} {relative}",
                "fly a kite",
                "watch the birds",
            )
        ),
    )
    told.names["goal"] = expand(told.names["goal"], rng, told.names)
    told.say(
        '{Open}, {hero} went into the [forest|woods|hills] to {goal}. "[Do not go too far|Stay on the path|Be home before '
        'dark]," {his} {relative} had said.',
        "But {hero} [saw a butterfly and ran after it|went on and on|forgot the time].",
    )
    told.say(
        "[When {he} looked around|Suddenly], {he} did not know where {he} was. [All the trees looked the same.|The path was "
        "gone.|It was getting dark.]",
        '{He} was {bad}. [{He} sat down on a stone and thought.|"Stay calm," {he} told {himself}.]',
    )
    told.say(
        'Then {he} noticed {sign}. ["That must be the way!" said {hero}.|{He} followed it.|{He} went towards it, step by step.]',
        "?On the way {he} met {friend}, who was [looking for {him}|going the same way].",
        "[Soon {he} saw {his} house.|After a short time {he} was home.] {His} {relative} [hugged {him}|was so glad to see {him}|"
        "gave {him} warm soup].",
        '"[Next time I will stay on the path|I will be more careful]," said {hero}.',
    )
    return told.story("{Hero} loses the way", "somebody who got lost", [
        ("Why did {hero} go there?", "{Hero} wanted to {goal}."),
        ("What showed {hero} the way?", "{Capital_sign} showed {hero} the way.".replace("{Capital_sign}", capital(told.names["sign"]))),
        ("Who was waiting at home?", "{His} {relative} was waiting at home."),
    ])  # fmt: skip


FABLES = (
    ("proud", "I am the [fastest|strongest|cleverest] animal here",
     "a [race|contest] to the {place}", "stopped to [rest|boast|sleep]", "Pride comes before a fall."),
    ("greedy", "All this food is mine", "a hungry winter", "had eaten everything and had nothing left",
     "Those who share are never alone."),
    ("lazy", "I can work tomorrow", "the first snow", "had no [house|food] for the winter",
     "Do today what you can do today."),
    ("impatient", "I want it now", "the time when the first [apples|nuts|berries] grew", "ate them green and had a stomach ache",
     "Good things take time."),
    ("boastful", "Nobody is as clever as I am", "a riddle that the king had asked",
     "did not know the answer", "Listen before you speak."),
)  # fmt: skip


def fable(rng: random.Random) -> Story:
    """Two animals, one of whom learns something."""
    told = Teller(rng)
    one, other = rng.sample(FABLE_ANIMALS, 2)
    trait, words, event, mistake, moral = rng.choice(FABLES)
    told.set(
        one=one,
        other=other,
        a_one=a(f"{trait} {one}"),
        a_other=a(rng.choice(("wise", "patient", "quiet", "kind", "small")) + f" {other}"),
        place=(place := rng.choice(OUTDOOR)),
        a_place=a(place),
        trait=trait,
        moral=moral,
        hero=f"the {one}",
    )
    told.set(
        words=expand(words, rng, told.names),
        event=expand(event, rng, told.names),
        mistake=expand(mistake, rng, told.names),
    )
    told.say(
        "[Once upon a time|Long ago|A long time ago] there lived {a_one} and {a_other} [near {a_place}|in the same forest|side by "
        "side].",
        '"{words}," [the {one} used to say|said the {one} every day|the {one} liked to say]. The {other} [only smiled|'
        "said nothing|went on with its work].",
    )
    told.say(
        "[Then came|One day there was|One day they talked of] {event}. The {other} [was ready|took its time|did its work "
        "quietly]. But the {one} {mistake}.",
        "[The other animals saw it and laughed.|Everybody in the forest heard of it.|The {one} felt very foolish.]",
    )
    told.say(
        '"[You were right|How stupid I was|I am ashamed]," said the {one} to the {other}. "[Can you forgive me|Will you help '
        'me|What shall I do now]?"',
        'The {other} [nodded|smiled]. "[Come|Of course|It is never too late to learn]," said the {other}, [and helped its '
        "friend|and they went home together|and shared what it had].",
    )
    told.say("From then on the {one} was not {trait} any more. {Moral}")
    return told.story("The {one} and the {other}", "{a_one} and {a_other}", [
        ("What was the {one} like?", "The {one} was {trait}."),
        ("Who helped the {one}?", "The {other} helped the {one}."),
        ("What is the moral of the story?", "{Moral}"),
    ])  # fmt: skip


def trip(rng: random.Random) -> Story:
    """A trip with something forgotten and something seen."""
    told, forgotten = (
        _teller(rng),
        rng.choice(
            ("the map", "the sandwiches", "the umbrella", "the tickets", "the camera", "the water bottle", "the towels")
        ),
    )
    place = rng.choice(("the sea", "the zoo", "the mountains", "the museum", "an island", "the old castle", "the lake"))
    seen = a(rng.choice(("rainbow", "huge whale", "family of ducks", "golden eagle", "ship with red sails", "waterfall",
                         "hot-air balloon", "deer with big antlers")))  # fmt: skip
    told.set(forgotten=forgotten, goal=place, seen=seen, means=rng.choice(("by train", "by bus", "by car", "on foot", "by boat",
             "by bicycle")) if place != "an island" else "by boat")  # fmt: skip
    told.say(
        "On {day}, {hero}, {friend} and {hero}'s {relative} [went|made a trip|travelled] to {goal}. They [went|travelled] "
        "{means}.",
        "[{Hero} had packed the bags the night before.|They got up very early.|Everybody was in a good mood.]",
    )
    told.say(
        '[Halfway|On the way|When they arrived], {friend} [cried|said], "[Oh no|Oh dear]! We forgot {forgotten}!"',
        '[{Hero} laughed|Nobody was angry]. "[We will manage|Then it will be an adventure|It does not matter]," said '
        "{hero}'s {relative}.",
    )
    told.say(
        "[And they did manage.|And so it was.] [They walked around for hours.|They played and laughed all day.]",
        "In the afternoon they saw {seen}. [Nobody had ever seen anything so beautiful.|They could not stop looking.|{Hero} "
        "pointed and shouted.]",
        "In the evening they came home, [tired|tired but happy|full of stories].",
    )
    return told.story("A trip to {goal}", "a trip to {goal}", [
        ("Where did they go?", "They went to {goal}."), ("What did they forget?", "They forgot {forgotten}."),
        ("What did they see?", "They saw {seen}."), ("How did they travel?", "They travelled {means}."),
        ("On which day did they go?", "They went on {day}."),
    ])  # fmt: skip


PLOTS: tuple[Callable[[random.Random], Story], ...] = (
    lost_thing, hurt_animal, baking, growing, learning, sharing, storm, honest, new_friend, present, lost_way, fable, trip,
)  # fmt: skip


def story(rng: random.Random) -> Story:
    """A story of one of the plots."""
    return rng.choice(PLOTS)(rng)
