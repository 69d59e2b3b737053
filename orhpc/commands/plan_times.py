"""The part of ``orhpc plan`` about times: predicted, or measured by an earlier run of the config."""

from __future__ import annotations

from collections.abc import Iterator

from orhpc.commands.plan_calibration import Calibration
from orhpc.commands.plan_measured import MeasuredTimes
from orhpc.errors import ConfigError
from orhpc.launch.checks import fit
from orhpc.launch.checks.card import FoundCard
from orhpc.plan.faster import advice
from orhpc.plan.run_plan import RunPlan
from orhpc.plan.speeds import speed
from orhpc.plan.step_errors import Error
from orhpc.plan.step_time import Phase, StepTimes, predict
from orhpc.plan.sync_time import SyncTime
from orhpc.plan.workload import Workload


def time_lines(
    run: RunPlan,
    card: FoundCard,
    work: Workload,
    measured: MeasuredTimes | None,
    calibration: Calibration | None = None,
) -> Iterator[str]:
    """Yield the lines about the times of a step of ``work``, and about its weight sync."""
    times = predict(run, card.name, work)
    if calibration is not None:
        times = times.calibrated(calibration.factors)
    seen = {} if measured is None else dict(measured.phases)
    yield ""
    yield _head(times, card)
    if times.card is None and not seen:
        yield f"  not predicted: {times.phases[0].why}"
        return
    for phase in times.phases:
        factor = times.factors.get(phase.name)
        yield _line(phase, seen.get(phase.name), factor, known=not times.outside)
    yield _total(times, measured)
    if times.sync is not None:
        yield f"  sync: {sync_text(times.sync)}"
    if times.overlap:
        yield f"  overlap: {times.overlap}"
    if times.card is not None and times.outside:
        yield f"  errors not known, because never measured: {', '.join(times.outside)}"
    if measured is not None:
        yield f"  measured: {measured.where}"
    if calibration is not None:
        yield f"  calibrated: measured over predicted times of {calibration.where}"
    if (longest := times.longest(seen)) is not None:
        shorter = advice(run, times, longest, _can_start)
        unknown = any(phase.seconds is None and phase.name not in seen for phase in times.phases)
        of = " of what is known" if unknown else ""
        yield f"  longest{of}: {longest}" + (f"; {shorter}" if shorter else "")


def _head(times: StepTimes, card: FoundCard) -> str:
    work = times.work
    where = f" on {times.card.name} ({card.source})" if times.card is not None else ""
    lengths = ", assumed: --rollout-tokens" if work.assumed else ""
    return (
        f"seconds of a step{where}: {work.rollouts} rollouts of {work.length:.0f} tokens{lengths}; "
        f"longest answer {work.longest:.0f}"
    )


def _line(phase: Phase, measured: float | None, factor: float | None, *, known: bool) -> str:
    if measured is not None:
        also = "not predicted" if phase.seconds is None else f"predicted {phase.seconds:.1f}"
        return f"  {phase.name:<8}{measured:8.1f}  measured; {also}"
    if phase.seconds is None:
        return f"  {phase.name:<8}       -  not predicted: {phase.why}"
    calibrated = "" if factor is None else f"calibrated by {factor:.2f}"
    notes = [note for note in (calibrated, _error(phase.error) if known else "", phase.why) if note]
    return f"  {phase.name:<8}{phase.seconds:8.1f}  {'; '.join(notes)}".rstrip()


def _total(times: StepTimes, measured: MeasuredTimes | None) -> str:
    predicted = times.seconds
    if measured is not None and measured.step is not None:
        also = "not predicted" if predicted is None else f"predicted {predicted:.1f}"
        return f"  {'step':<8}{measured.step:8.1f}  measured; {also}"
    if predicted is None:
        return f"  {'step':<8}       -  not predicted, because a phase is not"
    return f"  {'step':<8}{predicted:8.1f}  {'' if times.outside else _error(times.error)}".rstrip()


def _error(error: Error | None) -> str:
    """How far predictions were off where they could be compared; empty if they could not."""
    return "" if error is None else f"measured within {error.largest:.0%} (median {error.median:.0%})"


def sync_text(sync: SyncTime) -> str:
    """Bytes of the sender and of each receiver, buckets, and what each link takes."""
    parts = [f"{sync.sent / 1e9:.2f} GB, {sync.buckets} buckets, {sync.tensors} tensors"]
    if sync.gathered:
        parts.append(
            f"each trainer rank gets {sync.gathered / 1e9:.2f} GB of others over {sync.gather_link} in "
            f"{sync.gather_s:.1f} s"
        )
    if sync.receivers:
        parts.append(
            f"rank 0 sends {sync.sent / 1e9:.2f} GB to {sync.receivers} engine ranks, each of which gets all "
            f"of it, over {sync.broadcast_link} in {sync.broadcast_s:.1f} s"
        )
    parts.append(f"engines load in {sync.load_s:.1f} s")
    if sync.nominal:
        parts.append(f"network at its nominal {speed('network') / 1e9:.0f} GB/s a GPU")
    return "; ".join(parts)


def _can_start(run: RunPlan) -> bool:
    try:
        fit.check_engines(run)
        fit.check_fit(run)
    except ConfigError:
        return False
    return True
