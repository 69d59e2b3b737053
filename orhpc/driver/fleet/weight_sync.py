"""Weight sync from the trainer to the engines; engines serve only after a complete sync.

The driver makes one call to each rank for a whole sync; the ranks gather the buckets and make the engines'
requests for each (:mod:`orhpc.train.weights.rank_sync`).  An engine on the trainer's devices maps, on each
device, the bucket of the rank on that device; engines with dedicated devices receive a broadcast from rank 0.
With ``engine.sync_own_experts`` the bucket of each device has only the experts that the engine holds there.
During the sync the engines' weight version is ``syncing``, which no worker accepts as a policy version.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from orhpc.driver.fleet.actors import call
from orhpc.errors import ConfigError, EngineUnavailable, WeightSyncFailed
from orhpc.train.actor import TrainerRank
from orhpc.train.weights.expert_blocks import ExpertBlocks, blocks_of_engines
from orhpc.train.weights.update_requests import Receiver, SyncPlan, SyncSeconds

if TYPE_CHECKING:
    from orhpc.driver.fleet.engines import Engines
    from orhpc.driver.fleet.trainers import Trainers

SYNCING = "syncing"
_MAX_NAMES_SHOWN = 3


class WeightSync:
    """Sends the weights of the trainers to the engines."""

    def __init__(self, trainers: Trainers, engines: Engines, exchange: Path) -> None:
        """``exchange``: folder shared by trainers and engines, for weights on disk; created when needed."""
        self._trainers = trainers
        self._engines = engines
        self._exchange = exchange
        self._settings = engines.config.engine

    async def send(self, version: int) -> dict[str, float]:
        """Send this version to all engines that are up; returns ``sync_bytes`` and ``sync_seconds_*``.

        Before the call, engines on the trainers' devices must have resumed the memory of their weights, and
        the others must be paused.

        Raises:
            WeightSyncFailed: engines may hold part of the new weights; none serves until a complete sync
                has followed.
            RayLost, InfraError, TrainerHangs, OutOfMemory: the same, and the trainers have to recover first.
        """
        pool = self._engines.pool
        started = time.monotonic()
        try:
            await pool.update_weight_version(SYNCING)
            await pool.each(lambda c: c.begin_update())
            await self._engines.prepare_started()
            if self._settings.sync == "disk":
                report = await self._from_disk()
            else:
                report = await self._in_buckets()
            await pool.each(lambda c: c.end_update())
            if self._settings.check_weights:
                report["sync_seconds_check"] = await self._check()
            await pool.update_weight_version(version)
        except (EngineUnavailable, TimeoutError, ConfigError) as error:
            raise WeightSyncFailed(f"sync of version {version} failed: {error}") from error
        pool.published_version = version
        return report | {"sync_seconds_total": time.monotonic() - started}

    async def _in_buckets(self) -> dict[str, float]:
        timeout = self._settings.sync_timeout_s
        engines, trainers = self._engines, self._trainers
        began = time.monotonic()
        if engines.by_broadcast and engines.group_name is None:
            await self._form_group(timeout)
        joined = time.monotonic() - began
        reports = await trainers.send_weights(self._plan())
        failures = {url: why for report in reports for url, why in report.failures.items()}
        for url, why in failures.items():
            engines.pool.mark_down(url, why)
        if failures:
            raise EngineUnavailable("; ".join(list(failures.values())[:_MAX_NAMES_SHOWN]))
        return {
            "sync_bytes": float(reports[0].nbytes),
            "sync_seconds_join": joined,
            **{
                f"sync_seconds_{part}": max(getattr(report.seconds, part) for report in reports)
                for part in SyncSeconds._fields
            },
        }

    def _plan(self) -> SyncPlan:
        """What the ranks need to know; engines that are down are left out."""
        engines, down = self._engines, self._engines.pool.down()
        mapping = {url: ranks for url, ranks in engines.by_handle.items() if url not in down}
        receiving, world = list(engines.by_broadcast), len(self._trainers.ranks)
        # All ranks share the requests: a large model has thousands of buckets.
        serving = {url: [n * world // len(receiving)] for n, url in enumerate(receiving)}
        return SyncPlan(
            receivers=tuple(
                Receiver(
                    url,
                    tuple(ranks),
                    url in mapping,
                    engines.pool.client(url).update_fields(broadcast=url in serving),
                )
                for url, ranks in (mapping | serving).items()
            ),
            group_name=engines.group_name or "",
            timeout_s=self._settings.sync_timeout_s,
            key=engines.key,
            blocks=self._expert_blocks(),
            deltas=self._settings.delta_sync,
        )

    def _expert_blocks(self) -> ExpertBlocks | None:
        """The experts that each rank sends; None: all, as one broadcast serves all ranks of the receivers.

        Engines that are down count too, so that the ranks keep their buckets.
        """
        engine = self._settings
        if not engine.sync_own_experts or self._engines.by_broadcast:
            return None
        return blocks_of_engines(
            self._engines.by_handle, tp=engine.tp, ep=engine.ep, ranks=len(self._trainers.ranks)
        )

    async def _form_group(self, timeout_s: float) -> None:
        """Form a group of rank 0 and the engines with dedicated devices."""
        engines, host = self._engines, self._trainers.host
        port = await self._trainers.hold_port()
        group = f"orhpc-weights-{port}"
        world = 1 + engines.receivers
        joining = call(
            self._trainers.ranks[0].join_weight_group.remote(host, port, world, group, timeout_s),
            "trainer join_weight_group",
        )
        announcing = engines.pool.init_weights_update_group(
            master_address=host, master_port=port, rank_offsets=engines.by_broadcast,
            world_size=world, group_name=group, backend=engines.group_backend,
        )  # fmt: skip
        await asyncio.wait_for(asyncio.gather(joining, announcing), timeout_s)
        engines.enter_group(group)

    async def _from_disk(self) -> dict[str, float]:
        folder, nbytes, seconds = await self._export()
        try:
            await self._engines.pool.update_weights_from_disk(str(folder), flush_cache=False)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return {"sync_bytes": float(nbytes), "sync_seconds_gather": seconds}

    async def _export(self) -> tuple[Path, int, float]:
        """Write the weights in the engines' format; returns folder, bytes and seconds."""
        started = time.monotonic()
        folder = self._exchange / "weights"
        shutil.rmtree(folder, ignore_errors=True)
        written = await self._trainers.all(TrainerRank.export_hf, str(folder), for_engines=True)
        return folder, sum(f["size"] for f in written[0]), time.monotonic() - started

    async def _check(self) -> float:
        """Compare the engines' weights with an export of the trainer's weights, bit for bit.

        The engines' own checksums before and after they load the export must be equal, so tensors that an
        engine fuses or splits are compared in that form.
        """
        started = time.monotonic()
        pool = self._engines.pool
        sent = await pool.each(lambda c: c.weight_checksums())
        folder, _, _ = await self._export()
        try:
            await pool.update_weights_from_disk(str(folder), flush_cache=False)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        read = await pool.each(lambda c: c.weight_checksums())
        for url, sums in sent.items():
            names = sums.keys() | read[url].keys()
            wrong = sorted(name for name in names if sums.get(name) != read[url].get(name))
            if wrong:
                raise WeightSyncFailed(
                    f"engine {url}: {len(wrong)} of {len(names)} tensors are not the trainer's: "
                    f"{', '.join(wrong[:_MAX_NAMES_SHOWN])}"
                )
        return time.monotonic() - started
