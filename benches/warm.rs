//! Warm runs beside a copy of the same data by PyArrow (`pyarrow_copy.py`), and a sweep beside a warm run.
//!
//! `RIGHT_RESET_WARM_MB` is the size of the Parquet file (50); `RIGHT_RESET_PYARROW` a Python with PyArrow, without which the copy is left out. Texts are random
//! sentences of words from this project's own pages. Edges are those of the model's tokenizer; curves are made with the codec, not with the model: their values do not
//! matter to speed, their number and length do. All is kept in `target/warm-<MB>`.
#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{Int64Array, LargeStringArray, RecordBatch};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use rayon::prelude::*;
use right_reset::cache::{ScoreStore, SledStore, encode_curves, encode_edges};
use right_reset::model;
use right_reset::score::{Curves, Knots, Stage, kept_positions, reach};
use right_reset::text::{EdgePolicy, find_edges};

/// Numbers from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

/// Words of this project's pages.
fn words() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let pages = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/method.md"];
    let text: String = pages.iter().map(|p| std::fs::read_to_string(root.join(p)).unwrap()).collect();
    let mut words: Vec<String> = text.split(|c: char| !c.is_ascii_lowercase()).filter(|w| w.len() > 1).map(str::to_owned).collect();
    words.sort();
    words.dedup();
    words
}

/// A document of 300 to 1,700 words.
fn document(words: &[String], number: u64) -> String {
    let mut dice = Dice(number.wrapping_mul(0xD134_2543_DE82_EF95));
    let count = 300 + dice.below(1400);
    let (mut text, mut left) = (String::with_capacity(count * 7), 0);
    for _ in 0..count {
        let word = &words[dice.below(words.len())];
        if left == 0 {
            left = 6 + dice.below(20);
            text.push_str(&word[..1].to_ascii_uppercase());
            text.push_str(&word[1..]);
        } else {
            text.push_str(word);
        }
        left -= 1;
        text.push_str(if left == 0 { ". " } else { " " });
    }
    text.trim_end().to_owned() + "."
}

/// Writes the file, about `megabytes` long, and fills the cache with records of its documents. Gives the number of documents.
fn prepare(work: &Path, megabytes: u64, pipeline: &Path, bin: &Path) {
    let input = work.join("in/texts.parquet");
    if input.exists() {
        return;
    }
    std::fs::create_dir_all(work.join("in")).unwrap();
    let words = words();
    // The namespaces are those of a real run.
    let first: String = (0..2).map(|i| serde_json::json!({ "id": i, "text": document(&words, i) }).to_string() + "\n").collect();
    std::fs::write(work.join("first.jsonl"), first).unwrap();
    run(bin, pipeline, &["--input", work.join("first.jsonl").to_str().unwrap(), "--output", work.join("first").to_str().unwrap()]);
    let store = SledStore::open(&work.join("cache"), None).unwrap();
    let id = |kind: &str| store.namespaces().into_iter().find(|(_, n)| n.kind == kind).unwrap().0;
    let (edges_of, curves_of) = (id("edges"), id("lr"));
    let tokenizer = model::load_tokenizer(&model::resolve("smollm2-135m", &model::models_dir(None)).unwrap().path).unwrap();
    let stages = [(16, 0.5), (48, 0.3), (96, 0.2)].map(|(horizon, keep)| Stage { horizon, keep });
    let knots = Knots::new(256, 1);

    let properties = WriterProperties::builder().set_compression(Compression::ZSTD(ZstdLevel::default())).build();
    let schema = RecordBatch::try_from_iter([
        ("id", Arc::new(Int64Array::from(vec![0])) as arrow::array::ArrayRef),
        ("text", Arc::new(LargeStringArray::from(vec![""]))),
    ])
    .unwrap()
    .schema();
    let part = work.join("texts.part");
    let mut writer = ArrowWriter::try_new(File::create(&part).unwrap(), Arc::clone(&schema), Some(properties)).unwrap();
    let mut number = 2;
    while (writer.bytes_written() as u64) < megabytes << 20 {
        let numbers: Vec<u64> = (number..number + 2048).collect();
        let texts: Vec<String> = numbers.par_iter().map(|&n| document(&words, n)).collect();
        texts.par_iter().enumerate().for_each(|(i, text)| {
            let tokens = tokenizer.encode(text).unwrap();
            let edges = find_edges(text, &tokens, EdgePolicy { grid: 32, sentence_ends: true });
            let after: Vec<u32> = edges.edges.iter().filter(|e| e.is_candidate()).map(|e| edges.tokens - e.token.0).collect();
            let mut dice = Dice(i as u64);
            let whole: Curves = after
                .iter()
                .map(|&after| {
                    let rate = 0.1 + dice.below(1000) as f32 / 500.0;
                    kept_positions(after.min(256), 1).map(move |x| (x as f32).sqrt() * rate * 4.0)
                })
                .collect();
            let reach = reach(&stages, 256, &knots, &whole, &after);
            let of_edge = |((curve, &reach), &after): ((&[f32], &u32), &u32)| {
                let kept = if reach < after.min(256) { knots.kept(reach) } else { curve.len() };
                curve[..kept].to_vec()
            };
            let curves: Curves = whole.iter().zip(&reach).zip(&after).map(of_edge).collect();
            let hash = blake3::hash(text.as_bytes());
            store.insert(&hash, &[(edges_of, &encode_edges(&edges)), (curves_of, &encode_curves(&curves))]).unwrap();
        });
        store.flush().unwrap();
        let ids = Int64Array::from(numbers.iter().map(|&n| n as i64).collect::<Vec<_>>());
        let batch = RecordBatch::try_new(Arc::clone(&schema), vec![Arc::new(ids), Arc::new(LargeStringArray::from(texts))]).unwrap();
        writer.write(&batch).unwrap();
        if number % 8192 == 2 {
            writer.flush().unwrap();
        }
        number += 2048;
    }
    writer.close().unwrap();
    std::fs::rename(part, input).unwrap();
}

fn run(bin: &Path, pipeline: &Path, arguments: &[&str]) -> f64 {
    let began = Instant::now();
    let mut command = Command::new(bin);
    command.arg("run").arg(pipeline).args(["--progress", "none"]).args(arguments).env("RUST_LOG", "error");
    let out = command.output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    began.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let megabytes: u64 = std::env::var("RIGHT_RESET_WARM_MB").ok().map_or(50, |mb| mb.parse().expect("RIGHT_RESET_WARM_MB is a number"));
    let work = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("target/warm-{megabytes}"));
    std::fs::create_dir_all(&work).unwrap();
    let bin = PathBuf::from(env!("CARGO_BIN_EXE_right-reset"));
    let pipeline = work.join("p.toml");
    std::fs::write(&pipeline, "[input]\npaths = [\"in\"]\nid_column = \"id\"\n[cache]\npath = \"cache\"\n[output]\npath = \"out\"\n")
        .unwrap();
    prepare(&work, megabytes, &pipeline, &bin);

    let out = work.join("out");
    let (mut warm, mut copies) = (Vec::new(), Vec::new());
    let (mut rows, mut chunks) = (0, 0);
    let python = std::env::var("RIGHT_RESET_PYARROW").ok();
    for _ in 0..5 {
        warm.push(run(&bin, &pipeline, &["--force"]));
        let summary: serde_json::Value = serde_json::from_slice(&std::fs::read(out.join("_right-reset/summary.json")).unwrap()).unwrap();
        assert_eq!(summary["documents"]["scored"], 0, "everything is in the cache");
        assert_eq!(summary["scoring"]["tokenizer_loaded"], false);
        (rows, chunks) = (summary["rows"]["read"].as_u64().unwrap(), summary["chunks"]["count"].as_u64().unwrap());
        print!("warm run: {:.2} s, {}", warm.last().unwrap(), summary["seconds"]);
        if let Some(python) = &python {
            copies.push(copy(python, &work, chunks));
            print!("; copy: {:.2} s", copies.last().unwrap());
        }
        println!();
    }
    let warm = median(warm);
    let mut sweeps = Vec::new();
    for _ in 0..3 {
        let began = Instant::now();
        let penalties = (1..=20).map(|i| (i * 2).to_string()).collect::<Vec<_>>().join(",");
        let mut command = Command::new(&bin);
        command.arg("sweep").arg(&pipeline).args(["--penalty", &penalties]);
        let swept = command.output().unwrap();
        assert!(swept.status.success(), "{}", String::from_utf8_lossy(&swept.stderr));
        sweeps.push(began.elapsed().as_secs_f64());
    }
    let sweep = median(sweeps);
    let bytes = std::fs::metadata(work.join("in/texts.parquet")).unwrap().len();
    println!("\n{} MB of Parquet, {rows} documents, {chunks} chunks; medians", bytes / 1_000_000);
    println!("| what | seconds | ratio |\n|---|---|---|");
    match python {
        Some(_) => {
            let copy = median(copies);
            println!("| PyArrow copy | {copy:.2} | 1 |\n| warm run | {warm:.2} | {:.2} |", warm / copy);
        }
        None => println!("| warm run | {warm:.2} | |"),
    }
    println!("| sweep over 20 penalties | {sweep:.2} | {:.2} of the warm run |", sweep / warm);
    if python.is_none() {
        println!("\nRIGHT_RESET_PYARROW names no Python with PyArrow: no copy to compare with");
    }
}

/// Seconds of a copy by PyArrow.
fn copy(python: &str, work: &Path, chunks: u64) -> f64 {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/pyarrow_copy.py");
    let mut command = Command::new(python);
    command.arg(script).arg(work.join("in/texts.parquet")).arg(work.join("copy.parquet")).arg(chunks.to_string()).arg(threads.to_string());
    let out = command.output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).trim().parse().unwrap()
}
