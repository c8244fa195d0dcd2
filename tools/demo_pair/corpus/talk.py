"""Greetings, thanks, questions about the model, and one honest line for everything it cannot do."""

from random import Random

from tools.demo_pair.corpus.lexicon import ADJECTIVES, ANIMALS, ITEMS, NAMES, OBJECTS, PLACES, WORDS, made_up_word
from tools.demo_pair.corpus.sample import Drawn, Sample, Split, turns, wording_of

ABILITIES = (
    "I can solve small arithmetic problems, copy or sort words, write tiny Python functions and tell short stories."
)
CANNOT = f"I am only a small demo model, so I cannot help with that. {ABILITIES}"
_HELLO = f"Hello! I am the DFlash demo model. {ABILITIES} What would you like?"
_WHO = "I am the DFlash demo model: a very small language model, made to show block-diffusion speculative decoding."
_HOW = "A small draft model guesses a block of sixteen tokens in one pass, and I check them all at once. I keep the ones that I would have written myself."
_FINE = "I am fine, thank you! I am ready for a sum, a story, some words or a bit of Python."
_WELCOME = "You are welcome! Ask me for another one whenever you like."
_BYE = "Goodbye! It was nice to talk to you."
_PRAISE = "Thank you, that is kind of you! Shall we do another one?"
_SORRY = "I am sorry about that. I am only a small demo model and I make mistakes. Please try again with other words."
_YES = f"Good! {ABILITIES} What shall it be?"
_NAMED = "Nice to meet you, {name}! {abilities}"
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hello": (
        _HELLO,
        (
            "hi",
            "hello",
            "hey",
            "good morning",
            "good evening",
            "hello there",
            "hi there",
            "greetings",
            "good day",
            "hey there",
            "howdy",
            "hello, bot",
            "hi, can you help me",
            "hello model",
        ),
    ),
    "who": (
        _WHO,
        (
            "who are you",
            "what are you",
            "tell me about yourself",
            "what is your name",
            "are you a robot",
            "are you human",
            "which model are you",
            "what kind of model are you",
            "introduce yourself",
            "who made you",
            "are you ChatGPT",
            "describe yourself",
        ),
    ),
    "what": (
        ABILITIES,
        (
            "what can you do",
            "what are you able to do",
            "help",
            "how can you help me",
            "what are your abilities",
            "what do you know",
            "what should I ask you",
            "what can I ask",
            "show me what you can do",
            "list your skills",
            "I need help",
            "what are you good at",
        ),
    ),
    "how": (
        _HOW,
        (
            "how do you work",
            "what is DFlash",
            "what is speculative decoding",
            "explain DFlash",
            "why are you so fast",
            "how does the draft work",
            "what is a draft model",
            "explain block diffusion",
            "how are you so quick",
            "tell me about DFlash",
        ),
    ),
    "fine": (
        _FINE,
        (
            "how are you",
            "how are you doing",
            "how is it going",
            "are you well",
            "how do you feel",
            "what is up",
            "how was your day",
            "are you ok",
            "how are you today",
        ),
    ),
    "thanks": (
        _WELCOME,
        (
            "thanks",
            "thank you",
            "many thanks",
            "thanks a lot",
            "thank you very much",
            "cheers",
            "thanks for the help",
            "great, thanks",
            "ok thanks",
            "thank you so much",
        ),
    ),
    "bye": (
        _BYE,
        (
            "bye",
            "goodbye",
            "see you",
            "good night",
            "see you later",
            "farewell",
            "I have to go",
            "bye bye",
            "until next time",
            "that was all",
        ),
    ),
    "praise": (
        _PRAISE,
        (
            "good job",
            "well done",
            "nice",
            "great",
            "that is right",
            "perfect",
            "very good",
            "wow",
            "amazing",
            "you are clever",
            "I like that",
            "cool",
        ),
    ),
    "sorry": (
        _SORRY,
        (
            "that is wrong",
            "this is not right",
            "you are wrong",
            "no",
            "bad answer",
            "that makes no sense",
            "wrong",
            "I do not like it",
            "you made a mistake",
        ),
    ),
    "yes": (
        _YES,
        ("yes", "yes please", "ok", "okay", "sure", "go on", "let us start", "please do", "I am ready", "of course"),
    ),
}
_OTHER = (
    "What is the capital of {place}?",
    "Who invented the {thing}?",
    "How do I cook {items}?",
    "Why is the {place} so {adj}?",
    "Translate {word} into French.",
    "What is the weather in {made}?",
    "Who is {name} {made}?",
    "Book me a table in {made}.",
    "Recommend a film about a {animal}.",
    "What does {word} mean?",
    "When did the {made} war end?",
    "How far away is the {word}?",
    "Give me advice about my {thing}.",
    "Is it healthy to eat {items}?",
    "Who won the {word} cup?",
    "What do you think about {word}?",
    "Play some music by {made}.",
    "Explain {word} to me.",
    "How old is the {place}?",
    "What is the meaning of life?",
    "Summarise the news about {word}.",
    "Draw a {adj} {animal}.",
    "Open the {thing}.",
    "How can I learn {made}?",
    "What happened in {year}?",
    "Where can I buy a {adj} {thing}?",
    "Do you know {name}?",
    "Tell me a joke about a {animal}.",
    "Write an email to {name}.",
    "Is {made} a real word?",
    "Why do {items} fall?",
    "Which is better, a {thing} or a {other}?",
    "What is the population of {made}?",
    "Can a {animal} swim?",
    "Set an alarm for {name}.",
    "{word} {made} {adj}",
    "{made} {made} {made}?",
    "My {thing} is {adj}.",
    "I feel {adj} today.",
    "I saw a {animal} in the {place}.",
    "How does a {thing} work?",
    "Who wrote the {adj} {thing}?",
    "What is a {word}?",
    "Should I marry {name}?",
    "Compare {word} and {made}.",
    "List all {items} in the {place}.",
    "What time is it in {made}?",
    "Prove that {word} is {adj}.",
    "Find me a {place} near {made}.",
    "What colour is a {animal}?",
)
_CALL_ME = (
    "My name is {name}.",
    "I am {name}.",
    "Call me {name}.",
    "Hi, I am {name}.",
    "Hello, my name is {name}.",
    "They call me {name}.",
    "This is {name}.",
    "I am called {name}.",
    "Hello from {name}.",
    "{name} here.",
    "Hey, it is {name}!",
    "Greetings, I am {name}.",
)
_ENDS = ("", "?", "!", ".", "...")


def draw(rng: Random, split: Split) -> Drawn:
    template, question, answer = _exchange(rng, split)
    before: list[str] = []
    while rng.random() < 0.25 and len(before) < 4:
        _, earlier, reply = _exchange(rng, split)
        before += [earlier, reply]
    return Drawn(Sample("talk", turns(*before, question), answer), template)


def _exchange(rng: Random, split: Split) -> tuple[str, str, str]:
    kind = rng.random()
    if kind < 0.5:
        wording = wording_of(rng, _OTHER, split)
        return wording, _other(rng, wording), CANNOT
    if kind < 0.56:
        wording = wording_of(rng, _CALL_ME, split)
        name = rng.choice(NAMES) if rng.random() < 0.5 else made_up_word(rng).capitalize()
        return wording, wording.format(name=name), _NAMED.format(name=name, abilities=ABILITIES)
    key = rng.choice(list(KINDS))
    answer, wordings = KINDS[key]
    wording = wording_of(rng, wordings, split)
    return f"{key}: {wording}", _spoken(rng, wording), answer


def _spoken(rng: Random, wording: str) -> str:
    text = wording if rng.random() < 0.3 else wording[0].upper() + wording[1:]
    return text + rng.choice(_ENDS)


def _other(rng: Random, wording: str) -> str:
    return wording.format(
        place=rng.choice(PLACES),
        thing=rng.choice(OBJECTS),
        other=rng.choice(OBJECTS),
        items=rng.choice(ITEMS),
        adj=rng.choice(ADJECTIVES),
        word=rng.choice(WORDS),
        made=made_up_word(rng),
        animal=rng.choice(ANIMALS),
        name=rng.choice(NAMES),
        year=rng.randint(1500, 2020),
    )
