"""A conversation with a model folder in the terminal: ``python -m orhpc.models.conversation FOLDER``.

Runs in a process of its own, because it loads torch.  Messages are lines of standard input; an empty line is
skipped, ``/new`` begins another conversation, and the end of the input (Ctrl-D) ends it.  Ctrl-C ends an
answer.  On a GPU if there is one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from orhpc.process.terminal import guarded_output

_BEGIN_AGAIN = "/new"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--system")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--trust-remote-code", action="store_true")
    options = parser.parse_args(arguments)
    with guarded_output():  # the model may write control characters
        return _talk(options)


def _talk(options: argparse.Namespace) -> int:
    talk = Conversation(options.folder, trust_remote_code=options.trust_remote_code)
    beginning = [{"role": "system", "content": options.system}] if options.system is not None else []
    messages = list(beginning)
    for line in _lines():
        if line == _BEGIN_AGAIN:
            messages = list(beginning)
            continue
        messages.append({"role": "user", "content": line})
        answer = talk.answer(messages, max_tokens=options.max_tokens, temperature=options.temperature)
        messages.append({"role": "assistant", "content": answer})
    return 0


def _lines() -> Iterator[str]:
    """Typed or piped lines without the empty ones."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            return
        if line:
            yield line


class Conversation:
    """A loaded model and its tokenizer."""

    def __init__(self, folder: str, *, trust_remote_code: bool) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        from orhpc.models.seeing import transformers_config

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        config = transformers_config(folder, trust_remote_code=trust_remote_code)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype="auto", trust_remote_code=trust_remote_code
        )
        self._model = model.to(device).eval()

    def answer(self, messages: Sequence[dict[str, str]], *, max_tokens: int, temperature: float) -> str:
        """Sample an answer, print it as it is sampled, and return it.

        Without a chat template the last message alone is continued, as text.
        """
        from transformers import TextStreamer

        if self._tokenizer.chat_template:
            inputs = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = self._tokenizer(messages[-1]["content"], return_tensors="pt")
        inputs = inputs.to(self._model.device)
        streamer = TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        settings = sampling if temperature > 0 else {"do_sample": False}
        try:
            tokens = self._model.generate(
                **inputs, max_new_tokens=max_tokens, streamer=streamer, **settings,
                pad_token_id=self._tokenizer.pad_token_id or self._tokenizer.eos_token_id,
            )  # fmt: skip
        except KeyboardInterrupt:
            print("\n(stopped)")
            return ""
        length = inputs["input_ids"].shape[1]
        return self._tokenizer.decode(tokens[0, length:], skip_special_tokens=True)


if __name__ == "__main__":
    sys.exit(main())
