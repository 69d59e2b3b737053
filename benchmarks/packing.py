"""Token slots left empty by the batch planner, against lower bounds for any packing.

    python benchmarks/packing.py [--budget 8192] [--samples 512]

``sum`` is ceil(tokens / budget), which ignores that samples cannot be cut.  ``L2`` (Martello and Toth,
Lower bounds and reduction procedures for the bin packing problem, 1990, section 3) counts how many of the
long samples can share a micro-batch at all, and is a true lower bound as well.  For ranks > 1 both are
rounded up to a multiple of the ranks, which all have the same number of micro-batches.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from orhpc.train.batch import plan_batches
from orhpc.types import Location, Sample


def distributions(n: int, budget: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Typical lengths of ``n`` rollouts, in tokens."""
    mixture = rng.random(n)
    shapes = {
        "single-turn, short": rng.normal(300, 60, n),
        "reasoning (lognormal)": rng.lognormal(7.0, 0.8, n),
        "tool use (long tail)": rng.pareto(1.5, n) * 400 + 200,
        "solved or capped": np.where(mixture < 0.8, rng.normal(700, 200, n), budget // 2),
        "two environments": np.where(mixture < 0.5, rng.normal(250, 50, n), rng.normal(3000, 500, n)),
        "uniform": rng.uniform(64, budget / 2, n),
        "near half the budget": rng.uniform(budget * 0.3, budget * 0.7, n),
    }
    return {name: np.clip(values, 16, budget).astype(int) for name, values in shapes.items()}


def l2_bound(lengths: np.ndarray, budget: int) -> int:
    """Martello and Toth's L2: the best bound over all splits into long, medium and short samples."""
    best = -(-int(lengths.sum()) // budget)
    for short in np.unique(lengths[lengths <= budget // 2]):
        alone = int((lengths > budget - short).sum())
        medium = lengths[(lengths <= budget - short) & (lengths > budget // 2)]
        small = lengths[(lengths <= budget // 2) & (lengths >= short)]
        overflow = int(small.sum()) - (len(medium) * budget - int(medium.sum()))
        best = max(best, alone + len(medium) + max(0, -(-overflow // budget)))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=512)
    args = parser.parse_args()
    print(f"{args.samples} samples a mini-batch, budget {args.budget} tokens a micro-batch and rank")
    print(f"{'lengths':28}{'ranks':>6}{'bins':>6}{'sum':>6}{'L2':>6}{'padding':>9}{'plan ms':>9}")
    for name, lengths in distributions(args.samples, args.budget, np.random.default_rng(0)).items():
        samples = [Sample(str(i), int(n), int(n) // 2, 0.0, Location()) for i, n in enumerate(lengths)]
        for ranks in (1, 8):
            started = time.perf_counter()
            plan = plan_batches(samples, ranks=ranks, n_minibatches=1, max_tokens=args.budget)
            seconds = time.perf_counter() - started
            bins = sum(len(batches) for batches in plan.minibatches[0].ranks)
            bounds = (-(-int(lengths.sum()) // args.budget), l2_bound(lengths, args.budget))
            by_sum, by_l2 = (-(-bound // ranks) * ranks for bound in bounds)
            counts = f"{name:28}{ranks:6}{bins:6}{by_sum:6}{by_l2:6}"
            print(f"{counts}{plan.padding:9.2%}{seconds * 1e3:9.1f}")


if __name__ == "__main__":
    main()
