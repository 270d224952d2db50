"""1,000 chat requests, 64 at a time, against a server (a process of its own) that answers each after 50 ms.

The ideal is 64 workers that only sleep 50 ms for each request: no client and no server at all.
"""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from openai import AsyncOpenAI

from chapbook_shared.bench import Comparison, compare, main
from chapbook_shared.lm import OpenAIModel, Sampling

REQUESTS, CONCURRENCY, SECONDS = 1000, 64, 0.05
WORKLOAD = f"{REQUESTS} chats, {CONCURRENCY} at a time, {SECONDS * 1e3:.0f} ms server"


@contextmanager
def server() -> Iterator[str]:
    """The base URL of an echo server in another process."""
    command = [sys.executable, "-m", "chapbook_shared.lm.serve", "--model", "echo", "--latency", str(SECONDS)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        yield process.stderr.readline().split()[-1]
    finally:
        process.terminate()
        process.wait()


async def in_turns(request: Callable[[int], Awaitable[object]]) -> None:
    numbers = iter(range(REQUESTS))

    async def work() -> None:
        for number in numbers:
            await request(number)

    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))


def run() -> Iterator[Comparison]:
    with server() as base_url, OpenAIModel("echo", base_url=base_url, concurrency=CONCURRENCY) as model:
        conversations = [f"say {number}" for number in range(REQUESTS)]

        def ours() -> None:
            answers = model.chat_many(conversations, Sampling(max_tokens=8))
            assert [answer.text for answer in answers] == conversations

        def ideal() -> None:
            asyncio.run(in_turns(lambda _: asyncio.sleep(SECONDS)))

        async def official_client() -> None:
            async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
                await in_turns(
                    lambda number: client.chat.completions.create(
                        model="echo", messages=[{"role": "user", "content": conversations[number]}], max_tokens=8
                    )
                )

        yield compare(WORKLOAD, ours, ideal, peer_name="ideal", goal=1 / 1.1)
        yield compare(
            WORKLOAD, ours, lambda: asyncio.run(official_client()), peer_name="openai client", goal=1.0, repeats=3
        )


if __name__ == "__main__":
    main(run)
