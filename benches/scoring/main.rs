//! Scoring speed, cold and warm, beside what the processor can do and beside a peer.
//!
//! `RIGHT_RESET_BENCH_DATA` names a JSONL file with `id` and `text` (default: the demo corpus). `RIGHT_RESET_PEER` is the beginning of a
//! command that takes `MODEL.gguf DATA.jsonl --dtype float32|bfloat16 --readout rr|lr --batch N --edges EDGES.jsonl` and ends with a JSON line that holds
//! `tokens_per_s`; `RIGHT_RESET_PEER_BATCHES` the batch sizes of which its best counts (default 128). A word after `--` measures the rows
//! whose name has it (`-- standard`), or what comes after the table (`-- scaling`, `-- warm`), and nothing else.
#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

mod peaks;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use futures::StreamExt;
use right_reset::model::ops::{Device, Precision};
use right_reset::model::{self, Load, Tap};
use right_reset::pipeline::spec::Pipeline;
use right_reset::pipeline::{Operator, Scorer};
use right_reset::score::{
    Curves, Document, Engine, EngineOptions, EngineStats, Knots, Positions, Prefix, Readout, Readouts, ScoreSpec, Stage, reach, score_at,
};
use right_reset::segment::{Cut, Limits, open_count, open_damage, percentiles};
use right_reset::text::{EdgePolicy, Tokenizer, find_edges};

/// A way of scoring that is measured.
struct Way {
    name: &'static str,
    spec: ScoreSpec,
    grid: u32,
    /// The readout as the peer knows it, if it can do this.
    peer: Option<&'static str>,
}

/// What an engine made of all documents.
struct Outcome {
    seconds: f64,
    stats: EngineStats,
    /// One number per candidate.
    scores: Vec<f64>,
    /// Document and token of each cut.
    cuts: Vec<(usize, u32)>,
}

fn ways(document: u32) -> Vec<Way> {
    let paper = ScoreSpec {
        stages: Vec::new(),
        window: 24,
        skip: 1,
        readouts: Readouts::rr(Tap::Layer(22)),
        positions: Positions::Original,
        prefix: Prefix::Tokens(vec![]),
        bos: None,
        context: 8192,
    };
    let lr = ScoreSpec { readouts: Readouts { rr: None, lr: true, kl: false }, ..paper.clone() };
    let stages = [(16, 0.5), (48, 0.3), (96, 0.2)].map(|(horizon, keep)| Stage { horizon, keep }).to_vec();
    let standard = ScoreSpec { stages, window: 256, prefix: Prefix::Tokens(vec![document]), ..lr.clone() };
    vec![
        Way { name: "RR, 24 tokens", spec: paper, grid: 8, peer: Some("rr") },
        Way { name: "LR, 24 tokens", spec: lr, grid: 8, peer: Some("lr") },
        Way { name: "standard (LR in stages)", spec: standard, grid: 32, peer: None },
    ]
}

/// Scores all documents and cuts them as the presets do.
fn run(trunk: &Arc<dyn model::Trunk>, spec: &ScoreSpec, documents: &[Document], threads: usize) -> Outcome {
    let options = EngineOptions { threads, batch_tokens: 1024, stage_memory: 1 << 30 };
    let engine = Engine::new(Arc::clone(trunk), spec.clone(), options).unwrap();
    let began = Instant::now();
    let all = futures::executor::block_on(futures::future::join_all(documents.iter().map(|d| engine.score(d.clone()))));
    let seconds = began.elapsed().as_secs_f64();
    let (mut scores, mut cuts) = (Vec::new(), Vec::new());
    let knots = Knots::new(spec.window, spec.skip);
    for (number, (document, found)) in documents.iter().zip(all).enumerate() {
        let readout = if spec.readouts.lr { Readout::Lr } else { Readout::Rr };
        let curves: Curves = found.unwrap().iter().map(|c| c.get(readout).iter().copied()).collect();
        let n = document.ids.len() as u32;
        let after: Vec<u32> = document.edges.iter().map(|b| n - b).collect();
        let reach = reach(&spec.stages, spec.window, &knots, &curves, &after);
        let horizon = spec.stages.first().map_or(spec.window, |s| s.horizon);
        let own: Vec<f32> =
            curves.iter().zip(&after).zip(&reach).map(|((c, &after), &r)| score_at(readout, c, r.min(after), spec.skip, horizon)).collect();
        let kept: Vec<usize> = (0..own.len()).filter(|&i| !own[i].is_nan()).collect();
        let utilities = percentiles(&own);
        let list: Vec<Cut> = kept.iter().map(|&i| Cut { token: document.edges[i], utility: Some(utilities[i]) }).collect();
        let solved = if spec.stages.is_empty() {
            open_count(&list, n, &Limits::default(), 0.95)
        } else {
            let limits = Limits { length_weight: 15.0, ..Limits::default() };
            let damages: Vec<_> = kept.iter().map(|&i| knots.read(curves.get(i), reach[i].min(after[i]))).collect();
            open_damage(&list, n, &limits, 22.0, |i, lens, out| damages[i].of_each(lens, out))
        };
        cuts.extend(solved.cuts.iter().map(|&c| (number, list[c].token)));
        scores.extend(own.iter().map(|s| f64::from(*s)));
    }
    Outcome { seconds, stats: engine.stats(), scores, cuts }
}

fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let pairs: Vec<(f64, f64)> = a.iter().zip(b).filter(|(a, b)| !a.is_nan() && !b.is_nan()).map(|(a, b)| (*a, *b)).collect();
    let n = pairs.len() as f64;
    let (ma, mb) = (pairs.iter().map(|p| p.0).sum::<f64>() / n, pairs.iter().map(|p| p.1).sum::<f64>() / n);
    let sum = |f: &dyn Fn(&(f64, f64)) -> f64| pairs.iter().map(f).sum::<f64>();
    let (va, vb, ab) = (sum(&|p| (p.0 - ma).powi(2)), sum(&|p| (p.1 - mb).powi(2)), sum(&|p| (p.0 - ma) * (p.1 - mb)));
    ab / (va * vb).sqrt()
}

/// Cuts in both over cuts in either.
fn overlap(a: &[(usize, u32)], b: &[(usize, u32)]) -> f64 {
    let both = a.iter().filter(|c| b.contains(c)).count();
    both as f64 / (a.len() + b.len() - both).max(1) as f64
}

/// The peer's source tokens per second at the best of some batch sizes.
fn peer(command: &str, gguf: &Path, data: &Path, dtype: &str, readout: &str, edges: &str) -> f64 {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), edges).unwrap();
    let words: Vec<&str> = command.split_whitespace().collect();
    let batches = std::env::var("RIGHT_RESET_PEER_BATCHES").unwrap_or_else(|_| "128".into());
    let speed = |batch: &str| {
        let output = Command::new(words[0])
            .args(&words[1..])
            .arg(gguf)
            .arg(data)
            .args(["--dtype", dtype, "--readout", readout, "--batch", batch, "--edges"])
            .arg(file.path())
            .output()
            .expect("the peer cannot be started");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let last: serde_json::Value = text.lines().last().and_then(|l| serde_json::from_str(l).ok()).expect("the peer printed no figures");
        last["tokens_per_s"].as_f64().unwrap()
    };
    batches.split(',').map(speed).fold(0.0, f64::max)
}

fn main() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let data = std::env::var_os("RIGHT_RESET_BENCH_DATA").map_or_else(|| root.join("pipelines/demo/records.jsonl"), PathBuf::from);
    let models = model::models_dir(std::env::var_os("RIGHT_RESET_MODELS").map(PathBuf::from).as_deref());
    let found = model::resolve("smollm2-135m", &models).expect("run `make model` first");
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    println!("data {}, {threads} threads", data.display());

    let peaks = peaks::peaks(threads);
    for peak in &peaks {
        println!("peak, {}: {:.0} GFLOP/s", peak.name, peak.per_second / 1e9);
    }
    let peak = |word: &str| peaks.iter().filter(|p| p.name.starts_with(word)).map(|p| p.per_second).fold(0.0, f64::max);

    let tokenizer = model::load_tokenizer(&found.path).unwrap();
    let rows: Vec<serde_json::Value> =
        std::fs::read_to_string(&data).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let texts: Vec<String> = rows.iter().map(|row| row["text"].as_str().unwrap().to_owned()).collect();
    let command = std::env::var("RIGHT_RESET_PEER").ok().filter(|p| !p.is_empty());
    let token = tokenizer.token_id("<|endoftext|>").unwrap();
    let mut cold = 0.0_f64;
    println!(
        "\n| what | precision | source tokens/s | forward tokens per token | share of the peak | peer | over the peer | correlation | same cuts |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let filter = std::env::args().skip(1).find(|a| !a.starts_with('-'));
    let wanted = |name: &str| filter.as_ref().is_none_or(|f| name.contains(f.as_str()));
    for way in ways(token).into_iter().filter(|w| wanted(w.name)) {
        let mut edges_file = String::new();
        let mut documents = Vec::new();
        for (row, text) in rows.iter().zip(&texts) {
            let ids = tokenizer.encode(text).unwrap();
            let found = find_edges(text, &ids, EdgePolicy { grid: way.grid, sentence_ends: true });
            let edges: Vec<u32> = found.edges.iter().filter(|e| e.is_candidate()).map(|e| e.token.0).collect();
            for token in &edges {
                edges_file += &format!("{}\n", serde_json::json!({ "doc_id": row["id"], "token": token }));
            }
            documents.push(Document { ids: ids.ids, edges });
        }
        let tokens: usize = documents.iter().map(|d| d.ids.len()).sum();
        let mut reference: Option<Outcome> = None;
        for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
            let head = way.spec.readouts.lr;
            let load = Load { depth: way.spec.readouts.depth(), extra: 1, head, device: Device::Cpu, precision };
            let trunk = model::load_trunk(&found.path, load).unwrap();
            run(&trunk, &way.spec, &documents[..1], threads);
            // Before the peer and after it: machines change their speed.
            let before = run(&trunk, &way.spec, &documents, threads);
            let theirs = match (&command, way.peer) {
                (Some(command), Some(readout)) => {
                    let dtype = if precision == Precision::F32 { "float32" } else { "bfloat16" };
                    Some(peer(command, &found.path, &data, dtype, readout, &edges_file))
                }
                _ => None,
            };
            let after = run(&trunk, &way.spec, &documents, threads);
            assert!(before.scores.iter().zip(&after.scores).all(|(a, b)| a.to_bits() == b.to_bits()), "the same bits every time");
            let seconds = (before.seconds + after.seconds) / 2.0;
            let speed = tokens as f64 / seconds;
            let forward = after.stats.forward_tokens as f64;
            // Multiplications and additions of linear layers: hidden 576, heads 9 and 3 of 64, feed-forward 1536, vocabulary 49152.
            let block = 2.0 * 576.0 * (2.0 * 576.0 + 2.0 * 192.0 + 3.0 * 1536.0);
            let blocks = if head { 30.0 } else { 22.0 };
            let operations = forward * (block * blocks + if head { 2.0 * 576.0 * 49152.0 } else { 0.0 });
            let (same, cuts) =
                reference.as_ref().map_or((1.0, 1.0), |r| (correlation(&r.scores, &after.scores), overlap(&r.cuts, &after.cuts)));
            println!(
                "| {} | {} | {speed:.0} | {:.2} | {:.2} | {} | {} | {same:.5} | {cuts:.3} |",
                way.name,
                precision.as_str(),
                forward / tokens as f64,
                operations / seconds / peak(precision.as_str()),
                theirs.map_or("-".into(), |t| format!("{t:.0}")),
                theirs.map_or("-".into(), |t| format!("{:.2}", speed / t)),
            );
            cold = if cold == 0.0 { speed } else { cold };
            reference.get_or_insert(after);
        }
    }
    println!();
    if wanted("scaling") {
        scaling(&found.path, ways(token), &tokenizer, &texts, threads);
    }
    if wanted("warm") {
        warm(texts, &models, &tokenizer, cold);
    }
}

/// What a document costs must not depend on how many there are, and the head no more than its operations.
fn scaling(path: &Path, ways: Vec<Way>, tokenizer: &Tokenizer, texts: &[String], threads: usize) {
    let [paper, lr, _] = <[Way; 3]>::try_from(ways).ok().unwrap();
    let documents: Vec<Document> = texts
        .iter()
        .map(|text| {
            let ids = tokenizer.encode(text).unwrap();
            let found = find_edges(text, &ids, EdgePolicy { grid: 8, sentence_ends: true });
            Document { edges: found.edges.iter().filter(|e| e.is_candidate()).map(|e| e.token.0).collect(), ids: ids.ids }
        })
        .collect();
    for precision in [Precision::Bf16, Precision::Int8] {
        let load = Load { depth: usize::MAX, extra: 1, head: true, device: Device::Cpu, precision };
        let trunk = model::load_trunk(path, load).unwrap();
        let states = ScoreSpec { readouts: Readouts::rr(Tap::Final), ..lr.spec.clone() };
        let median = |spec: &ScoreSpec, documents: &[Document]| {
            let mut all: Vec<f64> = (0..3).map(|_| run(&trunk, spec, documents, threads).seconds).collect();
            all.sort_by(f64::total_cmp);
            all[1]
        };
        let (with, without) = (median(&lr.spec, &documents), median(&states, &documents));
        let (blocks, head) = (30.0 * 576.0 * (2.0 * 576.0 + 2.0 * 192.0 + 3.0 * 1536.0), 576.0 * 49152.0);
        let share = head / (blocks + head);
        let name = precision.as_str();
        println!(
            "head, {name}: {:.2} of the time of LR, {:.2} times its share of operations",
            1.0 - without / with,
            (1.0 - without / with) / share
        );
        if precision != Precision::Bf16 {
            continue;
        }
        let once = median(&paper.spec, &documents);
        for times in [2, 4] {
            let more: Vec<Document> = (0..times).flat_map(|_| documents.clone()).collect();
            println!("RR, {name}, {times} times the input: {:.2} times the time", median(&paper.spec, &more) / once);
        }
    }
}

/// The same documents through the whole operator, tokenizer, model and inference left out by the cache.
fn warm(texts: Vec<String>, models: &Path, tokenizer: &Tokenizer, cold: f64) {
    let tokens: usize = texts.iter().map(|text| tokenizer.encode(text).unwrap().ids.len()).sum();
    let dir = tempfile::tempdir().unwrap();
    let pipeline = Pipeline::parse(&format!("preset = \"paper\"\n[cache]\npath = {:?}\n", dir.path().join("cache"))).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let batch = RecordBatch::try_from_iter([("text", Arc::new(StringArray::from(texts)) as ArrayRef)]).unwrap();
    let scorer = Arc::new(Scorer::new(&pipeline, models).unwrap());
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
    println!("warm            {:>12.0} source tokens/s: {:.0} times the cold run", warm[2], warm[2] / cold);
}
