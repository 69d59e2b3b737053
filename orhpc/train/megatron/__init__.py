"""The Megatron trainer: megatron-core's model, optimiser and schedules under the trainer's interface.

``backend`` puts the parts together; ``families`` says what a model's ``config.json`` means in
megatron-core's words, ``model`` builds it, ``layers`` and ``attention`` have what some families' layers
do beyond megatron-core's, ``plain`` has the modules it is built of where TransformerEngine is not,
``packing`` cuts a micro-batch to a rank's share, ``schedule`` runs micro-batches through the pipeline,
``optim`` steps, ``export`` gathers weights, ``state`` names what a checkpoint holds.
"""
