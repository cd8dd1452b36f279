"""How people word what they ask of a chat model: patterns with gaps for a text, a topic, a name.

Knows the wordings only. What fills the gaps is `asker`. They are written for training: none is taken from a benchmark.
"""

from __future__ import annotations

SUMMARIES = (
    "Summarize: {text}",
    "Summarize: {text}",
    "Summarize this article in a few sentences.\n\n{text}",
    "{text}\n\nTL;DR:",
    "Please write a brief summary of the text below.\n\n{text}",
    "What are the key points of this passage?\n{text}",
    "{text}\n\nSum this up for a busy reader.",
    "Write a headline and a short abstract for the following report: {text}",
)
FROM_PASSAGES = (
    "{passages}\n\n{question}",
    "{passages}\n\n{question}",
    "{passages} {question}",
    "Answer the question from the passages below.\n\n{passages}\n\nQuestion: {question}\nAnswer:",
    "Context:\n{passages}\n\nUsing only the context above, answer: {question}",
    "{question}\n\n{passages}",
    "Use the following documents to reply to the user.\n\n{passages}\n\nUser: {question}",
)
PASSAGE_QUESTIONS = (
    "what is {topic}?",
    "who is {name}?",
    "what happened to {name}",
    "when did {name} take place",
    "where does {topic} come from",
    "How is {topic} connected with {name}?",
    "What do the passages say about {topic}?",
    "why is {topic} important?",
    "how many kinds of {topic} are there",
    "who was the first to describe {topic}",
)
FACT_QUESTIONS = (
    "who played {name} in the film",
    "where is {name}?",
    "what is the capital of {country}?",
    "when was {name} born?",
    "who wrote {title}?",
    "what year did {name} begin",
    "what does {topic} mean?",
    "what language do they speak in {country}",
    "what is {topic} used for?",
    "How old was {name} when he died?",
    "who is the president of {country}?",
    "where did {name} go to school?",
    "what time zone is {country} in?",
    "What is the currency of {country}?",
    "what type of {topic} is the best?",
    "who won the {topic} cup in {year}?",
    "where was the {year} {topic} festival held",
    "what are the main exports of {country}?",
    "how far is {country} from {country2}",
    "what did {name} do for a living",
)
TRANSLATIONS = (
    "Translate German to English: {german}",
    "Translate German to English: {german}",
    "Translate German to English: {german}",
    "Please translate this into English: {german}",
    "What does this German sentence mean? {german}",
    'How do you say "{german}" in English?',
    "Translate English to German: {sentence}",
    "Translate into French: {sentence}",
)
WRITING = (
    "Write a short story about {topic} and {topic2}.",
    "Compose a poem about {topic} in four stanzas.",
    "Write a blog post of about 200 words on {topic}.",
    "Write an email to {person} asking for {topic}. Keep it polite and short.",
    "Draft a letter to the editor of a newspaper about {topic}.",
    "Describe {place} so that a reader can see it: sounds, smells, colours. Two paragraphs.",
    'Write the opening of a novel that begins with the sentence "{sentence}"',
    "Write a product description for a new kind of {topic}.",
    "Can you help me with a speech on {topic} for my {person}?",
    "Make up three titles for an article on {topic} and explain which one you like best.",
    "Review the book {title} for a school magazine.",
    'Correct the mistakes in this text and give the better version: "{sentence}"',
    "Write a dialogue between {person} and {person2} who disagree about {topic}.",
)
ROLES = (
    "You are {person}. Stay in that role and tell me what you think of {topic}.",
    "Imagine that you are {name}. What would you say about {topic} today?",
    "Act as an experienced {person}. How would you explain {topic} to a beginner?",
    "Pretend to be {person} who has never heard of {topic}. I will start: hello, how are you?",
    "Picture yourself as a {topic}. Describe a day of your life in the first person.",
    "Let us play a game: you are {person}, I am your {person2}. What do you ask me first?",
    "Take the part of a doctor. A patient says: I think I have trouble with my {topic}. What is your advice?",
)
EXPLAINING = (
    "What is {topic}, and how does it relate to {topic2}?",
    "Explain the difference between {topic} and {topic2} in simple words.",
    "How does {topic} affect {topic2}? Give examples.",
    "Describe the most important causes of {topic} in {country}.",
    "Describe five principles for judging an argument about {topic}.",
    "What were the effects of {name} on society?",
    "Discuss the advantages and disadvantages of {topic}.",
    "Give a lesson plan about {topic} for pupils of ten years.",
    "Explain to a child why {topic} matters.",
    "What happens to {topic} when {topic2} increases? Why?",
    "Compare {country} and {country2}: economy, people, government.",
    "How would you measure {topic}? Name the steps of the experiment.",
)
REASONING = (
    "{name} has {a} apples, {name2} has {b} more than that. Who has the most, and how many are there together?",
    "If all {topic} are {topic2}, and some {topic2} are old, are some {topic} old? Explain.",
    "Which of these words does not belong with the others: {topic}, {topic2}, {word}, {word2}?",
    "{name} is standing behind {name2}, and {name2} is behind {person}. Who is first in the line?",
    "A train leaves at {a} o'clock and needs {b} hours. When does it arrive?",
    "One day {name} asked {person}: is {topic} the father of {topic2}? What do you think the answer was?",
    "Some say that {topic} leads to {topic2}. Is that a good argument? Reason step by step.",
)
SUMS = (
    "What is {a} times {b}?",
    "If x + {a} = {b}, what is x?",
    "How many numbers between 1 and {c} can be divided by {a} or {b}?",
    "A shop sells {c} cards. {a} % of them are red, the others blue. How many are blue?",
    "Given f(x) = {a}x + {b}, find f(2).",
    "The sides of a rectangle are {a} and {b}. What is its area, and how long is its diagonal?",
    "When a number is divided by {a}, the remainder is 3. What is the remainder if twice the number is divided by {a}?",
    "A family buys {a} tickets for ${b} each and drinks for ${c}. What does each of the four of them pay?",
    "Two dice are thrown. What is the chance that the sum is at least {a}?",
)
CODING = (
    "Write a Python function that finds the longest {word} in a list of strings.",
    "Write a program in C++ that prints the first {a} numbers divisible by {b}.",
    "Implement a function that merges two sorted lists and returns the one with {a} smallest elements.",
    "Write a regular expression that matches every {word} of {a} letters.",
    "Write an HTML page with a button that shows a text about {topic}.",
    "Write a class in Python for a {topic} with a method that counts each {word}.",
    "Write a script which reads a file and counts how often the word {word} occurs.",
    "Here is a function:\n\n{code}\n\nWhat does it do? Find mistakes and repair them.",
    "Implement an algorithm to find the {a}th largest value in an array.",
    "Explain this code.\n\n{code}",
)
EXTRACTION = (
    "Read the text and list every person and place in it as JSON with the keys people and places.\n\n{text}",
    "Extract the following from the text: the main topic, a year, a name. Answer as a JSON dictionary.\n\n{text}",
    "Rate each review from 1 to 5 and return the numbers as a JSON array:\n"
    "1. {sentence}\n2. {sentence2}\n3. {sentence3}",
    "Sort each of these into one of the classes Politics, Nature, Everyday Life. Only the class, one a line.\n"
    "1. {sentence}\n2. {sentence2}\n3. {sentence3}",
    "How often does the word {word} occur in the text below, in which sentences?\n\n{text}",
    "Name the country and the language meant by each line, as CSV:\n{sentence}\n{sentence2}",
    "Identify the named entities in the passage and classify them.\n\n{text}",
    "Given the records below, who earned the most and who the least? Reply with two names.\n"
    "{name}: ${c}; {name2}: ${a}{b}; {name3}: ${b}{a}",
    "Which words of this paragraph occur only once? List them in alphabetical order.\n\n{text}",
)
FOLLOW_UPS = (
    "Now say it in one sentence.",
    "Rewrite your answer as a poem.",
    "Can you give an example?",
    "Why?",
    "Start every sentence of it with the letter {letter}.",
    "Are you sure? Check your answer.",
    "Please translate that into French.",
    "What did you leave out?",
    "Explain it again for a child of five years.",
    "And what about {topic}?",
    "Do the same for {topic} and {name}.",
    "What would {person} say to that?",
    "Change it so that there are {a} of them instead.",
    "Do you think that is right? Critique your own reply.",
    "What if the number were {c} instead?",
    "Add a column with the year.",
    "Can you make it faster?",
    "Make it shorter and use simpler words.",
    "Thank you. Do you also like {topic}?",
    "Put your previous answer into a list with numbers.",
)
PERSONS = (
    "a teacher", "your manager", "an old sailor", "a farmer", "a doctor", "a machine learning engineer", "my sister",
    "a detective", "a maths teacher", "a queen", "a landlord", "a friend from school", "a famous cook", "a judge",
    "a robot from the future", "a travel guide", "a tired nurse", "a poet", "the mayor", "a young scientist",
)  # fmt: skip
PLACES = (
    "a market in the early morning", "a harbour in the fog", "an empty school", "a forest after rain",
    "a railway station",
    "a kitchen on a holiday", "a village in the mountains", "the desk of a professor", "a library at night",
)  # fmt: skip
