//! The parts one by one: kernels, the dynamic program, the edge finder, the cache, the Parquet path.
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use criterion::{Criterion, criterion_group, criterion_main};
use right_reset::cache::{Namespace, ScoreStore, SledStore};
use right_reset::io::{ChunkWriter, SinkTarget, SourceReader, discover};
use right_reset::model::ops::{
    Activation, AttentionScratch, AttentionShape, FeedForwardScratch, GatedFeedForward, Head, HeadScratch, Linear, Output, Precision,
    RmsNorm, attention, cosine,
};
use right_reset::pipeline::spec::{Compression, OutputFormat};
use right_reset::score::{Damage, Knots};
use right_reset::segment::{Cut, Limits, fixed_count, open_count, open_damage, percentiles};
use right_reset::text::{EdgePolicy, Tokens, find_edges};

/// Kernels at the sizes of SmolLM2-135M, in f32 but for attention: `--bench scoring` has whole passes in every precision.
fn kernels(c: &mut Criterion) {
    let floats = |n: usize| (0..n).map(|i| (i * 7919 % 1009) as f32 / 1009.0 - 0.5).collect::<Vec<f32>>();
    let (rows, hidden, wide) = (288, 576, 1536);
    let (x, mut out) = (floats(rows * hidden), vec![0.0; rows * 2 * wide]);
    let linear = Linear::pack(hidden, &[floats(960 * hidden).into()], None).unwrap();
    c.bench_function("product, 288 rows of 576 into 960", |b| {
        b.iter(|| linear.forward(black_box(&x), &mut out[..rows * 960], Output::Set).unwrap());
    });
    let weights = [floats(wide * hidden).into(), floats(wide * hidden).into()];
    let layer = GatedFeedForward::pack(hidden, Activation::Silu, weights, None, floats(wide * hidden).into(), None).unwrap();
    let mut scratch = FeedForwardScratch::default();
    c.bench_function("gated feed-forward, 288 rows of 576 through 1536", |b| {
        b.iter(|| layer.add(black_box(&x), &mut out[..rows * hidden], &mut scratch).unwrap());
    });
    for precision in [Precision::F32, Precision::Bf16] {
        let shape = AttentionShape { heads: 9, kv_heads: 3, head_dim: 64, scale: 0.125, window: None, causal: true, precision };
        let mut scratch = AttentionScratch::default();
        for tokens in [24, 1000] {
            let (qkv, mut out) = (floats(tokens * shape.qkv()), vec![0.0; tokens * 576]);
            c.bench_function(&format!("attention, {tokens} tokens, 9 heads of 64, {}", precision.as_str()), |b| {
                b.iter(|| attention(shape, &[], black_box(&qkv), &mut out, &mut scratch));
            });
        }
    }
    let norm = RmsNorm::new(floats(hidden), 1e-5);
    c.bench_function("RMS norm, 288 rows of 576", |b| b.iter(|| norm.forward(black_box(&x), &mut out[..rows * hidden])));
    let head = Head::pack(hidden, &floats(49_152 * hidden).into(), None).unwrap();
    let (targets, mut scratch) = (vec![7; 192], HeadScratch::default());
    c.bench_function("log-probabilities, 192 rows, 49,152 tokens", |b| {
        b.iter(|| head.log_probabilities(black_box(&x[..192 * hidden]), &targets, &mut scratch).unwrap());
    });
    c.bench_function("cosine read-out, 23 positions of 576", |b| {
        b.iter(|| (0..23).map(|i| cosine(&x[i * hidden..][..hidden], black_box(&x[(i + 23) * hidden..][..hidden]))).sum::<f64>());
    });
}

fn parquet(c: &mut Criterion) {
    let dir = tempfile::tempdir().unwrap();
    let texts: Vec<String> =
        (0..10_000).map(|i| format!("row {i}: a plain sentence of some words, none of them long. ").repeat(10)).collect();
    let bytes = texts.iter().map(String::len).sum();
    let numbers: ArrayRef = Arc::new(Int64Array::from_iter_values(0..10_000));
    let batch = RecordBatch::try_from_iter([("text", Arc::new(StringArray::from(texts)) as ArrayRef), ("number", numbers)]).unwrap();
    let path = dir.path().join("rows.parquet");
    let write = || {
        let target = SinkTarget::File(path.clone());
        let mut writer = ChunkWriter::create(target, &batch.schema(), OutputFormat::Parquet, Compression::Zstd).unwrap();
        writer.write(batch.clone(), bytes).unwrap();
        writer.finish().unwrap();
    };
    c.bench_function("Parquet, write 10,000 rows of 600 bytes", |b| b.iter(write));
    let files = discover(&[path.display().to_string()], None, None).unwrap();
    c.bench_function("Parquet, read 10,000 rows of 600 bytes", |b| {
        b.iter(|| {
            let mut reader = SourceReader::open_columns(&files[0], "text", &["number"]).unwrap();
            let mut rows = 0;
            while let Some(batch) = reader.next_batch().unwrap() {
                rows += batch.texts().len();
            }
            assert!(rows == 10_000);
        });
    });
}

fn program(c: &mut Criterion) {
    // A document of a million tokens with 150,000 candidates.
    let scores: Vec<f32> = (0..150_000_u64).map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f32).collect();
    let utilities = percentiles(&scores);
    let cuts: Vec<Cut> = utilities.iter().enumerate().map(|(i, &u)| Cut { token: i as u32 * 6 + 5, utility: Some(u) }).collect();
    let limits = Limits::default();
    c.bench_function("percentiles, 150,000 scores", |b| b.iter(|| percentiles(black_box(&scores))));
    c.bench_function("open count, 1,000,000 tokens, 150,000 candidates", |b| {
        b.iter(|| open_count(black_box(&cuts), 1_000_000, &limits, 0.95))
    });
    let knots = Knots::new(128, 1).with_roots([128], limits.max);
    let curves: Vec<Vec<f32>> = scores.iter().map(|s| (0..18).map(|i| (i as f32).sqrt() * (5.0 + s / 4e6)).collect()).collect();
    let damages: Vec<Damage<'_>> = curves.iter().map(|curve| knots.read(curve, 128)).collect();
    c.bench_function("chunk damage, 1,000,000 tokens, 150,000 candidates", |b| {
        b.iter(|| open_damage(black_box(&cuts), 1_000_000, &limits, 20.0, |i, lens, out| damages[i].of_each(lens, out)))
    });
    let few = &cuts[..1500];
    c.bench_function("fixed count, 10,000 tokens, 1,500 candidates, 50 chunks", |b| {
        b.iter(|| fixed_count(black_box(few), 10_000, &limits, 50).unwrap());
    });
}

fn edges(c: &mut Criterion) {
    let text = "A plain sentence of some words, none of them long. Another one follows it!\n".repeat(2000);
    let mut spans = Vec::new();
    let mut start = 0;
    for (at, _) in text.match_indices(' ') {
        spans.push((start, at));
        start = at;
    }
    spans.push((start, text.len()));
    let tokens = Tokens { ids: vec![0; spans.len()], spans };
    c.bench_function("edges of 150 kB of text", |b| b.iter(|| find_edges(black_box(&text), &tokens, EdgePolicy::default())));
}

fn cache(c: &mut Criterion) {
    let dir = tempfile::tempdir().unwrap();
    let store = SledStore::open(dir.path(), None).unwrap();
    let namespace = store.namespace(&Namespace::new("rr", [("bench", String::new())])).unwrap();
    let payload = vec![7_u8; 2500];
    for i in 0..20_000_u32 {
        store.insert(&blake3::hash(&i.to_le_bytes()), &[(namespace, &payload)]).unwrap();
    }
    store.flush().unwrap();
    let mut i = 0_u32;
    c.bench_function("look-up among 20,000 records of 2.5 kB", |b| {
        b.iter(|| {
            i = (i + 7919) % 20_000;
            store.lookup(&blake3::hash(&i.to_le_bytes()), &[namespace]).unwrap()
        });
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = kernels, program, edges, cache, parquet
}
criterion_main!(benches);
