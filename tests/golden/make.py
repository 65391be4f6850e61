"""Makes the checkpoint folders of `arch/` again, or others of other sizes.

    python make.py OUTPUT [--sizes N] [ARCHITECTURE...]

Needs torch and transformers (5.24 made the folders here). Sizes 0 are those of the folders here; any other number draws head counts,
head sizes, widths, windows, tied or untied heads and biases at random. Each folder holds a tiny random checkpoint in hub format, the
states of every layer of a full pass and of resets, logits (`expected.safetensors`), and RR, LR and KL (`expected.json`), in float32.
"""

import argparse
import json
import pathlib
import random

import torch
import transformers
from safetensors.torch import save_file
from torch.nn.functional import cosine_similarity, log_softmax

WINDOW, SKIP, TOKENS, VOCAB = 12, 1, 44, 160


def configs(draw):
    """Configurations by architecture; `draw(usual, *others)` picks a size."""
    kv = draw(2, 1, 3)
    heads = kv * draw(2, 1, 3)
    layers = draw(4, 2, 5)
    hidden = 2 * heads * draw(4, 2, 3, 5)
    per_head = draw(8, 6, 10, 16)
    common = dict(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=draw(72, 40, 100), num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv, max_position_embeddings=256, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )
    rope = {"rope_type": "default", "rope_theta": draw(1e6, 1e4, 5e5)}
    usual = draw(True, False)
    if not usual:
        rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    yield "llama", transformers.LlamaConfig(**common, head_dim=per_head, rope_parameters=rope, tie_word_embeddings=draw(True, False), attention_bias=draw(False, True), mlp_bias=draw(False, True))
    slides = draw(False, True)
    plain = {"rope_type": "default", "rope_theta": 1e6}
    sliding = dict(use_sliding_window=slides, sliding_window=draw(None, 5, 9) if slides else None, max_window_layers=draw(28, 1, 2))
    yield "qwen2", transformers.Qwen2Config(**common, rope_parameters=plain, tie_word_embeddings=draw(True, False), **sliding)
    yield "qwen3", transformers.Qwen3Config(**common, head_dim=draw(16, 8, 12), rope_parameters=plain, tie_word_embeddings=draw(True, False), attention_bias=draw(False, True), **sliding)
    count = draw(4, 2, 3, 6)
    yield "gpt2", transformers.GPT2Config(vocab_size=VOCAB, n_embd=count * draw(8, 6, 10), n_layer=layers, n_head=count, n_positions=256, n_inner=draw(None, 50), activation_function=draw("gelu_new", "gelu"), scale_attn_by_inverse_layer_idx=draw(False, True), tie_word_embeddings=draw(True, False))
    count = draw(2, 3, 4)
    yield "gpt_neox", transformers.GPTNeoXConfig(vocab_size=VOCAB, hidden_size=count * draw(16, 8, 24), intermediate_size=draw(96, 50), num_hidden_layers=layers, num_attention_heads=count, max_position_embeddings=256, use_parallel_residual=draw(True, False), tie_word_embeddings=draw(False, True), attention_bias=draw(True, False), rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": draw(0.25, 0.5, 1.0)})
    kinds = draw(["sliding_attention", "sliding_attention", "full_attention"] * 2, ["full_attention", "sliding_attention", "sliding_attention", "full_attention"])
    gemma_kv = draw(1, 2)
    yield "gemma4", transformers.Gemma4TextConfig(vocab_size=VOCAB, vocab_size_per_layer_input=VOCAB, hidden_size=hidden, intermediate_size=draw(64, 40), num_hidden_layers=len(kinds), num_attention_heads=gemma_kv * draw(4, 2), num_key_value_heads=gemma_kv, head_dim=draw(8, 12), global_head_dim=draw(16, 20), hidden_size_per_layer_input=draw(8, 5, 0), num_kv_shared_layers=draw(2, 0, 1), layer_types=kinds, sliding_window=draw(12, 4, 7), max_position_embeddings=256, use_double_wide_mlp=draw(True, False), final_logit_softcapping=draw(30.0, 5.0, None), tie_word_embeddings=True, attention_k_eq_v=draw(False, True))
    key_heads, groups = draw(2, 1, 3), draw(2, 1, 3)
    yield "qwen3_5", transformers.Qwen3_5TextConfig(**(common | dict(num_hidden_layers=draw(4, 5, 8))), head_dim=draw(16, 8), linear_num_key_heads=key_heads, linear_num_value_heads=key_heads * groups, linear_key_head_dim=draw(8, 6, 12), linear_value_head_dim=draw(8, 10), linear_conv_kernel_dim=draw(4, 3, 2), tie_word_embeddings=draw(False, True), rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": draw(0.25, 0.5)})


def run(model, ids, positions):
    """Raw states of every layer, final-normed states and logits."""
    base = model.base_model
    layers = base.h if hasattr(base, "h") else base.layers
    last = []
    handle = layers[-1].register_forward_hook(lambda _, __, out: last.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        out = model(input_ids=ids[None], position_ids=positions[None], output_hidden_states=True, use_cache=False)
    handle.remove()
    raw = [h[0] for h in out.hidden_states[:-1]] + [last[0][0]]
    return raw, out.hidden_states[-1][0], out.logits[0]


def make(name, config, out, seed):
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for key, value in list(model.named_parameters()) + list(model.named_buffers()):
            if key.endswith("layer_scalar"):
                value.copy_(torch.rand(1) + 0.5)
            elif value.dim() >= 2:
                value.normal_(0, 0.15)
            elif "A_log" not in key and "inv_freq" not in key and "scale" not in key and value.dim() == 1:
                value.add_(torch.randn_like(value) * 0.1)
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "generation_config.json").unlink(missing_ok=True)
    ids = torch.randint(3, VOCAB, (TOKENS,))
    at = torch.arange(TOKENS)
    full, normed, logits = run(model, ids, at)
    tensors = {f"full.hidden.{k}": h for k, h in enumerate(full)} | {"full.normed": normed, "full.logits": logits}
    edges = []
    for b in sorted(random.Random(seed).sample(range(1, TOKENS - 3), 8)) + [TOKENS - 3]:
        m = min(WINDOW, TOKENS - b)
        reset, reset_normed, reset_logits = run(model, ids[b : b + m], at[b : b + m])
        indexed, *_ = run(model, ids[b : b + m], at[:m])
        tensors |= {f"reset.{b}.hidden.{k}": h for k, h in enumerate(reset)} | {f"reset.{b}.logits": reset_logits}

        def rr(a, r):
            return cosine_similarity(a[b + SKIP : b + m], r[SKIP:], dim=-1).mean().item()

        p, q = (log_softmax(l.double(), -1) for l in (logits[b : b + m - 1], reset_logits[:-1]))
        target = ids[b + 1 : b + m, None]
        damage = (p.gather(1, target) - q.gather(1, target))[SKIP:, 0]
        kl = (p.exp() * (p - q)).sum(-1)[SKIP:]
        edges.append(dict(
            b=b, m=m, rr_final_normed=rr(normed, reset_normed), rr={str(k): rr(full[k], h) for k, h in enumerate(reset)},
            rr_reindexed={str(k): rr(full[k], h) for k, h in enumerate(indexed)}, lr=damage.mean().item(), kl=kl.mean().item(),
        ))
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, folder / "expected.safetensors")
    layers = len(full) - 1
    expected = dict(ids=ids.tolist(), W=WINDOW, s=SKIP, layers=layers, default_layer=int(0.75 * layers), edges=edges)
    (folder / "expected.json").write_text(json.dumps(expected))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--sizes", type=int, default=0)
    parser.add_argument("architectures", nargs="*")
    options = parser.parse_intermixed_args()
    dice = random.Random(options.sizes)

    def draw(usual, *others):
        return usual if options.sizes == 0 else dice.choice((usual, *others))

    for name, config in configs(draw):
        if not options.architectures or name in options.architectures:
            make(name, config, options.output, options.sizes)


main()
