#!/usr/bin/env python3
"""Makes the tiny random llama of the plumbing tests and its byte-level tokenizer of 512 entries.

Needs numpy, safetensors and tokenizers; run it in this folder.
"""
import json

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, LAYERS, HEADS, KV, DIM, FF, VOCAB = 32, 4, 4, 2, 8, 64, 512

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
texts = [json.loads(line)["text"] for line in open("../../pipelines/demo/records.jsonl", encoding="utf-8")]
tokenizer.train_from_iterator(
    texts,
    trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<|endoftext|>", "<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
)
# A tokenizer file may ask for these; whoever loads it must switch them off.
tokenizer.enable_truncation(max_length=16)
tokenizer.enable_padding(length=8)
tokenizer.save("tokenizer.json")
assert tokenizer.get_vocab_size() == VOCAB

rng = np.random.default_rng(7)


def normal(*shape, scale):
    return rng.normal(0, scale, shape).astype(np.float32)


tensors = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN, scale=1.0), "model.norm.weight": 1 + normal(HIDDEN, scale=0.1)}
for i in range(LAYERS):
    p = f"model.layers.{i}."
    tensors |= {
        p + "input_layernorm.weight": 1 + normal(HIDDEN, scale=0.1),
        p + "post_attention_layernorm.weight": 1 + normal(HIDDEN, scale=0.1),
        p + "self_attn.q_proj.weight": normal(HEADS * DIM, HIDDEN, scale=0.3),
        p + "self_attn.k_proj.weight": normal(KV * DIM, HIDDEN, scale=0.3),
        p + "self_attn.v_proj.weight": normal(KV * DIM, HIDDEN, scale=0.3),
        p + "self_attn.o_proj.weight": normal(HIDDEN, HEADS * DIM, scale=0.3),
        p + "mlp.gate_proj.weight": normal(FF, HIDDEN, scale=0.3),
        p + "mlp.up_proj.weight": normal(FF, HIDDEN, scale=0.3),
        p + "mlp.down_proj.weight": normal(HIDDEN, FF, scale=0.2),
    }
save_file(tensors, "model.safetensors", metadata={"format": "pt"})
json.dump(
    dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=HIDDEN, intermediate_size=FF, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=DIM, vocab_size=VOCAB, max_position_embeddings=512,
        rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True, hidden_act="silu", bos_token_id=1, eos_token_id=0,
    ),
    open("config.json", "w"),
    indent=1,
)
