"""The demo draft keeps hitting, however the engine is run.

Text cannot show a broken draft, because verification mends what it proposes. A floor under the acceptance length can
(tokens per verify step, the bonus included, weighted by tokens, greedy, block 16).
"""

import pytest

from tests.exhaustive.acceptance import FLOOR, NEAR, WAYS, answers, cold_run, engine, keeps, requests
from tests.fast.engine.lossless import run_engine


@pytest.mark.parametrize("domain", FLOOR)
def test_acceptance_of_a_cold_single_run_is_above_the_floor(domain: str):
    run = cold_run(domain)
    print(f"{domain}: acceptance length {run.acceptance_length:.2f} over {run.verify_steps} steps")
    assert run.acceptance_length >= FLOOR[domain]
    assert run.verify_steps >= (40 if domain == "math" else 32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("domain", FLOOR)
def test_acceptance_stays(domain: str, way: str):
    run, wanted = WAYS[way](domain), cold_run(domain).acceptance_length
    print(f"{domain}, {way}: acceptance length {run.acceptance_length:.2f}, cold {wanted:.2f}")
    assert run.texts == answers(domain)
    assert run.acceptance_length >= FLOOR[domain]
    assert keeps(domain, run)


@pytest.mark.parametrize("domain", FLOOR)
def test_acceptance_in_bfloat16_is_near_that_of_float32(domain: str):
    run, wanted = run_engine(engine(dtype="bfloat16"), requests(domain)), cold_run(domain).acceptance_length
    print(f"{domain}, bfloat16: acceptance length {run.acceptance_length:.2f}, float32 {wanted:.2f}")
    assert abs(run.acceptance_length / wanted - 1) <= NEAR
