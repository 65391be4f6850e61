//! What several test files share.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{self, Value as Meta};
use candle_core::quantized::{GgmlDType, QTensor};
use safetensors::SafeTensors;
use serde_json::Value;

/// The default model, which `make test` fetches.
pub fn model() -> PathBuf {
    let models = std::env::var_os("RIGHT_RESET_MODELS").map(PathBuf::from);
    let models = right_reset::model::models_dir(models.as_deref());
    right_reset::model::resolve("smollm2-135m", &models).unwrap_or_else(|e| panic!("{e}")).path
}

/// The GGUF name of a hub tensor, and whether GGUF holds it transposed.
fn gguf_name(name: &str) -> (String, bool) {
    let transposed = name.contains(".h.") && name.ends_with(".weight") && (name.contains("attn.c_") || name.contains("mlp.c_"));
    let name = name.trim_start_matches("model.").trim_start_matches("transformer.");
    let mut name = name.replace("layers.", "blk.").replacen("h.", if name.starts_with("h.") { "blk." } else { "h." }, 1);
    for (from, to) in [
        ("embed_tokens", "token_embd"),
        ("wte", "token_embd"),
        ("wpe", "position_embd"),
        ("lm_head", "output"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("ln_1", "attn_norm"),
        ("ln_2", "ffn_norm"),
        ("ln_f", "output_norm"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("attn.c_attn", "attn_qkv"),
        ("attn.c_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("mlp.c_fc", "ffn_up"),
        ("mlp.c_proj", "ffn_down"),
    ] {
        name = name.replace(from, to);
    }
    (if name == "norm.weight" { "output_norm.weight".into() } else { name }, transposed)
}

/// Writes the model of a hub directory as a GGUF file, with more metadata, which goes before the model's own.
pub fn write_gguf(dir: &Path, path: &Path, more: &[(String, Meta)]) {
    let config: Value = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
    let architecture = config["model_type"].as_str().unwrap();
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let hub = SafeTensors::deserialize(&bytes).unwrap();
    let number = |names: &[&str]| names.iter().find_map(|n| config[*n].as_u64()).map(|v| v as u32);
    let (heads, kv) = (number(&["num_attention_heads", "n_head"]).unwrap(), number(&["num_key_value_heads", "n_head"]).unwrap());
    let mut tensors = Vec::new();
    for (name, view) in hub.tensors() {
        let (short, transposed) = gguf_name(&name);
        let values: Vec<f32> = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let mut tensor = candle_core::Tensor::from_vec(values, view.shape(), &candle_core::Device::Cpu).unwrap();
        if transposed {
            tensor = tensor.t().unwrap().contiguous().unwrap();
        }
        // GGUF files of llama have queries and keys in the interleaved layout.
        let of_heads = if short.contains("attn_q.") { heads } else { kv } as usize;
        if architecture == "llama" && (short.contains("attn_q.") || short.contains("attn_k.")) {
            let (rows, width) = (view.shape()[0], view.shape().get(1).copied().unwrap_or(1));
            let split = tensor.reshape((of_heads, 2, rows / of_heads / 2, width)).unwrap().transpose(1, 2).unwrap();
            tensor = split.contiguous().unwrap().reshape(view.shape()).unwrap();
        }
        tensors.push((short, QTensor::quantize(&tensor, GgmlDType::F32).unwrap()));
    }
    let mut meta = more.to_vec();
    meta.push(("general.architecture".to_owned(), Meta::String(architecture.into())));
    let mut set = |key: &str, names: &[&str]| {
        meta.extend(number(names).map(|value| (format!("{architecture}.{key}"), Meta::U32(value))));
    };
    set("embedding_length", &["hidden_size", "n_embd"]);
    set("feed_forward_length", &["intermediate_size"]);
    set("block_count", &["num_hidden_layers", "n_layer"]);
    set("attention.head_count", &["num_attention_heads", "n_head"]);
    set("attention.head_count_kv", &["num_key_value_heads"]);
    set("attention.key_length", &["head_dim"]);
    set("rope.dimension_count", &["head_dim"]);
    set("context_length", &["max_position_embeddings", "n_positions"]);
    for (key, name) in [("attention.layer_norm_rms_epsilon", "rms_norm_eps"), ("attention.layer_norm_epsilon", "layer_norm_epsilon")] {
        meta.extend(config[name].as_f64().map(|v| (format!("{architecture}.{key}"), Meta::F32(v as f32))));
    }
    let theta = config["rope_parameters"]["rope_theta"].as_f64().or(config["rope_theta"].as_f64());
    meta.extend(theta.map(|v| (format!("{architecture}.rope.freq_base"), Meta::F32(v as f32))));
    let mut keys = std::collections::HashSet::new();
    meta.retain(|(key, _)| keys.insert(key.clone()));
    let meta: Vec<(&str, &Meta)> = meta.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(k, v)| (k.as_str(), v)).collect();
    gguf_file::write(&mut std::fs::File::create(path).unwrap(), &meta, &tensors).unwrap();
}

/// Writes the tiny model as a GGUF file with its tokenizer and a chat template: an instruction model that answers at random.
pub fn write_tiny_chat(path: &Path, context: u32) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tiny");
    let tokenizer: Value = serde_json::from_slice(&std::fs::read(dir.join("tokenizer.json")).unwrap()).unwrap();
    let mut vocabulary: Vec<(&String, u64)> =
        tokenizer["model"]["vocab"].as_object().unwrap().iter().map(|(token, id)| (token, id.as_u64().unwrap())).collect();
    vocabulary.sort_by_key(|(_, id)| *id);
    let tokens = vocabulary.iter().map(|(token, _)| Meta::String((*token).clone())).collect();
    let merge = |pair: &Value| Meta::String(format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()));
    let merges = tokenizer["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
    let template = "{{ bos_token }}{% for message in messages %}\n{{ message['role'] }}: {{ message.content.strip() }}\n{% endfor %}\n\
                    {% if add_generation_prompt %}answer:{% endif %}";
    let text = |text: &str| Meta::String(text.into());
    let more = [
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text("gpt-2")),
        ("tokenizer.ggml.tokens", Meta::Array(tokens)),
        ("tokenizer.ggml.merges", Meta::Array(merges)),
        ("tokenizer.ggml.token_type", Meta::Array((0..vocabulary.len()).map(|id| Meta::I32(if id < 2 { 3 } else { 1 })).collect())),
        ("tokenizer.ggml.bos_token_id", Meta::U32(1)),
        ("tokenizer.ggml.eos_token_id", Meta::U32(0)),
        ("tokenizer.chat_template", text(template)),
        ("llama.context_length", Meta::U32(context)),
    ];
    write_gguf(&dir, path, &more.map(|(key, value)| (key.to_owned(), value)));
}
