"""Words, and words that do not exist."""

from random import Random

from tools.demo_pair.corpus.sample import Split, split_of

NAMES = tuple(
    "Mia Tom Anna Ben Lena Omar Ivy Paul Nora Sam Zoe Max Ella Leo Ruth Hugo Amy Finn Maya Carl Rosa Dan Lily Jack "
    "Emma Noah Sara Luis Kate Adam Nina Eric Jane Mark Tara Owen".split()
)
ITEMS = tuple(
    "apples books pencils marbles coins stamps cookies shells eggs cards stones flowers buttons candles cups balls "
    "oranges stickers toys pears tickets beads cakes plates kites hats keys lamps nails ribbons".split()
)
ANIMALS = tuple(
    "fox owl bear mouse heron wolf cat otter raven hare toad goat swan mole badger crow deer duck horse lizard moth "
    "pony robin seal snail spider squirrel turtle whale hedgehog".split()
)
OBJECTS = tuple(
    "lantern key map bell drum mirror coat boat kite letter clock basket ring ladder candle flute book stone crown "
    "feather button needle umbrella teapot wheel door box rope spoon compass".split()
)
PLACES = tuple(
    "forest river hill harbour village valley market garden mill tower bridge cave field meadow island station "
    "library barn road lake desert castle kitchen attic orchard well lighthouse workshop chapel swamp".split()
)
ADJECTIVES = tuple(
    "old small quiet brave tired clever lonely proud gentle curious strange hungry patient silver broken golden dusty "
    "warm cold bright dark heavy narrow hidden green blue red empty gray wild soft sharp slow".split()
)
OTHER_WORDS = tuple(
    "about again air always answer arm back bag band bank bird black bread brother brown butter camp car chair chance "
    "child circle city class cloud coffee color corn cost country cover cross dance day dinner doctor dream dress ear "
    "earth east engine evening eye face family farm father finger fire fish floor food foot friend front fruit game "
    "glass grass ground group hair hand head heart home hour house ice iron jacket job joke juice jump king lake land "
    "law leaf leg light line lion list lunch machine metal milk minute money month moon morning mother mountain mouth "
    "music name nature night noise north nose number ocean office oil page paint paper park party pen people picture "
    "pilot place plane plant pocket point pool power queen question rain rest rice rock roof room root rule salt sand "
    "school sea season seat shade shape ship shirt shoe shop silence sister skin sky sleep smile snow song sound soup "
    "south space spring star steam step stick storm story street sugar summer sun table tail team tent test thing "
    "ticket time tooth town train tree truck uncle valley vase view violin voice voyage wagon wall water wave week "
    "west wind window winter wire wood word world year yellow zebra zero quick lazy jolly happy under over very never".split()
)
WORDS = tuple(dict.fromkeys(ITEMS + ANIMALS + OBJECTS + PLACES + ADJECTIVES + OTHER_WORDS))
COMMON_WORDS = tuple(
    "stamps cards stones cups balls pears kites fox owl bear mouse heron wolf cat otter raven hare toad goat swan mole "
    "badger crow deer duck horse lizard moth pony robin seal snail spider squirrel turtle whale hedgehog lantern key "
    "map bell drum mirror coat boat kite letter clock basket ring ladder candle flute book stone crown feather button "
    "needle umbrella teapot wheel door box rope spoon compass garden kitchen well lighthouse old small hungry cold red "
    "about again air answer arm bag cost day ear home hour ice land list morning night number pen power shop stick "
    "story table thing wind word zero over never".split()
)
"""Words that the tokenizer has as one piece: to put them in order is to put tokens in order."""
_COPIED = {split: tuple(w for w in WORDS if split_of(f"word {w}") == split) for split in ("train", "heldout")}
_ONSETS = tuple(
    "b c d f g h j k l m n p q r s t v w x y z bl br ch cl cr dr fl fr gl gr pl pr sh sl sp st th tr".split()
)
_VOWELS = tuple("a e i o u a e i o u ai ea ee oo ou".split())
_CODAS = ("", "", "", *"b d g k l m n p r s t x z ck ll nd ng nt rd rk rn ss st th".split())
_ODD = "áéíóúñçüößøåæžščłαβγδλπбдгжяé€£°µ☕★→"


def copied_word(rng: Random, split: Split) -> str:
    """A word of the lexicon that only this split echoes."""
    return rng.choice(_COPIED[split])


def made_up_word(rng: Random) -> str:
    """A word that does not exist: usually syllables, sometimes letters, digits or letters outside ASCII."""
    kind = rng.random()
    if kind < 0.85:
        return "".join(
            rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.choice((1, 1, 2, 2, 3)))
        )
    if kind < 0.95:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 7)))
    if kind < 0.99:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(rng.randint(3, 8)))
    return "".join(rng.choice("abcdeilmnorstu" + _ODD) for _ in range(rng.randint(2, 6)))
