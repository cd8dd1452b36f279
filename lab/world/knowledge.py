"""What the model can say about everyday things: short explanations, advice, jokes, poems.

Knows: topics with sentences that are true, tips that make sense. Does not know: people, stories, facts in tables.
"""

from __future__ import annotations

import random

from world.grammar import GrammarSample, Wordings, expand, numbered
from world.words import NUMBERS

EXPLANATIONS: dict[str, tuple[str, ...]] = {
    "rain": ("Rain is water that falls from clouds.", "The sun warms the sea and the lakes, and some of the water rises "
             "into the air.", "High up it is cold, so the water forms tiny drops.", "When the drops become heavy, they fall down."),
    "snow": ("Snow is made of tiny crystals of ice.", "They form in clouds when it is very cold.", "Each crystal has six arms.",
             "When the air is warm, snow melts and becomes rain."),
    "the sun": ("The sun is a star.", "It is a huge ball of hot gas.", "It gives us light and warmth.", "Without the sun, "
                "nothing could live on Earth."),
    "the moon": ("The moon travels around the Earth.", "One trip takes about a month.", "It has no light of its own; it "
                 "shines because the sun shines on it.", "People first walked on the moon in 1969."),
    "wind": ("Wind is moving air.", "Warm air rises, and cool air flows in to take its place.", "That flow is what we feel as "
             "wind.", "Strong wind can turn mills and push ships."),
    "a rainbow": ("A rainbow appears when the sun shines on rain.", "Each drop bends the light and splits it into colours.",
                  "The colours are red, orange, yellow, green, blue and violet.", "You see it with the sun behind you."),
    "thunder": ("Thunder is the sound of lightning.", "Lightning heats the air very quickly.", "The hot air bursts outward, and "
                "we hear a bang.", "Light is faster than sound, so we see the flash first."),
    "photosynthesis": ("Photosynthesis is how plants make their food.", "They take in light, water and air.", "In their "
                       "green leaves they turn these into sugar.", "They give off the oxygen that we breathe."),
    "gravity": ("Gravity is the force that pulls things together.", "It keeps us on the ground.", "It makes an apple fall "
                "from a tree.", "It also holds the moon near the Earth."),
    "a volcano": ("A volcano is a mountain with an opening to the hot inside of the Earth.", "Melted rock can rise through it.",
                  "When it comes out, it is called lava.", "The lava cools and becomes new rock."),
    "a tree": ("A tree is a tall plant with a trunk.", "Its roots drink water from the ground.", "Its leaves catch the light of "
               "the sun.", "Many animals live in trees."),
    "bread": ("Bread is made of flour, water, salt and yeast.", "The yeast makes small bubbles, so the dough rises.", "Then the "
              "bread is baked in a hot oven.", "It is ready when the crust is brown."),
    "a book": ("A book is made of many pages.", "Somebody writes it, and a printer prints it.", "Books can tell stories or teach "
               "us things.", "You can borrow them from a library."),
    "a computer": ("A computer is a machine that follows instructions.", "The instructions are called a program.", "It works "
                   "with numbers, very fast.", "Texts, pictures and sounds are numbers to it."),
    "the internet": ("The internet connects computers all over the world.", "They send each other messages in small pieces.",
                     "Cables and radio waves carry the pieces.", "That is how you can read a page from far away."),
    "a bicycle": ("A bicycle has two wheels and no engine.", "You push the pedals with your feet.", "A chain turns the back wheel.",
                  "It is a healthy and cheap way to travel."),
    "sleep": ("Sleep is the time when body and mind rest.", "Muscles recover while we sleep.", "The brain sorts what we have "
              "learned.", "Most grown-ups need about eight hours a night."),
    "music": ("Music is sound that is put in order.", "It has a melody and a rhythm.", "People sing it or play it on instruments.",
              "Music can make us happy or sad."),
    "a river": ("A river is water that flows from high land to low land.", "It often begins as a small spring.", "Streams join "
                "it, and it grows.", "At last it reaches a lake or the sea."),
    "the sea": ("The sea is the salt water that covers most of the Earth.", "Many animals and plants live in it.", "The moon "
                "makes its water rise and fall.", "We call that the tides."),
    "autumn": ("Autumn is the season between summer and winter.", "The days become shorter and cooler.", "The leaves turn "
               "yellow and red and fall from the trees.", "Farmers bring in the harvest."),
    "winter": ("Winter is the coldest season.", "The days are short and the nights are long.", "In many places it snows.",
               "Some animals sleep until spring."),
    "spring": ("Spring is the season after winter.", "The days become longer and warmer.", "Flowers open and birds build their "
               "nests.", "Many animals have their young in spring."),
    "summer": ("Summer is the warmest season.", "The days are long and the nights are short.", "Fruit grows ripe in the sun.",
               "Many people go swimming or travel."),
    "friendship": ("Friendship is when two people like and trust each other.", "Friends listen and help.", "They share good days "
                   "and bad days.", "A good friend tells the truth."),
    "a magnet": ("A magnet is a piece of metal that pulls iron.", "It has two ends, called poles.", "Different poles pull each "
                 "other, and equal poles push each other away.", "A compass needle is a small magnet."),
    "ice": ("Ice is frozen water.", "Water freezes at zero degrees.", "Ice is lighter than water, so it floats.", "That is why "
            "fish can live under the ice of a lake."),
    "a library": ("A library is a place full of books.", "Everybody may read there.", "With a card you can take books home.",
                  "A librarian helps you to find what you need."),
    "recycling": ("Recycling means using old things to make new ones.", "Paper, glass and metal can be used again.", "It saves "
                  "energy and keeps the world clean.", "Put each kind into its own bin."),
    "the heart": ("The heart is a strong muscle.", "It pumps blood through the body.", "The blood carries air and food to every "
                  "part.", "It beats about seventy times a minute when we rest."),
    "chocolate": ("Chocolate is made from cocoa beans.", "The beans grow on trees in warm countries.", "They are dried, roasted "
                  "and ground.", "With sugar and milk they become chocolate."),
    "a mirror": ("A mirror is a piece of glass with a thin layer of metal behind it.", "Light bounces off the metal.", "That is "
                 "why we see ourselves in it.", "Left and right seem to change places."),
    "a clock": ("A clock shows the time.", "The short hand shows the hours, and the long hand shows the minutes.", "An hour has "
                "sixty minutes.", "A day has twenty-four hours."),
}  # fmt: skip
ADVICE: dict[str, tuple[str, ...]] = {
    "sleeping well": ("Go to bed at the same time every day.", "Keep your bedroom dark and quiet.", "Do not drink coffee in the "
                      "evening.", "Put your phone away an hour before bed.", "Open the window for fresh air.", "Read a calm book.",
                      "Do not eat too much before bed."),
    "learning a language": ("Practise a little every day.", "Listen to songs in the language.", "Write new words on small cards.",
                            "Speak with other people and do not fear mistakes.", "Read easy books.", "Watch films you know."),
    "staying healthy": ("Eat fruit and vegetables every day.", "Drink enough water.", "Go for a walk.", "Sleep eight hours.",
                        "Wash your hands.", "Spend time with friends.", "Eat less sugar."),
    "studying for a test": ("Begin early.", "Make a plan.", "Work in a quiet place.", "Take short breaks.", "Explain the subject "
                            "to somebody else.", "Sleep well the night before.", "Write a short summary of each chapter."),
    "saving money": ("Write down what you spend.", "Cook at home.", "Buy only what you need.", "Repair things instead of buying new "
                     "ones.", "Put some money aside every month.", "Compare prices.", "Borrow books from the library."),
    "making friends": ("Smile and say hello.", "Listen well.", "Ask questions.", "Join a club.", "Be honest.", "Help others.",
                       "Invite somebody to play or to eat with you."),
    "keeping a garden": ("Water the plants in the morning.", "Pull out the weeds.", "Choose plants that like your soil.", "Give "
                         "them enough space.", "Protect young plants from frost.", "Use compost."),
    "cooking": ("Read the whole recipe first.", "Use fresh food.", "Taste while you cook.", "Keep your knives sharp.", "Clean up "
                "as you go.", "Use a little less salt than you think.", "Let the pan become hot first."),
    "a tidy room": ("Give everything a place.", "Tidy up for ten minutes every day.", "Throw away what is broken.", "Give away what "
                    "you do not use.", "Make your bed in the morning.", "Put clothes into the basket."),
    "being less nervous": ("Breathe in slowly and out slowly.", "Talk to somebody you trust.", "Go for a walk.", "Prepare well.",
                           "Think of one step at a time.", "Drink a glass of water."),
    "giving a talk": ("Know your first sentence by heart.", "Speak slowly.", "Look at the people.", "Use simple words.", "Practise "
                      "in front of a mirror.", "End with your main point."),
    "saving energy": ("Turn off the lights when you leave a room.", "Wash clothes in cold water.", "Use a bicycle for short trips.",
                      "Close the windows when the heating is on.", "Take short showers.", "Cook with a lid on the pot."),
    "writing a letter": ("Begin with a greeting.", "Say why you write.", "Use short sentences.", "Be polite.", "Read it again before "
                         "you send it.", "End with your name."),
    "travelling": ("Pack only what you need.", "Take a copy of your papers.", "Leave early.", "Drink enough water.", "Learn a few "
                   "words of the language.", "Keep your money in a safe place.", "Look at a map before you go."),
    "taking care of a dog": ("Walk your dog every day.", "Give it fresh water.", "Feed it at the same times.", "Brush its fur.",
                             "Visit the vet once a year.", "Play with it.", "Be patient when you train it."),
}  # fmt: skip
JOKES = (
    ("Why did the bicycle fall over?", "Because it was two-tired."), ("What do you call a bear without teeth?", "A gummy bear."),
    ("Why did the cookie go to the doctor?", "Because it felt crumbly."), ("What has hands but cannot clap?", "A clock."),
    ("What do you call a sleeping cow?", "A bulldozer."), ("Why are fish so clever?", "Because they live in schools."),
    ("What gets wetter the more it dries?", "A towel."), ("Why did the student eat the homework?", "Because the teacher said it was "
     "a piece of cake."), ("What has many keys but opens no door?", "A piano."), ("What kind of tree fits in your hand?", "A palm."),
    ("What did one wall say to the other?", "See you at the corner."), ("Why was the maths book sad?", "It had too many problems."),
)  # fmt: skip
RHYMES = (
    ("sea", ("The waves roll in, the waves roll out,", "the gulls fly high and cry and shout,", "the sand is warm, the wind is free,",
             "and I am happy by the sea.")),
    ("moon", ("The silver moon is round and bright,", "it is a lantern in the night,", "it shines on forest, lake and dune,",
              "good night, good night, my friend the moon.")),
    ("rain", ("The rain is falling on the street,", "it makes a song beneath my feet,", "it wakes the flower and the grain,",
              "I love to listen to the rain.")),
    ("cat", ("My little cat has eyes of green,", "the softest fur you've ever seen,", "it sleeps all day upon the mat,",
             "there is no friend just like my cat.")),
    ("winter", ("The world is quiet, cold and white,", "the stars are burning in the night,", "the snow lies deep on roof and tree,",
                "the fire is warm for you and me.")),
    ("spring", ("The snow is gone, the birds all sing,", "the bells of all the flowers ring,", "the sun has come to everything,",
                "and all the world is new in spring.")),
    ("friend", ("When skies are grey and days are long,", "you come to me and sing a song,", "and at my side until the end,",
                "you are my true and only friend.")),
    ("tree", ("The old tree stands beside the wall,", "it saw the summers come and fall,", "it gives its shade to you and me,",
              "how good it is to have a tree.")),
    ("night", ("The day is done, the lamps are lit,", "and by the window here I sit,", "the town is calm, the stars are bright,",
               "sleep well, my dear, good night, good night.")),
    ("garden", ("A bee flies in, a bee flies out,", "the peas and beans begin to sprout,", "I water them and sing a tune,",
                "we'll have a feast in early June.")),
)  # fmt: skip
EXPLAIN = Wordings(
    train=("[Explain|Describe] {t}.", "What is {t}?", "Tell me about {t}.", "[Can|Could] you explain {t} [to me|]?",
           "Explain {t} in simple words.", "What do you know about {t}?", "[Please|] explain {t} to a child.",
           "Tell me something about {t}.", "Write [a short text|a few sentences|something] about {t}."),
    test=("Give me a short explanation of {t}.", "I want to understand {t}.", "Help me understand {t}."),
)  # fmt: skip
TIPS = Wordings(
    train=("Give me {n} tips for {t}.", "[Tell|Give] me {n} [tips|ideas] for {t}.", "What are {n} [tips|good tips] for {t}?",
           "[Please|] list {n} tips for {t}.", "I need {n} tips for {t}.", "[Can|Could] you give me {n} tips for {t}?",
           "Name {n} tips for {t}."),
    test=("Write {n} tips for {t}.", "Let me have {n} tips for {t}.", "I am looking for {n} tips for {t}."),
)  # fmt: skip
JOKE_REQUESTS = Wordings(("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "A joke, please.", "[Please|] tell me a "
                          "[funny|good|short] joke."), ("I would like to hear a joke.",))  # fmt: skip
POEM_REQUESTS = Wordings(
    ("Write a [short|little|] poem about {t}.", "[Can|Could] you write a poem about {t}?", "A poem about {t}, please.",
     "I would like a [short|] poem about {t}.", "Write me a rhyme about {t}."), ("Compose a poem about {t}.",))  # fmt: skip
TOPIC_NAMES = {"sea": "the sea", "moon": "the moon", "rain": "rain", "cat": "a cat", "winter": "winter", "spring": "spring",
               "friend": "a friend", "tree": "a tree", "night": "the night", "garden": "a garden"}  # fmt: skip
SHORTENED = {"sleeping well": ("sleeping well", "a good night's sleep", "better sleep")}


def explanation(rng: random.Random, split: str) -> GrammarSample:
    """What something is, in some or all sentences known of it."""
    topic = rng.choice(list(EXPLANATIONS))
    lines = EXPLANATIONS[topic]
    return GrammarSample("explanation", ((expand(rng.choice(EXPLAIN.of(split)), rng, {"t": topic}), " ".join(lines)),))


def advice(rng: random.Random, split: str) -> GrammarSample:
    """A numbered list of so many tips."""
    topic = rng.choice(list(ADVICE))
    count = rng.choice((2, 3, 3, 3, 4, 5))
    tips = rng.sample(ADVICE[topic], count)
    names = {"n": NUMBERS[count] if rng.random() < 0.7 else str(count), "t": rng.choice(SHORTENED.get(topic, (topic,)))}
    return GrammarSample("advice", ((expand(rng.choice(TIPS.of(split)), rng, names), numbered(tips)),))


def joke(rng: random.Random, split: str) -> GrammarSample:
    """A joke, in one answer or as a question back."""
    question, answer = rng.choice(JOKES)
    asked = expand(rng.choice(JOKE_REQUESTS.of(split)), rng)
    if rng.random() < 0.5:
        return GrammarSample("joke", ((asked, f"{question} {answer}"),))
    return GrammarSample(
        "joke", ((asked, question), (rng.choice(("I do not know.", "Why?", "Tell me!", "No idea.", "What?")), answer))
    )


def poem(rng: random.Random, split: str) -> GrammarSample:
    """Four lines that rhyme."""
    topic, lines = rng.choice(RHYMES)
    asked = expand(rng.choice(POEM_REQUESTS.of(split)), rng, {"t": TOPIC_NAMES[topic]})
    return GrammarSample("poem", ((asked, "\n".join(lines)),))
