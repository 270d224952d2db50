"""SmolLM2's GGUF file through OpenVINO GenAI's own GGUF reader, with the prompts tokenised as everywhere else.

python evidence/openvino_reader.py compares its greedy answers with those of transformers, llama.cpp and an OpenVINO export.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from chapbook_shared.lm import Completion, Usage
from chapbook_shared.lm._base import BatchModel
from chapbook_shared.lm.protocol import Capabilities
from chapbook_shared.local_models import smollm2, smollm2_gguf


class GgufReader(BatchModel):
    """Chat only; one pipeline with continuous batching, float32, a seed for every request."""

    def __init__(self, **hints: str) -> None:
        super().__init__()
        import openvino_genai
        from transformers import AutoTokenizer

        self.genai: Any = openvino_genai
        self.name = "SmolLM2-135M-Instruct"
        self.capabilities = Capabilities(chat=True, seed=True)
        self.tokenizer = AutoTokenizer.from_pretrained(smollm2())
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = 128
        scheduler.cache_size = 1
        hints = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", **hints}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(str(smollm2_gguf()), scheduler, "CPU", hints)
        self.requests = 0

    def _chat_batch(self, requests: list[Any], schema: Any) -> list[Completion]:
        import numpy as np
        import openvino

        rows = []
        for messages, sampling in requests:
            turns = [{"role": m.role, "content": m.text} for m in messages]
            ids = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
            config = self.genai.GenerationConfig()
            config.max_new_tokens = sampling.max_tokens
            config.do_sample = sampling.temperature > 0
            config.temperature, config.top_p, config.top_k = sampling.temperature or 1.0, 1.0, 0
            config.rng_seed = sampling.seed or 0
            config.eos_token_id = self.tokenizer.eos_token_id
            self.requests += 1
            rows.append((len(ids), self.pipeline.add_request(self.requests, openvino.Tensor(np.array([ids])), config)))
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        answers = []
        for prompt_tokens, handle in rows:
            ids = list(handle.read_all()[0].generated_ids)
            ended = bool(ids) and ids[-1] == self.tokenizer.eos_token_id
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            usage = Usage(prompt_tokens, len(ids))
            answers.append(Completion(text, "stop" if ended else "length", self.name, usage, tuple(ids)))
        return answers


def greedy() -> None:
    """How many characters of each greedy answer agree with transformers on the dequantised file."""
    from sample_smollm2 import TOKENS, prompts

    from chapbook_shared.lm import LocalModel, OpenVINOModel, Sampling
    from mmd_equality.sampling import LlamaCpp

    sampling = Sampling(temperature=0, max_tokens=TOKENS)
    texts = [str(prompt.text) for prompt in prompts()]
    local = LocalModel.smollm2()
    expected = [local.chat(text, sampling).text for text in texts]

    def show(name: str, model: Any) -> None:
        found = [model.chat(text, sampling).text for text in texts]
        agree = [
            sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
            for a, b in zip(expected, found, strict=True)
        ]
        print(name, ", ".join(f"{a} of {len(text)}" for a, text in zip(agree, expected, strict=True)), flush=True)

    with LlamaCpp(smollm2_gguf(), context=512, threads=1) as llama:
        show("llama.cpp", llama)
    show("OpenVINO export", OpenVINOModel.smollm2())
    show("OpenVINO's GGUF reader", GgufReader())
    show("the same without dynamic quantisation", GgufReader(DYNAMIC_QUANTIZATION_GROUP_SIZE="0"))


if __name__ == "__main__":
    greedy()
