"""The words of the world: who lives there, what they own, eat, see and do.

Knows: lists of words and the few facts grammars need of them (pronouns, colours, sounds). Does not know: sentences.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

GIRLS = """
Anna Mia Lily Emma Rosa Nora Clara Ella Ruby Zoe Lucy Maya Ivy Hannah Grace Alice Sara Julia Tina Amy Eva Leah Molly
Nina Olivia Paula Rita Sofia Tara Una Vera Wendy Yara Zara Dora Fay Gina Holly Iris Jane Kate Lena Mary Nell Opal
Penny Robin Stella Tess Willa Daisy Bella Carmen Fiona Heidi Ingrid Joy Kira Luna Mabel Naomi Petra
""".split()
BOYS = """
Tom Ben Max Leo Sam Jack Noah Omar Paul Finn Adam Carl David Eli Felix George Hugo Ivan Jonas Karim Liam Mark Nico
Oscar Peter Quinn Ravi Simon Theo Victor Will Yusuf Zack Alan Bruno Chris Dan Emil Frank Gus Henry Ian Jim Ken Luke
Milo Ned Otto Pablo Rick Sven Tim Umar Vito Walter Abel Boris Diego Erik Fred Hans Ivo Josef Kai
""".split()
SURNAMES = """
Baker Miller Brown Green Hill Woods Stone Lake Fisher Carter Cook Taylor King Young Bell Ford Hunt Lane Marsh North
Page Reed Shaw Wells West Cole Dale Frost Grant Hayes
""".split()

ANIMALS = """
dog cat rabbit fox bear mouse duck frog horse cow pig sheep goat hen owl squirrel turtle hedgehog deer wolf lion
tiger elephant monkey giraffe zebra penguin whale dolphin seal otter beaver badger mole sparrow crow swan goose
donkey camel kangaroo koala panda snail bee ant butterfly ladybird spider crab fish
""".split()
PETS = ("dog", "cat", "rabbit", "hamster", "parrot", "turtle", "pony", "kitten", "puppy", "canary")
FABLE_ANIMALS = ("fox", "bear", "mouse", "hare", "turtle", "owl", "wolf", "lion", "crow", "hedgehog", "frog", "squirrel",
                 "goat", "duck", "badger", "mole", "deer", "otter", "dog", "cat", "rabbit", "horse", "pig", "cow", "donkey",
                 "hen", "monkey", "elephant", "tiger", "giraffe", "zebra", "penguin", "kangaroo", "panda", "camel", "sheep",
                 "swan", "sparrow", "snail", "beaver")  # fmt: skip
SMALL_ANIMALS = ("bird", "kitten", "puppy", "hedgehog", "duckling", "rabbit", "squirrel", "lamb", "mouse", "owl", "frog",
                 "fox cub", "turtle", "butterfly")  # fmt: skip

COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "orange", "purple", "pink", "grey", "golden",
           "silver")  # fmt: skip
SIZES = ("big", "small", "little", "tiny", "large", "huge", "long", "short", "round", "old", "new")
TOYS = ("ball", "kite", "doll", "toy boat", "toy train", "teddy bear", "puzzle", "drum", "balloon", "skipping rope",
        "scooter", "sled", "yo-yo", "toy car", "spinning top", "marble")  # fmt: skip
THINGS = ("hat", "scarf", "umbrella", "book", "key", "ring", "watch", "lamp", "basket", "bucket", "blanket", "pencil",
          "notebook", "lantern", "flute", "mirror", "map", "bag", "box", "bottle", "cup", "clock", "camera", "bell",
          "glove", "button", "coin", "shell", "feather", "letter", "picture", "necklace", "whistle", "candle", "brush",
          "chair", "ladder", "rope", "bicycle", "guitar")  # fmt: skip
FOODS = ("bread", "soup", "cake", "pie", "jam", "cheese", "honey", "rice", "pasta", "salad", "porridge", "pancakes",
         "cookies", "pizza", "stew", "muffins", "sandwiches", "fruit salad", "apple pie", "chocolate cake",
         "carrot cake", "noodles", "dumplings", "waffles")  # fmt: skip
FRUITS = ("apples", "pears", "plums", "cherries", "berries", "oranges", "lemons", "bananas", "grapes", "peaches",
          "strawberries", "melons", "figs", "mangoes")  # fmt: skip
VEGETABLES = ("carrots", "potatoes", "tomatoes", "beans", "peas", "onions", "pumpkins", "cabbages", "radishes", "corn",
              "cucumbers", "peppers")  # fmt: skip
FLOWERS = ("roses", "tulips", "daisies", "sunflowers", "lilies", "violets", "poppies", "bluebells", "daffodils")
DRINKS = ("water", "tea", "milk", "juice", "hot chocolate", "lemonade", "coffee", "apple juice")
OUTDOOR = ("garden", "park", "forest", "field", "beach", "river", "lake", "hill", "meadow", "playground", "market",
           "farm", "harbour", "bridge", "orchard", "pond", "valley", "village square")  # fmt: skip
INDOOR = ("kitchen", "attic", "library", "school", "bedroom", "shop", "bakery", "museum", "workshop", "barn", "station",
          "living room", "classroom", "hall")  # fmt: skip
HIDING_PLACES = ("under the bed", "behind the sofa", "in the garden shed", "under the old tree", "behind the door",
                 "in the kitchen drawer", "under a pile of leaves", "on the top shelf", "in the laundry basket",
                 "behind the bookcase", "under the stairs", "in the wheelbarrow", "between two cushions",
                 "beside the pond", "in a coat pocket", "under the bench")  # fmt: skip
JOBS = ("baker", "teacher", "farmer", "doctor", "nurse", "gardener", "fisher", "carpenter", "cook", "driver", "painter",
        "singer", "librarian", "builder", "tailor", "vet", "pilot", "sailor", "shopkeeper", "postman", "firefighter",
        "dentist", "clockmaker", "shoemaker", "waiter", "photographer", "musician", "writer")  # fmt: skip
RELATIVES = ("mother", "father", "grandmother", "grandfather", "sister", "brother", "aunt", "uncle", "cousin")
GOOD_FEELINGS = ("happy", "proud", "glad", "excited", "cheerful", "pleased", "thankful")
BAD_FEELINGS = ("sad", "worried", "upset", "lonely", "afraid", "tired", "disappointed", "nervous")
WEATHER = ("sunny", "rainy", "windy", "cold", "warm", "foggy", "snowy", "cloudy", "hot", "stormy", "mild")
HOBBIES = ("painting", "swimming", "reading", "dancing", "singing", "cooking", "drawing", "running", "fishing", "chess",
           "gardening", "skating", "riding", "climbing", "hiking", "football", "tennis", "knitting", "photography",
           "playing the piano")  # fmt: skip
SKILLS = ("ride a bicycle", "swim", "whistle", "play the piano", "bake bread", "tie a knot", "skate", "juggle",
          "draw a horse", "climb a tree", "play chess", "knit a scarf", "row a boat", "fly a kite", "ride a horse",
          "play the flute", "read a map", "plant a tree", "catch a ball", "dance")  # fmt: skip
EVERYDAY = """
apple pear plum cherry berry lemon banana grape peach melon fig carrot potato tomato bean pea onion pumpkin pepper rose tulip daisy lily
tree leaf house door window roof wall table bed sofa car bus train ship boat plane road street town sun moon star sky snow rain wind
fire hand foot head eye nose ear mouth arm leg heart king queen knight dragon robot egg butter sugar salt ice knife fork spoon plate
shirt coat shoe sock dress paper pen ball doll kite drum piano violin song word name number story school river mountain island stone
""".split()
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")  # fmt: skip
TOWNS = ("Millbrook", "Oakham", "Riverton", "Stonefield", "Greenhill", "Lakeside", "Westbury", "Ashford", "Brookdale",
         "Fairview", "Marlow", "Elmwood", "Highgate", "Sandport", "Norwich", "Kingsley", "Redcliff", "Willowby",
         "Harborne", "Maplewood")  # fmt: skip
STREETS = ("Oak Street", "Mill Lane", "Church Road", "Park Avenue", "River Road", "Hill Street", "Station Road",
           "Garden Lane", "King Street", "Bridge Street", "Rose Lane", "Market Street", "School Road", "Lake Drive")  # fmt: skip
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
           "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty")  # fmt: skip


@dataclass(frozen=True)
class Person:
    """Somebody with a name and pronouns."""

    name: str
    girl: bool

    def pronouns(self, prefix: str = "") -> dict[str, str]:
        """`he`, `his`, `him`, `himself`, `child` under names that begin with `prefix`."""
        words = ("she", "her", "her", "herself", "girl") if self.girl else ("he", "his", "him", "himself", "boy")
        return {prefix + name: word for name, word in zip(("he", "his", "him", "himself", "child"), words, strict=True)}


def person(rng: random.Random, *taken: Person) -> Person:
    """Somebody whose name is none of those taken."""
    while True:
        girl = rng.random() < 0.5
        found = Person(rng.choice(GIRLS if girl else BOYS), girl)
        if found.name not in [other.name for other in taken]:
            return found


def thing(rng: random.Random) -> str:
    """Something with a colour or a size, such as "red kite"."""
    return f"{rng.choice(COLOURS if rng.random() < 0.7 else SIZES)} {rng.choice(TOYS + THINGS)}"


ALL_WORDS = tuple(
    dict.fromkeys(
        word
        for words in (
            ANIMALS,
            THINGS,
            TOYS,
            FOODS,
            FRUITS,
            VEGETABLES,
            FLOWERS,
            DRINKS,
            OUTDOOR,
            INDOOR,
            JOBS,
            COLOURS,
            HOBBIES,
            GOOD_FEELINGS,
            BAD_FEELINGS,
            EVERYDAY,
        )  # fmt: skip
        for word in words
        if " " not in word
    )
)
IN_ORDER = tuple(sorted(ALL_WORDS))
NEAR = 8  # words of the alphabet's order among which neighbours are drawn


def neighbours(rng: random.Random, count: int) -> list[str]:
    """Words that stand near each other in the alphabet, most of which begin alike: a letter as often as words have it."""
    start = rng.randrange(len(IN_ORDER) - NEAR + 1)
    return rng.sample(IN_ORDER[start : start + NEAR], count)


def plural(word: str) -> str:
    """Of a thing."""
    return word + ("es" if word.endswith(("s", "x", "ch", "sh")) else "s")
