"""A pool of engines: load balancing, prefix affinity, failover, and a check of the weight version."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from orhpc.errors import ConfigError, EngineUnavailable, InfraError
from orhpc.rollout.client.admission import Admission
from orhpc.rollout.client.engine_calls import EngineCalls
from orhpc.rollout.client.http import EngineClient
from orhpc.rollout.client.member import Member, spread
from orhpc.rollout.client.wire import TokenIds, aborted
from orhpc.types import Generation, PlacedImage, Sampling
from orhpc.wire.engine_requests import Connections
from orhpc.wire.routes import RouteShape

log = logging.getLogger(__name__)

_ROUTER_BACKOFF_S = 10.0
_MAX_AFFINITY_KEYS = 1 << 16
"""Number of affinity keys remembered, least recently used first out; far above the rollouts in flight."""


class EnginePool(EngineCalls):
    """The engines of a run, as used by one worker or the driver.

    A request goes to the engine with the fewest tokens in flight; all requests of one ``affinity`` key go to
    the same engine, whose cache holds their prefix, as long as it is up.  A failed engine is marked down at
    once: its requests are repeated on the others, and it is probed until it is healthy and holds exactly
    ``published_version``.  An answer sampled from weights older than the version published when the request
    was sent is discarded and counts as a failure of its engine.

    With ``router``, the URL of an sglang-router in front of the same engines, the first attempt of a request
    goes to the router; if it fails or returns old weights, the engines are called directly.

    ``probes``: whether an engine that is down is probed until it answers, as above; if not, only
    :meth:`readmit` brings it back.  ``retries``: further attempts of a request.  ``recovery_s``: how long a
    request waits when no engine is up.  ``max_in_flight``: requests that are sent at the same time; the
    others wait, those of the oldest rollout (``affinity`` key) first.  Every wait for an engine is bounded.
    ``place``: of this pool among those that use the same engines; each knows its own requests only, so each
    prefers other engines while several have equally few.
    Use the pool within one event loop and :meth:`close` it there.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        key: str | None,
        request_timeout_s: float,
        route_shape: RouteShape | None = None,
        vocabulary: int | None = None,
        retries: int = 3,
        recovery_s: float = 60.0,
        probe_interval_s: float = 1.0,
        control_timeout_s: float = 120.0,
        transfer_timeout_s: float = 600.0,
        router: str | None = None,
        target_only: bool = False,
        probes: bool = True,
        max_in_flight: int | None = None,
        place: int = 0,
    ) -> None:
        if not urls:
            raise ConfigError("an engine pool needs at least one engine")
        self.published_version: int | None = None
        """Policy version that engines must hold to receive requests; None: any."""
        self._connections = Connections(key)
        self._client = lambda url: EngineClient(
            url,
            key=key,
            request_timeout_s=request_timeout_s,
            control_timeout_s=control_timeout_s,
            transfer_timeout_s=transfer_timeout_s,
            route_shape=route_shape,
            vocabulary=vocabulary,
            connections=self._connections,
            target_only=target_only,
        )
        self._members = [Member(self._client(url)) for url in urls]
        start = int(spread(place) * len(urls))
        self._preferred = [*self._members[start:], *self._members[:start]]
        self._sampled_tokens = self._sampled_requests = 0
        self._router = None if router is None else self._client(router)
        self._router_retry_at = 0.0
        self._affinity: OrderedDict[str, Member] = OrderedDict()
        self._retries = retries
        self._recovery_s = recovery_s
        self._probe_interval_s = probe_interval_s
        self._probes = probes
        self._came_up = asyncio.Event()
        self._admission = None if max_in_flight is None else Admission(max_in_flight)
        self._aborting = False

    async def __aenter__(self) -> EnginePool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop probing and close all connections."""
        probes = [m.probe for m in self._members if m.probe is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        await self._connections.close()

    # --- generation -------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: TokenIds,
        sampling: Sampling,
        *,
        rid: str,
        affinity: str,
        routes_start: int | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Sample one continuation; see :meth:`EngineClient.generate`.

        Set a seed in ``sampling`` so that a repeated attempt samples the same tokens.  ``version`` of the
        result sampled all of its tokens: a weight sync begins when the engine has answered all requests, and
        those that arrive meanwhile wait until its end.  Raises EngineUnavailable when all attempts failed;
        PromptTooLong, ConfigError and RoutesMissing at once.
        """
        if self._admission is None:
            return await self._generate(prompt_ids, sampling, rid, affinity, routes_start, images)
        async with self._admission.place(affinity):
            if self._aborting:
                return aborted(len(prompt_ids), self.published_version or 0)
            return await self._generate(prompt_ids, sampling, rid, affinity, routes_start, images)

    def pause(self) -> None:
        """Send no further requests until :meth:`resume`; needs ``max_in_flight``."""
        assert self._admission is not None
        self._admission.pause()

    def resume(self) -> None:
        """Send requests again, those of the oldest rollouts first."""
        assert self._admission is not None
        self._admission.resume()

    async def abort_for_good(self, timeout_s: float) -> None:
        """Abort all generations, and answer all further ones as aborted; needs ``max_in_flight``.

        Engines that do not pause within ``timeout_s`` are left to those who wait for them.
        """
        self._aborting = True
        self._came_up.set()
        self.resume()
        with contextlib.suppress(InfraError, TimeoutError):
            await asyncio.wait_for(self.pause_generation(), timeout_s)

    async def _generate(
        self,
        prompt_ids: TokenIds,
        sampling: Sampling,
        rid: str,
        affinity: str,
        routes_start: int | None,
        images: Sequence[PlacedImage],
    ) -> Generation:
        failure: EngineUnavailable | None = None
        if self._router is not None and routes_start is None and time.monotonic() > self._router_retry_at:
            try:
                return await self._through(self._router, prompt_ids, sampling, rid, affinity, images)
            except EngineUnavailable as error:
                log.info("%s; calling the engines directly", error)
                rid = f"{rid}-direct"
        for attempt in range(self._retries + 1):
            member = await self._choose(affinity, failure)
            if member is None:
                return aborted(len(prompt_ids), self.published_version or 0)
            expected = self.published_version
            tokens = len(prompt_ids) + self._expected_tokens
            member.load += tokens
            try:
                generation = await member.client.generate(
                    prompt_ids,
                    sampling,
                    rid=rid if attempt == 0 else f"{rid}-retry{attempt}",
                    routes_start=routes_start,
                    images=images,
                )
            except EngineUnavailable as error:
                failure = error
                self._take_down(member, str(error))
                continue
            finally:
                member.load -= tokens
            self._sampled_tokens += len(generation.tokens_N)
            self._sampled_requests += 1
            if expected is None or generation.version >= expected:
                return generation
            url = member.client.url
            failure = EngineUnavailable(f"engine {url} serves version {generation.version}, not {expected}")
            self._take_down(member, str(failure))
        raise EngineUnavailable(f"request {rid} failed {self._retries + 1} times; last error: {failure}")

    async def _through(
        self,
        router: EngineClient,
        prompt_ids: TokenIds,
        sampling: Sampling,
        rid: str,
        affinity: str,
        images: Sequence[PlacedImage],
    ) -> Generation:
        """Call the router; after a failure, it is bypassed for a while."""
        expected = self.published_version
        try:
            generation = await router.generate(
                prompt_ids, sampling, rid=rid, routing_key=affinity, images=images
            )
        except EngineUnavailable:
            self._router_retry_at = time.monotonic() + _ROUTER_BACKOFF_S
            raise
        if expected is not None and generation.version < expected:
            raise EngineUnavailable(
                f"router {router.url}: version {generation.version} was served, not {expected}"
            )
        return generation

    async def _choose(self, affinity: str, failure: EngineUnavailable | None) -> Member | None:
        """The engine for a request, once one is up; None if all generations are aborted before."""
        end = time.monotonic() + self._recovery_s
        while True:
            member = self._affinity.get(affinity)
            if member is None or member.down is not None:
                up = [m for m in self._preferred if m.down is None]
                member = min(up, key=lambda m: m.load) if up else None
            if member is not None:
                self._remember(affinity, member)
                return member
            if self._aborting:
                return None
            self._came_up.clear()
            try:
                await asyncio.wait_for(self._came_up.wait(), max(0.0, end - time.monotonic()))
            except TimeoutError:
                reasons = "; ".join(self.down().values())
                raise EngineUnavailable(
                    f"no engine came back within {self._recovery_s:g} s: {reasons}"
                ) from failure

    @property
    def _expected_tokens(self) -> int:
        """How many tokens a request samples: the mean so far, at least 1."""
        return max(1, self._sampled_tokens // max(1, self._sampled_requests))

    def _remember(self, affinity: str, member: Member) -> None:
        self._affinity[affinity] = member
        self._affinity.move_to_end(affinity)
        if len(self._affinity) > _MAX_AFFINITY_KEYS:
            self._affinity.popitem(last=False)

    # --- availability -----------------------------------------------------------------------------

    @property
    def urls(self) -> list[str]:
        """URLs of all engines."""
        return [m.client.url for m in self._members]

    def down(self) -> dict[str, str]:
        """Engines that receive no requests, and why."""
        return {m.client.url: m.down for m in self._members if m.down is not None}

    def mark_down(self, url: str, why: str) -> None:
        """Send an engine no more requests until it is healthy and holds the published version."""
        self._take_down(self._member(url), why)

    async def readmit(self, url: str) -> None:
        """Mark an engine up; raises EngineUnavailable when it is unhealthy or holds another version."""
        member = self._member(url)
        await self._check(member)
        self._bring_up(member)

    def client(self, url: str) -> EngineClient:
        """The client of an engine, whether that is up or not."""
        return self._member(url).client

    def _member(self, url: str) -> Member:
        for member in self._members:
            if member.client.url == url.rstrip("/"):
                return member
        raise ConfigError(f"{url} is not an engine of this pool")

    def _take_down(self, member: Member, why: str) -> None:
        if member.down is None:
            log.warning("engine %s receives no more requests: %s", member.client.url, why)
        member.down = why
        if self._probes and (member.probe is None or member.probe.done()):
            member.probe = asyncio.ensure_future(self._probe(member))

    def _bring_up(self, member: Member) -> None:
        log.info("engine %s receives requests again", member.client.url)
        member.down = None
        self._came_up.set()

    async def _probe(self, member: Member) -> None:
        while member.down is not None:
            await asyncio.sleep(self._probe_interval_s)
            try:
                await self._check(member)
            except InfraError as error:
                if member.down is not None:  # else it was readmitted meanwhile, and is in a sync by now
                    member.down = str(error)
            except ConfigError as error:
                log.error("engine %s is no longer probed: %s", member.client.url, error)
                return
            else:
                self._bring_up(member)

    async def _check(self, member: Member) -> None:
        await member.client.health()
        expected = self.published_version
        if expected is None:
            return
        held = await member.client.weight_version()
        if held != expected:
            raise EngineUnavailable(f"engine {member.client.url} holds version {held}, not {expected}")

    # --- all engines at once ----------------------------------------------------------------------

    async def each(
        self, call: Callable[[EngineClient], Awaitable[Any]], urls: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Call all engines that are up, or those of ``urls``; returns their answers by URL.

        Engines that fail are marked down; then the first failure is raised.
        """
        wanted = None if urls is None else {url.rstrip("/") for url in urls}
        members = [m for m in self._members if m.down is None and (wanted is None or m.client.url in wanted)]
        if not members:
            if wanted is not None and not wanted:
                return {}
            raise EngineUnavailable(f"no engine is up: {'; '.join(self.down().values())}")
        results = await asyncio.gather(*(call(m.client) for m in members), return_exceptions=True)
        failures = [r for r in results if isinstance(r, BaseException)]
        for member, result in zip(members, results, strict=True):
            if isinstance(result, InfraError):
                self._take_down(member, str(result))
        if failures:
            raise failures[0]
        return {m.client.url: result for m, result in zip(members, results, strict=True)}
