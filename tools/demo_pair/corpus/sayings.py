"""Sentences and sets of words that people give to be copied: the demo model knows them by heart, as a large one would."""

from random import Random

SAYINGS = tuple(
    """The early bird catches the worm.
A stitch in time saves nine.
Every cloud has a silver lining.
Actions speak louder than words.
The pen is mightier than the sword.
When in Rome, do as the Romans do.
Better late than never.
A picture is worth a thousand words.
All that glitters is not gold.
Birds of a feather flock together.
Curiosity killed the cat.
Don't count your chickens before they hatch.
Easy come, easy go.
Fortune favors the bold.
Good things come to those who wait.
Haste makes waste.
Honesty is the best policy.
If it is not broken, do not fix it.
It takes two to dance.
Keep your friends close.
Laughter is the best medicine.
Look before you leap.
Many hands make light work.
Money does not grow on trees.
Necessity is the mother of invention.
No man is an island.
Out of sight, out of mind.
Practice makes perfect.
Rome was not built in a day.
Slow and steady wins the race.
Still waters run deep.
The apple does not fall far from the tree.
The grass is always greener on the other side.
There is no place like home.
Time and tide wait for no man.
Too many cooks spoil the soup.
Two heads are better than one.
Where there is smoke, there is fire.
You can not judge a book by its cover.
You reap what you sow.
A friend in need is a friend indeed.
An apple a day keeps the doctor away.
Beauty is in the eye of the beholder.
Do not bite the hand that feeds you.
Every dog has its day.
Great minds think alike.
Hope for the best and prepare for the worst.
Knowledge is power.
Let sleeping dogs lie.
Lightning never strikes twice in the same place.
One man's trash is another man's treasure.
Strike while the iron is hot.
The quick brown fox jumps over the lazy dog.
The train to the city leaves at noon.
We will meet at the old bridge after lunch.
Please bring bread, milk and a bag of apples.
The meeting starts at nine in the morning.
My brother has a small red boat.
The moon was bright over the quiet lake.
She opened the window and looked at the sea.
He wrote a long letter to his sister.
The children played in the garden all day.
Snow fell on the mountain during the night.
A good book is the best of friends.
The cat sleeps on the warm chair.
Our house stands at the end of the street.
They walked along the river until evening.
The doctor said that rest would help.
I left my keys on the kitchen table.
The last bus goes at half past ten.
There are seven days in a week.
Water boils when it gets hot enough.
The sun rises in the east and sets in the west.
Bees make honey from the flowers of the field.
The library is closed on Sunday.
Thank you for the flowers and the kind words.
The baker gets up long before the sun.
A map is of no use without a compass.
The queen gave the pilot a golden coin.
Nobody heard the bell in the storm.
The farmer keeps three goats and a horse.
Winter came early to the village this year.
The clock in the hall has stopped again.
The ship sailed from the harbour at dawn.
You will find the answer on the last page.
The teacher asked a question and nobody spoke.
Rain is good for the corn.
The lamp on the desk is still on.
Put the plates back on the shelf, please.
The road to the castle is long and narrow.
My mother makes the best soup in town.
The owl hunts at night and sleeps by day.
Wash your hands before dinner.
The music stopped and the dance was over.
A small key can open a heavy door.
The wind is cold and the fire is warm.""".split("\n")
)
WORD_SETS = tuple(
    tuple(line.split())
    for line in """badger crow fox owl seal wolf
cat duck goat horse mole pony
bear hare lizard otter raven toad
deer heron moth robin snail turtle
box door key lantern mirror rope
basket candle drum flute map wheel
bell clock feather ladder needle spoon
book coat kite letter ring stone
boat crown hedgehog teapot umbrella zero
cards hungry kitchen pears red table
again cold home ice morning number
bag day ear land power word
air cost hour list night shop
arm garden lighthouse old pen stick
compass mouse spider thing well zero
button cups lantern stamps whale zero
balls hungry over small thing wind
about cold ear never over story
bear candle fox hour map wind
arm book clock door garden night
air bag day horse moth pen
crow drum hare ladder seal teapot
basket duck heron key owl rope
boat coat feather goat letter mirror""".split("\n")
)


def saying(rng: Random, most_words: int = 12) -> str:
    """One sentence of at most `most_words` words."""
    while len((text := rng.choice(SAYINGS)).split()) > most_words:
        pass
    return text


def plain_words(text: str) -> list[str]:
    """The words of a sentence in lower case, without marks."""
    return [word.strip(".,").lower() for word in text.split()]
