"""The head's Triton kernels against its plain implementation, in Triton's interpreter without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BODY = """
import torch
from orhpc.train.loss import logit_kernels as kernels
from orhpc.train.loss.head import LogitScaling, _combined, _gradient_, _statistics

torch.manual_seed(0)
for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
    for cap in (None, 4.0):
        for columns in (37, 4096, 9001):
            scaling = LogitScaling(1.3, cap, 0.7)
            logits = (torch.randn(6, columns) * 3).to(dtype)
            targets = torch.tensor([0, columns - 1, 5, -3, columns + 2, 7])
            found = _combined(kernels.row_statistics(logits.clone(), targets, scaling), None)
            scaled, wanted = _statistics(logits.float().clone(), targets, scaling)
            wanted = _combined(wanted, None)
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            of_logprob, of_entropy = torch.randn(6), torch.randn(6)
            for second in (None, of_entropy):
                ours, theirs = logits.clone(), scaled.clone()
                lse, entropy, _ = wanted
                kernels.gradient_(ours, targets, lse, entropy, of_logprob, second, scaling)
                _gradient_(theirs, targets, lse, entropy, (of_logprob, second), scaling)
                assert float((ours.float() - theirs).abs().max()) <= close * float(theirs.abs().max())
print("equal")
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton comes with CUDA builds of torch"
)
def test_the_kernels_compute_what_the_plain_path_does() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", BODY],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "equal\n", done.stderr
