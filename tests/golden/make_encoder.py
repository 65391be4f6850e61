"""Makes `encoder/` again: a tiny random BERT with a WordPiece tokenizer, in hub format, and embeddings of a few texts by each pooling.

    python make_encoder.py OUTPUT

Needs torch, transformers (5.24 made the folder here) and tokenizers. `expected.json` holds the normalised embeddings in float32.
"""

import json
import pathlib
import sys

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

TEXTS = ["the cat sat on the mat.", "a", "", "naïve café at 3.14", "words " * 60]


def tokenizer():
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + [str(d) for d in range(10)] + list(".,;:!?'\"-()")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "mat", "word"]
    vocab = words + letters + ["##" + c for c in letters]
    made = Tokenizer(models.WordPiece({w: i for i, w in enumerate(vocab)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.enable_truncation(8)
    made.enable_padding(length=8)
    return made, len(vocab)


def pooled(states, mode):
    return dict(cls=states[0], mean=states.mean(0), max=states.max(0).values, mean_sqrt_len=states.sum(0) / len(states) ** 0.5)[mode]


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    made, size = tokenizer()
    made.save(str(folder / "tokenizer.json"))
    torch.manual_seed(5)
    config = transformers.BertConfig(vocab_size=size, hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=40, max_position_embeddings=48)
    model = transformers.BertModel(config, add_pooling_layer=False).float().eval()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn_like(value) * 0.3 + (value if value.dim() == 1 else 0))
    model.save_pretrained(folder)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 24, "pooling_mode_mean_tokens": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32}))
    made.no_padding()
    made.enable_truncation(32)
    expected = []
    for text in TEXTS:
        with torch.no_grad():
            states = model(torch.tensor([made.encode(text).ids])).last_hidden_state[0]
        norm = {mode: torch.nn.functional.normalize(pooled(states, mode), dim=0).tolist() for mode in ("cls", "mean", "max", "mean_sqrt_len")}
        expected.append(dict(text=text, tokens=len(states), **norm))
    (folder / "expected.json").write_text(json.dumps(expected))


main()
