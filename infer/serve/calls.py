"""A call under way: the tickets of its prompts, as one stream of what their samples say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from infer.async_engine import AsyncEngine, Draining, QueueFull, Ticket, Update
from infer.request import Completion
from infer.serve.errors import ApiError
from infer.serve.prepare import Call

News = list[tuple[int, Update]]
"""Updates that have come since the last look, each with the index of its choice."""


class RunningCall:
    """What became of a call's prompts. `cancel` frees their slots."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []

    @classmethod
    async def submit(cls, engine: AsyncEngine, call: Call) -> RunningCall:
        """Queue all prompts of a call, or none: ApiError says why it cannot be served."""
        most = engine.engine.max_requests + engine.max_waiting
        if call.num_choices > most:
            raise ApiError(
                f"the request asks for {call.num_choices} answers, but this server holds {most} at once: ask for fewer",
                param="n",
            )
        running = cls()
        try:
            for prompt in call.prompts:
                ticket = await engine.submit(
                    prompt.token_ids, prompt.params, draft=call.draft, owner=call.owner, trees=call.trees, tag=call.tag
                )
                running.tickets.append(ticket)
        except BaseException as error:
            running.cancel()
            if isinstance(error, QueueFull):
                raise ApiError.busy(error.retry_after) from None
            if isinstance(error, Draining):
                raise ApiError.draining() from None
            if isinstance(error, ValueError):
                raise ApiError.of(error, call.names) from None
            raise
        return running

    @property
    def num_prompt_tokens(self) -> int:
        return sum(ticket.num_prompt_tokens for ticket in self.tickets)

    def cancel(self) -> None:
        for ticket in self.tickets:
            ticket.cancel()

    async def completions(self) -> list[Completion]:
        """Wait for every answer; ApiError if one of them failed."""
        completions = [one for ticket in self.tickets for one in await ticket.completions()]
        for completion in completions:
            check(completion)
        return completions

    async def news(self) -> AsyncIterator[News]:
        """All updates, those that are there already in one go."""
        if len(self.tickets) == 1:
            (ticket,) = self.tickets
            async for update in ticket:
                waiting = [await anext(ticket) for _ in range(ticket.num_pending)]
                yield [(one.sample, one) for one in (update, *waiting)]
            return
        async for each in self._merged():
            yield each

    async def _merged(self) -> AsyncIterator[News]:
        arrived: News = []
        has_come = asyncio.Event()

        async def read(ticket: Ticket, first: int) -> None:
            async for update in ticket:
                arrived.append((first + update.sample, update))
                has_come.set()

        first, readers = 0, []
        for ticket in self.tickets:
            readers.append(asyncio.create_task(read(ticket, first)))
            first += ticket.num_samples
        everything = asyncio.gather(*readers)
        everything.add_done_callback(lambda _: has_come.set())
        try:
            while not everything.done() or arrived:
                if not arrived:
                    has_come.clear()
                    await has_come.wait()
                each, arrived[:] = list(arrived), []
                if each:
                    yield each
            await everything
        finally:
            everything.cancel()


def check(completion: Completion) -> None:
    """Raise ApiError if an answer ended otherwise than by itself or its limit."""
    if completion.finish_reason == "error":
        if completion.is_fault:
            raise ApiError.internal()
        raise ApiError(completion.error or "no token can be drawn", code="no_token_left")
    if completion.finish_reason == "abort":  # a client that goes away reads no answer: it was the server
        raise ApiError.cut_off()
