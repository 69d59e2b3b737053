"""The Megatron trainer: megatron-core's model, optimizer and schedules behind the trainer's interface.

``backend`` assembles the parts; ``model_config`` translates a model's ``config.json`` to
megatron-core's settings, ``model`` builds it and ``load`` fills it with weights, ``layers`` and
``attention`` add features of some families that megatron-core lacks, ``plain`` has replacements for
TransformerEngine's modules, ``packing`` cuts a micro-batch to a rank's share, ``schedule`` runs
micro-batches through the pipeline, ``optim`` steps, ``export`` gathers weights, ``state`` maps optimizer
state to checkpoint tensors.
"""
