//! Scoring speed, cold and warm, and a peer beside it.
//!
//! `RIGHT_RESET_BENCH_DATA` names a JSONL file with `id` and `text` (default: the demo corpus). `RIGHT_RESET_PEER` is the beginning of a
//! command that takes `MODEL.gguf DATA.jsonl --dtype float32 --edges EDGES.jsonl` and ends with a JSON line that holds `tokens_per_s`.
#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use futures::StreamExt;
use right_reset::model::ops::Device;
use right_reset::model::{self, Load, Tap};
use right_reset::pipeline::spec::Pipeline;
use right_reset::pipeline::{Operator, Scorer};
use right_reset::score::{Document, Engine, EngineOptions, Positions, Prefix, Readouts, ScoreSpec};
use right_reset::text::{EdgePolicy, find_edges};

fn main() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let data = std::env::var_os("RIGHT_RESET_BENCH_DATA").map_or_else(|| root.join("pipelines/demo/records.jsonl"), PathBuf::from);
    let models = model::models_dir(std::env::var_os("RIGHT_RESET_MODELS").map(PathBuf::from).as_deref());
    let found = model::resolve("smollm2-135m", &models).expect("run `make model` first");
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    println!("data {}, {threads} threads", data.display());

    let tokenizer = model::load_tokenizer(&found.path).unwrap();
    let mut texts = Vec::new();
    let mut documents = Vec::new();
    let mut edges_file = String::new();
    for line in std::fs::read_to_string(&data).unwrap().lines() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        let text = row["text"].as_str().unwrap().to_owned();
        let tokens = tokenizer.encode(&text).unwrap();
        let found = find_edges(&text, &tokens, EdgePolicy::default());
        let edges: Vec<u32> = found.edges.iter().filter(|e| e.is_candidate()).map(|e| e.token.0).collect();
        for token in &edges {
            edges_file += &format!("{}\n", serde_json::json!({ "doc_id": row["id"], "token": token }));
        }
        documents.push(Document { ids: tokens.ids, edges });
        texts.push(text);
    }
    let tokens: usize = documents.iter().map(|d| d.ids.len()).sum();
    let edges: usize = documents.iter().map(|d| d.edges.len()).sum();

    let trunk = model::load_trunk(&found.path, Load { depth: 22, extra: 0, head: false, device: Device::Cpu }).unwrap();
    let spec = ScoreSpec {
        stages: Vec::new(),
        window: 24,
        skip: 1,
        readouts: Readouts::rr(Tap::Layer(22)),
        positions: Positions::Original,
        prefix: Prefix::Tokens(vec![]),
        bos: None,
        context: 8192,
    };
    let cold = || {
        let engine = Engine::new(Arc::clone(&trunk), spec.clone(), EngineOptions { threads, batch_tokens: 3456, stage_memory: 0 }).unwrap();
        let began = Instant::now();
        let all = futures::executor::block_on(futures::future::join_all(documents.iter().map(|d| engine.score(d.clone()))));
        assert!(all.iter().all(Result::is_ok));
        tokens as f64 / began.elapsed().as_secs_f64()
    };
    let before = cold();
    println!("cold, f32       {before:>12.1} source tokens/s ({tokens} tokens, {edges} edges)");
    if let Some(peer) = std::env::var("RIGHT_RESET_PEER").ok().filter(|p| !p.is_empty()) {
        let dir = tempfile::tempdir().unwrap();
        let edges = dir.path().join("edges.jsonl");
        std::fs::write(&edges, edges_file).unwrap();
        let words: Vec<&str> = peer.split_whitespace().collect();
        let output = Command::new(words[0])
            .args(&words[1..])
            .arg(&found.path)
            .arg(&data)
            .args(["--dtype", "float32", "--edges"])
            .arg(&edges)
            .output()
            .expect("the peer cannot be started");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let last: serde_json::Value = text.lines().last().and_then(|l| serde_json::from_str(l).ok()).expect("the peer printed no figures");
        let theirs = last["tokens_per_s"].as_f64().unwrap();
        let after = cold();
        println!("cold, f32 again {after:>12.1} source tokens/s");
        println!("peer, float32   {theirs:>12.1} source tokens/s: ratio {:.2}", (before + after) / 2.0 / theirs);
    }

    // Warm: the same documents through the whole operator, tokenizer, model and inference left out by the cache.
    let dir = tempfile::tempdir().unwrap();
    let pipeline = Pipeline::parse(&format!("preset = \"paper\"\n[cache]\npath = {:?}\n", dir.path().join("cache"))).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let batch = RecordBatch::try_from_iter([("text", Arc::new(StringArray::from(texts)) as ArrayRef)]).unwrap();
    let scorer = Arc::new(Scorer::new(&pipeline, &models).unwrap());
    let operator = Arc::new(Operator::new(&pipeline, scorer, &batch.schema()).unwrap());
    let pass = |repeats: usize| {
        let input = futures::stream::iter((0..repeats).map(|_| Ok(batch.clone())));
        let began = Instant::now();
        let chunks: usize =
            runtime.block_on(Arc::clone(&operator).run("bench".into(), input).fold(0, async |n, b| n + b.unwrap().num_rows()));
        assert!(chunks > 0);
        (tokens * repeats) as f64 / began.elapsed().as_secs_f64()
    };
    pass(1);
    let mut warm: Vec<f64> = (0..5).map(|_| pass(20)).collect();
    warm.sort_by(f64::total_cmp);
    println!("warm            {:>12.0} source tokens/s: {:.0} times the cold run", warm[2], warm[2] / before);
}
