"""Checks of the Megatron trainer's FP8 products on one GPU; each yields rows of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from orhpc.train.weights.fp8 import quantize_blocks
from tests.gpu import megatron_kit as kit
from tests.gpu.megatron_kit import Row, Rows


def fp8() -> Rows:
    """Blockwise FP8 products, small and dense."""
    folder = kit.make_folder("fp8", {**kit.SMALL, **kit.FAMILIES["llama"]}, "cuda")
    samples = kit.make_samples(kit.SHORT, kit.SMALL["vocab_size"])
    theirs = kit.reference(folder, samples, "cuda")
    trainer = kit.start(kit.make_config(precision="fp8"), folder)
    mean, most = kit.error(kit.trainer_logprobs(trainer, samples), theirs["float32"])
    norm = trainer.step([kit.planned(samples, 1)], step=0)["grad_norm"]
    floor, _ = kit.error(theirs["bf16"], theirs["float32"])
    kit.close(trainer)
    note = f"mean {mean:.4f} largest {most:.3f} off float32 (bf16 {floor:.4f}), gradient norm {norm:.3f}"
    yield Row("fp8: blockwise", floor < mean < 0.2 and norm > 0, note)
    yield _fp8_asleep(folder, kit.planned(samples, 1))
    yield _one_quantization()


def _fp8_asleep(folder: Path, minibatch: Any) -> Row:
    """Memory of quantized weights, and a step's norm with and without a preceding sleep, which drops them."""
    given, norms = 0, []
    for sleeps in (False, True):
        trainer = kit.start(kit.make_config(precision="fp8"), folder)
        trainer.step([minibatch], step=0)
        if sleeps:
            layers = [m for model in trainer.backend._models for m in model.modules()]
            linear = sum(
                p.numel()
                for m in layers
                if hasattr(m, "_fp8_workspaces")
                for p in m.parameters(recurse=False)
            )
            given = torch.cuda.memory_allocated()
            for weights in trainer.backend._cached_tensors._quantized:
                weights.clear()
            given -= torch.cuda.memory_allocated()
            trainer.sleep()
            trainer.wake()
        norms.append(trainer.step([minibatch], step=1)["grad_norm"])
        kit.close(trainer)
    note = f"{given / linear:.3f} bytes a weight given back, 2 expected; gradient norms {norms}"
    return Row("fp8: asleep", 1.9 < given / linear < 2.2 and norms[0] == norms[1], note)


def _one_quantization() -> Row:
    """The trainer's blocks of one weight against the engines', with sizes that are no multiples of blocks."""
    import transformer_engine_torch as engine  # pyright: ignore[reportMissingImports]
    from transformer_engine.common.recipe import Float8BlockScaling  # pyright: ignore[reportMissingImports]
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import (  # pyright: ignore[reportMissingImports]
        Float8BlockQuantizer,
    )

    power_of_two = Float8BlockScaling().fp8_quant_fwd_weight.power_2_scale
    theirs = Float8BlockQuantizer(
        engine.DType.kFloat8E4M3, rowwise=True, columnwise=False, force_pow_2_scales=power_of_two
    )
    weight = torch.randn((1152, 1040), device="cuda", dtype=torch.bfloat16) * 0.02
    found = theirs(weight)
    values, scales = quantize_blocks(weight, power_of_two=power_of_two)
    equal = float((found._rowwise_data == values.view(torch.uint8)).float().mean())
    own = found._rowwise_scale_inv[: scales.shape[0], : scales.shape[1]]
    off = float(((own - scales).abs() / scales).max())
    note = f"{equal:.6f} of the values equal, scales off by {off:.1e}, powers of two {power_of_two}"
    return Row("fp8: quantised as the engines' weights are", equal == 1 and off == 0, note)
