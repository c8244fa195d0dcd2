"""Records how many drafts the demo pair would have accepted at every token of its answers:
`python -m tests.engine.record_traces` writes tests/unit/acceptance_traces.json, which the policy is replayed on.

Every step drafts and verifies a whole block, and then one token is taken, so that the text goes through all places
where a step could begin. A trace is one hexadecimal digit a token.
"""

import json
from pathlib import Path

from app.bench import in_process, loads
from app.checkpoint import DEMO

TRACES = Path(__file__).parents[1] / "unit" / "acceptance_traces.json"
REQUESTS = 32


def record(load: str) -> list[str]:
    core = in_process.engine("full", DEMO / "target", DEMO / "draft", max_num_seqs=REQUESTS)
    requests = loads.requests(load, REQUESTS)
    accepted: dict[str, str] = {request.request_id: "" for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        batch = core.scheduler.schedule()
        result = core.runner.launch(batch).read()
        for rows, count in zip(batch.sampling, result.num_accepted, strict=True):
            if rows.num_drafts == core.scheduler.block_size - 1:  # fewer where the answer must end
                accepted[rows.seq.request.request_id] += f"{count:x}"
        result.num_accepted = [0] * len(result.num_accepted)
        core.scheduler.commit(batch, result)
    return list(accepted.values())


if __name__ == "__main__":
    traces = {load: record(load) for load in loads.LOADS if load != loads.MIXED}
    TRACES.write_text(json.dumps(traces, indent=1) + "\n")
    for load, texts in traces.items():
        digits = [int(digit, 16) for text in texts for digit in text]
        print(f"{load}: {len(digits)} places, {sum(digits) / len(digits):.2f} drafts accepted at a place")
