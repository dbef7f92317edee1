"""Works out `gb10-27b.json`: step times of 16 sequences of Qwen3.6-27B (4 bit) in the Atlas engine on an NVIDIA GB10.

Atlas' project published throughputs and ratios, not step times. From 2026-07-31: 131.4, 181.63, 172.70 and 152.97 tok/s
at 0 to 3 drafts with 1, 1.715, 2.13 and 2.27 tokens a step. From 2026-08-01, a faster build: a flush of 8 steps at one
draft in 1.16 s, and two drafts at 1.170, 1.234 and 1.258 times one for contexts of 64, 128 and 1,024. Steps of 0 and of
3 drafts are scaled to the later build. How the times grow with context at one draft was not published: not at all here.
"""

from pathlib import Path

from atlas_jax.lab.cost import CostTable, StepTime, model_id
from atlas_jax.presets import preset

N = 16
RATIOS = {64: 1.170, 128: 1.234, 1024: 1.258}


def main() -> None:
    earlier = [N * tokens / speed for speed, tokens in ((131.4, 1), (181.63, 1.715), (172.70, 2.13), (152.97, 2.27))]
    one = 1.16 / 8
    plain = one * earlier[0] / earlier[1]
    steps = []
    for context, ratio in RATIOS.items():
        two = one * ratio
        times = (plain, one, two, two * earlier[3] / earlier[2])
        steps += [StepTime(N, k + 1, N * (k + 1), True, context, time) for k, time in enumerate(times)]
        steps.append(StepTime(N, 1, N, False, context, plain))
    CostTable(
        kind="published",
        model=model_id(preset("qwen3.5-27b")),
        device="NVIDIA GB10",
        steps=tuple(steps),
        about=(
            ("source", "throughputs that the Atlas project published, see make_gb10_27b.py"),
            ("name", "27B, 4 bit"),
        ),
    ).save(Path(__file__).with_name("gb10-27b.json"))


if __name__ == "__main__":
    main()
