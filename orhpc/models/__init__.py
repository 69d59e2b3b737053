"""Models as files describe them: shapes, families, folders, hub, chat formats; no weights."""

from orhpc.models.shape import HfTensor, ModelShape, read_shape, shape_of, vocabulary_of

__all__ = ["HfTensor", "ModelShape", "read_shape", "shape_of", "vocabulary_of"]
