//! The parts beside inference: the dynamic program, the edge finder, the cache.
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use right_reset::cache::{Namespace, ScoreStore, SledStore};
use right_reset::score::{Damage, Knots};
use right_reset::segment::{Cut, Limits, fixed_count, open_count, open_damage, percentiles};
use right_reset::text::{EdgePolicy, Tokens, find_edges};

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
    targets = program, edges, cache
}
criterion_main!(benches);
