"""The generations that a function written for slime requests from the engines, with a record of each."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orhpc.errors import OrhpcError, UserCodeError
from orhpc.rollout.sampling_policy import PARAMETERS, difference
from orhpc.rollout.transcript import RolloutBuilder, RolloutRequest
from orhpc.rollout.turn_sampling import sample_turn
from orhpc.types import FinishReason, Generation, Sampling

if TYPE_CHECKING:
    from orhpc.rollout.agent import AgentContext

_active: ContextVar[Calls] = ContextVar("calls of the rollout")


@dataclass(frozen=True, slots=True)
class Call:
    """One answered request."""

    prompt: list[int]
    sampled: list[int]
    pieces: list[Generation]
    """One generation, or several if an engine aborted it and it was continued."""
    finish: FinishReason


@dataclass(slots=True)
class Calls:
    """All requests of one rollout."""

    context: AgentContext
    request: RolloutRequest
    name: str
    """Of the function, for messages."""
    texts: dict[str, list[int]]
    """Token ids of texts that were sent or sampled, so that the next text continues with exactly these."""
    made: list[Call] = field(default_factory=list)
    begun: int = 0
    """Number of calls that were sent to an engine; some may be running at the same time."""
    engine_seconds: float = 0.0
    failure: OrhpcError | None = None
    """The first failure of an engine: the function may have caught it, but the rollout cannot be used."""

    @classmethod
    def current(cls) -> Calls:
        """Those of the rollout that is running; raises UserCodeError outside of one."""
        try:
            return _active.get()
        except LookupError:
            raise UserCodeError("engines can only be asked within a generate function for slime") from None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within the block, :meth:`current` returns this object, also in tasks started there."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    async def generate(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request to SGLang's ``/generate``, in SGLang's form.

        Raises:
            UserCodeError: it asks for something that cannot be trained on, or is not supported.
            EngineUnavailable, RoutesMissing, PromptTooLong: as in :func:`sample_turn`.
        """
        parameters = dict(payload.get("sampling_params") or {})
        sampling = self._sampling(parameters)
        text = payload.get("text")
        prompt = (
            self._ids(text) if isinstance(text, str) else [int(i) for i in payload.get("input_ids") or []]
        )
        if not prompt or payload.get("image_data"):
            raise UserCodeError(f"{self.name}: a request needs text or input_ids, and no images")
        call = await self._call(prompt, sampling)
        skip = bool(parameters.get("skip_special_tokens", True))
        answer = self.context.tokenizer.decode(
            call.sampled, skip_special_tokens=skip, spaces_between_special_tokens=False
        )
        if isinstance(text, str):
            self.texts[text], self.texts[text + answer] = prompt, [*prompt, *call.sampled]
        return self._answer(call, answer)

    async def _call(self, prompt: list[int], sampling: Sampling) -> Call:
        room = min(sampling.max_new_tokens, self.context.rollout.max_total_tokens - len(prompt))
        if room <= 0:
            return Call(prompt, [], [], FinishReason.LENGTH)
        pieces: list[Generation] = []

        async def recorded(prompt_ids: Sequence[int], given: Sampling, **more: Any) -> Generation:
            pieces.append(await self.context.generate(prompt_ids, given, **more))
            return pieces[-1]

        builder = RolloutBuilder(tokens=array("i", prompt))
        context = replace(self.context, generate=recorded, sampling=sampling)
        number, self.begun = self.begun, self.begun + 1
        try:
            finish = await sample_turn(context, self.request, builder, number)
        except OrhpcError as error:
            self.failure = self.failure or error
            raise
        finally:
            self.engine_seconds += builder.waits.engine
        call = Call(prompt, builder.sampled, pieces, finish)
        self.made.append(call)
        return call

    def _sampling(self, parameters: Mapping[str, Any]) -> Sampling:
        own = self.context.sampling
        if parameters.get("stop"):
            raise UserCodeError(
                f"{self.name}: sampling_params['stop'] is not supported; use stop_token_ids or cut the tokens"
            )
        changed = {name: parameters[name] for name in PARAMETERS if parameters.get(name) is not None}
        most = parameters.get("max_new_tokens")
        sampling = replace(
            own,
            **changed,
            max_new_tokens=own.max_new_tokens if most is None else int(most),
            stop_token_ids=(*own.stop_token_ids, *(parameters.get("stop_token_ids") or ())),
        )
        found = difference(sampling, own)
        if found is not None and not self.context.evaluation:
            raise UserCodeError(f"{self.name}: sampling_params: {found}")
        return sampling

    def _ids(self, text: str) -> list[int]:
        """Ids of a text; what was sent or sampled before is not tokenized again."""
        known = max((t for t in self.texts if text.startswith(t)), key=len, default="")
        rest = text[len(known) :]
        more = self.context.tokenizer.encode(rest, add_special_tokens=False) if rest else []
        return [*self.texts.get(known, []), *more]

    @staticmethod
    def _answer(call: Call, text: str) -> dict[str, Any]:
        logprobs = [float(p) for piece in call.pieces for p in piece.logprobs_N]
        versions = [piece.version for piece in call.pieces]
        return {
            "text": text,
            "output_ids": call.sampled,
            "meta_info": {
                "finish_reason": {"type": str(call.finish), "length": len(call.sampled)},
                "output_token_logprobs": [(p, i, None) for p, i in zip(logprobs, call.sampled, strict=True)],
                "prompt_tokens": len(call.prompt),
                "completion_tokens": len(call.sampled),
                "cached_tokens": sum(piece.cached_tokens for piece in call.pieces[:1]),
                **({"weight_version": str(min(versions))} if versions else {}),
            },
        }
