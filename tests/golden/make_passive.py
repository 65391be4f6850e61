"""Makes `passive.json` beside a checkpoint folder of `arch/`: the scores that remove no prefix, by Transformers in float32.

    python make_passive.py FOLDER...

Needs torch and transformers (5.24 made the files here). Reads the tokens, the window, s and the edges of `expected.json`; layer k of L is floor(0.75 L).
"""

import json
import pathlib
import sys

import torch
import transformers
from torch.nn.functional import cosine_similarity, log_softmax


def main(folder):
    expected = json.loads((folder / "expected.json").read_text())
    ids, window, skip = expected["ids"], expected["W"], expected["s"]
    layer = expected["layers"] * 3 // 4
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True, output_attentions=True, use_cache=False)
    states, embeddings = out.hidden_states[layer][0], out.hidden_states[0][0]
    attention = out.attentions[layer - 1][0].mean(0)
    nll = [float("nan")] + [-log_softmax(out.logits[0, t - 1], -1)[ids[t]].item() for t in range(1, len(ids))]

    def mean(values):
        values = [v for v in values if v == v]
        return sum(values) / len(values) if values else None

    def apart(a, b):
        return 1 - cosine_similarity(a.double(), b.double(), dim=0).item()

    scores = []
    for b in (e["b"] for e in expected["edges"]):
        m = min(window, len(ids) - b)
        here, before, after = mean(nll[max(0, b - window) : b]), mean(nll[max(0, b - 2 * window) : max(0, b - window)]), mean(nll[b : b + m])
        scores.append({
            "b": b,
            "boundary_surprisal": nll[b],
            "window_surprisal": mean(nll[b + skip + 1 : b + m]),
            "ppl_minimum": None if here is None else after - here + (0 if before is None else before - here),
            "attention_isolation": -mean([attention[b + q, :b].sum().item() for q in range(m)]),
            "residual_jump": apart(states[b - 1], states[b]),
            "local_hidden_distance": apart(states[max(0, b - window) : b].mean(0), states[b : b + m].mean(0)),
            "embedding_jump": apart(embeddings[max(0, b - 8) : b].mean(0), embeddings[b : b + min(m, 8)].mean(0)),
        })
    (folder / "passive.json").write_text(json.dumps({"layer": layer, "scores": scores}, indent=1) + "\n")


for name in sys.argv[1:]:
    main(pathlib.Path(name))
