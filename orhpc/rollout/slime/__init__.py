"""Functions written for slime or miles, called in orhpc: ``slime:package.module:function`` in the config.

In comes ``generate(args, sample, sampling_params)`` as ``rollout.custom_agent`` or ``rm(args, sample)`` as
``rollout.custom_reward`` (``slime-group:`` for ``rm(args, samples)``); out go an agent and a reward function
of orhpc.  The function sees ``args`` from the run's config (:mod:`.arguments`), slime's
:class:`.sample.Sample`, and modules under slime's names (:mod:`.modules`), through which it samples from this
run's engines (:mod:`.calls`).  What it returns becomes a rollout only of tokens that were sampled
(:mod:`.rebuilding`).
"""

from orhpc.rollout.slime.functions import SlimeReward, is_for_slime, load_generate, load_reward

__all__ = ["SlimeReward", "is_for_slime", "load_generate", "load_reward"]
