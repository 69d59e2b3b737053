"""Importing transformers for its tokenizers alone."""

from __future__ import annotations

import pytest

from orhpc.models.bundled import ensure
from tests.unit.process.test_lean_openreward import run_python

AS_ONE = "sys.stderr = sys.stdout\n"
"""What is logged counts as well."""


@pytest.mark.slow
def test_a_tokenizer_is_the_same_without_torch_and_torch_can_be_imported_later() -> None:
    folder = ensure("bundled:tiny")
    tokenized = f"""
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})
print(tokenizer("What is 12 + 30?").input_ids, tokenizer.decode([40, 41, 42]), tokenizer.eos_token_id)
"""
    lean = f"""
import os, sys
from orhpc.process.lean_transformers import import_without_torch
import_without_torch()
{tokenized}
assert "torch" not in sys.modules and "TRANSFORMERS_NO_ADVISORY_WARNINGS" not in os.environ
import torch
assert torch.ones(2).sum() == 2
"""
    assert run_python(AS_ONE + lean) == run_python(AS_ONE + tokenized)


@pytest.mark.slow
def test_a_process_that_has_torch_keeps_transformers_models() -> None:
    code = """
import torch
from orhpc.process.lean_transformers import import_without_torch
import_without_torch()
from transformers import AutoModelForCausalLM
print(AutoModelForCausalLM.from_config.__name__)
"""
    assert run_python(AS_ONE + code) == "from_config\n"
