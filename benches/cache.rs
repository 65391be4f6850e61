//! The cache at scale: records of many documents, made with the codec and not with a model.
//!
//! `RIGHT_RESET_CACHE_DOCUMENTS` is their number (200,000); the figures of 10,000,000 stand in `docs/cache.md`. The cache is kept in `target/cache-<N>`, so that a second
//! run measures opening and look-ups alone. A document has about 40 edges and curves as the default's stages give them: 1.9 kB in two records.
#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used)]

use std::path::PathBuf;
use std::time::Instant;

use right_reset::cache::{Namespace, ScoreStore, SledStore, encode_curves, encode_edges};
use right_reset::index::{ByteIdx, TokenIdx};
use right_reset::score::Curves;
use right_reset::text::{Edge, EdgeKind, Edges};

fn memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) >> 10
}

fn folder(dir: &std::path::Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok);
    entries.map(|e| if e.path().is_dir() { folder(&e.path()) } else { e.metadata().map_or(0, |m| m.len()) }).sum()
}

fn main() {
    let documents: u64 = std::env::var("RIGHT_RESET_CACHE_DOCUMENTS").ok().map_or(200_000, |n| n.parse().unwrap());
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("target/cache-{documents}"));
    // Some documents; each record of the cache is one of theirs.
    let records: Vec<(Vec<u8>, Vec<u8>)> = (0..64_u32)
        .map(|d| {
            let count = 30 + d % 20;
            let edges =
                (1..=count).map(|i| Edge { token: TokenIdx(i * 17), byte: ByteIdx(u64::from(i * 77)), kind: EdgeKind::Word }).collect();
            let kept = |i: u32| [4, 4, 4, 4, 4, 8, 8, 14, 34, 34][(i % 10) as usize];
            let curves: Curves = (0..count).map(|i| (0..kept(i)).map(move |k| (k * (d + i)) as f32 * 0.37)).collect();
            (encode_edges(&Edges { tokens: count * 17 + 9, edges }), encode_curves(&curves))
        })
        .collect();
    let hash = |i: u64| blake3::hash(&i.to_le_bytes());
    let before = memory();
    let began = Instant::now();
    let store = SledStore::open(&path, None).unwrap();
    let id = |kind: &str| store.namespace(&Namespace::new(kind, [("bench", "cache".to_owned())])).unwrap();
    let (edges, lr) = (id("edges"), id("lr"));
    if store.lookup(&hash(documents - 1), &[lr]).unwrap().get(0).is_none() {
        for i in 0..documents {
            let (e, c) = &records[i as usize % 64];
            store.insert(&hash(i), &[(edges, e), (lr, c)]).unwrap();
            if i % 20_000 == 0 {
                store.flush().unwrap();
            }
            if i % 1_000_000 == 0 && i > 0 {
                println!("{i} documents, {:.0} s, {} MiB of memory", began.elapsed().as_secs_f64(), memory());
            }
        }
        store.flush().unwrap();
        let seconds = began.elapsed().as_secs_f64();
        println!("| written, documents/s | {:.0} |", documents as f64 / seconds);
    }
    drop(store);
    let began = Instant::now();
    let store = SledStore::open(&path, None).unwrap();
    println!("| documents | {documents} |\n| on disk | {:.2} GB |", folder(&path) as f64 / 1e9);
    println!("| opened in | {:.2} s |\n| memory after opening | {} MiB |", began.elapsed().as_secs_f64(), memory() - before);
    for (what, step) in [("first", 7_919_u64), ("again", 7_919)] {
        let count = 200_000.min(documents);
        let began = Instant::now();
        for i in 0..count {
            let number = (i * step * 31) % documents;
            let found = store.lookup(&hash(number), &[edges, lr]).unwrap();
            assert_eq!(found.get(1).map(<[u8]>::len), Some(records[number as usize % 64].1.len()));
        }
        println!("| look-ups in random order, {what}, one thread | {:.0} per second |", count as f64 / began.elapsed().as_secs_f64());
    }
    let began = Instant::now();
    let missing = 100_000;
    (0..missing).for_each(|i| assert!(store.lookup(&hash(u64::MAX - i), &[edges, lr]).unwrap().get(0).is_none()));
    println!("| look-ups of what is not there | {:.0} per second |", missing as f64 / began.elapsed().as_secs_f64());
    println!("| memory after look-ups | {} MiB |", memory() - before);
}
