"""Import this module for its effect: TransformerEngine is imported first, as in a trainer's process."""

from orhpc.train.weights.fp8 import choose_scales

choose_scales(power_of_two=False)  # TransformerEngine reads this when it is imported
# On a machine with two cuDNNs, the other one must not be loaded before TransformerEngine.
import orhpc.train.megatron.backend  # noqa: E402, F401
