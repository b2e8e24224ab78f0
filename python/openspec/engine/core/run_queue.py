"""RunQueue: who waits, who runs, and the ways between the two."""

from __future__ import annotations

import bisect
import concurrent.futures
import heapq
from collections.abc import Sequence
from operator import attrgetter

from openspec.engine.core.executor import Runner
from openspec.engine.core.request import Phase, Request, StepPlan
from openspec.engine.core.shared_prompts import Lead, SharedPrompts
from openspec.specs.runner import RunnerConfig


class NotAdmitted(Exception):
    """A request that waits could not be given a slot, though one is free; its cause says why.

    `is_loaded` is False where its grammar could not be loaded, which says nothing of others.
    """

    def __init__(self, request: Request, is_loaded: bool = True) -> None:
        super().__init__(f"request {request.request_id} was not admitted")
        self.request = request
        self.is_loaded = is_loaded


class RunQueue:
    """Unfinished requests in order of rank; owns their phases and slots."""

    def __init__(self, config: RunnerConfig, runner: Runner, displaces: bool = False) -> None:
        """`displaces`: whether priority may take a running sequence's place."""
        self._runner = runner
        self._displaces = displaces
        self._page_size = config.page_size
        self._has_cache = config.enable_prefix_caching
        self._shared = SharedPrompts(config.page_size)
        self._by_id: dict[str, Request] = {}
        self._heap: list[tuple[tuple[int, int], Request]] = []  # finished ones are skipped
        self._loading: list[Request] = []  # their grammars are not there yet
        self._running: list[Request] = []
        self._blocked: tuple[Request, int] | None = None
        self.num_waiting = 0
        self.num_prefilling = 0
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        """Prompt tokens that were looked up in the prefix cache, once for each sequence."""
        self.num_prefix_hits = 0

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold a slot, in order of rank."""
        return self._running

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of this id."""
        return self._by_id.get(request_id)

    def enqueue(self, request: Request) -> None:
        """Takes a new request."""
        self._by_id[request.request_id] = request
        if request.grammar is None or request.grammar.done():
            self._wait(request)
        else:
            self.num_waiting += 1
            self._loading.append(request)

    def take_ready(self) -> None:
        """Lets requests run that wait for nothing any more: a grammar, or shared pages."""
        for request in self._shared.take_free():
            if request.phase is Phase.WAITING:
                request.num_cached_seen = -1
                heapq.heappush(self._heap, (request.rank, request))
        if not self._loading:
            return
        loading, self._loading = self._loading, []
        for request in loading:
            if request.phase is Phase.FINISHED:
                continue
            if request.grammar is None or request.grammar.done():
                heapq.heappush(self._heap, (request.rank, request))
            else:
                self._loading.append(request)

    def await_grammars(self, wait_s: float) -> None:
        """Waits for the first that is missing."""
        if self._loading and self._loading[0].grammar is not None:
            concurrent.futures.wait([self._loading[0].grammar], wait_s)

    def may_admit(self, num_free_pages: int) -> bool:
        """Whether `admit` is worth a try."""
        if self._first_waiting() is None or self._runner.num_free_slots == 0:
            return False
        if self._blocked is None:
            return True
        # The head of the queue did not fit before, and still does not unless pages came free.
        request, num_free_then = self._blocked
        return request is not self._first_waiting() or num_free_pages > num_free_then

    def outranks_a_prompt(self) -> bool:
        """Whether the first in the queue comes before a prompt on its way."""
        first = self._first_waiting()
        return first is not None and any(
            request.phase is Phase.PREFILLING and first.rank < request.rank
            for request in self._running
        )

    def follow_leaders(self) -> None:
        """Has the first in the queue wait if another sequence computes what it needs next.

        One of lower rank would hold it back, so that one steps aside and follows in its turn.
        """
        while (request := self._first_waiting()) is not None:
            lead = self._lead(request)
            if lead is None:
                return
            if lead.is_in_flight or lead.leader.rank < request.rank:
                heapq.heappop(self._heap)
                self._shared.follow(request, lead)
            elif self._runner.num_free_slots > 0:
                self.preempt(lead.leader)
            else:
                return

    def may_displace(self) -> bool:
        """Whether the first in the queue may take the place of the last that runs."""
        if not self._displaces or not self._running:
            return False
        first = self._first_waiting()
        return first is not None and first.source.priority < self._running[-1].source.priority

    def make_room(self) -> bool:
        """Has running sequences of lower priority wait so that the first in the queue can run.

        The last ones first, and nobody where all of them would not do. Returns whether there should
        be room: pages that sequences share are counted for each of them.
        """
        self.follow_leaders()
        first = self._first_waiting()
        if first is None or not self.may_displace():
            return False
        needed = self._pages_for(self.rows_left(first)) + 1
        num_slots, num_pages = self._runner.num_free_slots, self._runner.num_free_pages
        staying = list(self._running)
        while staying and (num_slots == 0 or needed + self._num_kept_free(staying) > num_pages):
            victim = staying.pop()
            if victim.source.priority <= first.source.priority:
                return False
            num_slots += 1
            num_pages += self._pages_for(victim.num_tokens)
        for victim in self._running[len(staying) :]:
            self.preempt(victim)
        return True

    def admit(self, num_taken: int) -> Request | None:
        """Gives the first in the queue a slot, if its prompt fits the free pages.

        Whoever begins as a prompt on its way does waits for the pages of that, and the next one is
        looked at. Pages promised to prompts on their way are left alone, and one page for each
        running sequence, so that a newcomer does not cause a preemption at once; and no fewer than
        `num_taken`, which the step under way takes and which count as free until it is launched.

        Raises:
            NotAdmitted: if the runner does not take it, or its grammar could not be loaded.
        """
        self.follow_leaders()
        request = self._first_waiting()
        num_free_pages = self._runner.num_free_pages - num_taken
        if request is None or not self.may_admit(num_free_pages):
            return None
        return self._give_slot(request, num_free_pages, num_taken)

    def admit_early(self, request: Request) -> bool:
        """Gives one of `waiting` a slot before those ahead of it, as `admit` would.

        Raises:
            NotAdmitted: as `admit`.
        """
        num_pages = self._pages_for(self.rows_left(request)) + 1  # most often what it needs
        num_pages += self._num_kept_free(self._running)
        if self._runner.num_free_slots == 0 or num_pages > self._runner.num_free_pages:
            return False
        if self._lead(request) is not None:
            return False
        return self._give_slot(request, self._runner.num_free_pages, 0) is not None

    def waiting(self, most: int) -> list[Request]:
        """The first of those that wait for a slot alone, in order of rank."""
        first = heapq.nsmallest(most, self._heap)
        return [request for _, request in first if request.phase is Phase.WAITING]

    def rows_left(self, request: Request) -> int:
        """Rows until its prompt is computed; of one that waits, about."""
        if request.phase is not Phase.WAITING:
            return request.num_tokens - request.num_scheduled
        if request.num_cached_seen < 0:
            request.num_cached_seen = self._runner.num_cached(request)
        return request.num_tokens - request.num_cached_seen

    def _give_slot(self, request: Request, num_free_pages: int, num_taken: int) -> Request | None:
        self._blocked = None
        if request.grammar is not None and (failure := request.grammar.exception()) is not None:
            raise NotAdmitted(request, is_loaded=False) from failure
        try:
            slot = self._runner.add(request)
        except Exception as error:
            raise NotAdmitted(request) from error
        num_computed = self._runner.kv_len(slot)
        if self._running:
            # The cached prefix is attached now, hence no longer among the free pages.
            needed = self._runner.num_pages_needed(slot, request.num_tokens - num_computed)
            kept_free = self._num_kept_free(self._running)
            if needed + max(kept_free, num_taken) > self._runner.num_free_pages:
                self._runner.remove_sequence(slot)
                self._blocked = (request, num_free_pages)
                return None
        if self._heap[0][1] is request:
            heapq.heappop(self._heap)
        else:
            self._heap.remove((request.rank, request))
            heapq.heapify(self._heap)
        self.num_waiting -= 1
        request.slot = slot
        request.num_scheduled = request.num_computed = num_computed
        request.num_steps_in_flight = 0
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed
            if self._has_cache and not request.needs_prompt_logprobs:
                self.num_prefix_queries += request.num_tokens
                self.num_prefix_hits += num_computed
        request.phase = Phase.PREFILLING
        self.num_prefilling += 1
        bisect.insort(self._running, request, key=attrgetter("rank"))
        return request

    def advance(self, plan: StepPlan) -> None:
        """Counts the rows of a step as scheduled; it is about to be launched.

        From here on a prompt whose last chunk is in flight counts as computed.
        """
        for request, (_, num_new, _) in zip(plan.requests, plan.spans, strict=True):
            if request.phase is Phase.PREFILLING:
                request.num_scheduled += num_new
                if request.num_scheduled < request.num_tokens:
                    continue
                request.phase = Phase.DECODING
                self.num_prefilling -= 1
            request.num_steps_in_flight += 1

    def fall_back(self) -> None:
        """Takes back what was scheduled and not computed: nothing is in flight any more."""
        for request in self._running:
            request.num_steps_in_flight = 0
            if request.num_scheduled > request.num_computed:
                request.num_scheduled = request.num_computed
                if request.phase is Phase.DECODING:
                    request.phase = Phase.PREFILLING
                    self.num_prefilling += 1

    def preempt(self, request: Request) -> None:
        """Takes the request's slot and pages; it waits, and resumes by computing all its tokens."""
        self._leave(request)
        request.prompt_logprobs.clear()
        self.num_preemptions += 1
        self._wait(request)

    def finish(self, request: Request) -> None:
        """Ends a request, wherever it is."""
        del self._by_id[request.request_id]
        if request.phase is Phase.WAITING:
            self.num_waiting -= 1
        else:
            self._leave(request)
        request.phase = Phase.FINISHED
        if len(self._heap) > 2 * self.num_waiting + 64:
            self._heap = [entry for entry in self._heap if entry[1].phase is Phase.WAITING]
            heapq.heapify(self._heap)

    def _wait(self, request: Request) -> None:
        request.phase = Phase.WAITING
        request.num_cached_seen = -1
        self.num_waiting += 1
        heapq.heappush(self._heap, (request.rank, request))

    def _leave(self, request: Request) -> None:
        if request.phase is Phase.PREFILLING:
            self.num_prefilling -= 1
        self._running.remove(request)
        request.stay += 1
        request.is_held = False
        slot, request.slot = request.slot, -1
        self._runner.remove_sequence(slot)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def _lead(self, request: Request) -> Lead | None:
        return self._shared.lead(request, self._running) if self._has_cache else None

    def _first_waiting(self) -> Request | None:
        while self._heap and self._heap[0][1].phase is not Phase.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def _num_kept_free(self, running: Sequence[Request]) -> int:
        """Pages that a newcomer leaves to these: what prompts were promised, and one for each."""
        promised = sum(
            self._runner.num_pages_needed(request.slot, request.num_tokens - request.num_scheduled)
            for request in running
            if request.phase is Phase.PREFILLING
        )
        return min(len(running), self._runner.num_pages // 8) + promised
