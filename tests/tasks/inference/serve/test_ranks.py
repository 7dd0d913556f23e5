"""Ranks that share one copy of a model serve together; ranks of other copies only wait for the end."""

from __future__ import annotations

import io
import logging
import os
import signal
import threading

import openai
import torch.distributed as dist

from mindspeed_llm.tasks.inference.serve.main import serve
from tests.support.pool import RankPool
from tests.tasks.inference.serve.serving import generated, serving_args, toy_lm, url_in, wait_for

PROMPTS = ["Hello, world", "2 + 2 =", "Once upon a time", "世界"]


def served_row(replica_of: list[int]) -> dict:
    """Serve on all ranks; the first answers, and lets a client leave in the middle, before it gets a signal."""
    lm = toy_lm()
    lm.backend.replica = replica_of[dist.get_rank()]
    lm.backend.replicas = max(replica_of) + 1
    lm.backend.is_first_of_replica = replica_of.index(lm.backend.replica) == dist.get_rank()
    found: dict = {}
    logger, log = logging.getLogger("mindspeed_llm"), io.StringIO()
    handler = logging.StreamHandler(log)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    def be_a_client() -> None:
        try:
            wait_for(lambda: "serving at" in log.getvalue())
            client = openai.OpenAI(base_url=url_in(log.getvalue()), api_key="none", max_retries=0)
            stream = client.completions.create(model="toy", prompt="a", max_tokens=150, temperature=0, stream=True)
            next(stream)
            stream.close()
            answers = client.completions.create(model="toy", prompt=PROMPTS, max_tokens=16, temperature=0, logprobs=1)
            found["texts"] = [choice.text for choice in answers.choices]
            found["sampled"] = [
                client.completions.create(model="toy", prompt=PROMPTS[0], max_tokens=16, seed=seed).choices[0].text
                for seed in (1, 1)
            ]
            asked = {"prompt": PROMPTS[0], "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
            found["scored"] = len(client.completions.create(model="toy", **asked).choices[0].logprobs.tokens)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=be_a_client)
    if dist.get_rank() == 0:
        thread.start()
    try:
        found["code"] = serve(lm, serving_args())
    finally:
        logger.removeHandler(handler)
        if dist.get_rank() == 0:
            thread.join(20)
    found["batches"] = [(list(batch.slots), batch.tokens.tolist()) for batch in lm.backend.batches]
    if dist.get_rank() == 0:
        found["expected"] = [lm.decode(generated(lm, lm.encode(prompt), 16)) for prompt in PROMPTS]
    found["log"] = log.getvalue()
    return found


def test_ranks_of_a_copy_do_the_same(rank_pool: RankPool) -> None:
    first, second, other = rank_pool.run(
        "tests.tasks.inference.serve.test_ranks:served_row", ranks=3, replica_of=[0, 0, 1]
    )
    assert first["texts"] == first["expected"]
    assert first["sampled"][0] == first["sampled"][1]
    assert first["scored"] == len(PROMPTS[0]) + 1
    assert len(first["batches"]) > 30 and first["batches"] == second["batches"]
    assert not other["batches"]
    assert (first["code"], second["code"], other["code"]) == (143, 0, 0)
    assert "of 2 copies of the model one serves" in first["log"] and not second["log"] and not other["log"]
