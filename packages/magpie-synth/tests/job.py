"""A run in a process of its own, to be killed: python job.py FOLDER ROWS PAUSE."""

import sys
import time

from chapbook_shared.lm import ScriptedModel
from magpie_synth import Magpie


class Letters:
    """A tokenizer of single letters, light enough for a process that lives a tenth of a second."""

    chat_template = "letters"
    name_or_path = "letters"
    bos_token = bos_token_id = eos_token = eos_token_id = None
    is_fast = False

    def __init__(self):
        self.added_tokens_decoder = {}

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        text = "".join(f"[{m['role']}]\n{m['content']}\n" for m in messages)
        return text + "[assistant]\n" * add_generation_prompt

    def __call__(self, text, *, add_special_tokens=True):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids, **options):
        return "".join(map(chr, ids))


def build(pause=0.0):
    tokenizer = Letters()

    def say(prompt, sampling):
        time.sleep(pause)
        if tokenizer.decode(prompt).endswith("[assistant]\n"):
            return f"Answer to {len(prompt)}."
        return ["", "Once more?", f"Question {sampling.seed}?"][min(sampling.seed % 5, 2)]

    model = ScriptedModel(complete=say, name="tiny")
    model.stream_block = 4
    return Magpie(model, tokenizer=tokenizer, seed=3)


def run(folder, rows, pause=0.0):
    made = build(pause)
    print("begun", flush=True)
    return made.run(folder, schedule=[(1.0, 1.0, rows // 2), (1.2, 0.995, rows // 2)], turns=2)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    print("done", flush=True)
