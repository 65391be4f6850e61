"""Writes the damages of `smollm2/*.json` again, in float64: in float32 Transformers itself is off by up to 4e-3 nats with the document token.

    python make_damage.py SmolLM2-135M-Instruct.Q4_1.gguf

Needs torch, transformers (5.25 wrote the files here), gguf and accelerate. Reads the token ids and the edges of each file, whose scores stay.
The token behind the document token can stand halfway to a massive activation, of 1,800 where 80 is usual: there the feed-forward block of
layer 12 makes a relative rounding of 1e-7 one of 1e-4, in any float32 arithmetic.
"""

import json
import pathlib
import sys

import torch
import transformers
from torch.nn.functional import log_softmax

HORIZONS = (8, 24, 48, 96)


def main(model):
    model = pathlib.Path(model)
    model = transformers.AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32, attn_implementation="eager")
    model = model.double().eval()

    def log_probabilities(ids, start):
        with torch.no_grad():
            logits = model(torch.tensor([ids]), position_ids=torch.arange(start, start + len(ids))[None], use_cache=False).logits[0]
        return log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    for path in sorted((pathlib.Path(__file__).parent / "smollm2").glob("*.json")):
        golden = json.loads(path.read_text())
        ids = golden["ids"]
        full = log_probabilities(ids, 0)  # of the tokens from 1 on
        for edge in golden["edges"]:
            b = edge["b"]
            chunk = ids[b : b + max(HORIZONS)]
            for key, prefix in ("none", []), ("document", [golden["document_token"]]):
                first = 0 if prefix else 1
                terms = full[b + first - 1 : b + len(chunk) - 1] - log_probabilities(prefix + chunk, b - len(prefix))
                edge["damage"][key] = {str(h): round(terms[: h - first].sum().item(), 7) for h in HORIZONS}
        golden["note"] = golden["note"].removesuffix("; damage is in float64") + "; damage is in float64"
        path.write_text(json.dumps(golden))


main(*sys.argv[1:])
