"""The whole server as people start it: `dflash-server serve`, the demo pair, the OpenAI SDK."""

import asyncio
import re
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.fast.api.served import PATIENCE
from tests.server.demo import ready

QUESTIONS = [
    f"Mia has {10 + i} apples. Mia buys {2 + i % 8} more apples. How many apples are there now?" for i in range(32)
]
KEYS = "Tom has 6 boxes with 4 keys in each. Tom loses 5 keys. How many keys are left?"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ready() as url:
        yield url


def answer(url: str, question: str, **options: object) -> str:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE) as client:
        whole = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": question}],
            **options,  # type: ignore[call-overload]
        )
    return str(whole.choices[0].message.content)


async def streamed(url: str, questions: list[str], temperature: float) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE) as client:

        async def one(question: str) -> str:
            chunks = await client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": question}],
                stream=True,
                temperature=temperature,
                seed=3,
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        return list(await asyncio.gather(*map(one, questions)))


def test_a_sum_is_answered_rightly(url: str) -> None:
    assert "#### 19" in answer(url, KEYS)


def test_a_sum_is_answered_rightly_in_blocks() -> None:
    """All that is drafted is verified, whatever steps cost on this machine now."""
    with ready("--verify", "full") as url:
        assert "#### 19" in answer(url, KEYS)
        metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
    accepted = re.search(r"^dflash:spec_decode_num_accepted_tokens_total (\S+)", metrics, re.MULTILINE)
    assert accepted is not None and float(accepted.group(1)) > 10


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_32_streams_together_each_equal_their_own_plain_run(url: str, temperature: float) -> None:
    together = asyncio.run(streamed(url, QUESTIONS, temperature))
    verified = num_verified(url)
    alone = [
        answer(url, question, temperature=temperature, seed=3, extra_body={"speculate": False})
        for question in QUESTIONS
    ]
    assert together == alone
    assert num_verified(url) == verified, "plain runs verify no draft"


def num_verified(url: str) -> float:
    metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
    found = re.search(r"^dflash:spec_decode_num_draft_tokens_total (\S+)", metrics, re.MULTILINE)
    assert found is not None
    return float(found.group(1))


def test_no_page_is_used_when_everybody_has_been_served(url: str) -> None:
    metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert re.search(rf"^dflash:{gauge} 0\.0$", metrics, re.MULTILINE), gauge
