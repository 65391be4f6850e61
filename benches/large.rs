//! A model of four billion parameters, random ones in the shape of Qwen3-4B: how long it loads, what memory it takes, how near to the processor's peak it runs.
//!
//! `RIGHT_RESET_LARGE` names the folder that the model is written to (8 GB; default: `target/qwen3-4b`), `RIGHT_RESET_LARGE_PRECISIONS` what is measured
//! (default: `bf16,int8`).
#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

#[path = "scoring/peaks.rs"]
mod peaks;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rayon::prelude::*;
use right_reset::model::ops::{Device, HeadScratch, Precision};
use right_reset::model::{Batch, Load, Scratch, Tap, load_trunk};

const LAYERS: usize = 36;
const HIDDEN: usize = 2560;
const QUERIES: usize = 32 * 128;
const KEYS: usize = 8 * 128;
const WIDE: usize = 9728;
const VOCAB: usize = 151_936;

fn tensors() -> Vec<(String, Vec<usize>)> {
    let mut all = vec![("model.embed_tokens.weight".to_owned(), vec![VOCAB, HIDDEN]), ("model.norm.weight".to_owned(), vec![HIDDEN])];
    for layer in 0..LAYERS {
        for (name, shape) in [
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("self_attn.q_norm", vec![128]),
            ("self_attn.k_norm", vec![128]),
            ("self_attn.q_proj", vec![QUERIES, HIDDEN]),
            ("self_attn.k_proj", vec![KEYS, HIDDEN]),
            ("self_attn.v_proj", vec![KEYS, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, QUERIES]),
            ("mlp.gate_proj", vec![WIDE, HIDDEN]),
            ("mlp.up_proj", vec![WIDE, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, WIDE]),
        ] {
            all.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    all
}

/// Writes the checkpoint unless it is there.
fn write(dir: &Path) -> u64 {
    let file = dir.join("model.safetensors");
    if !file.exists() {
        std::fs::create_dir_all(dir).unwrap();
        let config = serde_json::json!({
            "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": HIDDEN, "intermediate_size": WIDE, "max_position_embeddings": 40_960, "num_attention_heads": 32,
            "num_hidden_layers": LAYERS, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
            "tie_word_embeddings": true, "vocab_size": VOCAB, "use_sliding_window": false,
        });
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        let (mut header, mut at) = (serde_json::Map::new(), 0);
        for (name, shape) in tensors() {
            let end = at + 2 * shape.iter().product::<usize>();
            header.insert(name, serde_json::json!({ "dtype": "BF16", "shape": shape, "data_offsets": [at, end] }));
            at = end;
        }
        let mut header = serde_json::Value::from(header).to_string();
        header += &" ".repeat(header.len().next_multiple_of(8) - header.len());
        let part = dir.join("model.part");
        let mut out = std::io::BufWriter::new(std::fs::File::create(&part).unwrap());
        out.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        out.write_all(header.as_bytes()).unwrap();
        let mut block = vec![0_u8; 32 << 20];
        for (first, bytes) in (0..at).step_by(block.len()).zip(1_u64..) {
            block.par_chunks_mut(1 << 16).enumerate().for_each(|(i, piece)| {
                let mut state = (bytes << 16 | i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
                for number in piece.as_chunks_mut::<2>().0 {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let value = ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 0.03;
                    *number = ((value.to_bits() >> 16) as u16).to_le_bytes();
                }
            });
            out.write_all(&block[..(at - first).min(block.len())]).unwrap();
        }
        out.flush().unwrap();
        drop(out);
        std::fs::rename(part, &file).unwrap();
    }
    std::fs::metadata(file).unwrap().len()
}

/// A line of `/proc/self/status`, in bytes.
fn memory(word: &str) -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find(|l| l.starts_with(word)).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|n| n.parse::<f64>().ok()).unwrap_or(f64::NAN) * 1024.0
}

fn main() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let dir = std::env::var_os("RIGHT_RESET_LARGE").map_or_else(|| root.join("target/qwen3-4b"), PathBuf::from);
    let words = std::env::var("RIGHT_RESET_LARGE_PRECISIONS").unwrap_or_else(|_| "bf16,int8".into());
    let bytes = write(&dir) as f64;
    // Into the disk cache.
    std::io::copy(&mut std::fs::File::open(dir.join("model.safetensors")).unwrap(), &mut std::io::sink()).unwrap();
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let peaks = peaks::peaks(threads);
    println!("file {:.2} GB, {threads} threads", bytes / 1e9);
    for precision in [Precision::F32, Precision::Bf16, Precision::Int8].into_iter().filter(|p| words.split(',').any(|w| w == p.as_str())) {
        for head in [false, true] {
            let before = memory("VmRSS");
            // The peak from here on.
            let _ = std::fs::write("/proc/self/clear_refs", "5");
            let began = Instant::now();
            let load = Load { depth: usize::MAX, extra: 1, head, device: Device::Cpu, precision };
            let trunk = load_trunk(&dir, load).unwrap();
            println!(
                "{}, {}: loaded in {:.1} s, memory {:.2} of the file's size ({:.2} at most, meanwhile)",
                precision.as_str(),
                if head { "with the head" } else { "without the head" },
                began.elapsed().as_secs_f64(),
                (memory("VmRSS") - before) / bytes,
                (memory("VmHWM") - before) / bytes,
            );
            let mut batch = Batch::default();
            for window in 0..42_u32 {
                batch.push((0..24).map(|i| ((window * 7919 + i * 104_729) % VOCAB as u32, window * 8 + i)));
            }
            let tokens = batch.ids.len();
            let pass = || {
                let states = trunk.forward(&batch, &[Tap::Final], &mut Scratch::default()).unwrap().remove(0);
                if let Some(head) = trunk.head() {
                    head.log_probabilities(&states, &batch.ids, &mut HeadScratch::default()).unwrap();
                }
            };
            let began = Instant::now();
            std::thread::scope(|scope| {
                (0..threads).for_each(|_| {
                    scope.spawn(pass);
                });
            });
            let seconds = began.elapsed().as_secs_f64();
            let blocks = LAYERS * HIDDEN * (2 * QUERIES + 2 * KEYS + 3 * WIDE);
            let operations = 2.0 * (threads * tokens) as f64 * (blocks + if head { HIDDEN * VOCAB } else { 0 }) as f64;
            let shares: Vec<String> = peaks
                .iter()
                .filter(|p| p.name.starts_with(precision.as_str()))
                .map(|p| format!("{:.2} of the peak of {}", operations / seconds / p.per_second, p.name))
                .collect();
            println!(
                "    {:.0} forward tokens/s, {:.0} GFLOP/s: {}",
                (threads * tokens) as f64 / seconds,
                operations / seconds / 1e9,
                shares.join(", ")
            );
        }
    }
}
