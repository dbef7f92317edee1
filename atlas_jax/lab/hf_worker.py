"""transformers' own `generate` behind a pipe: `python -m atlas_jax.lab.hf_worker DIRECTORY`, a line of JSON each way.

First it tells its versions. Then a request is `{"prompt": ids, "max_new_tokens", "ends": ids or null, "threads"}`, and
its answer `{"tokens": ids, "first_s", "total_s"}`. Greedy, float32, one sequence. Runs in an environment of its own,
which need not have this project's JAX.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


class _Clock:
    """A streamer of transformers' that notes when the first token came; the prompt comes before it."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first_s = 0.0
        self._puts = 0

    def put(self, value: object) -> None:
        self._puts += 1
        if self._puts == 2:
            self.first_s = time.perf_counter() - self.began

    def end(self) -> None:
        pass


def main(directory: str) -> None:
    """Answers until the input ends."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, use_safetensors=True
    ).eval()
    say = lambda line: print(json.dumps(line), flush=True)
    say({"torch": torch.__version__, "transformers": transformers.__version__})

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(request["threads"])
        ids = torch.tensor([request["prompt"]])
        config = transformers.GenerationConfig(
            max_new_tokens=request["max_new_tokens"],
            do_sample=False,
            eos_token_id=request["ends"],
            pad_token_id=0,
            use_cache=True,
        )
        clock = _Clock()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock)
        total = time.perf_counter() - clock.began
        return {"tokens": out[0, ids.shape[1] :].tolist(), "first_s": clock.first_s, "total_s": total}

    for line in sys.stdin:
        say(answer(json.loads(line)))


if __name__ == "__main__":
    main(sys.argv[1])
