"""The FSDP backend: transformers' models, sharded by torch."""
