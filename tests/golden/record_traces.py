"""Recorder of the drafts that the demo pair would accept at every token of its answers.

`python -m tests.golden.record_traces` writes tests/golden/acceptance_traces.json, and tests replay the policy on it.
Every step drafts and verifies a whole block, and then takes one token. So the text goes through every place at which a
step could begin. An answer is one hexadecimal digit a token, without the first token, which prefill gives. Beside it is
the length of its prompt. Near the end of the longest answers blocks are shorter, like in serving.
"""

import json
from typing import Any

from app.engine.checkpoint.files import DEMO
from tests import GOLDEN
from tools.lab import in_process, loads

TRACES = GOLDEN / "acceptance_traces.json"
REQUESTS = 48


def record(load: str) -> dict[str, Any]:
    core = in_process.engine("full", DEMO / "target", DEMO / "draft", max_num_seqs=REQUESTS)
    requests = loads.requests(load, REQUESTS)
    accepted: dict[str, str] = {request.request_id: "" for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        batch = core.scheduler.schedule()
        result = core.launch(batch).read()
        for rows, count in zip(batch.decodes, result.num_accepted, strict=False):  # prefills come behind them
            accepted[rows.seq.request.request_id] += f"{count:x}"
        result.num_accepted = [0] * len(result.num_accepted)
        core.scheduler.commit(batch, result)
    return {"prompts": [len(request.token_ids) for request in requests], "answers": list(accepted.values())}


if __name__ == "__main__":
    traces = {load: record(load) for load in loads.LOADS}
    TRACES.write_text(json.dumps(traces, indent=1) + "\n")
    for load, texts in traces.items():
        digits = [int(digit, 16) for answer in texts["answers"] for digit in answer]
        print(f"{load}: {len(digits)} places, {sum(digits) / len(digits):.2f} drafts accepted at a place")
