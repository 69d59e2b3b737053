"""Imported for what it does: TransformerEngine comes in as in a trainer's process, before anything else."""

from orhpc.train.weights.fp8 import choose_scales

choose_scales(power_of_two=False)  # which TransformerEngine looks at as it is imported
# Where a machine has two cuDNNs, TransformerEngine must not find the other one loaded already.
import orhpc.train.megatron.backend  # noqa: E402, F401
