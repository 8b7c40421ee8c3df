"""The settings of the figures, and those of the map around them.

arXiv:2605.06446 gives K = 10 and the inputs' distribution, but neither sizes nor targets nor steps.
These were looked for; docs/theory.md says what the search showed.
"""

from dataclasses import replace

from fedfrozen_app.theory.problem import Setting

BASE = Setting(
    teacher="tanh",
    dim=4,
    key_dim=4,
    tokens=4,
    examples=8,
    init_scale=0.3,
    value_l2=1e-3,
    lr=0.02,
    rounds=60,
    local_steps=200,
)
RHOS = (0.0, 0.5, 1.0, 1.5, 2.0)
LOCAL_STEPS = (1, 5, 20, 50, 100, 200)
SHARES = tuple(i / 10 for i in range(11))
MANY_TOKENS = replace(BASE, tokens=16)  # where h is seen to rise again
COMPARISON = replace(BASE, rounds=40)  # four rules at three steps: the figure that takes longest

MAP_RHOS = (0.0, 1.0, 2.0)
MAP: dict[str, Setting] = {
    "base": BASE,
    "teacher softmax": replace(BASE, teacher="softmax"),
    "teacher linear": replace(BASE, teacher="linear"),
    "teacher linear, noise 0.5": replace(BASE, teacher="linear", noise=0.5),
    "teacher none, noise 1": replace(BASE, teacher="none", noise=1.0),
    "noise 0.5": replace(BASE, noise=0.5),
    "E = 20": replace(BASE, local_steps=20),
    "E = 20, T = 600": replace(BASE, local_steps=20, rounds=600),
    "E = 400": replace(BASE, local_steps=400),
    "T = 20": replace(BASE, rounds=20),
    "T = 120": replace(BASE, rounds=120),
    "step 0.005": replace(BASE, lr=0.005),
    "d_k = 2": replace(BASE, key_dim=2),
    "n = 2": replace(BASE, tokens=2),
    "n = 8": replace(BASE, tokens=8),
    "n = 16": MANY_TOKENS,
    "m = 24": replace(BASE, examples=24),
    "d = 8, step 0.01": replace(BASE, dim=8, lr=0.01),
    "phi softmax": replace(BASE, phi="softmax"),
    "lambda 0.1": replace(BASE, value_l2=0.1),
    "Phi starts at 1, step 0.01": replace(BASE, init_scale=1.0, lr=0.01),
    "W_V starts at 1": replace(BASE, value_scale=1.0),
}
