"""Which gaps of a stream count as those beside a long prompt."""

from tools.bench.client import Answer
from tools.lab.gaps import gaps


def test_a_gap_counts_if_a_part_of_it_lies_in_the_reading_of_the_prompt() -> None:
    beside = Answer(sent=10.0, last=20.0)
    first = Answer(sent=0.0, chunks=[1.0, 3.0, 9.0, 12.0, 19.0, 30.0, 31.0])
    second = Answer(sent=0.0, chunks=[8.0, 25.0])
    assert gaps([first, second], beside) == ([2.0, 6.0], [3.0, 7.0, 11.0, 17.0])
