"""Rollouts with images: rendered as the model's processor does, sampled by the CPU engine, kept in files."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from PIL import Image as Pil
from transformers import AutoTokenizer, ProcessorMixin, Qwen2_5_VLProcessor, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from orhpc.config import Config, ModelSettings, RolloutSettings
from orhpc.errors import EngineUnavailable
from orhpc.models.images import ImageProcessor
from orhpc.rollout.agent import run_rollout
from orhpc.rollout.buffer import read_group
from orhpc.rollout.chat import chat_format
from orhpc.rollout.client.wire import generate_body, read_generation
from orhpc.rollout.engines.cpu.batcher import Batcher
from orhpc.rollout.engines.cpu.model import SlotModel, load_model
from orhpc.rollout.engines.cpu.protocol import BadRequest, Limits, parse_generate
from orhpc.rollout.engines.cpu.server import _answer
from orhpc.rollout.environment import answers
from orhpc.rollout.environment.tools import IMAGE_MARK, ToolResult
from orhpc.rollout.images import LEFT_OUT, ImageReader
from orhpc.rollout.loaded_agent import load_agent
from orhpc.rundir.record import RolloutFile, read_arrays, write_rollouts
from orhpc.types import FinishReason, Generation, Image, PlacedImage, Rollout, RolloutEnd, Sampling
from orhpc.wire.images import expanded
from tests.model_configs import SEEING
from tests.scripted import Policy, Room, context, request
from tests.seeing_models import picture, seeing_models
from tests.unit.rollout.kit import call

NAMES = sorted(SEEING)
M = IMAGE_MARK


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return seeing_models(tmp_path_factory.mktemp("seeing"))


def encoded(*data: bytes) -> tuple[str, ...]:
    return tuple(base64.b64encode(one).decode() for one in data)


class PictureRoom(Room):
    """An environment whose prompt has images."""

    def __init__(self, prompt: str, images: tuple[str, ...], answers: dict[str, Any] | None = None) -> None:
        super().__init__(prompt, answers or {})
        self.images = images


def seeing_chat(folder: str) -> Any:
    chat = chat_format(ModelSettings(), AutoTokenizer.from_pretrained(folder))
    chat.image_text = ImageProcessor(folder).text
    return chat


def roll(folder: str, room: Room, lines: list[Any], **options: Any) -> tuple[Rollout, Policy]:
    chat = seeing_chat(folder)
    policy = Policy(chat, lines)
    settings = RolloutSettings(**{k: v for k, v in options.items() if k.startswith("max_image")})
    prepared = context(room, policy, chat, images=ImageReader.of(folder, settings), **options)
    return asyncio.run(run_rollout(prepared, request())), policy


def oracle(folder: str, messages: list[dict[str, Any]]) -> list[int]:
    """The token ids of transformers' own processor."""
    kind: type[ProcessorMixin] = Qwen3VLProcessor if "qwen3" in folder else Qwen2_5_VLProcessor

    class WithoutVideos(kind):  # type: ignore[misc,valid-type]  # its class needs torchvision
        def check_argument_for_proper_class(self, *_: Any) -> None:
            pass

    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    processor: Any = WithoutVideos(images, tokenizer, None, chat_template=tokenizer.chat_template)
    ids = processor.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="np"
    )
    return ids["input_ids"][0].tolist()


def shown(data: bytes) -> dict[str, Any]:
    return {"type": "image", "image": Pil.open(io.BytesIO(data))}


def told(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_those_of_the_models_processor(folders: dict[str, str], name: str) -> None:
    pictures = [picture(200, 90, 1), picture(60, 61, 2, "JPEG"), picture(90, 170, 3, "WEBP")]
    results = [
        ToolResult(f"<|image_pad|>{M}", images=encoded(pictures[1])),
        ToolResult(f"x{M}y{M}", reward=1.0, images=encoded(pictures[2], pictures[0])),
    ]
    room = PictureRoom(f"Look:{M} what?", encoded(pictures[0]), {"see": results})
    turn = call("see") * 2
    rollout, policy = roll(folders[name], room, [turn, "Done."])
    expected = oracle(
        folders[name],
        [
            {"role": "system", "content": [told(_system(folders[name], room))]},
            {"role": "user", "content": [told("Look:"), shown(pictures[0]), told(" what?")]},
            {"role": "assistant", "content": [told(turn)]},
            {"role": "tool", "content": [told("< |image_pad|>"), shown(pictures[1])]},
            {"role": "tool", "content": [told("x"), shown(pictures[2]), told("y"), shown(pictures[0])]},
        ],
    )
    prompt = policy.prompts[1]
    # Text like a control token is split, so that it stays text: all else is equal.
    assert _without(prompt, "<|image_pad|>") == _without(expected, "< |image_pad|>")
    token = ImageReader.of(folders[name], RolloutSettings()).token
    assert [p.image.tokens for p in rollout.images] == _runs(prompt, token)
    assert [prompt[p.start : p.end] for p in rollout.images] == [
        [token] * p.image.tokens for p in rollout.images
    ]
    assert "[image of " in rollout.messages[-2]["content"] and M not in json.dumps(rollout.messages)
    assert not rollout.loss_mask_T[[i for p in rollout.images for i in range(p.start, p.end)]].any()


def _system(folder: str, room: Room) -> str:
    """The system prompt that describes tools, because the template does not take them."""
    chat = seeing_chat(folder)
    ids = chat.prompt_ids("?", tools=room.tools)
    text = chat.codec.decode(ids)
    return text.removeprefix("<|im_start|>system\n").partition("<|im_end|>")[0]


def _without(ids: list[int], text: str) -> list[int]:
    """Remove the bytes of a text, one token each."""
    inner = [i for i in ids if i < 256]
    assert len(inner) > len(text)
    decoded = bytes(_BYTES[i] for i in inner).decode()
    at = decoded.index(text)
    places = [n for n, i in enumerate(ids) if i < 256][at : at + len(text)]
    return [i for n, i in enumerate(ids) if n not in places]


def _bytes() -> list[int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return [letters[letter] for letter in sorted(letters)]


_BYTES = _bytes()


def _runs(ids: list[int], token: int) -> list[int]:
    runs, length = [], 0
    for i in [*ids, -1]:
        if i == token:
            length += 1
        elif length:
            runs.append(length)
            length = 0
    return runs


def test_images_are_bounded_in_number_size_and_by_the_length_limit(folders: dict[str, str]) -> None:
    folder, data = folders["qwen3-vl"], picture(320, 320)
    room = PictureRoom(f"{M}{M}{M}", encoded(data, data, data))
    rollout, policy = roll(folder, room, ["Yes."], max_images=2, max_image_pixels=32 * 32 * 9)
    assert [p.image.tokens for p in rollout.images] == [9, 9]
    assert LEFT_OUT.format(most=2) in seeing_chat(folder).codec.decode(policy.prompts[0])
    long = ToolResult(f"{M}" + "x" * 600 + f"{M}", images=encoded(data, data))
    room = PictureRoom("Go.", (), {"see": [long]})
    options = {"max_total_tokens": 760, "max_response_tokens": 60, "max_image_pixels": 32 * 32 * 9}
    rollout, policy = roll(folder, room, [call("see"), "Yes."], **options)
    assert rollout.length <= 760
    assert [p.image.tokens for p in rollout.images] == [9]  # the second was cut off with the text before it
    assert _runs(policy.prompts[1], rollout.tokens_T[rollout.images[0].start]) == [9]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (encoded(b"no image")[0], "not a readable image (PNG, JPEG, WEBP)"),
        ("data:image/png;base64," + encoded(picture(64, 64))[0], "its data are a URL, not base64"),
        (base64.encodebytes(picture(64, 64)).decode(), "its data are not base64: Non-base64 digit found"),
    ],
)
def test_an_image_that_cannot_be_used_fails_its_rollout(
    folders: dict[str, str], data: str, problem: str
) -> None:
    rollout, _ = roll(folders["qwen3-vl"], PictureRoom(M, (data,)), [])
    assert rollout.end is RolloutEnd.FAILED
    assert rollout.error == f"BadAnswer: the prompt: an image cannot be used: {problem}"


@pytest.mark.parametrize("data", [picture(64, 64), b"no image"])
def test_images_after_the_end_are_not_decoded(folders: dict[str, str], data: bytes) -> None:
    """The model is not shown them, so that none can cost the rollout its reward."""
    last = ToolResult(f"a{M}b", reward=1.0, finished=True, images=encoded(data))
    called = PictureRoom("Go.", (), {"see": [last]})
    answered = PictureRoom("Go.", ())
    answered._terminal = [last]
    for room, line in ((called, call("see")), (answered, "Yes.")):
        rollout, _ = roll(folders["qwen3-vl"], room, [line])
        assert (rollout.end, rollout.reward) == (RolloutEnd.TERMINAL, 1.0)
        assert rollout.messages[-1]["content"] == "a[image]b"


@pytest.mark.parametrize("error", ["not_found", "tool_raised"])
def test_an_error_that_repeats_the_mark_is_text(folders: dict[str, str], error: str) -> None:
    """A model can sample the mark as a tool's name or argument, which many errors repeat."""
    folder, result = folders["qwen3-vl"], ToolResult(f"no '{M}'", error=error)
    seen = ToolResult(f"y{M}", images=encoded(picture(64, 64)))
    room = PictureRoom("Go.", (), {"see": [result, seen]})
    rollout, policy = roll(folder, room, [call("see") * 2, "Done."])
    assert rollout.end is RolloutEnd.ANSWERED
    assert "no '\ufffd'" in seeing_chat(folder).codec.decode(policy.prompts[1])
    token = ImageReader.of(folder, RolloutSettings()).token
    assert _runs(policy.prompts[1], token) == [p.image.tokens for p in rollout.images] == [4]
    room = PictureRoom("Go.", (), {})
    room._terminal = [result, ToolResult("Right.", reward=1.0, finished=True)]
    rollout, _ = roll(folder, room, ["One.", "Two."])
    assert rollout.end is RolloutEnd.TERMINAL


def test_a_sampled_placeholder_ends_the_rollout(folders: dict[str, str]) -> None:
    folder = folders["qwen3-vl"]
    room = PictureRoom(M, encoded(picture(64, 64)), {"see": []})
    token = ImageReader.of(folder, RolloutSettings()).token

    class Stops(Policy):
        async def __call__(self, *args: Any, **more: Any) -> Generation:
            found = await super().__call__(*args, **more)
            return replace(found, tokens_N=np.array([5, token], np.int32), logprobs_N=found.logprobs_N[:2])

    chat = seeing_chat(folder)
    policy = Stops(chat, ["ab"])
    prepared = context(room, policy, chat, images=ImageReader.of(folder, RolloutSettings()))
    rollout = asyncio.run(run_rollout(prepared, request()))
    assert rollout.end is RolloutEnd.LENGTH
    assert token in policy.samplings[0].stop_token_ids
    assert rollout.tokens_T[-1] == token and rollout.loss_mask_T[-1]
    assert len(rollout.images) == 1


def test_answers_keep_images_for_models_that_see_and_report_them_for_others() -> None:
    blocks = [
        {"text": f"a{M}"},
        {"text": "b"},
        {"type": "image", "data": "QQ==", "mimeType": "image/png"},
        {"text": "c"},
    ]
    kinds: list[str] = []
    kept = answers.AnswerImages(kinds.append, kept=True)
    assert answers.text_of(blocks, "prompt", kept) == f"a\ufffd\nb{M}c"
    assert (kept.data, kinds) == (["QQ=="], [])
    left = answers.AnswerImages(kinds.append, kept=False)
    placeholder = answers.IMAGE_PLACEHOLDER.format(kind="image/png")
    assert answers.text_of(blocks, "prompt", left) == f"a{M}\nb\n{placeholder}\nc"
    assert (left.data, kinds) == ([], ["image/png"])
    output = {"ok": True, "output": {"blocks": blocks[1:], "reward": 1.0}}
    kept = answers.AnswerImages(kinds.append, kept=True)
    assert answers.tool_result(output, "call", kept).images == ("QQ==",)


@pytest.mark.parametrize(("name", "sees"), [("qwen2.5-vl", True), ("qwen2.5-vl", False)])
def test_agents_see_unless_told_otherwise(folders: dict[str, str], name: str, sees: bool) -> None:
    config = Config.model_validate(
        {
            "environments": {"local": {"serve": "package.module:Class"}},
            "rollout": {"max_images": 3 if sees else 0},
        }
    )
    agent = load_agent(config, folders[name])
    assert (agent.images is not None) == sees
    assert agent.chat.image_text == ("<|vision_start|><|image_pad|><|vision_end|>" if sees else None)


# --- the engine -----------------------------------------------------------------------------------


class Engine:
    """A CPU engine without HTTP: requests and answers are bytes on the wire."""

    def __init__(self, folder: str, *, images: bool = True) -> None:
        model = load_model(folder, dtype="float32", load_format="auto", seed=0, trust_remote_code=False)
        processor = ImageProcessor(folder) if images else None
        self.slots = SlotModel(model, 3, 900, images=processor)
        self.batcher = Batcher(self.slots)
        self.token = int(model.config.image_token_id)
        self.limits = Limits(self.slots.vocabulary, 900, False, processor, self.token)

    def generate(
        self, *wanted: tuple[list[int], tuple[PlacedImage, ...]], tokens: int = 5
    ) -> list[Generation]:
        return asyncio.run(self._generate(wanted, tokens))

    async def _generate(self, wanted: Any, tokens: int) -> list[Generation]:
        requests = []
        for n, (ids, images) in enumerate(wanted):
            sampling = Sampling(max_new_tokens=tokens, seed=n)
            body = generate_body(ids, sampling, rid=str(n), routes_start=None, images=images)
            (parsed,), _ = parse_generate(orjson.loads(body), self.limits, 0)
            parsed.params = replace(parsed.params, ignore_eos=True)
            requests.append(parsed)
            self.batcher.submit(parsed)
        while self.batcher.busy:
            self.batcher.step()
        found = []
        for parsed, (ids, images) in zip(requests, wanted, strict=True):
            parsed.weight_version = "0"
            data = orjson.dumps(_answer(parsed, 0.0))
            found.append(
                read_generation(data, "engine", prompt_tokens=len(ids), routes_start=None, route_shape=None,
                                vocabulary=None, images=bool(images))
            )  # fmt: skip
        return found


def plain(model: Any, folder: str, ids: list[int], images: tuple[PlacedImage, ...], n: int) -> torch.Tensor:
    """Log-probabilities of the last ``n`` tokens by the model's own forward pass and positions."""
    inputs: dict[str, Any] = {}
    if images:
        pixels, grids = ImageProcessor(folder).pixel_values([p.image for p in images])
        inputs = {"pixel_values": torch.from_numpy(pixels), "image_grid_thw": torch.from_numpy(grids)}
        seen = torch.zeros(1, len(ids), dtype=torch.int)
        for p in images:
            seen[0, p.start : p.end] = 1
        inputs["mm_token_type_ids"] = seen[:, :-1]
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1], use_cache=False, **inputs).logits[0]
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[-n:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_engine_equals_transformers(folders: dict[str, str], name: str) -> None:
    """Prompts of several pieces, images that differ in pixels only, and turns that go on from a cache."""
    folder = folders[name]
    engine, processor = Engine(folder), ImageProcessor(folder)
    rng = np.random.default_rng(0)

    def prompt(*sizes: tuple[int, int, int]) -> tuple[list[int], tuple[PlacedImage, ...]]:
        seen = [processor.fitted(picture(*size)) for size in sizes]
        ids = [257, 7]
        for _ in seen:
            ids += [259, engine.token, 260, *rng.integers(0, 256, 9).tolist()]
        tokens, placed = expanded(ids, seen, engine.token)
        return tokens, tuple(placed)

    first = [
        prompt((90, 90, 1)),
        prompt((90, 90, 2)),
        prompt((800, 700, 3), (60, 200, 4)),
        ([257, 7, 3, 4], ()),
    ]
    assert len(first[2][0]) > 560  # more than one piece
    assert first[0][0][:10] == first[1][0][:10]  # the same ids up to and within the images
    generations = engine.generate(*first)
    model: Any = load_model(folder, dtype="float32", load_format="auto", seed=0, trust_remote_code=False)
    again = []
    for (ids, images), found in zip(first, generations, strict=True):
        whole = [*ids, *found.tokens_N.tolist()]
        expected = plain(model.eval(), folder, whole, images, len(found.tokens_N))
        assert np.abs(found.logprobs_N - expected.numpy()).max() < 1e-4
        more, placed = prompt((64, 130, 9))
        placed = tuple(PlacedImage(p.image, p.start + len(whole)) for p in placed)
        again.append(([*whole, *more], (*images, *placed)))
    for (ids, images), found in zip(again, engine.generate(*again), strict=True):
        whole = [*ids, *found.tokens_N.tolist()]
        expected = plain(model, folder, whole, images, len(found.tokens_N))
        assert np.abs(found.logprobs_N - expected.numpy()).max() < 1e-4


def test_the_engine_refuses_what_it_cannot_read(folders: dict[str, str]) -> None:
    folder = folders["qwen3-vl"]
    engine = Engine(folder)
    image = ImageProcessor(folder).fitted(picture(64, 64))
    token = engine.token

    def parse(ids: Any, data: Any, limits: Limits = engine.limits) -> None:
        async def run() -> None:
            parse_generate({"input_ids": ids, "image_data": data}, limits, 0)

        asyncio.run(run())

    good = encoded(image.png)[0]
    for ids, data, problem in (
        ([1, 2], [good], "0 placeholders for 1 images"),
        ([1, token], [encoded(picture(65, 64))[0]], "not of a size that the model sees"),
        ([1, token], ["%%"], "image_data"),
        ([1, token], [encoded(b"x")[0]], "not a PNG"),
        ([[1, token], [1, token]], [good], "for one prompt"),
    ):
        with pytest.raises(BadRequest, match=problem):
            parse(ids, data)
    with pytest.raises(BadRequest, match="does not see images"):
        parse([1, token], [good], replace(engine.limits, images=None))


def test_an_engine_that_reads_other_tokens_is_an_error() -> None:
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-1.0, 5, None]],
        "completion_tokens": 1,
    }
    data = orjson.dumps({"meta_info": {**meta, "prompt_tokens": 11, "weight_version": "0"}})
    options: dict[str, Any] = {"routes_start": None, "route_shape": None, "vocabulary": None}
    assert read_generation(data, "e", prompt_tokens=12, **options).prompt_tokens == 12
    with pytest.raises(EngineUnavailable, match="it read 11 tokens where a prompt with images has 12"):
        read_generation(data, "e", prompt_tokens=12, images=True, **options)


# --- files ----------------------------------------------------------------------------------------


def test_files_keep_images_and_share_those_of_one_prompt(folders: dict[str, str], tmp_path: Path) -> None:
    room = PictureRoom(f"a{M}b{M}", encoded(picture(64, 64, 1), picture(90, 64, 2)))
    rollout, _ = roll(folders["qwen3-vl"], room, ["Yes."])
    text = replace(rollout, id="3.2", images=())
    same = replace(rollout, id="3.3")
    path = tmp_path / "group_3.h5"
    write_rollouts(path, [rollout, text, same])
    found = read_group(path)
    assert [r.images for r in found] == [rollout.images, (), rollout.images]
    assert read_arrays(str(path), 2)["images"] == rollout.images
    with RolloutFile(path) as record:
        size = record._read("image_bytes", slice(None)).size
    assert size == sum(len(p.image.png) for p in rollout.images)
    assert isinstance(found[0].images[0].image, Image)


def test_a_begun_rollout_goes_on_only_with_the_same_images(folders: dict[str, str]) -> None:
    folder = folders["qwen3-vl"]
    room = PictureRoom(M, encoded(picture(64, 64, 1)))
    begun, _ = roll(folder, room, [("abc", FinishReason.ABORT)], stopping=lambda: True)
    assert begun.end is RolloutEnd.ABORTED
    for seed, restored in ((1, True), (2, False)):
        chat = seeing_chat(folder)
        policy = Policy(chat, ["def"])
        room = PictureRoom(M, encoded(picture(64, 64, seed)))
        prepared = context(room, policy, chat, images=ImageReader.of(folder, RolloutSettings()))
        rollout = asyncio.run(run_rollout(prepared, replace(request(), begun=begun)))
        assert ("abc" in chat.codec.decode(rollout.tokens_T.tolist())) == restored
