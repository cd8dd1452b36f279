"""German sentences put together from a small grammar: something to translate.

Knows a few nouns, verbs and adverbs and the order they stand in. They are here because people ask models to translate
and no source of the training folder holds any German; the sentences mean little. Knows nothing of prompts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

SUBJECTS = (
    "die Regierung", "der Bürgermeister", "eine Sprecherin der Polizei", "der junge Arzt", "die Stadtverwaltung",
    "das Unternehmen", "der Trainer", "meine Großmutter", "die Universität München", "ein Forscher aus Zürich",
    "der österreichische Minister", "die Künstlerin", "das Gericht", "der Lehrer", "eine Gruppe von Schülern",
    "die Bevölkerung", "der Händler", "die Feuerwehr", "der frühere Präsident", "die Zeitung", "das Kind",
    "ein Reisender", "die Kommission", "der Verein", "die Fluggesellschaft", "der Bauer", "die Richterin",
    "das Museum", "ein Nachbar", "die Gewerkschaft", "der Verkäufer", "die Europäische Union", "das Krankenhaus",
)  # fmt: skip
VERBS = (
    ("eröffnet", "eröffnete"), ("kritisiert", "kritisierte"), ("beschreibt", "beschrieb"), ("sucht", "suchte"),
    ("verkauft", "verkaufte"), ("unterstützt", "unterstützte"), ("zerstört", "zerstörte"), ("prüft", "prüfte"),
    ("verändert", "veränderte"), ("erklärt", "erklärte"), ("findet", "fand"), ("baut", "baute"), ("zeigt", "zeigte"),
    ("verliert", "verlor"), ("gewinnt", "gewann"), ("vergisst", "vergaß"), ("schließt", "schloss"), ("kauft", "kaufte"),
    ("öffnet", "öffnete"), ("beobachtet", "beobachtete"), ("fordert", "forderte"), ("fürchtet", "fürchtete"),
)  # fmt: skip
OBJECTS = (
    "die neue Brücke", "den alten Bahnhof", "das große Haus am Fluss", "die Ergebnisse der Untersuchung",
    "einen Vertrag über mehrere Millionen Euro", "die Zukunft der Schule", "das Spiel", "die höheren Preise",
    "den Wald", "ein Gemälde aus dem siebzehnten Jahrhundert", "die Straße zum Flughafen", "das Gesetz",
    "die Pläne für das nächste Jahr", "den Schlüssel", "die Gefahr", "eine bessere Lösung", "das Wetter",
    "die Geschichte dieser Stadt", "den größten Teil der Arbeit", "einen Brief", "die Wähler", "das Öl", "die Wahl",
    "die Qualität des Wassers", "den Frieden", "ein kleines Dorf", "die Küche", "das Gewässer", "einen Fehler",
)  # fmt: skip
TIMES = (
    "heute", "gestern", "am Montag", "vor zwei Jahren", "im Sommer", "seit Langem", "nach dem Krieg", "jeden Morgen",
    "im Jahr {year}", "am {day}. März", "kurz vor Mitternacht", "in den nächsten Wochen", "früher", "plötzlich",
)  # fmt: skip
PLACES = (
    "in Berlin", "auf dem Land", "in der Nähe von Köln", "an der Grenze", "in Südamerika", "auf dem Markt", "zu Hause",
    "in der Schweiz", "im Süden des Landes", "vor Gericht", "in Brüssel", "im Krankenhaus", "auf der Insel Rügen",
)  # fmt: skip
ENDINGS = (
    "obwohl es dafür keine Gründe gab", "weil die Kosten zu hoch waren", "ohne dass jemand davon wusste",
    "um die Menschen zu schützen", "und niemand war überrascht", "wie die Behörden mitteilten",
    "aber das war nicht genug", "damit alle davon profitieren können", "sagte ein Sprecher am Abend",
    "was viele für unmöglich hielten", "bevor es zu spät war", "und das könnte noch Jahre dauern",
)  # fmt: skip


def clause(rng: random.Random) -> str:
    """A main clause: subject or time first, the verb always second."""
    subject, verbs, thing = rng.choice(SUBJECTS), rng.choice(VERBS), rng.choice(OBJECTS)
    when = rng.choice(TIMES).format(year=rng.randint(1871, 2019), day=rng.randint(2, 30))
    where, verb = rng.choice(PLACES), rng.choice(verbs)
    orders: Sequence[tuple[str, ...]] = (
        (subject, verb, when, thing),
        (subject, verb, when, where, thing),
        (when, verb, subject, where, thing),
        (where, verb, subject, thing),
        (subject, verb, thing),
    )
    return " ".join(rng.choice(orders))


def sentence(rng: random.Random) -> str:
    """One or two clauses, sometimes with an ending, sometimes spaced around marks as in old test sets."""
    text = clause(rng)
    if rng.random() < 0.3:
        text += f", und {clause(rng)}"
    if rng.random() < 0.45:
        text += f", {rng.choice(ENDINGS)}"
    text = f"{text[0].upper()}{text[1:]}."
    return f"{text[:-1].replace(',', ' ,')} ." if rng.random() < 0.5 else text
