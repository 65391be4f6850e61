//! The study behind the defaults (`docs/method.md`): `make study` with `RIGHT_RESET_STUDY_DATA` naming a folder that holds `records.jsonl`,
//! `streams_calibration.jsonl` and `streams_dev.jsonl`.
#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

mod streams;

use std::path::PathBuf;

use right_reset::model::{self, Encoder};
use streams::Stream;

fn main() {
    let Some(data) = std::env::var_os("RIGHT_RESET_STUDY_DATA").map(PathBuf::from) else {
        println!("RIGHT_RESET_STUDY_DATA names no folder: nothing to study");
        return;
    };
    let read = |name: &str| std::fs::read_to_string(data.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    let work = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/study");
    std::fs::create_dir_all(&work).unwrap();
    let (dev, calibration) = (Stream::read(&read("streams_dev.jsonl")), Stream::read(&read("streams_calibration.jsonl")));
    let encoder = model::resolve("minilm-l6", &model::models_dir(None)).unwrap();
    let used = [dev.clone(), calibration].concat();
    let streams = streams::build(&read("records.jsonl"), &used, &Encoder::load(&encoder.path).unwrap(), 1);
    let lines: Vec<String> = streams.iter().map(|s| s.to_json().to_string()).collect();
    std::fs::write(work.join("streams.jsonl"), lines.join("\n") + "\n").unwrap();
    println!(
        "{} streams, {} records, {} bytes",
        streams.len(),
        streams.iter().map(|s| s.starts.len()).sum::<usize>(),
        streams.iter().map(|s| s.text.len()).sum::<usize>()
    );
}
